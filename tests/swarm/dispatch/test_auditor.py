"""Audits over a dispatcher and peers in memory that compute with numpy, some of them wrongly, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from swarm.dispatch.audit_standing import CAUGHT_S, Verdict
from swarm.dispatch.auditor import Auditor
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.holders import Holders, OwnExperts
from swarm.dispatch.origin import Origin
from swarm.dispatch.peer_states import PeerState
from swarm.dispatch.placement import Placement
from swarm.errors import Overloaded
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.spec import ModelSpec
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.records import ExpertAnnouncement, ModelOffer, SignedRecord
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec, Wire, WireForm, decode_rows, encode_rows
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement
from tests.virtual_time import now

MODEL = ModelId(b"m" * 32)
A, B, C, T = (NodeId(bytes([n]) * 32) for n in (10, 20, 30, 40))
E, K, D = 12, 4, 64
LAYERS = (1, 2)
# Shares 0 and 1, 1 and 2, 2 and 0: every expert on two, and often no single peer holds all of another's batch.
THIRDS = (range(4), range(4, 8), range(8, 12))
RING = {A: [*THIRDS[0], *THIRDS[1]], B: [*THIRDS[1], *THIRDS[2]], C: [*THIRDS[2], *THIRDS[0]]}
TWINS = {A: range(E), B: range(E)}
TRIPLETS = {A: range(E), B: range(E), C: range(E)}
WALL = 1.8e9

Array = npt.NDArray[np.float32]
MATRICES: Array = np.random.default_rng(5).standard_normal((max(LAYERS) + 1, E, D, D)).astype(np.float32)
ON_DEVICE: Array = (MATRICES * (1 + 0.013 * np.random.default_rng(6).standard_normal(MATRICES.shape))).astype(
    np.float32
)
Q8 = Wire(WireForm.Q8, WireForm.Q8)
EXACT, F32 = Wire(WireForm.EXACT, WireForm.EXACT), Wire(WireForm.F32, WireForm.F32)

Lie = Callable[[Array, m.Dispatch], Array]


def compute(request: m.Dispatch, matrices: Array = MATRICES) -> Array:
    """Return what an honest peer computes, float32."""
    pair_rows = np.repeat(np.arange(len(request.rows)), request.row_counts)
    raw = np.stack(
        [request.rows[i] @ matrices[request.layer, int(e)] for i, e in zip(pair_rows, request.expert_ids, strict=True)]
    )
    if request.weights is None:
        return raw
    sums = np.zeros((len(request.rows), D), np.float32)
    np.add.at(sums, pair_rows, raw * request.weights[:, np.newaxis])
    return sums


def noise(share: float = 0.05) -> Lie:
    rng = np.random.default_rng(1)

    def lie(rows: Array, request: m.Dispatch) -> Array:
        wrong = rng.standard_normal(rows.shape)
        wrong *= share * np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(wrong, axis=1, keepdims=True)
        return (rows + wrong).astype(np.float32)

    return lie


def orthogonal(rows: Array, request: m.Dispatch) -> Array:
    """At a right angle, linear, the same each time: such a cheat never contradicts itself."""
    out = np.empty_like(rows)
    out[:, 0::2], out[:, 1::2] = -rows[:, 1::2], rows[:, 0::2]
    return out


def device(rows: Array, request: m.Dispatch) -> Array:
    """Honest, on a device that rounds otherwise: each expert's output is 1.2 to 1.5 % off, the same each time."""
    return compute(request, ON_DEVICE)


class FakeSpec:
    n_embd = D

    def expert_tensors(self, layer: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(kind=kind, ggml_type=8) for kind in ("down", "gate", "up")]  # Q8_0


class AnnouncedRegistry:
    def __init__(self, listed: list[ExpertAnnouncement]) -> None:
        self.listed = listed

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        return list(self.listed)

    async def publish(self, signed: SignedRecord) -> int:
        raise NotImplementedError

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        raise NotImplementedError

    async def observed_address(self) -> str:
        raise NotImplementedError


class Own:
    """This machine's own experts."""

    is_last_resort = True

    def __init__(self) -> None:
        self.n_asked = 0

    def kept(self, layer: int) -> None:
        return None

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        return True

    async def compute(
        self,
        layer: int,
        x: Array,
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: Array | None,
    ) -> Array:
        self.n_asked += 1
        return compute(cast(m.Dispatch, SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}, rows=x)))


