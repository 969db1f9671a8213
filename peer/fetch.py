"""Gets a model's manifest and the blocks of a slice from the web and from nodes, and checks every byte.

The web is asked first: it costs nobody's tokens. Then peers that hold the same blocks and have nothing to compute, then
backbones, whose line is what a star's speed hangs on. Of nodes, one request per (layer, expert). Blocks land in a BlockStore, so
a download that was cut goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.filesize import decimal

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
from swarm.model.ranges import GROUP_BYTES, Group, Pair, groups_of
from swarm.net.pool import Pool
from swarm.registry.client import Registry
from swarm.registry.records import ExpertAnnouncement, ModelOffer
from swarm.wire import messages as m

if TYPE_CHECKING:
    from peer.web_sources import WebSource, WebSources  # an HTTP client, 13 MB that few peers need

logger = logging.getLogger(__name__)

N_PARALLEL = 4  # block requests under way; guessed: hides a round trip without holding many blocks in memory
BLOCK_TIMEOUT_S = 120.0  # one block; guessed: 88 MB at 6 Mbit/s
PEER_TIMEOUT_S = 40.0  # one block of a peer, which may be anybody; guessed: 30 MB at 6 Mbit/s
SLOW_BYTES_S = 200_000  # below, a peer's blocks are not worth waiting for where a backbone gives them; guessed
MAX_PEERS = 16  # asked for blocks, drawn anew at each look; guessed
SPARE_DISK_BYTES = 64_000_000  # left free; guessed: a block is written beside the old ones, and others write, too
MANIFEST_TIMEOUT_S = 30.0
N_ATTEMPTS = 3  # per block, over all who offer the model
RETRY_S = 0.5
BUSY_PATIENCE_S = 120.0  # per block, while who has it computes, and nobody else gives it; guessed
MAX_BUSY_WAIT_S = 5.0  # of it at a time
FAILURES = (NetworkError, RemoteProtocolError, RemoteRefused, IntegrityError, Overloaded)  # of one offer: try the next


def choose_model(
    offers: Sequence[ModelOffer], wanted: str | None, *, held: Collection[ModelId] = ()
) -> tuple[ModelId, list[ModelOffer]]:
    """Return the model that `wanted` names (a name, `name@prefix` or an id prefix; None: the only one) and its offers.

    A model counts if its experts can be had: from a backbone, the web, or peers.

    Args:
        held: models that peers hold experts of.

    Raises:
        UserError: no such model, or several.
    """
    models: dict[ModelId, list[ModelOffer]] = {}
    without_blocks: dict[ModelId, ModelOffer] = {}
    for offer in offers:
        if wanted is None or _matches(offer, wanted):
            if offer.offers_blocks or offer.sources or offer.model in held:
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
            connection = await pool.reach(offer)
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


@dataclass(frozen=True, slots=True)
class _Giver:
    """A node that has blocks: a backbone that offers all of them, or a peer that holds some.

    Attributes:
        held: which; None: all.
    """

    who: ModelOffer | ExpertAnnouncement
    held: ExpertSet | None

    def has(self, layer: int, expert: int) -> bool:
        return self.held is None or (layer, expert) in self.held


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
        web: WebSources | None = None,
        me: NodeId | None = None,
        max_disk_bytes: int | None = None,
        n_parallel: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            progress: told (bytes there, bytes wanted), of blocks that are checked and kept.
            trusts: whether an offer's publisher may be asked: every block is checked, but not how long a stranger lets us wait.
            pace: waited for before each block: a cap on traffic.
            web: asked before any node.
            me: this node, which does not ask itself.
            max_disk_bytes: most that the store may take; None: no cap.
            n_parallel: requests under way; None: `N_PARALLEL`.
        """
        self._registry = registry
        self._pool = pool
        self._store = store
        self._progress = progress
        self._trusts = trusts
        self._pace = pace
        self._web = web
        self._me = me
        self._max_disk_bytes = max_disk_bytes
        self._n_parallel = n_parallel
        self._givers: list[_Giver] = []
        self._failures: dict[NodeId, int] = {}  # a rising number for each: who failed last is asked last
        self._n_failures = 0
        self._rates: dict[NodeId, float] = {}  # bytes a second of the last block
        self._liars: set[NodeId] = set()  # peers that sent wrong bytes
        self._missing: dict[Pair, None] = {}
        self._n_there = self._n_wanted = 0

    async def fetch(self, experts: ExpertSet) -> None:
        """Return when the store has every block of `experts`.

        Raises:
            NetworkError: a block could not be had from anybody.
            IntegrityError: everybody who offers a block sends wrong bytes.
            UserError: there is no room for them, or they cannot be kept.
        """
        spec = self._store.manifest.spec
        self._missing = dict.fromkeys(pair for pair in experts if not self._store.has(*pair))
        n_missing = sum(spec.block_size_bytes(layer) for layer, _ in self._missing)
        self._n_wanted = sum(spec.block_size_bytes(layer) for layer, _ in experts)
        self._n_there = self._n_wanted - n_missing
        self._progress(self._n_there, self._n_wanted)
        if not self._missing:
            return
        await asyncio.to_thread(make_room, self._store, experts, n_missing, self._max_disk_bytes)
        try:
            self._givers = await self._find_givers()
        except (NetworkError, RemoteRefused):
            if self._web is None:
                raise
        limit = GROUP_BYTES if self._web is not None else 0  # nodes are asked block by block
        todo = iter(groups_of(self._missing, spec.block_size_bytes, limit=limit))

        async def work() -> None:
            for group in todo:  # the workers share one iterator: each group is taken once
                await self._fetch_group(group)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self._n_parallel or N_PARALLEL, len(self._missing))):
                    workers.create_task(work())
        except* SwarmError as group:
            raise group.exceptions[0] from None

    def keep(self, pair: Pair) -> None:
        """Count a block that was checked and kept."""
        if pair in self._missing:
            del self._missing[pair]
            self._n_there += self._store.manifest.spec.block_size_bytes(pair[0])
            self._progress(self._n_there, self._n_wanted)

    async def _fetch_group(self, group: Group) -> None:
        """Bring a group's blocks here: from the web as long as it gives any, what is left from nodes."""
        web = self._web
        while left := self._left(group):
            source = None if web is None else web.best()
            if web is not None and source is not None:
                await self._from_web(web, source, group, left)
                continue
            may_wait = web is not None and web.is_alive
            if await self._from_nodes(group.layer, left, may_fail=may_wait):
                return
            assert web is not None
            await web.until_rested()

    async def _from_web(self, web: WebSources, source: WebSource, group: Group, left: Sequence[int]) -> None:
        """Have a source bring what is left of a group; what it has not brought in time, others as well: the first is enough."""
        n_bytes = len(left) * self._store.manifest.spec.block_size_bytes(group.layer)
        began = time.monotonic()
        first: asyncio.Task[None] | asyncio.Task[bool]
        second: asyncio.Task[None] | asyncio.Task[bool]
        try:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(web.fetch(source, group.layer, left, list(self._missing), self.keep))
                while not first.done():
                    await asyncio.wait([first], timeout=web.patience_s(source, n_bytes))
                    if first.done() or not source.has_ranges:  # without ranges it brings everything, one after another
                        return
                    other = web.best(but=source)
                    logger.info(
                        "%s is slow: asking %s", source.location.name, other.location.name if other else "nodes"
                    )
                    asked_at = time.monotonic()
                    if other is not None:
                        second = tasks.create_task(web.fetch(other, group.layer, left, list(self._missing), self.keep))
                    else:
                        second = tasks.create_task(self._from_nodes(group.layer, left, may_fail=True))
                    await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
                    if not self._left(group):
                        if not first.done():
                            web.outrun(source, n_bytes, time.monotonic() - began)
                        first.cancel()
                        second.cancel()
                    elif other is not None and first.done():  # it has failed: from now on the other is watched
                        source, first, began = other, second, asked_at
        except* SwarmError as failures:
            raise failures.exceptions[0] from None

    async def _from_nodes(self, layer: int, experts: Sequence[int], *, may_fail: bool) -> bool:
        """Bring blocks from nodes; return whether all are there now, if it `may_fail`; else raise one of FAILURES."""
        for expert in experts:
            await self._pace()
            try:
                await self._fetch_block(layer, expert, n_attempts=1 if may_fail else N_ATTEMPTS)
            except FAILURES:
                if not may_fail:
                    raise
                return False
        return True

    def _left(self, group: Group) -> list[int]:
        """Return a group's experts that are still missing; what another process with this cache has brought is there, too."""
        for expert in group.experts:
            if self._store.has(group.layer, expert):  # nobody would bring it again: it would be asked for without end
                self.keep((group.layer, expert))
        return [expert for expert in group.experts if (group.layer, expert) in self._missing]

    async def _fetch_block(self, layer: int, expert: int, *, n_attempts: int) -> None:
        error: SwarmError | None = None
        n_failed, patient_until = 0, time.monotonic() + (BUSY_PATIENCE_S if n_attempts > 1 else 0.0)
        busy_s: float | None = None  # when a busy peer wants to be asked again
        while n_failed < n_attempts:
            if n_failed > 0 or busy_s is not None:
                await asyncio.sleep(
                    RETRY_S * n_failed if busy_s is None else min(max(busy_s, RETRY_S), MAX_BUSY_WAIT_S)
                )
                busy_s = None
                try:
                    self._givers = await self._find_givers()
                except (NetworkError, RemoteRefused) as failure:  # the nodes known so far may do
                    logger.warning("cannot ask the registry again: %s", failure)
            for giver in sorted(self._givers, key=self._rank):
                node = giver.who.node
                if node in self._liars or not giver.has(layer, expert):
                    continue
                try:
                    await self._from(giver, layer, expert)
                    self.keep((layer, expert))
                    return
                except FAILURES as failure:
                    is_busy_peer = giver.held is not None and isinstance(failure, RemoteRefused)  # nobody's fault
                    if isinstance(failure, RemoteRefused) and failure.remote_code == m.ErrorCode.BUSY:
                        retry_after_s = RETRY_S if failure.retry_after_s is None else failure.retry_after_s
                        busy_s = retry_after_s if busy_s is None else min(busy_s, retry_after_s)
                    level = logging.DEBUG if is_busy_peer else logging.WARNING
                    logger.log(level, "no block of layer %d, expert %d: %s", layer, expert, failure)
                    if error is None or not is_busy_peer:
                        error = failure
                    self._n_failures += 1
                    self._failures[node] = self._n_failures
                    if giver.held is not None and isinstance(failure, IntegrityError):
                        self._liars.add(node)
            if busy_s is None or time.monotonic() >= patient_until:
                n_failed, busy_s = n_failed + 1, None
        if isinstance(error, IntegrityError):
            raise error
        if error is None and self._web is not None:
            error = self._web.error
        raise NetworkError(f"nobody gives layer {layer}, expert {expert}: {error or 'no offer left'}")

    def _rank(self, giver: _Giver) -> tuple[int, int, float]:
        """Return the order of asking: who has not failed, peers before backbones (whose line is everybody's), the fastest.

        A peer that has given a block slowly comes after backbones: else anybody could hold up a joiner, block by block.
        """
        node = giver.who.node
        rate = self._rates.get(node, float("inf"))
        turn = 1 if giver.held is None else 0 if rate >= SLOW_BYTES_S else 2
        return self._failures.get(node, 0), turn, -rate

    async def _find_givers(self) -> list[_Giver]:
        model = self._store.manifest.model_id
        offers = await self._registry.offers(model)
        givers = [_Giver(offer, None) for offer in offers if offer.offers_blocks and self._trusts(offer)]
        try:
            holders = await self._registry.holders(model)
        except (NetworkError, RemoteRefused) as error:
            logger.info("cannot ask which peers hold blocks: %s", error)
            return givers
        peers = [each for each in holders if not each.is_loading and each.node != self._me]
        random.shuffle(peers)  # so that those who join at once do not all ask the same
        return [_Giver(each, each.experts) for each in peers[:MAX_PEERS]] + givers

    async def _from(self, giver: _Giver, layer: int, expert: int) -> None:
        connection = await self._pool.reach(giver.who)
        request = m.GetBlock(model_id=self._store.manifest.model_id, layer=layer, expert=expert)
        timeout_s = BLOCK_TIMEOUT_S if giver.held is None else PEER_TIMEOUT_S
        began = time.monotonic()
        # A larger one is refused before memory is taken for it.
        size = self._store.manifest.spec.block_size_bytes(layer)
        answer = await connection.request(request, timeout_s=timeout_s, max_answer_bytes=size)
        assert isinstance(answer, m.BlockBytes)  # the session checks an answer's type
        self._rates[giver.who.node] = len(answer.data) / max(1e-6, time.monotonic() - began)
        await run_interruptibly(lambda _: self._store.add(layer, expert, answer.data))


