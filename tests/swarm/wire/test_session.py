"""Two sessions in memory, or one against forged bytes: what each rule lets through, and how each violation ends."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
    VersionRefused,
)
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire import versions
from swarm.wire.byte_budget import ByteBudget
from swarm.wire.events import (
    Answered,
    Closed,
    Event,
    Opened,
    Outgoing,
    RequestCancelled,
    RequestFailed,
    RequestReceived,
)
from swarm.wire.frames import HEADER, LIMITS, FrameType, encode
from swarm.wire.greetings import State, hello_statement
from swarm.wire.session import GREETING_EXCHANGE, Session

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
OTHER = Identity.from_seed(b"other." + bytes(26))
NONCE = bytes(range(32))
MODEL = ModelId(bytes(32))
STATUS = m.Status(data=b"{}")
SERVED = (m.GetStatus, m.GetBlock, m.Lookup)


def new_server(
    *,
    nonce: bytes = NONCE,
    versions: tuple[int, ...] = (1,),
    identity: Identity = SERVER,
    request_budget: ByteBudget | None = None,
) -> Session:
    return Session(
        identity,
        is_client=False,
        now=0.0,
        nonce=nonce,
        observed_address="192.0.2.1:5",
        serves=SERVED,
        versions=versions,
        request_budget=request_budget,
    )


def new_client(*, expected: NodeId = SERVER.node_id, versions: tuple[int, ...] = (1,)) -> Session:
    return Session(CLIENT, is_client=True, now=0.0, expected=expected, serves=SERVED, versions=versions)


class Pair:
    """A client and a server whose bytes this moves: an exchange's in order, exchanges among each other as `rng` likes."""

    def __init__(self, *, rng: random.Random | None = None, max_piece: int | None = None, **versions: tuple[int, ...]):
        self.client = new_client(versions=versions.get("client", (1,)))
        self.server = new_server(versions=versions.get("server", (1,)))
        self.now = 0.0
        self._rng = rng
        self._max_piece = max_piece
        self._on_their_way: dict[tuple[Session, int], list[Outgoing]] = {}

    def other(self, session: Session) -> Session:
        return self.server if session is self.client else self.client

    def _collect(self) -> None:
        for sender in (self.client, self.server):
            for out in sender.take_outgoing():
                queue = self._on_their_way.setdefault((self.other(sender), out.exchange), [])
                queue.extend(self._pieces(out))

    def _pieces(self, out: Outgoing) -> Iterable[Outgoing]:
        if self._rng is None or self._max_piece is None or out.is_reset:
            yield out
            return
        data = out.data
        while data:
            n = self._rng.randint(1, self._max_piece)
            yield Outgoing(exchange=out.exchange, data=data[:n])
            data = data[n:]
        yield Outgoing(exchange=out.exchange, is_end=out.is_end)

    def run(self) -> tuple[list[Event], list[Event]]:
        """Deliver until nothing is left; return the client's events and the server's."""
        events: dict[Session, list[Event]] = {self.client: [], self.server: []}
        while True:
            self._collect()
            waiting = [key for key, queue in self._on_their_way.items() if queue]
            if not waiting:
                return events[self.client], events[self.server]
            receiver, exchange = self._rng.choice(waiting) if self._rng else waiting[0]
            out = self._on_their_way[receiver, exchange].pop(0)
            if out.is_reset:
                events[receiver] += receiver.receive_reset(exchange)
            else:
                events[receiver] += receiver.receive(exchange, out.data, out.is_end, now=self.now)

    def opened(self) -> Pair:
        self.run()
        assert self.client.state is self.server.state is State.OPEN
        return self

    def ask(self, asker: Session, message: m.Request = m.GetStatus(), *, deadline: float = 100.0) -> int:  # noqa: B008
        return asker.request(message, deadline=deadline, now=self.now)


def opened_pair() -> Pair:
    return Pair().opened()


def closed_by(events: list[Event]) -> SwarmError:
    """Return the error of the one Closed event, which is the last."""
    assert [type(event) for event in events].count(Closed) == 1
    assert isinstance(events[-1], Closed)
    return events[-1].error


def assert_violation(session: Session, events: list[Event], match: str = "") -> None:
    error = closed_by(events)
    assert isinstance(error, RemoteProtocolError)
    assert match in str(error)
    assert session.state is State.CLOSED
    assert session.n_waiting == 0
    assert session.next_deadline() is None


# Greetings


@pytest.mark.parametrize("seed", range(20))
def test_greetings_open_both_sides_however_the_bytes_are_cut(seed: int) -> None:
    pair = Pair(rng=random.Random(seed), max_piece=1 + seed)
    client_events, server_events = pair.run()
    assert client_events == [Opened(remote=SERVER.node_id, version=1, observed_address="192.0.2.1:5")]
    assert server_events == [Opened(remote=CLIENT.node_id, version=1, observed_address=None)]


def test_the_highest_common_version_is_used() -> None:
    client_events, server_events = Pair(client=(1, 2, 3), server=(2, 3, 9)).run()
    assert [event.version for event in client_events + server_events if isinstance(event, Opened)] == [3, 3]


@pytest.mark.parametrize(("client", "server"), [((1, 2), (2, 3)), ((2, 3), (1, 2)), ((2,), (1, 2))])
def test_programs_one_version_apart_speak_the_one_that_both_know(
    client: tuple[int, ...], server: tuple[int, ...]
) -> None:
    pair = Pair(client=client, server=server)
    for events in pair.run():
        assert [event.version for event in events if isinstance(event, Opened)] == [2]
    assert (pair.client.version, pair.server.version) == (2, 2)


