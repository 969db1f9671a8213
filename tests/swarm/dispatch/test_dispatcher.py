"""The dispatcher against peers in memory that compute with numpy, judged by a brute-force reference, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from swarm.dispatch.chunks import CHUNK_BYTES
from swarm.dispatch.contributions import Contributions
from swarm.dispatch.dispatcher import Dispatcher
from swarm.dispatch.holders import Holders, OwnExperts
from swarm.dispatch.layer_counts import MAX_COUNTED, DispatchStats, LayerSpan
from swarm.dispatch.placement import Placement
from swarm.dispatch.plan import HERE
from swarm.dispatch.service_time import BATCH_TIMEOUT_S
from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    ExpertsNotHeld,
    ExpertUnavailable,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
)
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.spec import ModelSpec
from swarm.net.endpoint import Endpoint
from swarm.net.fast_links import FastLinks
from swarm.net.pool import Pool
from swarm.net.readiness import Readiness
from swarm.registry.records import ExpertAnnouncement, ModelOffer, SignedRecord
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec, Wire, WireForm, encode_rows
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement
from tests.virtual_time import now

MODEL = ModelId(b"m" * 32)
US = Identity.from_seed(b"u" * 32)
A, B, C = (NodeId(bytes([n]) * 32) for n in (10, 20, 30))
SLICES = {A: range(5), B: range(5, 8), C: range(8, 12)}
LAYERS = (1, 2)
E, K, D = 12, 4, 32  # experts, experts used, hidden size
EXACT, F32 = Wire(WireForm.EXACT, WireForm.EXACT), Wire(WireForm.F32, WireForm.F32)

Array = npt.NDArray[np.float32]
_rng = np.random.default_rng(5)
MATRICES: Array = _rng.standard_normal((max(LAYERS) + 1, E, D, D)).astype(np.float32)


def expert(layer: int, number: int, row: Array) -> Array:
    """Return what one expert makes of one row, [D]: the same bits however rows are batched."""
    out: Array = row @ MATRICES[layer, number]
    return out


def compute(request: m.Dispatch) -> m.Result:
    """Answer a dispatch as a peer does."""
    pair_rows = np.repeat(np.arange(len(request.rows)), request.row_counts)
    raw = np.stack(
        [
            expert(request.layer, int(number), request.rows[i])
            for i, number in zip(pair_rows, request.expert_ids, strict=True)
        ]
    )  # [P, D]
    if request.result_codec is RowCodec.EXACT:
        assert request.weights is None
        return m.Result(codec=RowCodec.EXACT, rows=raw, compute_us=1, queue_us=1)
    assert request.weights is not None
    sums = np.zeros((len(request.rows), D), np.float32)  # [N, D]
    np.add.at(sums, pair_rows, raw * request.weights[:, np.newaxis])
    return m.Result(codec=request.result_codec, rows=sums, compute_us=1, queue_us=1)


def choice(n_tokens: int, seed: int = 1) -> tuple[Array, npt.NDArray[np.int32], Array]:
    """Return hidden states [T, D], the router's choice [T, K] of distinct experts, and its weights [T, K]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, D)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(n_tokens)]).astype(np.int32)
    weights = rng.random((n_tokens, K)).astype(np.float32)
    return x, ids, weights


def in_llama_order(layer: int, x: Array, ids: npt.NDArray[np.int32], weights: Array) -> Array:
    """Return the layer's output as llama.cpp rounds it: each product, then each sum, in the router's order."""
    out = np.empty_like(x)
    for t in range(len(x)):
        total = expert(layer, ids[t, 0], x[t]) * weights[t, 0]
        for k in range(1, K):
            total = total + expert(layer, ids[t, k], x[t]) * weights[t, k]
        out[t] = total
    return out


class FakeSpec:
    """A ModelSpec whose experts are Q8_0 in layer 1 and F16 in layer 2; their down products, which x never meets, Q4_K."""

    n_embd = D

    def expert_tensors(self, layer: int) -> list[SimpleNamespace]:
        ggml_type = {1: 8, 2: 1}[layer]
        kinds = {"down": 12, "gate": ggml_type, "up": ggml_type}
        return [SimpleNamespace(kind=kind, ggml_type=of_kind) for kind, of_kind in kinds.items()]


class AnnouncedRegistry:
    """A Registry with a fixed list."""

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


class Star:
    """Three peers with all experts between them, and the dispatcher under test.

    Attributes:
        seen: what was asked of whom, in order.
        answer_of: replaces a peer's answer.
    """

    def __init__(self, wire: Wire, slices: Mapping[NodeId, Sequence[int]], own: OwnExperts | None) -> None:
        self.slices = slices
        self.network = FakeNetwork()
        self.seen: list[tuple[NodeId, m.Dispatch]] = []
        self.answer_of: dict[NodeId, Callable[[m.Dispatch], m.Response | None]] = {}
        self.peers = {node: FakeNode(node_id=node, answer=self._answerer(node)) for node in slices}
        for node, peer in self.peers.items():
            self.network.nodes[f"10.0.0.{node.raw[0]}", 1] = peer
        self.pool = Pool(cast(Endpoint, FakeEndpoint(self.network, US)))
        self.placement = Placement(MODEL, LAYERS, E, require_exact=wire is EXACT)
        self.holders = Holders(AnnouncedRegistry(self._announced()), self.pool, self.placement, MODEL, own=own, now=now)
        self.dispatcher = Dispatcher(MODEL, cast(ModelSpec, FakeSpec()), self.holders, wire, now=now)

    def _announced(self) -> list[ExpertAnnouncement]:
        return [
            sample_announcement(
                node, model=MODEL, experts=ExpertSet.of(LAYERS, experts), addresses=(f"10.0.0.{node.raw[0]}:1",)
            )
            for node, experts in self.slices.items()
        ]

    def _answerer(self, node: NodeId) -> Callable[[NodeId, m.Request], m.Response | None]:
        def answer(asker: NodeId, request: m.Request) -> m.Response | None:
            assert isinstance(request, m.Dispatch)
            self.seen.append((node, request))
            return self.answer_of.get(node, compute)(request)

        return answer

    def connection(self, node: NodeId):  # type: ignore[no-untyped-def]
        (connection,) = self.peers[node].connections
        return connection

    @property
    def n_outstanding(self) -> int:
        return sum(len(each.outstanding) for peer in self.peers.values() for each in peer.connections)


@contextlib.asynccontextmanager
async def star(
    wire: Wire = EXACT, slices: Mapping[NodeId, Sequence[int]] = SLICES, own: OwnExperts | None = None
) -> AsyncIterator[Star]:
    """Yield a star whose peers are all in use; the log holds only what comes after."""
    it = Star(wire, slices, own)
    watching = asyncio.create_task(it.holders.run())
    try:
        await it.holders.wait_complete(10)
        assert it.placement.destinations == (A, B, C)
        it.network.log.clear()
        yield it
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await it.dispatcher.close()
        await it.pool.close()


# What comes out


