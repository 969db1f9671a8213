"""The TLS links of a backbone: opened beside its QUIC connections where `link_choice` wants them, closed where not any more.

The link is dialled at the address that the QUIC connection uses, on the TCP port of the same number; on this host, at the node's
Unix socket first. A path that changes under QUIC closes the link. So does the end of the connection, at once and whatever ended
it: a peer is used while its QUIC connection lives, and what it still owes is lost with that.
While a link loses packets, a second one doubles it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.errors import ConnectionLost, NetworkError, RemoteProtocolError, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.ip import plain_ip
from swarm.net import tcp_losses
from swarm.net.addresses import SocketAddress
from swarm.net.byte_counts import ByteCounts, PathKind
from swarm.net.connection import Connection, clock
from swarm.net.link_choice import FIRST_RETRY_S, LinkChoice, PathFacts
from swarm.net.paths import Path
from swarm.net.tcp_losses import Packets
from swarm.net.tls_link import TlsLink
from swarm.net.tls_links import dial_tls, unix_name

logger = logging.getLogger(__name__)

MAX_LINKS = 256  # as many as a backbone has peers (dispatch/holders)
CHECK_S = 0.25  # how often a path is looked at, at most; guessed


@dataclass(slots=True)
class _Place:
    choice: LinkChoice = field(default_factory=LinkChoice)
    link: TlsLink | None = None
    path: Path | None = None  # of the connection when the link was opened
    opening: asyncio.Task[None] | None = None
    second_at: float = 0.0  # when a second link may be dialled
    looked_at: float = 0.0


class FastLinks:
    """Use `best` for each dispatch; `close` at the end.

    Attributes:
        is_forced: for measurements: open links, and keep them, whatever the path is like.
    """

    def __init__(
        self, identity: Identity, *, counts: ByteCounts | None = None, now: Callable[[], float] = clock
    ) -> None:
        """`counts`: of this node, where the links' bytes are to count."""
        self.is_forced = False
        self._counts = counts
        self._identity = identity
        self._now = now
        self._places: dict[NodeId, _Place] = {}
        self._is_closed = False

    @property
    def n_open(self) -> int:
        """Links that can be used now."""
        return sum(place.link is not None and place.link.is_open for place in self._places.values())

    def n_by_kind(self) -> dict[PathKind, int]:
        """Return how many links are open, by what carries them."""
        links = [place.link for place in self._places.values() if place.link is not None]
        kinds = [link.path_kind for link in links if link.is_open]
        return {kind: kinds.count(kind) for kind in (PathKind.TLS, PathKind.UNIX)}

    def link(self, node: NodeId) -> TlsLink | None:
        """Return the open link to a node, if there is one now, stalled or not."""
        place = self._places.get(node)
        return place.link if place is not None and place.link is not None and place.link.is_open else None

    def best(self, node: NodeId, connection: Connection) -> TlsLink | None:
        """Return the link to use for a dispatch to `node`; None: the connection itself. May begin to open one."""
        place = self._places.get(node)
        if place is None:
            if self._is_closed or not self._make_room():
                return None
            place = self._places[node] = _Place()
        now = self._now()
        if now >= place.looked_at + CHECK_S:
            place.looked_at = now
            self._look(node, place, connection, now)
        link = place.link
        return link if link is not None and link.is_prompt else None

    def _make_room(self) -> bool:
        """Return whether another node has a place: of those without a link who was used longest ago is forgotten."""
        if len(self._places) < MAX_LINKS:
            return True
        unused = [node for node, place in self._places.items() if place.link is None and place.opening is None]
        if not unused:
            return False
        del self._places[min(unused, key=lambda node: self._places[node].looked_at)]
        return True

    async def close(self) -> None:
        """Close all links, and give up those that are being opened."""
        self._is_closed = True
        tasks = [place.opening for place in self._places.values() if place.opening is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in self._places.values():
            if place.link is not None:
                place.link.close()
        self._places.clear()

    def _look(self, node: NodeId, place: _Place, connection: Connection, now: float) -> None:
        # The ping's is of when the connection was new and the machine perhaps busy; nobody pings while dispatches flow.
        rtts_s = [rtt_s for rtt_s in (connection.rtt_s, connection.driver.least_rtt_s()) if rtt_s is not None]
        rtt_s = min(rtts_s, default=None)
        facts = PathFacts(
            rtt_s=rtt_s,
            is_relayed=connection.path.is_relayed,
            is_lossy=not tcp_losses.IS_TOLD and connection.driver.is_lossy(),
        )
        wants = place.choice.wants(facts, now) or self.is_forced
        link = place.link
        packets = link.packets() if link is not None else None
        if link is not None and packets is not None and not self.is_forced:
            self._double(node, place, link, packets, now)
        is_losing = packets is not None and place.choice.loses(*packets, rtt_s or 0.0)
        if link is not None and wants and is_losing and not self.is_forced:
            logger.debug("the TLS link with node %s loses packets", node.short)
            place.link = None
            place.choice.given_up(now)
            link.close()
            return
        if link is not None and (not wants or place.path != connection.path):
            logger.debug("the TLS link with node %s is not wanted any more", node.short)
            place.link = None
            place.choice.closed()
            link.close()
        elif wants and link is None and place.opening is None and not self._is_closed:
            place.opening = asyncio.create_task(self._open(node, place, connection), name=f"tls link {node.short}")

    def _double(self, node: NodeId, place: _Place, link: TlsLink, packets: Packets, now: float) -> None:
        """Let small dispatches go over a second link as well, while the first loses packets."""
        link.is_copying = place.choice.copies(*packets) and link.takes_copies
        is_room = place.opening is None and now >= place.second_at and not self._is_closed
        if link.is_copying and link.second is None and is_room and place.path is not None:
            place.second_at = now + FIRST_RETRY_S
            second = self._open_second(node, place, link, place.path)
            place.opening = asyncio.create_task(second, name=f"second tls link {node.short}")

    async def _open_second(self, node: NodeId, place: _Place, link: TlsLink, path: Path) -> None:
        try:
            second = await _dial(self._identity, node, path, functools.partial(_forget_second, link), self._counts)
            if link.is_open and second.is_open:
                link.second = second
                logger.debug("a second TLS link with node %s is open", node.short)
            else:
                second.close()
        except (NetworkError, RemoteProtocolError) as error:
            logger.debug("no second TLS link with node %s: %s", node.short, error)
        finally:
            place.opening = None

    async def _open(self, node: NodeId, place: _Place, connection: Connection) -> None:
        on_gone, path = functools.partial(self._on_gone, node), connection.path
        try:
            link = await _dial(self._identity, node, path, on_gone, self._counts)
            if not connection.is_open:
                link.close()
                return
            if not link.is_open:  # `_on_gone` did not know it yet
                raise ConnectionLost("the link ended as it opened")
            place.link, place.path = link, path
            connection.on_end = functools.partial(self._on_connection_end, place, link)
            place.choice.opened(self._now())
            logger.debug("a TLS link with node %s is open", node.short)
        except (NetworkError, RemoteProtocolError) as error:
            logger.debug("no TLS link with node %s: %s", node.short, error)
            place.choice.failed(self._now())
        finally:
            place.opening = None

    def _on_connection_end(self, place: _Place, link: TlsLink, error: SwarmError) -> None:
        if place.link is link:
            place.link = None
            place.choice.closed()
        link.close(error)

    def _on_gone(self, node: NodeId, link: TlsLink) -> None:
        place = self._places.get(node)
        if place is not None and place.link is link:
            place.link = None
            place.choice.failed(self._now())


def _forget_second(link: TlsLink, second: TlsLink) -> None:
    if link.second is second:
        link.second = None


async def _dial(
    identity: Identity, node: NodeId, path: Path, on_gone: Callable[[TlsLink], None], counts: ByteCounts | None
) -> TlsLink:
    host, port = str(plain_ip(path.address[0])), path.address[1]
    if plain_ip(host).is_loopback:
        try:
            return await dial_tls(identity, unix_name(node), expected=node, on_gone=on_gone, counts=counts)
        except NetworkError:
            pass  # not Linux, or an address that is passed on to another host
    address: SocketAddress = (host, port)
    return await dial_tls(identity, address, expected=node, on_gone=on_gone, counts=counts)