@pytest.mark.parametrize(
    ("client", "server", "told_client", "told_server"),
    [
        (
            (1, 2),
            (3, 4),
            "this program is too old",
            r"got \[1, 2\], expected one of \[3, 4\].* that connects is too old",
        ),
        ((3, 4), (1, 2), "other side's program is too old", r"got \[3, 4\].* that was called is too old"),
    ],
)
def test_two_versions_apart_both_sides_are_told_who_is_too_old_and_how_to_upgrade(
    client: tuple[int, ...], server: tuple[int, ...], told_client: str, told_server: str
) -> None:
    for events, told in zip(Pair(client=client, server=server).run(), (told_client, told_server), strict=True):
        error = closed_by(events)
        assert isinstance(error, VersionRefused)
        assert re.search(told, str(error))
        assert "pip install --upgrade" in str(error)


def test_a_request_that_the_other_side_is_too_old_for_is_refused_here_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "SINCE", {m.GetStatus: 3})
    for agreed, is_sent in ((2, False), (3, True)):
        pair = Pair(client=(2, agreed), server=(2, 3))
        pair.run()
        if is_sent:
            pair.client.request(m.GetStatus(), deadline=9.0, now=0.0)
        else:
            with pytest.raises(RemoteRefused, match="speaks wire version 2") as caught:
                pair.client.request(m.GetStatus(), deadline=9.0, now=0.0)
            assert caught.value.remote_code == m.ErrorCode.NOT_ALLOWED
        assert bool(pair.client.take_outgoing()) is is_sent
        pair.client.request(m.Lookup(model_id=None), deadline=9.0, now=0.0)  # what was there before is not concerned


def test_a_client_refuses_a_version_that_it_did_not_offer() -> None:
    client = new_client()
    challenge = m.Challenge(nonce=NONCE, versions=(1,), observed_address="")
    assert client.receive(GREETING_EXCHANGE, encode(challenge), False, now=0.0) == []
    events = client.receive(GREETING_EXCHANGE, encode(m.Welcome(version=2)), True, now=0.0)
    assert isinstance(closed_by(events), VersionRefused)


def hello_from(session: Session) -> bytes:
    (out,) = session.take_outgoing()
    assert out.exchange == GREETING_EXCHANGE
    return out.data


def hello_for(server: Session, client: Session) -> bytes:
    (challenge,) = server.take_outgoing()
    client.receive(GREETING_EXCHANGE, challenge.data, False, now=0.0)
    return hello_from(client)


def test_a_hello_cannot_be_replayed_to_another_server() -> None:
    """A malicious server passes its own client's hello on, with the nonce that the other server gave."""
    victim = new_server(identity=OTHER)
    (challenge,) = victim.take_outgoing()
    client = new_client(expected=SERVER.node_id)  # means to talk to SERVER, which is the thief
    client.receive(GREETING_EXCHANGE, challenge.data, False, now=0.0)
    events = victim.receive(GREETING_EXCHANGE, hello_from(client), True, now=0.0)
    assert_violation(victim, events, "signature")


def test_a_hello_cannot_be_replayed_on_another_connection() -> None:
    hello = hello_for(new_server(), new_client())
    again = new_server(nonce=bytes(32))
    assert_violation(again, again.receive(GREETING_EXCHANGE, hello, True, now=0.0), "signature")


def test_a_hello_of_another_node_is_refused() -> None:
    statement = hello_statement(server=SERVER.node_id, nonce=NONCE, client=CLIENT.node_id, versions=(1,))
    forged = m.Hello(node_id=CLIENT.node_id, versions=(1,), signature=OTHER.sign(statement))
    server = new_server()
    assert_violation(server, server.receive(GREETING_EXCHANGE, encode(forged), True, now=0.0), CLIENT.node_id.short)


def test_a_hello_whose_versions_were_changed_is_refused() -> None:
    statement = hello_statement(server=SERVER.node_id, nonce=NONCE, client=CLIENT.node_id, versions=(1, 2))
    changed = m.Hello(node_id=CLIENT.node_id, versions=(1,), signature=CLIENT.sign(statement))
    server = new_server()
    assert_violation(server, server.receive(GREETING_EXCHANGE, encode(changed), True, now=0.0), "signature")


HELLO = m.Hello(node_id=CLIENT.node_id, versions=(1,), signature=bytes(64))
CHALLENGE = m.Challenge(nonce=NONCE, versions=(1,), observed_address="")


@pytest.mark.parametrize(
    "message", [CHALLENGE, m.Welcome(version=1), m.Refusal(code=2, detail=""), m.GetStatus(), STATUS]
)
def test_a_server_takes_nothing_but_a_hello_first(message: m.Message) -> None:
    server = new_server()
    assert_violation(server, server.receive(GREETING_EXCHANGE, encode(message), False, now=0.0), "wrong greeting")


@pytest.mark.parametrize("message", [HELLO, m.Welcome(version=1), m.Refusal(code=2, detail=""), m.GetStatus(), STATUS])
def test_a_client_takes_nothing_but_a_challenge_first(message: m.Message) -> None:
    client = new_client()
    assert_violation(client, client.receive(GREETING_EXCHANGE, encode(message), False, now=0.0), "wrong greeting")