class Swarm:
    """Peers, a dispatcher, an auditor.

    Attributes:
        lies: what a peer makes of its own answers.
        tainted: what the auditor told.
    """

    def __init__(
        self,
        slices: Mapping[NodeId, Sequence[int]],
        wire: Wire,
        *,
        share: float,
        seed: int,
        own: OwnExperts | None,
        records: Path | None,
    ) -> None:
        self.lies: dict[NodeId, Lie] = {}
        self.refusals: dict[NodeId, Callable[[m.Dispatch], bool]] = {}
        self.n_used: dict[NodeId, int] = dict.fromkeys(slices, 0)
        self.tainted: list[dict[int, int]] = []
        self.network = FakeNetwork()
        self.asked: list[tuple[NodeId, m.Dispatch]] = []
        self.peers = {node: FakeNode(node_id=node, answer=self._answerer(node)) for node in slices}
        listed = []
        for node, experts in slices.items():
            host = f"203.0.{node.raw[0]}.1"
            self.network.nodes[host, 1] = self.peers[node]
            experts_of = ExpertSet.of(LAYERS, experts)
            listed.append(sample_announcement(node, model=MODEL, experts=experts_of, addresses=(f"{host}:1",)))
        self.registry = AnnouncedRegistry(listed)
        self.pool = Pool(cast(Endpoint, FakeEndpoint(self.network, Identity.from_seed(b"u" * 32))))
        placement = Placement(MODEL, LAYERS, E, require_exact=wire is EXACT)
        self.holders = Holders(self.registry, self.pool, placement, MODEL, own=own, now=now)
        self.dispatcher = Dispatcher(MODEL, cast(ModelSpec, FakeSpec()), self.holders, wire, now=now)
        self.wall = WALL
        self.auditor = Auditor(
            self.holders,
            self.dispatcher.replicas,
            self.dispatcher.opinion,
            share=share,
            rng=random.Random(seed),
            wall_now=lambda: self.wall + now() - 1000,
            records=records,
        )
        self.auditor.on_taint = lambda firsts: self.tainted.append(dict(firsts))
        self.dispatcher.audits = self.auditor
        self._rng = np.random.default_rng(seed)
        self.n_batches = 0
        self.position = 0

    def _answerer(self, node: NodeId) -> Callable[[NodeId, m.Request], m.Response | None]:
        def answer(asker: NodeId, request: m.Request) -> m.Response | None:
            assert isinstance(request, m.Dispatch)
            self.asked.append((node, request))
            refuses = self.refusals.get(node)
            if refuses is not None and refuses(request):
                raise Overloaded("busy", retry_after_s=0.01)
            assert request.encoded_rows is not None
            arrived = decode_rows(request.encoded_rows, len(request.rows), D, request.rows_codec)
            asked = m.Dispatch(
                model_tag=request.model_tag,
                layer=request.layer,
                rows_codec=request.rows_codec,
                result_codec=request.result_codec,
                row_counts=request.row_counts,
                expert_ids=request.expert_ids,
                weights=request.weights,
                rows=arrived,
            )
            rows = compute(asked)
            if node in self.lies:
                rows = self.lies[node](rows, asked)
            codec = request.result_codec
            rows = decode_rows(encode_rows(rows, codec), len(rows), D, codec)
            return m.Result(codec=codec, rows=rows, compute_us=1, queue_us=1)

        return answer

    async def layer(self, n_tokens: int = 1, *, layer: int = 1, sequence: int = 1) -> None:
        """Dispatch one layer, of tokens at the next positions of a sequence."""
        x = self._rng.standard_normal((n_tokens, D)).astype(np.float32)
        ids = np.stack([self._rng.permutation(E)[:K] for _ in range(n_tokens)]).astype(np.int32)
        weights = self._rng.random((n_tokens, K)).astype(np.float32)
        positions = np.arange(self.position, self.position + n_tokens)
        origin = Origin(sequences=np.full(n_tokens, sequence), positions=positions)
        await self.dispatcher.dispatch(layer, x, ids, weights, origin)

    async def token(self, n_tokens: int = 1, *, sequence: int = 1) -> None:
        for layer in LAYERS:
            await self.layer(n_tokens, layer=layer, sequence=sequence)
        self.position += n_tokens

    async def until_caught(self, n_most: int = 200) -> int:
        """Return how many tokens it took until somebody was caught."""
        for n_tokens in range(n_most):
            await self.token()
            if self.auditor.stats.n_caught:
                return n_tokens + 1
        await self.auditor.settle(1, 10)
        assert self.auditor.stats.n_caught, self.auditor.stats
        return n_most

    @property
    def caught(self) -> set[NodeId]:
        return {node for node in self.peers if self.auditor.verdict(node) is Verdict.CAUGHT}


