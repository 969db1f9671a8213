"""A connection whose QUIC library fails: it ends by itself, and whoever waits hears of it. All else is in tests/e2e/net."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import ConnectionLost, RemoteProtocolError, SwarmError
from swarm.net import connection as connection_module
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.paths import Path
from swarm.wire import events as e
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.greetings import State
from tests.swarm.net.test_certificate import CLIENT

ADDRESS = ("192.0.2.1", 5)


class FakeDriver:
    """A QUIC library with nothing to do, one of whose calls fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.is_closed = False
        self.is_pressing = True
        self.n_flushed = 0
        self.quic = SimpleNamespace(
            configuration=SimpleNamespace(is_client=True),
            close=self._close,
            send_ping=lambda uid: None,
        )
        self.events = SimpleNamespace()

    def _do(self, name: str) -> None:
        if self.failing == name:
            raise AssertionError("the library has lost count")

    def _close(self, *, error_code: int, reason_phrase: str) -> None:
        self._do("close")
        self.is_closed = True

    def receive(self, flight: Sequence[bytes], address: Any, now: float) -> None:
        self._do("receive")

    def next_event(self) -> None:
        self._do("next_event")

    def n_streams(self) -> int:
        return 0

    def n_unsent_bytes(self) -> int:
        return 0

    def send_stream_data(self, stream: int, data: bytes, is_end: bool) -> None:
        self._do("send_stream_data")

    def wants_flush(self) -> bool:
        return True

    def flush(self, now: float, *, has_data: bool) -> Iterator[Any]:
        self._do("flush")
        self.n_flushed += 1
        return iter(())

    def has_deadline_before(self, at: float, now: float) -> bool:
        return self.is_pressing

    def next_deadline(self) -> None:
        return None

    def handle_timer(self, now: float) -> None:
        self._do("handle_timer")

    def copies(self, now: float) -> list[Any]:
        return []


class FakeSession:
    """A session with one request under way, that is due at once."""

    state = State.OPEN
    remote = None
    n_outgoing_bytes = 0
    wants_ping = False

    def __init__(self) -> None:
        self.has_outgoing = False
        self.deadline: float | None = None

    def request(self, message: m.Request, **_: object) -> int:
        self.has_outgoing = True
        self.deadline = 0.0
        return 0

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> bool:
        self.has_outgoing = True
        return True

    def take_outgoing(self) -> list[Any]:
        has_outgoing, self.has_outgoing = self.has_outgoing, False
        return [SimpleNamespace(exchange=0, is_reset=False, data=b"x", is_end=True)] if has_outgoing else []

    def next_deadline(self) -> float | None:
        return self.deadline

    def handle_timeout(self, now: float) -> list[Any]:
        self.deadline = None
        return []

    def close(self, error: SwarmError) -> list[Any]:
        self.deadline = None
        return []


def connect(driver: FakeDriver, gone: list[Connection], session: FakeSession | None = None) -> Connection:
    return Connection(
        cast(Any, driver),
        cast(s.Session, session or FakeSession()),
        make_session=lambda _: pytest.fail("it has one"),
        expected=None,
        path=Path(address=ADDRESS),
        send=lambda path, flight: None,
        send_copy=lambda path, data: None,
        on_request=lambda *_: None,
        on_cancel=lambda *_: None,
        on_open=lambda _: None,
        on_gone=gone.append,
        on_unsent=lambda *_: None,
        on_cid=lambda *_: None,
    )


async def outcome(answer: asyncio.Future[m.Response]) -> BaseException | None:
    await asyncio.wait([answer], timeout=1.0)
    assert answer.done(), "who waits must hear of it"
    return answer.exception()


@pytest.mark.parametrize("failing", ["handle_timer", "next_event", "flush", "send_stream_data"])
async def test_a_library_that_fails_as_time_passes_ends_what_waits(failing: str) -> None:
    """Each is called on the way of a request, or when its time is over."""
    asyncio.get_running_loop().set_exception_handler(lambda _, context: pytest.fail(str(context)))
    gone: list[Connection] = []
    driver = FakeDriver(failing)
    connection = connect(driver, gone)
    answer = connection.start(m.GetStatus(), timeout_s=0.0)
    assert isinstance(await outcome(answer), RemoteProtocolError)
    assert not connection.is_open
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert driver.is_closed or gone == [connection]


