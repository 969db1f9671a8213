"""A registry node answers from its table by its own monotonic clock, and only an owner speaks for itself."""

from __future__ import annotations

import ipaddress

import pytest

from swarm.errors import IdentityMismatch, LocalProtocolError, Overloaded, Refused, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry import replica as replica_module
from swarm.registry.node import RegistryNode, prefix_of
from swarm.registry.records import RecordKind, SignedRecord, Withdrawal, sign
from swarm.registry.table import RegistryTable, TableLimits
from swarm.wire import messages as m
from swarm.wire.frames import decode_frame, encode
from tests.sample_records import sample_announcement

A, B, C = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)


MAPPED = ipaddress.ip_address("::ffff:127.0.0.1")  # Python versions write it differently


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def announcement(
    identity: Identity,
    seq: int,
    *,
    model: ModelId = MODEL,
    ttl_s: int = 60,
    addresses: tuple[str, ...] = ("127.0.0.1:1",),
) -> SignedRecord:
    record = sample_announcement(identity.node_id, seq=seq, ttl_s=ttl_s, model=model, addresses=addresses)
    return sign(record, identity)


def announce(node: RegistryNode, signed: SignedRecord, asker: Identity) -> m.Accepted:
    answer = node.answer(asker.node_id, m.Announce(record=signed.to_bytes()))
    assert isinstance(answer, m.Accepted)
    return answer


def lookup(node: RegistryNode, model: ModelId | None = MODEL) -> list[tuple[int, bytes]]:
    answer = node.answer(C.node_id, m.Lookup(model_id=model))
    assert isinstance(answer, m.Records)
    assert isinstance(decode_frame(encode(answer)), m.Records), "it fits into a frame"
    return list(answer.records)


def test_what_was_announced_is_found_as_the_bytes_that_came_with_the_time_left() -> None:
    clock = Clock()
    node = RegistryNode(now=clock)
    signed = announcement(A, 5)
    assert announce(node, signed, A) == m.Accepted(is_new=True, highest_seq=5)
    clock.now += 20.5
    assert lookup(node) == [(39_500, signed.to_bytes())]
    assert lookup(node, OTHER_MODEL) == []


def test_a_lookup_without_a_model_gives_the_records_of_all() -> None:
    node = RegistryNode(now=Clock())
    signed = [announcement(A, 1), announcement(B, 1), announcement(A, 1, model=OTHER_MODEL)]
    for each, asker in zip(signed, (A, B, A), strict=True):
        announce(node, each, asker)
    assert {data for _, data in lookup(node, None)} == {each.to_bytes() for each in signed}


def test_a_record_from_another_nodes_connection_is_refused_and_not_kept() -> None:
    node = RegistryNode(now=Clock())
    with pytest.raises(IdentityMismatch):
        announce(node, announcement(A, 1), B)
    assert lookup(node) == []


def test_a_forged_or_malformed_record_is_a_protocol_error() -> None:
    node = RegistryNode(now=Clock())
    good = announcement(A, 1).to_bytes()
    for bad in (good[:-1], b"\0" * 64 + good[64:], b"", good[:64], b"x" * 20_000):
        with pytest.raises(RemoteProtocolError):
            node.answer(A.node_id, m.Announce(record=bad))
    assert lookup(node) == []


def test_a_stale_announcement_is_told_the_highest_seq() -> None:
    node = RegistryNode(now=Clock())
    newest = announcement(A, 700)
    announce(node, newest, A)
    assert announce(node, announcement(A, 30), A) == m.Accepted(is_new=False, highest_seq=700)
    assert [data for _, data in lookup(node)] == [newest.to_bytes()]


def test_an_old_announcement_played_back_brings_nobody_back() -> None:
    """Scenario 13."""
    clock = Clock()
    node = RegistryNode(now=clock)
    old = announcement(A, 1)
    announce(node, old, A)
    announce(node, announcement(A, 2), A)
    assert announce(node, old, A) == m.Accepted(is_new=False, highest_seq=2)
    clock.now += 61
    assert lookup(node) == []
    assert announce(node, old, A) == m.Accepted(is_new=False, highest_seq=2)
    assert announce(node, announcement(A, 2), A).is_new is False, "nor does the newest, after it has run out"
    assert lookup(node) == []


def test_a_restart_within_two_seconds_leaves_one_entry() -> None:
    """Scenario 11."""
    clock = Clock()
    node = RegistryNode(now=clock)
    announce(node, announcement(A, 1_000), A)
    clock.now += 2
    again = announcement(A, 3_000)
    assert announce(node, again, A).is_new is True
    assert lookup(node) == [(60_000, again.to_bytes())]


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_clocks_an_hour_off_change_nothing(skew_s: int) -> None:
    """Scenario 15: a seq comes from the issuer's clock, a lease only from the receiver's."""
    clock = Clock()
    node = RegistryNode(now=clock)
    seq = 1_700_000_000_000 + 1000 * skew_s
    announce(node, announcement(A, seq, ttl_s=30), A)
    clock.now += 29.9
    assert len(lookup(node)) == 1
    clock.now += 0.1
    assert lookup(node) == []