@pytest.mark.parametrize("message", [HELLO, CHALLENGE, m.GetStatus(), STATUS])
def test_a_client_takes_nothing_but_welcome_or_refusal_second(message: m.Message) -> None:
    client = new_client()
    client.receive(GREETING_EXCHANGE, encode(CHALLENGE), False, now=0.0)
    assert_violation(client, client.receive(GREETING_EXCHANGE, encode(message), False, now=0.0), "wrong greeting")


def test_nobody_can_make_a_server_hold_a_large_frame_before_the_greetings() -> None:
    server = new_server()
    header = HEADER.pack(FrameType.BLOCK, LIMITS[FrameType.BLOCK])
    assert_violation(server, server.receive(GREETING_EXCHANGE, header, False, now=0.0), "wrong greeting")


def test_an_exchange_before_the_hello_is_refused() -> None:
    server = new_server()
    assert_violation(server, server.receive(0, encode(m.GetStatus()), True, now=0.0), "before the greetings")
    client = new_client()
    assert_violation(client, client.receive(3, encode(m.GetStatus()), True, now=0.0), "before the greetings")


def test_what_overtakes_the_welcome_is_kept_until_it_comes() -> None:
    pair = Pair()
    server, client = pair.server, pair.client
    server.receive(GREETING_EXCHANGE, hello_for(server, client), True, now=0.0)
    (welcome,) = server.take_outgoing()
    asked, given_up = pair.ask(server), pair.ask(server)
    server.cancel(given_up)
    for out in server.take_outgoing():
        if out.is_reset:
            assert client.receive_reset(out.exchange) == []
        else:
            assert client.receive(out.exchange, out.data, out.is_end, now=0.0) == []
    events = client.receive(GREETING_EXCHANGE, welcome.data, True, now=0.0)
    assert [type(event) for event in events] == [Opened, RequestReceived, RequestReceived, RequestCancelled]
    assert [event.exchange for event in events[1:] if not isinstance(event, Opened | Closed)] == [
        asked,
        given_up,
        given_up,
    ]


def test_what_overtakes_the_welcome_is_bounded() -> None:
    client = new_client()
    client.receive(GREETING_EXCHANGE, encode(CHALLENGE), False, now=0.0)
    assert client.receive(3, bytes(s.MAX_EARLY_BYTES - 64), False, now=0.0) == []
    assert_violation(client, client.receive(5, b"x", False, now=0.0), "before the greetings")


def test_an_empty_early_piece_counts_too() -> None:
    client = new_client()
    client.receive(GREETING_EXCHANGE, encode(CHALLENGE), False, now=0.0)
    for _ in range(s.MAX_EARLY_BYTES // 64):
        assert client.receive(3, b"", False, now=0.0) == []
    assert_violation(client, client.receive(3, b"", False, now=0.0), "before the greetings")


def test_bytes_on_the_greeting_exchange_after_it_are_a_violation() -> None:
    pair = Pair()
    server, client = pair.server, pair.client
    server.receive(GREETING_EXCHANGE, hello_for(server, client), False, now=0.0)
    assert server.state is State.OPEN
    assert_violation(server, server.receive(GREETING_EXCHANGE, b"\x02", False, now=0.0), "goes on after")


@pytest.mark.parametrize("n_bytes", [0, 3, 20])
def test_a_greeting_that_ends_early_is_a_violation(n_bytes: int) -> None:
    client = new_client()
    events = client.receive(GREETING_EXCHANGE, encode(CHALLENGE)[:n_bytes], True, now=0.0)
    assert_violation(client, events, "ended within a message")


def test_a_challenge_that_ends_the_greeting_is_a_violation() -> None:
    client = new_client()
    assert_violation(client, client.receive(GREETING_EXCHANGE, encode(CHALLENGE), True, now=0.0), "ended")


def test_a_reset_of_the_greeting_is_a_violation_until_it_is_done() -> None:
    server = new_server()
    assert_violation(server, server.receive_reset(GREETING_EXCHANGE), "reset")
    pair = opened_pair()
    assert pair.client.receive_reset(GREETING_EXCHANGE) == []
    assert pair.client.state is State.OPEN


@pytest.mark.parametrize("make", [new_client, new_server])
def test_the_greeting_has_a_deadline(make: type[Session]) -> None:
    session = make()
    assert session.next_deadline() == s.GREETING_DEADLINE_S
    assert session.handle_timeout(s.GREETING_DEADLINE_S - 0.001) == []
    assert isinstance(closed_by(session.handle_timeout(s.GREETING_DEADLINE_S)), DeadlineExceeded)
    assert session.state is State.CLOSED


def test_a_session_that_cannot_greet_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="nonce"):
        new_server(nonce=bytes(31))
    with pytest.raises(LocalProtocolError, match="identity"):
        Session(CLIENT, is_client=True, now=0.0)
    with pytest.raises(LocalProtocolError, match="GREETING"):
        new_client().request(m.GetStatus(), deadline=1.0, now=0.0)


# Requests and answers