def make_room(store: BlockStore, wanted: ExpertSet, n_missing: int, max_disk_bytes: int | None) -> None:
    """Make sure that `n_missing` more bytes of blocks fit, before any are fetched; may delete blocks that are not wanted.

    Raises:
        UserError: they do not fit on the disk, or into the cap.
    """
    size = store.manifest.spec.block_size_bytes
    store.remove_torn(time.time())
    if max_disk_bytes is not None:
        n_bytes = n_missing + sum(size(layer) for layer, _ in store.experts)
        for layer, expert in store.experts:
            if n_bytes <= max_disk_bytes:
                break
            if (layer, expert) not in wanted:
                store.remove(layer, expert)
                n_bytes -= size(layer)
        if n_bytes > max_disk_bytes:
            raise UserError(
                f"the experts do not fit into --disk: got {max_disk_bytes} bytes, expected at least {n_bytes}"
            )
    try:
        store.folder.mkdir(parents=True, exist_ok=True)  # `swarm cache prune` may have taken it
        free = shutil.disk_usage(store.folder).free
    except OSError as error:
        raise UserError(f"cannot use {store.folder}: {error.strerror}") from error
    if n_missing + SPARE_DISK_BYTES > free:
        raise UserError(
            f"not enough space in {store.folder}: got {decimal(free)} free, expected {decimal(n_missing + SPARE_DISK_BYTES)}; "
            "take fewer experts, or set SWARM_HOME to a folder on another disk"
        )
