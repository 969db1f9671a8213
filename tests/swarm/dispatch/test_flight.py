"""A flight over futures that the test settles: what it lets out, and what it leaves behind. Its rules are test_attempts'."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarm.backbone.eager_task import EagerTask
from swarm.dispatch.attempts import AttemptStats, LayerAttempts, Order
from swarm.dispatch.flight import BUSY_RETRY_S, MOST_RETRY_S, Flight
from swarm.dispatch.hedge_budget import HedgeBudget
from swarm.dispatch.plan import plan_dispatch
from swarm.dispatch.service_time import ServiceTimes
from swarm.errors import ConnectionLost, ExpertUnavailable, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.ids import NodeId
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from tests import virtual_time
from tests.virtual_time import now

A, B, C = (NodeId(bytes([n]) * 32) for n in (10, 20, 30))
RESULT = m.Result(codec=RowCodec.F32, rows=np.zeros((1, 1), np.float32), compute_us=1, queue_us=1)


class Crew:
    """A dispatcher of one layer: experts 0 and 1 for A and B; C can stand in for both."""

    def __init__(self, *, has_others: bool = True) -> None:
        self.now: Callable[[], float] = now
        self.times = ServiceTimes()
        self.down: list[tuple[NodeId, SwarmError]] = []
        self.holders: Any = SimpleNamespace(
            mark_down=lambda *fault: self.down.append(fault), succeeded=lambda node: None
        )
        self.replicas: Any = SimpleNamespace(refresh_soon=lambda: None)
        self.sent: list[tuple[Order, asyncio.Future[m.Response]]] = []
        self.late: list[asyncio.Future[m.Response]] = []
        self.check: Callable[[Order, m.Response], m.Result] = lambda order, answer: RESULT
        plan = plan_dispatch(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32), np.array([0, 1]), [A, B])
        assert isinstance(plan, list)
        self.attempts = LayerAttempts(
            7,
            plan,
            times=self.times,
            find_others=lambda batch, tried, now: [(C, batch)] if has_others and C not in tried else None,
            is_timed=has_others,
            budget=HedgeBudget(),
            stats=AttemptStats(),
        )

    def await_late(self, future: asyncio.Future[m.Response]) -> None:
        self.late.append(future)

    def send(self, order: Order) -> asyncio.Future[m.Response]:
        future: asyncio.Future[m.Response] = asyncio.get_running_loop().create_future()
        self.sent.append((order, future))
        return future

    def of(self, node: NodeId) -> asyncio.Future[m.Response]:
        """Return the latest order's future of a node."""
        return next(future for order, future in reversed(self.sent) if order.node == node)

    def fly(self) -> asyncio.Task[list[tuple[Order, m.Result]]]:
        flight = Flight(self, self.attempts, self.send, lambda order, answer: self.check(order, answer))
        return asyncio.create_task(flight.land())


def test_it_lands_when_every_batch_has_an_answer_and_late_ones_are_handed_over() -> None:
    async def main() -> None:
        crew = Crew()
        task = crew.fly()
        await asyncio.sleep(0)
        crew.of(A).set_result(RESULT)
        await asyncio.sleep(2.0)  # B is overdue
        assert [order.node for order, _ in crew.sent] == [A, B, C]
        crew.of(C).set_result(RESULT)
        assert [order.node for order, _ in await task] == [A, C]
        assert crew.late == [crew.of(B)]
        assert crew.times.of(B).n_outstanding == 1
        crew.of(B).set_result(RESULT)
        await asyncio.sleep(0)
        assert crew.times.of(B).pair_s(1) is not None, "a late answer is a measurement"

    virtual_time.run(main())


def test_a_late_answer_keeps_neither_the_layers_rows_nor_its_answers() -> None:
    async def main() -> None:
        crew = Crew()
        kept: list[weakref.ref[object]] = []

        def check(order: Order, answer: m.Response) -> m.Result:
            rows = np.zeros((1, 1), np.float32)
            kept.append(weakref.ref(rows))
            return m.Result(codec=RowCodec.F32, rows=rows, compute_us=1, queue_us=1)

        def fly() -> asyncio.Task[list[tuple[Order, m.Result]]]:
            x = np.zeros((1, 1), np.float32)
            kept.append(weakref.ref(x))

            def send(order: Order) -> asyncio.Future[m.Response]:
                assert x.size
                return crew.send(order)

            return asyncio.create_task(Flight(crew, crew.attempts, send, check).land())

        task = fly()
        await asyncio.sleep(0)
        crew.of(A).set_result(RESULT)
        await asyncio.sleep(2.0)  # B is overdue
        crew.of(C).set_result(RESULT)
        await task
        del task
        await asyncio.sleep(0)
        assert crew.late == [crew.of(B)]
        assert len(kept) == 3
        assert [each() is None for each in kept] == [True] * 3
        crew.of(B).set_result(RESULT)
        await asyncio.sleep(0)
        assert crew.times.of(B).pair_s(1) is not None

    virtual_time.run(main())


