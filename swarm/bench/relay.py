"""What a relay costs: packets a second and processor time for each, and what a dispatch takes longer than on a direct path.

The relay is a process of its own, started as an operator would, with its rates lifted. Its processor time is the kernel's count
for that process, so it holds whatever else runs; packets a second are measured while this process sends and receives on another
core.

    flights   ten packets of a channel at once, as QUIC sends a dispatch of 12 KB; the kernel hands them over in one piece
    singles   one packet of each of many channels in turn: nothing is handed over together
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.bench.transport import ANSWER_TIMEOUT_S, START_TIMEOUT_S, bench_dispatch
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net import relay_packets as p
from swarm.net.addresses import SocketAddress
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.flights import FlightSocket
from swarm.net.relay_client import SERVES, RelayAddress, RelayClient
from swarm.net.relay_leg import LegBinder, LegState
from swarm.registry.client import parse_registry
from swarm.wire import messages as m

PACKET_BYTES = 1200  # of QUIC's full packets
FLIGHT_PACKETS = 10  # a dispatch of 12 KB
WINDOW_PACKETS = 256  # under way at a time: keeps the relay busy and drops nothing
STALL_S = 2.0  # without a packet: what is under way was dropped, for even a busy machine runs the relay sooner
WARM_S = 0.2
MAX_FLIGHT_DELAY_S = 0.05
REQUEST_TIMEOUT_S = 5.0
N_AT_ONCE = 8  # handshakes: more would only wait for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """What to measure.

    Attributes:
        seconds: of each kind of packets.
        n_channels: active ones, in the part with singles.
        n_reservations: idle ones, for memory; 0: that is not measured.
        n_dispatches: of `size_bytes` each way, direct and relayed in turn.
    """

    seconds: float = 3.0
    n_channels: int = 200
    n_reservations: int = 1000
    n_dispatches: int = 300
    size_bytes: int = 12_288


@dataclass(frozen=True, slots=True)
class RelayProcess:
    """A relay that runs."""

    pid: int
    where: RelayAddress
    registry: str

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def rss_bytes(self) -> int:
        """Return the memory that it has resident."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")


