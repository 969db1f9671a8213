"""One sequence on an engine: its prompt is prefilled, then each step adds one token, or several where drafts are accepted.

Between steps the KV cache holds every token but the last one drawn. A step computes that one and the drafts after it, draws,
and forgets the drafts that were refused:

    cache   prompt ... a            step: b + drafts c d e, four rows, one round trip per layer
            prompt ... a b c d e    drawn: c, d, x
            prompt ... a b c d      x is the next step's first token
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable

from swarm.backbone.engine import Engine
from swarm.speculation.accept import DraftStats, accept
from swarm.speculation.drafter import Drafter, Observer
from swarm.speculation.ngram import NgramDrafter

logger = logging.getLogger(__name__)

MAX_DRAFT = 64  # tokens of a draft; a guess: far above what pays on any path


class Continuation:
    """Owns one of the engine's sequences from `start` on; one at a time for each."""

    def __init__(
        self,
        engine: Engine,
        draw: Callable[[int], int],
        *,
        n_batch: int,
        n_draft: int = 0,
        stats: DraftStats | None = None,
        drafter: Drafter | None = None,
        sequence: int = 0,
    ) -> None:
        """Prepare.

        Args:
            draw: draws a token from a row of the last step's logits (index as in `LlamaContext.logits`); called on the
                engine's thread.
            n_draft: most tokens drafted in a step; 0: no drafts.
            drafter: who drafts them, told of each step if it is an `Observer`; None: prompt lookup, always.
        """
        self._engine = engine
        self._sequence = sequence
        self._draw = draw
        self._n_batch = n_batch
        self._n_draft = min(n_draft, n_batch - 1)
        self._drafter = NgramDrafter() if drafter is None else drafter
        self._observer = self._drafter if isinstance(self._drafter, Observer) else None
        self._tokens: list[int] = []
        self.stats = stats if stats is not None else DraftStats()

    async def start(self, prompt: list[int]) -> None:
        """Empty the sequence and compute the prompt; `first` draws from its last row.

        Raises:
            ExpertUnavailable, EngineError: as `Engine.decode`.
        """
        await self._engine.call(lambda: self._engine.context.remove(self._sequence, 0))
        for at in range(0, len(prompt), self._n_batch):
            chunk = prompt[at : at + self._n_batch]
            await self._engine.call(
                lambda chunk=chunk, at=at: self._engine.decode(chunk, at, "last", sequence=self._sequence)  # type: ignore[misc]
            )
        self._remember(prompt)

    async def tokens(self, n_most: int) -> AsyncGenerator[int, None]:
        """Yield up to `n_most` tokens after the prompt; a step is made when its first token is asked for."""
        drawn = [await self.first()] if n_most > 0 else []
        while drawn:
            for token in drawn:
                yield token
            n_most -= len(drawn)
            drawn = await self.step(n_most) if n_most > 0 else []

    async def first(self) -> int:
        """Return the first token after the prompt."""
        token = await self._engine.call(lambda: self._draw(-1))
        self._remember([token])
        return token

    async def step(self, n_most: int) -> list[int]:
        """Return the next tokens: at least one, at most `n_most`, the caller's room in context and answer.

        Raises:
            ExpertUnavailable, EngineError: nothing was drawn and the cache is as it was; the step can be tried again. (Not so
                if a memory that cannot go back fails while it is computed anew: then this sequence is lost.)
        """
        n_drafted, drawn = await self._engine.call(lambda: self._run(n_most - 1))
        self.stats.count(n_drafted, len(drawn))
        self._remember(drawn)
        return drawn

    def _drafts(self, n_most: int) -> list[int]:
        n = min(self._n_draft, n_most)
        draft_tokens = self._drafter.propose(self._tokens, n)[:n] if n > 0 else []
        for index, token in enumerate(draft_tokens):
            if self._engine.model.is_end_of_generation(token):
                return draft_tokens[:index]  # nothing follows it: its row would be of no use
        return draft_tokens

    def _run(self, n_most: int) -> tuple[int, list[int]]:
        """One step, on the engine's thread; return how many tokens were drafted, and what was drawn."""
        draft_tokens = self._drafts(n_most)
        position = len(self._tokens) - 1
        began_at = time.perf_counter()
        self._engine.decode([self._tokens[-1], *draft_tokens], position, "all", sequence=self._sequence)
        if self._observer is not None:
            self._observer.observe(1 + len(draft_tokens), time.perf_counter() - began_at)
        drawn = accept(draft_tokens, self._draw)
        if len(drawn) <= len(draft_tokens):
            self._forget(position + len(drawn), [*self._tokens, *drawn[:-1]])
        return len(draft_tokens), drawn

    def _forget(self, position: int, kept: list[int]) -> None:
        """Remove everything from `position` on from the cache; `kept` is what stays."""
        if self._engine.context.remove(self._sequence, position):
            return
        # A recurrent memory cannot go back: its state is computed anew, once, and this sequence drafts no more.
        logger.warning("this model's memory cannot take back a draft; drafts are off for this answer")
        self._n_draft = 0
        self._engine.context.remove(self._sequence, 0)
        for at in range(0, position, self._n_batch):
            self._engine.decode(kept[at : min(at + self._n_batch, position)], at, "none", sequence=self._sequence)

    def _remember(self, tokens: list[int]) -> None:
        self._tokens += tokens