@pytest.mark.parametrize("n_tokens", [1, 2, 37])
def test_the_exact_form_gives_the_bits_of_llama_cpps_order(n_tokens: int) -> None:
    async def main() -> None:
        async with star(EXACT) as it:
            for layer in LAYERS:
                x, ids, weights = choice(n_tokens, seed=layer)
                out = await it.dispatcher.dispatch(layer, x, ids, weights)
                assert out.dtype == np.float32
                assert out.tobytes() == in_llama_order(layer, x, ids, weights).tobytes()

    virtual_time.run(main())


@pytest.mark.parametrize("n_tokens", [1, 2, 37])
def test_partial_sums_add_up(n_tokens: int) -> None:
    async def main() -> None:
        async with star(F32) as it:
            x, ids, weights = choice(n_tokens)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            wide = np.einsum("td,tkde,tk->te", x, MATRICES[2][ids].astype(np.float64), weights)
            np.testing.assert_allclose(out, wide, rtol=1e-5, atol=1e-5)
            assert out.dtype == np.float32

    virtual_time.run(main())


@pytest.mark.parametrize("wire", [EXACT, F32], ids=str)
def test_the_order_in_which_answers_arrive_changes_no_bit(wire: Wire) -> None:
    async def main() -> None:
        found = set()
        for order in itertools.permutations((0.01, 0.05, 0.2)):
            async with star(wire) as it:
                for peer, latency_s in zip(it.peers.values(), order, strict=True):
                    peer.latency_s = latency_s
                found.add((await it.dispatcher.dispatch(1, *choice(9))).tobytes())
        assert len(found) == 1

    virtual_time.run(main())


def test_a_batch_without_tokens_is_an_empty_answer() -> None:
    async def main() -> None:
        async with star() as it:
            x, ids, weights = choice(1)
            out = await it.dispatcher.dispatch(1, x[:0], ids[:0], weights[:0])
            assert out.shape == (0, D)
            assert it.network.log == []

    virtual_time.run(main())


# What goes out


@pytest.mark.parametrize("wire", [EXACT, F32], ids=str)
def test_a_row_goes_once_to_each_peer_that_holds_one_of_its_experts(wire: Wire) -> None:
    async def main() -> None:
        async with star(wire) as it:
            x, ids, weights = choice(20)
            await it.dispatcher.dispatch(2, x, ids, weights)
            assert sorted(node for node, _ in it.seen) == [A, B, C], "one request for each peer"
            for node, request in it.seen:
                tokens = [t for t in range(20) if set(ids[t]) & set(SLICES[node])]
                assert request.rows.tobytes() == x[tokens].tobytes()
                assert request.row_counts.tolist() == [len(set(ids[t]) & set(SLICES[node])) for t in tokens]
                pairs = [(t, k) for t in tokens for k in range(K) if ids[t, k] in SLICES[node]]
                assert request.expert_ids.tolist() == [int(ids[pair]) for pair in pairs]
                if wire is EXACT:
                    assert request.weights is None
                else:
                    assert request.weights is not None
                    assert request.weights.tolist() == [float(weights[pair]) for pair in pairs]
                assert (request.model_tag, request.layer) == (MODEL.raw[:8], 2)
                assert (request.rows_codec.name, request.result_codec.name) == (wire.out.name, wire.back.name)

    virtual_time.run(main())


def test_q8_goes_out_as_the_layers_weights_want_it() -> None:
    async def main() -> None:
        async with star(Wire(WireForm.Q8, WireForm.F16)) as it:
            for layer, codec in ((1, RowCodec.Q8_0), (2, RowCodec.INT8)):
                it.seen.clear()
                await it.dispatcher.dispatch(layer, *choice(5))
                assert {request.rows_codec for _, request in it.seen} == {codec}
                assert {request.result_codec for _, request in it.seen} == {RowCodec.F16}
            stats = it.dispatcher.stats
            n_rows = stats.bytes_back // (2 * D)
            assert stats.bytes_back == n_rows * 2 * D
            assert stats.bytes_out == n_rows * (1 + 2 + D) + 2 * 5 * K * 6, "one scale for each row in both codecs"

    virtual_time.run(main())


def test_a_peer_without_work_is_not_asked() -> None:
    async def main() -> None:
        async with star() as it:
            x, _, weights = choice(1)
            await it.dispatcher.dispatch(1, x, np.array([[0, 4, 8, 9]], np.int32), weights)
            assert sorted(node for node, _ in it.seen) == [A, C]

    virtual_time.run(main())


def test_all_peers_are_asked_before_the_first_answers_and_a_layer_costs_the_slowest() -> None:
    async def main() -> None:
        async with star() as it:
            for peer, latency_s in zip(it.peers.values(), (0.03, 0.1, 0.02), strict=True):
                peer.latency_s = latency_s
            started = now()
            await it.dispatcher.dispatch(1, *choice(20))
            assert [kind for kind, _ in it.network.log] == ["request"] * 3 + ["answer"] * 3
            assert now() - started == pytest.approx(0.1)

    virtual_time.run(main())


def test_layers_of_several_requests_may_be_under_way_at_once() -> None:
    async def main() -> None:
        async with star() as it:
            inputs = [choice(3, seed) for seed in range(5)]
            outs = await asyncio.gather(*(it.dispatcher.dispatch(1, *each) for each in inputs))
            for each, out in zip(inputs, outs, strict=True):
                assert out.tobytes() == in_llama_order(1, *each).tobytes()
            assert [kind for kind, _ in it.network.log] == ["request"] * 15 + ["answer"] * 15

    virtual_time.run(main())


@pytest.mark.parametrize("wire", [EXACT, F32, Wire(WireForm.Q8, WireForm.F16)], ids=str)
def test_rows_are_encoded_once_and_each_peer_gets_the_bytes_of_its_own(wire: Wire) -> None:
    async def main() -> None:
        async with star(wire) as it:
            for n_tokens in (1, 20):
                await it.dispatcher.dispatch(1, *choice(n_tokens))
            assert len(it.seen) > 3
            for _, request in it.seen:
                assert request.encoded_rows == encode_rows(request.rows, request.rows_codec)

    virtual_time.run(main())


# Chunks


def chunked(it: Star) -> None:
    it.dispatcher.chunk_bytes = 4 * D  # a row of f32


@pytest.mark.parametrize("wire", [EXACT, F32], ids=str)
def test_cutting_into_chunks_changes_no_bit(wire: Wire) -> None:
    async def main() -> None:
        async with star(wire) as it:
            whole = await it.dispatcher.dispatch(2, *choice(37))
            n_whole = it.network.count("request")
            counted = it.dispatcher.stats.bytes_out, it.dispatcher.stats.n_assignments
            chunked(it)
            cut = await it.dispatcher.dispatch(2, *choice(37))
            assert n_whole == 3
            assert it.network.count("request") > 3 + 2 * n_whole
            assert cut.tobytes() == whole.tobytes()
            stats = it.dispatcher.stats
            assert (stats.bytes_out, stats.n_assignments) == (2 * counted[0], 2 * counted[1])
            assert stats.n_round_trips == 2, "chunks share their round trip"

    virtual_time.run(main())


