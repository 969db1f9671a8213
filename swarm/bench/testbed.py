"""A swarm for benchmarks: a relay and peers as processes, emulated paths between them and a backbone in this process.

backbone (this process) -> front ~~ emulated path ~~> peer 0
                        -> front ~~ emulated path ~~> peer 1 ...
all of them -> relay, directly: the registry is not on a token's way
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.dispatch.layer_counts import LayerSpan
from swarm.emulation.hub import EmulatedPaths, EmulatorStats
from swarm.emulation.link import NS_PER_S, LinkSpec
from swarm.emulation.path import PathSpec
from swarm.emulation.processes import LocalSwarm, contiguous_shares
from swarm.errors import SwarmError, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet, format_index_set
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.net.addresses import format_address
from swarm.net.fast_links import CHECK_S
from swarm.net.repair import MIN_SPACING_S
from swarm.registry.client import parse_registry
from swarm.wire.rows import Wire

COVER_TIMEOUT_S = 60.0
PAYLOAD_FROM_BYTES = 200  # IP packets at least this large carry rows; acknowledgements take about 70
# A message of a step enters its path in one burst; copies follow after at least net.repair.MIN_SPACING_S. Where a burst takes
# longer, its end is left out: the bound may only get smaller by that.
COPIES_AFTER_S = 0.95 * MIN_SPACING_S
BACKBONE_LINK = "backbone"
LINKS_TIMEOUT_S = 6.0  # to open a TLS link to each peer: a dial's own timeout and some looks
Link = Literal["quic", "tls", "auto"]


def require_direct(link: Link, paths: PathOptions) -> None:
    """Raise UserError for TLS links over emulated paths."""
    if link != "quic" and not paths.is_direct:
        raise UserError("TLS links are measured without emulated paths, which carry UDP alone: use --rtt 0ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """The paths to the peers.

    Attributes:
        rtts_s: round trip of each peer's path; one value stands for all.
        jitter_s: of a round trip: each way is drawn from half the round trip +- half of this.
        rate_bit_s: each host's access link per direction; None: no limit.
    """

    rtts_s: tuple[float, ...] = (0.0,)
    jitter_s: float = 0.0
    loss: float = 0.0
    rate_bit_s: float | None = None
    seed: int = 0

    @property
    def is_direct(self) -> bool:
        """Whether there is nothing to emulate."""
        return not any(self.rtts_s) and not self.jitter_s and not self.loss and self.rate_bit_s is None

    def rtt_s(self, peer: int) -> float:
        """Round trip to a peer, without jitter."""
        return self.rtts_s[peer % len(self.rtts_s)]

    def spec(self, peer: int) -> PathSpec:
        """One direction of a peer's path."""
        return PathSpec(delay_s=self.rtt_s(peer) / 2, jitter_s=self.jitter_s / 2, loss=self.loss, seed=self.seed + peer)


@dataclass(slots=True)
class Testbed:
    """What is running.

    Attributes:
        fronts: where each peer is reached over its path; empty without a hub.
        config: of the backbone; `add_backbone` makes others from it.
    """

    running: RunningBackbone
    swarm: LocalSwarm
    hub: EmulatedPaths | None
    path_names: list[str] = field(default_factory=list)
    spans: list[LayerSpan] = field(default_factory=list)
    fronts: list[tuple[str, int]] = field(default_factory=list)
    config: BackboneConfig | None = None

    async def path_stats(self) -> EmulatorStats | None:
        """What the emulator did so far; it pauses for a moment, so ask between measurements."""
        return await self.hub.stats() if self.hub is not None else None

    async def change_paths(self, paths: PathOptions) -> None:
        """Change delays, loss and rates under way; packets in flight keep their times.

        A swarm that was opened without a rate, or directly, has no links, or no paths, to change: UserError.
        """
        if self.hub is None:
            raise UserError("cannot change paths that are not emulated")
        if paths.rate_bit_s is not None:
            for host in (BACKBONE_LINK, *(f"peer{i}" for i in range(len(self.fronts)))):
                await self.hub.access(host, LinkSpec(rate_bit_s=paths.rate_bit_s))
        for index, front in enumerate(self.fronts):
            await self.hub.change(front, paths.spec(index))

    async def open_links(self, *, is_forced: bool) -> None:
        """Return once the backbone has a TLS link to every peer, or, unless it is forced, after a while without.

        Raises:
            SwarmError: it is forced, and not every link can be opened.
        """
        links, holders = self.running.dispatcher.links, self.running.holders
        assert links is not None, "open_testbed was not asked for links"
        links.is_forced = is_forced
        nodes, until = holders.placement.destinations, time.monotonic() + LINKS_TIMEOUT_S
        while links.n_open < len(nodes) and time.monotonic() < until:
            for node in nodes:
                links.best(node, await holders.connection(node))
            await asyncio.sleep(CHECK_S)
        if is_forced and links.n_open < len(nodes):
            raise SwarmError(f"TLS links could be opened to {links.n_open} of {len(nodes)} peers")

    @contextlib.asynccontextmanager
    async def add_backbone(self, engine: EngineConfig) -> AsyncIterator[RunningBackbone]:
        """Yield a second backbone of the same peers, over the same paths; its layers are told of in `spans` too."""
        assert self.config is not None
        async with open_backbone(replace(self.config, engine=engine), Identity.generate()) as running:
            await running.holders.wait_complete(COVER_TIMEOUT_S)
            running.dispatcher.on_layer = self.spans.append
            yield running


