"""Who is on the leaderboard, with what: by trusted backbones' receipts alone, however they are shown."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry import leaderboard
from swarm.registry.leaderboard import (
    AHEAD_DAYS,
    BOARD_S,
    MAX_KEPT,
    MAX_PRESENTED,
    MAX_RANKED,
    WINDOW_DAYS,
    Leaderboard,
    Ledger,
    ranked,
)
from swarm.wire.receipts import Receipt, Totals, sign_receipt

OURS, OTHER, SYBIL = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
A, B, C = (NodeId(bytes([n]) * 32) for n in (10, 11, 12))
TODAY = 20_000


def receipt(
    n_pairs: int, peer: NodeId = A, *, by: Identity = OURS, day: int = TODAY, period: bytes = b"period 1"
) -> Receipt:
    totals = Totals(n_rows=max(1, n_pairs // 2), n_pairs=n_pairs, weight=500 * n_pairs)
    return sign_receipt(by, peer=peer, period=period, day=day, totals=totals)


def texts(*receipts: Receipt) -> list[str]:
    return [each.text for each in receipts]


def forged(given: Receipt) -> str:
    data = bytearray(given.data)
    data[-9] ^= 1  # in the count of pairs
    return Receipt(
        backbone=given.backbone,
        peer=given.peer,
        period=given.period,
        day=given.day,
        totals=given.totals,
        data=bytes(data),
    ).text


def test_receipts_of_trusted_backbones_add_up() -> None:
    ledger = Ledger([OURS.node_id, OTHER.node_id])
    shown = texts(receipt(30), receipt(12, by=OTHER), receipt(8, day=TODAY - 1), receipt(4, period=b"period 2"))
    assert ledger.present(A, shown, TODAY) == 4
    assert ledger.totals(TODAY) == {A: Totals(n_rows=15 + 6 + 4 + 2, n_pairs=54, weight=27_000)}


def test_a_backbone_that_nobody_named_counts_for_nothing() -> None:
    """Whoever runs a backbone can sign what it likes for a peer of its own."""
    ledger = Ledger([OURS.node_id])
    assert ledger.present(A, texts(receipt(2**50, by=SYBIL), receipt(6)), TODAY) == 1
    assert ledger.totals(TODAY)[A].n_pairs == 6


def test_forged_and_inflated_receipts_are_refused_and_change_nothing() -> None:
    ledger = Ledger([OURS.node_id])
    ledger.present(A, texts(receipt(6)), TODAY)
    before = ledger.totals(TODAY)
    bad: list[object] = [["x" * 219], ["short"], [7], {}, "text", None]
    for shown in ([forged(receipt(30))], [receipt(6).text, forged(receipt(7))], *bad):
        with pytest.raises(RemoteProtocolError):
            ledger.present(A, shown, TODAY)
        assert ledger.totals(TODAY) == before


def test_another_peers_receipts_are_refused() -> None:
    ledger = Ledger([OURS.node_id])
    with pytest.raises(RemoteProtocolError, match="of another peer"):
        ledger.present(B, texts(receipt(6, A)), TODAY)
    assert ledger.totals(TODAY) == {}


def test_a_replayed_receipt_adds_nothing_and_an_old_one_takes_nothing_away() -> None:
    ledger = Ledger([OURS.node_id])
    assert ledger.present(A, texts(receipt(6), receipt(30)), TODAY) == 2
    for shown in (texts(receipt(30)), texts(receipt(6)), texts(receipt(6), receipt(30), receipt(30)), []):
        assert ledger.present(A, shown, TODAY) == 0
        assert ledger.totals(TODAY)[A].n_pairs == 30


def test_only_the_last_days_count_and_a_clock_may_be_a_day_ahead() -> None:
    ledger = Ledger([OURS.node_id])
    oldest, newest = TODAY - WINDOW_DAYS + 1, TODAY + AHEAD_DAYS
    shown = texts(*(receipt(2, day=day) for day in (oldest - 1, oldest, newest, newest + 1, TODAY + 5000)))
    assert ledger.present(A, shown, TODAY) == 2
    assert ledger.totals(TODAY)[A].n_pairs == 4
    assert ledger.totals(TODAY + 1)[A].n_pairs == 2, "the oldest is over"
    assert ledger.totals(TODAY + 30) == {}


def test_what_one_peer_can_make_a_viewer_keep_is_bounded() -> None:
    ledger = Ledger([OURS.node_id])
    with pytest.raises(RemoteProtocolError, match="at most"):
        ledger.present(A, [receipt(2).text] * (MAX_PRESENTED + 1), TODAY)
    for start in range(0, MAX_KEPT + MAX_PRESENTED, MAX_PRESENTED):
        many = (receipt(2, period=number.to_bytes(8, "big")) for number in range(start, start + MAX_PRESENTED))
        ledger.present(A, texts(*many), TODAY)
    assert ledger.totals(TODAY)[A].n_pairs == 2 * MAX_KEPT


def test_peers_are_bounded_and_who_presents_nothing_pushes_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaderboard, "MAX_PEERS", 3)
    ledger = Ledger([OURS.node_id])
    crowd = [NodeId(bytes([50 + number]) * 32) for number in range(5)]
    for peer in crowd[:3]:
        ledger.present(peer, texts(receipt(2, peer)), TODAY)
    for peer in crowd[3:]:
        ledger.present(peer, [], TODAY)
    assert set(ledger.totals(TODAY)) == set(crowd[:3])
    ledger.present(crowd[0], [], TODAY)  # it was asked last
    ledger.present(crowd[4], texts(receipt(2, crowd[4])), TODAY)
    assert set(ledger.totals(TODAY)) == {crowd[0], crowd[2], crowd[4]}


def test_what_a_backbone_counts_itself_needs_no_receipt_and_counts_once() -> None:
    ledger = Ledger([OURS.node_id])
    ledger.present(A, texts(receipt(6), receipt(8, period=b"before  ")), TODAY)
    own = {(OURS.node_id, node, TODAY, b"period 1"): Totals(n_rows=5, n_pairs=10, weight=10_000) for node in (A, B)}
    assert {node: each.n_pairs for node, each in ledger.totals(TODAY, own).items()} == {A: 18, B: 10}


_shown = st.lists(
    st.tuples(st.integers(2, 60), st.sampled_from([OURS, OTHER, SYBIL]), st.integers(TODAY - 8, TODAY + 2)), max_size=10
)


@given(_shown, st.randoms(use_true_random=False))
def test_no_way_of_presenting_makes_more_of_what_was_signed(
    parts: Sequence[tuple[int, Identity, int]], rng: random.Random
) -> None:
    """In any order, again and again, in pieces, with forged ones between: the total is what trusted ones signed at most."""
    signed = [receipt(pairs, by=by, day=day) for pairs, by, day in parts]
    best: dict[tuple[Identity, int], int] = {}
    for pairs, by, day in parts:
        if by is not SYBIL and TODAY - WINDOW_DAYS < day <= TODAY + AHEAD_DAYS:
            best[by, day] = max(best.get((by, day), 0), pairs)
    ledger = Ledger([OURS.node_id, OTHER.node_id])
    for _ in range(4):
        shown = texts(*signed) + texts(*signed[:3])
        rng.shuffle(shown)
        if signed and rng.random() < 0.5:
            shown.insert(rng.randrange(len(shown) + 1), forged(rng.choice(signed)))
        try:
            ledger.present(A, shown, TODAY)
        except RemoteProtocolError:
            pass
        counted = ledger.totals(TODAY).get(A, Totals()).n_pairs
        assert counted <= sum(best.values())
    ledger.present(A, texts(*signed), TODAY)
    assert ledger.totals(TODAY).get(A, Totals()).n_pairs == sum(best.values())


def points(n: int) -> Totals:
    return Totals(n_rows=n, n_pairs=n, weight=1000 * n)


def test_the_most_points_come_first_and_who_shows_no_name_is_not_listed() -> None:
    totals = {A: points(5), B: points(50), C: points(500)}
    rows = ranked(totals, {A: "Ann", B: " Bob\u202e ", C: "\u200b"})
    assert [(each["name"], each["points"], each["id"]) for each in rows] == [("Bob", 50, str(B)), ("Ann", 5, str(A))]
    many = {NodeId(number.to_bytes(32, "big")): points(7) for number in range(100)}
    rows = ranked(many, dict.fromkeys(many, "same name"))
    assert [each["id"] for each in rows] == [str(node) for node in sorted(many)[:MAX_RANKED]], "equal ones by id"


def test_a_leaderboard_is_made_anew_only_now_and_then_and_remembers_who_was_there() -> None:
    ledger = Ledger([OURS.node_id])
    board = Leaderboard(ledger)
    ledger.present(A, texts(receipt(6)), TODAY)
    first = board({A: "Ann"}, now=0.0, today=TODAY)
    assert first == {
        "days": WINDOW_DAYS,
        "counted_by": [str(OURS.node_id)],
        "rows": [{"id": str(A), "short": A.short, "name": "Ann", "points": 3, "rows": 3, "pairs": 6}],
    }
    ledger.present(A, texts(receipt(60)), TODAY)
    assert board({}, now=BOARD_S - 0.1, today=TODAY) is first
    second = board({}, now=BOARD_S, today=TODAY)
    assert second is not None
    assert [each["pairs"] for each in second["rows"]] == [60], "it is away, and keeps its place"
    third = board({A: ""}, now=2 * BOARD_S, today=TODAY)
    assert third is not None
    assert third["rows"] == [], "its owner wants no name any more"


def test_who_is_barred_is_not_listed_and_without_trust_there_is_no_leaderboard() -> None:
    ledger = Ledger([OURS.node_id])
    ledger.present(A, texts(receipt(6)), TODAY)
    shown = Leaderboard(ledger)({A: "Ann"}, now=0.0, today=TODAY, is_barred=lambda node: node == A)
    assert shown is not None
    assert shown["rows"] == []
    assert Leaderboard(Ledger([]))({A: "Ann"}, now=0.0, today=TODAY) is None


def test_names_of_those_who_did_nothing_push_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcing is free: a crowd of names must not take the board from those who computed, here or away."""
    monkeypatch.setattr(leaderboard, "MAX_PEERS", 5)
    ledger = Ledger([OURS.node_id])
    for peer in (A, B):
        ledger.present(peer, texts(receipt(6, peer)), TODAY)
    board = Leaderboard(ledger)
    crowd = {NodeId(bytes([100 + number]) * 32): "crowd" for number in range(20)}
    board({B: "Ben"}, now=0.0, today=TODAY)
    shown = board({A: "Ann", **crowd}, now=BOARD_S, today=TODAY)
    assert shown is not None
    assert [row["name"] for row in shown["rows"]] == ["Ann", "Ben"]
