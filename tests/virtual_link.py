"""QUIC connections in a virtual clock, over emulated paths that may share a bottleneck: alike each time.

    world = VirtualWorld(seed=1)
    link = world.link(PathSpec(delay_s=0.040))
    link.open()
    print(link.dispatch(12_288, 12_288))      # seconds from the first byte out to the last byte back

Both ends are `AioquicDriver`s as `Connection` drives them, without sessions: a request is one stream, its answer the same stream.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from aioquic.quic import events
from aioquic.quic.connection import QuicConnection

from swarm.emulation.link import NS_PER_S, Link, LinkSpec
from swarm.emulation.path import Network, OneWay, PathSpec
from swarm.identity import Identity
from swarm.net.certificate import make_certificate, quic_configuration
from swarm.net.quic_driver import AioquicDriver, QuicDriver

IDENTITY = Identity.from_seed(b"virtual" + bytes(25))
CERTIFICATE = make_certificate(IDENTITY)
IP_OVERHEAD_BYTES = 28  # IPv4 and UDP: what links carry besides the payload
COMPUTE_S = 0.002
START_S = 1000.0  # so that a time of 0 by mistake shows


class PlainDriver(AioquicDriver):
    """aioquic as it comes, with one of its own controllers; for comparison."""

    def __init__(self, configuration: Any, original_cid: bytes | None) -> None:
        self.quic = QuicConnection(configuration=configuration, original_destination_connection_id=original_cid)

    receive = QuicDriver.receive
    flush = QuicDriver.flush
    copies = QuicDriver.copies
    wants_flush = QuicDriver.wants_flush
    next_deadline = QuicDriver.next_deadline


class Side:
    """One end of a link."""

    def __init__(self, world: VirtualWorld, way: OneWay, address: tuple[str, int]) -> None:
        self.world, self.way, self.address = world, way, address
        self.driver: AioquicDriver | None = None
        self.make: Callable[[bytes], AioquicDriver] | None = None
        self.peer: Side = self
        self.on_data: Callable[[int, int, bool], None] = lambda stream, size, is_end: None
        self.on_handshake: Callable[[], None] = lambda: None
        self.is_started = False
        self.is_in_use = False  # from the first stream on; until then every datagram is followed by a flush
        self.n_sent = self.bytes_sent = self.repair_bytes = 0

    def arrive(self, data: bytes) -> None:
        if self.driver is None:
            assert self.make is not None
            self.driver = self.make(data[6 : 6 + data[5]])  # of a long header: the id the client chose
        self.receive([data])

    def receive(self, datagrams: list[bytes]) -> None:
        """Take in what arrived since this side last ran, and flush once, if that can be of use, as `Connection` does."""
        assert self.driver is not None
        self.driver.receive(datagrams, self.peer.address, self.world.now)
        self.take_events()
        if not self.is_in_use or self.driver.wants_flush():
            self.pump(has_data=False)

    def wake(self) -> None:
        assert self.driver is not None
        self.driver.handle_timer(self.world.now)
        for data in self.driver.copies(self.world.now):
            self.repair_bytes += len(data)
            self.offer(data)
        self.pump(has_data=False)

    def take_events(self) -> None:
        assert self.driver is not None
        self.is_started = True
        while (event := self.driver.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                self.is_in_use = True
                self.on_data(event.stream_id, len(event.data), event.end_stream)
            elif isinstance(event, events.HandshakeCompleted):
                self.on_handshake()
            assert not isinstance(event, events.ConnectionTerminated), event

    def pump(self, *, has_data: bool) -> None:
        driver = self.driver
        assert driver is not None
        self.take_events()
        for flight in driver.flush(self.world.now, has_data=has_data):
            for data in flight:
                self.n_sent += 1
                self.bytes_sent += len(data)
                self.offer(data)

    def send(self, stream: int, size: int) -> None:
        assert self.driver is not None
        self.is_in_use = True
        self.driver.quic.send_stream_data(stream, bytes(size), True)
        self.pump(has_data=True)

    def offer(self, data: bytes) -> None:
        self.world.network.offer(self.way, (self.peer, data), len(data) + IP_OVERHEAD_BYTES, self.world.now_ns)


class VirtualLink:
    """A client and a server over one path each way."""

    def __init__(self, world: VirtualWorld, client: Side, server: Side) -> None:
        self.world, self.client, self.server = world, client, server
        self.is_open = False
        self.done: dict[int, float] = {}
        self._wanted: dict[int, tuple[int, float]] = {}
        client.on_data = self._answered
        client.on_handshake = self._opened
        server.on_data = self._asked

    def open(self) -> None:
        """Shake hands, and let 0.5 s pass as the greetings would."""
        self.start_opening()
        self.world.run_until(lambda: self.is_open)
        self.world.run_for(0.5)

    def start_opening(self) -> None:
        assert self.client.driver is not None
        self.client.driver.quic.connect(self.server.address, now=self.world.now)
        self.client.pump(has_data=False)

    def ask(self, size_out: int, size_back: int, compute_s: float = COMPUTE_S) -> int:
        """Send a request now; `done[stream]` will be when its answer is whole."""
        assert self.client.driver is not None
        stream = self.client.driver.quic.get_next_available_stream_id()
        self._wanted[stream] = (size_back, compute_s)
        self.client.send(stream, size_out)
        return int(stream)

    def dispatch(self, size_out: int, size_back: int, compute_s: float = COMPUTE_S) -> float:
        """Return the seconds of one request and its answer, less the compute."""
        start = self.world.now
        stream = self.ask(size_out, size_back, compute_s)
        self.world.run_until(lambda: stream in self.done)
        return self.done[stream] - start - compute_s

    @property
    def controllers(self) -> tuple[Any, Any]:
        assert self.client.driver is not None
        assert self.server.driver is not None
        return self.client.driver.quic._loss._cc, self.server.driver.quic._loss._cc

    def _opened(self) -> None:
        self.is_open = True

    def _asked(self, stream: int, size: int, is_end: bool) -> None:
        if is_end:
            size_back, compute_s = self._wanted.pop(stream)
            self.world.call_in(compute_s, lambda: self.server.send(stream, size_back))

    def _answered(self, stream: int, size: int, is_end: bool) -> None:
        if is_end:
            self.done[stream] = self.world.now


class VirtualWorld:
    """The clock, the packets under way, and every side that waits for a deadline."""

    def __init__(self, *, seed: int) -> None:
        self.now_ns = round(START_S * NS_PER_S)
        self.network: Network[tuple[Side, bytes]] = Network()
        self._rng = random.Random(seed)
        self._sides: list[Side] = []
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    @property
    def now(self) -> float:
        return self.now_ns / NS_PER_S

    def bottleneck(self, *, rate_bit_s: float, queue_bytes: int) -> Link:
        """Return a link that several paths can share."""
        return Link(LinkSpec(rate_bit_s=rate_bit_s, queue_bytes=queue_bytes))

    def link(
        self,
        forth: PathSpec,
        back: PathSpec | None = None,
        *,
        through: Link | None = None,
        algorithm: str = "swarm",
        way: Callable[..., OneWay] = OneWay,
        driver: type[AioquicDriver] = AioquicDriver,
    ) -> VirtualLink:
        """Return a new link; `through` is a bottleneck on the way from client to server."""
        index = len(self._sides)
        sides = [
            Side(self, way(spec, random.Random(self._rng.random()).random, up=up), ("10.0.0.1", 1000 + index + at))
            for at, (spec, up) in enumerate(((forth, through), (back or forth, None)))
        ]
        client, server = sides
        client.peer, server.peer = server, client
        kind = driver if algorithm == "swarm" else PlainDriver

        def configured(is_client: bool) -> Any:
            configuration = quic_configuration(IDENTITY, CERTIFICATE, is_client=is_client)
            return dataclasses.replace(configuration, congestion_control_algorithm=algorithm)

        client.driver = kind(configured(True), None)
        server.make = lambda cid: kind(configured(False), cid)
        self._sides += sides
        return VirtualLink(self, client, server)

    def call_in(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now_ns + round(delay_s * NS_PER_S), next(self._counter), call))

    def run_for(self, seconds: float) -> None:
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self._step(end_ns):
            pass
        self.now_ns = end_ns

    def run_until(self, is_done: Callable[[], bool], limit_s: float = 60.0) -> None:
        end_ns = self.now_ns + round(limit_s * NS_PER_S)
        while not is_done():
            assert self._step(end_ns), f"nothing more within {limit_s} s"

    def _step(self, end_ns: int) -> bool:
        """Let the next thing happen; False: it comes after `end_ns`, or nothing will."""
        at_ns = end_ns + 1
        packet_ns = self.network.next_due_ns()
        if packet_ns is not None:
            at_ns = min(at_ns, packet_ns)
        if self._calls:
            at_ns = min(at_ns, self._calls[0][0])
        sleeper = None
        for side in self._sides:
            deadline = side.driver.next_deadline() if side.driver is not None and side.is_started else None
            # A microsecond late: in floats `sent + delay == now` and `sent <= now - delay` can disagree, for ever.
            if deadline is not None and max(self.now_ns, round(deadline * NS_PER_S)) + 1000 < at_ns:
                at_ns, sleeper = max(self.now_ns, round(deadline * NS_PER_S)) + 1000, side
        if at_ns > end_ns:
            return False
        self.now_ns = max(self.now_ns, at_ns)
        if sleeper is not None:
            sleeper.wake()
        elif self._calls and self._calls[0][0] <= self.now_ns:
            heapq.heappop(self._calls)[2]()
        else:
            packet = self.network.pop_due(self.now_ns)
            if packet is not None:
                packet.way.arrive(packet.size_bytes)
                side, data = packet.payload
                side.arrive(data)
        return True
