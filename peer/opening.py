"""Which model a peer serves, and where its blocks come from: a file here, a file on the web, or whoever the registry knows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from peer.auto import AutoExperts
from peer.config import PeerConfig, Progress
from peer.fetch import SliceFetcher, choose_model, fetch_manifest
from peer.giving import FileOnDemand
from peer.model_file import OpenModel, open_model_file
from peer.traffic import Traffic
from peer.trust import choose_trusted
from swarm.errors import NetworkError, Overloaded, SourceUnusable
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.block_store import BlockStore
from swarm.model.source import BlockSource
from swarm.net.pool import Pool
from swarm.registry.client import Registry
from swarm.registry.records import ModelOffer

if TYPE_CHECKING:  # an HTTP client, 13 MB that are imported once they are needed
    from peer.web_sources import WebSources
    from swarm.sources.web import Web

logger = logging.getLogger(__name__)

T = TypeVar("T")

N_OPENINGS = 5  # of a file on the web that a volunteer names; with their rests a quarter of a minute
FIRST_REST_S, MAX_REST_S = 1.0, 300.0  # a server may ask for more than our own rests, but not for ever; guessed
MAX_LOOKS = 8  # at which peers hold a model that no backbone gives away; guessed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """A model whose blocks can be had.

    Attributes:
        fetch: brings a slice's blocks here first.
        gives: where blocks come from that others ask for; it outlives the model.
        offer: whose word names the model; None: nobody's.
    """

    model: OpenModel
    fetch: Callable[[ExpertSet], Coroutine[Any, Any, None]]
    is_fetched: bool
    gives: BlockSource
    offer: ModelOffer | None = None


class Opener:
    """Opens the model that a volunteer asked for."""

    def __init__(
        self, config: PeerConfig, progress: Progress, registry: Registry, pool: Pool, traffic: Traffic, me: NodeId
    ) -> None:
        self._config = config
        self._progress = progress
        self._registry = registry
        self._pool = pool
        self._traffic = traffic
        self._me = me

    @contextlib.asynccontextmanager
    async def open(self, settled: ModelId | None) -> AsyncIterator[Opened]:
        """Yield the model; it is closed at the end.

        Args:
            settled: which one it was when this peer joined; None: it joins now.

        Raises:
            UserError: it cannot be used, or nobody offers it.
            NetworkError: who offers it cannot be reached.
        """
        config = self._config
        if config.model_file is not None:
            hashing = self._progress.hashing
            async with open_model_file(
                config.model_file, config.folders.cache, self._registry, self._pool, hashing
            ) as model:
                gives = FileOnDemand(config.model_file, model.manifest, model.source.experts)
                yield Opened(model=model, fetch=_nothing_to_fetch, is_fetched=False, gives=gives)
            return
        async with contextlib.AsyncExitStack() as stack:
            if config.model_url is not None:
                yield await self._from_url(config.model_url, stack)
            else:
                yield await self._from_registry(None if settled is None else str(settled), stack)

    async def _from_registry(self, settled: str | None, stack: contextlib.AsyncExitStack) -> Opened:
        wanted = self._config.model if settled is None else settled
        offers = await self._registry.offers()
        model, chosen = self._choose(offers, wanted, held=await self._held(offers))
        return await self._from_offers(model, chosen, stack)

    async def _from_offers(self, model: ModelId, chosen: list[ModelOffer], stack: contextlib.AsyncExitStack) -> Opened:
        manifest = await fetch_manifest(self._pool, model, chosen)
        store = BlockStore(self._config.folders.cache, manifest)
        opened = OpenModel(manifest=manifest, name=chosen[0].model_name, source=store, held=None)
        names = [source for offer in chosen for source in offer.sources]
        sources: WebSources | None = None
        if names:
            from peer.web_sources import web_sources

            sources = web_sources(await self._web(stack), names, store, self._config.folders.cache)
        return self._opened(opened, store, chosen, sources)

    async def _from_url(self, name: str, stack: contextlib.AsyncExitStack) -> Opened:
        from peer.model_url import identify
        from peer.web_sources import web_sources
        from swarm.sources.locations import locate
        from swarm.sources.web_model import WebModel

        location = locate(name, is_asked=True)
        web = await self._web(stack)
        offers = await self._registry.offers()

        def choose(fitting: Sequence[ModelOffer]) -> list[ModelOffer]:
            return self._choose(fitting, None, held={each.model for each in fitting})[1]

        try:
            found = await _patiently(lambda: WebModel.open(web, location, self._config.folders.cache))
        except (NetworkError, Overloaded) as error:  # all of it may be here, or be had elsewhere
            named_so = [each for each in offers if name in each.sources]
            if not named_so:
                raise
            logger.warning("%s", error)
            chosen = choose(named_so)
            return await self._from_offers(chosen[0].model, chosen, stack)

        named = await identify(found, location, web, self._pool, offers, choose)
        store = BlockStore(self._config.folders.cache, named.manifest)
        held = None if found.source.model_id is None else found.experts
        opened = OpenModel(manifest=named.manifest, name=named.name, source=store, held=held)
        names = [source for offer in named.offers for source in offer.sources]
        sources = web_sources(web, names, store, self._config.folders.cache, asked=(location, found))
        return self._opened(opened, store, named.offers, sources)

    async def _web(self, stack: contextlib.AsyncExitStack) -> Web:
        from swarm.sources.web import Web

        cap = self._traffic.max_download_bytes_s
        web = Web(received=self._traffic.received, pace=self._traffic.made_good, rate_bytes_s=cap)
        return await stack.enter_async_context(web)

    def _opened(
        self, model: OpenModel, store: BlockStore, offers: list[ModelOffer], sources: WebSources | None
    ) -> Opened:
        config = self._config
        trusts = (lambda offer: True) if config.publishers is None else config.publishers.knows
        auto = config.experts
        fetcher = SliceFetcher(
            self._registry,
            self._pool,
            store,
            self._progress.fetching,
            trusts=trusts,
            pace=self._traffic.made_good,
            web=sources,
            me=self._me,
            max_disk_bytes=auto.disk_bytes if isinstance(auto, AutoExperts) else config.disk_bytes,
            n_parallel=None if self._traffic.max_download_bytes_s is None else 1,
        )
        offer = offers[0] if offers else None
        return Opened(model=model, fetch=fetcher.fetch, is_fetched=True, gives=store, offer=offer)

    def _choose(
        self, offers: Sequence[ModelOffer], wanted: str | None, *, held: Collection[ModelId]
    ) -> tuple[ModelId, list[ModelOffer]]:
        if self._config.publishers is None:
            return choose_model(offers, wanted, held=held)
        return choose_trusted(offers, wanted, self._config.publishers, held=held)

    async def _held(self, offers: Sequence[ModelOffer]) -> set[ModelId]:
        """Return which models peers hold experts of, among those of which nobody else gives any."""
        given = {each.model for each in offers if each.offers_blocks or each.sources}
        others = list(dict.fromkeys(each.model for each in offers if each.model not in given))[:MAX_LOOKS]
        return {model for model in others if await self._registry.holders(model)}


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns, tried again after failures that may pass; the last one is raised."""
    for attempt in range(N_OPENINGS):
        try:
            return await work()
        except (NetworkError, Overloaded) as error:
            rest_s = FIRST_REST_S * 2**attempt
            if isinstance(error, Overloaded):
                rest_s = max(rest_s, error.retry_after_s)
            if isinstance(error, SourceUnusable) or attempt == N_OPENINGS - 1 or rest_s > MAX_REST_S:
                raise
            logger.warning("%s; asked again in %.0f s", error, rest_s)
            await asyncio.sleep(rest_s)
    raise AssertionError("the last try returns or raises")


async def _nothing_to_fetch(_: ExpertSet) -> None:
    """The blocks are in a file."""
