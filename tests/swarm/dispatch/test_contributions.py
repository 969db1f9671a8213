"""A backbone's counts of what its peers did: what weighs how much, by day, and what a receipt of them says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from swarm.dispatch.contributions import FEW_PAIRS, KEPT_PERIODS, MAX_PEERS, Contributions
from swarm.dispatch.placement import Placement
from swarm.dispatch.plan import HERE
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.wire.receipts import DAY_S, Totals, read_receipt, total
from tests.sample_records import sample_announcement

MODEL = ModelId(b"m" * 32)
US = Identity.from_seed(b"u" * 32)
A, B, C = (NodeId(bytes([n]) * 32) for n in (1, 2, 3))
NOON = 20_000 * DAY_S + 12 * 3600.0


def ids(*experts: int) -> npt.NDArray[np.uint16]:
    return np.array(experts, np.uint16)


class Accounts:
    """The counts, a clock, and names of periods in turn."""

    def __init__(self) -> None:
        self.wall = NOON
        self.n_periods = 0
        self.placement = Placement(MODEL, [2, 5], 8, require_exact=False)
        self.hold({A: range(8), B: range(4), C: range(2)})
        self.counts = Contributions(self.placement, wall=lambda: self.wall, random=self._name)

    def _name(self, n_bytes: int) -> bytes:
        self.n_periods += 1
        return self.n_periods.to_bytes(n_bytes, "big")

    def hold(self, slices: dict[NodeId, range]) -> None:
        self.placement.update(
            sample_announcement(node, model=MODEL, experts=ExpertSet.of([2, 5], held), addresses=("192.0.2.1:1",))
            for node, held in slices.items()
        )

    def of(self, node: NodeId) -> Totals:
        return total(self.counts.receipts(node, US))


def test_a_pair_weighs_what_it_is_scarce_at_the_time() -> None:
    it = Accounts()
    it.counts.count(A, 5, 2, ids(7, 3, 0))  # held by one, two and three
    assert it.of(A) == Totals(n_rows=2, n_pairs=3, weight=1000 + 500 + 333)
    it.hold({A: range(8)})
    it.counts.count(A, 5, 1, ids(0))
    assert it.of(A) == Totals(n_rows=3, n_pairs=4, weight=1000 + 500 + 333 + 1000)


def test_many_pairs_at_once_weigh_as_much_as_one_by_one() -> None:
    rng = np.random.default_rng(3)
    chosen = rng.integers(0, 8, 5 * FEW_PAIRS).astype(np.uint16)
    at_once, one_by_one = Accounts(), Accounts()
    at_once.counts.count(A, 2, 40, chosen)
    for expert in chosen.tolist():
        one_by_one.counts.count(A, 2, 1, ids(expert))
    assert at_once.of(A).weight == one_by_one.of(A).weight > 0


def test_what_the_holder_that_just_died_computed_weighs_as_much_as_can_be() -> None:
    it = Accounts()
    it.hold({B: range(4)})
    it.counts.count(A, 2, 1, ids(7))
    assert it.of(A).weight == 1000


def test_receipts_are_signed_for_their_peer_alone_and_say_the_whole_period() -> None:
    it = Accounts()
    it.counts.count(A, 2, 1, ids(7))
    it.counts.count(B, 2, 1, ids(1, 2))
    (first,) = it.counts.receipts(A, US)
    it.counts.count(A, 5, 4, ids(7, 7, 7, 7))
    (second,) = it.counts.receipts(A, US)
    assert read_receipt(second.data) == second
    assert (second.backbone, second.peer, second.day) == (US.node_id, A, 20_000)
    assert first.key == second.key
    assert (first.totals.n_pairs, second.totals.n_pairs) == (1, 5)
    assert it.counts.receipts(C, US) == []
    assert (A in it.counts, C in it.counts) == (True, False)


def test_what_this_process_computes_itself_is_nobodys() -> None:
    it = Accounts()
    it.counts.count(HERE, 2, 1, ids(7))
    assert HERE not in it.counts
    assert it.counts.by_period() == {}


def test_midnight_begins_a_new_receipt_and_yesterdays_can_still_be_had() -> None:
    it = Accounts()
    it.counts.count(A, 2, 1, ids(7))
    it.wall += DAY_S / 2
    it.counts.count(A, 2, 2, ids(7, 7))
    assert [(each.day, each.totals.n_pairs) for each in it.counts.receipts(A, US)] == [(20_000, 1), (20_001, 2)]
    it.wall += DAY_S
    it.counts.count(B, 2, 1, ids(1))
    assert [each.day for each in it.counts.receipts(A, US)] == [20_001], f"{KEPT_PERIODS} periods are kept"


@pytest.mark.parametrize("jump_s", [-3600.0, -30 * DAY_S, 400 * DAY_S])
def test_a_clock_that_jumps_never_makes_a_name_count_less_than_before(jump_s: float) -> None:
    it = Accounts()
    seen: dict[object, int] = {}
    for _ in range(6):
        it.counts.count(A, 2, 1, ids(7, 3))
        for receipt in it.counts.receipts(A, US):
            assert receipt.totals.n_pairs >= seen.get(receipt.key, 0)
            seen[receipt.key] = receipt.totals.n_pairs
        it.wall, jump_s = it.wall + jump_s, -jump_s
    assert sum(seen.values()) == 12, "and whoever fetched in time has lost nothing"


def test_a_crowd_begins_a_new_period_and_no_name_counts_less_than_before() -> None:
    it = Accounts()

    def crowd(letter: bytes, n: int) -> None:
        for number in range(n):
            it.counts.count(NodeId(number.to_bytes(31, "big") + letter), 2, 1, ids(0))

    it.counts.count(A, 2, 3, ids(7, 7, 7))
    crowd(b"x", MAX_PEERS)
    it.counts.count(A, 2, 1, ids(7))
    first, second = it.counts.receipts(A, US)
    assert first.key != second.key
    assert it.of(A).n_pairs == 4
    crowd(b"y", 2 * MAX_PEERS)
    assert A not in it.counts, "what is kept is bounded"
    assert sum(map(len, it.counts.by_period().values())) <= KEPT_PERIODS * MAX_PEERS
