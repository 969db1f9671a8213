"""`swarm receipts`: what is listed, what is verified, and that nothing untrue passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarm.cli.main import app
from swarm.cli.receipts import MAX_FILE_BYTES, MAX_SHOWN_BAD, check
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.wire.receipts import MAX_DAY, Totals, sign_receipt

US, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
A, B = (NodeId(bytes([n]) * 32) for n in (10, 11))


def text(n_pairs: int, peer: NodeId = A, *, by: Identity = US, day: int = 20_000) -> str:
    totals = Totals(n_rows=n_pairs, n_pairs=n_pairs, weight=500 * n_pairs)
    return sign_receipt(by, peer=peer, period=bytes(8), day=day, totals=totals).text


FORGED = text(5)[:20] + ("B" if text(5)[20] != "B" else "C") + text(5)[21:]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("receipts", *arguments))


def test_totals_are_by_peer_and_backbone_and_old_ones_are_superseded() -> None:
    checked = check([text(5), text(9), text(4, day=20_001), text(7, by=OTHER), text(2, B)])
    assert (checked["n_receipts"], checked["n_superseded"], checked["n_bad"]) == (5, 1, 0)
    of_a = next(peer for peer in checked["peers"] if peer["peer"] == str(A))
    assert (of_a["pairs"], of_a["points"]) == (9 + 4 + 7, 10)
    by = next(each for each in of_a["by"] if each["backbone"] == str(US.node_id))
    assert (by["first_day"], by["last_day"], by["pairs"]) == ("2024-10-04", "2024-10-05", 13)


def test_only_the_backbones_that_are_named_count() -> None:
    (of_a,) = check([text(5), text(7, by=OTHER)], counted=frozenset({OTHER.node_id}))["peers"]
    assert of_a["pairs"] == 7
    assert {each["backbone"]: each["counts"] for each in of_a["by"]} == {
        str(US.node_id): False,
        str(OTHER.node_id): True,
    }


def test_bad_ones_are_numbered_and_add_nothing() -> None:
    checked = check([text(5), FORGED, "nonsense", 7, text(3, B)], expected=A)
    assert [each["number"] for each in checked["bad"]] == [2, 3, 4, 5]
    assert [peer["pairs"] for peer in checked["peers"]] == [5]
    many = check(["x"] * 1000)
    assert (many["n_bad"], len(many["bad"])) == (1000, MAX_SHOWN_BAD)


def test_a_day_without_a_date_breaks_nothing() -> None:
    (peer,) = check([text(5, day=MAX_DAY)])["peers"]
    assert peer["by"][0]["last_day"] == "9999-12-31"


def test_a_file_is_verified_and_the_exit_code_says_whether_all_is_good(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    path.write_text(f"{text(5)}\n{text(9)}\n")
    done = run("verify", str(path), "--json")
    assert (done.exit_code, json.loads(done.stdout)["peers"][0]["pairs"]) == (0, 9)
    assert "2 good, 1 of them superseded; 0 bad." in run("verify", str(path)).stdout
    path.write_text(f"{text(5)}\n{FORGED}\n")
    done = run("verify", str(path))
    assert done.exit_code == 1
    assert "number 2: the receipt's signature is not that of backbone" in done.stdout


def test_what_is_no_file_of_receipts_is_the_users_mistake(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"a" * (MAX_FILE_BYTES + 1))
    for arguments in (
        ("verify",),
        ("verify", str(large)),
        ("verify", str(tmp_path)),
        ("verify", str(large), "--peer", "a"),
    ):
        assert isinstance(run(*arguments).exception, UserError), arguments


def test_this_machines_own_are_listed(home: Path) -> None:
    assert "No receipts yet" in run("ls").stdout
    (home / "state").mkdir(parents=True)
    (home / "state" / f"{A}.receipts").write_text(text(5) + "\n")
    (found,) = json.loads(run("ls", "--json").stdout)["files"]
    assert found["file"].endswith(f"{A}.receipts")
    assert found["peers"][0]["points"] == 2
    assert US.node_id.short in run("ls").stdout
