"""The table of forms: how a text is cut, that figures come out as they must, and that a bad form cannot pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from swarm.errors import UserError
from swarm.gate import form_table
from swarm.gate.form_table import (
    LOGITS_BYTES,
    MIN_WINDOW_TOKENS,
    WINDOW_TOKENS,
    GateModel,
    all_wires,
    cut_windows,
    measure_forms,
    window_tokens,
)
from swarm.gate.simulated_peers import Carry, carry_rows
from swarm.gate.statistics import FormStatistics
from swarm.gate.stored import GateResult, choose_wire, load_result, save_result
from swarm.gate.verdict import DEFAULT_THRESHOLDS, FormReport, judge
from swarm.ids import ModelId
from swarm.wire.rows import RowCodec, Wire, WireForm, parse_wire

F32, F16, Q8 = parse_wire("f32"), parse_wire("f16"), parse_wire("q8")
Rows = npt.NDArray[np.float32]


# How a text is cut


@pytest.mark.parametrize("n_tokens", [2, 3, 10, 11, 12, 31])
@pytest.mark.parametrize("bos", [None, 99])
def test_windows_cover_each_token_once_and_its_target_is_the_next(n_tokens: int, bos: int | None) -> None:
    tokens = list(range(n_tokens))
    windows = list(cut_windows(tokens, 10, bos))
    n_head = 0 if bos is None else 1
    assert list(itertools.chain.from_iterable(window.tokens[n_head:] for window in windows)) == tokens[:-1]
    for window in windows:
        assert window.n_head == n_head
        assert window.tokens[:n_head] == [bos] * n_head
        assert len(window.tokens) <= 10
        assert window.targets.tolist() == [token + 1 for token in window.tokens[n_head:]]


def test_a_windows_logits_are_bounded_whatever_the_vocabulary() -> None:
    assert window_tokens(2048) == WINDOW_TOKENS
    for n_vocab in (100_000, 152_000, 262_144):
        n_tokens = window_tokens(n_vocab)
        assert MIN_WINDOW_TOKENS <= n_tokens < WINDOW_TOKENS
        assert 4 * n_vocab * n_tokens <= LOGITS_BYTES
    assert window_tokens(10_000_000) == MIN_WINDOW_TOKENS


def test_all_means_every_form_once_and_8_bits_out_with_16_back() -> None:
    wires = all_wires()
    assert len(set(wires)) == len(wires)
    assert {wire.out for wire in wires if wire.out is wire.back} == set(WireForm)
    assert parse_wire("q8/f16") in wires
    assert wires[0] == parse_wire("exact")


# Figures


def measure(
    model: GateModel, text: str, wires: list[Wire], n_tokens: int, carry: Carry = carry_rows
) -> dict[Wire, FormStatistics]:
    return measure_forms(model, wires, text, n_tokens=n_tokens, carry=carry)


def test_f32_is_close_to_stock_and_positions_are_counted(
    monkeypatch: pytest.MonkeyPatch, gate_model: Callable[[str], GateModel], heldout: str
) -> None:
    monkeypatch.setattr(form_table, "WINDOW_TOKENS", 128)  # several windows, the last one short
    seen: list[tuple[int, int]] = []
    model = gate_model("Q8_0")
    measured = measure_forms(
        model, [F32, F16], heldout, n_tokens=300, progress=lambda done, total: seen.append((done, total))
    )
    figures = measured[F32]
    assert (figures.n_positions, figures.n_targets) == (300, 300)
    assert figures.clear_agreement == 1
    assert figures.perplexity_ratio == pytest.approx(1, abs=1e-3)
    assert figures.mean_cosine is not None
    assert measured[F16].mean_cosine is not None
    assert 0.9999 < measured[F16].mean_cosine < figures.mean_cosine <= 1
    assert figures.stock_perplexity is not None
    assert 3 < figures.stock_perplexity < 40  # a trained model that reads its own kind of text
    assert seen[-1] == (600, 600)


def test_a_text_that_is_too_short_says_what_to_do(gate_model: Callable[[str], GateModel]) -> None:
    with pytest.raises(UserError, match=r"too short: got \d+ tokens, expected more than 500.*--text"):
        measure(gate_model("Q8_0"), "a short text", [F32], 500)


# Forms that must not pass


def rougher(codec: RowCodec, bits: int) -> Carry:
    """Return a wire whose one codec keeps but so many bits of a block's largest value."""

    def carry(x: Rows, used: RowCodec) -> Rows:
        rows = carry_rows(x, used)
        if used is not codec:
            return rows
        step = np.abs(rows).max(axis=1, keepdims=True) / 2 ** (bits - 1)
        return np.asarray(np.rint(rows / np.where(step > 0, step, 1)) * step, np.float32)

    return carry


def overflowing(x: Rows, codec: RowCodec) -> Rows:
    rows = carry_rows(x, codec)
    if codec is RowCodec.INT8 and len(x) > 100:
        rows[7, 7] = np.inf
    return rows


def reports(model: GateModel, measured: dict[Wire, FormStatistics]) -> tuple[FormReport, ...]:
    return tuple(judge(wire, figures, DEFAULT_THRESHOLDS, model.spec) for wire, figures in measured.items())


def stored(forms: tuple[FormReport, ...]) -> GateResult:
    return GateResult(
        model=ModelId(bytes(32)),
        model_name="tiny",
        engine="engine 1",
        version="0",
        date="2026-01-01T00:00:00+00:00",
        method="logits",
        text_sha256="",
        n_text_tokens=2048,
        n_peers=3,
        thresholds=DEFAULT_THRESHOLDS,
        forms=forms,
    )


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M"])
def test_a_form_made_worse_is_refused_and_the_next_cheapest_takes_over(
    gate_model: Callable[[str], GateModel], heldout: str, tmp_path: Path, name: str
) -> None:
    """Scenario 8: a codec that breaks one model's argmax is never served, and nobody has to act."""
    model = gate_model(name)
    wires = [F32, F16, Q8]
    good = reports(model, measure(model, heldout, wires, 2048))
    assert [form.passed for form in good] == [True, True, True], good
    assert choose_wire(stored(good), "engine 1").wire == Q8

    bad = reports(model, measure(model, heldout, wires, 2048, rougher(RowCodec.INT8, 3)))
    assert [form.passed for form in bad] == [True, True, False], bad
    assert any(reason.startswith("clear agreement") for reason in bad[2].reasons)
    save_result(tmp_path, stored(bad))
    choice = choose_wire(load_result(tmp_path, ModelId(bytes(32))), "engine 1")
    assert choice.wire == F16
    assert "q8 failed: " in choice.reason


def test_an_overflow_fails_the_form_at_once_and_leaves_the_others_alone(
    gate_model: Callable[[str], GateModel], heldout: str
) -> None:
    model = gate_model("Q8_0")
    alone = measure(model, heldout, [F32], 600)
    measured = measure(model, heldout, [Q8, F32], 600, overflowing)
    assert measured[F32] == alone[F32]
    bad, good = reports(model, measured)
    assert good.passed
    assert not bad.passed
    assert bad.reasons[0].startswith("not finite")
    assert bad.perplexity_ratio is None