@contextlib.asynccontextmanager
async def running_relay(home: Path) -> AsyncIterator[RelayProcess]:
    """Run a relay on loopback with its rates lifted."""
    command = [
        *("-m", "relay", "--host", "127.0.0.1", "--port", "0", "--http", "off", "--json", "--until-eof"),
        *("--channel-rate", "100Gbit", "--node-rate", "100Gbit", "--total-rate", "100Gbit", "--drain", "0s"),
        *("--reservations", "100000", "--channels-per-node", "1000"),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "SWARM_HOME": str(home)},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            raise SwarmError("the relay did not start")
        registry = json.loads(line)["registry"]
        (where,) = parse_registry(registry)
        yield RelayProcess(process.pid, RelayAddress(address=where.address, node=where.node), registry)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def measure_relay(options: RelayOptions, home: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Return the figures of `swarm bench relay`."""
    parts = 4 if options.n_reservations else 3
    async with running_relay(home) as relay:
        progress(0, parts)
        async with _channels(relay, options.n_channels) as legs:
            flights = _pump(relay, legs[:1], FLIGHT_PACKETS, options.seconds)
            progress(1, parts)
            singles = _pump(relay, legs, 1, options.seconds)
            progress(2, parts)
        overhead = await _overhead(relay, options)
        progress(3, parts)
        figures = {
            "relay_overhead_p50_s": overhead["relayed_p50_s"] - overhead["direct_p50_s"],
            "packets_per_s": singles["packets_per_s"],
            "cpu_us_per_packet": singles["cpu_us_per_packet"],
            "mbit_per_s": flights["mbit_per_s"],
            "flights": flights,
            "singles": singles,
            "dispatch": overhead,
        }
        if options.n_reservations:
            figures["idle_reservations"] = await _idle(relay, options.n_reservations)
            progress(4, parts)
        return figures


# Packets alone


@dataclass(frozen=True, slots=True)
class _Pipe:
    """A channel between two plain sockets: what goes in at one comes out at the other."""

    channel: bytes
    sender: FlightSocket
    receiver: socket.socket


@contextlib.asynccontextmanager
async def _channels(relay: RelayProcess, n: int) -> AsyncIterator[list[_Pipe]]:
    """Yield `n` bound channels, all between the same two sockets; nodes of their own have asked for them."""
    n_each = 1
    while n_each * n_each < n:
        n_each += 1
    incoming: list[m.Leg] = []

    async def take(_: Connection, request: m.Request) -> m.Done:
        if isinstance(request, m.Incoming):
            incoming.append(request.leg)
        return m.Done()

    async with contextlib.AsyncExitStack() as stack:

        async def node() -> tuple[NodeId, Connection]:
            identity = Identity.generate()
            endpoint = Endpoint(identity, host="127.0.0.1", handler=take, serves=SERVES)
            await stack.enter_async_context(endpoint)
            return identity.node_id, await endpoint.dial(relay.where.address, expected=relay.where.node)

        called = [await node() for _ in range(n_each)]
        callers = [await node() for _ in range(n_each)]
        vouchers = []
        for node_id, connection in called:
            answer = await connection.request(m.Reserve(lifetime_ms=120_000), timeout_s=REQUEST_TIMEOUT_S)
            assert isinstance(answer, m.Reserved)
            vouchers.append((node_id, answer.voucher))
        legs: list[tuple[m.Leg, m.Leg]] = []
        for _, connection in callers:
            for node_id, voucher in vouchers[: n - len(legs)]:
                made = await connection.request(
                    m.Connect(node_id=node_id, voucher=voucher), timeout_s=REQUEST_TIMEOUT_S
                )
                assert isinstance(made, m.Channel)
                legs.append((made.leg, incoming.pop()))
        sockets = [_udp() for _ in range(2)]
        for each in sockets:
            stack.callback(each.close)
        for pair in legs:
            for leg, udp in zip(pair, sockets, strict=True):
                _bind(leg, udp, relay.where.address)
        sender = FlightSocket(sockets[0])
        yield [_Pipe(ours.channel, sender, sockets[1]) for ours, _ in legs]


def _udp() -> socket.socket:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    udp.bind(("127.0.0.1", 0))
    udp.settimeout(REQUEST_TIMEOUT_S)
    return udp


def _bind(leg: m.Leg, udp: socket.socket, relay: SocketAddress) -> None:
    binder = LegBinder(leg, keepalive_s=60.0, rng=random.Random(0))
    packets = binder.begin(0.0)
    now = 0.0
    while binder.state is not LegState.BOUND:
        for data in packets:
            udp.sendto(data, relay)
        answer = udp.recv(2048)
        now += 1.0
        packets = binder.receive(p.decode(answer), answer, now)


def _pump(relay: RelayProcess, pipes: Sequence[_Pipe], n_packets: int, seconds: float) -> dict[str, float]:
    """Send runs of `n_packets` through the channels in turn for a while; return what came out, and what it cost the relay."""
    receiver = FlightSocket(pipes[0].receiver)
    pipes[0].receiver.setblocking(False)
    payload = bytes(PACKET_BYTES)
    runs = [[p.relayed(pipe.channel, payload)] * n_packets for pipe in pipes]
    n_received = n_under_way = n_lost = at = 0
    begun = last = time.perf_counter()
    until = begun + WARM_S + seconds
    counted_from, cpu_s, n_before = 0.0, 0.0, 0
    while (now := time.perf_counter()) < until:
        if not counted_from and now >= begun + WARM_S:
            counted_from, cpu_s, n_before = now, relay.cpu_s(), n_received
        while n_under_way < WINDOW_PACKETS:
            with contextlib.suppress(BlockingIOError):
                pipes[at].sender.send(runs[at], relay.where.address)
            n_under_way += n_packets
            at = (at + 1) % len(pipes)
        while n := len(receiver.receive()):
            n_received += n
            n_under_way -= n
            last = now
        if n_under_way >= WINDOW_PACKETS:
            select.select([pipes[0].receiver], [], [], MAX_FLIGHT_DELAY_S)
        if now > last + STALL_S:
            n_lost += n_under_way
            n_under_way, last = 0, now
    took_s = time.perf_counter() - counted_from
    n = n_received - n_before
    return {
        "packets_per_s": n / took_s,
        "mbit_per_s": n * PACKET_BYTES * 8 / took_s / 1e6,
        "cpu_us_per_packet": (relay.cpu_s() - cpu_s) / n * 1e6,
        "n_channels": len(pipes),
        "n_lost": n_lost,
    }


# Dispatches


async def _overhead(relay: RelayProcess, options: RelayOptions) -> dict[str, float]:
    """Return medians of a dispatch of `size_bytes` each way, over the relay and beside it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "swarm.bench.relay_member", relay.registry),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            raise SwarmError("the peer did not start")
        told = json.loads(line)
        node = NodeId.parse(told["node_id"])
        endpoint = Endpoint(Identity.generate(), host="127.0.0.1")
        client = RelayClient(endpoint)
        endpoint.on_other = client.receive
        async with endpoint:
            direct = await endpoint.dial(("127.0.0.1", told["endpoint"]), expected=node)
            leg = await client.connect(node, bytes.fromhex(told["voucher"]))
            relayed = await endpoint.dial(endpoint.add_channel(leg.channel, leg.address), expected=node)
            request = bench_dispatch(options.size_bytes, options.size_bytes)
            times: dict[str, list[float]] = {"direct": [], "relayed": []}
            cpu_s = 0.0
            for at in range(options.n_dispatches + 20):
                if at == 20:  # windows and caches are warm
                    times = {"direct": [], "relayed": []}
                    cpu_s = relay.cpu_s()
                for kind, connection in (("direct", direct), ("relayed", relayed)):
                    start = time.perf_counter()
                    await connection.request(request, timeout_s=ANSWER_TIMEOUT_S)
                    times[kind].append(time.perf_counter() - start)
            relay_s = (relay.cpu_s() - cpu_s) / options.n_dispatches
            client.close()
        return {
            "size_bytes": options.size_bytes,
            "n": options.n_dispatches,
            "direct_p50_s": statistics.median(times["direct"]),
            "relayed_p50_s": statistics.median(times["relayed"]),
            "relay_cpu_s": relay_s,
        }
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


# Memory


async def _idle(relay: RelayProcess, n: int) -> dict[str, float]:
    """Return what `n` reservations that nobody calls cost the relay, their connections and keepalives included."""
    before = relay.rss_bytes()
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running: list[asyncio.Task[None]] = []
        reserved: list[asyncio.Event] = []
        for _ in range(n):
            endpoint = await stack.enter_async_context(Endpoint(Identity.generate(), host="127.0.0.1"))
            client = RelayClient(endpoint)
            endpoint.on_other = client.receive
            reserved.append(asyncio.Event())
            client.on_change = reserved[-1].set
            running.append(tasks.create_task(client.run([relay.where], n=1)))
            if len(reserved) > N_AT_ONCE:
                await reserved[-N_AT_ONCE].wait()
        for event in reserved:
            await event.wait()
        await asyncio.sleep(1.0)
        cpu_s, begun = relay.cpu_s(), time.perf_counter()
        await asyncio.sleep(5.0)
        share = (relay.cpu_s() - cpu_s) / (time.perf_counter() - begun)
        after = relay.rss_bytes()
        for task in running:
            task.cancel()
    return {"n": n, "bytes_each": (after - before) / n, "rss_bytes": after, "cpu_share": share}
