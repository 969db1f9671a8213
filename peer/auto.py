"""`--experts auto`: which experts a volunteer takes by itself, when it joins and later. The rules: `swarm.registry.scarcity`.

join:   look -> choose -> claim (an announcement that says it is loading and choosing) -> look again -> choose anew if others
        have come at the same time, until that changes nothing -> the daemon says that it has chosen
later:  look now and then -> is another slice much scarcer? -> the daemon loads it beside the old one
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm.errors import SwarmError, UserError
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.memory import free_memory_bytes
from swarm.model.spec import ModelSpec
from swarm.registry.publishers import Publishers
from swarm.registry.records import ExpertAnnouncement, ModelOffer, RoutingHistogram
from swarm.registry.scarcity import Pool, choose_slice, foresee, is_move_worthwhile, scarcity

logger = logging.getLogger(__name__)

# What a peer takes beside its slice (docs/memory.md).
OVERHEAD_BYTES = 150_000_000
SHARE_OF_MEMORY = 0.5  # of what is free, unless a person says how much; guessed
SHARE_OF_DISK = 0.9
# From a claim until the registry is looked at again; guessed: others' claims of the same moment have arrived by then.
SETTLE_S = 1.0
MAX_LOOKS = 10  # newcomers who keep coming may change a choice so often: then it is kept; guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoExperts:
    """How much a volunteer gives; None: a share of what is free."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None

    def budget_bytes(self, cache: Path | None) -> int:
        """Return how large the slice may be; `cache`: where its blocks are kept, None if they stay where they are."""
        memory = self.memory_bytes
        if memory is None:
            free = free_memory_bytes()
            if free is None:
                raise UserError("cannot tell how much memory is free: give --memory SIZE, for example --memory 8GB")
            memory = int(free * SHARE_OF_MEMORY)
        budget = memory - OVERHEAD_BYTES
        if cache is not None:
            free_disk = self.disk_bytes
            if free_disk is None:
                cache.mkdir(parents=True, exist_ok=True)
                free_disk = int(shutil.disk_usage(cache).free * SHARE_OF_DISK)
            budget = min(budget, free_disk)
        return budget


class PoolRegistry(Protocol):
    """What choosing needs of a registry."""

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        """Return the live announcements."""
        ...

    async def histograms(self, model: ModelId) -> list[RoutingHistogram]:
        """Return how the backbones use the model."""
        ...

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        """Return who serves the model."""
        ...


class Chooser:
    """Chooses one peer's experts of one model."""

    def __init__(
        self,
        registry: PoolRegistry,
        spec: ModelSpec,
        model: ModelId,
        node: NodeId,
        *,
        budget_bytes: int,
        among: ExpertSet | None = None,
        publishers: Publishers | None = None,
    ) -> None:
        """`publishers`: whose histograms count; None: anybody's."""
        self._registry = registry
        self._spec = spec
        self._model = model
        self._node = node
        self._budget_bytes = budget_bytes
        self._among = among
        self._publishers = publishers
        self._histograms: list[RoutingHistogram] = []

    @property
    def _block_bytes(self) -> list[int]:
        return [self._spec.block_size_bytes(layer) for layer in self._spec.moe_layers]

    async def join(self, claim: Callable[[ExpertSet], Awaitable[None]]) -> ExpertSet:
        """Return the experts to hold, once `claim` has announced them and nobody else of this moment has the same.

        Raises:
            UserError: not one expert fits the budget.
            NetworkError: no registry answers.
        """
        experts = self._choose(self._foreseen(await self._look()))
        for _ in range(MAX_LOOKS):
            await claim(experts)
            await asyncio.sleep(SETTLE_S)
            try:
                better = self._choose(self._foreseen(await self._look()))
            except SwarmError as error:
                logger.info("cannot look at the registry again: %s", error)
                break
            if better == experts:
                break
            logger.info("others have come at the same time: choosing again")
            experts = better
        return experts

    async def better(self, held: ExpertSet, since_s: float) -> ExpertSet | None:
        """Return the slice to move to from `held`, None to stay; `since_s` as `is_move_worthwhile`'s."""
        others = await self._look()
        scarce = self._scarcity(others)
        better = self._pick(scarce)
        layers = self._spec.moe_layers
        return better if is_move_worthwhile(scarce, layers, held, better, since_s=since_s) else None

    def size_bytes(self, experts: ExpertSet) -> int:
        """Return how much the experts' blocks take."""
        return sum(self._spec.block_size_bytes(layer) * len(chosen) for layer, chosen in experts.by_layer.items())

    async def _look(self) -> list[ExpertAnnouncement]:
        """Return the others that are announced, and learn what is wanted."""
        listed = await self._registry.holders(self._model)
        try:
            histograms = await self._registry.histograms(self._model)
            offers = await self._registry.offers(self._model)
        except SwarmError as error:
            logger.info("cannot ask how the model's experts are used: %s", error)
        else:
            known = self._publishers
            trusted = {offer.node for offer in offers if known is None or known.knows(offer)}
            self._histograms = [each for each in histograms if each.node in trusted]
        return [record for record in listed if record.node != self._node]

    def _foreseen(self, others: Sequence[ExpertAnnouncement]) -> list[ExpertAnnouncement]:
        pool = Pool(self._spec.moe_layers, self._spec.n_expert, self._histograms)

        def choose(so_far: Sequence[ExpertAnnouncement], rival: ExpertAnnouncement) -> ExpertSet:
            pool.extend(so_far[pool.n_peers :])
            if set(rival.experts.by_layer) != set(self._spec.moe_layers):
                return (
                    rival.experts
                )  # it keeps to some layers, or takes less than one expert: nobody knows which others it may
            chosen = choose_slice(
                pool.scarcity(),
                self._spec.moe_layers,
                self._block_bytes,
                self.size_bytes(rival.experts),
                rival.node,
            )
            return chosen if chosen.by_layer else rival.experts

        return foresee(others, self._node, choose)

    def _scarcity(self, others: Sequence[ExpertAnnouncement]) -> npt.NDArray[np.float64]:
        return scarcity(self._spec.moe_layers, self._spec.n_expert, self._histograms, others)

    def _choose(self, others: Sequence[ExpertAnnouncement]) -> ExpertSet:
        experts = self._pick(self._scarcity(others))
        if not experts.by_layer:
            least = min(self._block_bytes)
            raise UserError(
                f"not one expert fits: got {max(0, self._budget_bytes)} bytes for the slice, expected at least {least}; "
                f"give more --memory (a peer takes {OVERHEAD_BYTES // 1_000_000} MB beside its slice) or --disk"
            )
        return experts

    def _pick(self, scarce: npt.NDArray[np.float64]) -> ExpertSet:
        return choose_slice(
            scarce,
            self._spec.moe_layers,
            self._block_bytes,
            self._budget_bytes,
            self._node,
            among=self._among,
        )


def require_memory(spec: ModelSpec, experts: ExpertSet, memory_bytes: int | None) -> None:
    """Raise UserError if a peer that holds these experts takes more memory than it may; None: it may."""
    if memory_bytes is None:
        return
    size = sum(spec.block_size_bytes(layer) * len(chosen) for layer, chosen in experts.by_layer.items())
    if size + OVERHEAD_BYTES > memory_bytes:
        raise UserError(
            f"{experts} do not fit into --memory: got {memory_bytes} bytes, expected at least {size + OVERHEAD_BYTES}; "
            "name fewer --experts or --layers, or give --experts auto"
        )
