"""What the words of other nodes say about the NAT in between, and which addresses are worth a probe."""

from __future__ import annotations

import pytest

from swarm.net.punch import Sighting, candidates, is_hopeless, mapping_of, usable, why_relayed
from swarm.wire.messages import MAX_CANDIDATES, Mapping

OWN = ("10.0.0.2", 5000)
OUTSIDE = ("203.0.113.9", 40_000)


def seen(by: str, at: tuple[str, int] = OUTSIDE, own: tuple[str, int] | None = OWN) -> Sighting:
    return Sighting(by=(by, 7440), at=at, own=own)


@pytest.mark.parametrize(
    ("sightings", "mapping"),
    [
        ([], Mapping.UNKNOWN),
        ([seen("198.51.100.1")], Mapping.UNKNOWN),
        ([seen("198.51.100.1"), seen("198.51.100.1")], Mapping.UNKNOWN),
        ([seen("198.51.100.1"), seen("198.51.100.2")], Mapping.SAME),
        ([seen("198.51.100.1"), seen("198.51.100.2", (OUTSIDE[0], 40_001))], Mapping.VARYING),
        ([seen("198.51.100.1", OWN)], Mapping.NONE),
        ([seen("198.51.100.1", own=None)], Mapping.UNKNOWN),
        ([seen("127.0.0.1", ("127.0.0.1", 5000), ("127.0.0.1", 5000))], Mapping.UNKNOWN),
        ([seen("2001:db8::1", ("2001:db8::2", 5000), ("2001:db8::2", 5000))], Mapping.UNKNOWN),
    ],
)
def test_two_nodes_must_have_seen_us_before_a_nat_is_of_a_kind(sightings: list[Sighting], mapping: Mapping) -> None:
    assert mapping_of(sightings, 4) is mapping


def test_each_kind_of_ip_is_told_apart() -> None:
    six = seen("2001:db8::1", ("2001:db8::2", 5000), ("2001:db8::2", 5000))
    assert mapping_of([seen("198.51.100.1"), seen("198.51.100.2"), six], 6) is Mapping.NONE


def test_where_others_see_us_is_offered_before_our_own_addresses_each_once() -> None:
    offered = candidates([seen("198.51.100.1"), seen("198.51.100.2")], [OWN, ("2001:db8::2", 5000)])
    assert offered == ("203.0.113.9:40000", "10.0.0.2:5000", "[2001:db8::2]:5000")
    assert len(candidates([seen("198.51.100.1", ("203.0.113.9", port)) for port in range(1, 50)], [])) == MAX_CANDIDATES


def test_only_addresses_that_can_be_a_nodes_are_probed() -> None:
    offered = ["203.0.113.9:4", "nonsense", "224.0.0.1:5", "0.0.0.0:5", "127.0.0.1:5", "[fe80::1]:5", "host.invalid:5"]
    assert usable(offered, may_be_here=False) == [("203.0.113.9", 4)]
    assert usable(["[2001:db8::1%" + 70 * "é" + "]:5", "[::ffff:zz]:5"], may_be_here=False) == []
    assert usable(["127.0.0.1:5"], may_be_here=True) == [("127.0.0.1", 5)]
    assert len(usable([f"203.0.113.{host}:9" for host in range(1, 100)], may_be_here=False)) == MAX_CANDIDATES


def test_it_is_hopeless_only_where_no_address_can_be_known_or_nothing_gets_out() -> None:
    assert is_hopeless(Mapping.VARYING, Mapping.VARYING)
    assert is_hopeless(Mapping.SAME, Mapping.BLOCKED)
    assert not is_hopeless(Mapping.VARYING, Mapping.SAME)
    assert not is_hopeless(Mapping.UNKNOWN, Mapping.UNKNOWN)


def test_the_reason_names_the_cause_and_whose_it_is() -> None:
    assert "symmetric" in why_relayed(Mapping.VARYING, Mapping.VARYING)
    assert "the other side" in why_relayed(Mapping.SAME, Mapping.VARYING)
    assert "this side's network lets no UDP" in why_relayed(Mapping.BLOCKED, Mapping.SAME)
    assert "firewall" in why_relayed(Mapping.SAME, Mapping.SAME)


def test_an_offer_cannot_name_many_ports_of_one_host() -> None:
    offered = [f"198.51.100.7:{port}" for port in range(1000, 1008)]
    assert usable(offered, may_be_here=False) == [("198.51.100.7", 1000), ("198.51.100.7", 1001)]
