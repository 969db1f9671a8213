"""Opens and accepts TLS links: contexts, the listener beside an endpoint's UDP port, and dialling. Who may is decided here.

A server accepts a link only of a node that has a QUIC connection with it already, and begins the handshake only with that node's
host: this door lets nobody in who is not in. Nor does it keep who is not any more: a link ends with its node's last connection.

On one host a Unix socket in Linux's abstract namespace serves as well, named after the node: no file, no cleaning up.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarm.errors import ConnectionLost, DeadlineExceeded, IdentityMismatch
from swarm.identity import Identity, node_id_of
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address
from swarm.net.byte_counts import ByteCounts
from swarm.net.certificate import make_certificate
from swarm.net.connection import Connection, clock
from swarm.net.endpoint import Endpoint
from swarm.net.link_copies import CopyLink, LinkCopies, is_copied
from swarm.net.tls_link import TlsLink
from swarm.net.tls_records import COPIES_ALPN
from swarm.wire import messages as m
from swarm.wire import session as s

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 4.0  # as a dial over QUIC
MAX_HANDSHAKES = 32  # under way; more are turned away. Guessed: as the endpoint's half-open connections
# Of one host over TCP: of these, and of links that are not open, yet or any more. Guessed: half, so that nobody keeps others out.
MAX_HANDSHAKES_PER_HOST = 16
# Accepted sockets that are not closed yet, greetings or not. Guessed: half of the 1,024 files that a process may open mostly.
MAX_LINKS = 512
MAX_LINKS_PER_NODE = 4  # two, and two before them of which nobody said that they are gone; then the oldest goes
SHUTDOWN_TIMEOUT_S = 2.0  # for TLS's last words; asyncio's 30 would let strangers hold files. Guessed
REST_S = 1.0  # without accepting, after the process ran out of files; as asyncio's servers
SILENT_S = 30  # of an accepted link before the kernel asks, three times, whether anybody is there; guessed
# In this order, where the system's own is another. Not BBR: on a link that asks and waits it takes an answer's bytes over a round
# trip for the path's rate, and once it believes that, spreads each answer over a round trip (p50 at 3 ms 6.2 ms instead of 3.7).
CONGESTION_CONTROLS = (b"cubic", b"reno")
_SERVES: tuple[type[m.Request], ...] = (m.Dispatch,)  # what is large or rare goes over QUIC


def server_context(identity: Identity) -> ssl.SSLContext:
    """Return the context of one side's listener: TLS 1.3, the node's own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)
    certificate = make_certificate(identity).public_bytes(Encoding.PEM)
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # The ssl module takes a key from a file only: one that nobody else can read, and that is gone at once.
    handle, name = tempfile.mkstemp(prefix="swarm-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key + certificate)
        context.load_cert_chain(name)
    finally:
        Path(name).unlink()
    return context


def client_context() -> ssl.SSLContext:
    """Return the context of dialling: the key is compared, never chained (`require_node`)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _restrict(context)
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.set_alpn_protocols([COPIES_ALPN, s.ALPN])  # a side that is older knows the second alone
    if hasattr(context, "num_tickets") and context.protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0


def require_node(transport: asyncio.Transport, expected: NodeId) -> None:
    """Return if the server has proved the expected node's key.

    With CERT_NONE the handshake still checks the signature of the certificate's key (RFC 8446 section 4.4.3).

    Raises:
        IdentityMismatch: another key, or none.
    """
    tls = transport.get_extra_info("ssl_object")
    raw = tls.getpeercert(binary_form=True) if tls is not None else None
    try:
        key = x509.load_der_x509_certificate(raw).public_key() if raw else None
    except ValueError as error:
        raise IdentityMismatch("the server's certificate cannot be read") from error
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityMismatch(f"the server's key is of the wrong kind: got {type(key).__name__}, expected ed25519")
    presented = node_id_of(key)
    if presented != expected:
        raise IdentityMismatch(f"another node answered: got {presented.short}, expected {expected.short}")


def unix_name(node: NodeId) -> str:
    """Return the name of a node's socket on its host, in the abstract namespace."""
    return f"\0swarm-{node}"


class TlsListener:
    """Accepts links for an endpoint. Use as `async with TlsListener(endpoint, host=...) as listener`.

    A handshake costs a millisecond, so it is begun only with hosts that have a QUIC connection open, and with few at once.
    """

    def __init__(self, endpoint: Endpoint, *, host: str) -> None:
        """`host`: where to listen. The TCP port has the number of the endpoint's UDP port: nobody needs to be told."""
        self._endpoint = endpoint
        self._host = host
        self._context = server_context(endpoint.identity)
        self._links: dict[TlsLink, None] = {}  # oldest first
        self._unclosed: dict[TlsLink, str] = {}  # these, and those whose sockets are still being closed; with the host
        self._copies = LinkCopies()
        self._sockets: list[socket.socket] = []
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: dict[asyncio.Task[None], str] = {}  # with the host
        self.port = 0  # of TCP; 0: it was taken
        self.n_refused = 0  # strangers, and who came while too many shook hands

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        port = self._endpoint.port
        if self._listen(family, (self._host, port)):
            self.port = port
        else:
            logger.info("TCP port %d is taken: no TLS links but from this host", port)
        if sys.platform == "linux":
            self._listen(socket.AF_UNIX, unix_name(self._endpoint.identity.node_id))
        self._endpoint.on_gone = self._on_connection_gone
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._endpoint.on_gone = lambda node: None
        for timer in self._resting.values():
            timer.cancel()
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        self._sockets.clear()
        tasks = list(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):
            link.close()

    def _listen(self, family: socket.AddressFamily, address: Any) -> bool:
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            if family is not socket.AF_UNIX:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _send_unpaced(listening)  # accepted ones inherit it
            if family is socket.AF_INET6:  # as the endpoint; else it is the system's choice
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(self._host != "::"))
            listening.bind(address)
            listening.listen(MAX_HANDSHAKES)
        except OSError as error:
            logger.debug("cannot listen for TLS links at %r: %s", address, error)
            listening.close()
            return False
        self._sockets.append(listening)
        asyncio.get_running_loop().add_reader(listening, self._on_readable, listening)
        return True

    def _on_readable(self, listening: socket.socket) -> None:
        for _ in range(MAX_HANDSHAKES):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):  # nobody is left, or who came went away
                return
            except OSError as error:  # no more files, or memory: who waits is still there, and would wake us for ever
                logger.debug("cannot accept a TLS link: %s", error)
                self._rest(listening)
                return
            host = "" if listening.family is socket.AF_UNIX else str(address[0])
            if not self._has_room(host) or (host and not self._endpoint.is_connected_host(host)):
                self.n_refused += 1
                accepted.close()
                continue
            accepted.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._shake_hands(accepted, host), name="tls handshake")
            self._handshakes[task] = host
            task.add_done_callback(functools.partial(self._on_handshake_over, accepted))

    def _has_room(self, host: str) -> bool:
        """Return whether a handshake may begin with a host; empty: with this one."""
        n_handshakes = len(self._handshakes)
        if n_handshakes >= MAX_HANDSHAKES or n_handshakes + len(self._unclosed) >= MAX_LINKS:
            return False
        n_of_host = list(self._handshakes.values()).count(host)
        n_of_host += sum(each == host and not link.is_open for link, each in self._unclosed.items())
        return not host or n_of_host < MAX_HANDSHAKES_PER_HOST

    def _rest(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            del self._resting[listening]
            loop.add_reader(listening, self._on_readable, listening)

        self._resting[listening] = loop.call_later(REST_S, go_on)

    def _on_handshake_over(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        if task.cancelled():  # before its first step, perhaps
            accepted.close()

    async def _shake_hands(self, accepted: socket.socket, host: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            if accepted.family is not socket.AF_UNIX:
                _prepare(accepted)
            await loop.connect_accepted_socket(
                functools.partial(self._accept, host),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # ssl.SSLError and a handshake that takes too long are such
            logger.debug("a TLS handshake failed: %s", error)
            accepted.close()

    @property
    def n_links(self) -> int:
        """Accepted links that are not gone."""
        return len(self._links)

    def _accept(self, host: str) -> TlsLink:
        endpoint = self._endpoint

        def make_session() -> s.Session:  # once TLS is done: of handshakes that fail nothing is kept
            self._links[link] = None
            self._unclosed[link] = host
            return s.Session(
                endpoint.identity,
                is_client=False,
                now=clock(),
                nonce=os.urandom(32),
                serves=_SERVES,
                request_budget=endpoint.request_budget,
            )

        link = TlsLink(
            make_session,
            on_request=self._on_request,
            on_cancel=self._on_cancel,
            on_open=self._on_open,
            on_gone=self._on_gone,
            on_lost=self._on_lost,
            on_unsent=self._on_unsent,
            counts=endpoint.counts,
        )
        return link

    def _on_open(self, link: TlsLink) -> bool:
        if not self._endpoint.is_connected(link.remote):
            return False
        for each in self._links_of(link.remote)[:-MAX_LINKS_PER_NODE]:
            each.close(ConnectionLost("its node has newer links"))
        return True

    def _on_connection_gone(self, node: NodeId) -> None:
        if not self._endpoint.is_connected(node):
            for link in self._links_of(node):
                link.close(ConnectionLost("its node has no connection any more"))

    def _links_of(self, node: NodeId) -> list[TlsLink]:
        return [each for each in self._links if each.is_open and each.remote == node]

    # Serving needs of whoever asks only what both kinds of link have: `respond`, `remote`, `close`.

    def _on_request(self, link: TlsLink, exchange: int, request: m.Request) -> None:
        number = link.copy_number
        if number is not None and is_copied(request):
            link.on_answered = self._copies.answered
            if not self._copies.is_first(link, exchange, number, cast(m.Dispatch, request)):
                return
        self._endpoint.serving.begin(cast(Connection, link), exchange, request)

    def _begin(self, link: CopyLink, exchange: int, request: m.Request) -> None:
        self._endpoint.serving.begin(cast(Connection, link), exchange, request)

    def _on_cancel(self, link: TlsLink, exchange: int) -> None:
        self._endpoint.serving.cancel(cast(Connection, link), exchange)
        for instead in self._copies.cancelled(link, exchange):
            self._begin(*instead)

    def _on_unsent(self, link: TlsLink, n_given: int, n_held: int) -> None:
        if link in self._links:  # not after it is gone: nobody would forget it
            self._endpoint.serving.note_unsent(cast(Connection, link), n_given, n_held)

    def _on_lost(self, link: TlsLink) -> None:
        self._unclosed.pop(link, None)

    def _on_gone(self, link: TlsLink) -> None:
        self._links.pop(link, None)
        self._endpoint.serving.forget(cast(Connection, link))
        if link.on_answered is not None:
            for instead in self._copies.gone(link):
                self._begin(*instead)


def _prepare(accepted: socket.socket) -> None:
    """Let an accepted socket send at once, and end when its node is gone without a word: the server's side never pings."""
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENT_S), ("TCP_KEEPINTVL", SILENT_S // 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send_unpaced(unconnected: socket.socket) -> None:
    """Let a socket send a whole message at once. Before it is connected: pacing, once begun, stays."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    for name in CONGESTION_CONTROLS:
        try:
            unconnected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
        except OSError:  # not there, or only for root
            continue


async def _connect(make: Callable[[], TlsLink], address: SocketAddress | str, context: ssl.SSLContext) -> None:
    """Open a link to a TCP address or a Unix socket's name: on a socket that is connected, since uvloop takes a name in the
    abstract namespace for an empty one, and pacing is chosen before."""
    loop = asyncio.get_running_loop()
    open_on: Callable[..., Awaitable[object]]
    if isinstance(address, str):
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no Unix sockets")
        family, open_on = socket.AF_UNIX, loop.create_unix_connection
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        open_on = loop.create_connection
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        if not isinstance(address, str):
            _send_unpaced(connected)
        await loop.sock_connect(connected, address)
        await open_on(
            make,
            sock=connected,
            ssl=context,
            server_hostname="swarm.invalid",
            ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
    except BaseException:
        connected.close()
        raise


async def dial_tls(
    identity: Identity,
    address: SocketAddress | str,
    *,
    expected: NodeId,
    on_gone: Callable[[TlsLink], None] = lambda link: None,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
    counts: ByteCounts | None = None,
) -> TlsLink:
    """Return an open link to a node at a TCP address, or at a Unix socket's name.

    `counts`: of this node, where the link's bytes are to count.

    Raises:
        IdentityMismatch: another node answered.
        DeadlineExceeded, ConnectionLost, RemoteProtocolError: no link.
    """
    links: list[TlsLink] = []

    def make() -> TlsLink:
        link = TlsLink(
            lambda: s.Session(identity, is_client=True, now=clock(), expected=expected, serves=()),
            on_request=lambda link, exchange, request: None,
            on_cancel=lambda link, exchange: None,
            on_open=lambda link: True,
            on_gone=on_gone,
            counts=counts,
            check=lambda transport: require_node(transport, expected),
        )
        links.append(link)
        return link

    where = "its Unix socket" if isinstance(address, str) else format_address(address)
    context = client_context()
    try:
        async with asyncio.timeout(timeout_s):
            await _connect(make, address, context)
            await asyncio.shield(links[0].opened)
    except TimeoutError:
        for link in links:
            link.close()
        raise DeadlineExceeded(f"no TLS link at {where} within {timeout_s:g} s") from None
    except OSError as error:  # ssl.SSLError is one
        for link in links:
            link.close()
        raise ConnectionLost(f"no TLS link at {where}: {error}") from error
    except BaseException:
        for link in links:
            link.close()
        raise
    return links[0]
