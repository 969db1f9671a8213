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
from swarm.net.link_choice import FIRST_RETRY_S
from swarm.net.paths import Path
from swarm.net.tls_link import TlsLink
from tests import virtual_time
from tests.virtual_time import now

ME = Identity.from_seed(bytes([1]) * 32)
NODE = NodeId(bytes([2]) * 32)


class Link:
    """Of a link what its keeper uses."""

    is_stalled = False

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open

    def packets(self) -> None:
        return None

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
