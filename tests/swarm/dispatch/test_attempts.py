"""One layer's attempts: who is asked when, whose answer counts, and how a layer fails; in the test's own clock."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.dispatch.attempts import (
    BUSY_PATIENCE_S,
    LOOK_S,
    RESEND_S,
    AttemptStats,
    LayerAttempts,
    Order,
)
from swarm.dispatch.hedge_budget import HEDGE_BURST, HedgeBudget
from swarm.dispatch.plan import HERE, Batch, part_of, plan_dispatch
from swarm.dispatch.service_time import ServiceTimes
from swarm.dispatch.turns import Turns
from swarm.errors import ConnectionLost, DeadlineExceeded, Overloaded
from swarm.ids import NodeId

A, B, C = (NodeId(bytes([n]) * 32) for n in (10, 20, 30))
NODES = (A, B, C)
NOW = 1000.0
SERVICE_S = 0.010  # of every peer, so often measured that it is hedged at the floor or little above
LOST = ConnectionLost("silent for 3.0 s")
BUSY = Overloaded("full")


class Case:
    """Two batches, for A and for B; C holds all, A and B hold each other's as `others` says."""

    def __init__(
        self,
        *,
        others: dict[NodeId, list[NodeId]] | None,
        has_local: bool = False,
        split: bool = False,
        turns: Turns | None = None,
        now: float = NOW,
    ) -> None:
        self.times = ServiceTimes()
        for node in NODES:
            for key in range(200):
                self.times.of(node).sent(key, NOW)
                self.times.of(node).answered(key, 2, NOW + SERVICE_S)
        ids = np.array([[0, 1, 2, 3]], np.int32)
        plan = plan_dispatch(ids, np.ones(ids.shape, np.float32), np.array([0, 0, 1, 1]), NODES)
        assert isinstance(plan, list)
        self.batches = plan
        self.others = others
        self.split = split
        self.budget = HedgeBudget()
        self.stats = AttemptStats()
        self.attempts = LayerAttempts(
            7,
            plan,
            times=self.times,
            find_others=self._find,
            is_timed=others is not None,
            has_local=(lambda batch: True) if has_local else None,
            budget=self.budget,
            stats=self.stats,
            turns=turns,
        )
        self.n_told = 0  # times that others' turns have changed something for this layer
        self.attempts.on_turn = self._told
        self.orders = list(self.attempts.begin(now))

    def _told(self) -> None:
        self.n_told += 1

    def _find(self, batch: Batch, tried: set[NodeId], now: float) -> list[tuple[NodeId, Batch]] | None:
        if self.others is None:
            return None
        left = [node for node in self.others[batch.destination] if node not in tried]
        if self.split and len(left) >= 2 and batch.n_pairs == 2:
            first = np.array([True, False])
            return [(left[0], part_of(batch, first)), (left[1], part_of(batch, ~first))]
        return [(left[0], batch)] if left else None

    def wait(self) -> tuple[float, list[Order]]:
        """Let time pass until something is due; return when, and what."""
        at = self.attempts.next_deadline()
        assert at is not None
        return at, self.attempts.handle_timeout(at)

    def wait_for_orders(self) -> tuple[float, list[Order]]:
        """Let time pass until something is sent; return when, and what."""
        new: list[Order] = []
        while not new:
            at, new = self.wait()
        return at, new

    @property
    def winners(self) -> list[NodeId]:
        return [order.node for order in self.attempts.answers()]


def nodes(orders: list[Order]) -> list[NodeId]:
    return [order.node for order in orders]


BOTH = {A: [B, C], B: [A, C]}


def test_the_first_order_is_there_before_the_others_are_made() -> None:
    case = Case(others=BOTH)
    again = LayerAttempts(
        7,
        [order.batch for order in case.orders],
        times=case.times,
        find_others=case._find,
        is_timed=True,
        budget=case.budget,
        stats=case.stats,
    )
    orders = again.begin(2000.0)
    assert next(orders).node == A
    assert [unit.batch.destination for unit in again._units] == [A]
    assert not again.is_done
    assert nodes(list(orders)) == [B]


def test_an_undisturbed_layer_asks_each_destination_once() -> None:
    case = Case(others=BOTH)
    assert nodes(case.orders) == [A, B]
    for order in case.orders:
        assert not case.attempts.is_done
        case.attempts.answered(order)
    assert case.attempts.is_done
    assert case.winners == [A, B]
    assert case.stats == AttemptStats()


