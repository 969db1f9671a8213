"""Peers are asked for their receipts in turn, and what they answer may be anything."""

from __future__ import annotations

import itertools
import json
from typing import Any, cast

import pytest

from swarm.errors import ConnectionLost, RemoteRefused
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.connection import Connection
from swarm.registry.gatherer import LEAST_S, MAX_ASKED, MAX_STATUS_BYTES, Gatherer, receipts_of
from swarm.registry.leaderboard import Ledger
from swarm.wire import messages as m
from swarm.wire.receipts import DAY_S, Totals, sign_receipt
from tests import virtual_time

OURS = Identity.from_seed(b"u" * 32)
A, B = (NodeId(bytes([n]) * 32) for n in (10, 11))
TODAY = 20_000


def status(peer: NodeId, n_pairs: int) -> bytes:
    totals = Totals(n_rows=1, n_pairs=n_pairs, weight=0)
    receipt = sign_receipt(OURS, peer=peer, period=b"period 1", day=TODAY, totals=totals)
    return json.dumps({"role": "peer", "receipts": [receipt.text]}).encode()


class FakeConnection:
    """Answers with a status, or fails."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.n_asked = 0

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        assert isinstance(message, m.GetStatus)
        assert max_answer_bytes == MAX_STATUS_BYTES
        self.n_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return m.Status(data=self.answer)


class Asking:
    def __init__(self, peers: dict[NodeId, FakeConnection]) -> None:
        self.time = 100.0
        self.ledger = Ledger([OURS.node_id])
        self.gatherer = Gatherer(
            self.ledger,
            lambda: cast(dict[NodeId, Connection], peers),
            now=lambda: self.time,
            wall=lambda: TODAY * DAY_S + 5.0,
        )


def test_who_answers_well_is_counted_whatever_others_say() -> None:
    answers: list[Any] = [
        b"",
        b"{",
        b"[" * 100_000,
        b"[]",
        b'{"receipts": 7}',
        b'{"receipts": ["x"]}',
        b"\xff",
        status(A, 5),  # another peer's
        ConnectionLost("gone"),
        RemoteRefused("refused", remote_code=m.ErrorCode.NOT_ALLOWED),
        b'{"role": "peer"}',  # an older peer, or one without a name
    ]
    strange = {NodeId(bytes([50 + index]) * 32): FakeConnection(answer) for index, answer in enumerate(answers)}
    asking = Asking(strange | {B: FakeConnection(status(B, 7))})
    virtual_time.run(asking.gatherer.look())
    assert {node: each.n_pairs for node, each in asking.ledger.totals(TODAY).items()} == {B: 7}


def test_each_is_asked_at_once_and_then_now_and_then() -> None:
    peer = FakeConnection(status(A, 5))
    asking = Asking({A: peer})
    asked_at = []
    for _ in range(60):
        before = peer.n_asked
        virtual_time.run(asking.gatherer.look())
        if peer.n_asked > before:
            asked_at.append(asking.time - 100)
        asking.time += 1.0
    gaps = [after - before for before, after in itertools.pairwise(asked_at)]
    assert asked_at[0] == 0
    assert set(gaps) == {LEAST_S}


def test_a_crowd_is_asked_in_turns() -> None:
    crowd = {NodeId(number.to_bytes(32, "big")): FakeConnection(b"{}") for number in range(3 * MAX_ASKED)}
    asking = Asking(crowd)
    for look in (1, 2, 3):
        virtual_time.run(asking.gatherer.look())
        assert sum(peer.n_asked for peer in crowd.values()) == look * MAX_ASKED
    assert {peer.n_asked for peer in crowd.values()} == {1}


@pytest.mark.parametrize(("data", "found"), [(b'{"receipts": []}', []), (b"{}", None), (b"3", None)])
def test_receipts_are_found_where_there_are_some(data: bytes, found: object) -> None:
    assert receipts_of(data) == found