def test_the_span_tells_destinations_from_batches() -> None:
    async def main() -> None:
        async with star(F32) as it:
            spans: list[LayerSpan] = []
            it.dispatcher.on_layer = spans.append
            await it.dispatcher.dispatch(2, *choice(37))
            chunked(it)
            await it.dispatcher.dispatch(2, *choice(37))
            await asyncio.sleep(0)
            assert [span.n_destinations for span in spans] == [3, 3]
            assert spans[0].n_batches == 3
            assert spans[1].n_batches == it.network.count("request") - 3 > 6

    virtual_time.run(main())


def test_by_default_a_batch_below_the_measured_size_is_never_cut() -> None:
    async def main() -> None:
        async with star(F32) as it:
            n_rows = 3 * CHUNK_BYTES // (4 * D)
            await it.dispatcher.dispatch(2, *choice(n_rows - 1))
            assert it.network.count("request") == 3
            it.dispatcher.chunk_bytes = 0
            await it.dispatcher.dispatch(2, *choice(4 * n_rows))
            assert it.network.count("request") == 6, "0 never cuts"

    virtual_time.run(main())


def test_a_chunk_that_fails_ends_the_layer_and_cancels_the_others() -> None:
    async def main() -> None:
        async with star(F32) as it:
            chunked(it)
            it.peers[A].latency_s = it.peers[C].latency_s = 5.0

            def second_fails(request: m.Dispatch) -> m.Response:
                if sum(node == B for node, _ in it.seen) == 2:
                    raise EngineError("ggml failed")
                return compute(request)

            it.answer_of[B] = second_fails
            error = await fails(it)
            assert set(error.experts) <= set(wanted(B))
            assert isinstance(error.__cause__, RemoteRefused)
            assert it.n_outstanding == 0
            assert it.network.count("cancel", A) > 1
            assert it.placement.destinations == (A, C)
            assert it.dispatcher.stats.n_round_trips == 0

    virtual_time.run(main())


# Failures


async def fails(it: Star, layer: int = 2) -> ExpertUnavailable:
    """Dispatch so that every peer has work, and return the error."""
    with pytest.raises(ExpertUnavailable) as caught:
        await it.dispatcher.dispatch(layer, *choice(20))
    return caught.value


def wanted(node: NodeId) -> tuple[int, ...]:
    return tuple(sorted(set(choice(20)[1].ravel().tolist()) & set(SLICES[node])))


def test_an_expert_that_nobody_holds_is_named_and_nobody_is_asked() -> None:
    async def main() -> None:
        async with star() as it:
            it.placement.mark_down(B)
            error = await fails(it)
            assert (error.layer, error.experts) == (2, (5, 6, 7))
            assert it.network.count("request") == 0

    virtual_time.run(main())


def test_a_lost_peer_ends_the_layer_by_name_at_once_and_cancels_the_others() -> None:
    async def main() -> None:
        async with star() as it:
            it.peers[A].latency_s = it.peers[C].latency_s = 5.0
            it.peers[B].is_up = False
            asyncio.get_running_loop().call_later(0.3, it.peers[B].lose_connections)
            started = now()
            error = await fails(it)
            assert now() - started == pytest.approx(0.3)
            assert (error.layer, error.experts) == (2, wanted(B))
            assert f"peer {B.short} failed: silent" in str(error)
            assert isinstance(error.__cause__, ConnectionLost)
            assert [it.network.count("cancel", node) for node in SLICES] == [1, 0, 1]
            assert it.n_outstanding == 0, "nobody still waits when the error is out"
            assert it.placement.destinations == (A, C)

    virtual_time.run(main())


def test_a_peer_that_lives_but_does_not_finish_meets_the_deadline() -> None:
    async def main() -> None:
        async with star() as it:
            it.answer_of[C] = lambda request: None
            started = now()
            error = await fails(it)
            assert now() - started == pytest.approx(BATCH_TIMEOUT_S)
            assert error.experts == wanted(C)
            assert f"peer {C.short} late" in str(error)
            assert isinstance(error.__cause__, DeadlineExceeded)
            assert it.placement.destinations == (A, B)
            assert it.connection(C).is_open, "others may still be served: only the placement drops it"

    virtual_time.run(main())


def result(rows: Array, codec: RowCodec) -> m.Result:
    return m.Result(codec=codec, rows=rows, compute_us=0, queue_us=0)


@pytest.mark.parametrize(
    ("wire", "spoil"),
    [
        (EXACT, lambda right: result(right.rows[:-1], right.codec)),
        (EXACT, lambda right: result(np.vstack([right.rows, right.rows[:1]]), right.codec)),
        (EXACT, lambda right: result(right.rows[:, :-1], right.codec)),
        (EXACT, lambda right: result(right.rows.reshape(-1, 2 * D), right.codec)),
        (EXACT, lambda right: result(right.rows[:0], right.codec)),
        (EXACT, lambda right: result(right.rows, RowCodec.F32)),
        (F32, lambda right: result(right.rows, RowCodec.EXACT)),
        (F32, lambda right: result(right.rows[:-1], right.codec)),
    ],
    ids=["row missing", "row too many", "narrow", "wide", "empty", "f32 for exact", "exact for f32", "f32 row missing"],
)
def test_a_wrong_answer_closes_the_link_and_puts_the_peer_down(
    wire: Wire, spoil: Callable[[m.Result], m.Result]
) -> None:
    async def main() -> None:
        async with star(wire) as it:
            connection = it.connection(A)
            it.answer_of[A] = lambda request: spoil(compute(request))
            x, ids, weights = choice(2)
            ids[:] = [[0, 1, 5, 8], [2, 6, 9, 7]]  # an even number of A's rows, so that they can be reshaped
            ids[1, 1] = 3
            with pytest.raises(ExpertUnavailable, match="wrong answer") as caught:
                await it.dispatcher.dispatch(2, x, ids, weights)
            assert caught.value.experts == (0, 1, 2, 3)
            assert isinstance(connection.close_error, RemoteProtocolError)
            assert it.placement.destinations == (B, C)
            await asyncio.sleep(30)
            assert it.placement.destinations == (B, C), "a new connection does not make it honest"

    virtual_time.run(main())