@pytest.mark.parametrize("side", ["client", "server"])
def test_either_side_asks_and_is_answered(side: str) -> None:
    pair = opened_pair()
    asker: Session = getattr(pair, side)
    answerer = pair.other(asker)
    exchange = pair.ask(asker)
    received = pair.run()[asker is pair.client]
    assert received == [RequestReceived(exchange=exchange, request=m.GetStatus())]
    assert answerer.respond(exchange, STATUS)
    answered = pair.run()[asker is pair.server]
    assert answered == [Answered(exchange=exchange, response=STATUS)]
    assert asker.n_waiting == 0
    assert not answerer.respond(exchange, STATUS), "an exchange has one answer"


@pytest.mark.parametrize("seed", range(10))
def test_many_exchanges_in_both_directions_in_any_order_and_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng=rng, max_piece=[1, 3, 7, 50][seed % 4]).opened()
    wanted: dict[tuple[Session, int], bytes] = {}
    for _ in range(60):
        asker = rng.choice([pair.client, pair.server])
        number = rng.randrange(65536)
        exchange = pair.ask(asker, m.GetBlock(model_id=MODEL, layer=number, expert=1))
        wanted[asker, exchange] = number.to_bytes(2, "little") * rng.randrange(1, 40)
    for receiver, events in zip((pair.client, pair.server), pair.run(), strict=True):
        rng.shuffle(events)
        for event in events:
            assert isinstance(event, RequestReceived)
            assert isinstance(event.request, m.GetBlock)
            block = wanted[pair.other(receiver), event.exchange]
            assert block[:2] == event.request.layer.to_bytes(2, "little")
            assert receiver.respond(event.exchange, m.BlockBytes(data=block))
    for receiver, events in zip((pair.client, pair.server), pair.run(), strict=True):
        for event in events:
            assert isinstance(event, Answered)
            assert isinstance(event.response, m.BlockBytes)
            assert event.response.data == wanted.pop((receiver, event.exchange))
    assert not wanted
    for session in (pair.client, pair.server):
        assert session._n_held == {True: 0, False: 0}
        assert set(session._incoming) <= {GREETING_EXCHANGE}, "no trace of an exchange that is over"
        assert not session._skipped


def test_an_exchange_after_a_refusal_and_a_refusal_itself() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    pair.run()
    assert pair.server.respond(exchange, m.Refusal(code=m.ErrorCode.NOT_FOUND, detail="no such thing"))
    (failed,), _ = pair.run()
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, RemoteRefused)
    assert failed.error.remote_code == m.ErrorCode.NOT_FOUND
    assert "no such thing" in str(failed.error)
    assert pair.client.state is State.OPEN


def test_a_request_that_is_not_served_is_refused_and_leaves_no_trace() -> None:
    pair = opened_pair()
    for _ in range(3 * s.MAX_EXCHANGES):
        pair.ask(pair.client, m.GetManifest(model_id=MODEL))
        (failed,), served = pair.run()
        assert served == []
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, RemoteRefused)
        assert failed.error.remote_code == m.ErrorCode.NOT_ALLOWED
        assert "GET_MANIFEST" in str(failed.error)
    assert set(pair.server._incoming) <= {GREETING_EXCHANGE}


def test_a_request_that_is_not_served_is_refused_by_its_header_and_its_body_dropped() -> None:
    server = opened_pair().server
    header = HEADER.pack(FrameType.DISPATCH, LIMITS[FrameType.DISPATCH])
    assert server.receive(0, header, False, now=0.0) == []
    (out,) = server.take_outgoing()
    assert (out.exchange, out.is_end) == (0, True)
    assert server.receive(0, bytes(100_000), False, now=0.0) == []
    assert server._n_held == {True: 0, False: 0}
    assert not server._incoming[0].buffer


def test_an_answer_of_the_wrong_type_is_our_own_mistake_and_can_be_mended() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    pair.run()
    with pytest.raises(LocalProtocolError, match="expected Status"):
        pair.server.respond(exchange, m.BlockBytes(data=b""))
    with pytest.raises(LocalProtocolError, match="too large"):
        pair.server.respond(exchange, m.Status(data=bytes(LIMITS[FrameType.STATUS] + 1)))
    assert pair.server.respond(exchange, STATUS)


def test_a_request_too_large_is_our_own_mistake_and_uses_no_exchange() -> None:
    pair = opened_pair()
    with pytest.raises(LocalProtocolError):
        pair.client.request(m.Announce(record=bytes(LIMITS[FrameType.ANNOUNCE] + 1)), deadline=1.0, now=0.0)
    assert pair.client.n_waiting == 0
    assert pair.ask(pair.client) == 0


def test_our_own_requests_are_bounded() -> None:
    pair = opened_pair()
    for _ in range(s.MAX_EXCHANGES):
        pair.ask(pair.client)
    with pytest.raises(Overloaded):
        pair.ask(pair.client)
    pair.run()
    assert pair.server.state is State.OPEN, "as many as the asker may have, the answerer takes"


# Giving up


def test_a_cancelled_request_is_told_and_its_late_answer_dropped() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    pair.run()
    pair.client.cancel(exchange)
    late = encode(STATUS)
    _, cancelled = pair.run()
    assert cancelled == [RequestCancelled(exchange=exchange)]
    assert not pair.server.respond(exchange, STATUS), "nobody waits"
    assert pair.client.receive(exchange, late[:3], False, now=0.0) == []
    assert pair.client.receive(exchange, late[3:], True, now=0.0) == []
    assert pair.client.state is State.OPEN
    pair.client.cancel(exchange)
    assert pair.client.take_outgoing() == [], "a second cancellation says nothing"