@pytest.mark.parametrize("failing", ["receive", "next_event"])
async def test_a_datagram_on_which_the_library_fails_ends_its_connection_only(failing: str) -> None:
    driver, gone = FakeDriver(), cast(list[Connection], [])
    connection, other = connect(driver, gone), connect(FakeDriver(), gone)
    answer = connection.start(m.GetStatus(), timeout_s=60.0)
    driver.failing = failing
    for each in (connection, other):
        each.receive((b"data",), 1.0)
    for each in (connection, other):
        each.received(1.0)
    assert isinstance(await outcome(answer), RemoteProtocolError)
    assert not connection.is_open
    assert other.is_open


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("203.0.113.9:4", "203.0.113.9:4"),
        ("[::ffff:203.0.113.9]:4", "203.0.113.9:4"),
        ("[::ffff:zz]:80", None),
        ("host.invalid:80", None),
        ("", None),
    ],
)
async def test_where_a_server_sees_us_is_kept_only_if_it_may_be_announced(said: str, kept: str | None) -> None:
    """It is offered to others and stands in records: what cannot be formatted or signed would end the task that does that."""
    connection = connect(FakeDriver(), [])
    connection._handle([e.Opened(remote=CLIENT.node_id, version=1, observed_address=said)])
    assert connection.observed_address == kept
    connection.close()


async def test_a_connection_that_cannot_even_be_closed_is_gone_at_once() -> None:
    gone: list[Connection] = []
    connection = connect(FakeDriver("close"), gone)
    answer = connection.start(m.GetStatus(), timeout_s=60.0)
    connection.close()
    assert isinstance(await outcome(answer), ConnectionLost)
    assert gone == [connection]
    await asyncio.wait_for(connection.wait_gone(), 1.0)


async def test_one_that_fails_while_it_closes_is_gone_too() -> None:
    gone: list[Connection] = []
    driver = FakeDriver()
    connection = connect(driver, gone)
    connection.close()
    assert gone == []
    driver.failing = "flush"
    connection.flush_soon()
    await asyncio.wait_for(connection.wait_gone(), 1.0)
    assert gone == [connection]


async def test_what_leaves_with_the_answer_to_what_has_come_is_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    connection = connect(driver, [])
    monkeypatch.setattr(connection, "_pump", lambda now: connection.respond(0, m.Done()))
    connection.received(1.0)
    assert driver.n_flushed == 1, "at once"
    await asyncio.sleep(0)
    assert driver.n_flushed == 1

    def answer_three(now: float) -> None:
        for exchange in range(3):
            connection.respond(exchange, m.Done())

    monkeypatch.setattr(connection, "_pump", answer_three)
    connection.received(2.0)
    assert driver.n_flushed == 2, "the first answer leaves at once"
    await asyncio.sleep(0)
    assert driver.n_flushed == 3, "the others together at the end of the tick"
    monkeypatch.setattr(connection, "_pump", lambda now: None)
    connection.received(3.0)
    await asyncio.sleep(0)
    assert driver.n_flushed == 4, "what is owed for what has come, where nothing is answered"
    connection.close()


async def test_a_short_deadline_is_kept_though_a_timer_fires_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "clock", lambda: 100.0)
    driver, session = FakeDriver(), FakeSession()
    driver.is_pressing = False
    connection = connect(driver, [], session)
    at: list[float] = []

    def request(message: m.Request, *, deadline: float, **_: object) -> int:
        at.append(deadline)
        return 0

    monkeypatch.setattr(session, "request", request)
    monkeypatch.setattr(session, "next_deadline", lambda: min(at))
    for timeout_s in (0.9 * connection_module.TIMER_SLACK_S, 60.0, 0.01):
        connection.start(m.GetStatus(), timeout_s=timeout_s)
        assert connection._timer_at == pytest.approx(min(at))
    assert at[-1] == min(at)
    connection.close()


async def test_what_fails_in_reading_does_not_skip_those_who_were_touched_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = Endpoint(CLIENT)
    connection = connect(FakeDriver(), [])
    received: list[float] = []
    monkeypatch.setattr(connection, "received", received.append)
    of_ours = b"\x40" + b"a" * 8, ADDRESS
    arriving = [of_ours, (b"\xc0 of a stranger", ADDRESS), of_ours, (b"\x01", ("192.0.2.9", 9)), (b"\x02", ADDRESS)]
    given: list[bytes] = []
    monkeypatch.setattr(connection, "receive", lambda flight, now: given.extend(flight))
    raw: list[bytes] = []

    def on_other(datagrams: Sequence[bytes], address: object) -> None:
        raw.extend(datagrams)
        raise RuntimeError("a mistake of ours")

    endpoint.on_other = on_other
    endpoint._flights = cast(Any, SimpleNamespace(receive=lambda: arriving))
    endpoint._by_cid[b"a" * 8] = connection

    def fail(*_: object, **_options: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("swarm.net.endpoint.pull_quic_header", fail)
    with pytest.raises(RuntimeError):
        endpoint._on_readable()
    assert len(received) == 1
    assert given == [of_ours[0]] * 2, "what came after it is in the socket no more"
    assert raw == [b"\x01", b"\x02"]
