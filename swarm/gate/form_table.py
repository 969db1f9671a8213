"""Measures wire forms on a text, each against stock llama.cpp on the whole file, in one process.

The text is cut into windows. For each window stock computes all logits once; then every form computes the same window on
one hooked context over simulated peers, and is compared and forgotten. So memory is two windows of logits, whatever the
length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.errors import UserError
from swarm.experts.executor import ExpertExecutor
from swarm.gate.hooked_model import HookedModel
from swarm.gate.simulated_peers import N_PEERS, Carry, NotFinite, PeerPlan, SimulatedPeers, carry_rows, load_experts
from swarm.gate.statistics import FormStatistics, StockWindow
from swarm.model.source import BlockSource
from swarm.model.spec import ModelSpec
from swarm.native.devices import CPU
from swarm.native.llama import LlamaModel
from swarm.wire.rows import Wire, WireForm, parse_wire

WINDOW_TOKENS = 512  # one ubatch of the default engine; the context that a position sees is 0 to 511 tokens
LOGITS_BYTES = 128 << 20  # of one window; about five such arrays live at once. A vocabulary of 150k gets 223 tokens
MIN_WINDOW_TOKENS = 32
MIXED = ("q8/f16", "fp8/f16")  # out, a rounding to 8 bits is nearly what ggml does itself; back, it is a loss

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateModel:
    """What the gate needs of a model.

    Attributes:
        path: the whole file.
        backbone_path: the stub cut from it.
        source: the file's expert blocks.
        device: what computes them, as `--device` names it.
    """

    path: Path
    backbone_path: Path
    spec: ModelSpec
    source: BlockSource
    device: str = CPU


def all_wires() -> tuple[Wire, ...]:
    """Return the forms of `--wire all`: each form both ways, and compressed rows out with f16 partial sums back."""
    known = {form.value for form in WireForm}
    mixed = [parse_wire(text) for text in MIXED if known.issuperset(text.split("/"))]
    return (*(Wire(form, form) for form in WireForm), *mixed)


def window_tokens(n_vocab: int) -> int:
    """Return how many tokens a window has, so that its logits fit LOGITS_BYTES."""
    return max(MIN_WINDOW_TOKENS, min(WINDOW_TOKENS, LOGITS_BYTES // (4 * n_vocab)))


def gate_engine(n_ctx: int) -> EngineConfig:
    """Return the gate's engine: exact kernels, so that a difference is the form's and not a kernel's; one thread."""
    return EngineConfig(n_ctx=n_ctx, n_batch=WINDOW_TOKENS, n_ubatch=WINDOW_TOKENS, n_threads=1, exact_kernels=True)


@dataclass(frozen=True, slots=True, eq=False)
class TextWindow:
    """Tokens to compute at positions 0 to T-1, and the token that follows each, [T].

    The first `n_head` of them only lead in: a BOS, which the text does not have.
    """

    tokens: list[int]
    targets: npt.NDArray[np.int64]
    n_head: int


def text_tokens(model: LlamaModel, text: str, n_tokens: int) -> list[int]:
    """Return the first `n_tokens` + 1 of the text: each of `n_tokens` has a next one. Raises UserError if it is shorter."""
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    if len(tokens) <= n_tokens:
        raise UserError(
            f"the text is too short: got {len(tokens)} tokens, expected more than {n_tokens}; "
            "give a longer one with --text, or fewer with --text-tokens"
        )
    return tokens[: n_tokens + 1]


def cut_windows(tokens: Sequence[int], size: int, bos: int | None) -> Iterator[TextWindow]:
    """Yield windows that cover the text: every token but the last is computed once, and has the next as its target.

    Args:
        bos: stands before each window, where the model wants one; no position is counted for it.
    """
    head = [] if bos is None else [bos]
    body = size - len(head)
    for start in range(0, len(tokens) - 1, body):
        part = list(tokens[start : min(start + body, len(tokens) - 1)])
        targets = np.asarray(tokens[start + 1 : start + 1 + len(part)], np.int64)
        yield TextWindow(head + part, targets, len(head))


def leading_bos(model: LlamaModel) -> int | None:
    """Return the token that the model wants before a text, or None."""
    first = model.tokenize("a", add_special=True, parse_special=False)[:1]
    return model.bos_token if first == [model.bos_token] else None


def measure_forms(
    model: GateModel,
    wires: Sequence[Wire],
    text: str,
    *,
    n_tokens: int,
    n_peers: int = N_PEERS,
    carry: Carry = carry_rows,
    progress: Progress = lambda done, total: None,
) -> dict[Wire, FormStatistics]:
    """Return each form's statistics over `n_tokens` positions of the text.

    Args:
        carry: what a wire does to rows; tests pass a worse one.
        progress: called with positions done and positions in all, forms times tokens.

    Raises:
        UserError: the text is too short.
        EngineError: llama.cpp failed, or stock's own logits are not finite.
    """
    spec = model.spec
    config = gate_engine(WINDOW_TOKENS)
    plan = PeerPlan.contiguous(spec, min(n_peers, spec.n_expert))
    with (
        load_experts(spec, model.source, spec.all_experts, device=model.device) as ffn,
        StockModel(model.path, config) as stock,
    ):
        peers = SimulatedPeers(ExpertExecutor(ffn, spec), spec, wires[0], plan, carry)
        with HookedModel(model.backbone_path, spec, config, peers) as hooked:
            tokens = text_tokens(hooked.model, text, n_tokens)
            size = window_tokens(stock.n_vocab)
            statistics = {wire: FormStatistics() for wire in wires}
            n_done = 0
            for window in cut_windows(tokens, size, leading_bos(hooked.model)):
                truth = _stock_window(stock, window)
                for wire, figures in statistics.items():
                    peers.wire = wire
                    _measure(hooked, window, truth, figures)
                    n_done += len(window.targets)
                    progress(n_done, n_tokens * len(wires))
    return statistics


def _stock_window(stock: StockModel, window: TextWindow) -> StockWindow:
    stock.clear()
    return StockWindow.of(stock.logits(window.tokens, 0)[window.n_head :], window.targets)


def _measure(hooked: HookedModel, window: TextWindow, truth: StockWindow, figures: FormStatistics) -> None:
    if figures.n_not_finite:  # it has failed already
        return
    hooked.clear()
    try:
        figures.add(hooked.logits(window.tokens, 0)[window.n_head :], truth)
    except NotFinite:
        figures.add_failure(truth)
