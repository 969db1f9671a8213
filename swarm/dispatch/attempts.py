"""One layer's batches until each has an answer: who was asked for what, who is asked next, whose answer counts.

Pure: whoever drives it sends the orders it returns, tells it what became of them, and when. Knows nothing of connections.

    begin -> orders to send, one by one
      answered(order)        the batch is done, or its other parts are still awaited; later answers to it are ignored
      failed(order)          -> the batch asked of replicas, or later of the same peer if it was only busy, or of this
                             process's own experts, or nothing: then the layer has failed, and `error` says how
      handle_timeout(now)    -> the slow tail asked of replicas as well: hedged (within a budget), or overdue (always)

Who was asked for a batch is not asked again for it, but for those who were only busy: they are, once nobody else is left, in an
order among all layers that wait for one (`turns`). While some wait there, a peer counts as busy for whose turn it is not.

A *line* of a batch is one way to get all of it: one order for the whole, or several that split it where no single peer holds
all of its experts. The first line that is complete wins. However an answer was got, it stands for its planned batch, so the
order of sums is the plan's. The bits are those of an undisturbed layer, given equal kernels, unless a batch of partial sums was
split: then some rows' sums are grouped otherwise, (a + b) + (c + d) for ((a + b) + c) + d, and may differ in their last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm.dispatch.hedge_budget import HedgeBudget
from swarm.dispatch.plan import HERE, Batch
from swarm.dispatch.service_time import BATCH_TIMEOUT_S, ServiceTime, ServiceTimes
from swarm.dispatch.turns import Turns
from swarm.errors import DeadlineExceeded, ExpertUnavailable, Overloaded, SwarmError
from swarm.ids import NodeId

# How long a layer waits for peers that are only busy, from its beginning or the last answer of one that was. Guessed: above the
# time that several long batches take which one slow line gets in turn, and what a person waits for a prompt.
BUSY_PATIENCE_S = 30.0
LOOK_S = 1.0  # how often it then looks for a holder that has come meanwhile; guessed
# After so long a layer asks nobody else any more: each may take a whole deadline, one after another. The longest deadline.
RESEND_S = BATCH_TIMEOUT_S

FindOthers = Callable[[Batch, set[NodeId], float], list[tuple[NodeId, Batch]] | None]
"""(batch, who was asked, now) -> who else can compute it, in one or more parts; None: nobody."""


@dataclass(slots=True, eq=False)
class Order:
    """A batch, or a part of one, asked of a peer, or, with `node` HERE, of this process's own experts.

    Attributes:
        n_ahead: pairs of this layer sent to this peer up to and with this order: what its answer waits for.
        hedge_at, overdue_at, deadline: see `service_time`.
    """

    node: NodeId
    batch: Batch
    unit: _Unit
    n_ahead: int
    sent_at: float
    service: ServiceTime | None  # the peer's; None: this process's own experts
    hedge_at: float = math.inf
    overdue_at: float = math.inf
    deadline: float = math.inf
    resume_at: float = math.inf  # when to ask a peer again that was busy; not under way until then
    answered_ns: int = 0  # of `time.monotonic_ns`, for traces
    is_answered: bool = False
    is_over: bool = False  # answered, failed, or no longer of use


Line = list[Order]


@dataclass(slots=True, eq=False)
class _Unit:
    """A planned batch.

    Attributes:
        busy: orders for all of it whose peers were only busy: given out again at `resume_at`, where nobody else is left.
    """

    batch: Batch
    lines: list[Line] = field(default_factory=list)
    tried: set[NodeId] = field(default_factory=set)
    busy: list[Order] = field(default_factory=list)
    won: Line | None = None

    @property
    def is_local(self) -> bool:
        """Whether this process's own experts were asked."""
        return HERE in self.tried


@dataclass(slots=True)
class AttemptStats:
    """What failover did; counts of orders.

    Attributes:
        n_hedged: second copies for the slow tail; n_overdue: for a peer that seems to hang; n_resent: after a failure;
            n_busy: asked later of a peer that was busy, or for which others waited; n_local: computed here as the last resort.
        n_rescued: batches whose answer came from another than the planned peer.
    """

    n_hedged: int = 0
    n_overdue: int = 0
    n_resent: int = 0
    n_busy: int = 0
    n_local: int = 0
    n_rescued: int = 0


