"""Reservations and channels: who may have them, who loses them, and that everything is given back. No I/O."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from relay.quotas import Limits
from relay.reservations import (
    MAX_CHANNELS_PER_PAIR,
    MAX_RESERVATIONS_PER_NETWORK,
    MIN_TTL_S,
    RESERVATION_TTL_S,
    Reservation,
    Reservations,
)
from relay.switchboard import Switchboard
from swarm.errors import Overloaded, Refused
from swarm.ids import NodeId

T0 = 1000.0


def node(n: int) -> NodeId:
    return NodeId(n.to_bytes(32, "big"))


A, B, C = node(1), node(2), node(3)


def make(**limits: Any) -> tuple[Reservations[str], Switchboard]:
    given = Limits(**limits)
    board = Switchboard(given, generation=1, secret=b"s" * 32, now=T0)
    numbers = itertools.count(1)
    return Reservations(board, given, random_bytes=lambda n: next(numbers).to_bytes(n, "big")), board


def reserve(
    held: Reservations[str],
    who: NodeId,
    connection: str = "c1",
    *,
    network: str = "",
    lifetime_s: float = 60.0,
    now: float = T0,
    gone: tuple[str, ...] = (),
) -> tuple[Reservation[str], str | None]:
    return held.reserve(
        who, connection, network=network, lifetime_s=lifetime_s, is_open=lambda c: c not in gone, now=now
    )


def test_a_renewal_keeps_the_leg_and_moves_the_end() -> None:
    held, _ = make()
    first, loser = reserve(held, B)
    assert loser is None
    channel = first.channel
    again, loser = reserve(held, B, now=T0 + 50)
    assert (again.channel, again.ends_at, loser) == (channel, T0 + 110, None)
    assert held.n_reservations == 1


@pytest.mark.parametrize(("asked_s", "granted_s"), [(1, MIN_TTL_S), (60, 60), (1e9, RESERVATION_TTL_S)])
def test_the_time_that_is_granted_has_bounds(asked_s: float, granted_s: float) -> None:
    held, _ = make()
    assert reserve(held, B, lifetime_s=asked_s)[0].ends_at == T0 + granted_s


def test_a_reservation_outlives_its_connection_and_is_found_again_by_the_next() -> None:
    held, _ = make()
    before = reserve(held, B, "c1")[0].channel
    after, loser = reserve(held, B, "c2", gone=("c1",))
    assert (after.channel, after.connection, loser) == (before, "c2", None)


def test_a_second_process_with_the_key_gets_a_leg_of_its_own_and_the_first_is_to_be_told() -> None:
    held, board = make()
    before = reserve(held, B, "c1")[0].channel
    after, loser = reserve(held, B, "c2")
    assert loser == "c1"
    assert after.channel != before
    assert board.is_idle(before, T0), "the loser's leg is gone"
    assert (held.n_reservations, board.n_open) == (1, 1)


def test_reservations_end_when_their_time_is_up_and_not_before() -> None:
    held, board = make()
    reserve(held, B)
    held.expire(T0 + 59.9)
    assert held.find(B) is not None
    held.expire(T0 + 60)
    assert (held.find(B), held.n_reservations, board.n_open) == (None, 0, 0)


def test_there_is_room_for_so_many_in_all_and_of_one_network() -> None:
    held, _ = make(n_reservations=100)
    for n in range(MAX_RESERVATIONS_PER_NETWORK):
        reserve(held, node(10 + n), network="192.0.2.1")
    with pytest.raises(Overloaded, match="network"):
        reserve(held, node(9), network="192.0.2.1")
    for n in range(100 - MAX_RESERVATIONS_PER_NETWORK):
        reserve(held, node(200 + n))
    with pytest.raises(Overloaded, match="room"):
        reserve(held, node(9), network="192.0.2.2")
    reserve(held, node(10), network="192.0.2.1")  # who has one may renew it
    held.release(node(10), held.find(node(10)).channel)  # type: ignore[union-attr]
    reserve(held, node(9), network="192.0.2.1")


def test_only_a_node_with_a_reservation_can_be_called_and_nobody_calls_itself() -> None:
    held, board = make()
    with pytest.raises(LookupError, match="no reservation"):
        held.connect(A, B, T0)
    reserve(held, B)
    entry = held.connect(A, B, T0)
    assert (entry.caller, entry.called) == (A, B)
    assert entry.keys[0] != entry.keys[1]
    assert (board.n_channels_of(A), board.n_channels_of(B)) == (1, 1)
    with pytest.raises(Refused):
        held.connect(B, B, T0)


def test_a_node_has_so_many_channels_and_a_pair_so_many() -> None:
    held, _ = make(n_channels_per_node=6)
    for each in (B, C):
        reserve(held, each)
    entries = [held.connect(A, B, T0) for _ in range(MAX_CHANNELS_PER_PAIR)]
    with pytest.raises(Overloaded, match="between"):
        held.connect(A, B, T0)
    for _ in range(2):
        held.connect(A, C, T0)
    with pytest.raises(Overloaded, match="6 channels"):
        held.connect(A, C, T0)
    held.release(A, entries[0].channel)
    held.connect(A, B, T0)


def test_either_end_may_release_a_channel_and_nobody_else() -> None:
    held, board = make()
    reserve(held, B)
    first, second = held.connect(A, B, T0), held.connect(A, B, T0)
    held.release(C, first.channel)
    assert held.n_channels == 2
    held.release(A, first.channel)
    held.release(B, second.channel)
    held.release(B, second.channel)
    assert (held.n_channels, board.n_open) == (0, 1)
    held.release(C, held.find(B).channel)  # type: ignore[union-attr]
    assert held.n_reservations == 1


def test_idle_channels_end_and_their_places_are_free_again() -> None:
    held, board = make(idle_s=30.0)
    reserve(held, B, lifetime_s=120)
    held.connect(A, B, T0)
    held.expire(T0 + 30)
    assert held.n_channels == 1
    held.expire(T0 + 30.1)
    assert (held.n_channels, board.n_channels_of(A), board.n_channels_of(B)) == (0, 0, 0)


def test_the_end_of_a_reservation_leaves_its_channels() -> None:
    """Packets may flow on while a node reserves anew; a channel ends when nothing comes."""
    held, _ = make()
    mine, _ = reserve(held, B)
    held.connect(A, B, T0)
    held.release(B, mine.channel)
    assert (held.n_reservations, held.n_channels) == (0, 1)
