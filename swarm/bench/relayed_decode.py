"""Decode through a relay beside decode over direct paths with the same round trip; tokens of both in turn.

    direct     backbone -> front ~~ emulated path ~~> peer
    relayed    backbone -> relay -> front ~~ emulated path ~~> peer        no delay between backbone and relay

Both swarms are processes on this machine, so what the relay's own computing takes from the others' cores is in the figure too.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.bench.testbed import COVER_TIMEOUT_S, PathOptions, open_testbed
from swarm.emulation.hub import EmulatedPaths
from swarm.emulation.processes import LocalSwarm, contiguous_shares
from swarm.errors import SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.net.addresses import format_address
from swarm.registry.client import RegistryAddress, parse_registry
from swarm.wire import messages as m
from swarm.wire.rows import Wire, parse_wire

N_PROMPT, N_WARM_UP = 16, 3
NOWHERE = "127.0.0.1:9"  # an address that the peers announce and nobody listens at
STATUS_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedDecodeOptions:
    """What to measure."""

    model: Path
    rtt_s: float = 0.02
    n_peers: int = 2
    n_tokens: int = 8
    n_repetitions: int = 7


async def measure_relayed_decode(
    options: RelayedDecodeOptions, folder: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the speed of both, and how many packets the relay passed on."""
    engine = EngineConfig(n_ctx=N_PROMPT + N_WARM_UP + options.n_tokens + 1, n_threads=1)
    wire = parse_wire("f32")
    async with contextlib.AsyncExitStack() as stack:
        testbed = await stack.enter_async_context(
            open_testbed(
                folder / "direct",
                options.model,
                n_peers=options.n_peers,
                wire=wire,
                paths=PathOptions(rtts_s=(options.rtt_s,)),
                engine=engine,
            )
        )
        relayed, relay = await stack.enter_async_context(_open_relayed(folder / "relayed", options, engine, wire))
        kinds = {"direct": testbed.running, "relayed": relayed}
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for at in range(options.n_repetitions):
            progress(at, options.n_repetitions)
            order = list(kinds) if at % 2 else list(reversed(kinds))
            for kind in order:
                speeds[kind].append(await _tokens_per_s(kinds[kind], options.n_tokens))
        progress(options.n_repetitions, options.n_repetitions)
        n_passed = await _packets_passed(relayed, relay)
    n_layers = len(relayed.manifest.spec.moe_layers)
    n_steps = options.n_repetitions * (options.n_tokens + N_WARM_UP)
    if n_passed < 2 * n_steps * n_layers:
        raise SwarmError(f"not all went through the relay: got {n_passed} packets, expected {2 * n_steps * n_layers}")
    return {
        "rtt_s": options.rtt_s,
        "n_peers": options.n_peers,
        "direct_tokens_per_s": statistics.median(speeds["direct"]),
        "relayed_tokens_per_s": statistics.median(speeds["relayed"]),
        "relayed_share": statistics.median(
            relayed / direct for relayed, direct in zip(speeds["relayed"], speeds["direct"], strict=True)
        ),
        "bound_tokens_per_s": 1 / (n_layers * options.rtt_s) if options.rtt_s else None,
        "n_packets_relayed": n_passed,
    }


@contextlib.asynccontextmanager
async def _open_relayed(
    folder: Path, options: RelayedDecodeOptions, engine: EngineConfig, wire: Wire
) -> AsyncIterator[tuple[RunningBackbone, RegistryAddress]]:
    """Yield a backbone whose peers are all reached through the relay, each over a path of its own to that."""
    with GgufFile(options.model) as file:
        n_expert = read_spec(file).n_expert
    async with LocalSwarm(folder / "children") as swarm, EmulatedPaths() as hub:
        (relay,) = parse_registry(swarm.registry)
        paths = PathOptions(rtts_s=(options.rtt_s,))
        for index, share in enumerate(contiguous_shares(n_expert, options.n_peers)):
            front = await hub.front(spec=paths.spec(index), to=relay.address)
            registry = f"swarm://{relay.node}@{format_address(front)}"
            await swarm.add_peer(
                share,
                *("--model", str(options.model), "--registry", registry),
                *("--relays-only", "--advertise", NOWHERE),
            )
        config = BackboneConfig(
            registry=parse_registry(swarm.registry),
            folders=Folders.below(folder),
            model_file=options.model,
            wire=wire,
            host="127.0.0.1",
            engine=engine,
        )
        async with open_backbone(config, Identity.generate()) as running:
            await running.holders.wait_complete(COVER_TIMEOUT_S)
            yield running, relay


async def _tokens_per_s(running: RunningBackbone, n_tokens: int) -> float:
    engine = running.engine
    rng = np.random.default_rng(1)
    prompt = [int(token) for token in rng.integers(1, engine.model.n_vocab, N_PROMPT)]
    continuation = Continuation(
        engine, lambda row: int(engine.context.logits(row).argmax()), n_batch=engine.n_batch, n_draft=0
    )
    await continuation.start(prompt)
    await continuation.first()
    for _ in range(N_WARM_UP):
        await continuation.step(1)
    n_drawn, started = 0, time.perf_counter()
    while n_drawn < n_tokens:
        n_drawn += len(await continuation.step(n_tokens - n_drawn))
    return n_drawn / (time.perf_counter() - started)


async def _packets_passed(running: RunningBackbone, relay: RegistryAddress) -> int:
    """Return how many packets the relay has passed on, as it says itself."""
    connection = await running.endpoint.dial(relay.address, expected=relay.node)
    answer = await connection.request(m.GetStatus(), timeout_s=STATUS_TIMEOUT_S)
    assert isinstance(answer, m.Status)
    connection.close()
    return int(json.loads(answer.data)["n_passed"])