@contextlib.asynccontextmanager
async def open_testbed(
    folder: Path,
    model: Path,
    *,
    n_peers: int,
    wire: Wire,
    paths: PathOptions,
    engine: EngineConfig,
    peer_options: tuple[str, ...] = (),
    slices: Sequence[ExpertSet] | None = None,
    adapt: Callable[[BackboneConfig], BackboneConfig] = lambda config: config,
) -> AsyncIterator[Testbed]:
    """Yield a complete swarm over the paths; peers take their experts from the file.

    Args:
        slices: what each peer holds; None: contiguous shares of every layer.
        adapt: changes how the backbone is configured.

    Raises:
        UserError: more peers than experts, or a model that cannot be served.
    """
    with GgufFile(model) as file:
        n_expert = read_spec(file).n_expert
    if n_peers > n_expert:
        raise UserError(f"more peers than experts: got {n_peers}, expected at most {n_expert}")
    async with contextlib.AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(LocalSwarm(folder / "children"))
        hub: EmulatedPaths | None = None
        if not paths.is_direct:
            hub = await stack.enter_async_context(EmulatedPaths())
            if paths.rate_bit_s is not None:
                for host in (BACKBONE_LINK, *(f"peer{i}" for i in range(n_peers))):
                    await hub.access(host, LinkSpec(rate_bit_s=paths.rate_bit_s))
        names: list[str] = []
        fronts: list[tuple[str, int]] = []
        for index, share in enumerate(_shares(folder, n_expert, n_peers, slices)):
            options = ["--model", str(model), *peer_options]
            if hub is not None:
                port = free_port()
                names.append(f"path{index}")
                limited = paths.rate_bit_s is not None
                front = await hub.front(
                    spec=paths.spec(index),
                    to=("127.0.0.1", port),
                    client=BACKBONE_LINK if limited else None,
                    server=f"peer{index}" if limited else None,
                    name=names[-1],
                )
                fronts.append(front)
                options += ["--port", str(port), "--advertise", format_address(front)]
            await swarm.add_peer(share, *options)
        config = BackboneConfig(
            registry=parse_registry(swarm.registry),
            folders=Folders.below(folder),
            model_file=model,
            wire=wire,
            host="127.0.0.1",
            engine=engine,
        )
        config = adapt(config)
        running = await stack.enter_async_context(open_backbone(config, Identity.generate()))
        await running.holders.wait_complete(COVER_TIMEOUT_S)
        testbed = Testbed(running, swarm, hub, names, fronts=fronts, config=config)
        running.dispatcher.on_layer = testbed.spans.append
        yield testbed


def _shares(
    folder: Path, n_expert: int, n_peers: int, slices: Sequence[ExpertSet] | None
) -> Sequence[Sequence[int] | Path]:
    """Return what each peer is told to hold: a range of experts, or a slice file."""
    if slices is None:
        return contiguous_shares(n_expert, n_peers)
    if len(slices) != n_peers:
        raise UserError(f"wrong number of slices: got {len(slices)}, expected one for each of {n_peers} peers")
    files = []
    for index, held in enumerate(slices):
        files.append(folder / f"slice-{index}.json")
        files[-1].write_text(json.dumps({str(layer): format_index_set(ids) for layer, ids in held.by_layer.items()}))
    return files


def drawn_round_trips_s(spans: list[LayerSpan], stats: EmulatorStats, path_names: list[str]) -> list[float]:
    """Return, for each span, the slowest round trip that the paths really delivered to its packets.

    Only packets large enough to carry rows count, and of each path the slowest of each direction within the span. Copies of
    packets do not: on a path with jitter the slower of two draws would pass for what the layer had to wait for.
    """
    ways = [(_payload(stats, f"{name}/forth"), _payload(stats, f"{name}/back")) for name in path_names]
    trips = []
    for span in spans:
        slowest = 0.0
        for forth, back in ways:
            there, here = _slowest(forth, span), _slowest(back, span)
            if there and here:
                slowest = max(slowest, there + here)
        trips.append(slowest)
    return trips


def _payload(stats: EmulatorStats, name: str) -> np.ndarray:
    records = stats.ways[name].records
    return records[records[:, 3] >= PAYLOAD_FROM_BYTES]


def _slowest(records: np.ndarray, span: LayerSpan) -> float:
    chosen = records[(records[:, 0] >= span.began_ns) & (records[:, 0] < span.returned_ns)]
    if not len(chosen):
        return 0.0
    chosen = chosen[chosen[:, 0] < chosen[:, 0].min() + COPIES_AFTER_S * NS_PER_S]
    return float((chosen[:, 2] - chosen[:, 0]).max()) / NS_PER_S


def free_port() -> int:
    """Return a UDP port of loopback that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