class LayerAttempts:
    """The state of one layer's dispatch.

    Attributes:
        error: why the layer has failed; None while it has not.
        turns: who waits for busy peers.
        on_turn: told when `next_deadline` has become earlier by what happened to others.
    """

    on_turn: Callable[[], None] | None = None
    _said: dict[NodeId, SwarmError] | None = None  # how busy peers put it

    def __init__(
        self,
        layer: int,
        batches: Sequence[Batch],
        *,
        times: ServiceTimes,
        find_others: FindOthers,
        is_timed: bool,
        has_local: Callable[[Batch], bool] | None = None,
        budget: HedgeBudget,
        stats: AttemptStats,
        turns: Turns | None = None,
    ) -> None:
        """Prepare.

        Args:
            turns: of all layers that ask the same peers; None: of this one alone.
            is_timed: whether to look for the slow tail; in vain where nothing has a replica.
            has_local: whether this process can compute a batch itself, as the last resort; None: it never can.
        """
        self.error: ExpertUnavailable | None = None
        self._layer = layer
        self._batches = batches
        self._units: list[_Unit] = []
        self._n_open = len(batches)
        self._times = times
        self._find_others = find_others
        self._is_timed = is_timed or has_local is not None
        self._has_local = has_local
        self._budget = budget
        self._stats = stats
        self.turns = Turns() if turns is None else turns
        self._began_at = self._patient_until = 0.0
        self._next_at = math.inf  # not later than the next thing to do

    @property
    def is_done(self) -> bool:
        """Whether every batch has its answer."""
        return self._n_open == 0

    def answers(self) -> list[Order]:
        """Return the orders whose answers make up the layer, in the plan's order; only when `is_done`."""
        assert not self._n_open
        return [order for unit in self._units for order in unit.won or ()]

    def begin(self, now: float) -> Iterator[Order]:
        """Yield an order for each batch, to be sent before the next is made: the first peer works while the others' are made."""
        self._began_at = now
        self._patient_until = now + BUSY_PATIENCE_S
        n_ahead: dict[NodeId, int] = {}
        for batch in self._batches:
            unit = _Unit(batch)
            self._units.append(unit)
            node = batch.destination
            n_ahead[node] = ahead = n_ahead.get(node, 0) + batch.n_pairs
            order = self._order(unit, node, batch, now, ahead)
            unit.lines.append([order])
            if self.turns.lines:
                yield from self._admit([order], now)
            else:
                yield order
        self._budget.earn(len(self._batches))

    def answered(self, order: Order) -> None:
        """An order has its answer; does nothing if its batch had one before."""
        order.is_answered = order.is_over = True
        unit = order.unit
        if unit.won is not None:
            return
        for line in unit.lines:
            for each in line:
                if not each.is_answered:
                    break
            else:
                unit.won = line
                self._n_open -= 1
                if line[0].node != unit.batch.destination:
                    self._stats.n_rescued += 1
                return

    def settled(self, order: Order, now: float) -> None:
        """After `answered`, if somebody waits for a busy peer: let those behind this order, and behind needless ones, ask."""
        if self.turns.taken(order, now):
            self._patient_until = now + BUSY_PATIENCE_S
        if order.unit.won is not None:
            for line in order.unit.lines:
                for each in line:
                    self.turns.leave(each, now)

    def end(self, now: float) -> None:
        """Nobody waits for this layer any more, if somebody waits for busy peers: let those behind it ask."""
        self.turns.leave_all(self, now)
        self.on_turn = None

    def failed(self, order: Order, error: SwarmError, now: float, *, retry_after_s: float | None = None) -> list[Order]:
        """Return whom to ask instead, after an order has failed with `error`.

        Args:
            retry_after_s: the peer is only busy, and may be asked again then.
        """
        turns = self.turns
        if retry_after_s is not None:
            self._said = {**(self._said or {}), order.node: error}
        elif turns.lines:
            turns.dissolve(order.node, now)
        new = self._failed(order, error, now, retry_after_s)
        if order.is_over and turns.lines:
            turns.leave(order, now)
        return new

    def _failed(self, order: Order, error: SwarmError, now: float, retry_after_s: float | None) -> list[Order]:
        order.is_over = True
        unit = order.unit
        if unit.won is not None or self.error is not None:
            return []
        line = next((line for line in unit.lines if order in line), None)
        if line is None:
            return []  # of a line that had failed before
        is_patient = now < self._patient_until
        if retry_after_s is not None and is_patient and self.turns.has(order):
            if (instead := self._elsewhere(line, order, now, free_at=now + retry_after_s)) is not None:
                return instead
            self._park(order, now + retry_after_s, now)  # it was its turn, and still is
            return []
        if retry_after_s is not None and order.batch is unit.batch:
            order.resume_at = now + retry_after_s
            unit.busy.append(order)
        if len(unit.lines) > 1:
            self._drop(line, unit, now)
            self._watch(unit.lines[-1], now)
            return []  # another is on its way
        if (instead := self._instead(order, now)) is not None:
            line.remove(order)
            line += instead
            self._stats.n_resent += len(instead)
            return self._admit(instead, now)
        if (local := self._local(unit, now)) is not None:
            self._drop(line, unit, now)
            return [local]
        if retry_after_s is not None and order.batch is not unit.batch and is_patient:
            self._park(order, now + retry_after_s, now)  # a part of a batch: its other parts are on their way
            return []
        if (again := self._once_free(unit, order.batch, now)) is not None:
            line.remove(order)
            line.append(again)
            return []
        self.error = self._unavailable(order, error)
        return []

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` must be called next, at the latest."""
        return None if math.isinf(self._next_at) else self._next_at

    def handle_timeout(self, now: float) -> list[Order]:
        """Return the orders that are due by `now`."""
        new: list[Order] = []
        if now >= self._next_at:
            for unit in self._units:
                if unit.won is None:
                    for order in [each for line in unit.lines for each in line if not each.is_over]:
                        new += self._due(unit, order, now)
            self._next_at = min(
                (
                    min(order.hedge_at, order.overdue_at, order.resume_at)
                    for unit in self._units
                    if unit.won is None
                    for line in unit.lines
                    for order in line
                    if not order.is_over
                ),
                default=math.inf,
            )
        return new

    def _due(self, unit: _Unit, order: Order, now: float) -> list[Order]:
        """Return what an order's times ask for now; each time asks once."""
        if now >= order.resume_at:
            return self._turn(unit, order, now)
        is_overdue = now >= order.overdue_at
        if not is_overdue and now < order.hedge_at:
            return []
        order.hedge_at = math.inf
        if is_overdue:
            order.overdue_at = math.inf
        if order not in unit.lines[-1]:
            return []  # a later line is under way already
        if not is_overdue and not self._budget.spend():
            return []
        line = self._instead(order, now, whole=True)
        if line is None:
            if not is_overdue:
                self._budget.give_back()
                return []
            if (local := self._local(unit, now)) is not None:
                return [local]
            if (again := self._once_free(unit, unit.batch, now)) is not None:
                unit.lines.append([again])
            return []
        unit.lines.append(line)
        if is_overdue:
            self._stats.n_overdue += len(line)
        else:
            self._stats.n_hedged += len(line)
        return self._admit(line, now)

    def _turn(self, unit: _Unit, order: Order, now: float) -> list[Order]:
        """Return the order for a busy peer, if its turn has come; else whom to ask instead, if anybody."""
        line = next((line for line in unit.lines if order in line), None)
        if line is None or order.is_over:
            return []
        if self._may_ask(order, now):
            order.resume_at = math.inf
            order.sent_at = now
            if order.service is not None:  # it may have been forgotten meanwhile
                order.service = self._times.of(order.node)
            self._time(order)
            self._stats.n_busy += 1
            return [order]
        if now >= self._patient_until:
            error = self._said.get(order.node) if self._said is not None else None
            new = self._failed(order, error or _not_its_turn(order), now, None)
            self.turns.leave(order, now)
            return new
        if (instead := self._elsewhere(line, order, now, free_at=now)) is not None:
            return instead
        if self.turns.has(order):
            self._look_later(order, now)
        else:
            self._park(order, now, now)
        return []

    def _elsewhere(self, line: Line, order: Order, now: float, *, free_at: float) -> list[Order] | None:
        """Return whom to ask instead of a busy peer for which an order is in line; None: nobody has come, it waits on.

        Args:
            free_at: when the peer may be asked again.
        """
        unit, local = order.unit, None
        instead = self._instead(order, now)
        if instead is None and (len(unit.lines) > 1 or (local := self._local(unit, now)) is None):
            return None
        order.is_over, order.resume_at = True, free_at
        self.turns.leave(order, now)
        if order.batch is unit.batch:
            unit.busy.append(order)
        if instead is None:
            assert local is not None
            self._drop(line, unit, now)
            return [local]
        line.remove(order)
        line += instead
        self._stats.n_resent += len(instead)
        return self._admit(instead, now)

    def _admit(self, orders: list[Order], now: float) -> list[Order]:
        """Return those whose turn it is, and whom to ask instead of the others' peers; the rest waits."""
        if not self.turns.lines:
            return orders
        admitted: list[Order] = []
        for order in orders:
            if order.node == HERE or self._may_ask(order, now):
                admitted.append(order)
            else:
                admitted += self._failed(order, _not_its_turn(order), now, 0.0)
        return admitted

    def _may_ask(self, order: Order, now: float) -> bool:
        size = order.batch.n_pairs + 1  # as it is charged by the peer's own line (peer/batching)
        return self.turns.may_ask(order, order.node, now, flow=self, size=size, since=self._began_at)

    def _instead(self, order: Order, now: float, *, whole: bool = False) -> list[Order] | None:
        """Return orders for others than those tried; of the `whole` batch, or of what `order` was for."""
        if now - self._began_at >= RESEND_S:
            return None
        unit = order.unit
        batch = unit.batch if whole else order.batch
        found = self._find_others(batch, unit.tried, now)
        if found is None:
            return None
        return [self._order(unit, node, part, now, part.n_pairs) for node, part in found]

    def _once_free(self, unit: _Unit, batch: Batch, now: float) -> Order | None:
        """Return an order, not under way yet, for who was only busy and is free first; None: nobody, or for too long already."""
        if not unit.busy or now >= self._patient_until:
            return None
        free = min(unit.busy, key=lambda each: max(each.resume_at, self.turns.free_at(each.node, now)))
        unit.busy.remove(free)
        order = free if batch is unit.batch else Order(free.node, batch, unit, batch.n_pairs, now, free.service)
        self._park(order, max(now, free.resume_at), now)
        return order

    def _park(self, order: Order, until: float, now: float) -> None:
        """Have an order wait for its turn at a busy peer, which does not come before `until`."""
        order.is_over = False
        order.hedge_at = order.overdue_at = math.inf
        self.turns.wait(
            order,
            order.node,
            until,
            now,
            flow=self,
            size=order.batch.n_pairs + 1,
            since=self._began_at,
            wake=functools.partial(self._look_now, order),
        )
        self._look_later(order, now)

    def _look_later(self, order: Order, now: float) -> None:
        order.resume_at = min(self.turns.look_at(order, now), now + LOOK_S, self._patient_until)
        self._next_at = min(self._next_at, order.resume_at)

    def _look_now(self, order: Order, now: float) -> None:
        """A waiting order's turn may have come, by what happened to others."""
        order.resume_at = now
        self._next_at = min(self._next_at, now)
        if self.on_turn is not None:
            self.on_turn()

    def _drop(self, line: Line, unit: _Unit, now: float) -> None:
        """A way to get a batch is none any more."""
        unit.lines.remove(line)
        if self.turns.lines:
            for order in line:
                self.turns.leave(order, now)

    def _watch(self, line: Line, now: float) -> None:
        """A later line has failed: one whose times have all asked already is overdue once more, or nobody would ask for it."""
        for order in line:
            if not order.is_over and order.node != HERE and math.isinf(min(order.overdue_at, order.resume_at)):
                order.overdue_at = now
                self._next_at = min(self._next_at, now)

    def _local(self, unit: _Unit, now: float) -> Order | None:
        """Return an order for this process's own experts, if they can and were not asked yet."""
        if unit.is_local or self._has_local is None or not self._has_local(unit.batch):
            return None
        unit.tried.add(HERE)
        self._stats.n_local += 1
        order = Order(HERE, unit.batch, unit, unit.batch.n_pairs, now, None)
        unit.lines.append([order])
        return order

    def _order(self, unit: _Unit, node: NodeId, batch: Batch, now: float, n_ahead: int) -> Order:
        unit.tried.add(node)
        order = Order(node, batch, unit, n_ahead, now, None if node == HERE else self._times.of(node))
        self._time(order)
        return order

    def _time(self, order: Order) -> None:
        if order.service is None:
            return
        hedge_s, overdue_s, deadline_s = order.service.waits_s(order.n_ahead)
        order.deadline = order.sent_at + deadline_s
        if self._is_timed:
            order.hedge_at, order.overdue_at = order.sent_at + hedge_s, order.sent_at + overdue_s
            self._next_at = min(self._next_at, order.hedge_at)

    def _unavailable(self, order: Order, error: SwarmError) -> ExpertUnavailable:
        who = "this process" if order.node == HERE else f"peer {order.node.short}"
        kind = "late" if isinstance(error, DeadlineExceeded) else "failed"
        experts = np.unique(order.batch.expert_ids).tolist()
        unavailable = ExpertUnavailable(self._layer, experts, f"{who} {kind}: {error}")
        unavailable.__cause__ = error
        return unavailable


def _not_its_turn(order: Order) -> Overloaded:
    return Overloaded(f"others of this backbone wait for peer {order.node.short}", retry_after_s=0.0)
