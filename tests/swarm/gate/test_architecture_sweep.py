"""The sweep lists everybody: who is identical, who differs, and who died of what."""

from __future__ import annotations

import asyncio
import sys

import pytest

from swarm.architectures.recipes import RECIPES, Recipe
from swarm.errors import UserError
from swarm.gate import architecture_sweep
from swarm.gate.architecture_check import ArchitectureReport
from swarm.gate.architecture_sweep import SweepReport, chosen_recipes, explain_crash, sweep

DIES = Recipe(architecture="dies", source="x")


def test_all_and_comma_lists_are_chosen_and_unknown_names_refused() -> None:
    assert chosen_recipes("all") == RECIPES
    assert [recipe.architecture for recipe in chosen_recipes("olmoe, dbrx,olmoe")] == ["olmoe", "dbrx"]
    with pytest.raises(UserError, match="unknown architecture: got newmoe, expected all or some of afmoe"):
        chosen_recipes("olmoe,newmoe")


def test_one_that_dies_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(architecture_sweep, "MODULE", "tests.swarm.gate.dying_check")
    done: list[tuple[int, int]] = []
    recipes = [DIES, *chosen_recipes("olmoe"), Recipe(architecture="talks", source="x")]
    report = asyncio.run(sweep(recipes, lambda _, n, total: done.append((n, total)), n_jobs=2))
    assert [each.name for each in report.architectures] == ["dies", "olmoe", "talks"]
    dead, fine, talker = report.architectures
    assert (dead.status, dead.identical, dead.min_cosine) == ("failed", False, None)
    assert "Q4_K: the process ended with" in dead.reason
    assert "GGML_ASSERT(a == b) failed" in dead.reason
    assert fine.identical
    assert talker.status == "failed"
    assert sorted(done) == [(1, 3), (2, 3), (3, 3)]
    plain = report.to_json()
    assert plain["n_identical"] == 1
    assert {*plain["architectures"][0]} >= {"name", "identical", "min_cosine", "status", "reason"}


def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_sweep, "MODULE", "tests.swarm.gate.dying_check")
    monkeypatch.setattr(architecture_sweep, "TIMEOUT_S", 0.5)
    report = asyncio.run(sweep([Recipe(architecture="hangs", source="x")], lambda *_: None))
    assert report.architectures[0].reason == "not done after 0 s"
    assert sys.executable


def test_a_difference_is_worse_than_a_refusal() -> None:
    failed = ArchitectureReport(name="a", source="a", status="failed")
    differs = ArchitectureReport(name="b", source="b", status="differs")
    assert not SweepReport(architectures=(failed,)).is_silently_wrong
    assert SweepReport(architectures=(failed, differs)).is_silently_wrong


def test_a_crash_is_explained_by_its_assertion_or_its_last_line() -> None:
    lines = [
        "comparing olmoe: F32",
        "comparing olmoe: Q4_K",
        "/src/ggml.c:26: GGML_ASSERT(x) failed",
        "[New LWP 3]",
        "no symbols",
    ]
    assert explain_crash(lines, -6) == "Q4_K: the process ended with -6: ggml.c:26: GGML_ASSERT(x) failed"
    assert explain_crash(["killed"], -9) == "the process ended with -9: killed"
    assert explain_crash([], -11) == "the process ended with -11: no message"
