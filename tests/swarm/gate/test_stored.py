"""The stored result, and which form follows from it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from swarm.dispatch.audit import DEFAULT_TOLERANCE
from swarm.errors import UserError
from swarm.gate.stored import (
    MAX_RESULT_BYTES,
    GateResult,
    asked_wire,
    audit_tolerance,
    choose_wire,
    engine_name,
    load_result,
    result_path,
    save_result,
)
from swarm.gate.verdict import DEFAULT_THRESHOLDS, FormReport
from swarm.ids import ModelId
from swarm.wire.rows import parse_wire

MODEL = ModelId(bytes(range(32)))
ENGINE = "xllamacpp 1.2.3"


def form(wire: str, n_bytes: int, *reasons: str) -> FormReport:
    return FormReport(
        wire=parse_wire(wire),
        bytes_per_row=n_bytes,
        n_positions=20_000,
        identical=wire == "exact",
        argmax_agreement=0.98,
        clear_agreement=0.9995,
        min_cosine=0.99,
        mean_cosine=0.9999,
        perplexity_ratio=1.0004,
        perplexity_error=0.0003,
        reasons=reasons,
    )


def result(*forms: FormReport, **changes: Any) -> GateResult:
    made = GateResult(
        model=MODEL,
        model_name="tiny",
        engine=ENGINE,
        version="0.1",
        date="2026-01-02T03:04:05+00:00",
        method="logits",
        text_sha256="ab" * 32,
        n_text_tokens=20_000,
        n_peers=3,
        thresholds=DEFAULT_THRESHOLDS,
        forms=forms or (form("exact", 5000), form("f32", 2000), form("f16", 1000), form("q8", 500)),
    )
    return dataclasses.replace(made, **changes)


# The choice


def test_the_cheapest_form_that_passed_is_chosen_and_its_figures_are_told() -> None:
    choice = choose_wire(result(), ENGINE)
    assert str(choice.wire) == "q8"
    assert "2026-01-02" in choice.reason
    assert "99.95%" in choice.reason


def test_cost_decides_not_the_order_of_the_list() -> None:
    assert str(choose_wire(result(form("q8", 500), form("fp8", 400), form("f32", 2000)), ENGINE).wire) == "fp8"


def test_a_form_that_failed_is_passed_over_and_named() -> None:
    choice = choose_wire(result(form("f32", 2000), form("f16", 1000), form("q8", 500, "clear agreement 0.9")), ENGINE)
    assert str(choice.wire) == "f16"
    assert "q8 failed: clear agreement 0.9" in choice.reason


def test_of_forms_that_cost_nearly_the_same_the_more_accurate_is_chosen() -> None:
    rough = dataclasses.replace(form("fp8", 520), mean_cosine=0.9985)
    choice = choose_wire(result(form("f32", 2048), rough, form("q8", 536)), ENGINE)
    assert str(choice.wire) == "q8"
    assert "fp8 costs nearly as much (520 bytes) and is less accurate" in choice.reason
    assert str(choose_wire(result(form("f32", 2048), rough, form("q8", 547)), ENGINE).wire) == "fp8"
    accurate = dataclasses.replace(rough, mean_cosine=0.99999)
    assert str(choose_wire(result(form("f32", 2048), accurate, form("q8", 536)), ENGINE).wire) == "fp8"


def test_exact_is_never_chosen() -> None:
    assert str(choose_wire(result(form("exact", 10), form("f32", 2000)), ENGINE).wire) == "f32"
    assert str(choose_wire(result(form("exact", 10), form("f16", 1000, "bad")), ENGINE).wire) == "f32"


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (None, "no stored gate result"),
        (result(form("f32", 2000, "bad"), form("q8", 500, "bad")), "no form passed"),
        (result(engine="llama-cpp-python 0.0.1"), "llama-cpp-python 0.0.1"),
    ],
)
def test_without_a_usable_result_rows_travel_as_f32(stored: GateResult | None, why: str) -> None:
    choice = choose_wire(stored, ENGINE)
    assert str(choice.wire) == "f32"
    assert why in choice.reason


def test_a_form_asked_for_is_used_with_a_warning_if_it_failed() -> None:
    stored = result(form("q8", 500, "not finite"), form("f32", 2000))
    assert asked_wire(parse_wire("q8"), stored).reason == "as --wire asks, although it failed the gate: not finite"
    for wire, known in (("f32", stored), ("f16", stored), ("q8", None)):
        choice = asked_wire(parse_wire(wire), known)
        assert (str(choice.wire), choice.reason) == (wire, "as --wire asks")


def test_the_engine_is_named_with_its_version() -> None:
    name, version = engine_name().split(" ")
    assert name in ("xllamacpp", "llama-cpp-python")
    assert version[0].isdigit()


# The file


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    stored = result(form("q8", 500, "one", "two"), form("f32", 2000))
    path = save_result(tmp_path, stored)
    assert path == tmp_path / "gate" / f"{MODEL}.json"
    assert load_result(tmp_path, MODEL) == stored
    plain = json.loads(path.read_text())
    assert {"engine", "date", "thresholds", "wires", "version", "n_text_tokens"} <= plain.keys()


def test_a_later_result_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    save_result(tmp_path, result())
    later = result(form("f32", 2000))
    path = save_result(tmp_path, later)
    assert load_result(tmp_path, MODEL) == later
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_result_is_none_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_result(tmp_path, MODEL) is None
    assert not caplog.records


def damaged() -> dict[str, Any]:
    plain = result().to_json()
    return {
        "format": plain | {"format": 99},
        "model": plain | {"model": "00" * 32},
        "no model": plain | {"model": 7},
        "method": plain | {"method": "guess"},
        "engine": plain | {"engine": None},
        "count": plain | {"n_text_tokens": -1},
        "threshold": plain | {"thresholds": {}},
        "null threshold": plain | {"thresholds": plain["thresholds"] | {"min_mean_cosine": None}},
        "wire": plain | {"wires": [plain["wires"][0] | {"wire": "q9"}]},
        "figure": plain | {"wires": [plain["wires"][0] | {"mean_cosine": "1"}]},
        "verdict": plain | {"wires": [plain["wires"][0] | {"passed": True, "reasons": ["no"]}]},
        "identical": plain | {"wires": [plain["wires"][0] | {"identical": 1}]},
        "wires": plain | {"wires": 3},
        "missing": {"format": 1},
        "list": [],
    }


@pytest.mark.parametrize("content", [*map(json.dumps, damaged().values()), "", "{", "[" * 100_000, "\xff"])
def test_a_damaged_result_counts_as_none_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = result_path(tmp_path, MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert load_result(tmp_path, MODEL) is None
    assert "swarm verify --save" in caplog.text


def test_an_endless_result_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_result(tmp_path, result())
    path.write_bytes(path.read_bytes() + b" " * MAX_RESULT_BYTES)
    assert load_result(tmp_path, MODEL) is None
    assert "too large" in caplog.text


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "gate").write_text("a file")
    with pytest.raises(UserError, match="cannot keep the gate's result"):
        save_result(tmp_path, result())


@pytest.mark.parametrize(
    ("error", "tolerance"), [(None, DEFAULT_TOLERANCE), (0.0, 0.03), (0.005, 0.03), (0.012, 0.036), (0.02, 0.04)]
)
def test_an_audits_tolerance_is_thrice_the_measured_error_between_3_and_4_percent(
    error: float | None, tolerance: float, tmp_path: Path
) -> None:
    save_result(tmp_path, result(dataclasses.replace(form("q8", 500), audit_error=error), form("f32", 2000)))
    kept = load_result(tmp_path, MODEL)
    assert audit_tolerance(kept, parse_wire("q8")) == pytest.approx(tolerance)
    assert audit_tolerance(kept, parse_wire("f16")) == DEFAULT_TOLERANCE, "not measured"
    assert audit_tolerance(None, parse_wire("q8")) == DEFAULT_TOLERANCE


def test_a_result_of_before_audits_were_measured_can_be_read(tmp_path: Path) -> None:
    path = save_result(tmp_path, result())
    plain = json.loads(path.read_bytes())
    for wire in plain["wires"]:
        del wire["audit_error"]
    path.write_text(json.dumps(plain))
    assert load_result(tmp_path, MODEL) == result()
