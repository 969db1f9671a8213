"""The registry client: several nodes asked at once, their answers merged and distrusted. In memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, cast

import pytest

from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, RemoteRefused, UserError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.registry import answers as answers_module
from swarm.registry.answers import MAX_BAD_READ, AnswerReader
from swarm.registry.client import RegistryAddress, RegistryClient, parse_registry
from swarm.registry.node import RegistryNode
from swarm.registry.records import (
    ExpertAnnouncement,
    Record,
    RecordKind,
    SignedRecord,
    Withdrawal,
    sign,
    verify,
)
from swarm.wire import messages as m
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement, sample_offer
from tests.virtual_time import now

US, A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
R1, R2, R3 = (Identity.from_seed(bytes([n]) * 32) for n in (11, 12, 13))  # registry nodes
MODEL, OTHER_MODEL = ModelId(b"m" * 32), ModelId(b"n" * 32)
NODE_TEXT = str(R1.node_id)


def announcement(identity: Identity, seq: int, *, model: ModelId = MODEL, experts: range = range(4)) -> SignedRecord:
    record = sample_announcement(
        identity.node_id, seq=seq, model=model, experts=ExpertSet.of([0], experts), addresses=("127.0.0.1:1",)
    )
    return sign(record, identity)


def offer(identity: Identity, seq: int, *, model: ModelId = MODEL) -> SignedRecord:
    record = sample_offer(identity.node_id, seq=seq, model=model, addresses=("127.0.0.1:2",))
    return sign(record, identity)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in virtual time, and close its clients in the end: one may still be dialling a node that is down."""

    async def and_close() -> None:
        Registries.made.clear()
        await main()
        for them in Registries.made:
            await them.client.close()

    virtual_time.run(and_close())


