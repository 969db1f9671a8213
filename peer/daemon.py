"""The volunteer's process: gets a slice, checks it, loads it, announces it, and answers dispatches until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from peer.compute import Compute
from peer.fetch import SliceFetcher, choose_model, fetch_manifest
from peer.model_file import choose_experts, open_model_file
from swarm import __version__
from swarm.errors import ExpertsNotHeld, NetworkError, RemoteProtocolError, SwarmError, UserError
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet
from swarm.interruptible import Check, run_interruptibly
from swarm.model.block_store import BlockStore
from swarm.model.manifest import Manifest, verify_block
from swarm.model.source import BlockSource
from swarm.native.library import load_library, use_exact_kernels
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.announcer import TTL_S, Announcer, SequenceNumbers
from swarm.registry.client import RegistryAddress, RegistryClient
from swarm.registry.records import ExpertAnnouncement, printable_name
from swarm.wire import messages as m
from swarm.wire.session import WIRE_VERSIONS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """What a volunteer asked for.

    Attributes:
        experts, layers: what to hold; `layers` None means every MoE layer. An ExpertSet has layers of its own.
            `experts` None: all that a slice file holds.
        model_file: a whole model or a slice file to take the experts from; None fetches them from a backbone.
        model: which of the registry's models, by name or id prefix; None: the only one.
        fault: (layer, expert) in which one byte is changed after the hash check: the control of `swarm verify`.
    """

    registry: tuple[RegistryAddress, ...]
    folders: Folders
    experts: frozenset[int] | ExpertSet | None
    layers: frozenset[int] | None = None
    model_file: Path | None = None
    model: str | None = None
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str | None = None
    n_threads: int = 1
    exact_kernels: bool = False
    fault: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady:
    """What a peer says once it is announced."""

    node: str
    model: str
    experts: str
    address: str


class Progress:
    """Where a peer's start stands; the command line draws it. Every method may be overridden; none does anything."""

    def hashing(self, n_done: int, n_total: int) -> None:
        """Bytes of a model file hashed."""

    def fetching(self, n_done: int, n_total: int) -> None:
        """Blocks fetched."""

    def loading(self, n_done: int, n_total: int) -> None:
        """Blocks checked and loaded."""


