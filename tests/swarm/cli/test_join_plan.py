"""A volunteer sees what joining takes and is asked once; where nobody can be asked the command itself is the consent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.join_plan import Consent, plan_lines, shortages, write_first_config
from swarm.errors import UserError
from swarm.files import Folders
from swarm.plan.prospect import Prospect

PLAN = Prospect(
    node="m" * 52,
    model="small@00112233",
    publisher="p" * 52,
    experts="experts 12-19 of layers 0-5",
    n_blocks=48,
    slice_bytes=3_000_000,
    n_fetch=40,
    fetch_bytes=2_500_000,
    memory_bytes=153_000_000,
    free_memory_bytes=8_000_000_000,
    free_disk_bytes=9_000_000_000,
    up_bytes_per_token=4600.4,
    down_bytes_per_token=4700.0,
    tokens_per_s=2.0,
    max_upload_bytes_s=2_000_000.0,
    max_download_bytes_s=None,
)


class Person:
    """Somebody at a terminal, or nobody."""

    def __init__(self, folder: Path, *, is_there: bool = True, says: bool = True) -> None:
        self.folders = Folders.below(folder)
        self.is_there = is_there
        self.says = says
        self.n_asked = 0

    async def ask(self, question: str) -> bool:
        self.n_asked += 1
        return self.says

    def decide(self, plan: Prospect, **options: Any) -> tuple[bool, Consent]:
        values: dict[str, Any] = {"is_given": False, "as_json": False}
        consent = Consent(self.folders, is_person_there=lambda: self.is_there, ask=self.ask, **values | options)
        return asyncio.run(consent(plan)), consent  # type: ignore[arg-type]


def larger(**fields: Any) -> Prospect:
    return dataclasses.replace(PLAN, **fields)


def test_the_plan_says_model_publisher_experts_sizes_traffic_and_caps() -> None:
    text = "\n".join(plan_lines(PLAN))
    for part in (
        "small@00112233, published by node pppppppp",
        "experts 12-19 of layers 0-5 (48 blocks)",
        "2.5 MB, each block checked against the manifest, the other 8 blocks are here",
        "153.0 MB, 8.0 GB are free",
        "up to 4.6 kB sent and 4.7 kB received for each token",
        "at the present 2 tokens/s: 794.9 MB and 812.2 MB a day",
        "2.0 MB/s sent",
    ):
        assert part in text, text
    assert "warning" not in text


def test_a_file_of_ones_own_has_no_publisher_and_nothing_to_download() -> None:
    lines = plan_lines(larger(publisher="", n_fetch=0, fetch_bytes=0, free_disk_bytes=None, tokens_per_s=None))
    text = "\n".join(lines)
    assert "from your file" in text
    assert "nothing, all blocks are here" in text
    assert "disk" not in text
    assert "a day" not in text


def test_what_is_not_there_is_warned_of() -> None:
    assert shortages(PLAN) == []
    assert "more memory than is free" in shortages(larger(free_memory_bytes=1000))[0]
    assert "more disk than is free" in shortages(larger(free_disk_bytes=1000))[0]
    assert "warning   more memory" in plan_lines(larger(free_memory_bytes=1000))[-1]


def test_a_person_is_asked_and_a_no_is_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = Person(tmp_path, says=False)
    said, consent = person.decide(PLAN)
    assert (said, person.n_asked, consent.is_first_agreed) == (False, 1, False)
    shown = capsys.readouterr()
    assert "This is what joining takes" in shown.err
    assert shown.out == ""
    person.says = True
    assert person.decide(PLAN)[0], "a no is not remembered"
    assert person.n_asked == 2


def test_a_yes_is_remembered_for_what_is_not_larger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = Person(tmp_path)
    said, consent = person.decide(PLAN)
    assert said
    assert consent.is_first_agreed
    for plan, n_asked in (
        (PLAN, 1),
        (larger(slice_bytes=2_000_000), 1),
        (larger(slice_bytes=4_000_000), 2),
        (PLAN, 2),
        (larger(model="other@44556677"), 3),
    ):
        capsys.readouterr()
        before = person.n_asked
        assert person.decide(plan)[0]
        assert person.n_asked == n_asked
        assert bool(capsys.readouterr().err) is (person.n_asked > before), "what is known is not told again"


def test_yes_beforehand_is_told_the_plan_and_asked_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = Person(tmp_path, says=False)
    said, consent = person.decide(PLAN, is_given=True)
    assert (said, person.n_asked, consent.is_first_agreed) == (True, 0, True)
    assert "download" in capsys.readouterr().err


def test_where_nobody_is_the_command_is_the_consent_and_nothing_is_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = Person(tmp_path, is_there=False, says=False)
    said, consent = nobody.decide(PLAN)
    assert (said, nobody.n_asked, consent.is_first_agreed) == (True, 0, False)
    assert "download" in capsys.readouterr().err
    somebody = Person(tmp_path)
    assert somebody.decide(PLAN)[0]
    assert somebody.n_asked == 1


def test_json_has_the_whole_plan_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = Person(tmp_path, is_there=False)
    for _ in range(2):
        person.decide(PLAN, as_json=True)
        shown = capsys.readouterr()
        found = json.loads(shown.out)
        assert found.pop("event") == "plan"
        assert found == PLAN.as_json()
        assert shown.err == ""


def test_a_damaged_memory_is_asked_again(tmp_path: Path) -> None:
    person = Person(tmp_path)
    person.folders.state.mkdir(parents=True)
    (person.folders.state / "agreed_plans").write_bytes(b"\xff\xfe small@00112233 x\nsmall@00112233 " + b"9" * 5000)
    assert person.decide(PLAN)[0]
    assert person.n_asked == 1


def test_the_first_config_keeps_the_registry_and_shows_how_to_say_more(tmp_path: Path) -> None:
    folders = Folders.below(tmp_path)
    write_first_config(folders, registry='swarm://"x"\\@192.0.2.1:7440')
    text = (folders.config / "config.toml").read_text()
    assert tomllib.loads(text) == {"registry": 'swarm://"x"\\@192.0.2.1:7440', "join": {}}
    write_first_config(folders, registry="another")
    assert (folders.config / "config.toml").read_text() == text, "what is there is the person's"


def test_the_default_registry_is_not_written_down(tmp_path: Path) -> None:
    folders = Folders.below(tmp_path)
    write_first_config(folders, registry=None)
    assert tomllib.loads((folders.config / "config.toml").read_text()) == {"join": {}}


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file")
    with pytest.raises(UserError, match="cannot write"):
        write_first_config(Folders.below(tmp_path), registry=None)