def test_a_request_that_was_cancelled_before_it_came_is_not_served() -> None:
    """A link may tell of the cancellation first (QUIC's STOP_SENDING) and bring the request's bytes later."""
    server = opened_pair().server
    assert server.receive_reset(0) == []
    assert server.receive(0, encode(m.GetStatus()), True, now=0.0) == []
    assert server.state is State.OPEN


def test_a_reset_by_the_answerer_fails_the_request_once() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    (failed,) = pair.client.receive_reset(exchange)
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, ConnectionLost)
    assert pair.client.receive_reset(exchange) == []


def test_a_reset_within_a_request_frees_what_was_held() -> None:
    server = opened_pair().server
    server.receive(0, encode(m.GetBlock(model_id=MODEL, layer=1, expert=1))[:20], False, now=0.0)
    assert server._n_held[False] == 36
    assert server.receive_reset(0) == []
    assert server._n_held[False] == 0
    assert set(server._incoming) <= {GREETING_EXCHANGE}


def test_a_request_fails_at_its_deadline_and_the_link_lives() -> None:
    pair = opened_pair()
    late, in_time = pair.ask(pair.client, deadline=0.2), pair.ask(pair.client, deadline=0.4)
    pair.run()
    assert pair.client.next_deadline() == 0.2
    assert pair.client.handle_timeout(0.19) == []
    (failed,) = pair.client.handle_timeout(0.2)
    assert isinstance(failed, RequestFailed)
    assert failed.exchange == late
    assert isinstance(failed.error, DeadlineExceeded)
    assert pair.run()[1] == [RequestCancelled(exchange=late)]
    assert pair.server.respond(in_time, STATUS)
    assert pair.run()[0] == [Answered(exchange=in_time, response=STATUS)]


# Silence


def test_silence_while_an_answer_is_owed_loses_the_connection() -> None:
    pair = opened_pair()
    first, second = pair.ask(pair.client), pair.ask(pair.client)
    assert pair.client.handle_timeout(s.LOST_AFTER_S - 0.001) == []
    events = pair.client.handle_timeout(s.LOST_AFTER_S)
    assert isinstance(closed_by(events), ConnectionLost)
    failed = [event.exchange for event in events if isinstance(event, RequestFailed)]
    assert failed == [first, second]


def test_a_ping_answer_keeps_a_slow_request_alive() -> None:
    pair = opened_pair()
    pair.ask(pair.client, deadline=100.0)
    now, n_pings = 0.0, 0
    while now < 20.0:
        deadline = pair.client.next_deadline()
        assert deadline is not None
        assert now < deadline <= now + s.PING_AFTER_S + 1e-9
        now = deadline
        assert pair.client.handle_timeout(now) == []
        if pair.client.wants_ping:
            pair.client.wants_ping = False
            n_pings += 1
            now += 0.1
            pair.client.heard(now)
    assert n_pings == pytest.approx(20 / (s.PING_AFTER_S + 0.1), abs=2)


def test_unanswered_pings_go_on_but_do_not_put_off_the_end() -> None:
    pair = opened_pair()
    pair.ask(pair.client)
    now, n_pings = 0.0, 0
    while pair.client.state is State.OPEN:
        deadline = pair.client.next_deadline()
        assert deadline is not None
        assert deadline > now
        now = deadline
        pair.client.handle_timeout(now)
        n_pings += pair.client.wants_ping
        pair.client.wants_ping = False
    assert now == s.LOST_AFTER_S
    assert n_pings == round(s.LOST_AFTER_S / s.PING_AFTER_S) - 1


def test_a_quiet_client_pings_and_gives_up_a_server_that_does_not_answer() -> None:
    client = opened_pair().client
    assert client.next_deadline() == s.KEEPALIVE_S
    assert client.handle_timeout(s.KEEPALIVE_S) == []
    assert client.wants_ping
    deadline = client.next_deadline()
    assert deadline == s.KEEPALIVE_S + s.LOST_AFTER_S
    assert isinstance(closed_by(client.handle_timeout(deadline)), ConnectionLost)


def test_a_quiet_server_waits_for_its_client() -> None:
    server = opened_pair().server
    assert server.next_deadline() is None
    assert server.handle_timeout(1e6) == []
    assert not server.wants_ping


def test_a_request_after_a_long_quiet_time_has_the_whole_silence_before_it() -> None:
    pair = opened_pair()
    pair.now = s.KEEPALIVE_S + 1.0
    pair.ask(pair.client)
    assert pair.client.handle_timeout(pair.now + s.LOST_AFTER_S - 0.001) == []
    assert pair.client.state is State.OPEN


# Violations: each closes the session, and what waited fails exactly once


def test_an_answer_of_another_type_closes() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    header = HEADER.pack(FrameType.BLOCK, LIMITS[FrameType.BLOCK])
    events = pair.client.receive(exchange, header, False, now=0.0)
    assert_violation(pair.client, events, "wrong answer")
    assert [event.exchange for event in events if isinstance(event, RequestFailed)] == [exchange]


def test_bytes_after_an_answer_close_but_the_answer_counts() -> None:
    pair = opened_pair()
    exchange, other = pair.ask(pair.client), pair.ask(pair.client)
    events = pair.client.receive(exchange, encode(STATUS) + b"\0", False, now=0.0)
    assert events[0] == Answered(exchange=exchange, response=STATUS)
    assert_violation(pair.client, events, "goes on after")
    assert [event.exchange for event in events if isinstance(event, RequestFailed)] == [other]