@contextlib.asynccontextmanager
async def swarm(
    slices: Mapping[NodeId, Sequence[int]],
    wire: Wire = F32,
    *,
    share: float = 0.02,
    seed: int = 1,
    own: OwnExperts | None = None,
    records: Path | None = None,
) -> AsyncIterator[Swarm]:
    it = Swarm(slices, wire, share=share, seed=seed, own=own, records=records)
    watching = asyncio.create_task(it.holders.run())
    try:
        await it.holders.wait_complete(10)
        while len(it.holders.placement.destinations) < len(slices):  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.1)
        yield it
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await it.dispatcher.close()
        await it.pool.close()


@pytest.mark.parametrize("wire", [EXACT, F32, Q8, Wire(WireForm.F16, WireForm.FP8)], ids=str)
@pytest.mark.parametrize("slices", [RING, TRIPLETS], ids=["ring", "triplets"])
def test_honest_peers_all_pass_in_every_form(wire: Wire, slices: dict[NodeId, list[int]]) -> None:
    async def main() -> None:
        async with swarm(slices, wire, share=0.2) as it:
            for _ in range(100):
                await it.token()
            await it.token(40)
            await it.auditor.settle(1, 10)
            stats = it.auditor.stats
            assert stats.n_disagreed == stats.n_dropped == stats.n_unaudited == 0
            assert stats.n_passed == pytest.approx(0.2 * stats.n_answers, abs=3)
            assert stats.largest_error < 0.005
            assert it.caught == set()

    virtual_time.run(main())


@pytest.mark.parametrize("wire", [EXACT, F32, Q8, Wire(WireForm.F16, WireForm.FP8)], ids=str)
@pytest.mark.parametrize("slices", [RING, TRIPLETS], ids=["ring", "triplets"])
@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
def test_an_honest_device_that_rounds_otherwise_is_not_accused(
    wire: Wire, slices: dict[NodeId, list[int]], own: bool
) -> None:
    async def main() -> None:
        async with swarm(slices, wire, share=0.5, own=Own() if own else None) as it:
            it.lies[B] = device
            for _ in range(60):
                await it.token()
            await it.auditor.settle(1, 10)
            assert it.auditor.stats.n_passed > 20
            assert it.auditor.stats.n_disagreed == 0
            assert it.caught == set()
            assert it.tainted == []

    virtual_time.run(main())


@pytest.mark.parametrize("wire", [EXACT, F32, Q8], ids=str)
@pytest.mark.parametrize("lie", [noise(), orthogonal], ids=["noise", "orthogonal"])
@pytest.mark.parametrize("cheat", [A, B, C], ids=lambda node: str(node.raw[0]))
def test_a_cheat_is_caught_within_its_200_answers_and_nobody_else_is(wire: Wire, lie: Lie, cheat: NodeId) -> None:
    async def main() -> None:
        for seed in range(5):
            async with swarm(RING, wire, seed=seed) as it:
                it.lies[cheat] = lie
                await it.until_caught()
                n_answers = sum(node == cheat for node, _ in it.asked)
                assert it.caught == {cheat}
                assert n_answers <= 200
                assert cheat not in it.holders.placement.destinations
                before = len([node for node, _ in it.asked if node == cheat])
                for _ in range(50):
                    await it.token()
                assert len([node for node, _ in it.asked if node == cheat]) == before, "it is asked no more"
                assert it.caught == {cheat}
                has_answered = cheat in it.dispatcher.stats.assignments  # else it was caught as a second opinion
                assert len(it.tainted) == has_answered
                if it.tainted:
                    assert it.auditor.tainted_from(1) == it.tainted[0][1] <= it.position
                    it.auditor.healed(1)
                assert it.auditor.tainted_from(1) is None

    virtual_time.run(main())


def test_everything_since_the_last_audit_that_passed_is_tainted_and_nothing_before() -> None:
    async def main() -> None:
        async with swarm(TRIPLETS, EXACT, share=0.1) as it:
            for _ in range(200):
                await it.token()
            began = it.position
            for node in it.peers:  # whoever this backbone prefers
                if any(asked == node for asked, _ in it.asked[-2:]):
                    it.lies[node] = noise()
                    break
            cheat = node
            await it.until_caught()
            assert it.caught == {cheat}
            (tainted,) = it.tainted
            assert began - 25 <= tainted[1] <= began, "an audit passed within 20 answers before"

    virtual_time.run(main())


