"""The switchboard passes packets between proved sources only, at its rates, and lets no channel starve another. No I/O."""

from __future__ import annotations

import random
from typing import Any

import pytest

from relay.quotas import MAX_PACKET_BYTES, MBIT_S, Limits
from relay.switchboard import CHALLENGE_BURST, COOKIE_PERIOD_S, Flight, Switchboard
from swarm.ids import NodeId
from swarm.net import relay_packets as p

A, B, C = (NodeId(bytes([n]) * 32) for n in (1, 2, 3))
KEYS = (b"a" * 32, b"b" * 32)
CHANNEL = b"CHANNEL0"
CALLER, CALLED, STRANGER = ("192.0.2.1", 1000), ("192.0.2.2", 2000), ("192.0.2.3", 3000)
T0 = 1000.0


def make(limits: Limits | None = None) -> Switchboard:
    return Switchboard(limits or Limits(), generation=7, secret=b"s" * 32, now=T0)


def control(
    kind: p.PacketType, side: int, number: int, *, channel: bytes = CHANNEL, key: bytes | None = None, **options: Any
) -> bytes:
    fields: dict[str, Any] = {"generation": 7, **options}
    return p.encode(
        p.Control(type=kind, channel=channel, side=side, number=number, **fields), KEYS[side] if key is None else key
    )


def bind(side: int, number: int, cookie: bytes = p.NO_COOKIE, **options: Any) -> bytes:
    return control(p.PacketType.BIND, side, number, cookie=cookie, **options)


def only(flights: list[Flight]) -> tuple[p.Control, Any]:
    ((data,), address) = flights[0]
    assert len(flights) == 1
    return p.decode(data), address


def bound(
    board: Switchboard | None = None, *, channel: bytes = CHANNEL, where: tuple[Any, Any] = (CALLER, CALLED)
) -> Switchboard:
    """Return a switchboard with one more channel, whose legs are bound."""
    board = make() if board is None else board
    board.open(channel, caller=(A, KEYS[0]), called=(B, KEYS[1]), now=T0)
    for side, address in enumerate(where):
        cookie = board.cookie(channel, address, T0)
        packet, to = only(board.receive([bind(side, 0, cookie, channel=channel)], address, T0))
        assert (packet.type, to) == (p.PacketType.BOUND, address)
    return board


def relayed(n: int, size: int = 100, channel: bytes = CHANNEL) -> list[bytes]:
    return [p.relayed(channel, bytes([at % 256]) * (size - p.RELAY_HEAD_BYTES)) for at in range(n)]


# Passing on


def test_what_one_leg_sends_leaves_for_the_other_as_it_came() -> None:
    board = bound()
    flight = relayed(3)
    assert board.receive(flight, CALLER, T0) == [(flight, CALLED)]
    assert board.receive(flight, CALLED, T0) == [(flight, CALLER)]
    assert (board.n_passed, board.n_passed_bytes) == (6, 600)


def test_a_flight_of_several_channels_is_taken_apart() -> None:
    board = bound(bound(), channel=b"CHANNEL1", where=(CALLER, STRANGER))
    first, second = relayed(2), relayed(2, channel=b"CHANNEL1")
    assert board.receive([*first, *second, first[0]], CALLER, T0) == [
        (first, CALLED),
        (second, STRANGER),
        ([first[0]], CALLED),
    ]


def test_what_nobody_knows_is_dropped_without_an_answer() -> None:
    board = bound()
    assert board.receive(relayed(2, channel=b"UNKNOWN0"), CALLER, T0) == []
    assert board.receive([bind(0, 5, channel=b"UNKNOWN0")], CALLER, T0) == []
    assert board.receive([b"\x00", b"\x3f" * 50, b"!", b"$short"], CALLER, T0) == []
    assert board.drops.unknown_channel == 4
    assert board.drops.malformed == 3
    assert board.n_passed == 0