def test_a_withdrawal_takes_the_record_away_at_once() -> None:
    node = RegistryNode(now=Clock())
    announce(node, announcement(A, 1), A)
    gone = sign(Withdrawal(node=A.node_id, seq=2, model=MODEL, withdraws=RecordKind.EXPERTS), A)
    assert announce(node, gone, A) == m.Accepted(is_new=True, highest_seq=2)
    assert lookup(node) == []


def test_a_stale_withdrawal_is_told_the_highest_seq_of_what_it_withdraws() -> None:
    node = RegistryNode(now=Clock())
    signed = announcement(A, 700)
    announce(node, signed, A)
    late = sign(Withdrawal(node=A.node_id, seq=30, model=MODEL, withdraws=RecordKind.EXPERTS), A)
    assert announce(node, late, A) == m.Accepted(is_new=False, highest_seq=700)
    assert [data for _, data in lookup(node)] == [signed.to_bytes()]


def test_the_withdrawal_of_what_was_never_here_is_accepted() -> None:
    node = RegistryNode(now=Clock())
    gone = sign(Withdrawal(node=A.node_id, seq=2, model=MODEL, withdraws=RecordKind.EXPERTS), A)
    assert announce(node, gone, A) == m.Accepted(is_new=False, highest_seq=2)


def test_a_full_table_says_so() -> None:
    node = RegistryNode(RegistryTable(TableLimits(max_records=1)), now=Clock())
    announce(node, announcement(A, 1), A)
    with pytest.raises(Overloaded):
        announce(node, announcement(B, 1), B)


def test_an_answer_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = RegistryNode(now=Clock())
    signed = [announcement(identity, 1) for identity in (A, B, C)]
    for each, identity in zip(signed, (A, B, C), strict=True):
        announce(node, each, identity)
    size = signed[0].size_bytes
    for limit, n_expected in ((3 * size, 3), (3 * size - 1, 2), (size, 1), (size - 1, 0)):
        monkeypatch.setattr(replica_module, "MAX_ANSWER_BYTES", limit)
        for model in (MODEL, None):
            assert len(lookup(node, model)) == n_expected


def test_what_a_registry_does_not_serve_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="GetStatus"):
        RegistryNode(now=Clock()).answer(A.node_id, m.GetStatus())


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2:3::4", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("127.0.0.1", None),
        ("127.9.9.9", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
    ],
)
def test_an_address_is_counted_under_its_network_but_for_loopback(host: str, prefix: str | None) -> None:
    assert prefix_of(host) == prefix


def test_one_host_with_many_keys_cannot_fill_the_registry() -> None:
    node = RegistryNode(RegistryTable(TableLimits(max_records=20, max_records_per_prefix=2)), now=Clock())
    keys = [Identity.from_seed(bytes([50 + n]) * 32) for n in range(10)]

    def announce_from(host: str, identity: Identity) -> m.Response:
        signed = announcement(identity, 1, addresses=("192.0.2.1:1",))
        return node.answer(identity.node_id, m.Announce(record=signed.to_bytes()), host=host)

    for n, identity in enumerate(keys[:2]):
        announce_from(f"192.0.2.{n}", identity)
    for n, identity in enumerate(keys[2:]):
        with pytest.raises(Overloaded):
            announce_from(f"192.0.2.{n}", identity)
    announce_from("198.51.100.1", A)
    for identity in keys[2:]:
        announce_from("127.0.0.1", identity)


@pytest.mark.parametrize("address", ["127.0.0.1:4000", "127.3.2.1:4000", "[::1]:4000", f"[{MAPPED}]:4000"])
def test_a_loopback_address_is_taken_from_this_machine_alone(address: str) -> None:
    signed = announcement(A, 1, addresses=("192.0.2.1:1", address))
    request = m.Announce(record=signed.to_bytes())
    node = RegistryNode(now=Clock())
    with pytest.raises(Refused, match="nobody else reaches the announced address"):
        node.answer(A.node_id, request, host="192.0.2.1")
    assert lookup(node) == []
    for host in ("127.0.0.1", "::1"):
        node.answer(A.node_id, request, host=host)
    assert len(lookup(node)) == 1


def test_another_machine_may_withdraw_and_announce_its_own_address() -> None:
    node = RegistryNode(now=Clock())
    signed = announcement(A, 1, addresses=("10.0.0.1:1",))
    node.answer(A.node_id, m.Announce(record=signed.to_bytes()), host="10.0.0.1")
    gone = sign(Withdrawal(node=A.node_id, seq=2, model=MODEL, withdraws=RecordKind.EXPERTS), A)
    answer = node.answer(A.node_id, m.Announce(record=gone.to_bytes()), host="10.0.0.1")
    assert answer == m.Accepted(is_new=True, highest_seq=2)
