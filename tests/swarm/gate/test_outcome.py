"""What a run says as a whole; runs over real processes are tests/e2e/test_verify.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from swarm.files import Folders
from swarm.gate.outcome import EXACT, Outcome, VerifyConfig
from swarm.gate.verdict import FormReport
from swarm.gate.verify import PromptReport, VerifyReport
from swarm.wire.rows import Wire, parse_wire

F32, Q8 = parse_wire("f32"), parse_wire("q8")


def config(*wires: Wire, required: tuple[Wire, ...] = (), control: bool = False) -> VerifyConfig:
    return VerifyConfig(
        path=Path("model.gguf"),
        folders=Folders(Path(), Path(), Path()),
        wires=wires,
        required=frozenset(required or wires),
        control=control,
    )


def form(wire: Wire, *reasons: str, identical: bool | None = False) -> FormReport:
    return FormReport(
        wire=wire,
        bytes_per_row=1,
        n_positions=5,
        identical=identical,
        argmax_agreement=1.0,
        clear_agreement=1.0,
        min_cosine=1.0,
        mean_cosine=1.0,
        perplexity_ratio=None,
        reasons=reasons,
    )


def prompts(n_different: int = 0, n_assignments: int = 10) -> VerifyReport:
    report = PromptReport(5, n_positions=5, n_different=n_different, n_same_argmax=5)
    return VerifyReport(prompts=[report], n_assignments=n_assignments, n_assignments_expected=10)


def outcome(settings: VerifyConfig, *forms: FormReport, over: VerifyReport | None = None) -> Outcome:
    return Outcome(settings, prompts=over, forms=forms)


# Verdict


def test_exact_alone_must_be_identical_and_every_pair_counted() -> None:
    good = form(EXACT, identical=True)
    assert outcome(config(EXACT), good, over=prompts()).passed
    assert not outcome(config(EXACT), form(EXACT, "not identical"), over=prompts(n_different=1)).passed
    assert not outcome(config(EXACT), good, over=prompts(n_assignments=9)).passed
    assert not outcome(config(EXACT), good, over=prompts(n_different=1)).passed


def test_other_forms_need_not_be_identical() -> None:
    found = outcome(config(F32), form(F32), over=prompts(n_different=5))
    assert found.passed
    assert found.identical is False


def test_only_required_forms_fail_a_run() -> None:
    settings = config(EXACT, F32, Q8, required=(EXACT, F32))
    exact = form(EXACT, identical=True)
    assert outcome(settings, exact, form(F32), form(Q8, "bad"), over=prompts()).passed
    assert not outcome(settings, exact, form(F32, "bad"), form(Q8), over=prompts()).passed


def test_a_simulation_that_is_not_what_real_peers_compute_fails_the_run() -> None:
    found = outcome(config(F32, Q8), form(F32), form(Q8), over=prompts())
    found.n_shortcut_differences = {F32: 0, Q8: None}
    assert found.is_shortcut_honest
    assert found.passed
    found.n_shortcut_differences = {F32: 0, Q8: 2}
    assert not found.is_shortcut_honest
    assert not found.passed


def test_identical_needs_both_the_swarm_and_the_table() -> None:
    same = form(EXACT, identical=True)
    assert outcome(config(EXACT), same, over=prompts()).identical is True
    assert outcome(config(EXACT), form(EXACT), over=prompts()).identical is False
    assert outcome(config(EXACT), same, over=prompts(n_different=1)).identical is False
    assert outcome(config(Q8), form(Q8, identical=None)).identical is None, "layer by layer nothing is known of stock"


@pytest.mark.parametrize(("n_different", "found"), [(0, False), (3, True)])
def test_a_planted_fault_is_found_when_logits_differ(n_different: int, found: bool) -> None:
    bad = form(EXACT, identical=n_different == 0)
    assert outcome(config(EXACT, control=True), bad, over=prompts(n_different)).fault_found is found
    assert not outcome(config(EXACT), bad, over=prompts(n_different)).fault_found


def test_json_can_be_written_layer_by_layer_and_with_prompts() -> None:
    plain = outcome(config(EXACT), form(EXACT, identical=True), over=prompts()).to_json()
    assert plain["prompts"][0]["n_positions"] == 5
    by_layer = dataclasses.replace(outcome(config(Q8), form(Q8, identical=None)), method="layers").to_json()
    assert "prompts" not in by_layer
    for each in (plain, by_layer):
        json.dumps(each, allow_nan=False)
        assert {"identical", "wires", "passed"} <= each.keys()


# What is measured


def test_a_text_is_needed_unless_exact_is_alone_or_a_fault_is_planted() -> None:
    assert not config(EXACT).needs_table
    assert config(F32).needs_table
    assert config(EXACT, Q8).needs_table
    assert not config(EXACT, Q8, control=True).needs_table
