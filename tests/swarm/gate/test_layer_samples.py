"""Layer by layer: which layers, one at a time in memory, and that a form which breaks a layer is found there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from swarm.errors import UserError
from swarm.gate import layer_samples
from swarm.gate.form_table import GateModel
from swarm.gate.layer_samples import (
    RANDOM_ROWS,
    LayerStatistics,
    available_memory_bytes,
    is_too_large,
    judge_layers,
    measure_layers,
    spread,
)
from swarm.gate.simulated_peers import carry_rows, load_experts
from swarm.gate.verdict import DEFAULT_THRESHOLDS
from swarm.ids import ExpertSet
from swarm.wire.rows import RowCodec, parse_wire

F32, Q8 = parse_wire("f32"), parse_wire("q8")
Rows = npt.NDArray[np.float32]


def test_figures_are_those_of_plain_numpy() -> None:
    rng = np.random.default_rng(0)
    ours, truth = rng.standard_normal((2, 20, 16), dtype=np.float32)
    truth[3] = ours[3] = 0  # no expert said anything: agreement
    truth[4] = 0
    figures = LayerStatistics()
    figures.add(ours[:8], truth[:8])
    figures.add(ours[8:], truth[8:])
    expected = [
        1.0 if i == 3 else 0.0 if i == 4 else float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for i, (a, b) in enumerate(zip(ours.astype(np.float64), truth.astype(np.float64), strict=True))
    ]
    assert figures.n_rows == 20
    assert figures.mean_cosine == pytest.approx(np.mean(expected))
    assert figures.min_cosine == pytest.approx(min(expected))


def test_each_sampled_layer_is_measured_on_the_text_and_on_random_rows(
    gate_model: Callable[[str], GateModel], heldout: str
) -> None:
    model = gate_model("Q4_K_M")
    seen: list[tuple[int, int]] = []
    measured = measure_layers(
        model, [F32, Q8], heldout, layers={1, 3}, n_tokens=200, progress=lambda done, total: seen.append((done, total))
    )
    assert [list(by_layer) for by_layer in measured.values()] == [[1, 3], [1, 3]]
    assert seen[-1] == (4, 4)  # layers 0 to 3 were read, the rest not
    for figures in (*measured[F32].values(), *measured[Q8].values()):
        assert figures.n_rows == 200 + RANDOM_ROWS
    for layer in (1, 3):
        assert measured[F32][layer].mean_cosine == pytest.approx(1, abs=1e-9)
        mean = measured[Q8][layer].mean_cosine
        assert mean is not None
        assert 0.999 < mean < 1 - 1e-6
    report = judge_layers(Q8, measured[Q8], DEFAULT_THRESHOLDS, model.spec)
    assert report.passed
    assert (report.identical, report.argmax_agreement, report.perplexity_ratio) == (None, None, None)
    assert report.min_cosine == min(figures.min_cosine for figures in measured[Q8].values())
    assert report.mean_cosine == min(figures.mean_cosine or 0 for figures in measured[Q8].values())


def test_the_last_layer_sees_every_token(gate_model: Callable[[str], GateModel], heldout: str) -> None:
    model = gate_model("Q8_0")
    last = model.spec.moe_layers[-1]
    measured = measure_layers(model, [F32], heldout, layers={last}, n_tokens=40)
    assert measured[F32][last].n_rows == 40 + RANDOM_ROWS


def test_experts_are_in_memory_one_layer_at_a_time(
    monkeypatch: pytest.MonkeyPatch, gate_model: Callable[[str], GateModel], heldout: str
) -> None:
    model = gate_model("Q8_0")
    loaded: list[ExpertSet] = []
    open_now: list[int] = []

    def watch(spec: object, source: object, experts: ExpertSet) -> object:
        ffn = load_experts(spec, source, experts)  # type: ignore[arg-type]
        assert not open_now
        open_now.append(1)
        close = ffn.close

        def closing() -> None:
            open_now.clear()
            close()

        ffn.close = closing  # type: ignore[method-assign]
        loaded.append(experts)
        return ffn

    monkeypatch.setattr(layer_samples, "load_experts", watch)
    measure_layers(model, [Q8], heldout, layers={0, 2}, n_tokens=20)
    assert loaded == [ExpertSet.of([layer], range(model.spec.n_expert)) for layer in (0, 1, 2)]
    assert not open_now


@pytest.mark.parametrize("fault", ["rough", "infinite"])
def test_a_form_that_breaks_one_layer_is_refused_and_the_layer_named(
    gate_model: Callable[[str], GateModel], heldout: str, fault: str
) -> None:
    calls = []

    def carry(x: Rows, codec: RowCodec) -> Rows:
        calls.append(codec)
        rows = carry_rows(x, codec)
        # Three peers, rows of the text and random ones: 6 answers in each layer. The second sampled layer is spoilt; there
        # an infinity ends either computation at its first answer.
        last = 12 if fault == "rough" else 8
        if codec is RowCodec.INT8 and 6 < calls.count(RowCodec.INT8) <= last:
            rows = np.sign(rows) if fault == "rough" else np.full_like(rows, np.inf)
        return rows

    model = gate_model("Q8_0")
    measured = measure_layers(model, [Q8], heldout, layers={0, 2, 5}, n_tokens=100, carry=carry)
    report = judge_layers(Q8, measured[Q8], DEFAULT_THRESHOLDS, model.spec)
    assert not report.passed
    assert all("layer 2" in reason for reason in report.reasons), report.reasons


def test_a_layer_without_experts_is_the_users_mistake(gate_model: Callable[[str], GateModel], heldout: str) -> None:
    with pytest.raises(UserError, match=r"layers without experts: got 6, the model's MoE layers are 0-5"):
        measure_layers(gate_model("Q8_0"), [F32], heldout, layers={2, 6})


def test_a_layers_cosine_has_a_threshold_of_its_own(gate_model: Callable[[str], GateModel]) -> None:
    spec = gate_model("Q8_0").spec
    for mean, passed in ((0.99951, True), (0.99949, False)):
        figures = {0: LayerStatistics(n_rows=10, sum_cosine=10.0), 4: LayerStatistics(n_rows=10, sum_cosine=10 * mean)}
        assert judge_layers(Q8, figures, DEFAULT_THRESHOLDS, spec).passed is passed


def test_nothing_measured_never_passes(gate_model: Callable[[str], GateModel]) -> None:
    spec = gate_model("Q8_0").spec
    for by_layer in ({}, {0: LayerStatistics()}):
        report = judge_layers(Q8, by_layer, DEFAULT_THRESHOLDS, spec)
        assert not report.passed
        assert report.mean_cosine is None


def test_sampled_layers_are_spread_with_both_ends() -> None:
    assert spread(range(48), 4) == {0, 16, 31, 47}
    assert spread(range(3, 64), 8) >= {3, 63}
    assert len(spread(range(61), 8)) == 8
    assert spread((1, 5), 8) == {1, 5}


def test_a_file_is_too_large_when_three_copies_leave_no_room(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    assert is_too_large(path, available_bytes=3700)
    assert not is_too_large(path, available_bytes=3800)
    assert not is_too_large(path)
    assert available_memory_bytes() > 1 << 20
