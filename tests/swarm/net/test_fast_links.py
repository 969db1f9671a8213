"""Which TLS links a backbone has, in virtual time: no sockets; a link that fails is opened again, and old nodes make room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from swarm.errors import ConnectionLost, SwarmError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net import fast_links
from swarm.net.byte_counts import ByteCounts
from swarm.net.connection import Connection
from swarm.net.fast_links import CHECK_S, MAX_LINKS, FastLinks
from swarm.net.link_choice import COPIED_LOSSES, COPIED_PACKETS, FIRST_RETRY_S
from swarm.net.paths import Path
from swarm.net.tcp_losses import Packets
from swarm.net.tls_link import TlsLink
from tests import virtual_time
from tests.virtual_time import now

ME = Identity.from_seed(bytes([1]) * 32)
NODE = NodeId(bytes([2]) * 32)


class Link:
    """Of a link what its keeper uses."""

    is_copying = False
    takes_copies = True
    second: TlsLink | None = None
    told: Packets | None = None  # of its packets
    on_gone: Callable[[TlsLink], None]

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open

    @property
    def is_prompt(self) -> bool:
        return self.is_open

    def packets(self) -> Packets | None:
        return self.told

    def close(self, error: SwarmError | None = None) -> None:
        self.is_open = False


class Facts:
    """A connection over a short, clean path."""

    rtt_s = 0.001
    is_open = True
    on_end: Callable[[SwarmError], None] | None = None

    def __init__(self) -> None:
        self.path = self.driver = self
        self.is_relayed = False

    def least_rtt_s(self) -> float:
        return self.rtt_s

    def is_lossy(self) -> bool:
        return False


class Dials:
    """Stands for the dialling of links; the first `n_dead` of them end in the moment in which they open."""

    def __init__(self, n_dead: int = 0) -> None:
        self.n = 0
        self._n_dead = n_dead

    async def __call__(
        self,
        me: Identity,
        node: NodeId,
        path: Path,
        on_gone: Callable[[TlsLink], None],
        counts: ByteCounts | None,
    ) -> TlsLink:
        self.n += 1
        link = Link(is_open=self.n > self._n_dead)
        link.on_gone = on_gone
        if not link.is_open:
            on_gone(cast(TlsLink, link))
        return cast(TlsLink, link)


async def settled(links: FastLinks, node: NodeId = NODE) -> TlsLink | None:
    """Return what is used for a node, once what was begun for it is done."""
    links.best(node, CONNECTION)
    await asyncio.sleep(2 * CHECK_S)
    return links.best(node, CONNECTION)


CONNECTION = cast(Connection, Facts())


def test_a_link_that_ends_as_it_opens_is_opened_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dials = Dials(n_dead=1)
        monkeypatch.setattr(fast_links, "_dial", dials)
        links = FastLinks(ME, now=now)
        assert await settled(links) is None
        assert dials.n == 1
        await asyncio.sleep(FIRST_RETRY_S)
        assert await settled(links) is not None
        await links.close()

    virtual_time.run(main())


def test_nodes_that_came_and_went_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(fast_links, "_dial", Dials())
        links = FastLinks(ME, now=now)
        for n in range(MAX_LINKS + 3):
            link = await settled(links, NodeId(n.to_bytes(32)))
            assert link is not None, f"node {n}"
            links._on_gone(NodeId(n.to_bytes(32)), link)
        assert len(links._places) <= MAX_LINKS
        await links.close()

    virtual_time.run(main())


def test_the_end_of_the_connection_is_the_end_of_its_link_and_the_next_one_gets_a_new_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        dials = Dials()
        monkeypatch.setattr(fast_links, "_dial", dials)
        links = FastLinks(ME, now=now)
        former, successor = Facts(), Facts()
        links.best(NODE, cast(Connection, former))
        await asyncio.sleep(2 * CHECK_S)
        link = links.best(NODE, cast(Connection, former))
        assert link is not None
        assert links.link(NODE) is link
        assert former.on_end is not None
        former.is_open = False
        former.on_end(ConnectionLost("gone"))
        assert not link.is_open
        assert links.link(NODE) is None
        await asyncio.sleep(2 * CHECK_S)
        links.best(NODE, cast(Connection, successor))
        await asyncio.sleep(2 * CHECK_S)
        assert links.best(NODE, cast(Connection, successor)) not in (None, link)
        assert dials.n == 2
        former.on_end(ConnectionLost("said again"))
        assert links.link(NODE) is not None, "it was another connection's"
        await links.close()

    virtual_time.run(main())


def test_a_connection_that_ends_while_its_link_is_dialled_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(fast_links, "_dial", Dials())
        links, connection = FastLinks(ME, now=now), Facts()
        links.best(NODE, cast(Connection, connection))
        connection.is_open = False
        await asyncio.sleep(2 * CHECK_S)
        assert links.n_open == 0
        await links.close()

    virtual_time.run(main())


async def lossy(links: FastLinks) -> Link:
    """Return the open link, once it has lost enough and what follows from that is done."""
    link = cast(Link, await settled(links))
    link.told = Packets(100, COPIED_LOSSES)
    await settled(links)
    await asyncio.sleep(CHECK_S)
    return link


def test_a_link_that_loses_packets_is_doubled_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dials = Dials()
        monkeypatch.setattr(fast_links, "_dial", dials)
        links = FastLinks(ME, now=now)
        link = await lossy(links)
        assert link.second is not None
        assert link.is_copying
        assert links.n_open == 1
        link.told = Packets(100 + 2 * COPIED_PACKETS, COPIED_LOSSES)
        await settled(links)
        link.told = Packets(100 + 4 * COPIED_PACKETS, COPIED_LOSSES)
        await settled(links)
        assert not link.is_copying
        assert link.second is not None, "losses come again"
        assert dials.n == 2
        await links.close()

    virtual_time.run(main())


def test_a_second_link_that_fails_is_dialled_again_later_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dials = Dials()
        monkeypatch.setattr(fast_links, "_dial", dials)
        links = FastLinks(ME, now=now)
        link = await lossy(links)
        second = cast(Link, link.second)
        second.on_gone(cast(TlsLink, second))
        assert link.second is None
        assert await settled(links) is cast(TlsLink, link)
        assert dials.n == 2
        await asyncio.sleep(FIRST_RETRY_S)
        await settled(links)
        assert dials.n == 3
        assert link.second not in (None, second)
        await links.close()

    virtual_time.run(main())


def test_a_peer_that_knows_no_copies_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(fast_links, "_dial", Dials())
        monkeypatch.setattr(Link, "takes_copies", False)
        links = FastLinks(ME, now=now)
        link = await lossy(links)
        assert link.second is None
        assert not link.is_copying
        await links.close()

    virtual_time.run(main())


def test_a_second_link_that_ends_as_it_opens_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        dials = Dials()
        monkeypatch.setattr(fast_links, "_dial", dials)
        links = FastLinks(ME, now=now)
        await settled(links)
        dials._n_dead = 2
        assert (await lossy(links)).second is None
        await links.close()

    virtual_time.run(main())