def test_without_replicas_nothing_is_timed() -> None:
    assert Case(others=None).attempts.next_deadline() is None


def test_the_slow_tail_is_hedged_and_the_first_answer_wins() -> None:
    case = Case(others=BOTH)
    case.attempts.answered(case.orders[0])
    at, hedges = case.wait()
    assert SERVICE_S < at - NOW < 0.1
    assert nodes(hedges) == [A], "an other holder of B's experts"
    case.attempts.answered(hedges[0])
    assert case.attempts.is_done
    assert case.winners == [A, A]
    case.attempts.answered(case.orders[1])  # too late
    assert case.winners == [A, A]
    assert (case.stats.n_hedged, case.stats.n_overdue, case.stats.n_rescued) == (1, 0, 1)


def test_the_planned_peer_may_still_win_after_a_hedge() -> None:
    case = Case(others=BOTH)
    case.attempts.answered(case.orders[0])
    case.wait()
    case.attempts.answered(case.orders[1])
    assert case.winners == [A, B]
    assert case.stats.n_rescued == 0


def test_a_hedge_that_is_late_itself_goes_to_the_next_and_then_nobody_is_left() -> None:
    case = Case(others=BOTH)
    case.attempts.answered(case.orders[0])
    asked = []
    while case.attempts.next_deadline() is not None:
        _, new = case.wait()
        asked += nodes(new)
    assert asked == [A, C]
    assert case.attempts.error is None, "whoever answers last is still awaited"


def test_a_spent_budget_ends_hedging_but_not_the_rescue_from_a_hang() -> None:
    case = Case(others=BOTH)
    while case.budget.spend():
        pass
    at, new = case.wait()
    assert new == []
    at, new = case.wait()
    assert nodes(new) == [B, A]
    assert 0.2 < at - NOW < 1.0
    assert (case.stats.n_hedged, case.stats.n_overdue) == (0, 2)


def test_who_was_hedged_is_not_hedged_again_while_the_copy_has_its_own_time() -> None:
    case = Case(others=BOTH)
    case.attempts.answered(case.orders[0])
    while case.budget.spend():
        pass
    case.budget.earn(20)  # for one hedge
    hedged_at, [hedge] = case.wait()
    new: list[Order] = []
    at = hedged_at
    while not new:
        at, new = case.wait()
    assert nodes(new) == [C]
    assert at == hedge.overdue_at or at - hedge.sent_at >= 0.25


def test_a_failed_batch_goes_to_a_replica_at_once() -> None:
    case = Case(others=BOTH)
    [instead] = case.attempts.failed(case.orders[1], LOST, NOW + 0.001)
    assert instead.node == A
    assert instead.batch is case.batches[1]
    case.attempts.answered(instead)
    case.attempts.answered(case.orders[0])
    assert case.winners == [A, A]
    assert case.stats.n_resent == 1


def test_all_holders_failing_is_an_error_with_layer_and_experts() -> None:
    case = Case(others={A: [C], B: [C]})
    [instead] = case.attempts.failed(case.orders[1], LOST, NOW)
    assert case.attempts.failed(instead, DeadlineExceeded("no answer within the deadline"), NOW) == []
    error = case.attempts.error
    assert error is not None
    assert (error.layer, error.experts) == (7, (2, 3))
    assert f"peer {C.short} late" in str(error)


def test_one_line_failing_is_nothing_while_another_is_on_its_way() -> None:
    case = Case(others={A: [C], B: [C]})
    case.attempts.answered(case.orders[0])
    _, [hedge] = case.wait()
    assert case.attempts.failed(case.orders[1], LOST, NOW + 1) == []
    assert case.attempts.error is None
    case.attempts.answered(hedge)
    assert case.winners == [A, C]


def test_a_split_rescue_counts_only_when_it_is_whole() -> None:
    case = Case(others=BOTH, split=True)
    case.attempts.answered(case.orders[0])
    parts = case.attempts.failed(case.orders[1], LOST, NOW)
    assert nodes(parts) == [A, C]
    case.attempts.answered(parts[0])
    assert not case.attempts.is_done
    case.attempts.answered(parts[1])
    assert case.winners == [A, A, C]
    assert [order.batch.expert_ids.tolist() for order in case.attempts.answers()] == [[0, 1], [2], [3]]


