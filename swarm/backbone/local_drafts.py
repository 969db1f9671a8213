"""Drafts by the backbone alone: its router may choose local experts only, so no layer leaves this process.

    propose: token after token on the sequence's own KV cache, greedily -> the cache is put back -> the drafts

A draft ends early where it is not likely enough that the real model says all of it: by the probability that the model, so
maimed, gives its own tokens, and by what such probabilities were worth before (`Confidence`). How little is enough is the
controller's to say, by what a token brings and costs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import Engine
from swarm.backbone.local_experts import DraftExperts, LocalExperts
from swarm.errors import EngineError, SwarmError
from swarm.speculation.confidence import Confidence

logger = logging.getLogger(__name__)

LEAST_REACH = 0.1  # until the controller says otherwise; guessed: right for steps of half a second


@dataclass(slots=True)
class Memory:
    """What is known of an engine's KV cache.

    Attributes:
        can_forget: a part of a sequence; None: not tried yet. A recurrent memory cannot, and gets no drafts.
    """

    can_forget: bool | None = None


class LocalDrafter:
    """A `Drafter` of one sequence of one engine; it works on the engine's thread.

    Attributes:
        least_reach: a token is drafted while it and those before it are together at least so likely.
        reaches: of the latest draft's tokens, how likely each and all before it are accepted.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: int,
        local: LocalExperts,
        *,
        confidence: Confidence | None = None,
        memory: Memory | None = None,
        least_reach: float = LEAST_REACH,
    ) -> None:
        """`confidence`, `memory`: of all drafters of this kind, and of this engine."""
        self.least_reach = least_reach
        self.reaches: list[float] = []
        self._engine = engine
        self._sequence = sequence
        self._local = local
        self._experts = DraftExperts(local)
        self._memory = memory if memory is not None else Memory()
        self._confidence = confidence if confidence is not None else Confidence()
        self._latest: tuple[int, list[int], list[float]] = (
            0,
            [],
            [],
        )  # where a draft began, its tokens, their probabilities

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens; none while a layer keeps fewer experts than a token uses.

        The KV cache must hold all of `tokens` but the last, and does so again afterwards.

        Raises:
            EngineError: the cache could not be put back; the sequence is lost.
        """
        self._learn(tokens)
        self.reaches = []
        context, at = self._engine.context, len(tokens) - 1
        n = min(n, context.n_ctx - len(tokens))
        if n < 1 or self._memory.can_forget is False or not self._local.can_draft:
            return []
        state = context.save(self._sequence) if self._memory.can_forget is None else None
        drafts: list[int] = []
        probabilities: list[float] = []
        try:
            token, reach = tokens[-1], 1.0
            for position in range(at, at + n):
                row = self._engine.draft_row(token, position, self._sequence, self._experts, self._experts.left_out)
                token = int(row.argmax())
                probability = _probability(row, token)
                reach *= self._confidence.acceptance(probability)
                if reach < self.least_reach or self._engine.model.is_end_of_generation(token):
                    break
                drafts.append(token)
                probabilities.append(probability)
                self.reaches.append(reach)
        except SwarmError as error:
            logger.debug("no draft: %s", error)
            drafts = []
        self._latest = len(tokens), drafts, probabilities[: len(drafts)]
        self._put_back(at, state)
        return drafts if self._memory.can_forget else []

    def _learn(self, tokens: Sequence[int]) -> None:
        """Learn from what became of the latest draft."""
        start, drafts, probabilities = self._latest
        self._latest = 0, [], []
        for at, (token, probability) in enumerate(zip(drafts, probabilities, strict=True), start):
            if at >= len(tokens):
                return
            self._confidence.learn(probability, tokens[at] == token)
            if tokens[at] != token:
                return

    def _put_back(self, at: int, state: npt.NDArray[np.uint8] | None) -> None:
        context = self._engine.context
        self._memory.can_forget = context.remove(self._sequence, at)
        if self._memory.can_forget:
            return
        logger.warning("this model's memory cannot take back a draft: local experts draft nothing")
        context.remove(self._sequence, 0)
        if state is None or not context.restore(self._sequence, state):
            raise EngineError("the memory of a sequence could not be put back after a draft")


def _probability(row: npt.NDArray[np.float32], token: int) -> float:
    """Return the softmax of one token."""
    return float(1.0 / np.exp(row - row[token]).sum())