def test_bytes_after_an_answer_close_in_a_piece_of_their_own_too() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    pair.client.receive(exchange, encode(STATUS), False, now=0.0)
    assert_violation(pair.client, pair.client.receive(exchange, b"\0", False, now=0.0), "goes on after")


def test_bytes_after_a_request_close_and_cancel_it() -> None:
    server = opened_pair().server
    events = server.receive(0, encode(m.GetStatus()) * 2, True, now=0.0)
    assert events[:2] == [RequestReceived(exchange=0, request=m.GetStatus()), RequestCancelled(exchange=0)]
    assert_violation(server, events, "goes on after")


@pytest.mark.parametrize("n_bytes", [0, 1, 4, 5, 40])
def test_a_request_that_ends_early_closes(n_bytes: int) -> None:
    server = opened_pair().server
    data = encode(m.GetBlock(model_id=MODEL, layer=1, expert=1))
    assert_violation(server, server.receive(0, data[:n_bytes], True, now=0.0), "ended within a message")


@pytest.mark.parametrize("n_bytes", [0, 3, 6])
def test_an_answer_that_ends_early_closes(n_bytes: int) -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    events = pair.client.receive(exchange, encode(STATUS)[:n_bytes], True, now=0.0)
    assert_violation(pair.client, events, "ended within a message")
    assert [event.exchange for event in events if isinstance(event, RequestFailed)] == [exchange]


def test_an_end_that_comes_after_the_answer_left_is_nothing() -> None:
    pair = opened_pair()
    assert len(pair.server.receive(0, encode(m.GetStatus()), False, now=0.0)) == 1
    assert pair.server.respond(0, STATUS)
    assert pair.server.receive(0, b"", True, now=0.0) == []
    assert pair.server.state is State.OPEN


def test_an_exchange_number_is_served_once() -> None:
    server = opened_pair().server
    assert len(server.receive(0, encode(m.GetStatus()), True, now=0.0)) == 1
    assert server.respond(0, STATUS)
    assert server.receive(0, encode(m.GetStatus()), True, now=0.0) == []
    assert server.state is State.OPEN


@pytest.mark.parametrize("code", [0x00, 0x06, 0x7F])
def test_an_unknown_frame_type_below_0x80_closes(code: int) -> None:
    server = opened_pair().server
    assert_violation(server, server.receive(0, HEADER.pack(code, 0), False, now=0.0), "unknown frame type")


@pytest.mark.parametrize("code", [0x80, 0xFF])
def test_an_unknown_frame_type_from_0x80_is_passed_over(code: int) -> None:
    server = opened_pair().server
    ignorable = HEADER.pack(code, 3) + b"abc" + HEADER.pack(code, 0)
    data = ignorable + encode(m.GetStatus())
    events: list[Event] = []
    for at in range(len(data)):
        events += server.receive(0, data[at : at + 1], False, now=0.0)
    assert events == [RequestReceived(exchange=0, request=m.GetStatus())]
    large = HEADER.pack(code, 2**32 - 1)
    assert server.receive(2, large + bytes(1000), False, now=0.0) == []
    assert not server._incoming[2].buffer
    assert_violation(server, server.receive(2, b"", True, now=0.0), "ended within a message")


@pytest.mark.parametrize("message", [STATUS, HELLO, m.Refusal(code=1, detail="")])
def test_what_is_no_request_cannot_open_an_exchange(message: m.Message) -> None:
    server = opened_pair().server
    assert_violation(server, server.receive(0, encode(message), True, now=0.0), "not a request")


def test_an_answer_to_what_was_never_asked_closes() -> None:
    pair = opened_pair()
    asked = pair.ask(pair.client)
    events = pair.client.receive(asked + 2, encode(STATUS), True, now=0.0)
    assert_violation(pair.client, events, "has not opened")
    server = opened_pair().server
    assert_violation(server, server.receive_reset(3), "has not opened")


def test_a_number_far_ahead_closes_before_memory_is_taken() -> None:
    server = opened_pair().server
    assert_violation(server, server.receive(2 * s.MAX_SKIPPED + 2, b"\x40", False, now=0.0), "too far ahead")
    server = opened_pair().server
    assert server.receive(2 * s.MAX_SKIPPED, b"\x40", False, now=0.0) == []
    assert_violation(server, server.receive_reset(2**60), "too far ahead")


def test_skipped_numbers_add_up() -> None:
    server = opened_pair().server
    for n in range(s.MAX_SKIPPED):
        assert server.receive_reset(4 * n + 2) == []  # each passes over one number more
    assert server.receive_reset(0) == []  # one of them comes after all
    assert server.receive_reset(4 * s.MAX_SKIPPED + 2) == []
    assert_violation(server, server.receive_reset(4 * s.MAX_SKIPPED + 6), "too far ahead")


def test_too_many_exchanges_at_once_close() -> None:
    server = opened_pair().server
    for n in range(2 * s.MAX_EXCHANGES):
        assert len(server.receive(2 * n, encode(m.GetStatus()), True, now=0.0)) == 1
    events = server.receive(4 * s.MAX_EXCHANGES, b"\x40", False, now=0.0)
    assert_violation(server, events, "too many exchanges")
    cancelled = [event.exchange for event in events if isinstance(event, RequestCancelled)]
    assert cancelled == [2 * n for n in range(2 * s.MAX_EXCHANGES)]