def test_what_comes_before_the_other_leg_is_bound_is_dropped() -> None:
    board = make()
    board.open(CHANNEL, caller=(A, KEYS[0]), called=(B, KEYS[1]), now=T0)
    board.receive([bind(0, 0, board.cookie(CHANNEL, CALLER, T0))], CALLER, T0)
    assert board.receive(relayed(2), CALLER, T0) == []
    assert board.drops.unbound == 2


def test_a_packet_larger_than_a_network_carries_is_dropped() -> None:
    board = bound()
    assert board.receive(relayed(1, MAX_PACKET_BYTES), CALLER, T0) != []
    assert board.receive(relayed(1, MAX_PACKET_BYTES + 1), CALLER, T0) == []


def test_random_bytes_do_nothing() -> None:
    board = bound()
    rng = random.Random(3)
    for _ in range(2000):
        kind = rng.choice([*p.PacketType, rng.randrange(64)])
        data = bytes([kind]) + rng.choice([CHANNEL, rng.randbytes(8)]) + rng.randbytes(rng.randrange(60))
        for _, to in board.receive([data], STRANGER, T0):
            assert to == STRANGER, "a stranger's bytes went to somebody else"
    assert (board.bound_to(CHANNEL, 0), board.bound_to(CHANNEL, 1)) == (CALLER, CALLED)


def test_a_closed_channel_passes_nothing_and_frees_its_places() -> None:
    board = bound()
    assert (board.n_channels_of(A), board.n_channels_of(B), board.n_open) == (1, 1, 1)
    assert board.close(CHANNEL)
    assert not board.close(CHANNEL)
    assert board.receive(relayed(1), CALLER, T0) == []
    assert (board.n_channels_of(A), board.n_channels_of(B), board.n_open) == (0, 0, 0)


# Who is where


def test_a_first_bind_from_the_address_that_was_seen_costs_no_round_trip() -> None:
    board = make()
    board.open(CHANNEL, caller=(A, KEYS[0]), called=(B, KEYS[1]), now=T0)
    board.receive([bind(1, 0, board.cookie(CHANNEL, CALLED, T0))], CALLED, T0)
    flight = relayed(2)
    flights = board.receive([bind(0, 0, board.cookie(CHANNEL, CALLER, T0)), *flight], CALLER, T0)
    assert p.decode(flights[0][0][0]).type is p.PacketType.BOUND
    assert flights[1] == (flight, CALLED)


def test_a_rebound_nat_heals_in_one_round_trip() -> None:
    board = bound()
    moved = ("198.51.100.9", 40_000)
    challenge, to = only(board.receive(relayed(1), moved, T0))
    assert (challenge.type, to) == (p.PacketType.CHALLENGE, moved)
    answer, to = only(board.receive([bind(0, 1, challenge.cookie)], moved, T0))
    assert (answer.type, answer.number, to) == (p.PacketType.BOUND, 1, moved)
    flight = relayed(1)
    assert board.receive(flight, CALLED, T0) == [(flight, moved)]
    assert board.receive(flight, moved, T0) == [(flight, CALLED)]
    assert only(board.receive(flight, CALLER, T0))[0].type is p.PacketType.CHALLENGE, "the old address is a stranger's"


def test_a_cookie_is_worth_nothing_from_another_source() -> None:
    board = bound()
    cookie = board.cookie(CHANNEL, STRANGER, T0)
    answer, to = only(board.receive([bind(0, 1, cookie)], ("192.0.2.3", 3001), T0))
    assert (answer.type, to) == (p.PacketType.CHALLENGE, ("192.0.2.3", 3001))
    assert board.bound_to(CHANNEL, 0) == CALLER


