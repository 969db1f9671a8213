"""An exchange with oneself, in memory: whole, and leaving nothing behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from swarm.identity import Identity
from swarm.net.certificate import make_certificate
from swarm.net.quic_driver import QuicDriver
from swarm.net.rehearsal import Rehearsal
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from tests.swarm.net.test_quic_driver import drivers

IDENTITY = Identity.from_seed(b"rehears" + bytes(25))
ROWS = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(1, -1)
REQUEST = m.Dispatch(
    model_tag=bytes(8),
    layer=3,
    rows_codec=RowCodec.Q8_0,
    result_codec=RowCodec.F16,
    row_counts=np.array([2], np.uint8),
    expert_ids=np.array([5, 7], np.uint16),
    weights=np.array([0.5, 0.25], np.float32),
    rows=ROWS,
)
ANSWER = m.Result(codec=RowCodec.F16, rows=ROWS, compute_us=1, queue_us=2)


@pytest.fixture(params=list(drivers()), ids=lambda kind: kind.__name__)
async def rehearsal(request: pytest.FixtureRequest) -> Rehearsal:
    return await opened(request.param)


async def opened(kind: type[QuicDriver]) -> Rehearsal:
    certificate = make_certificate(IDENTITY)
    configurations = {each: kind.configuration(IDENTITY, certificate, is_client=each) for each in (True, False)}
    rehearsal = Rehearsal(kind, configurations, IDENTITY)
    await ticks()
    return rehearsal


async def ticks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_exchange_is_over_when_the_call_returns(rehearsal: Rehearsal) -> None:
    for _ in range(3):
        assert rehearsal.run(REQUEST, ANSWER)
        await ticks()
    rehearsal.close()


async def test_before_the_handshake_nothing_is_done() -> None:
    kind = next(drivers())
    certificate = make_certificate(IDENTITY)
    configurations = {each: kind.configuration(IDENTITY, certificate, is_client=each) for each in (True, False)}
    rehearsal = Rehearsal(kind, configurations, IDENTITY)
    assert not rehearsal.run(REQUEST, ANSWER)
    rehearsal.close()
    await ticks()
    assert not rehearsal.run(REQUEST, ANSWER), "nor after the end"
