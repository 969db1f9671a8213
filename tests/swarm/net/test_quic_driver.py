"""What a driver tells about its next deadline and flush: never too little, and, on a quiet connection, nothing in vain."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator

import pytest

from swarm.identity import Identity
from swarm.net.certificate import make_certificate
from swarm.net.quic_driver import ACK_DELAY_S, ACK_EVERY_PACKETS, AioquicDriver, QuicDriver

IDENTITY = Identity.from_seed(b"driver" + bytes(26))
CERTIFICATE = make_certificate(IDENTITY)
CLIENT, SERVER = ("10.0.0.1", 1), ("10.0.0.2", 2)
START_S = 1000.0


def drivers() -> Iterator[type[QuicDriver]]:
    yield AioquicDriver
    if importlib.util.find_spec("qh3") is not None:
        from swarm.net.qh3_driver import Qh3Driver

        yield Qh3Driver


def flushed(driver: QuicDriver, now: float, *, has_data: bool = True) -> list[bytes]:
    return list(itertools.chain.from_iterable(driver.flush(now, has_data=has_data)))


class Pair:
    """A client and a server that are open and have nothing left to say, in a clock of their own."""

    def __init__(self, kind: type[QuicDriver]) -> None:
        self.now = START_S
        self.n_streams = 0
        self.client = kind(kind.configuration(IDENTITY, CERTIFICATE, is_client=True), None)
        self.client.quic.connect(SERVER, now=self.now)
        first = flushed(self.client, self.now)
        cid = first[0][6 : 6 + first[0][5]]
        self.server = kind(kind.configuration(IDENTITY, CERTIFICATE, is_client=False), cid)
        for data in first:
            self.server.receive((data,), CLIENT, self.now)
        for _ in range(8):
            self.now += 0.001
            self.move(self.server, self.client)
            self.move(self.client, self.server)
        self.now += 1.0
        for each in (self.client, self.server):
            each.handle_timer(self.now)
        self.move(self.server, self.client)
        self.move(self.client, self.server)
        self.move(self.server, self.client)

    def move(self, sender: QuicDriver, receiver: QuicDriver) -> int:
        """Flush one side into the other; return how many datagrams that were."""
        source = CLIENT if sender is self.client else SERVER
        datagrams = flushed(sender, self.now)
        if datagrams:
            receiver.receive(datagrams, source, self.now)
        while receiver.next_event() is not None:
            pass
        return len(datagrams)

    def new_stream(self) -> int:
        self.n_streams += 1
        return 4 * (self.n_streams - 1)

    def ask(self, size: int) -> int:
        stream = self.new_stream()
        self.client.send_stream_data(stream, bytes(size), True)
        self.move(self.client, self.server)
        return stream


@pytest.fixture(params=list(drivers()), ids=lambda kind: kind.__name__)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_an_acknowledgement_waits_for_the_answer_and_rides_on_it(pair: Pair) -> None:
    stream = pair.ask(2200)
    assert not pair.server.wants_flush()
    assert not pair.server.has_deadline_before(pair.now + ACK_DELAY_S, pair.now)
    deadline = pair.server.next_deadline()
    assert deadline is not None
    assert deadline == pytest.approx(pair.now + ACK_DELAY_S)
    pair.now += 0.002
    pair.server.send_stream_data(stream, bytes(2200), True)
    assert pair.move(pair.server, pair.client) == 2
    at = pair.client.next_deadline()
    assert at is not None
    assert at <= pair.now + ACK_DELAY_S + 1e-9
    assert pair.client.n_unsent_bytes() == 0, "acknowledged by the answer"


def test_without_an_answer_it_is_sent_at_its_deadline(pair: Pair) -> None:
    pair.ask(2200)
    pair.now += ACK_DELAY_S + 1e-6
    pair.server.handle_timer(pair.now)
    datagrams = flushed(pair.server, pair.now, has_data=False)
    assert len(datagrams) == 1
    assert len(datagrams[0]) < 64


def test_a_long_transfer_is_acknowledged_every_few_packets(pair: Pair) -> None:
    pair.ask(4 * 1232 * ACK_EVERY_PACKETS)
    for _ in range(8):  # qh3 paces
        pair.now += 0.0005
        pair.move(pair.client, pair.server)
    assert pair.server.wants_flush()
    assert pair.now < START_S + 2.0


def test_a_small_packet_is_answered_at_once(pair: Pair) -> None:
    pair.client.quic.send_ping(7)
    pair.move(pair.client, pair.server)
    assert pair.server.wants_flush()


def test_aioquic_tells_of_a_packet_that_seems_lost() -> None:
    pair = Pair(AioquicDriver)
    stream = pair.new_stream()
    pair.client.send_stream_data(stream, bytes(2200), True)
    lost, kept = flushed(pair.client, pair.now)
    assert not pair.client.has_deadline_before(pair.now + ACK_DELAY_S, pair.now)
    pair.now += 0.001
    pair.server.receive((kept,), CLIENT, pair.now)
    assert pair.server.wants_flush(), "a gap is told at once"
    pair.move(pair.server, pair.client)
    assert pair.client.has_deadline_before(pair.now + ACK_DELAY_S, pair.now)
    deadline = pair.client.next_deadline()
    assert deadline is not None
    assert deadline < pair.now + ACK_DELAY_S
    assert lost != kept


def events_of(driver: QuicDriver) -> list[tuple[int, int, bool]]:
    """Return (stream, bytes, is the end) of what streams got."""
    got = []
    while (event := driver.next_event()) is not None:
        if isinstance(event, driver.events.StreamDataReceived):
            got.append((event.stream_id, len(event.data), event.end_stream))
    return got


def test_what_a_stream_got_at_once_is_one_event_and_streams_stay_apart(pair: Pair) -> None:
    sent, datagrams = [], list[bytes]()
    for size in (3000, 100, 5000):
        stream = pair.new_stream()
        pair.client.send_stream_data(stream, bytes(size), True)
        datagrams += flushed(pair.client, pair.now)
        sent.append((stream, size, True))
    assert len(datagrams) > len(sent)
    pair.server.receive(datagrams, CLIENT, pair.now)
    assert events_of(pair.server) == sent


def test_an_event_that_follows_a_stream_s_bytes_is_not_lost(pair: Pair) -> None:
    stream = pair.new_stream()
    pair.client.send_stream_data(stream, bytes(1500), False)
    first = flushed(pair.client, pair.now)
    pair.client.abandon_stream(stream)
    second = flushed(pair.client, pair.now)
    pair.server.receive(first, CLIENT, pair.now)
    pair.server.receive(second, CLIENT, pair.now)
    kinds = []
    while (event := pair.server.next_event()) is not None:
        kinds.append(type(event).__name__)
    assert kinds.count("StreamDataReceived") == 1
    assert "StreamReset" in kinds


def test_what_is_abandoned_behind_a_long_stream_does_not_hold_it_up() -> None:
    """aioquic by itself sends one packet of it, since the end of the other finds that packet full."""
    pair = Pair(AioquicDriver)
    kept, *others = (pair.new_stream() for _ in range(100))
    for stream in (kept, *others):
        pair.client.send_stream_data(stream, bytes(60_000), True)
    for stream in others:  # more of them than packets have room for their ends beside it
        pair.client.abandon_stream(stream)
    datagrams = flushed(pair.client, pair.now)
    assert len(datagrams) >= 60_000 / 1232
    pair.server.receive(datagrams, CLIENT, pair.now)
    assert sum(size for stream, size, _ in events_of(pair.server) if stream == kept) == 60_000
    assert not pair.client._has_abandoned()  # type: ignore[attr-defined]