def test_two_alone_suspect_each_other_and_own_experts_tell_who_is_wrong() -> None:
    async def main() -> None:
        for own in (None, Own()):
            async with swarm(TWINS, F32, own=own) as it:
                used = A
                await it.token()
                used = it.asked[0][0]
                it.lies[used] = orthogonal
                for _ in range(100):
                    await it.token()
                await it.auditor.settle(1, 10)
                if own is None:
                    assert it.caught == set()
                    assert {it.auditor.verdict(node) for node in TWINS} == {Verdict.SUSPECTED}
                    assert it.auditor.stats.n_disagreed > 0
                else:
                    assert it.caught == {used}
                    assert it.auditor.verdict(({A, B} - {used}).pop()) is not Verdict.SUSPECTED

    virtual_time.run(main())


def test_where_nobody_else_holds_an_expert_own_ones_give_the_second_opinion_or_there_is_none() -> None:
    async def main() -> None:
        for own in (None, Own()):
            async with swarm({A: range(E)}, F32, share=0.2, own=own) as it:
                for _ in range(50):
                    await it.token()
                await it.auditor.settle(1, 10)
                if own is None:
                    assert it.auditor.stats.n_unaudited == pytest.approx(20, abs=2)
                    assert it.auditor.stats.n_passed == 0
                else:
                    assert it.auditor.stats.n_passed == pytest.approx(20, abs=2)
                    assert own.n_asked == it.auditor.stats.n_passed

    virtual_time.run(main())


def test_a_suspect_is_used_less_and_audited_more() -> None:
    async def main() -> None:
        async with swarm({A: range(E), B: range(E), C: range(6), T: range(6, 12)}, F32) as it:
            await it.token()
            it.auditor._standing.failed(  # as a case would
                _disputed(A, B), WALL, can_compare=lambda a, b: True, network_of=lambda node: None
            )
            it.auditor._follow_suspects()
            it.asked.clear()
            for _ in range(30):
                await it.token()
            n_whole = sum(node in (A, B) and request.result_codec is RowCodec.F32 for node, request in it.asked)
            assert it.auditor.verdict(A) is Verdict.SUSPECTED
            n_used = {node: it.dispatcher.stats.assignments.get(node, 0) for node in it.peers}
            assert n_used[C] + n_used[T] > n_used[A] + n_used[B], n_whole

    virtual_time.run(main())


def test_an_audit_never_delays_a_layer() -> None:
    async def main() -> None:
        took = []
        for share in (1.0, 0.0):
            async with swarm(TRIPLETS, F32, share=share) as it:
                started = now()
                for _ in range(20):
                    await it.token()
                took.append(now() - started)
                assert (it.auditor.stats.n_passed > 0) == bool(share)
        assert took[0] == pytest.approx(took[1])

    virtual_time.run(main())


def test_a_busy_or_silent_second_opinion_is_made_up_for() -> None:
    async def main() -> None:
        async with swarm(TRIPLETS, F32, share=0.1) as it:
            for _ in range(5):
                await it.token()
            used = it.asked[-1][0]
            for node in it.peers:
                if node != used:
                    it.refusals[node] = lambda request: True
            for _ in range(40):
                await it.token()
            await it.auditor.settle(1, 10)
            assert it.auditor.stats.n_dropped > 4
            assert it.auditor.stats.n_disagreed == 0
            assert it.auditor.verdict(used) is not Verdict.SUSPECTED
            it.refusals.clear()
            n_passed = it.auditor.stats.n_passed
            for _ in range(8):
                await it.token()
            await it.auditor.settle(1, 10)
            assert it.auditor.stats.n_passed > n_passed

    virtual_time.run(main())


def test_a_prefill_is_audited_by_a_few_of_its_rows() -> None:
    async def main() -> None:
        async with swarm(TRIPLETS, EXACT, share=1.0) as it:
            await it.token(300)
            asked = [request for node, request in it.asked]
            await it.auditor.settle(1, 10)
            sizes = [len(request.rows) for node, request in it.asked[len(asked) :]]
            assert sizes
            assert max(sizes) <= 8
            assert it.auditor.stats.n_disagreed == 0

    virtual_time.run(main())


def test_answers_of_a_caught_peer_that_were_under_way_are_not_used() -> None:
    async def main() -> None:
        async with swarm(TRIPLETS, F32) as it:
            await it.token()
            used = it.asked[-1][0]
            it.peers[used].latency_s = 0.2
            layer = asyncio.create_task(it.layer())
            await asyncio.sleep(0.05)
            it.auditor._catch(used, "why")
            await layer
            assert it.dispatcher.stats.attempts.n_rescued == 1

    virtual_time.run(main())