def test_a_cookie_is_worth_nothing_on_another_channel_and_after_its_time() -> None:
    board = bound(bound(), channel=b"CHANNEL1")
    board.receive([bind(0, 1, board.cookie(b"CHANNEL1", STRANGER, T0))], STRANGER, T0)
    assert board.bound_to(CHANNEL, 0) == CALLER
    cookie = board.cookie(CHANNEL, STRANGER, T0)
    board.receive([bind(0, 2, cookie)], STRANGER, T0 + 2 * COOKIE_PERIOD_S)
    assert board.bound_to(CHANNEL, 0) == CALLER
    board.receive([bind(0, 3, cookie)], STRANGER, T0 + COOKIE_PERIOD_S)
    assert board.bound_to(CHANNEL, 0) == STRANGER


def test_who_has_no_key_binds_nothing_and_gets_no_answer_to_a_bind() -> None:
    board = bound()
    cookie = board.cookie(CHANNEL, STRANGER, T0)
    for key in (b"x" * 32, KEYS[1]):  # a stranger's, and the other leg's
        assert board.receive([bind(0, 5, cookie, key=key)], STRANGER, T0) == []
    assert board.receive([bind(0, 5, cookie, generation=6)], STRANGER, T0) == [], "of the relay's earlier life"
    assert board.bound_to(CHANNEL, 0) == CALLER
    assert board.drops.forged == 2


