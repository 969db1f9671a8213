"""Which figures pass, and what a refusal says."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from swarm.dispatch.codecs import codecs_of
from swarm.gate.form_table import GateModel
from swarm.gate.statistics import FormStatistics, StockWindow
from swarm.gate.verdict import DEFAULT_THRESHOLDS, Thresholds, bytes_per_row, judge, read_figure
from swarm.model.spec import ModelSpec
from swarm.wire.rows import RowCodec, parse_wire

F32 = parse_wire("f32")
# Keys of issue "A layer costs one round trip and a few kilobytes" that scripts rely on.
JSON_KEYS = {
    *("wire", "identical", "argmax_agreement", "clear_agreement"),
    *("min_cosine", "mean_cosine", "perplexity_ratio", "passed"),
}


@pytest.fixture(scope="session")
def spec(gate_model: Callable[[str], GateModel]) -> ModelSpec:
    return gate_model("Q4_K_M").spec


def figures(
    *, mean_cosine: float = 1.0, n_same_clear: int = 1000, nll: float = 0.0, n_not_finite: int = 0, n_different: int = 0
) -> FormStatistics:
    found = FormStatistics(
        n_positions=2000,
        n_different=n_different,
        n_not_finite=n_not_finite,
        n_same_argmax=1900,
        n_clear=1000,
        n_same_clear=n_same_clear,
        n_targets=2000,
        nll=2000 * nll,
    )
    found._sum_cosine = 2000 * mean_cosine
    return found


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (figures(), True),
        (figures(n_different=2000), True),  # only `exact` must be identical
        (figures(mean_cosine=0.9981), True),
        (figures(mean_cosine=0.9979), False),
        (figures(n_same_clear=999), True),
        (figures(n_same_clear=998), False),
        (figures(nll=0.0049), True),
        (figures(nll=0.0051), False),
        (figures(nll=-0.0049), True),
        (figures(nll=-0.0052), False),  # a better perplexity is as much a change
        (figures(n_not_finite=1), False),
    ],
)
def test_each_default_threshold_refuses_just_beyond_itself(
    spec: ModelSpec, found: FormStatistics, passed: bool
) -> None:
    report = judge(F32, found, DEFAULT_THRESHOLDS, spec)
    assert report.passed is passed, report.reasons
    assert bool(report.reasons) is not passed


def test_default_thresholds_are_those_documented() -> None:
    assert DEFAULT_THRESHOLDS.to_json() == {
        "min_mean_cosine": 0.998,
        "min_clear_agreement": 0.999,
        "max_perplexity_change": 0.005,
        "min_layer_cosine": 0.9995,
    }


def test_thresholds_can_be_overridden(spec: ModelSpec) -> None:
    poor = figures(mean_cosine=0.9, n_same_clear=900, nll=0.04)
    assert len(judge(F32, poor, DEFAULT_THRESHOLDS, spec).reasons) == 3
    loose = Thresholds(min_mean_cosine=0.9, min_clear_agreement=0.9, max_perplexity_change=0.05)
    assert judge(F32, poor, loose, spec).passed


def test_exact_must_be_identical(spec: ModelSpec) -> None:
    exact = parse_wire("exact")
    assert judge(exact, figures(), DEFAULT_THRESHOLDS, spec).passed
    report = judge(exact, figures(n_different=1), DEFAULT_THRESHOLDS, spec)
    assert report.reasons == ("not identical: 1 of 2000 positions differ",)


def test_nothing_measured_never_passes(spec: ModelSpec) -> None:
    report = judge(F32, FormStatistics(), DEFAULT_THRESHOLDS, spec)
    assert not report.passed
    assert report.reasons[0] == "nothing was measured"


def test_perplexity_must_be_measured_unless_there_is_no_text(spec: ModelSpec) -> None:
    logits = np.eye(4, dtype=np.float32)
    found = FormStatistics()
    found.add(logits, StockWindow.of(logits))
    assert judge(F32, found, DEFAULT_THRESHOLDS, spec).reasons == ("perplexity was not measured",)
    assert judge(F32, found, DEFAULT_THRESHOLDS, spec, needs_perplexity=False).passed


def test_json_has_the_keys_that_scripts_rely_on_and_only_finite_numbers(spec: ModelSpec) -> None:
    for found in (figures(), figures(n_not_finite=3), FormStatistics()):
        plain = judge(F32, found, DEFAULT_THRESHOLDS, spec).to_json()
        assert plain.keys() >= JSON_KEYS
        json.dumps(plain, allow_nan=False)


def test_q8_goes_out_as_the_codec_of_the_weights_that_x_meets(
    spec: ModelSpec, gate_model: Callable[..., GateModel]
) -> None:
    layer = spec.moe_layers[0]
    assert codecs_of(parse_wire("q8/f16"), spec, layer) == (RowCodec.Q8_K, RowCodec.F16)
    other = gate_model("Q8_0").spec
    assert codecs_of(parse_wire("q8"), other, layer) == (RowCodec.Q8_0, RowCodec.INT8)


def test_bytes_per_row_count_out_and_back_and_exact_brings_back_each_expert(spec: ModelSpec) -> None:
    d, k = spec.n_embd, spec.n_expert_used
    assert bytes_per_row(F32, spec) == 8 * d
    assert bytes_per_row(parse_wire("exact"), spec) == 4 * d * (1 + k)
    assert bytes_per_row(parse_wire("q8/f16"), spec) == d + 4 * d // 256 + 2 * d
    order = ["q8", "q8/f16", "f16", "f32", "exact"]
    assert sorted(order, key=lambda text: bytes_per_row(parse_wire(text), spec)) == order


@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), [], {}])
def test_a_stored_figure_is_a_finite_number_or_null(value: object) -> None:
    with pytest.raises(ValueError, match="bad x"):
        read_figure({"x": value}, "x")
    assert read_figure({"x": None}, "x") is None
    assert read_figure({"x": 1}, "x") == 1.0
