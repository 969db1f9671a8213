"""Compares a running swarm with stock llama.cpp on the whole file, logit by logit.

For each prompt the swarm and stock llama.cpp see the same tokens: the prompt in one call, then `n_tokens` more, one at a
time, chosen greedily by stock. Logits of all positions are asked for, so every expert of every layer counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.stock import StockModel
from swarm.errors import NetworkError, SwarmError
from swarm.gate.statistics import FormStatistics, StockWindow
from swarm.wire import messages as m

PROMPT_LENGTHS = (1, 37, 300)
STATUS_TIMEOUT_S = 5.0
LARGEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class PromptReport:
    """The comparison for one prompt length.

    Attributes:
        n_positions: rows of logits that were compared.
        n_different: of them, rows that are not equal bit for bit.
        max_difference: the largest absolute difference of two logits; where only one side is finite, or the two are
            different infinities or NaNs, that of float32's largest number.
        first_difference: position of the first row that differs, -1 for none.
        n_same_argmax: rows whose likeliest token is the same.
    """

    n_prompt: int
    n_positions: int = 0
    n_different: int = 0
    max_difference: float = 0.0
    first_difference: int = -1
    n_same_argmax: int = 0

    def add(self, position: int, ours: npt.NDArray[np.float32], stock: npt.NDArray[np.float32]) -> None:
        """Count logits [T, V] of tokens from `position` on; raises ValueError when the two do not cover the same."""
        if ours.shape != stock.shape:  # numpy would compare one row with many
            raise ValueError(f"logits do not match: got {ours.shape} of the swarm and {stock.shape} of stock")
        differs = (ours.view(np.uint32) != stock.view(np.uint32)).any(axis=1)  # [T], bit for bit: -0.0 is not 0.0
        if differs.any():
            if self.first_difference < 0:
                self.first_difference = position + int(differs.argmax())
            self.max_difference = max(self.max_difference, _largest_difference(ours[differs], stock[differs]))
        self.n_positions += len(ours)
        self.n_different += int(differs.sum())
        self.n_same_argmax += int((ours.argmax(axis=1) == stock.argmax(axis=1)).sum())


def _largest_difference(ours: npt.NDArray[np.float32], stock: npt.NDArray[np.float32]) -> float:
    """Return the largest |ours - stock|, always a number that JSON can write."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(ours.view(np.uint32) == stock.view(np.uint32), 0, np.abs(ours - stock))
    return float(np.nan_to_num(difference, nan=LARGEST, posinf=LARGEST).max())


@dataclass(slots=True)
class VerifyReport:
    """The whole comparison.

    Attributes:
        n_assignments: (token, expert) pairs that the peers counted.
        n_assignments_expected: tokens x K, summed over the MoE layers.
    """

    prompts: list[PromptReport] = field(default_factory=list)
    n_assignments: int = 0
    n_assignments_expected: int = 0
    assignments_by_peer: dict[str, int] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every logit of every position is equal, bit for bit."""
        return bool(self.prompts) and all(p.n_positions > 0 and p.n_different == 0 for p in self.prompts)

    @property
    def assignments_add_up(self) -> bool:
        """Whether the peers computed every pair, and no pair twice."""
        return self.n_assignments == self.n_assignments_expected


async def compare(
    running: RunningBackbone,
    stock: StockModel,
    *,
    n_tokens: int,
    prompt_tokens: Sequence[int],
    progress: Callable[[int, int], None],
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    statistics: FormStatistics | None = None,
) -> VerifyReport:
    """Return how the swarm's logits compare with stock llama.cpp's.

    Args:
        prompt_tokens: at least as many as the longest prompt; shorter prompts take their beginning.
        statistics: gets every row that is compared.

    Raises:
        ExpertUnavailable, EngineError: the swarm or llama.cpp failed.
    """
    report = VerifyReport()
    before = await _count_assignments(running)
    n_all = sum(n + n_tokens for n in prompt_lengths)
    n_done = 0
    for n_prompt in prompt_lengths:
        prompt_report = PromptReport(n_prompt)
        report.prompts.append(prompt_report)
        stock.clear()
        await running.engine.call(running.engine.context.clear)
        tokens = list(prompt_tokens[:n_prompt])
        position = 0
        while position < n_prompt + n_tokens:
            ours = await _swarm_logits(running, tokens, position)
            theirs = stock.logits(tokens, position)
            prompt_report.add(position, ours, theirs)
            if statistics is not None:
                statistics.add(ours, StockWindow.of(theirs))
            position += len(tokens)
            tokens = [int(theirs[-1].argmax())]
            n_done += len(ours)
            progress(n_done, n_all)
    after = await _count_assignments(running)
    report.assignments_by_peer = {node: after[node] - before.get(node, 0) for node in after}
    report.n_assignments = sum(report.assignments_by_peer.values())
    spec = running.manifest.spec
    report.n_assignments_expected = n_all * sum(spec.n_used(layer) for layer in spec.moe_layers)
    return report


async def _swarm_logits(running: RunningBackbone, tokens: Sequence[int], position: int) -> npt.NDArray[np.float32]:
    engine = running.engine

    def step() -> npt.NDArray[np.float32]:
        engine.decode(tokens, position, "all")
        return engine.context.all_logits()

    return await engine.call(step)


async def _count_assignments(running: RunningBackbone) -> dict[str, int]:
    """Return node id -> pairs computed so far, asked of the peers themselves."""
    counts = {}
    for node in running.holders.placement.destinations:
        try:
            connection = await running.holders.connection(node)
            answer = await connection.request(m.GetStatus(), timeout_s=STATUS_TIMEOUT_S)
            assert isinstance(answer, m.Status)  # the session checks an answer's type
            counts[str(node)] = int(json.loads(answer.data)["n_assignments"])
        except (SwarmError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise NetworkError(f"peer {node.short} does not tell its counters: {error}") from error
    return counts