class PeerDaemon:
    """One volunteer's peer."""

    def __init__(self, config: PeerConfig, identity: Identity, progress: Progress | None = None) -> None:
        self._config = config
        self._identity = identity
        self._progress = progress or Progress()
        self._started = time.monotonic()
        self._compute: Compute | None = None
        self._executor: ExpertExecutor | None = None
        self._manifest: Manifest | None = None
        self._experts = ExpertSet({})
        self._model_name = ""

    async def run(self, on_ready: Callable[[PeerReady], None]) -> None:
        """Serve until cancelled, then withdraw the announcement.

        Raises:
            UserError: the model, the experts or the port cannot be had.
            NetworkError: no registry, or nobody who offers the slice.
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
            serves=(m.Dispatch, m.GetStatus),
        )
        async with endpoint:
            pool = Pool(endpoint)
            registry = RegistryClient(endpoint, config.registry)
            try:
                await _require_registry(registry)
                async with self._source(registry, pool) as source:
                    await run_interruptibly(lambda check: self._load(source, check))
                await self._serve(registry, on_ready)
            finally:
                await pool.close()
                if self._compute is not None:
                    self._compute.close()

    async def _serve(self, registry: RegistryClient, on_ready: Callable[[PeerReady], None]) -> None:
        numbers = SequenceNumbers(self._config.folders.state / f"{self._identity.node_id}.seq")
        announcer = Announcer(registry, self._identity, numbers, self._announcement)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(announcer.run())
                await announcer.is_announced.wait()
                assert self._manifest is not None
                ready = PeerReady(
                    node=str(self._identity.node_id),
                    model=f"{self._model_name}@{self._manifest.model_id.short}",
                    experts=str(self._experts),
                    address=self._config.advertise or await registry.observed_address(),
                )
                logger.info("joined with %s of %s", ready.experts, ready.model)
                on_ready(ready)
        except* SwarmError as group:
            raise group.exceptions[0] from None

    @contextlib.asynccontextmanager
    async def _source(self, registry: RegistryClient, pool: Pool) -> AsyncIterator[BlockSource]:
        """Settle which model and experts this peer serves, and yield where their blocks come from."""
        config, progress = self._config, self._progress
        if config.model_file is not None:
            opening = open_model_file(config.model_file, config.folders.cache, registry, pool, progress.hashing)
            async with opening as model:
                self._settle(model.manifest, model.name, model.held)
                yield model.source
            return
        model_id, offers = choose_model(await registry.offers(), config.model)
        manifest = await fetch_manifest(pool, model_id, offers)
        self._settle(manifest, offers[0].model_name, None)
        store = BlockStore(config.folders.cache, manifest)
        await SliceFetcher(registry, pool, store, progress.fetching).fetch(self._experts)
        yield store

    def _settle(self, manifest: Manifest, name: str, held: ExpertSet | None) -> None:
        self._experts = choose_experts(manifest.spec, self._config.experts, self._config.layers, held)
        self._manifest = manifest
        self._model_name = printable_name(name)

    def _load(self, source: BlockSource, check: Check) -> None:
        """Check every block against the manifest and load it; `check` is called between blocks."""
        assert self._manifest is not None
        ffn = ExpertFfn(self._manifest.spec, self._experts, n_threads=self._config.n_threads)
        try:
            self._fill(ffn, self._manifest, source, check)
        except BaseException:
            ffn.close()
            raise
        self._executor = ExpertExecutor(ffn, self._manifest.spec)
        self._compute = Compute(self._executor)

    def _fill(self, ffn: ExpertFfn, manifest: Manifest, source: BlockSource, check: Check) -> None:
        for n_done, (layer, expert) in enumerate(self._experts, 1):
            check()
            block = source.read_block(layer, expert)
            verify_block(manifest, layer, expert, block)
            ffn.load(layer, expert, block)
            self._progress.loading(n_done, len(self._experts))
        if self._config.fault is not None:
            layer, expert = self._config.fault
            if (layer, expert) not in self._experts:
                raise UserError(f"cannot plant a fault: layer {layer}, expert {expert} is not in this slice")
            # In the middle of the first plane, which is the down projection's: no requantisation comes after it that could
            # hide the change.
            ffn.flip_byte(layer, expert, manifest.spec.expert_tensors(layer)[0].expert_size_bytes // 2)
            logger.warning("one byte of layer %d, expert %d was changed on purpose", layer, expert)

    def _announcement(self, seq: int, address: str) -> ExpertAnnouncement:
        assert self._manifest is not None
        return ExpertAnnouncement(
            node=self._identity.node_id,
            seq=seq,
            ttl_s=TTL_S,
            model=self._manifest.model_id,
            model_name=self._model_name,
            experts=self._experts,
            addresses=(self._config.advertise or address,),
            exact_kernels=self._config.exact_kernels,
            wire_versions=WIRE_VERSIONS,
        )

    async def _handle(self, connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.GetStatus):
            return m.Status(data=json.dumps(self.status()).encode())
        if self._compute is None or self._manifest is None:
            raise LookupError("this peer is still loading its slice")
        if not isinstance(request, m.Dispatch):
            raise RemoteProtocolError(f"not for a peer: got {type(request).__name__}")
        if request.model_tag != self._manifest.model_id.raw[: m.MODEL_TAG_BYTES]:
            raise LookupError(f"this peer serves model {self._manifest.model_id.short}")
        try:
            return await self._compute.run(request)
        except ExpertsNotHeld as error:  # this peer may have come back with another slice: not worth its connection
            raise LookupError(str(error)) from error

    def status(self) -> dict[str, object]:
        """Return this peer's state; counts since its start, seconds."""
        status: dict[str, object] = {
            "role": "peer",
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "model": str(self._manifest.model_id) if self._manifest else None,
            "experts": self._experts.grouped(),
            "exact_kernels": self._config.exact_kernels,
        }
        if self._compute is not None and self._executor is not None:
            stats = self._compute.stats
            assignments = self._executor.assignments()
            status |= {
                "n_assignments": assignments.total,
                "n_dispatches": stats.n_dispatches,
                "n_rows": stats.n_rows,
                "compute_s": round(stats.compute_s, 6),
                "queue_s": round(stats.queue_s, 6),
                "n_in_line": self._compute.n_in_line,
            }
        return status


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
