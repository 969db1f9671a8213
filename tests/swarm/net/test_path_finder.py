"""What a finder concludes from how its relays are reached. Real relays are in tests/e2e/net."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import Overloaded
from swarm.net.path_finder import PathFinder
from swarm.wire.messages import Mapping, OfferPaths

OUTSIDE = ("203.0.113.9", 40_000)
RELAY, BRIDGE = ("198.51.100.1", 7440), ("127.0.0.1", 40_001)


@pytest.mark.parametrize(("by", "is_blocked"), [(BRIDGE, True), (("10.0.0.7", 7440), True), (("8.8.8.8", 7440), False)])
def test_udp_counts_as_blocked_only_if_nobody_out_there_is_reached_by_it(by: tuple[str, int], is_blocked: bool) -> None:
    """Else any node could name a relay of its own whose UDP is off, and no hole would be punched any more."""
    endpoint = SimpleNamespace(
        add_handler=lambda serves, handler: None,
        families=frozenset((4,)),
        port=5000,
        sightings=lambda: [(by, OUTSIDE)],
    )
    finder = PathFinder(cast(Any, endpoint), takes_calls=False)
    assert finder.mapping() is not Mapping.BLOCKED
    finder.relays._bridges[RELAY] = cast(Any, SimpleNamespace(is_open=True))
    assert (finder.mapping() is Mapping.BLOCKED) is is_blocked


async def test_offers_of_many_connections_are_bounded_together() -> None:
    """Else a stranger with many connections could have us probe a third party thousands of times a second."""
    probed: list[Any] = []
    endpoint = SimpleNamespace(
        add_handler=lambda serves, handler: None,
        families=frozenset((4,)),
        port=5000,
        sightings=list,
        add_path=lambda connection, address: probed.append(address),
    )
    finder = PathFinder(cast(Any, endpoint), takes_calls=False)
    finder.own_addresses = list  # type: ignore[method-assign]

    class Connection:
        path = SimpleNamespace(address=("203.0.113.1", 1))
        remote = SimpleNamespace(short="x")

    offer = OfferPaths(addresses=("198.51.100.7:9",), mapping=Mapping.SAME)
    connections = [Connection() for _ in range(100)]
    n_refused = 0
    for connection in connections:
        try:
            await finder._answer_offer(cast(Any, connection), offer)
        except Overloaded:
            n_refused += 1
    assert n_refused >= 80
    assert 0 < len(probed) <= 20
