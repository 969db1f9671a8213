"""Tells the registry how often this backbone's router chose each expert, so that volunteers hold what is wanted.

What is told: for each layer, one of sixteen steps for each expert, how many tokens that is of, and in which time. Nothing of
any text, and nothing at all before MIN_TOKENS, which hide what a single short request was about.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from swarm.dispatch.popularity import Popularity
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.announcer import Announcer, SequenceNumbers
from swarm.registry.client import Registry
from swarm.registry.records import MAX_TTL_S, MAX_WINDOW_S, RoutingHistogram, levels_of

logger = logging.getLogger(__name__)

CHECK_S = 30.0  # also the least time between two records
PUBLISH_S = 120.0  # the lease of 300 s outlives two that get lost
MIN_TOKENS = 256  # guessed: a few short requests
BIG_CHANGE = 0.15  # of the choices of all layers together that go elsewhere than what was told last; guessed
BIG_RATE_CHANGE = 2.0  # times as many tokens a second, or as few


class HistogramPublisher:
    """Publishes one backbone's histogram for ever. It is not withdrawn: a backbone that restarts wants the same."""

    def __init__(
        self,
        registry: Registry,
        identity: Identity,
        numbers: SequenceNumbers,
        popularity: Popularity,
        model: ModelId,
        *,
        now: Callable[[], float],
    ) -> None:
        """`numbers`: those of the node's other records, `now`: the clock that `popularity` was made with."""
        self._identity = identity
        self._popularity = popularity
        self._model = model
        self._now = now
        self._announcer = Announcer(registry, identity, numbers, lambda seq, address: self._record(seq))
        self._told: tuple[npt.NDArray[np.float64], float] | None = None  # shares and rate of the last one
        self._told_at = float("-inf")
        self._has_failed = False

    async def run(self) -> None:
        """Look every CHECK_S whether there is something to tell. A registry that takes no histograms is asked again."""
        while True:
            await asyncio.sleep(CHECK_S)
            self._popularity.fade(self._now())
            if not self.is_due():
                continue
            try:
                await self._announcer.announce()
            except SwarmError as error:
                logger.log(
                    logging.DEBUG if self._has_failed else logging.INFO, "cannot tell what experts are used: %s", error
                )
                self._has_failed = True
                continue
            self._has_failed = False
            self._told = self._shares(), self._rate()
            self._told_at = self._now()

    def is_due(self) -> bool:
        """Return whether a record is to be published now."""
        if self._popularity.n_tokens < MIN_TOKENS:
            return False
        if self._told is None or self._now() >= self._told_at + PUBLISH_S:
            return True
        shares, rate = self._told
        moved = float(np.abs(self._shares() - shares).sum()) / 2 / len(shares)
        ratio = self._rate() / rate
        return moved > BIG_CHANGE or not 1 / BIG_RATE_CHANGE < ratio < BIG_RATE_CHANGE

    def _rate(self) -> float:
        return self._popularity.n_tokens / self._popularity.window_s

    def _shares(self) -> npt.NDArray[np.float64]:
        counts = self._popularity.counts  # [L, E]
        shares: npt.NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-9)
        return shares

    def _record(self, seq: int) -> RoutingHistogram:
        counts = np.rint(self._popularity.counts).astype(np.int64)  # [L, E]
        return RoutingHistogram(
            node=self._identity.node_id,
            seq=seq,
            ttl_s=MAX_TTL_S,
            model=self._model,
            n_tokens=round(self._popularity.n_tokens),
            window_s=min(max(1, round(self._popularity.window_s)), MAX_WINDOW_S),
            loads=tuple(
                (layer, levels_of(row.tolist())) for layer, row in zip(self._popularity.layers, counts, strict=True)
            ),
        )
