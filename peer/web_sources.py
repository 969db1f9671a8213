"""Blocks from web servers: several places of one model, the fastest first, those that fail left alone for a while or for good."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path

from swarm.errors import (
    IntegrityError,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    SourceUnusable,
    SwarmError,
    UserError,
)
from swarm.interruptible import run_interruptibly
from swarm.model.block_store import BlockStore
from swarm.model.manifest import Manifest
from swarm.model.ranges import Pair
from swarm.sources.locations import Location, locate
from swarm.sources.web import Web
from swarm.sources.web_file import RangesIgnored
from swarm.sources.web_model import WebModel

logger = logging.getLogger(__name__)

WEB_FAILURES = (NetworkError, RemoteProtocolError, Overloaded, IntegrityError)
MAX_FAILURES = 6  # in a row, each after its rest: a minute in all; guessed
MAX_STRIKES = 2  # wrong bytes, or broken rules: once may be somebody on the way
FIRST_REST_S, MAX_REST_S = 1.0, 30.0  # doubling; a server's Retry-After may be longer
RATE_SHARE = 0.3  # of a new figure in the mean; guessed
# What a source was asked for is asked of another as well after so many times what the fastest other would take, but not before
# SLOW_S. A server may trickle at MIN_RATE_BYTES_S (`sources.web`) and so hold 16 MB for half an hour. Guessed.
SLOWER, SLOW_S = 4.0, 20.0
USUAL_BYTES_S = 200_000  # what others give, where none was measured: 84 s for 16 MB; guessed

Keep = Callable[[Pair], None]
"""Told of each block once it is checked and kept."""


class WebSource:
    """One place of the model on the web, and how it has done."""

    def __init__(self, web: Web, location: Location, store: BlockStore, cache_dir: Path) -> None:
        self.location = location
        self.rate_bytes_s: float | None = None  # of one connection
        self.rests_until = float("-inf")
        self.error: SwarmError | None = None
        self.is_dead = False
        self._web = web
        self._store = store
        self._cache_dir = cache_dir
        self._model: WebModel | None = None
        self._opening = asyncio.Lock()
        self._n_failures = self._n_strikes = 0

    def use(self, model: WebModel) -> None:
        """Take a model that is open already, and is the manifest's."""
        self._model = model

    @property
    def has_ranges(self) -> bool:
        """Whether parts can be asked for, as far as is known."""
        return self._model is None or self._model.has_ranges

    async def fetch(self, layer: int, experts: Sequence[int], missing: Iterable[Pair], keep: Keep) -> None:
        """Bring some of a layer's blocks into the store; from a server that gives no parts, all that are `missing`.

        Raises:
            IntegrityError: some were wrong; the others are kept.
            SourceUnusable, RemoteProtocolError, Overloaded, NetworkError: this source does not give them (now).
            UserError: the disk.
        """
        async with self._opening:
            model = self._model
            if self.error is not None and (self.is_dead or time.monotonic() < self.rests_until):
                raise self.error  # found out by another connection while this one waited
            if model is None:
                model = self._model = await self._open(self._store.manifest)
            if not model.has_ranges:
                await self._stream(model, [pair for pair in missing if not self._store.has(*pair)], keep)
                return
        wanted = [expert for expert in experts if not self._store.has(layer, expert)]
        if not wanted:
            return
        began = time.monotonic()
        n_bytes = 0
        error: IntegrityError | None = None
        for expert, block in await model.read_blocks(layer, wanted):
            n_bytes += len(block)
            try:
                await self._add((layer, expert), block, keep)
            except IntegrityError as failure:
                error = failure
        if error is not None:
            raise error
        rate = n_bytes / max(1e-6, time.monotonic() - began)
        self.rate_bytes_s = (
            rate if self.rate_bytes_s is None else self.rate_bytes_s + RATE_SHARE * (rate - self.rate_bytes_s)
        )

    def outrun(self, most_bytes_s: float, now: float) -> None:
        """Others have brought what this source was asked for before it did: rest. It gave no more than `most_bytes_s`."""
        self.rate_bytes_s = most_bytes_s if self.rate_bytes_s is None else min(self.rate_bytes_s, most_bytes_s)
        self.failed(NetworkError(f"{self.location.name} is far slower than others"), now)

    async def _open(self, manifest: Manifest) -> WebModel:
        model = await WebModel.open(self._web, self.location, self._cache_dir)
        if not model.is_part_of(manifest):
            raise SourceUnusable(f"{self.location.name} is another model")
        return model

    async def _stream(self, model: WebModel, pairs: Sequence[Pair], keep: Keep) -> None:
        if not pairs:
            return
        if why := model.why_no_stream(pairs):
            raise SourceUnusable(f"{self.location.name}: {why}")
        logger.info("%s: the server gives no parts of files, so all of it is read", self.location.name)
        async with aclosing(model.stream_blocks(pairs)) as blocks:  # else a wrong block would leave the connection open
            async for pair, block in blocks:
                await self._add(pair, block, keep)

    async def _add(self, pair: Pair, block: bytes, keep: Keep) -> None:
        await run_interruptibly(lambda _: self._store.add(*pair, block))
        self._n_failures = 0
        keep(pair)

    def failed(self, error: SwarmError, now: float) -> None:
        """Take a failure in: rest, or be asked no more."""
        if error is self.error:
            return
        self.error = error
        if isinstance(error, SourceUnusable):
            self.is_dead = True
        elif isinstance(error, IntegrityError | RemoteProtocolError) and not isinstance(error, RangesIgnored):
            self._n_strikes += 1
            self.is_dead = self._n_strikes >= MAX_STRIKES
        elif now >= self.rests_until:  # else it is the same failure, of another connection
            self._n_failures += 1
            self.is_dead = self._n_failures >= MAX_FAILURES
            rest_s = min(MAX_REST_S, FIRST_REST_S * 2 ** (self._n_failures - 1)) * random.uniform(0.7, 1.3)
            if isinstance(error, Overloaded):
                rest_s = max(rest_s, error.retry_after_s)
            self.rests_until = now + rest_s
            level = (
                logging.INFO if rest_s <= 2 * MAX_REST_S else logging.WARNING
            )  # a person may want to know why nothing moves
            logger.log(level, "%s; asked again in %.0f s", error, rest_s)
        if self.is_dead:
            logger.warning("not used any more: %s", error)


