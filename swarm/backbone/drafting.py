"""Makes each sequence's drafter: the controller over whatever this backbone can draft with.

What is measured of steps and drafts is kept for each engine, so that a new sequence knows what the last one has learned.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from swarm.backbone.engine import Engine
from swarm.backbone.local_drafts import LocalDrafter, Memory
from swarm.backbone.local_experts import LocalExperts
from swarm.backbone.model_drafts import DraftModel
from swarm.speculation.confidence import Confidence
from swarm.speculation.controller import Controller, Experience, Source
from swarm.speculation.ngram import NgramDrafter


class Drafting:
    """Of one backbone; call it for each sequence."""

    def __init__(
        self,
        n_most: int,
        *,
        local: LocalExperts | None = None,
        model: DraftModel | None = None,
        has_ngram: bool = True,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        Args:
            n_most: tokens of a draft.
            local: draft with these, where they are enough.
            model: draft with this smaller model.
            has_ngram: draft by prompt lookup.
        """
        self._n_most = n_most
        self._local = local
        self._model = model
        self._has_ngram = has_ngram
        self._now = now
        self._confidence = Confidence()  # of local experts
        self._memories: weakref.WeakKeyDictionary[Engine, Memory] = weakref.WeakKeyDictionary()
        self._experience: weakref.WeakKeyDictionary[Engine, Experience] = weakref.WeakKeyDictionary()

    def __call__(self, engine: Engine, sequence: int) -> Controller:
        """Return a drafter for one sequence of an engine, from its beginning."""
        sources: list[Source] = []
        if self._has_ngram:
            sources.append(Source("ngram", NgramDrafter(), is_free=True))
        if self._local is not None:
            memory = self._memories.setdefault(engine, Memory())
            drafter = LocalDrafter(engine, sequence, self._local, confidence=self._confidence, memory=memory)
            sources.append(Source("local", drafter))
        if self._model is not None:
            sources.append(Source("model", self._model.drafter(engine, sequence)))
        return Controller(
            sources, self.experience(engine), n_most=self._n_most, now=self._now, trips=lambda: engine.trips
        )

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return drafter -> tokens drafted and accepted so far, by all engines."""
        found: dict[str, tuple[int, int]] = {}
        for each in list(self._experience.values()):
            for name, n_drafted in list(each.n_drafted.items()):
                drafted, accepted = found.get(name, (0, 0))
                found[name] = drafted + n_drafted, accepted + each.n_accepted[name]
        return found

    def experience(self, engine: Engine) -> Experience:
        """Return what was measured on an engine; it goes on changing."""
        found = self._experience.get(engine)
        if found is None:
            found = self._experience[engine] = Experience()
        return found