def test_halves_of_different_lines_do_not_make_a_whole() -> None:
    """The hedge's first half and the planned peer's whole: the second counts, by itself."""
    case = Case(others=BOTH, split=True)
    case.attempts.answered(case.orders[0])
    _, parts = case.wait()
    assert nodes(parts) == [A, C]
    case.attempts.answered(parts[0])
    assert not case.attempts.is_done
    case.attempts.answered(case.orders[1])
    assert case.winners == [A, B]


def test_a_busy_peer_is_asked_again_when_it_said_if_nobody_else_can() -> None:
    case = Case(others={A: [], B: []})
    busy = Overloaded("full")
    assert case.attempts.failed(case.orders[1], busy, NOW, retry_after_s=0.2) == []
    case.attempts.answered(case.orders[0])
    case.attempts.handle_timeout(NOW + 0.199)
    again = case.attempts.handle_timeout(NOW + 0.2)
    assert again == [case.orders[1]]
    assert again[0].sent_at == NOW + 0.2
    assert case.stats.n_busy == 1
    assert case.attempts.failed(again[0], busy, NOW + BUSY_PATIENCE_S, retry_after_s=0.2) == []
    assert case.attempts.error is not None, "but not for ever"


def test_a_busy_peers_batch_goes_to_a_replica_first() -> None:
    case = Case(others=BOTH)
    assert nodes(case.attempts.failed(case.orders[1], Overloaded("full"), NOW, retry_after_s=0.2)) == [A]


def test_who_was_only_busy_is_asked_again_once_the_replica_that_stood_in_is_lost() -> None:
    case = Case(others={A: [], B: [C]})
    case.attempts.answered(case.orders[0])
    [instead] = case.attempts.failed(case.orders[1], BUSY, NOW, retry_after_s=0.02)
    assert case.attempts.failed(instead, LOST, NOW + 0.015) == []
    assert case.attempts.error is None
    at, [again] = case.wait_for_orders()
    assert (again.node, at) == (B, NOW + 0.02)
    case.attempts.answered(again)
    assert case.winners == [A, B]
    assert (case.stats.n_busy, case.stats.n_rescued) == (1, 0)


def test_of_several_that_are_only_busy_the_first_to_be_free_is_asked() -> None:
    case = Case(others={A: [], B: [C]})
    case.attempts.answered(case.orders[0])
    [instead] = case.attempts.failed(case.orders[1], BUSY, NOW, retry_after_s=0.02)
    assert case.attempts.failed(instead, BUSY, NOW + 0.005, retry_after_s=5.0) == []
    at, [again] = case.wait_for_orders()
    assert (again.node, at) == (B, NOW + 0.02)
    case.attempts.failed(again, LOST, NOW + 0.03)
    at, [last] = case.wait_for_orders()
    assert (last.node, at) == (C, NOW + 5.005)
    case.attempts.failed(last, LOST, NOW + 5.01)
    assert case.attempts.error is not None


def test_a_replica_that_was_busy_when_a_hang_was_hedged_is_asked_again_when_it_is_overdue() -> None:
    case = Case(others={A: [], B: [C]})
    case.attempts.answered(case.orders[0])
    hedged_at, [hedge] = case.wait()
    assert case.attempts.failed(hedge, BUSY, hedged_at + 0.001, retry_after_s=0.02) == []
    at, new = case.wait_for_orders()
    assert nodes(new) == [C]
    assert 0.25 <= at - NOW < 0.5, "long before the session calls the peer lost"
    case.attempts.answered(new[0])
    assert case.winners == [A, C]


def test_the_wait_for_who_is_busy_ends_with_the_layers_patience_also_beside_a_hang() -> None:
    case = Case(others={A: [], B: [C]})
    case.attempts.answered(case.orders[0])
    last = NOW
    while case.attempts.next_deadline() is not None:
        last, new = case.wait()
        for order in new:
            assert order.node == C
            case.attempts.failed(order, BUSY, last, retry_after_s=0.5)
    assert BUSY_PATIENCE_S - 1 < last - NOW < BUSY_PATIENCE_S + 1
    case.attempts.failed(case.orders[1], LOST, last)
    assert case.attempts.error is not None