def test_the_right_number_of_rows_of_the_other_form_is_refused() -> None:
    """With one expert for each row, [P, D] and [N, D] are the same shape: only the form tells them apart."""

    async def main() -> None:
        async with star(F32) as it:
            it.answer_of[A] = lambda request: result(np.zeros((1, D), np.float32), RowCodec.EXACT)
            x, _, weights = choice(1)
            with pytest.raises(ExpertUnavailable, match="wrong answer"):
                await it.dispatcher.dispatch(2, x, np.array([[0, 5, 6, 7]], np.int32), weights)

    virtual_time.run(main())


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1e31], ids=str)
def test_numbers_that_would_spoil_the_whole_answer_are_refused_and_close_the_link(value: float, n_rows: int) -> None:
    async def main() -> None:
        async with star(F32) as it:
            rows = np.zeros((n_rows, D), np.float32)
            rows[n_rows // 2, 3] = value
            connection = await it.holders.connection(A)
            it.answer_of[A] = lambda request: result(rows, RowCodec.F32)
            x, _, weights = choice(n_rows)
            with pytest.raises(ExpertUnavailable, match="not finite, or absurdly large") as caught:
                await it.dispatcher.dispatch(2, x, np.array([[0, 5, 6, 7]] * n_rows, np.int32), weights)
            assert caught.value.experts == (0,)
            assert isinstance(connection.close_error, RemoteProtocolError)
            assert it.placement.destinations == (B, C)

    virtual_time.run(main())


def test_a_busy_peer_fails_the_layer_but_is_not_down() -> None:
    async def main() -> None:
        async with star() as it:

            def busy(request: m.Dispatch) -> m.Response:
                raise Overloaded("too many dispatches in line")

            it.answer_of[B] = busy
            error = await fails(it)
            assert error.experts == wanted(B)
            assert "too many dispatches in line" in str(error)
            assert it.placement.destinations == (A, B, C)
            del it.answer_of[B]
            await it.dispatcher.dispatch(2, *choice(20))

    virtual_time.run(main())


def test_a_peer_that_refuses_is_down() -> None:
    async def main() -> None:
        async with star() as it:

            def broken(request: m.Dispatch) -> m.Response:
                raise EngineError("ggml failed")

            it.answer_of[B] = broken
            error = await fails(it)
            assert isinstance(error.__cause__, RemoteRefused)
            assert error.experts == wanted(B)
            assert it.placement.destinations == (A, C)

    virtual_time.run(main())


def test_after_a_failure_the_next_layer_is_computed_without_the_peer_or_with_it_once_it_is_back() -> None:
    async def main() -> None:
        async with star() as it:
            asyncio.get_running_loop().call_later(0.005, it.peers[B].lose_connections)
            await fails(it)
            assert (await fails(it)).experts == (5, 6, 7)
            await it.holders.wait_complete(1.0)
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()

    virtual_time.run(main())


def test_two_failures_at_once_are_one_error_and_both_are_down() -> None:
    async def main() -> None:
        async with star() as it:

            def broken(request: m.Dispatch) -> m.Response:
                raise EngineError("ggml failed")

            it.answer_of[A] = it.answer_of[B] = broken
            error = await fails(it)
            assert error.experts in (wanted(A), wanted(B))
            assert it.placement.destinations == (C,)

    virtual_time.run(main())


def test_cancelling_a_dispatch_cancels_every_request_and_puts_nobody_down() -> None:
    async def main() -> None:
        async with star() as it:
            for peer in it.peers.values():
                peer.latency_s = 5.0
            n_tasks = len(asyncio.all_tasks())
            task = asyncio.create_task(it.dispatcher.dispatch(1, *choice(20)))
            await asyncio.sleep(0.1)
            assert it.n_outstanding == 3
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert it.n_outstanding == 0
            assert it.network.count("cancel") == 3
            assert len(asyncio.all_tasks()) == n_tasks, "no task is left"
            assert it.placement.destinations == (A, B, C)
            assert it.dispatcher.stats.n_round_trips == 0

    virtual_time.run(main())


# Replicas: each expert on two of three peers


@contextlib.asynccontextmanager
async def twice(wire: Wire = EXACT) -> AsyncIterator[Star]:
    """Yield a star in which every expert has two holders, measured so often that hedges are prompt."""
    async with star(wire, {A: range(8), B: range(4, 12), C: [8, 9, 10, 11, 0, 1, 2, 3]}) as it:
        for seed in range(40):
            await it.dispatcher.dispatch(1, *choice(1, seed))
            await it.dispatcher.dispatch(1, *choice(20, seed))
        it.network.log.clear()
        it.seen.clear()
        it.dispatcher.stats = DispatchStats()
        yield it


class Ours:
    """Experts that this process computes itself, as the last resort; or always, those that it keeps."""

    def __init__(self, experts: Sequence[int] = range(E), *, is_last_resort: bool = True) -> None:
        self.experts = experts
        self.is_last_resort = is_last_resort
        self.n_runs = 0
        self.failure: Exception | None = None
        self._kept: npt.NDArray[np.bool_] | None = None

    def keep(self, experts: Sequence[int]) -> None:
        self.experts = experts
        self._kept = np.isin(np.arange(E), experts)

    def kept(self, layer: int) -> npt.NDArray[np.bool_] | None:
        return self._kept

    def holds(self, layer: int, experts: Collection[int]) -> bool:
        return all(expert in self.experts for expert in experts)

    async def compute(
        self,
        layer: int,
        x: Array,
        row_counts: npt.NDArray[np.uint8],
        expert_ids: npt.NDArray[np.integer],
        weights: Array | None,
    ) -> Array:
        self.n_runs += 1
        if self.failure is not None:
            raise self.failure
        request = SimpleNamespace(
            layer=layer,
            rows=x,
            row_counts=row_counts,
            expert_ids=expert_ids,
            weights=weights,
            result_codec=RowCodec.EXACT if weights is None else RowCodec.F32,
        )
        return compute(cast(m.Dispatch, request)).rows


@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize("victim", [A, B, C], ids=["A", "B", "C"])
@pytest.mark.parametrize("kind", ["hang", "lost", "broken", "wrong", "busy"])
def test_whatever_happens_to_a_peer_a_replica_answers_with_the_same_bits(
    kind: str, victim: NodeId, n_tokens: int
) -> None:
    async def main() -> None:
        async with twice() as it:
            began = now()
            strike(it, victim, kind)
            for seed in range(10):
                for layer in LAYERS:
                    x, ids, weights = choice(n_tokens, seed)
                    out = await it.dispatcher.dispatch(layer, x, ids, weights)
                    assert out.tobytes() == in_llama_order(layer, x, ids, weights).tobytes()
            assert now() - began < 20 * 0.02 + 1.0, "one stall, not one for each layer"

    virtual_time.run(main())


def strike(it: Star, victim: NodeId, kind: str) -> None:
    """Let something happen to a peer, now and for good."""

    def broken(request: m.Dispatch) -> m.Response:
        raise EngineError("ggml failed")

    def busy(request: m.Dispatch) -> m.Response:
        raise Overloaded("full")

    if kind == "hang":
        it.answer_of[victim] = lambda request: None
    elif kind == "lost":
        it.peers[victim].is_up = False
        asyncio.get_running_loop().call_later(3.0, it.peers[victim].lose_connections)
    elif kind == "broken":
        it.answer_of[victim] = broken
    elif kind == "busy":
        it.answer_of[victim] = busy
    else:
        it.answer_of[victim] = lambda request: result(np.zeros((1, 1), np.float32), request.result_codec)


def test_partial_sums_keep_the_plans_groups_when_a_replica_answers() -> None:
    async def main() -> None:
        async with twice(F32) as it:
            x, _, weights = choice(1)
            ids = np.array([[4, 5, 9, 10]], np.int32)  # B holds them all; A and C hold two each
            it.dispatcher.replicas.owners(2, ids, now())
            whole = await it.dispatcher.dispatch(2, x, ids, weights)
            [(first, _)] = it.seen
            assert first == B
            strike(it, B, "broken")
            cut = await it.dispatcher.dispatch(2, x, ids, weights)
            assert {node for node, _ in it.seen[2:]} == {A, C}
            np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-5)
            again = await it.dispatcher.dispatch(2, x, ids, weights)
            assert again.tobytes() == cut.tobytes(), "cut in the same way: the same groups"

    virtual_time.run(main())


