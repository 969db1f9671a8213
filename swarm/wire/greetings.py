"""The greetings of a link: which node is at the other end, proved, and the wire version to speak. Pure; `session` carries them.

    server                         client
      CHALLENGE nonce, versions  ->
                                 <-  HELLO node id, versions, signature
      WELCOME version            ->

The server is proved before, by the link itself (its certificate). The client signs a statement that names this server and its
fresh nonce, so that a signature can be replayed neither to another server nor on another connection. Knows nothing of exchanges,
deadlines or bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, auto

from swarm.errors import LocalProtocolError, RemoteProtocolError, VersionRefused
from swarm.identity import Identity, is_valid_signature
from swarm.ids import NodeId
from swarm.wire import messages as m
from swarm.wire.frames import FrameType
from swarm.wire.versions import choose_version, disagreement, own_disagreement

NONCE_BYTES = 32


class State(Enum):
    """Where a session stands."""

    GREETING = auto()
    WELCOMING = auto()
    OPEN = auto()
    CLOSED = auto()


# What may come in, by (is client, state): judged by the header, since nobody is proved yet.
_EXPECTED: dict[tuple[bool, State], tuple[FrameType, ...]] = {
    (False, State.GREETING): (FrameType.HELLO,),
    (True, State.GREETING): (FrameType.CHALLENGE,),
    (True, State.WELCOMING): (FrameType.WELCOME, FrameType.REFUSAL),
}


def hello_statement(*, server: NodeId, nonce: bytes, client: NodeId, versions: tuple[int, ...]) -> bytes:
    """Return what a client signs: bound to this server and this connection's nonce, so it cannot be replayed elsewhere."""
    return (
        b"swarm hello 1\0"
        + server.raw
        + nonce
        + client.raw
        + struct.pack(f"<B{len(versions)}H", len(versions), *versions)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a greeting leads to.

    Attributes:
        state: the next one; CLOSED: `error` says why, and `reply` still tells the other side.
        version: agreed upon, once OPEN.
    """

    state: State
    reply: m.Greeting | m.Refusal | None = None
    version: int | None = None
    error: VersionRefused | None = None


class Greeter:
    """One side's part in the greetings.

    Attributes:
        remote: who is there, once that is proved.
        observed_address: as a server, where the client is seen; as a client, where the server says it sees us.
        nonce: the server's, once it is known; secret to both sides where the link encrypts, so keys can be made of it.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        is_client: bool,
        versions: tuple[int, ...],
        remote: NodeId | None,
        nonce: bytes,
        observed_address: str,
    ) -> None:
        """`remote`: as a client, the server, already proved. `nonce`: as a server, 32 fresh random bytes."""
        if not is_client and len(nonce) != NONCE_BYTES:
            raise LocalProtocolError(
                f"a server's nonce has a wrong length: got {len(nonce)} bytes, expected {NONCE_BYTES}"
            )
        if is_client and remote is None:
            raise LocalProtocolError("a client must know the server's proved identity before the greetings")
        self.remote = remote
        self.observed_address: str | None = observed_address
        self._identity = identity
        self._is_client = is_client
        self._versions = versions
        self._their_versions: tuple[int, ...] = ()  # as a client, once it is known
        self.nonce = nonce

    def challenge(self) -> m.Challenge:
        """Return a server's first message."""
        assert self.observed_address is not None
        return m.Challenge(nonce=self.nonce, versions=self._versions, observed_address=self.observed_address)

    def expect(self, state: State, frame_type: FrameType) -> None:
        """Raise RemoteProtocolError unless this may come in now."""
        if frame_type not in _EXPECTED.get((self._is_client, state), ()):
            raise RemoteProtocolError(f"wrong greeting: got {frame_type.name} in state {state.name}")

    def take(self, state: State, message: m.Message) -> Step:
        """Return what a greeting leads to in this state.

        Raises:
            RemoteProtocolError: it is the wrong one, or its signature is.
            VersionRefused: as a client, no version is common.
        """
        if self._is_client and state is State.GREETING and isinstance(message, m.Challenge):
            return self._answer_challenge(message)
        if self._is_client and state is State.WELCOMING and isinstance(message, m.Welcome):
            if message.version not in self._versions:
                raise VersionRefused(f"wire version: got {message.version}, expected one of {self._versions}")
            return Step(state=State.OPEN, version=message.version)
        if self._is_client and state is State.WELCOMING and isinstance(message, m.Refusal):
            if message.code == m.ErrorCode.VERSION:
                raise VersionRefused(self._why_refused(message.detail))
            raise RemoteProtocolError(f"the other side refused the greeting: {message.detail}")
        if not self._is_client and state is State.GREETING and isinstance(message, m.Hello):
            return self._check_hello(message)
        raise RemoteProtocolError(f"wrong greeting: got {type(message).__name__} in state {state.name}")

    def _answer_challenge(self, challenge: m.Challenge) -> Step:
        assert self.remote is not None  # by __init__
        self.observed_address, self.nonce = challenge.observed_address, challenge.nonce
        self._their_versions = challenge.versions
        client = self._identity.node_id
        statement = hello_statement(server=self.remote, nonce=challenge.nonce, client=client, versions=self._versions)
        hello = m.Hello(node_id=client, versions=self._versions, signature=self._identity.sign(statement))
        return Step(state=State.WELCOMING, reply=hello)

    def _check_hello(self, hello: m.Hello) -> Step:
        statement = hello_statement(
            server=self._identity.node_id, nonce=self.nonce, client=hello.node_id, versions=hello.versions
        )
        if not is_valid_signature(hello.node_id, hello.signature, statement):
            raise RemoteProtocolError(f"the hello's signature is not that of node {hello.node_id.short}")
        version = choose_version(hello.versions, self._versions)
        if version is None:
            if not hello.versions:
                raise RemoteProtocolError("a hello without a wire version")
            detail = disagreement(hello.versions, self._versions)
            refusal = m.Refusal(code=m.ErrorCode.VERSION, detail=detail)
            return Step(state=State.CLOSED, reply=refusal, error=VersionRefused(detail))
        self.remote, self.observed_address = hello.node_id, None
        return Step(state=State.OPEN, reply=m.Welcome(version=version), version=version)

    def _why_refused(self, detail: str) -> str:
        """Return why a server has refused our versions: in our words where it told its own, else in its words."""
        theirs = self._their_versions
        if not theirs or choose_version(self._versions, theirs) is not None:
            return f"the other side refused the greeting: {detail}"
        return own_disagreement(self._versions, theirs)