def test_partial_requests_count_as_exchanges_too() -> None:
    server = opened_pair().server
    for n in range(2 * s.MAX_EXCHANGES):
        assert server.receive(2 * n, b"\x40", False, now=0.0) == []
    assert_violation(server, server.receive(4 * s.MAX_EXCHANGES, b"\x40", False, now=0.0), "too many exchanges")


@pytest.mark.parametrize("frame_type", [FrameType.GET_STATUS, FrameType.GET_BLOCK, FrameType.LOOKUP])
def test_a_header_with_a_length_above_the_limit_closes(frame_type: FrameType) -> None:
    server = opened_pair().server
    header = HEADER.pack(frame_type, LIMITS[frame_type] + 1)
    assert server.receive(0, header[:4], False, now=0.0) == []
    assert_violation(server, server.receive(0, header[4:], False, now=0.0), "too large")


def test_an_answer_with_a_length_above_the_limit_closes_on_its_header() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    header = HEADER.pack(FrameType.STATUS, LIMITS[FrameType.STATUS] + 1)
    assert_violation(pair.client, pair.client.receive(exchange, header, False, now=0.0), "too large")


def test_requests_beyond_the_bytes_that_are_held_are_told_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "MAX_REQUEST_BYTES", 80)  # two of 36 bytes
    pair = opened_pair()
    exchanges = [pair.ask(pair.client, m.GetBlock(model_id=MODEL, layer=n, expert=1)) for n in range(3)]
    (failed,), received = pair.run()
    assert [event.exchange for event in received if isinstance(event, RequestReceived)] == exchanges[:2]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, RemoteRefused)
    assert failed.error.remote_code == m.ErrorCode.BUSY
    assert pair.server.respond(exchanges[0], m.BlockBytes(data=b"x"))  # frees its bytes
    again = pair.ask(pair.client, m.GetBlock(model_id=MODEL, layer=9, expert=1))
    received = pair.run()[1]
    assert [event.exchange for event in received if isinstance(event, RequestReceived)] == [again]


def sharing(limit_bytes: int, n: int) -> tuple[ByteBudget, list[Pair]]:
    """Return open pairs whose servers share one budget."""
    budget = ByteBudget(limit_bytes)
    pairs = [Pair() for _ in range(n)]
    for pair in pairs:
        pair.server = new_server(request_budget=budget)
        pair.opened()
    return budget, pairs


BLOCK_REQUEST = encode(m.GetBlock(model_id=MODEL, layer=1, expert=1))  # 5 bytes of header, 36 of body


def busy_on(session: Session, exchange: int) -> bool:
    """Return whether the session's next bytes are a BUSY on `exchange`, and nothing else."""
    (out,) = session.take_outgoing()
    return out.exchange == exchange and out.is_end and out.data[HEADER.size] == m.ErrorCode.BUSY


def test_sessions_share_what_is_held_of_requests_and_give_it_back() -> None:
    budget, (one, two, three) = sharing(80, 3)
    for pair in (one, two):
        assert pair.server.receive(0, BLOCK_REQUEST, True, now=0.0) != []
    assert budget.n_bytes == 72
    assert three.server.receive(0, BLOCK_REQUEST, True, now=0.0) == []
    assert busy_on(three.server, 0)
    assert one.server.respond(0, m.BlockBytes(data=b"x"))
    assert three.server.receive(2, BLOCK_REQUEST, True, now=0.0) != []
    two.server.close(ConnectionLost("gone"))
    three.server.receive_reset(2)
    assert budget.n_bytes == 0


def test_an_announced_size_takes_nothing_of_what_is_shared() -> None:
    """Else whoever sends headers alone would keep all others out."""
    budget, (one, two) = sharing(80, 2)
    for exchange in (0, 2, 4):
        one.server.receive(exchange, BLOCK_REQUEST[:6], False, now=0.0)
    assert budget.n_bytes == 3
    assert two.server.receive(0, BLOCK_REQUEST, True, now=0.0) != []


def test_a_request_that_outgrows_what_is_shared_is_told_busy_and_its_rest_passed_over() -> None:
    budget, (one, two) = sharing(52, 2)
    one.server.receive(0, BLOCK_REQUEST[:20], False, now=0.0)
    assert two.server.receive(0, BLOCK_REQUEST[:39], False, now=0.0) == []
    assert one.server.receive(0, BLOCK_REQUEST[20:24], False, now=0.0) == []
    assert busy_on(one.server, 0)
    assert budget.n_bytes == 34
    assert one.server._n_held[False] == 0
    assert one.server.receive(0, BLOCK_REQUEST[24:], True, now=0.0) == []
    assert set(one.server._incoming) <= {GREETING_EXCHANGE}
    assert two.server.receive(0, BLOCK_REQUEST[39:], True, now=0.0) != []
    assert two.server.respond(0, m.BlockBytes(data=b""))
    assert one.server.receive(2, BLOCK_REQUEST, True, now=0.0) != [], "the link lives"