def test_a_changed_bind_is_dropped() -> None:
    board = bound()
    data = bytearray(bind(0, 9, board.cookie(CHANNEL, STRANGER, T0)))
    for position in range(8, 8 * len(data)):
        data[position // 8] ^= 1 << position % 8
        board.receive([bytes(data)], STRANGER, T0)
        assert board.bound_to(CHANNEL, 0) == CALLER
        data[position // 8] ^= 1 << position % 8


def test_a_bind_that_is_played_back_does_not_move_a_leg() -> None:
    board = bound()
    moved = ("198.51.100.9", 40_000)
    first = bind(0, 1, board.cookie(CHANNEL, moved, T0))
    board.receive([first], moved, T0)
    back = bind(0, 2, board.cookie(CHANNEL, CALLER, T0))
    board.receive([back], CALLER, T0)
    assert board.receive([first], moved, T0) == [], "from an address that was the leg's: its source can be forged"
    board.receive([back], STRANGER, T0)
    assert board.bound_to(CHANNEL, 0) == CALLER


def test_a_repeated_bind_is_answered_again() -> None:
    board = bound()
    data = bind(0, 0, p.NO_COOKIE)
    assert only(board.receive([data], CALLER, T0))[0].type is p.PacketType.BOUND


def test_one_address_cannot_be_both_ends_of_a_channel() -> None:
    board = bound()
    board.receive([bind(0, 1, board.cookie(CHANNEL, CALLED, T0))], CALLED, T0)
    assert board.bound_to(CHANNEL, 0) == CALLER


def test_challenges_are_no_amplifier_and_no_flood() -> None:
    board = bound()
    size = p.SIZES[p.PacketType.CHALLENGE]
    assert board.receive(relayed(1, size - 1), STRANGER, T0) == []
    n_answers = 0
    for _ in range(200):
        for flight, to in board.receive(relayed(1, size), STRANGER, T0):
            assert (len(flight), len(flight[0]), to) == (1, size, STRANGER)
            n_answers += 1
    assert n_answers == CHALLENGE_BURST


# Keepalives


def test_a_keepalive_is_answered_with_its_number() -> None:
    board = bound()
    answer, to = only(board.receive([control(p.PacketType.KEEPALIVE, 1, 1)], CALLED, T0))
    assert (answer.type, answer.number, answer.side, to) == (p.PacketType.ALIVE, 1, 1, CALLED)


def test_a_keepalive_from_elsewhere_is_challenged_and_one_played_back_is_dropped() -> None:
    board = bound()
    data = control(p.PacketType.KEEPALIVE, 1, 1)
    assert only(board.receive([data], STRANGER, T0))[0].type is p.PacketType.CHALLENGE
    assert only(board.receive([data], CALLED, T0))[0].type is p.PacketType.ALIVE
    assert board.receive([data], CALLED, T0) == []
    assert board.receive([control(p.PacketType.KEEPALIVE, 1, 2, key=KEYS[0])], CALLED, T0) == []


def test_keepalives_keep_a_channel_from_being_forgotten() -> None:
    board = bound()
    late = T0 + board.limits.idle_s
    assert not board.is_idle(CHANNEL, late)
    assert board.is_idle(CHANNEL, late + 1)
    for side, address in enumerate((CALLER, CALLED)):
        board.receive([control(p.PacketType.KEEPALIVE, side, 1)], address, late)
    assert not board.is_idle(CHANNEL, late + 1)
    assert board.is_idle(b"UNKNOWN0", T0)


@pytest.mark.parametrize("side", [0, 1])
def test_keepalives_of_one_side_alone_do_not_keep_a_channel(side: int) -> None:
    """A caller that was killed gives nothing up: else the called node would keep its channel, and its place, for ever."""
    board = bound()
    late = T0 + board.limits.idle_s
    board.receive([control(p.PacketType.KEEPALIVE, side, 1)], (CALLER, CALLED)[side], late)
    assert board.is_idle(CHANNEL, late + 1)


def test_strangers_do_not_keep_a_channel_alive() -> None:
    board = bound()
    late = T0 + board.limits.idle_s + 1
    board.receive(relayed(1), STRANGER, late)
    assert board.is_idle(CHANNEL, late)


def test_a_reservation_is_a_leg_that_only_keepalives_travel_on() -> None:
    board = make()
    board.open(CHANNEL, caller=None, called=(B, KEYS[1]), now=T0)
    board.receive([bind(1, 0, board.cookie(CHANNEL, CALLED, T0))], CALLED, T0)
    assert only(board.receive([control(p.PacketType.KEEPALIVE, 1, 1)], CALLED, T0))[0].type is p.PacketType.ALIVE
    assert board.receive(relayed(1), CALLED, T0) == []
    assert board.receive([bind(0, 2, key=KEYS[1])], CALLED, T0) == []
    assert board.n_channels_of(B) == 0
    assert board.close(CHANNEL)


# Rates


def send_for(board: Switchboard, seconds: float, rate_bit_s: float, *, channels: list[bytes]) -> dict[bytes, int]:
    """Offer each channel's caller a rate for a while; return the bytes that came out of each."""
    size, got = 1200, dict.fromkeys(channels, 0)

    def take(flights: list[Flight]) -> None:
        for run, _ in flights:
            got[run[0][1:9]] += sum(map(len, run))

    step = size * 8 / rate_bit_s
    n_steps = round(seconds / step)
    for at in range(n_steps):
        now = T0 + at * step
        take(board.poll(now))
        for channel in channels:
            take(board.receive(relayed(1, size, channel), CALLER, now))
    return got


def test_a_channel_gets_its_rate_and_the_rest_is_dropped() -> None:
    board = bound(make(Limits(channel_bit_s=8 * MBIT_S)))
    got = send_for(board, 2.0, 24 * MBIT_S, channels=[CHANNEL])
    assert got[CHANNEL] * 8 / 2.0 == pytest.approx(8 * MBIT_S, rel=0.05)
    assert board.drops.over_rate > 0


def test_a_node_gets_its_rate_over_all_its_channels() -> None:
    board = make(Limits(channel_bit_s=8 * MBIT_S, node_bit_s=12 * MBIT_S))
    channels = [b"CHANNEL%d" % n for n in range(3)]
    for channel in channels:
        bound(board, channel=channel)
    got = send_for(board, 2.0, 8 * MBIT_S, channels=channels)
    assert sum(got.values()) * 8 / 2.0 == pytest.approx(12 * MBIT_S, rel=0.05)
    assert min(got.values()) > 0.8 * max(got.values())


def test_the_relay_passes_its_rate_in_all_and_shares_it_evenly() -> None:
    board = make(Limits(channel_bit_s=50 * MBIT_S, node_bit_s=100 * MBIT_S, total_bit_s=20 * MBIT_S))
    channels = [b"CHANNEL%d" % n for n in range(4)]
    for channel in channels:
        bound(board, channel=channel)
    got = send_for(board, 2.0, 10 * MBIT_S, channels=channels)
    assert sum(got.values()) * 8 / 2.0 == pytest.approx(20 * MBIT_S, rel=0.05)
    assert min(got.values()) > 0.9 * max(got.values())


def test_nothing_waits_longer_than_the_queue_is_long() -> None:
    board = bound(make(Limits(channel_bit_s=8 * MBIT_S)))
    sent = relayed(1000, 1000)
    sent_at = T0
    out = [data for run, _ in board.receive(sent, CALLER, sent_at) for data in run]
    now = T0
    while (at := board.next_deadline()) is not None:
        now = max(at, now)
        out += [data for run, _ in board.poll(now) for data in run]
    assert now - sent_at <= 0.030 + 0.005
    assert out == sent[: len(out)], "in order"
    assert 30_000 <= 1000 * len(out) <= 65_000, "a burst and a queue"


def test_control_never_waits_behind_a_flood() -> None:
    board = bound(make(Limits(channel_bit_s=8 * MBIT_S, total_bit_s=8 * MBIT_S)))
    board.receive(relayed(1000, 1000), CALLER, T0)
    assert board.next_deadline() is not None
    flights = board.receive([control(p.PacketType.KEEPALIVE, 0, 1)], CALLER, T0)
    assert p.decode(flights[0][0][0]).type is p.PacketType.ALIVE


def latencies(n_flooders: int, *, seed: int) -> list[float]:
    """Return how long 20 quiet channels' packets take inside a relay of 40 Mbit/s, while others send all they can."""
    rng = random.Random(seed)
    limits = Limits(channel_bit_s=20 * MBIT_S, node_bit_s=1000 * MBIT_S, total_bit_s=40 * MBIT_S)
    board = make(limits)
    quiet = [b"QUIET%03d" % n for n in range(20)]
    floods = [b"FLOOD%03d" % n for n in range(n_flooders)]
    for n, channel in enumerate([*quiet, *floods]):
        bound(board, channel=channel, where=((f"10.0.0.{n}", 1), (f"10.0.1.{n}", 1)))
    events = [(T0 + rng.random() * 2.0, channel, 1200) for channel in quiet for _ in range(100)]
    events += [(T0 + n * 1200 * 8 / (100 * MBIT_S), channel, 1200) for channel in floods for n in range(20_000)]
    arrived: dict[bytes, list[float]] = {channel: [] for channel in quiet}
    took: list[float] = []

    def take(flights: list[Flight], now: float) -> None:
        for run, _ in flights:
            for data in run:
                if data[1:9] in arrived:
                    took.append(now - arrived[data[1:9]].pop(0))

    for at, channel, size in sorted(events):
        while (deadline := board.next_deadline()) is not None and deadline <= at:
            take(board.poll(deadline), deadline)
        if channel in arrived:
            arrived[channel].append(at)
        where = (f"10.0.0.{[*quiet, *floods].index(channel)}", 1)
        take(board.receive(relayed(1, size, channel), where, at), at)
    return took


@pytest.mark.parametrize("n_flooders", [1, 3])
def test_flooded_channels_leave_the_others_p95_within_a_tenth(n_flooders: int) -> None:
    path_s = 0.020  # a round trip over the relay's two legs, to which its queue adds

    def p95(n: int) -> float:
        took = sorted(latencies(n, seed=4))
        assert len(took) == 2000, "nothing of a quiet channel is dropped"
        return path_s + took[int(0.95 * len(took))]

    assert p95(n_flooders) <= 1.10 * p95(0)