def test_a_hang_costs_one_stall_and_the_late_answer_is_measured() -> None:
    async def main() -> None:
        async with twice() as it:
            it.peers[B].latency_s = 0.5
            began = now()
            await it.dispatcher.dispatch(1, *choice(1, 3))
            await it.dispatcher.dispatch(
                1, np.ones((1, D), np.float32), np.array([[4, 5, 9, 10]], np.int32), np.ones((1, K), np.float32)
            )
            assert now() - began < 0.3
            assert it.dispatcher.stats.attempts.n_hedged >= 1
            assert it.n_outstanding >= 1, "the late one is still awaited"
            await asyncio.sleep(0.6)
            assert it.n_outstanding == 0
            assert it.dispatcher.times.of(B).estimate_s(4, now()) > 0.05
            assert it.placement.destinations == (A, B, C), "slow is not down"

    virtual_time.run(main())


ALL_OF_B = np.array([[4, 5, 9, 10]], np.int32)  # B holds them all, A and C two each


async def ask_b(it: Star) -> float:
    """Dispatch what B alone computes when it can; return how long it took."""
    began = now()
    await it.dispatcher.dispatch(1, np.ones((1, D), np.float32), ALL_OF_B, np.ones((1, K), np.float32))
    return now() - began


def test_after_a_hang_the_very_next_layer_does_not_wait() -> None:
    async def main() -> None:
        async with twice() as it:
            strike(it, B, "hang")
            assert await ask_b(it) > 0.02
            assert await ask_b(it) == pytest.approx(0.01)

    virtual_time.run(main())


def test_who_comes_back_is_measured_anew() -> None:
    async def main() -> None:
        async with twice() as it:
            strike(it, B, "hang")
            await ask_b(it)
            it.peers[B].lose_connections()
            await it.holders.wait_complete(5)
            await asyncio.sleep(1)
            assert it.placement.destinations == (A, B, C)
            assert it.dispatcher.times.of(B).pair_s(1) is None

    virtual_time.run(main())


def test_a_peer_that_has_answered_well_again_is_trusted_again() -> None:
    async def main() -> None:
        async with twice() as it:
            for _ in range(3):
                strike(it, B, "broken")
                await ask_b(it)
                assert it.placement.destinations == (A, C)
                del it.answer_of[B]
                await asyncio.sleep(1.2)
                assert it.placement.destinations == (A, B, C), "after the shortest time, each time"
                await ask_b(it)
                await asyncio.sleep(100)

    virtual_time.run(main())


def test_a_peer_that_failed_gets_one_batch_at_a_time_until_it_has_answered() -> None:
    async def main() -> None:
        async with twice() as it:
            strike(it, B, "broken")
            await ask_b(it)
            strike(it, B, "hang")
            await asyncio.sleep(1.2)
            assert it.placement.destinations == (A, B, C), "on trial"
            n_before = it.network.count("request", B)
            await asyncio.gather(*(ask_b(it) for _ in range(6)))
            assert it.network.count("request", B) == n_before + 1, "the trial, beside which others are asked"

    virtual_time.run(main())


def test_a_busy_peer_is_left_alone_for_as_long_as_it_said() -> None:
    async def main() -> None:
        async with twice() as it:
            strike(it, B, "busy")  # for a second
            for _ in range(20):
                await ask_b(it)
            assert it.network.count("request", B) == 1
            del it.answer_of[B]
            await asyncio.sleep(1.0)
            await ask_b(it)
            assert it.network.count("request", B) == 2

    virtual_time.run(main())


def test_a_leaving_peer_is_used_no_more_and_nobody_notices() -> None:
    async def main() -> None:
        async with twice() as it:
            it.peers[B].refusal = m.ErrorCode.SHUTTING_DOWN
            for seed in range(5):
                x, ids, weights = choice(20, seed)
                out = await it.dispatcher.dispatch(1, x, ids, weights)
                assert out.tobytes() == in_llama_order(1, x, ids, weights).tobytes()
            assert it.placement.destinations == (A, C)
            assert it.dispatcher.stats.attempts.n_resent >= 1

    virtual_time.run(main())


def test_a_stream_reset_within_a_layer_goes_to_a_replica_and_ends_nothing_else() -> None:
    async def main() -> None:
        async with twice() as it:
            other = asyncio.create_task(it.dispatcher.dispatch(2, *choice(20, 7)))
            asked = asyncio.create_task(it.dispatcher.dispatch(1, *choice(20)))
            await asyncio.sleep(0.005)
            connection = it.connection(B)
            reset = connection.outstanding[-1]
            reset.set_exception(ConnectionLost("the other side reset exchange 8"))
            assert (await asked).tobytes() == in_llama_order(1, *choice(20)).tobytes()
            assert (await other).tobytes() == in_llama_order(2, *choice(20, 7)).tobytes()
            assert connection.is_open

    virtual_time.run(main())


@pytest.mark.parametrize("kind", ["hang", "lost", "broken", "wrong", "leaving"])
def test_of_two_holders_the_last_takes_over(kind: str) -> None:
    async def main() -> None:
        async with star(slices={A: range(E), B: range(E), C: [0]}) as it:
            [victim] = {batch.destination for batch in it.dispatcher._plan(1, *choice(1)[1:])} - {C}
            if kind == "leaving":
                it.peers[victim].refusal = m.ErrorCode.SHUTTING_DOWN
            else:
                strike(it, victim, kind)
            for seed in range(5):
                x, ids, weights = choice(20, seed)
                ids[ids == 0] = 1
                out = await it.dispatcher.dispatch(1, x, ids, weights)
                assert out.tobytes() == in_llama_order(1, x, ids, weights).tobytes()

    virtual_time.run(main())


def test_a_busy_peer_without_a_replica_is_asked_again() -> None:
    async def main() -> None:
        async with star() as it:
            n_asked = 0

            def busy_twice(request: m.Dispatch) -> m.Response:
                nonlocal n_asked
                n_asked += 1
                if n_asked <= 2:
                    raise Overloaded("full")
                return compute(request)

            it.answer_of[B] = busy_twice
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()
            assert it.dispatcher.stats.attempts.n_busy == 2

    virtual_time.run(main())


class Capped:
    """A peer's cap on what it sends, in rows a second, half a second of which can be saved up."""

    def __init__(self, rows_per_s: float) -> None:
        self.rows_per_s = rows_per_s
        self.level, self.at, self.n_refused = rows_per_s / 2, now(), 0

    def __call__(self, request: m.Dispatch) -> m.Response:
        n_rows = len(request.row_counts)
        self.level = min(self.rows_per_s / 2, self.level + (now() - self.at) * self.rows_per_s)
        self.at = now()
        if self.level < min(n_rows, self.rows_per_s / 2):
            self.n_refused += 1
            missing = min(n_rows, self.rows_per_s / 2) - self.level
            raise Overloaded("used up", retry_after_s=missing / self.rows_per_s + 1e-6)
        self.level -= n_rows
        return compute(request)


