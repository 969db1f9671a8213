"""Which TLS links a backbone has, in virtual time: no sockets; a link that fails is opened again, and old nodes make room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net import fast_links
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

    def close(self) -> None:
        self.is_open = False


class Facts:
    """A connection over a short, clean path."""

    rtt_s = 0.001

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

    async def __call__(self, me: Identity, node: NodeId, path: Path, on_gone: Callable[[TlsLink], None]) -> TlsLink:
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