def test_who_is_busy_for_all_of_a_batch_stands_in_for_a_part_that_is_lost() -> None:
    case = Case(others={A: [], B: [A, C]}, split=True)
    case.attempts.answered(case.orders[0])
    parts = case.attempts.failed(case.orders[1], BUSY, NOW, retry_after_s=0.02)
    assert nodes(parts) == [A, C]
    case.attempts.answered(parts[0])
    case.attempts.failed(parts[1], LOST, NOW + 0.001)
    _, [again] = case.wait_for_orders()
    assert (again.node, again.batch.expert_ids.tolist()) == (B, [3])
    case.attempts.answered(again)
    assert case.winners == [A, A, B]


def test_when_a_copy_for_a_hang_fails_the_hang_is_looked_at_again() -> None:
    case = Case(others={A: [], B: [C]})
    case.attempts.answered(case.orders[0])
    while case.budget.spend():
        pass
    at, new = case.wait_for_orders()
    assert nodes(new) == [C]
    assert case.others is not None
    case.others[B].append(A)  # has come meanwhile
    assert case.attempts.failed(new[0], LOST, at + 0.1) == []
    due = case.attempts.next_deadline()
    assert due is not None
    assert due <= at + 0.1
    assert nodes(case.attempts.handle_timeout(at + 0.1)) == [A]


def test_a_hedge_for_which_there_is_nobody_costs_nothing() -> None:
    case = Case(others={A: [], B: []})
    for _ in range(2):  # the hedge's time, and overdue
        case.wait()
    assert case.stats.n_hedged == 0
    assert sum(case.budget.spend() for _ in range(100)) == HEDGE_BURST


def test_a_layer_asks_nobody_else_after_the_longest_deadline() -> None:
    case = Case(others=BOTH)
    assert nodes(case.attempts.failed(case.orders[0], LOST, NOW + RESEND_S - 1)) == [B]
    assert case.attempts.failed(case.orders[1], LOST, NOW + RESEND_S) == []
    assert case.attempts.error is not None


@pytest.mark.parametrize("others", [None, {A: [], B: []}])
def test_own_experts_are_the_last_resort(others: dict[NodeId, list[NodeId]] | None) -> None:
    case = Case(others=others, has_local=True)
    [local] = case.attempts.failed(case.orders[1], LOST, NOW)
    assert local.node == HERE
    case.attempts.answered(local)
    case.attempts.answered(case.orders[0])
    assert case.winners == [A, HERE]
    assert case.stats.n_local == 1


def test_own_experts_step_in_for_a_hang_only_when_it_is_overdue() -> None:
    case = Case(others={A: [], B: []}, has_local=True)
    at, new = case.wait()
    assert new == []
    at, new = case.wait()
    assert nodes(new) == [HERE, HERE]
    assert at - NOW > 0.2


def test_own_experts_that_fail_leave_the_layer_to_a_peer_that_is_only_slow() -> None:
    case = Case(others={A: [], B: []}, has_local=True)
    case.attempts.answered(case.orders[0])
    _, new = case.wait_for_orders()
    assert case.attempts.failed(new[0], LOST, NOW + 1) == []
    assert case.attempts.error is None
    case.attempts.answered(case.orders[1])
    assert case.winners == [A, B]


def test_own_experts_that_fail_end_the_layer() -> None:
    case = Case(others=None, has_local=True)
    [local] = case.attempts.failed(case.orders[1], LOST, NOW)
    assert case.attempts.failed(local, LOST, NOW) == []
    assert case.attempts.error is not None
    assert "this process failed" in str(case.attempts.error)


# Several layers, and a peer that is only busy


NOBODY_ELSE: dict[NodeId, list[NodeId]] = {A: [], B: []}


def waiting_for_b(turns: Turns, hint_s: float = 0.5) -> Case:
    """Return a layer that B has refused, and that nobody else can help."""
    case = Case(others={A: [], B: []}, turns=turns)
    assert nodes(case.orders) == ([A, B] if B not in turns.lines else [A])
    if len(case.orders) == 2:
        assert case.attempts.failed(case.orders[1], BUSY, NOW, retry_after_s=hint_s) == []
    case.attempts.answered(case.orders[0])
    return case


def answer(case: Case, order: Order, now: float) -> None:
    case.attempts.answered(order)
    case.attempts.settled(order, now)


