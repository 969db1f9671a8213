"""The greetings by themselves: who proves what, in which order; what else may come is refused. On a link: test_session."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from swarm.errors import LocalProtocolError, RemoteProtocolError, VersionRefused
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.wire import messages as m
from swarm.wire.frames import FrameType
from swarm.wire.greetings import NONCE_BYTES, Greeter, State, hello_statement

SERVER = Identity.from_seed(b"server" + bytes(26))
CLIENT = Identity.from_seed(b"client" + bytes(26))
NONCE = bytes(range(NONCE_BYTES))
VERSIONS = (1, 3)


def server(*, versions: tuple[int, ...] = VERSIONS, nonce: bytes = NONCE) -> Greeter:
    return Greeter(SERVER, is_client=False, versions=versions, remote=None, nonce=nonce, observed_address="192.0.2.1:5")


def client(*, versions: tuple[int, ...] = VERSIONS, remote: NodeId | None = SERVER.node_id) -> Greeter:
    return Greeter(CLIENT, is_client=True, versions=versions, remote=remote, nonce=b"", observed_address="")


def hello_to(challenge: m.Challenge, asker: Greeter) -> m.Hello:
    step = asker.take(State.GREETING, challenge)
    assert step.state is State.WELCOMING
    assert isinstance(step.reply, m.Hello)
    return step.reply


def test_both_sides_open_and_each_knows_the_other() -> None:
    host, guest = server(), client(versions=(1, 2, 3))
    welcomed = host.take(State.GREETING, hello_to(host.challenge(), guest))
    assert (welcomed.state, welcomed.version, host.remote) == (State.OPEN, 3, CLIENT.node_id)
    assert welcomed.reply == m.Welcome(version=3)
    opened = guest.take(State.WELCOMING, welcomed.reply)
    assert (opened.state, opened.version, opened.reply) == (State.OPEN, 3, None)
    assert (guest.remote, guest.observed_address) == (SERVER.node_id, "192.0.2.1:5")


def test_a_hello_proves_its_node_to_this_server_and_nonce_alone() -> None:
    hello = hello_to(server().challenge(), client())
    statement = hello_statement(server=SERVER.node_id, nonce=NONCE, client=CLIENT.node_id, versions=VERSIONS)
    assert hello.signature == CLIENT.sign(statement)
    other = Greeter(CLIENT, is_client=False, versions=VERSIONS, remote=None, nonce=NONCE, observed_address="")
    for replayed_to in (server(nonce=bytes(NONCE_BYTES)), other):
        with pytest.raises(RemoteProtocolError, match="signature"):
            replayed_to.take(State.GREETING, hello)
        assert replayed_to.remote is None
    for forged in (
        dataclasses.replace(hello, node_id=SERVER.node_id),
        dataclasses.replace(hello, versions=(1,)),
        dataclasses.replace(hello, signature=bytes(64)),
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            server().take(State.GREETING, forged)


def test_without_a_common_version_the_server_says_why_before_it_closes() -> None:
    host, guest = server(versions=(2,)), client()
    step = host.take(State.GREETING, hello_to(host.challenge(), guest))
    assert step.state is State.CLOSED
    assert isinstance(step.error, VersionRefused)
    assert isinstance(step.reply, m.Refusal)
    assert host.remote is None
    assert "got [1, 3], expected one of [2]" in step.reply.detail
    with pytest.raises(VersionRefused, match=r"the other side's program is too old: .* version 2, this one 1, 3"):
        guest.take(State.WELCOMING, step.reply)


def test_where_a_server_does_not_tell_its_versions_its_own_words_are_passed_on() -> None:
    refusal = m.Refusal(code=m.ErrorCode.VERSION, detail="because")
    for told in ((), VERSIONS):  # none, or such that it need not have refused
        guest = client()
        hello_to(m.Challenge(nonce=NONCE, versions=told, observed_address=""), guest)
        with pytest.raises(VersionRefused, match="refused the greeting: because"):
            guest.take(State.WELCOMING, refusal)


def test_a_hello_without_versions_is_a_violation() -> None:
    host = server()
    with pytest.raises(RemoteProtocolError, match="without a wire version"):
        host.take(State.GREETING, hello_to(host.challenge(), client(versions=())))


def test_a_version_that_was_not_offered_is_refused() -> None:
    with pytest.raises(VersionRefused, match="got 2"):
        client().take(State.WELCOMING, m.Welcome(version=2))


GREETINGS: dict[FrameType, m.Message] = {
    FrameType.CHALLENGE: server().challenge(),
    FrameType.HELLO: hello_to(server().challenge(), client()),
    FrameType.WELCOME: m.Welcome(version=1),
    FrameType.REFUSAL: m.Refusal(code=m.ErrorCode.BUSY, detail="no"),
    FrameType.GET_STATUS: m.GetStatus(),
}
ALLOWED = {
    (False, State.GREETING, FrameType.HELLO),
    (True, State.GREETING, FrameType.CHALLENGE),
    (True, State.WELCOMING, FrameType.WELCOME),
    (True, State.WELCOMING, FrameType.REFUSAL),
}


@pytest.mark.parametrize(("is_client", "state", "kind"), list(itertools.product((False, True), State, GREETINGS)))
def test_each_state_takes_its_own_greeting_and_no_other(is_client: bool, state: State, kind: FrameType) -> None:
    greeter = client() if is_client else server()
    if (is_client, state, kind) in ALLOWED:
        greeter.expect(state, kind)
        return
    with pytest.raises(RemoteProtocolError, match="wrong greeting"):
        greeter.expect(state, kind)
    with pytest.raises(RemoteProtocolError, match="wrong greeting"):
        greeter.take(state, GREETINGS[kind])


def test_a_refused_greeting_is_told_with_its_reason() -> None:
    with pytest.raises(RemoteProtocolError, match="too busy"):
        client().take(State.WELCOMING, m.Refusal(code=m.ErrorCode.BUSY, detail="too busy"))


def test_a_side_without_what_it_needs_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="got 3 bytes, expected 32"):
        server(nonce=b"abc")
    with pytest.raises(LocalProtocolError, match="identity"):
        client(remote=None)
