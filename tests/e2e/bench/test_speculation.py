"""`swarm bench speculation` over real peers: counts that must hold on any machine; speed is the benchmark's own business."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.bench.speculation import SpeculationOptions, measure_speculation
from swarm.bench.testbed import PathOptions
from swarm.errors import UserError
from swarm.wire.rows import parse_wire


def options(tiny_moe: Path, **fields: object) -> SpeculationOptions:
    given = {
        "model": tiny_moe / "model-Q8_0.gguf",
        "source": tiny_moe / "heldout.txt",
        "wire": parse_wire("q8/f16"),
        "paths": PathOptions(),
        "n_peers": 2,
        "n_pieces": 1,
    }
    return SpeculationOptions(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.alone  # the controller judges by time
async def test_adversarial_text_costs_no_rows_and_copying_is_noticed(tiny_moe: Path) -> None:
    """Scenario 7, by counts: how long it takes is the benchmark's to say."""
    paths = PathOptions(rtts_s=(0.005,))
    found = await measure_speculation(
        options(tiny_moe, text="adversarial", n_tokens=40, paths=paths), lambda done, total: None
    )
    assert found["extra_rows_share"] <= 0.02
    assert found["extra_trips_share"] <= 0.02
    assert found["accept_length"] == 1
    assert found["accept_length_after_turn"] >= 2.5


async def test_copied_text_takes_few_round_trips_and_the_text_is_the_same(tiny_moe: Path) -> None:
    paths = PathOptions(rtts_s=(0.01,))
    found = await measure_speculation(
        options(tiny_moe, text="copy", drafter="ngram", paths=paths, n_tokens=60), lambda done, total: None
    )
    assert found["accept_length"] > 3
    assert found["round_trips_per_token"] < 6 / 3
    assert found["first_differences"] == [None]
    assert found["accepted_by"]["ngram"] > 30


async def test_novel_text_is_drafted_by_local_experts(tiny_moe: Path) -> None:
    """On a path so long that drafts pay even where other tests slow the drafting down: the controller judges by time."""
    paths = PathOptions(rtts_s=(0.08,))
    found = await measure_speculation(
        options(tiny_moe, text="novel", drafter="local", local_share=0.75, paths=paths, n_tokens=40),
        lambda done, total: None,
    )
    assert found["accept_length"] > 1.1
    assert found["accepted_by"]["local"] > 5
    assert 0.4 < found["choices_kept_share"] < 1
    assert found["distinct_4gram_share"] > 0.5


async def test_with_a_forced_acceptance_the_accept_length_is_what_it_must_be(tiny_moe: Path) -> None:
    found = await measure_speculation(
        options(tiny_moe, text="copy", forced_acceptance=1.0, n_draft=4, n_tokens=61), lambda done, total: None
    )
    assert found["accept_length"] == pytest.approx(5)
    nothing = await measure_speculation(
        options(tiny_moe, text="copy", forced_acceptance=0.0, n_draft=4, n_tokens=20), lambda done, total: None
    )
    assert nothing["accept_length"] == 1
    assert nothing["extra_rows_share"] == pytest.approx(4, abs=0.7)


async def test_lookahead_guesses_at_every_step_and_changes_no_token(tiny_moe: Path) -> None:
    found = await measure_speculation(options(tiny_moe, drafter="lookahead", n_draft=5), lambda done, total: None)
    assert found["drafted_per_step"] > 4
    assert found["accept_length"] >= 1
    assert found["first_differences"] == [None]


def test_what_cannot_be_measured_is_refused(tiny_moe: Path) -> None:
    with pytest.raises(UserError, match="--local-share"):
        options(tiny_moe, drafter="local")
    with pytest.raises(UserError, match="--draft-model"):
        options(tiny_moe, drafter="model")
    with pytest.raises(UserError, match="expected a drafter"):
        options(tiny_moe, drafter="oracle")