def test_nor_does_it_keep_what_an_eager_waiter_made_of_them() -> None:
    async def main() -> None:
        crew = Crew()
        kept: list[weakref.ref[object]] = []

        async def layer() -> np.ndarray:
            out = np.zeros((1, 1), np.float32)
            kept.append(weakref.ref(out))
            await Flight(crew, crew.attempts, crew.send, lambda order, answer: RESULT).land()
            return out

        EagerTask(layer(), lambda task: None).start()
        gc.disable()  # a cycle, too, would keep a long prompt's rows
        try:
            crew.of(A).set_result(RESULT)
            await asyncio.sleep(2.0)  # B is overdue
            crew.of(C).set_result(RESULT)
            for _ in range(3):
                await asyncio.sleep(0)
            assert crew.late == [crew.of(B)]
            assert kept[0]() is None
        finally:
            gc.enable()

    virtual_time.run(main())


def test_a_late_failure_is_still_its_peers() -> None:
    async def main() -> None:
        crew = Crew()
        task = crew.fly()
        await asyncio.sleep(1.0)
        for future in (crew.of(A), crew.of(C)):
            future.set_result(RESULT)
        await asyncio.sleep(0)
        for order, future in crew.sent:
            if order.node == C and not future.done():
                future.set_result(RESULT)
        await task
        lost = ConnectionLost("silent for 3.0 s")
        crew.of(B).set_exception(lost)
        await asyncio.sleep(0)
        assert crew.down == [(B, lost)]

    virtual_time.run(main())


def test_a_wrong_answer_is_a_failure_of_the_peer() -> None:
    async def main() -> None:
        crew = Crew(has_others=False)
        wrong = RemoteProtocolError("wrong answer")

        def refuse(order: Order, answer: m.Response) -> m.Result:
            raise wrong

        crew.check = refuse
        task = crew.fly()
        await asyncio.sleep(0)
        crew.of(A).set_result(RESULT)
        with pytest.raises(ExpertUnavailable):
            await task
        assert crew.down == [(A, wrong)]
        assert crew.of(B).cancelled(), "nothing is left behind"

    virtual_time.run(main())


def test_a_mistake_of_ours_reaches_whoever_waits() -> None:
    async def main() -> None:
        crew = Crew()
        task = crew.fly()
        await asyncio.sleep(0)
        crew.of(A).set_exception(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await task
        assert crew.of(B).cancelled()
        assert crew.down == []

    virtual_time.run(main())


@pytest.mark.parametrize(("said_s", "waited_s"), [(None, BUSY_RETRY_S), (0.5, 0.5), (3600.0, MOST_RETRY_S)])
def test_a_busy_peer_is_asked_again_when_it_said_within_reason(said_s: float | None, waited_s: float) -> None:
    async def main() -> None:
        crew = Crew(has_others=False)
        task = crew.fly()
        await asyncio.sleep(0)
        began = now()
        crew.of(A).set_exception(RemoteRefused("full", remote_code=m.ErrorCode.BUSY, retry_after_s=said_s))
        await asyncio.sleep(waited_s - 0.001)
        assert len(crew.sent) == 2
        await asyncio.sleep(0.002)
        assert [order.node for order, _ in crew.sent] == [A, B, A]
        assert now() - began == pytest.approx(waited_s, abs=0.002)
        assert crew.down == []
        for _, future in crew.sent[1:]:
            future.set_result(RESULT)
        await task

    virtual_time.run(main())


@pytest.mark.parametrize("fails_in", ["send", "meanwhile"])
def test_a_mistake_of_ours_before_the_wait_asks_nobody_else(fails_in: str) -> None:
    async def main() -> None:
        crew = Crew()
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        lost = ConnectionLost("the connection is not open")

        def fail() -> None:
            raise ZeroDivisionError

        def send(order: Order) -> asyncio.Future[m.Response]:
            future = crew.send(order)
            if order.node == A:
                future.set_exception(lost)
            elif fails_in == "send":
                fail()
            return future

        with pytest.raises(ZeroDivisionError):
            await Flight(crew, crew.attempts, send, lambda order, answer: RESULT, fail).land()
        await asyncio.sleep(0)
        assert [order.node for order, _ in crew.sent] == [A, B], "nothing was sent to C for a layer that has failed"
        assert crew.down == [(A, lost)], "its failure is A's all the same"
        assert not complaints

    virtual_time.run(main())