def test_what_a_caught_peer_said_just_before_the_layer_ended_is_tainted_too() -> None:
    async def main() -> None:
        async with swarm(RING, EXACT) as it:
            await it.token()
            (cheat, *_) = {node for node, _ in it.asked}
            for node in it.peers:
                it.peers[node].latency_s = 0.01 if node == cheat else 0.2
            it.position = 77
            layer = asyncio.create_task(it.layer(20, sequence=9))
            await asyncio.sleep(0.1)
            it.auditor._catch(cheat, "why")
            assert 9 not in it.tainted[-1]
            await layer
            assert it.auditor.tainted_from(9) is not None
            assert it.auditor.tainted_from(9) >= 77  # type: ignore[operator]

    virtual_time.run(main())


def test_waiting_for_audits_waits_for_those_of_the_sequence_and_not_for_ever() -> None:
    async def main() -> None:
        async with swarm(TWINS, F32, share=1.0) as it:
            await it.token(sequence=1)
            await it.auditor.settle(1, 10)
            for peer in it.peers.values():
                peer.is_up = False
            used, other = it.asked[0][0], ({A, B} - {it.asked[0][0]}).pop()
            it.peers[used].is_up = True
            await it.layer(sequence=2)
            started = now()
            await it.auditor.settle(3, 10)
            assert now() == started, "not concerned"
            await it.auditor.settle(2, 2)
            assert now() - started == pytest.approx(2)
            assert other != used

    virtual_time.run(main())


def test_a_caught_peer_stays_out_over_a_restart_and_comes_back_when_its_time_is_over(tmp_path: Path) -> None:
    records = tmp_path / "state" / "audits.json"

    async def first() -> NodeId:
        async with swarm(TRIPLETS, F32, share=1.0, records=records) as it:
            await it.token()
            used = it.asked[0][0]
            it.lies[used] = noise()
            await it.until_caught()  # the next token may be asked of others
            await it.auditor.settle(1, 10)
            assert it.caught == {used}
            return used

    async def second(cheat: NodeId) -> None:
        it = Swarm(TRIPLETS, F32, share=1.0, seed=2, own=None, records=records)
        watching = asyncio.create_task(it.holders.run())
        try:
            await asyncio.sleep(1)
            assert set(it.holders.placement.destinations) == set(TRIPLETS) - {cheat}
            states = {view.record.node: view.state for view in it.holders.peers()}
            assert states[cheat] is PeerState.CAUGHT
            assert it.network.count("dial", cheat) == 0
            it.wall += CAUGHT_S
            await asyncio.sleep(5)
            assert cheat not in it.holders.placement.destinations, "it has not announced itself anew"
            it.registry.listed = [
                sample_announcement(
                    each.node, seq=each.seq + 1, model=MODEL, experts=each.experts, addresses=each.addresses
                )
                for each in it.registry.listed
            ]
            await asyncio.sleep(5)
            assert set(it.holders.placement.destinations) == set(TRIPLETS)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await it.pool.close()

    cheat = asyncio.run(first())  # in real time: what is kept is written in a thread
    virtual_time.run(second(cheat))


def test_records_that_cannot_be_read_are_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = tmp_path / "audits.json"
    records.write_text('{"format": 1, "peers": 5}')

    async def main() -> None:
        async with swarm(TWINS, F32, records=records) as it:
            assert it.caught == set()

    with caplog.at_level(logging.WARNING):
        virtual_time.run(main())
    assert "cannot be used" in caplog.text


def test_the_report_names_the_worst_first() -> None:
    async def main() -> None:
        async with swarm(TRIPLETS, F32, share=1.0) as it:
            for _ in range(10):
                await it.token()
            used = it.asked[0][0]
            it.lies[used] = noise()
            await it.until_caught()
            report = it.auditor.report()
            assert report["share"] == 1.0
            assert report["n_caught"] == 1
            first = report["peers"][0]
            assert (first["node"], first["verdict"]) == (str(used), "caught")
            assert first["n_disagreed"] == 1
            assert "asked again" in first["caught"]["reason"]
            assert first["caught"]["at"] == pytest.approx(WALL, abs=100)

    virtual_time.run(main())


def _disputed(*nodes: NodeId):  # type: ignore[no-untyped-def]
    from swarm.dispatch.audit_opinions import Finding

    return Finding(disputes=(nodes,))  # type: ignore[arg-type]
