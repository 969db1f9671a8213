"""Digests tell what differs, whatever the order in which it is known."""

from __future__ import annotations

from swarm.ids import NodeId
from swarm.registry.digests import digest_of, member_tag

A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)


def test_a_digest_is_of_the_entries_whatever_their_order() -> None:
    entries = {bytes([n]) * 8: n for n in range(10)}
    turned = dict(reversed(entries.items()))
    assert digest_of(entries) == digest_of(turned) != digest_of(entries | {b"\0" * 8: 1})
    assert digest_of({}) == bytes(8)


def test_a_members_tag_is_of_its_id_and_its_addresses() -> None:
    tag = member_tag(A, ["192.0.2.1:1"])
    assert len(tag) == 8
    assert tag == member_tag(A, ["192.0.2.1:1"])
    assert len({tag, member_tag(B, ["192.0.2.1:1"]), member_tag(A, ["192.0.2.1:2"]), member_tag(A, [])}) == 4