def test_lanes_that_share_a_capped_peer_without_a_replica_all_get_their_turn() -> None:
    """Without an order 30 of 3,051 layers waited for 30 s and failed, in a run of 300 s like this."""

    async def main() -> None:
        async with star(F32) as it:
            it.answer_of[B] = cap = Capped(100)
            longest_s = 0.0

            async def lane(number: int) -> None:
                nonlocal longest_s
                for seed in range(20):
                    began = now()
                    await it.dispatcher.dispatch(2, *choice(16, seed * 8 + number))
                    longest_s = max(longest_s, now() - began)

            await asyncio.gather(*[lane(number) for number in range(8)])
            assert cap.n_refused > 20
            assert longest_s <= 2 * 8 * 16 / 100, "a turn of each of the others, and as much for what their turns cost"
            assert not it.dispatcher.turns.lines

    virtual_time.run(main())


def test_a_short_dispatch_waits_for_one_chunk_of_a_long_one_at_most() -> None:
    async def main() -> None:
        async with star(F32) as it:
            chunked(it)
            it.answer_of[B] = Capped(100)
            long = asyncio.create_task(it.dispatcher.dispatch(2, *choice(200)))
            await asyncio.sleep(0.05)
            for seed in range(5):
                began = now()
                x, ids, weights = choice(1, seed)
                ids[0, 0] = 5  # one of B's
                await it.dispatcher.dispatch(1, x, ids, weights)
                assert now() - began < 1.0
            assert not long.done()
            await long

    virtual_time.run(main())


