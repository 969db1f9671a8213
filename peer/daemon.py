"""The volunteer's process: gets a slice, checks it, loads it, announces it, and answers dispatches until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from peer.auto import OVERHEAD_BYTES, AutoExperts, Chooser, require_memory
from peer.compute import MAX_LINE, Compute
from peer.config import PeerConfig, PeerReady, Progress
from peer.consent import Agree, require_agreed
from peer.giving import GIVES, FileOnDemand, Giving
from peer.model_file import OpenModel, choose_experts
from peer.opening import Opened, Opener
from peer.pauses import OthersLoad, Pauses, outside_hours, while_busy
from peer.receipts import Collector, ReceiptBook
from peer.slice import Slice, load_slice
from peer.traffic import Traffic
from peer.watching import Askers, ScarcityWatch
from swarm import __version__
from swarm.backbone.share import ModelShare
from swarm.errors import Leaving, NetworkError, Overloaded, RemoteProtocolError, SwarmError, UserError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.memory import free_memory_bytes
from swarm.model.manifest import Manifest
from swarm.model.source import BlockSource
from swarm.native.library import load_library, use_exact_kernels
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.pool import Pool
from swarm.net.readiness import Readiness, is_worthwhile
from swarm.net.relay_client import RelayAddress
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import TlsListener
from swarm.peer_report import PeerReport, Standing
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.cache import RegistryCache
from swarm.registry.client import RegistryClient
from swarm.registry.leaderboard import MAX_PRESENTED
from swarm.registry.records import ExpertAnnouncement, printable_name
from swarm.registry.relays import relays_of
from swarm.wire import messages as m
from swarm.wire.receipts import RECEIPT_CHARACTERS, Totals
from swarm.wire.session import WIRE_VERSIONS

logger = logging.getLogger(__name__)

DRAIN_S = 3.0  # how long a leaving peer goes on computing what it has; guessed: below what service managers grant
# After that, for the last answers to arrive and for backbones to hear that it leaves; guessed: two round trips.
LINGER_S = 0.2
# Least places in line of each backbone, however many there are; guessed: one long batch in chunks, and a hedge.
MIN_SHARE = 8
# What a refused backbone is told to wait; guessed: between the time of a token's layer and a person's patience.
MIN_RETRY_S, MAX_RETRY_S = 0.02, 2.0
REBALANCE_S = 300.0  # mean time between two looks whether other experts are scarcer; guessed
# How long a slice that was given up is still computed, once the new one is announced: backbones look every 10 s in a large ring.
GRACE_S = 20.0
# What a backbone still waits for of it then. As long as its longest deadline (`swarm.dispatch.service_time.BATCH_TIMEOUT_S`).
ANSWERED_TIMEOUT_S = 60.0


class PeerDaemon:
    """One volunteer's peer."""

    def __init__(
        self, config: PeerConfig, identity: Identity, progress: Progress | None = None, *, agree: Agree | None = None
    ) -> None:
        """`agree` is asked before anything large is fetched or loaded; None: it is wanted."""
        self._config = config
        self._identity = identity
        self._agree = agree
        self._endpoint: Endpoint | None = None
        self._watch: ScarcityWatch | None = None
        self._collector: Collector | None = None
        self._progress = progress or Progress()
        self._started = time.monotonic()
        self._readiness: Readiness | None = None
        self._slice: Slice | None = None
        self._former: Slice | None = None  # while backbones may still ask for it
        self._chooser: Chooser | None = None
        self._is_choosing = False
        self._finder: PathFinder | None = None
        self._n_earlier_assignments = 0  # of slices that were given up
        self._manifest: Manifest | None = None
        self._experts = ExpertSet({})
        self._model_name = ""
        self._is_leaving = False
        self._giving: Giving | None = None
        self._gives: BlockSource | None = None
        self._last_asked = float("-inf")  # when a dispatch came last
        self._under_way: set[asyncio.Future[m.Result]] = set()  # dispatches in line or computed, and
        self._in_line: Counter[NodeId] = Counter()  # how many of them are each backbone's
        self._askers = Askers()
        self._latest: NodeId | None = None  # of them, who asked last
        self._pauses = self._make_pauses()
        self._traffic: Traffic | None = None
        self._announcing: asyncio.Task[None] | None = None

    def _make_pauses(self) -> Pauses:
        reasons = []
        if self._config.schedule is not None:
            reasons.append(outside_hours(self._config.schedule))
        if self._config.pauses_when_busy:
            reasons.append(while_busy(OthersLoad()))
        return Pauses(reasons)

    async def run(self, on_ready: Callable[[PeerReady], None]) -> None:
        """Serve until cancelled, then withdraw the announcement.

        Raises:
            UserError: the model, the experts or the port cannot be had.
            NetworkError: no registry, or nobody who offers the slice.
            NotAgreed: the volunteer does not want what joining takes.
            IntegrityError: a block does not match the manifest.
        """
        config = self._config
        if config.exact_kernels:
            use_exact_kernels()
        load_library()  # a missing library is said before anything is downloaded
        endpoint = Endpoint(
            self._identity,
            host=config.host,
            port=config.port,
            handler=self._handle,
            serves=(m.Dispatch, m.GetStatus, *GIVES),
        )
        async with (
            endpoint,
            PathFinder(endpoint, takes_calls=True, is_relays_only=self._config.is_relays_only) as finder,
            contextlib.AsyncExitStack() as stack,
        ):
            self._finder, self._endpoint = finder, endpoint
            node = self._identity.node_id
            book = ReceiptBook(config.folders.state / f"{node}.receipts", node)
            self._collector = Collector(book, lambda: endpoint.open_connections())
            self._traffic = Traffic(
                endpoint,
                max_upload_bytes_s=config.max_upload_bytes_s,
                max_download_bytes_s=config.max_download_bytes_s,
            )
            pool = Pool(endpoint, finder)
            if is_worthwhile():
                self._readiness = Readiness(endpoint)
            if config.tls_links:
                await stack.enter_async_context(TlsListener(endpoint, host=config.host))
            kept = RegistryCache(config.folders.cache / f"registry-{self._identity.node_id.short}.json")
            registry = RegistryClient(finder, config.registry, cache=kept)
            try:
                await _require_registry(registry)
                await self._join(registry, pool, on_ready)
            finally:
                is_told_twice = True
                try:
                    await self._drain()
                    is_told_twice = False
                finally:  # also when told twice to leave
                    await registry.close()
                    await pool.close()
                    if self._readiness is not None:
                        self._readiness.close()
                    if isinstance(self._gives, FileOnDemand):
                        self._gives.close()
                    for each in filter(None, (self._slice, self._former)):
                        each.compute.stop()
                        if not is_told_twice:  # a computation may take long
                            await each.compute.wait_closed()

    async def _join(self, registry: RegistryClient, pool: Pool, on_ready: Callable[[PeerReady], None]) -> None:
        numbers = SequenceNumbers(self._config.folders.state / f"{self._identity.node_id}.seq")
        announcer = Announcer(registry, self._identity, numbers, self._announcement)
        try:
            async with asyncio.TaskGroup() as tasks:
                assert self._finder is not None
                relays = [RelayAddress(address=each.address, node=each.node) for each in self._config.registry]
                reachable = self._finder.keep_reachable(
                    relays,
                    announcer.announce_soon,
                    others=lambda: relays_of(registry.members_known(), self._identity.node_id),
                )
                tasks.create_task(reachable)
                async with self._opener(registry, pool).open(None) as opened:
                    await self._settle(opened, registry, announcer, tasks)
                    if self._agree is not None:
                        await require_agreed(
                            self._agree,
                            opened,
                            self._experts,
                            registry,
                            node=self._identity.node_id,
                            model_name=self._model_name,
                            config=self._config,
                        )
                    await opened.fetch(self._experts)
                    self._slice = await self._load(opened.model, self._experts)
                    self._give(opened)
                if self._chooser is None:
                    self._announcing = tasks.create_task(announcer.run())
                else:
                    announcer.announce_soon()
                    tasks.create_task(self._rebalance(self._chooser, registry, pool, announcer))
                tasks.create_task(self._rest(announcer, tasks))
                assert self._collector is not None
                tasks.create_task(self._collector.run())
                if self._config.is_watched:
                    self._watch = ScarcityWatch(registry, self._identity.node_id, self._held)
                    tasks.create_task(self._watch.run())
                await self._serve(registry, announcer, on_ready)
        except* SwarmError as group:
            raise group.exceptions[0] from None

    async def _serve(
        self, registry: RegistryClient, announcer: Announcer, on_ready: Callable[[PeerReady], None]
    ) -> None:
        await announcer.is_announced.wait()
        assert self._manifest is not None
        ready = PeerReady(
            node=str(self._identity.node_id),
            model=f"{self._model_name}@{self._manifest.model_id.short}",
            experts=str(self._experts),
            address=self._config.advertise or await registry.observed_address(),
            reach="unknown" if self._finder is None else self._finder.how_reached().value,
        )
        logger.info("joined with %s of %s", ready.experts, ready.model)
        on_ready(ready)
        try:
            await asyncio.Event().wait()
        finally:  # at once, before the withdrawal: what comes from here on goes to a replica without a detour
            self._is_leaving = True
            self._progress.leaving()

    async def _rest(self, announcer: Announcer, tasks: asyncio.TaskGroup) -> None:
        """Withdraw while there is a reason to rest, and come back after it; what is in line is finished."""
        await (
            announcer.is_announced.wait()
        )  # a volunteer who joins outside the hours sees that it works, and then rests
        tasks.create_task(self._pauses.run())
        while True:
            await self._pauses.changed()
            if self._pauses.why:
                logger.warning("resting: %s", self._pauses.why)
                if self._announcing is not None:
                    self._announcing.cancel()  # which withdraws
                    await asyncio.wait([self._announcing])
                await self._let_go()
            else:
                logger.warning("serving again")
                announcer.announce_soon()
                self._announcing = tasks.create_task(announcer.run())

    async def _let_go(self) -> None:
        """Finish what is in line, and part from those who use this peer: else they count on it until they ask in vain."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=DRAIN_S)
        await asyncio.sleep(LINGER_S)
        if self._pauses.why and self._endpoint is not None:
            for connection in self._endpoint.open_connections():
                if not connection.is_client:
                    connection.close()

    async def _drain(self) -> None:
        """Finish what is in line; new dispatches are refused. A second cancellation ends this, too."""
        if self._slice is None or not self._is_leaving:
            return
        if self._under_way:
            _, left = await asyncio.wait(self._under_way, timeout=DRAIN_S)
            if left:
                logger.info("leaving with %d dispatches unanswered", len(left))
        await asyncio.sleep(LINGER_S)
        if self._collector is not None:
            await self._collector.look(is_last=True)

    def _opener(self, registry: RegistryClient, pool: Pool) -> Opener:
        assert self._traffic is not None
        return Opener(self._config, self._progress, registry, pool, self._traffic, self._identity.node_id)

    async def _settle(
        self, opened: Opened, registry: RegistryClient, announcer: Announcer, tasks: asyncio.TaskGroup
    ) -> None:
        """Settle which experts of the model this peer holds; with AutoExperts it claims them."""
        config, model = self._config, opened.model
        auto = config.experts
        self._model_name = printable_name(model.name)
        if not isinstance(auto, AutoExperts):
            self._experts = choose_experts(model.manifest.spec, auto, config.layers, model.held)
            require_memory(model.manifest.spec, self._experts, config.memory_bytes)
            self._manifest = model.manifest
            return
        spec = model.manifest.spec
        among = spec.all_experts if model.held is None else model.held
        if config.layers is not None:
            among = ExpertSet({layer: ids for layer, ids in among.by_layer.items() if layer in config.layers})
            spec.require_experts(among)
        self._chooser = Chooser(
            registry,
            spec,
            model.manifest.model_id,
            self._identity.node_id,
            budget_bytes=auto.budget_bytes(config.folders.cache if opened.is_fetched else None),
            among=among,
            publishers=config.publishers,
        )
        is_claimed = False

        async def claim(experts: ExpertSet) -> None:
            nonlocal is_claimed
            self._manifest, self._experts = model.manifest, experts
            if is_claimed:
                announcer.announce_soon()
            else:
                self._announcing = tasks.create_task(announcer.run())
                is_claimed = True
            await announcer.is_announced.wait()

        self._is_choosing = True
        self._experts = await self._chooser.join(claim)
        self._is_choosing = False
        announcer.announce_soon()

    async def _rebalance(self, chooser: Chooser, registry: RegistryClient, pool: Pool, announcer: Announcer) -> None:
        """Move to other experts where they are much scarcer, now and then; see `is_move_worthwhile`."""
        clock = asyncio.get_running_loop().time
        moved_at = clock()
        while True:
            await asyncio.sleep(REBALANCE_S * random.uniform(0.5, 1.5))  # not all peers at the same moment
            if self._pauses.why:  # neither line nor processors are ours now
                continue
            try:
                better = await chooser.better(self._experts, clock() - moved_at)
                if better is None:
                    continue
                size = chooser.size_bytes(better)
                free = free_memory_bytes()
                if free is not None and free < size + OVERHEAD_BYTES:
                    logger.info(
                        "%s are scarcer, but there is no memory for both slices: got %d bytes, expected %d",
                        better,
                        free,
                        size + OVERHEAD_BYTES,
                    )
                    continue
                logger.info("moving to %s, which are scarcer", better)
                if await self._move(better, chooser, registry, pool, announcer):
                    moved_at = clock()
            except SwarmError as error:
                logger.warning("cannot move to scarcer experts, staying with %s: %s", self._experts, error)

    async def _move(
        self, better: ExpertSet, chooser: Chooser, registry: RegistryClient, pool: Pool, announcer: Announcer
    ) -> bool:
        """Load a slice beside the one held, announce it in its place, and serve both for a while; return whether it was done."""
        assert self._slice is not None
        settled = None if self._manifest is None else self._manifest.model_id  # once settled, it stays
        async with self._opener(registry, pool).open(settled) as opened:
            if self._manifest is None or opened.model.manifest.model_id != self._manifest.model_id:
                raise UserError("the model file is another one now")
            await opened.fetch(better)
            loaded = await self._load(opened.model, better)
        try:
            is_still_better = await chooser.better(self._experts, float("inf")) is not None
        except BaseException:
            loaded.close()
            raise
        if not is_still_better or self._pauses.why:  # somebody else was faster, or a rest has begun meanwhile
            loaded.close()
            logger.info("staying with %s: %s", self._experts, self._pauses.why or "others have come")
            return False
        former = self._slice
        loaded.compute.stats = former.compute.stats  # counts since the start
        self._former, self._slice, self._experts = former, loaded, better
        announcer.announce_soon()
        await announcer.is_announced.wait()
        await asyncio.sleep(GRACE_S)
        await former.answered(ANSWERED_TIMEOUT_S)
        self._former = None
        self._n_earlier_assignments += former.executor.assignments().total
        await former.wait_closed()
        logger.info("moved to %s", better)
        return True

    async def _load(self, model: OpenModel, experts: ExpertSet) -> Slice:
        config = self._config
        return await load_slice(
            model,
            experts,
            n_threads=config.n_threads,
            device=config.device,
            fault=config.fault,
            disk_bytes_per_s=config.disk_bytes_per_s,
            on_loaded=self._progress.loading,
        )

    def _announcement(self, seq: int, address: str) -> ExpertAnnouncement:
        assert self._manifest is not None
        assert self._finder is not None
        advertised = self._config.advertise
        face = self._finder.face(advertised or address, is_advertised=advertised is not None)
        return ExpertAnnouncement(
            node=self._identity.node_id,
            seq=seq,
            ttl_s=TTL_S,
            model=self._manifest.model_id,
            model_name=self._model_name,
            experts=self._experts,
            addresses=face.addresses,
            is_public=face.is_public,
            vouchers=face.vouchers,
            exact_kernels=self._config.exact_kernels,
            wire_versions=WIRE_VERSIONS,
            is_loading=self._slice is None,
            is_choosing=self._is_choosing,
            name=self._config.name,
            place=self._config.place,
            upload_bytes_s=None if self._config.max_upload_bytes_s is None else int(self._config.max_upload_bytes_s),
        )

    def _handle(self, connection: Connection, request: m.Request) -> Awaitable[m.Response] | m.Result:
        if isinstance(request, m.GetStatus):
            return self._answer_status()
        if self._slice is None or self._manifest is None:
            raise LookupError("this peer is still loading its slice")
        if not isinstance(request, m.Dispatch):
            if isinstance(request, GIVES):
                return self._answer_joiner(request)
            raise RemoteProtocolError(f"not for a peer: got {type(request).__name__}")
        if request.model_tag != self._manifest.model_id.raw[: m.MODEL_TAG_BYTES]:
            raise LookupError(f"this peer serves model {self._manifest.model_id.short}")
        if self._is_leaving:
            raise Leaving("this peer is leaving")
        if self._pauses.why:
            raise Leaving(f"this peer rests: {self._pauses.why}")
        readiness = None if isinstance(connection, TlsLink) else self._readiness  # it watches QUIC's socket
        chosen = self._slice if self._former is None else self._slice_for(request, self._slice, self._former)
        return self._start(chosen.compute, connection.remote, request, readiness)

    @staticmethod
    def _slice_for(request: m.Dispatch, current: Slice, former: Slice) -> Slice:
        """Return the slice that holds what is asked for: where a backbone has not heard of the new one, the former."""
        asked = {(request.layer, expert) for expert in request.expert_ids.tolist()}
        is_held = all(pair in current.experts for pair in asked)
        return current if is_held or not all(pair in former.experts for pair in asked) else former

    def _start(
        self, compute: Compute, backbone: NodeId, request: m.Dispatch, readiness: Readiness | None
    ) -> asyncio.Future[m.Result] | m.Result:
        """Compute a dispatch at once, or put it in line, unless its backbone has its share of the line already.

        Alone, a backbone may fill the line; beside others, it has an equal part, so that one that sends more than is computed
        is told so, and not the others.
        """
        if backbone is not self._latest:  # what a line adds here is paid for each token's layer, cold
            self._latest = backbone
            self._askers.add(backbone)
        if self._collector is not None:
            self._collector.note(backbone)
        n_mine = self._in_line[backbone] if self._in_line else 0
        if n_mine >= MIN_SHARE and n_mine >= MAX_LINE // len(self._in_line):
            mean_s = compute.stats.compute_s / max(1, compute.stats.n_computations)
            retry_after_s = min(max(n_mine * mean_s, MIN_RETRY_S), MAX_RETRY_S)
            raise Overloaded(f"{n_mine} dispatches of this backbone wait at this peer", retry_after_s=retry_after_s)
        traffic = self._traffic
        assert traffic is not None
        self._last_asked = time.monotonic()
        n_bytes = traffic.admit(request)
        if readiness is not None:
            readiness.ended()  # the wait for a dispatch, which began with the last answer
        if (result := compute.at_once(request, backbone)) is not None:
            if n_bytes:
                traffic.promise(n_bytes)
                asyncio.get_running_loop().call_soon(traffic.settle, n_bytes)  # once its bytes are counted
            if readiness is not None and len(request.row_counts) == 1:
                readiness.began((request, result))
            return result
        answer, loop = compute.start(request, backbone), asyncio.get_running_loop()
        traffic.promise(n_bytes)
        self._under_way.add(answer)
        self._in_line[backbone] = n_mine + 1

        def is_done(_: asyncio.Future[m.Result]) -> None:
            self._under_way.discard(answer)
            loop.call_soon(traffic.settle, n_bytes)  # once its bytes are counted
            self._in_line[backbone] -= 1
            if not self._in_line[backbone]:
                del self._in_line[backbone]
            is_token = len(request.row_counts) == 1 and not answer.cancelled() and answer.exception() is None
            if readiness is not None and is_token:
                readiness.began((request, answer.result()))

        answer.add_done_callback(is_done)
        return answer

    def _give(self, opened: Opened) -> None:
        """From now on give what was opened to those who join."""
        assert self._traffic is not None
        manifest = opened.model.manifest
        share = ModelShare(manifest, opened.gives)
        sizes = {layer: manifest.spec.block_size_bytes(layer) for layer in manifest.spec.moe_layers}
        self._giving = Giving(share, self._traffic, lambda layer: sizes.get(layer, 0))
        self._gives = opened.gives

    def _answer_joiner(self, request: m.Request) -> Awaitable[m.Response]:
        if self._is_leaving or self._giving is None:
            raise Leaving("this peer is leaving")
        if self._pauses.why:
            raise Leaving(f"this peer rests: {self._pauses.why}")
        return self._giving.answer(request, last_asked=self._last_asked, is_computing=bool(self._under_way))

    async def _answer_status(self) -> m.Status:
        status = self.status()
        try:
            if self._traffic is not None:
                self._traffic.admit_bytes(RECEIPT_CHARACTERS * MAX_PRESENTED)
        except Overloaded:  # anybody may ask: the cap holds for what is large of it, and the rest is short
            status.pop("receipts", None)
        return m.Status(data=json.dumps(status).encode())

    def status(self) -> dict[str, object]:
        """Return this peer's state; counts since its start, seconds."""
        status: dict[str, object] = {
            "role": "peer",
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "model": str(self._manifest.model_id) if self._manifest else None,
            "experts": self._experts.grouped(),
            "exact_kernels": self._config.exact_kernels,
            "resting": self._pauses.why,
            "reach": "unknown" if self._finder is None else self._finder.how_reached().value,
        }
        today = self.contribution_today()
        status["contribution"] = {"n_rows": today.n_rows, "n_pairs": today.n_pairs, "points": today.points}
        if self._config.name and self._collector is not None:  # who shows no name wants to be on no leaderboard
            status["receipts"] = self._collector.book.presented()
        if self._slice is not None:
            stats = self._slice.compute.stats
            slices = [each for each in (self._slice, self._former) if each is not None]
            n_assignments = sum(each.executor.assignments().total for each in slices)
            status |= {
                "n_assignments": self._n_earlier_assignments + n_assignments,
                "n_dispatches": stats.n_dispatches,
                "n_rows": stats.n_rows,
                "compute_s": round(stats.compute_s, 6),
                "queue_s": round(stats.queue_s, 6),
                "n_in_line": sum(each.compute.n_in_line for each in slices),
            }
        return status

    def contribution_today(self) -> Totals:
        """Return what backbones have signed that this peer did today, UTC; some seconds behind what it did."""
        return Totals() if self._collector is None else self._collector.today()

    def _held(self) -> tuple[ModelId | None, ExpertSet]:
        return None if self._manifest is None else self._manifest.model_id, self._experts

    def report(self) -> PeerReport:
        """Return this peer's state for the person who runs it."""
        status, endpoint, finder = self.status(), self._endpoint, self._finder
        standing = Standing.SERVING
        if self._is_leaving:
            standing = Standing.LEAVING
        elif self._slice is None:
            standing = Standing.JOINING
        elif self._pauses.why:
            standing = Standing.RESTING
        return PeerReport(
            standing=standing,
            why=self._pauses.why if standing is Standing.RESTING else "",
            uptime_s=time.monotonic() - self._started,
            reach="unknown" if finder is None else finder.how_reached().value,
            why_reach="" if finder is None else finder.mapping().name.lower(),
            backbones=() if endpoint is None else self._askers.views(endpoint.open_connections()),
            n_rows=int(str(status.get("n_rows", 0))),
            n_pairs=int(str(status.get("n_assignments", 0))),
            n_in_line=int(str(status.get("n_in_line", 0))),
            bytes_by_path={} if endpoint is None else endpoint.counts.now().both_ways(),
            scarcity=None if self._watch is None else self._watch.scarcity,
            points=self.contribution_today().points,
        )


async def _require_registry(registry: RegistryClient) -> None:
    """Raise NetworkError unless a registry answers: found out before gigabytes are hashed, fetched and loaded.

    Once a peer is loaded, a registry that is away is only asked again.
    """
    try:
        await registry.observed_address()
    except NetworkError as error:
        raise NetworkError(
            f"{error}; nothing was loaded, since nobody could find this peer: start swarm relay, or give another --registry"
        ) from error


async def _nothing_to_fetch(_: ExpertSet) -> None:
    """The blocks are in a file."""
