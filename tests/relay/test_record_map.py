"""The relay's map shows what is announced, and is made no more often than it may."""

from __future__ import annotations

import json

from relay.record_map import KEPT_S, MAX_MODELS, RecordMap
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.leaderboard import Ledger
from swarm.registry.records import sign
from swarm.registry.table import RegistryTable
from swarm.wire.receipts import DAY_S, Totals, sign_receipt
from tests.sample_records import sample_announcement

A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def put(table: RegistryTable, identity: Identity, model: bytes, now: float) -> None:
    record = sample_announcement(identity.node_id, model=ModelId(model), ttl_s=60, addresses=("192.0.2.7:1",))
    table.put(sign(record, identity), owner=identity.node_id, now=now)


def test_it_shows_who_announces_what_with_the_command_to_join() -> None:
    clock, table = Clock(), RegistryTable()
    put(table, A, b"m" * 32, clock.now)
    shown = RecordMap(table, join="swarm join", now=clock, wall=lambda: 5.0)()
    assert [each["id"] for each in shown["peers"]] == [str(A.node_id)]
    assert "192.0.2.7" not in json.dumps(shown), "where a volunteer lives is nobody's business"
    assert (shown["join"], shown["at"], shown["source"]) == ("swarm join", 5, "registry")


def test_it_is_made_anew_only_after_a_while() -> None:
    clock, table = Clock(), RegistryTable()
    make = RecordMap(table, join="", now=clock)
    first = make()
    put(table, A, b"m" * 32, clock.now)
    assert make() is first
    clock.now += KEPT_S
    assert len(make()["peers"]) == 1
    clock.now += 61.0
    assert make()["peers"] == []


def test_many_models_that_nobody_serves_do_not_make_it_dear() -> None:
    clock, table = Clock(), RegistryTable()
    served = b"s" * 32
    for identity in (A, B):
        put(table, identity, served, clock.now)
    for n in range(MAX_MODELS + 10):
        other = Identity.from_seed(bytes([7]) * 31 + bytes([n]))
        put(table, other, bytes([n]) * 32, clock.now)
    shown = RecordMap(table, join="", now=clock)()
    assert len(shown["models"]) == MAX_MODELS
    assert served.hex() in {each["model_id"] for each in shown["models"]}


def test_the_leaderboard_is_of_trusted_receipts_and_shown_names() -> None:
    clock, table = Clock(), RegistryTable()
    for identity, name in ((A, "Ann"), (B, "")):
        record = sample_announcement(
            identity.node_id, model=ModelId(b"m" * 32), ttl_s=60, addresses=("192.0.2.7:1",), name=name
        )
        table.put(sign(record, identity), owner=identity.node_id, now=clock.now)
    backbone = Identity.from_seed(b"u" * 32)
    ledger = Ledger([backbone.node_id])
    totals = Totals(n_rows=4, n_pairs=8, weight=8000)
    for identity in (A, B):
        receipt = sign_receipt(backbone, peer=identity.node_id, period=bytes(8), day=20_000, totals=totals)
        ledger.present(identity.node_id, [receipt.text], 20_000)
    make = RecordMap(table, join="", now=clock, wall=lambda: 20_000.0 * DAY_S + 7, ledger=ledger)
    assert make.named() == {A.node_id}
    board = make()["leaderboard"]
    assert [(row["name"], row["points"]) for row in board["rows"]] == [("Ann", 8)]
    assert board["counted_by"] == [str(backbone.node_id)]
    assert RecordMap(table, join="", now=clock)()["leaderboard"] is None