class WebSources:
    """All places of a model on the web."""

    def __init__(self, sources: Sequence[WebSource], *, now: Callable[[], float] = time.monotonic) -> None:
        self._sources = list(sources)
        self._now = now

    @property
    def is_alive(self) -> bool:
        """Whether one of them may still give something, now or later."""
        return any(not each.is_dead for each in self._sources)

    @property
    def error(self) -> SwarmError | None:
        """What one of them said last."""
        return next((each.error for each in reversed(self._sources) if each.error is not None), None)

    def best(self, *, but: WebSource | None = None) -> WebSource | None:
        """Return who is to be asked now: the fastest, those not measured yet before; None: nobody, or nobody `but` one."""
        now = self._now()
        free = [each for each in self._sources if not each.is_dead and each.rests_until <= now and each is not but]
        return min(
            free,
            key=lambda each: (not each.has_ranges, -(each.rate_bytes_s or float("inf"))),
            default=None,
        )

    async def fetch(
        self, source: WebSource, layer: int, experts: Sequence[int], missing: Iterable[Pair], keep: Keep
    ) -> None:
        """Have a source bring blocks; what it does not bring stays missing, and the source is judged by that."""
        try:
            await source.fetch(layer, experts, missing, keep)
        except WEB_FAILURES as error:
            source.failed(error, self._now())

    def patience_s(self, source: WebSource, n_bytes: int) -> float:
        """Return after how long without so many bytes of a source they are to be asked of another as well."""
        others = [each.rate_bytes_s or 0.0 for each in self._sources if each is not source and not each.is_dead]
        fastest = max(others, default=0.0)
        return max(SLOW_S, SLOWER * n_bytes / fastest if fastest else n_bytes / USUAL_BYTES_S)

    def outrun(self, source: WebSource, n_bytes: int, seconds: float) -> None:
        """Others have brought what a source did not bring in so many seconds."""
        source.outrun(n_bytes / max(1e-6, seconds), self._now())

    async def until_rested(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Wait until one of them may be asked again."""
        until = min((each.rests_until for each in self._sources if not each.is_dead), default=self._now())
        await sleep(max(0.0, until - self._now()))


def web_sources(
    web: Web,
    names: Iterable[str],
    store: BlockStore,
    cache_dir: Path,
    *,
    asked: tuple[Location, WebModel] | None = None,
) -> WebSources | None:
    """Return the places that `names` of a model's records lead to, and the one that the operator gave; None: there are none."""
    sources = []
    if asked is not None:
        sources.append(WebSource(web, asked[0], store, cache_dir))
        sources[0].use(asked[1])
    for name in dict.fromkeys(names):
        if asked is not None and name == asked[0].name:
            continue
        try:
            location = locate(name, is_asked=False)
        except UserError as error:
            logger.info("a record names a source that cannot be used: %s", error)
            continue
        sources.append(WebSource(web, location, store, cache_dir))
    return WebSources(sources) if sources else None