def test_a_layer_does_not_ask_a_peer_for_which_another_waits_until_that_is_taken() -> None:
    turns = Turns()
    first, second = waiting_for_b(turns), waiting_for_b(turns)
    assert second.orders == [second.orders[0]], "A alone is asked: nobody waits for it"
    assert second.attempts.handle_timeout(NOW + 0.49) == []
    [again] = first.attempts.handle_timeout(NOW + 0.5)
    assert second.attempts.handle_timeout(NOW + 0.51) == []
    answer(first, again, NOW + 0.6)
    assert first.winners == [A, B]
    assert second.n_told
    assert second.attempts.next_deadline() == NOW + 0.6
    [order] = second.attempts.handle_timeout(NOW + 0.6)
    assert (order.node, order.sent_at, second.stats.n_busy) == (B, NOW + 0.6, 1)
    answer(second, order, NOW + 0.7)
    assert not turns.lines


def test_who_is_refused_at_its_turn_stays_first() -> None:
    turns = Turns()
    first, second = waiting_for_b(turns), waiting_for_b(turns)
    [again] = first.attempts.handle_timeout(NOW + 0.5)
    assert first.attempts.failed(again, BUSY, NOW + 0.6, retry_after_s=0.3) == []
    assert second.attempts.handle_timeout(NOW + 0.7) == []
    assert first.attempts.handle_timeout(NOW + 0.89) == []
    assert first.attempts.handle_timeout(NOW + 0.9) == [again]


def test_behind_a_line_a_batch_goes_to_a_replica_at_once() -> None:
    turns = Turns()
    waiting_for_b(turns, hint_s=5.0)
    case = Case(others={A: [], B: [C]}, turns=turns)
    assert nodes(case.orders) == [A, C]


def test_behind_a_line_own_experts_step_in_at_once() -> None:
    turns = Turns()
    waiting_for_b(turns, hint_s=5.0)
    case = Case(others={A: [], B: []}, has_local=True, turns=turns)
    assert nodes(case.orders) == [A, HERE]


def test_a_wait_in_line_ends_with_the_layers_patience_and_says_why() -> None:
    turns = Turns()
    first, second = waiting_for_b(turns), waiting_for_b(turns)
    now = NOW
    while first.attempts.error is None:
        now, new = first.wait()
        for order in new:
            first.attempts.failed(order, BUSY, now + 0.001, retry_after_s=5.0)
    assert now == NOW + BUSY_PATIENCE_S
    assert "full" in str(first.attempts.error)
    first.attempts.end(now)
    [last] = second.attempts.handle_timeout(now)  # its turn, and its last
    assert second.attempts.failed(last, BUSY, now + 0.1, retry_after_s=0.1) == []
    assert second.attempts.error is not None
    second.attempts.end(now)
    assert not turns.lines


def test_one_that_never_asked_gives_up_with_its_patience_too() -> None:
    turns = Turns()
    first = waiting_for_b(turns)
    second = Case(others={A: [], B: []}, turns=turns, now=NOW + 0.1)
    [again] = first.attempts.handle_timeout(NOW + 0.5)
    first.attempts.failed(again, BUSY, NOW + 0.6, retry_after_s=100.0)
    while second.attempts.error is None:
        now, new = second.wait()
        assert not new
    assert now == NOW + 0.1 + BUSY_PATIENCE_S
    assert "others of this backbone wait" in str(second.attempts.error)


def test_patience_begins_anew_with_each_answer_of_a_busy_peer() -> None:
    case = Case(others={A: [], B: []})
    busy = [case.attempts.failed(order, BUSY, NOW, retry_after_s=1.0) for order in case.orders]
    assert busy == [[], []]
    first, second = case.orders
    assert case.attempts.handle_timeout(NOW + 1) == [first, second]
    assert case.attempts.failed(second, BUSY, NOW + 1, retry_after_s=1.0) == []
    answer(case, first, NOW + 20)
    while case.attempts.error is None:
        now, new = case.wait()
        for order in new:
            case.attempts.failed(order, BUSY, now, retry_after_s=5.0)
    assert now == NOW + 20 + BUSY_PATIENCE_S


def test_when_the_first_in_line_is_cancelled_the_next_asks() -> None:
    turns = Turns()
    first, second = waiting_for_b(turns, hint_s=5.0), waiting_for_b(turns)
    first.attempts.end(NOW + 0.1)
    assert second.n_told
    assert nodes(second.attempts.handle_timeout(NOW + 0.1)) == [B]


