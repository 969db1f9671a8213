"""All experts in one executor in this process (`--peers 0`), next to stock llama.cpp on the whole file.

What is left to measure is what the hook and the executor cost: no wire, no event loop, no second process. The backbone and stock
run on one thread of Python, so that one pool of OpenMP threads serves both and neither spins beside the other; stock is as
llama.cpp has it by default, with interleaved weights. Figures of the network are null.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from swarm.backbone.in_process import InProcessExperts
from swarm.backbone.moe_hook import MoeHook
from swarm.backbone.prepared import prepare_model
from swarm.bench.dispatch import N_WARM_UP, DispatchOptions, draw_choices
from swarm.files import Folders
from swarm.interruptible import Check
from swarm.native.llama import LlamaContext, LlamaModel

PROMPT_SEED = 1
N_DECODE_PROMPT = 16
NO_NETWORK = (
    "rtt_s",
    "rtt_bound_tokens_per_s",
    "share_of_bound",
    "shared_hidden_share",
    "destinations_per_token",
    "bytes_out_per_token_layer",
    "bytes_back_per_token_layer",
    "bytes_by_path",
)
NO_DISPATCH_NETWORK = (
    "bytes_out_per_token_layer",
    "bytes_back_per_token_layer",
    "bytes_all_destinations",
    "bytes_by_path",
    "destinations_per_token",
    "repair_bytes",
    "rtt_s",
    "quic_star_p50_s",
    "udp_star_p50_s",
    "transport",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessOptions:
    """What to measure.

    Attributes:
        n_threads: of llama.cpp and of the executor.
        n_tokens: to decode in each repetition, or of the prompt.
    """

    model: Path
    n_threads: int
    n_tokens: int
    n_repetitions: int = 5
    n_prompt: int = N_DECODE_PROMPT


class _Timed(NamedTuple):
    """What was timed, and how much of it the experts took (0 of stock, which does not tell)."""

    seconds: float
    experts_s: float


class _Side:
    """A context whose steps are timed: the backbone with its hook, or stock llama.cpp."""

    def __init__(
        self, context: LlamaContext, hook: MoeHook | None = None, experts: InProcessExperts | None = None
    ) -> None:
        self.context = context
        self._hook = hook
        self._experts = experts

    def step(self, tokens: Sequence[int], first_position: int) -> None:
        """Compute tokens, with the last one's logits; raises what a layer raised."""
        self.context.decode(tokens, first_position=first_position, logits="last")
        error = self._hook.take_error() if self._hook is not None else None
        error = error or self.context.take_callback_error()
        if error is not None:
            raise error

    def prefill(self, prompt: Sequence[int]) -> _Timed:
        """Time one step over the whole prompt."""
        self.context.clear()
        return self._timed(lambda: self.step(prompt, 0))

    def decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> _Timed:
        """Time one step for each token after the prompt, and a look at its logits as greedy decoding takes it."""
        self.prefill(prompt)

        def steps() -> None:
            for position, token in enumerate(tokens, len(prompt)):
                self.step([token], position)
                self.context.logits(-1).argmax()

        return self._timed(steps)

    def _timed(self, work: Callable[[], None]) -> _Timed:
        before_s = self._experts.compute_s if self._experts is not None else 0.0
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        return _Timed(seconds, self._experts.compute_s - before_s if self._experts is not None else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    ours: _Side
    stock: _Side
    experts: InProcessExperts
    n_layers: int
    n_vocab: int


@contextlib.contextmanager
def _open(model: Path, n_threads: int, n_ctx: int, n_batch: int) -> Iterator[_Sides]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        prepared = stack.enter_context(prepare_model(model, Folders.below(folder)))
        experts = stack.enter_context(InProcessExperts.open(model, n_threads=n_threads))

        def context(llama: LlamaModel, hook: MoeHook | None = None) -> LlamaContext:
            return stack.enter_context(
                LlamaContext(
                    llama, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=n_threads, eval_callback=hook
                )
            )

        spec = prepared.manifest.spec
        backbone = stack.enter_context(LlamaModel(prepared.backbone_path))
        hook = MoeHook(spec.moe_layers, experts, output=spec.expert_kind.output_node)
        ours = _Side(context(backbone, hook), hook, experts)
        whole = stack.enter_context(LlamaModel(model))
        stock = _Side(context(whole))
        yield _Sides(ours=ours, stock=stock, experts=experts, n_layers=len(spec.moe_layers), n_vocab=whole.n_vocab)


def _tokens(n_vocab: int, n_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(PROMPT_SEED).integers(1, n_vocab, n_tokens)]


def measure_decode_in_process(options: InProcessOptions, progress: Progress, check: Check) -> dict[str, Any]:
    """Return the figures of `swarm bench decode --peers 0`: both sides decode the same tokens, in turn."""
    n_ctx = options.n_prompt + options.n_tokens + 1
    with _open(options.model, options.n_threads, n_ctx, max(options.n_prompt, 1)) as sides:
        prompt, tokens = _tokens(sides.n_vocab, options.n_prompt), _tokens(sides.n_vocab, options.n_tokens)

        def run(side: _Side) -> _Timed:
            return side.decode(prompt, tokens)

        figures = _alternate(options, sides, run, options.n_tokens, progress, check)
    return {
        "model": options.model.name,
        "n_peers": 0,
        "wire": None,
        "n_prompt": options.n_prompt,
        "n_draft": 0,
        "round_trips_per_token": 0,
        "accept_length": 1.0,
        **dict.fromkeys(NO_NETWORK),
        **figures,
    }


def measure_prefill_in_process(options: InProcessOptions, progress: Progress, check: Check) -> dict[str, Any]:
    """Return the figures of `swarm bench prefill --peers 0`: one step over the prompt."""
    with _open(options.model, options.n_threads, options.n_tokens, options.n_tokens) as sides:
        prompt = _tokens(sides.n_vocab, options.n_tokens)

        def run(side: _Side) -> _Timed:
            return side.prefill(prompt)

        figures = _alternate(options, sides, run, 1, progress, check)
    return {
        "model": options.model.name,
        "n_peers": 0,
        "wire": None,
        "rtt_s": None,
        "rate_bit_s": None,
        "chunk_bytes": 0,
        "bytes_out": None,
        "bytes_back": None,
        **figures,
    }


def _alternate(
    options: InProcessOptions,
    sides: _Sides,
    run: Callable[[_Side], _Timed],
    n_steps: int,
    progress: Progress,
    check: Check,
) -> dict[str, Any]:
    """Return what both measurements report of `n_steps` steps; each side goes first in every other repetition."""
    run(sides.ours)  # warm: graphs, pages
    run(sides.stock)
    ours: list[float] = []
    stock: list[float] = []
    experts_shares: list[float] = []
    for done in range(options.n_repetitions):
        progress(done, options.n_repetitions)
        for is_ours in (True, False) if done % 2 == 0 else (False, True):
            check()
            if is_ours:
                timed = run(sides.ours)
                ours.append(timed.seconds)
                experts_shares.append(timed.experts_s / timed.seconds)
            else:
                stock.append(run(sides.stock).seconds)
    progress(options.n_repetitions, options.n_repetitions)
    difference = np.abs(sides.ours.context.logits(-1) - sides.stock.context.logits(-1)).max()
    shares = [theirs / mine for mine, theirs in zip(ours, stock, strict=True)]
    return {
        "n_threads": options.n_threads,
        "n_tokens": options.n_tokens,
        "n_repetitions": options.n_repetitions,
        "layers": sides.n_layers,
        "tokens_per_s": options.n_tokens / statistics.median(ours),
        "stock_tokens_per_s": options.n_tokens / statistics.median(stock),
        "share_of_stock": statistics.median(shares),
        "shares_of_stock": shares,
        "step_s": statistics.median(ours) / n_steps,
        "experts_share": statistics.median(experts_shares),
        "max_logit_difference": float(difference),
        "repacked_bytes": sides.experts.ffn.n_repacked_bytes,
        "mapped_bytes": sides.experts.ffn.n_mapped_bytes,
    }


def measure_dispatch_in_process(
    options: DispatchOptions, model: Path, n_threads: int, progress: Progress, check: Check
) -> dict[str, Any]:
    """Return the figures of `swarm bench dispatch --peers 0`: one layer's experts called as the hook calls them."""
    rng = np.random.default_rng(options.seed)
    seconds: list[float] = []
    with InProcessExperts.open(model, n_threads=n_threads) as experts:
        for i in range(N_WARM_UP + options.n_dispatches):
            check()
            x = rng.standard_normal((options.n_tokens, options.d_model), dtype=np.float32)
            ids, weights = draw_choices(rng, options)
            out: npt.NDArray[np.float32] = np.empty_like(x)
            if i == N_WARM_UP:
                experts.compute_s = 0.0
            started = time.perf_counter()
            experts.compute_into(0, x, ids, weights, out)
            if i >= N_WARM_UP:
                seconds.append(time.perf_counter() - started)
                progress(i - N_WARM_UP + 1, options.n_dispatches)
        compute_s = experts.compute_s / options.n_dispatches
    p50, p95, p99 = (float(each) for each in np.percentile(seconds, (50, 95, 99)))
    return {
        "d_model": options.d_model,
        "n_expert": options.n_expert,
        "n_expert_used": options.n_expert_used,
        "n_tokens": options.n_tokens,
        "n_peers": 0,
        "n_threads": n_threads,
        "wire": None,
        "n_dispatches": len(seconds),
        **dict.fromkeys(NO_DISPATCH_NETWORK),
        "compute_s": compute_s,
        "p50_s": p50,
        "p95_s": p95,
        "p99_s": p99,
        "overhead_p50_s": 0.0,
    }
