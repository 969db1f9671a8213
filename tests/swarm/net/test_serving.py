"""Requests being served, without a network: a handler that fails ends neither the peer nor others' requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

import pytest

from swarm.errors import Leaving, Overloaded
from swarm.ids import ModelId, NodeId
from swarm.net.connection import Connection
from swarm.net.serving import Serving
from swarm.wire import messages as m

MODEL = ModelId(bytes(32))


class Asker:
    """Of a connection what serving uses."""

    remote = NodeId(bytes(32))

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.answers: dict[int, m.Response | m.Refusal] = {}

    async def wait_drained(self) -> None: ...

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        assert exchange not in self.answers, "answered twice"
        self.answers[exchange] = message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LookupError("still loading"), m.ErrorCode.NOT_FOUND),
        (Leaving("it rests"), m.ErrorCode.SHUTTING_DOWN),
        (Overloaded("busy", retry_after_s=1.0), m.ErrorCode.BUSY),
        (ValueError("a bug"), m.ErrorCode.INTERNAL),
        (TimeoutError("of the handler"), m.ErrorCode.INTERNAL),
    ],
)
@pytest.mark.parametrize(
    "request_", [m.GetBlock(model_id=MODEL, layer=0, expert=0), m.GetManifest(model_id=MODEL), m.GetStatus()]
)
async def test_a_handler_that_refuses_at_once_tells_the_asker_and_ends_nothing(
    request_: m.Request, error: Exception, code: m.ErrorCode
) -> None:
    def handle(connection: Connection, request: m.Request) -> Awaitable[m.Response]:
        raise error

    serving, asker = Serving(1 << 20), Asker()
    serving.add_handler([type(request_)], handle)
    await serving.open()
    serving.begin(cast(Connection, asker), 3, request_)
    for _ in range(10):
        await asyncio.sleep(0)
    answer = asker.answers[3]
    assert isinstance(answer, m.Refusal)
    assert answer.code == code
    assert not len(serving)
    await serving.wait_closed()