def test_a_holder_that_comes_while_a_layer_waits_is_asked() -> None:
    turns = Turns()
    waiting_for_b(turns, hint_s=5.0)
    case = waiting_for_b(turns)
    assert len(turns.lines[B].places) == 2
    assert case.others is not None
    case.others[B].append(C)
    at, new = case.wait_for_orders()
    assert nodes(new) == [C]
    assert at <= NOW + LOOK_S
    assert len(turns.lines[B].places) == 1, "it waits there no more"
    answer(case, new[0], at)
    assert case.winners == [A, C]


def test_when_that_holder_is_lost_the_busy_peer_is_asked_when_it_said() -> None:
    turns = Turns()
    case = waiting_for_b(turns)
    [again] = case.attempts.handle_timeout(NOW + 0.5)
    assert case.others is not None
    case.others[B].append(C)
    [instead] = case.attempts.failed(again, BUSY, NOW + 0.6, retry_after_s=0.3)
    assert instead.node == C
    assert not turns.lines
    assert case.attempts.failed(instead, LOST, NOW + 0.7) == []
    assert case.attempts.handle_timeout(NOW + 0.8) == []
    assert case.attempts.handle_timeout(NOW + 0.9) == [again]


def test_who_passes_a_line_and_is_refused_has_its_own_experts_asked() -> None:
    turns = Turns()
    turns.wait("huge", B, NOW + 5, NOW, flow="huge", size=1000, since=NOW, wake=lambda now: None)
    case = Case(others={A: [], B: []}, has_local=True, turns=turns)
    assert nodes(case.orders) == [A, B], "smaller than what waits"
    assert nodes(case.attempts.failed(case.orders[1], BUSY, NOW + 0.01, retry_after_s=0.2)) == [HERE]
    turns.leave("huge", NOW + 0.02)
    assert not turns.lines


def test_when_a_peer_is_lost_those_who_wait_for_it_need_not_wait_for_each_other() -> None:
    turns = Turns()
    cases = [waiting_for_b(turns) for _ in range(3)]
    [again] = cases[0].attempts.handle_timeout(NOW + 0.5)
    cases[0].attempts.failed(again, LOST, NOW + 0.6)
    assert cases[0].attempts.error is not None
    assert not turns.lines
    for case in cases[1:]:
        assert case.n_told
        assert nodes(case.attempts.handle_timeout(NOW + 0.6)) == [B]


def test_a_batch_that_another_has_answered_holds_no_place() -> None:
    turns = Turns()
    case = Case(others={A: [], B: [C]}, turns=turns)
    hedged_at, [hedge] = case.wait()
    assert case.attempts.failed(hedge, BUSY, hedged_at + 0.001, retry_after_s=5.0) == []
    case.attempts.answered(case.orders[0])
    case.wait_for_orders()  # B is overdue: C, in a line
    turns.wait("other", C, NOW + 9, NOW + 2, flow="other", size=1000, since=NOW, wake=lambda now: None)
    assert case.orders[1].batch is case.batches[1]
    answer(case, case.orders[1], NOW + 3)
    assert case.winners == [A, B]
    assert turns.has("other")
    turns.leave("other", NOW + 3)
    assert not turns.lines


def test_a_part_that_is_needless_leaves_its_line() -> None:
    turns = Turns()
    turns.wait("huge", C, NOW + 5, NOW, flow="huge", size=1000, since=NOW, wake=lambda now: None)
    case = Case(others={A: [], B: [A, C]}, split=True, has_local=True, turns=turns)
    parts = case.attempts.failed(case.orders[1], LOST, NOW)
    assert nodes(parts) == [A, C]
    assert turns.has(parts[1])
    assert nodes(case.attempts.failed(parts[0], LOST, NOW + 0.01)) == [HERE]
    assert not turns.has(parts[1])


def test_the_parts_of_a_split_batch_leave_their_lines_when_it_is_given_up() -> None:
    turns = Turns()
    case = Case(others={A: [], B: [A, C]}, split=True, turns=turns)
    case.attempts.answered(case.orders[0])
    at, parts = case.wait()  # a hedge, in parts
    assert nodes(parts) == [A, C]
    case.attempts.failed(parts[0], BUSY, at, retry_after_s=1.0)
    case.attempts.failed(parts[1], LOST, at)
    assert not turns.lines
    answer(case, case.orders[1], at + 1)
    assert case.winners == [A, B]
