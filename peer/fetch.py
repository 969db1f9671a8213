"""Gets a model's manifest and the blocks of a slice from nodes that offer them, and checks every byte.

One request per (layer, expert). Blocks land in a BlockStore, so a download that was cut goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import (
    IntegrityError,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
    UserError,
)
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.interruptible import run_interruptibly
from swarm.model.block_store import BlockStore
from swarm.model.manifest import Manifest
from swarm.net.connection import Connection
from swarm.net.pool import Pool
from swarm.registry.client import Registry
from swarm.registry.records import ModelOffer
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

N_PARALLEL = 4  # block requests under way; guessed: hides a round trip without holding many blocks in memory
BLOCK_TIMEOUT_S = 120.0  # one block; guessed: 88 MB at 6 Mbit/s
MANIFEST_TIMEOUT_S = 30.0
N_ATTEMPTS = 3  # per block, over all who offer the model
RETRY_S = 0.5
FAILURES = (NetworkError, RemoteProtocolError, RemoteRefused, IntegrityError, Overloaded)  # of one offer: try the next


def choose_model(offers: Sequence[ModelOffer], wanted: str | None) -> tuple[ModelId, list[ModelOffer]]:
    """Return the model that `wanted` names (a name, `name@prefix` or an id prefix; None: the only one) and its offers.

    Raises:
        UserError: no such model, or several.
    """
    models: dict[ModelId, list[ModelOffer]] = {}
    without_blocks: dict[ModelId, ModelOffer] = {}
    for offer in offers:
        if wanted is None or _matches(offer, wanted):
            if offer.offers_blocks:
                models.setdefault(offer.model, []).append(offer)
            else:
                without_blocks[offer.model] = offer
    if not models and without_blocks:
        names = ", ".join(sorted(f"{offer.model_name}@{id_.short}" for id_, offer in without_blocks.items()))
        subject = f"model {names} is" if len(without_blocks) == 1 else f"models {names} are"
        raise UserError(f"{subject} served, but no backbone offers its experts; give --model FILE")
    if not models:
        if wanted is None:
            raise UserError("the registry offers no model yet; start a backbone with swarm serve, or give --model FILE")
        raise UserError(f"the registry offers no model {wanted!r}; swarm peers lists what it knows")
    if len(models) > 1:
        names = ", ".join(sorted(f"{of[0].model_name}@{model.short}" for model, of in models.items()))
        raise UserError(f"several models fit, choose one with --model: {names}")
    return next(iter(models.items()))


def _matches(offer: ModelOffer, wanted: str) -> bool:
    full_name = f"{offer.model_name}@{offer.model.short}"
    return wanted in (offer.model_name, full_name) or (len(wanted) >= 4 and str(offer.model).startswith(wanted))


async def fetch_manifest(pool: Pool, model: ModelId, offers: Sequence[ModelOffer]) -> Manifest:
    """Return the model's manifest from the first offer that gives the right one.

    Raises:
        NetworkError: nobody did.
    """
    error: SwarmError | None = None
    for offer in offers:
        try:
            connection = await _connect(pool, offer)
            answer = await connection.request(m.GetManifest(model_id=model), timeout_s=MANIFEST_TIMEOUT_S)
            assert isinstance(answer, m.ManifestBytes)  # the session checks an answer's type
            if hashlib.sha256(answer.data).digest() != model.raw:
                raise IntegrityError(f"node {offer.node.short} sent a manifest that is not model {model.short}'s")
            return Manifest.from_bytes(answer.data)
        except FAILURES as failure:
            logger.warning("no manifest from node %s: %s", offer.node.short, failure)
            error = failure
    raise NetworkError(f"nobody gives the manifest of model {model.short}: {error}")


async def _at_once() -> None:
    """Wait for nothing."""


class SliceFetcher:
    """Fetches the missing blocks of one slice."""

    def __init__(
        self,
        registry: Registry,
        pool: Pool,
        store: BlockStore,
        progress: Callable[[int, int], None],
        *,
        trusts: Callable[[ModelOffer], bool] = lambda offer: True,
        pace: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        """Prepare.

        Args:
            progress: told (blocks there, blocks wanted) after each block.
            trusts: whether an offer's publisher may be asked: every block is checked, but not how long a stranger lets us wait.
            pace: waited for before each block: a cap on traffic.
        """
        self._registry = registry
        self._pool = pool
        self._store = store
        self._progress = progress
        self._trusts = trusts
        self._pace = pace
        self._offers: list[ModelOffer] = []
        self._failures: dict[NodeId, int] = {}  # a rising number for each: who failed last is asked last
        self._n_failures = 0

    async def fetch(self, experts: ExpertSet) -> None:
        """Return when the store has every block of `experts`.

        Raises:
            NetworkError: a block could not be had from anybody.
            IntegrityError: everybody who offers a block sends wrong bytes.
        """
        missing = [pair for pair in experts if not self._store.has(*pair)]
        n_there = len(experts) - len(missing)
        self._progress(n_there, len(experts))
        if not missing:
            return
        self._offers = await self._find_offers()
        todo = iter(missing)

        async def work() -> None:
            nonlocal n_there
            for layer, expert in todo:  # the workers share one iterator: each block is taken once
                await self._pace()
                await self._fetch_block(layer, expert)
                n_there += 1
                self._progress(n_there, len(experts))

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(N_PARALLEL, len(missing))):
                    workers.create_task(work())
        except* SwarmError as group:
            raise group.exceptions[0] from None

    async def _fetch_block(self, layer: int, expert: int) -> None:
        error: SwarmError | None = None
        for attempt in range(N_ATTEMPTS):
            if attempt > 0:
                await asyncio.sleep(RETRY_S * attempt)
                try:
                    self._offers = await self._find_offers()
                except (NetworkError, RemoteRefused) as failure:  # the offers known so far may do
                    logger.warning("cannot ask the registry again: %s", failure)
            for offer in sorted(self._offers, key=lambda each: self._failures.get(each.node, 0)):
                try:
                    await self._from(offer, layer, expert)
                    return
                except FAILURES as failure:
                    logger.warning("no block of layer %d, expert %d: %s", layer, expert, failure)
                    error = failure
                    self._n_failures += 1
                    self._failures[offer.node] = self._n_failures
        if isinstance(error, IntegrityError):
            raise error
        raise NetworkError(f"nobody gives layer {layer}, expert {expert}: {error or 'no offer left'}")

    async def _find_offers(self) -> list[ModelOffer]:
        offers = await self._registry.offers(self._store.manifest.model_id)
        return [offer for offer in offers if offer.offers_blocks and self._trusts(offer)]

    async def _from(self, offer: ModelOffer, layer: int, expert: int) -> None:
        connection = await _connect(self._pool, offer)
        request = m.GetBlock(model_id=self._store.manifest.model_id, layer=layer, expert=expert)
        answer = await connection.request(request, timeout_s=BLOCK_TIMEOUT_S)
        assert isinstance(answer, m.BlockBytes)  # the session checks an answer's type
        await run_interruptibly(lambda _: self._store.add(layer, expert, answer.data))


async def _connect(pool: Pool, offer: ModelOffer) -> Connection:
    return await pool.reach(offer)