def test_a_request_that_does_not_arrive_in_time_is_told_busy_and_given_up() -> None:
    budget, (pair,) = sharing(1000, 1)
    server = pair.server
    server.receive(0, BLOCK_REQUEST[:20], False, now=1.0)
    server.receive(2, BLOCK_REQUEST[:20], False, now=2.0)
    server.receive(0, BLOCK_REQUEST[20:21], False, now=50.0)
    assert server.next_deadline() == 1.0 + s.ARRIVAL_DEADLINE_S
    assert server.handle_timeout(1.0 + s.ARRIVAL_DEADLINE_S) == []
    assert busy_on(server, 0)
    assert budget.n_bytes == 15
    assert server.next_deadline() == 2.0 + s.ARRIVAL_DEADLINE_S
    assert server.receive(2, BLOCK_REQUEST[20:], True, now=61.5) != []
    assert server.next_deadline() is None
    assert server.handle_timeout(100.0) == []
    assert server.take_outgoing() == []


@pytest.mark.parametrize("limit", [0, 600])
def test_an_answer_larger_than_its_asker_allows_closes_on_its_header(limit: int) -> None:
    pair = opened_pair()
    request = m.GetBlock(model_id=MODEL, layer=1, expert=1)
    exchange = pair.client.request(request, deadline=100.0, now=0.0, max_answer_bytes=limit)
    events = pair.client.receive(exchange, HEADER.pack(FrameType.BLOCK, limit + 1), False, now=0.0)
    assert_violation(pair.client, events, f"got {limit + 1}, expected at most {limit}")
    assert [event.exchange for event in events if isinstance(event, RequestFailed)] == [exchange]


def test_an_answer_as_large_as_allowed_and_any_refusal_are_taken() -> None:
    pair = opened_pair()
    request = m.GetBlock(model_id=MODEL, layer=1, expert=1)
    first, second = (pair.client.request(request, deadline=100.0, now=0.0, max_answer_bytes=3) for _ in range(2))
    pair.run()
    pair.server.respond(first, m.BlockBytes(data=b"abc"))
    pair.server.respond(second, m.Refusal(code=m.ErrorCode.NOT_FOUND, detail="no such block here"))
    answered, failed = pair.run()[0]
    assert answered == Answered(exchange=first, response=m.BlockBytes(data=b"abc"))
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, RemoteRefused)


def test_answers_beyond_the_bytes_that_may_arrive_at_once_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "MAX_ANSWER_BYTES", 1000)
    pair = opened_pair()
    first, second = (pair.ask(pair.client, m.GetBlock(model_id=MODEL, layer=n, expert=1)) for n in range(2))
    assert pair.client.receive(first, HEADER.pack(FrameType.BLOCK, 600), False, now=0.0) == []
    assert pair.client.receive(first, bytes(600), True, now=0.0) != []
    third = pair.ask(pair.client, m.GetBlock(model_id=MODEL, layer=3, expert=1))
    assert pair.client.receive(second, HEADER.pack(FrameType.BLOCK, 600), False, now=0.0) == []
    events = pair.client.receive(third, HEADER.pack(FrameType.BLOCK, 600), False, now=0.0)
    assert_violation(pair.client, events, "too many bytes")
    assert [event.exchange for event in events if isinstance(event, RequestFailed)] == [second, third]


def test_a_closed_session_says_and_takes_nothing_more() -> None:
    pair = opened_pair()
    exchange = pair.ask(pair.client)
    first = pair.client.close(ConnectionLost("over"))
    assert [type(event) for event in first] == [RequestFailed, Closed]
    assert pair.client.close(ConnectionLost("again")) == []
    assert pair.client.receive(exchange, encode(STATUS), True, now=0.0) == []
    assert pair.client.receive_reset(exchange) == []
    assert pair.client.handle_timeout(1e9) == []
    assert not pair.client.respond(0, STATUS)
    with pytest.raises(LocalProtocolError, match="CLOSED"):
        pair.ask(pair.client)


# Anything at all

FRAGMENTS = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            encode(each)
            for each in (STATUS, HELLO, CHALLENGE, m.GetStatus(), m.Lookup(model_id=None), m.Welcome(version=1))
        ]
    ),
    st.builds(HEADER.pack, st.integers(0, 255), st.integers(0, 80)),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 12) | st.integers(0, 2**62), FRAGMENTS, st.sampled_from(["more", "end", "reset"])),
    max_size=30,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(is_client=st.booleans(), n_asked=st.integers(0, 4), is_open=st.booleans(), steps=STEPS)
def test_no_bytes_raise_and_what_waits_ends_exactly_once(
    is_client: bool, n_asked: int, is_open: bool, steps: list[tuple[int, bytes, str]]
) -> None:
    pair = Pair()
    if is_open:
        pair.opened()
    session = pair.client if is_client else pair.server
    asked = [pair.ask(session) for _ in range(n_asked)] if is_open else []
    events: list[Event] = []
    for exchange, data, how in steps:
        events += (
            session.receive_reset(exchange)
            if how == "reset"
            else session.receive(exchange, data, how == "end", now=0.0)
        )
    is_closed = session.state is State.CLOSED
    if is_closed:
        assert isinstance(closed_by(events), RemoteProtocolError)
    else:
        events += session.close(ConnectionLost("the end of the test"))
    assert session._n_held == {True: 0, False: 0}
    assert session._request_budget.n_bytes == 0
    ended = [event.exchange for event in events if isinstance(event, Answered | RequestFailed)]
    assert sorted(ended) == asked
    received = [event.exchange for event in events if isinstance(event, RequestReceived)]
    cancelled = [event.exchange for event in events if isinstance(event, RequestCancelled)]
    assert sorted(received) == sorted(cancelled)
    assert len(set(received)) == len(received)