def test_a_cancelled_dispatch_holds_nobody_up_at_a_busy_peer() -> None:
    async def main() -> None:
        async with star() as it:

            def busy(request: m.Dispatch) -> m.Response:
                raise Overloaded("full", retry_after_s=5.0)

            it.answer_of[B] = busy
            first = asyncio.create_task(it.dispatcher.dispatch(2, *choice(20)))
            await asyncio.sleep(0.1)
            del it.answer_of[B]
            second = asyncio.create_task(it.dispatcher.dispatch(2, *choice(20, 7)))
            await asyncio.sleep(0.1)
            assert it.network.count("request", B) == 1, "behind the first"
            first.cancel()
            began = now()
            out = await second
            assert out.tobytes() == in_llama_order(2, *choice(20, 7)).tobytes()
            assert now() - began < 0.05
            assert not it.dispatcher.turns.lines
            with pytest.raises(asyncio.CancelledError):
                await first

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_befalls_capped_peers_and_lanes_nobody_waits_for_ever_and_no_place_is_left(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        with_replicas = {A: range(E), B: range(5, E), C: (0, 8, 9, 10, 11)}
        async with star(EXACT, with_replicas if rng.random() < 0.5 else SLICES) as it:
            it.dispatcher.chunk_bytes = rng.choice((0, 4 * D))
            n_answered = 0

            def unreliable(node: NodeId) -> Callable[[m.Dispatch], m.Response | None]:
                cap = Capped(rng.choice((50, 200)))

                def answer(request: m.Dispatch) -> m.Response | None:
                    fate = rng.random()
                    if fate < 0.01:
                        raise LookupError("not here")
                    return None if fate < 0.02 else cap(request)

                return answer

            it.answer_of = {node: unreliable(node) for node in (A, B, C)}

            async def lane(number: int) -> None:
                nonlocal n_answered
                for seed in range(6):
                    x, ids, weights = choice(rng.choice((1, 16, 60)), 10 * seed + number)
                    began = now()
                    task = asyncio.create_task(it.dispatcher.dispatch(2, x, ids, weights))
                    if rng.random() < 0.15:
                        asyncio.get_running_loop().call_later(rng.uniform(0.0, 2.0), task.cancel)
                    with contextlib.suppress(ExpertUnavailable, asyncio.CancelledError):
                        assert (await task).tobytes() == in_llama_order(2, x, ids, weights).tobytes()
                        n_answered += 1
                    assert now() - began < 4 * BATCH_TIMEOUT_S

            await asyncio.gather(*[lane(number) for number in range(4)])
            assert n_answered
            assert not it.dispatcher.turns.lines

    virtual_time.run(main())


def test_cancelling_a_dispatch_with_hedges_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with twice() as it:
            for peer in it.peers.values():
                peer.latency_s = 5.0
            task = asyncio.create_task(it.dispatcher.dispatch(1, *choice(20)))
            await asyncio.sleep(1.0)
            assert it.n_outstanding > 3, "all are overdue, and hedged"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert it.n_outstanding == 0

    virtual_time.run(main())


# The last resort


def test_experts_that_nobody_holds_are_computed_here_if_they_can_be() -> None:
    async def main() -> None:
        ours = Ours(range(5, 8))
        async with star(own=ours) as it:
            it.placement.mark_down(B)
            assert it.holders.missing() == {}
            it.holders.require_all()
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()
            assert ours.n_runs == 1
            it.placement.mark_down(A)
            assert it.holders.missing() == dict.fromkeys(LAYERS, tuple(range(5)))
            assert (await fails(it)).experts == tuple(range(5))

    virtual_time.run(main())


@pytest.mark.parametrize("failure", [OSError("gone"), MemoryError(), RuntimeError("no thread")])
def test_own_experts_that_fail_leave_a_slow_peers_answer_to_count(failure: Exception) -> None:
    async def main() -> None:
        ours = Ours(range(5, 8))
        ours.failure = failure
        async with star(own=ours) as it:
            it.peers[B].latency_s = 2.0
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()
            assert it.dispatcher.stats.attempts.n_local == 1
            strike(it, B, "broken")
            error = await fails(it)
            assert type(failure).__name__ in str(error)

    virtual_time.run(main())


def test_peers_asked_in_turn_take_as_long_as_all_together_and_say_the_same() -> None:
    async def main() -> None:
        async with star() as it:
            for node in (A, B, C):
                it.peers[node].latency_s = 0.1
            x, ids, weights = choice(20)
            began = now()
            out = await it.dispatcher.dispatch(1, x, ids, weights)
            at_once = now() - began
            it.dispatcher.asks_in_turn = True
            began = now()
            assert (await it.dispatcher.dispatch(1, x, ids, weights)).tobytes() == out.tobytes()
            assert at_once < 0.15
            assert now() - began > 0.29

    virtual_time.run(main())


# Experts that are kept here


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
@pytest.mark.parametrize("wire", [EXACT, F32], ids=["exact", "sums"])
@pytest.mark.parametrize("is_replicated", [False, True], ids=["single", "replicas"])
def test_rows_for_kept_experts_never_leave(n_tokens: int, wire: Wire, is_replicated: bool) -> None:
    kept = (0, 1, 2, 6, 9)

    async def main() -> None:
        slices = {A: range(8), B: range(4, 12), C: (*range(4), *range(8, 12))} if is_replicated else SLICES
        ours = Ours((), is_last_resort=False)
        async with star(wire, slices=slices, own=ours) as it:
            ours.keep(kept)
            n_kept = n_rows = n_trips = 0
            for seed in range(10):
                x, ids, weights = choice(n_tokens, seed)
                out = await it.dispatcher.dispatch(1, x, ids, weights)
                expected = in_llama_order(1, x, ids, weights)
                if wire is EXACT:
                    assert out.tobytes() == expected.tobytes()
                else:
                    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
                n_kept += int(np.isin(ids, kept).sum())
                n_trips += not np.isin(ids, kept).all()
            asked = [request for _, request in it.seen]
            assert not np.isin(np.concatenate([request.expert_ids for request in asked]), kept).any()
            n_rows = sum(len(request.rows) for request in asked)
            stats = it.dispatcher.stats
            assert (stats.n_local_assignments, stats.n_assignments) == (n_kept, 10 * n_tokens * K)
            assert (stats.n_rows_sent, stats.n_round_trips) == (n_rows, n_trips)

    virtual_time.run(main())


def test_a_layer_whose_experts_are_all_kept_makes_no_trip() -> None:
    async def main() -> None:
        ours = Ours((), is_last_resort=False)
        async with star(own=ours) as it:
            ours.keep(range(E))
            spans: list[LayerSpan] = []
            it.dispatcher.on_layer = spans.append
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()
            assert it.seen == []
            stats = it.dispatcher.stats
            assert (stats.n_skipped_trips, stats.n_round_trips, stats.bytes_out) == (1, 0, 0)
            assert spans[0].n_destinations == 0

    virtual_time.run(main())


def test_kept_experts_that_fail_here_are_asked_of_their_peers() -> None:
    async def main() -> None:
        ours = Ours((), is_last_resort=False)
        ours.failure = ExpertsNotHeld("not any more")
        async with star(own=ours) as it:
            ours.keep((0, 6))
            x, ids, weights = choice(20)
            out = await it.dispatcher.dispatch(2, x, ids, weights)
            assert out.tobytes() == in_llama_order(2, x, ids, weights).tobytes()
            assert it.dispatcher.stats.n_local_assignments == 0

    virtual_time.run(main())


def test_a_short_step_asks_the_fewest_peers_for_what_is_not_kept() -> None:
    async def main() -> None:
        # Each row's experts 0 and 1 are kept; the rest of them all three peers hold between them, C alone too.
        slices = {A: (0, 1, 4), B: (0, 1, 5), C: (4, 5, *range(6, 12), 2, 3)}
        ours = Ours((), is_last_resort=False)
        async with star(slices=slices, own=ours) as it:
            ours.keep((0, 1))
            x, _, weights = choice(1)
            await it.dispatcher.dispatch(1, x, np.array([[0, 1, 4, 5]], np.int32), weights)
            assert {node for node, _ in it.seen} == {C}

    virtual_time.run(main())


def test_counters_of_a_rescued_layer_name_who_answered() -> None:
    async def main() -> None:
        async with twice() as it:
            strike(it, A, "broken")
            await it.dispatcher.dispatch(2, *choice(20))
            stats = it.dispatcher.stats
            assert A not in stats.assignments
            assert sum(stats.assignments.values()) == stats.n_assignments == 20 * K

    virtual_time.run(main())


# Counters


@pytest.mark.parametrize(("wire", "bytes_of_pair"), [(EXACT, 2), (F32, 6)], ids=["exact", "f32"])
def test_counters_add_up(wire: Wire, bytes_of_pair: int) -> None:
    async def main() -> None:
        async with star(wire) as it:
            n_rows = n_back = 0
            for layer, n_tokens in ((1, 3), (2, 20)):
                _, ids, _ = choice(n_tokens)
                await it.dispatcher.dispatch(layer, *choice(n_tokens))
                meets = [[len(set(row) & set(SLICES[node])) for node in SLICES] for row in ids.tolist()]
                n_rows += sum(n > 0 for row in meets for n in row)
                n_back += sum(map(sum, meets)) if wire is EXACT else sum(n > 0 for row in meets for n in row)
            stats = it.dispatcher.stats
            assert stats.n_round_trips == 2
            assert stats.n_token_layers == 23
            assert stats.n_assignments == 23 * K
            for node, experts in SLICES.items():
                of_node = sum(np.isin(choice(n)[1], list(experts)).sum() for n in (3, 20))
                assert stats.assignments[node] == of_node
            assert stats.bytes_out == n_rows * (4 * D + 1) + 23 * K * bytes_of_pair
            assert stats.bytes_back == n_back * 4 * D

    virtual_time.run(main())


def test_a_failed_layer_is_not_counted() -> None:
    async def main() -> None:
        async with star() as it:
            it.peers[B].lose_connections()
            it.peers[B].is_up = False
            await fails(it)
            assert it.dispatcher.stats.n_assignments == 0
            assert it.dispatcher.stats.assignments == {}

    virtual_time.run(main())


# Links and readiness


class FakeReadiness:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def began(self, exchange: object = None) -> None:
        self.told.append(("began", exchange))

    def ended(self, exchange: object = None, *, is_measured: bool = True) -> None:
        self.told.append(("ended", (exchange, is_measured)))


def test_the_waits_of_decoded_tokens_are_told_of_with_an_exchange_of_their_kind() -> None:
    async def main() -> None:
        async with star(F32) as it:
            readiness = FakeReadiness()
            it.dispatcher.readiness = cast(Readiness, readiness)
            await it.dispatcher.dispatch(2, *choice(3))
            assert readiness.told == [], "a prompt's are not"
            await it.dispatcher.dispatch(2, *choice(1))
            (began, _), (ended, (exchange, is_measured)) = readiness.told
            assert (began, ended, is_measured) == ("began", "ended", True)
            request, answer = exchange
            assert isinstance(request, m.Dispatch)
            assert isinstance(answer, m.Result)
            assert answer.rows.shape == request.rows.shape == (1, D)

    virtual_time.run(main())


def test_a_failed_wait_is_told_of_as_one_that_teaches_nothing() -> None:
    async def main() -> None:
        async with star(F32) as it:
            readiness = FakeReadiness()
            it.dispatcher.readiness = cast(Readiness, readiness)
            for peer in it.peers.values():
                peer.refusal = m.ErrorCode.INTERNAL
            with pytest.raises(ExpertUnavailable):
                await it.dispatcher.dispatch(2, *choice(1))
            assert readiness.told == [("began", None), ("ended", (None, False))]

    virtual_time.run(main())


def test_going_through_a_token_again_asks_nobody_and_changes_nothing() -> None:
    async def main() -> None:
        async with star(F32) as it:
            it.dispatcher.readiness = cast(Readiness, FakeReadiness())
            it.dispatcher.rehearse(m.GetStatus())  # nothing has been dispatched yet
            token = choice(1)
            first = await it.dispatcher.dispatch(2, *token)
            it.seen.clear()
            stats = copy.deepcopy(it.dispatcher.stats)
            it.dispatcher.rehearse(m.GetStatus())
            assert it.seen == []
            assert it.dispatcher.stats == stats
            assert (await it.dispatcher.dispatch(2, *token)).tobytes() == first.tobytes()

    virtual_time.run(main())


class FakeLinks:
    """A link to one node, which ends at a time of the test's choice."""

    def __init__(self, node: NodeId, *, is_over: bool) -> None:
        self.node, self.is_over, self.n_started = node, is_over, 0

    def link(self, node: NodeId) -> FakeLinks | None:
        return self if node == self.node else None

    def best(self, node: NodeId, connection: object) -> FakeLinks | None:
        return self.link(node)

    def start(self, message: m.Request, *, retry: Callable[[], asyncio.Future[m.Response]], **_: object) -> object:
        self.n_started += 1
        if self.is_over:
            raise ConnectionLost("it has just ended")
        return retry()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_dispatch_goes_over_the_link_there_is_and_over_quic_where_that_has_just_ended(is_over: bool) -> None:
    async def main() -> None:
        async with star(EXACT) as it:
            links = FakeLinks(B, is_over=is_over)
            it.dispatcher.links = cast(FastLinks, links)
            x, ids, weights = choice(9)
            out = await it.dispatcher.dispatch(1, x, ids, weights)
            assert out.tobytes() == in_llama_order(1, x, ids, weights).tobytes()
            assert links.n_started == 1
            assert sorted(node.raw for node, _ in it.seen) == sorted(node.raw for node in (A, B, C))

    virtual_time.run(main())


def test_a_link_that_is_late_for_a_layer_that_is_done_keeps_none_of_its_rows_and_asks_nobody_again() -> None:
    class Silent(FakeLinks):
        is_open = True

        def start(self, message: m.Request, *, retry: Callable[[], asyncio.Future[m.Response]], **_: object) -> object:
            self.retry = retry
            return asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with twice() as it:
            links = Silent(B, is_over=False)
            it.dispatcher.links = cast(FastLinks, links)
            x, ids, weights = choice(20)
            kept = weakref.ref(x)
            await it.dispatcher.dispatch(2, x, ids, weights)
            it.seen.clear()
            del x
            gc.collect()
            assert kept() is None
            with pytest.raises(ConnectionLost):
                links.retry()
            links.is_open = False
            assert links.retry().cancelled()
            assert it.seen == []

    virtual_time.run(main())


def test_a_batch_over_a_link_is_cut_into_fewer_chunks_of_no_other_bits() -> None:
    async def main() -> None:
        async with star(F32) as it:
            chunked(it)
            tokens = choice(64)
            far = await it.dispatcher.dispatch(2, *tokens)
            n_far = Counter(node for node, _ in it.seen)
            it.seen.clear()
            it.dispatcher.links = cast(FastLinks, FakeLinks(B, is_over=False))
            near = await it.dispatcher.dispatch(2, *tokens)
            n_near = Counter(node for node, _ in it.seen)
            assert near.tobytes() == far.tobytes()
            assert 1 < n_near[B] < n_far[B], "the first is NEAR_FACTOR times as large"
            assert (n_near[A], n_near[C]) == (n_far[A], n_far[C])

    virtual_time.run(main())


@pytest.mark.parametrize("nodes", [(), (B,), (A, B, C)])
def test_quic_s_socket_is_watched_unless_every_answer_comes_over_tls(nodes: tuple[NodeId, ...]) -> None:
    class Links(FakeLinks):
        def link(self, node: NodeId) -> FakeLinks | None:
            return self if node in nodes else None

    async def main() -> None:
        async with star(F32) as it:
            readiness = FakeReadiness()
            it.dispatcher.readiness = cast(Readiness, readiness)
            it.dispatcher.links = cast(FastLinks, Links(A, is_over=False))
            await it.dispatcher.dispatch(1, *choice(1))
            assert {node for node, _ in it.seen} >= {A, C}
            assert bool(readiness.told) == (len(nodes) < 3)

    virtual_time.run(main())


@pytest.mark.parametrize("wire", [EXACT, F32], ids=str)
def test_contributions_are_what_the_counters_say(wire: Wire) -> None:
    async def main() -> None:
        ours = Ours((), is_last_resort=False)
        async with star(wire, own=ours) as it:
            ours.keep((0, 6))
            counts = Contributions(it.placement, wall=lambda: 5.0, random=bytes)
            it.dispatcher.contributions = counts
            it.dispatcher.chunk_bytes = 500  # several batches for a peer
            for layer, n_tokens in ((1, 1), (2, 20), (1, 3)):
                await it.dispatcher.dispatch(layer, *choice(n_tokens))
            stats = it.dispatcher.stats
            of = counts.by_period()[0, bytes(8)]
            assert {node: totals.n_pairs for node, totals in of.items()} == {
                node: n_pairs for node, n_pairs in stats.assignments.items() if node != HERE
            }
            assert stats.assignments[HERE] > 0
            assert sum(totals.n_rows for totals in of.values()) == stats.n_rows_sent
            assert all(totals.weight == 1000 * totals.n_pairs for totals in of.values()), "one holder each"

    virtual_time.run(main())


def test_a_peer_whose_answer_was_not_used_has_contributed_nothing() -> None:
    async def main() -> None:
        async with twice() as it:
            counts = it.dispatcher.contributions = Contributions(it.placement, wall=lambda: 5.0, random=bytes)
            strike(it, A, "broken")
            await it.dispatcher.dispatch(2, *choice(20))
            await asyncio.sleep(0)
            (of,) = counts.by_period().values()
            assert A not in of
            assert sum(totals.n_pairs for totals in of.values()) == 20 * K
            assert all(totals.weight <= 1000 * totals.n_pairs for totals in of.values())

    virtual_time.run(main())


def test_whoever_asks_for_the_counts_gets_every_layer_and_who_kept_them_in_the_next_round() -> None:
    async def main() -> None:
        async with star(F32) as it:
            kept = it.dispatcher.stats
            spans: list[LayerSpan] = []
            it.dispatcher.on_layer = spans.append
            await it.dispatcher.dispatch(1, *choice(1))
            assert (kept.n_round_trips, spans) == (0, []), "the output does not wait for its being counted"
            await asyncio.sleep(0)
            assert (kept.n_round_trips, kept.n_assignments, len(spans)) == (1, K, 1)
            await it.dispatcher.dispatch(1, *choice(2))
            assert it.dispatcher.stats.n_assignments == 3 * K, "in the tick in which it ended"
            await it.dispatcher.dispatch(1, *choice(4))
            it.dispatcher.stats = fresh = DispatchStats()
            await asyncio.sleep(0)
            assert (kept.n_assignments, fresh.n_assignments, len(spans)) == (7 * K, 0, 3), "each layer once"

    virtual_time.run(main())


def test_what_the_router_chose_is_counted_also_where_nobody_holds_it() -> None:
    async def main() -> None:
        async with star(F32) as it:
            x, ids, weights = choice(1)
            await it.dispatcher.dispatch(1, x, ids, weights)
            chosen = np.zeros(E)
            chosen[ids[0]] = 1
            assert it.dispatcher.popularity.counts[0].tolist() == chosen.tolist()
            for node in it.placement.destinations:
                it.placement.mark_down(node)
            with pytest.raises(ExpertUnavailable):
                await it.dispatcher.dispatch(1, x, ids, weights)
            assert it.dispatcher.popularity.counts[0].tolist() == (2 * chosen).tolist()

    virtual_time.run(main())


def test_counts_by_node_are_of_those_used_last() -> None:
    stats = DispatchStats()
    for number in range(MAX_COUNTED + 50):
        stats.count_pairs(NodeId(number.to_bytes(32, "big")), 2)
        stats.count_pairs(A, 1)
    assert len(stats.assignments) == MAX_COUNTED
    assert stats.assignments[A] == MAX_COUNTED + 50