class Registries:
    """Three registry nodes at 192.0.2.1, .2 and .3, and a client of them."""

    made: ClassVar[list[Registries]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.network = FakeNetwork()
        self.tables: list[RegistryNode] = []
        self.nodes: list[FakeNode] = []
        addresses = []
        for n, identity in enumerate((R1, R2, R3), 1):
            table = RegistryNode(now=now)
            node = FakeNode(node_id=identity.node_id, answer=table.answer, observed_address=f"198.51.100.{n}:9")
            self.tables.append(table)
            self.nodes.append(node)
            self.network.nodes[f"192.0.2.{n}", 7440] = node
            addresses.append(RegistryAddress(address=(f"192.0.2.{n}", 7440), node=identity.node_id))
        self.client = RegistryClient(cast(Endpoint, FakeEndpoint(self.network, US)), addresses)

    def put(self, which: int, signed: SignedRecord, owner: Identity) -> None:
        """Let one registry node know a record."""
        self.tables[which].answer(owner.node_id, m.Announce(record=signed.to_bytes()))

    def say(self, which: int, records: Callable[[], list[bytes]]) -> None:
        """Let one registry node answer every lookup with these bytes."""
        self.nodes[which].answer = lambda asker, request: m.Records(records=tuple((1, each) for each in records()))


def seqs(records: list[ExpertAnnouncement]) -> list[tuple[NodeId, int]]:
    return [(record.node, record.seq) for record in records]


# Asking


def test_answers_are_merged_by_seq_and_ordered_by_node() -> None:
    async def main() -> None:
        them = Registries()
        them.put(0, announcement(A, 5), A)
        them.put(1, announcement(A, 7, experts=range(2)), A)
        them.put(2, announcement(A, 6), A)
        them.put(2, announcement(B, 1), B)
        found = await them.client.holders(MODEL)
        assert seqs(found) == sorted([(A.node_id, 7), (B.node_id, 1)])
        assert next(each for each in found if each.node == A.node_id).experts == ExpertSet.of([0], range(2))

    run(main)


def test_holders_and_offers_are_told_apart_and_by_model() -> None:
    async def main() -> None:
        them = Registries()
        for signed in (announcement(A, 1), offer(A, 2), offer(A, 3, model=OTHER_MODEL)):
            them.put(0, signed, A)
        assert seqs(await them.client.holders(MODEL)) == [(A.node_id, 1)]
        assert [each.seq for each in await them.client.offers(MODEL)] == [2]
        assert [each.seq for each in await them.client.offers()] == [2, 3]
        assert sorted(each.seq for each in await them.client.records()) == [1, 2, 3]

    run(main)


def test_all_nodes_are_asked_at_once() -> None:
    async def main() -> None:
        them = Registries()
        await them.client.holders(MODEL)
        started = now()
        await them.client.holders(MODEL)
        assert now() - started == pytest.approx(them.nodes[0].latency_s)
        assert [kind for kind, _ in them.network.log[-6:]] == ["request"] * 3 + ["answer"] * 3

    run(main)


@pytest.mark.parametrize("down", [0, 1, 2])
def test_one_node_that_is_down_is_tolerated(down: int) -> None:
    async def main() -> None:
        them = Registries()
        them.nodes[down].is_up = False
        assert await them.client.publish(announcement(US, 1)) == 1
        assert seqs(await them.client.holders(MODEL)) == [(US.node_id, 1)]
        assert (await them.client.observed_address()).startswith("198.51.100.")
        assert [len(table.table) for table in them.tables] == [int(which != down) for which in range(3)]

    run(main)


def test_when_none_answers_the_error_names_every_address() -> None:
    async def main() -> None:
        them = Registries()
        for node in them.nodes:
            node.is_up = False
        for ask in (
            them.client.holders(MODEL),
            them.client.publish(announcement(US, 1)),
            them.client.observed_address(),
        ):
            with pytest.raises(
                NetworkError, match=r"192\.0\.2\.1:7440, 192\.0\.2\.2:7440, 192\.0\.2\.3:7440: no answer"
            ):
                await ask

    run(main)


def test_another_node_at_the_address_is_not_believed() -> None:
    async def main() -> None:
        them = Registries()
        liar = FakeNode(node_id=A.node_id, answer=them.tables[0].answer)
        them.put(0, announcement(A, 1), A)
        for address in them.network.nodes:
            them.network.nodes[address] = liar
        with pytest.raises(NetworkError, match="another node answered"):
            await them.client.holders(MODEL)

    run(main)


def test_without_a_node_id_whoever_is_there_will_do() -> None:
    async def main() -> None:
        them = Registries()
        them.put(0, announcement(A, 1), A)
        addresses = [RegistryAddress(address=("192.0.2.1", 7440), node=None)]
        client = RegistryClient(cast(Endpoint, FakeEndpoint(them.network, US)), addresses)
        assert seqs(await client.holders(MODEL)) == [(A.node_id, 1)]

    run(main)


def test_a_lost_connection_is_dialled_again_and_a_live_one_is_not() -> None:
    async def main() -> None:
        them = Registries()
        for _ in range(3):
            await them.client.holders(MODEL)
        assert them.network.count("dial") == 3
        them.nodes[1].lose_connections()
        await them.client.holders(MODEL)
        assert them.network.count("dial", R2.node_id) == 2
        assert them.network.count("dial") == 4

    run(main)


def test_a_connection_that_turns_out_dead_is_replaced_within_the_request() -> None:
    async def main() -> None:
        them = Registries()
        them.put(0, announcement(A, 1), A)
        await them.client.holders(MODEL)
        for node in them.nodes:  # restarted: what they get on old connections ends these
            asyncio.get_running_loop().call_later(0.005, node.lose_connections)
        assert seqs(await them.client.holders(MODEL)) == [(A.node_id, 1)]
        assert them.network.count("dial") == 6

    run(main)


def test_a_new_connection_that_ends_is_not_tried_over_and_over() -> None:
    async def main() -> None:
        them = Registries()

        def close(asker: NodeId, request: m.Request) -> m.Response:
            raise RemoteProtocolError("not in this state")

        for node in them.nodes:
            node.answer = close
        for n_dials in (3, 6):
            with pytest.raises(NetworkError, match="not in this state"):
                await them.client.holders(MODEL)
            assert them.network.count("dial") == n_dials

    run(main)


def test_callers_at_the_same_time_share_one_dial() -> None:
    async def main() -> None:
        them = Registries()
        await asyncio.gather(them.client.holders(MODEL), them.client.offers(), them.client.observed_address())
        assert them.network.count("dial") == 3

    run(main)


def test_a_cancelled_caller_leaves_the_client_usable() -> None:
    async def main() -> None:
        them = Registries()
        task = asyncio.create_task(them.client.holders(MODEL))
        await asyncio.sleep(0.001)  # in the middle of dialling
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await them.client.holders(MODEL) == []

    run(main)


# Telling


def test_a_record_goes_to_every_node_and_the_highest_seq_known_comes_back() -> None:
    async def main() -> None:
        them = Registries()
        them.put(1, announcement(US, 90), US)
        assert await them.client.publish(announcement(US, 40)) == 90
        assert [table.table.highest_seq(US.node_id, RecordKind.EXPERTS, MODEL) for table in them.tables] == [40, 90, 40]

    run(main)


def test_a_refusal_of_one_node_does_not_spoil_what_another_took() -> None:
    async def main() -> None:
        them = Registries()
        them.nodes[0].answer = refuse
        assert await them.client.publish(announcement(US, 4)) == 4

    run(main)


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_refusal_is_surfaced_when_nobody_took_the_record(refusing: int) -> None:
    async def main() -> None:
        them = Registries()
        for node in them.nodes:
            node.is_up = False
        them.nodes[refusing].is_up = True
        them.nodes[refusing].answer = refuse
        with pytest.raises(RemoteRefused, match="registry is full") as caught:
            await them.client.publish(announcement(US, 4))
        assert caught.value.remote_code == m.ErrorCode.BUSY

    run(main)


def test_another_nodes_record_is_not_ours_to_publish() -> None:
    async def main() -> None:
        them = Registries()
        with pytest.raises(NetworkError, match="record from a foreign connection"):
            await them.client.publish(announcement(A, 4))

    run(main)


def refuse(asker: NodeId, request: m.Request) -> m.Response:
    raise Overloaded("registry is full")


# Hostile answers


def test_bad_records_are_skipped_and_the_good_ones_used() -> None:
    async def main() -> None:
        them = Registries()
        good = announcement(A, 1).to_bytes()
        forged = good[:64] + announcement(A, 9).payload
        flipped = bytearray(good)
        flipped[80] ^= 1
        them.say(0, lambda: [b"", b"x", forged, bytes(flipped), b"\0" * 20_000, b"\0" * 64 + b"[" * 9_000, good])
        assert seqs(await them.client.holders(MODEL)) == [(A.node_id, 1)]

    run(main)


def test_records_of_another_model_than_asked_for_do_not_count() -> None:
    async def main() -> None:
        them = Registries()
        them.say(0, lambda: [announcement(A, 9, model=OTHER_MODEL).to_bytes(), announcement(A, 1).to_bytes()])
        assert [(each.model, each.seq) for each in await them.client.holders(MODEL)] == [(MODEL, 1)]

    run(main)


def test_a_withdrawal_among_the_answers_is_nobody() -> None:
    async def main() -> None:
        them = Registries()
        gone = sign(Withdrawal(node=A.node_id, seq=9, model=MODEL, withdraws=RecordKind.EXPERTS), A)
        them.say(0, lambda: [gone.to_bytes()])
        assert await them.client.holders(MODEL) == []
        assert await them.client.offers(MODEL) == []

    run(main)


def test_an_old_record_from_one_node_cannot_hide_a_newer_one_from_another() -> None:
    """Scenario 13."""

    async def main() -> None:
        them = Registries()
        them.put(1, announcement(A, 8), A)
        them.say(0, lambda: [announcement(A, 3).to_bytes()])
        them.say(2, lambda: [announcement(A, 2).to_bytes()])
        assert seqs(await them.client.holders(MODEL)) == [(A.node_id, 8)]

    run(main)


def test_an_answer_is_read_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(answers_module, "MAX_RECORDS_READ", 3)
        told = [(1, announcement(A, seq).to_bytes()) for seq in range(5)]
        assert len(await AnswerReader().read(told)) == 3

    run(main)


def test_an_answer_with_many_bad_records_is_dropped_early_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    n_verified = 0

    def count(signed: SignedRecord) -> Record:
        nonlocal n_verified
        n_verified += 1
        return verify(signed)

    async def main() -> None:
        monkeypatch.setattr(answers_module, "verify", count)
        good = announcement(A, 1).to_bytes()
        bad = [(1, bytes([n]) * 200) for n in range(200)]
        assert len(await AnswerReader().read([(1, good), *bad[:MAX_BAD_READ]])) == 1
        before = n_verified
        assert await AnswerReader().read([(1, good), *bad]) == []
        assert n_verified - before == 1 + MAX_BAD_READ + 1

    run(main)


def test_the_memory_that_one_answer_takes_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        them = Registries()
        heavy = [announcement(Identity.from_seed(bytes([n]) * 32), 1, experts=range(200)) for n in range(50, 60)]
        them.say(0, lambda: [each.to_bytes() for each in heavy])
        assert len(await them.client.holders(MODEL)) == 10
        them.client._reader = AnswerReader(max_weight=4 * (1 + 1 + 200) + 50)
        assert len(await them.client.holders(MODEL)) == 4
        assert "too large" in caplog.text

    run(main)


def test_reading_a_long_answer_lets_the_loop_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        them = Registries()
        monkeypatch.setattr(answers_module, "READ_SLICE_S", 0.0)
        n_ticks = 0

        def tick() -> None:
            nonlocal n_ticks
            n_ticks += 1
            asyncio.get_running_loop().call_soon(tick)

        answer = m.Records(records=tuple((1, announcement(A, seq).to_bytes()) for seq in range(20)))
        tick()
        assert len(await AnswerReader().read(answer.records)) == 20
        assert n_ticks >= 20
        assert them.network.log == []

    run(main)


def test_a_registry_that_does_not_say_where_it_sees_us_is_passed_over() -> None:
    async def main() -> None:
        them = Registries()
        them.nodes[0].observed_address = ""
        assert await them.client.observed_address() == "198.51.100.2:9"
        for node in them.nodes:
            node.lose_connections()
            node.observed_address = ""
        with pytest.raises(NetworkError, match="does not say where it sees us"):
            await them.client.observed_address()

    run(main)


# parse_registry


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7440", [(("127.0.0.1", 7440), None)]),
        ("example.org:1, [2001:db8::1]:2,", [(("example.org", 1), None), (("2001:db8::1", 2), None)]),
        (f"swarm://{NODE_TEXT}@192.0.2.1:7440", [(("192.0.2.1", 7440), R1.node_id)]),
        (f"swarm://{NODE_TEXT}@[2001:db8::1]:7440/", [(("2001:db8::1", 7440), R1.node_id)]),
        ("swarm://relay.example:7440", [(("relay.example", 7440), None)]),
    ],
)
def test_a_registry_text_is_read(text: str, expected: list[tuple[tuple[str, int], NodeId | None]]) -> None:
    assert [(each.address, each.node) for each in parse_registry(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "no-port",
        "host:0",
        "host:70000",
        "http://host:7440",
        f"swarm:/{NODE_TEXT}@host:7440",
        f"swarm://{NODE_TEXT.upper()}@host:7440",
        f"{NODE_TEXT}@host:7440",
        "swarm://abc@host:7440",
        f"swarm://{NODE_TEXT}@host:7440/path",
        f"127.0.0.1:7440,swarm://{NODE_TEXT}@",
    ],
)
def test_what_is_no_registry_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_registry(text)


def test_a_registry_address_is_written_as_it_is_read() -> None:
    for text in (f"swarm://{NODE_TEXT}@192.0.2.1:7440", f"swarm://{NODE_TEXT}@[2001:db8::1]:1", "192.0.2.1:7440"):
        (found,) = parse_registry(text)
        assert str(found) == text
