"""The volunteer's process without a socket: what it loads, announces, answers and refuses."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from peer import auto, daemon, fetch, opening
from peer.auto import AutoExperts
from peer.compute import MAX_LINE, ComputeStats
from peer.config import PeerConfig, PeerReady, Progress
from peer.daemon import PeerDaemon
from peer.limits import Schedule
from swarm.errors import (
    ExpertsNotHeld,
    IntegrityError,
    Leaving,
    NetworkError,
    NotAgreed,
    Overloaded,
    RemoteProtocolError,
    UserError,
)
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet, NodeId
from swarm.model.block_store import BlockStore
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import manifest_of
from swarm.model.slices import write_slice
from swarm.net.addresses import parse_address
from swarm.net.byte_counts import ByteCounts
from swarm.net.path_finder import Face
from swarm.net.reachability import Reach
from swarm.peer_report import Scarcity, Standing
from swarm.plan.prospect import Prospect
from swarm.registry import announcer
from swarm.registry.client import RegistryAddress
from swarm.registry.publishers import Publishers
from swarm.registry.records import (
    ExpertAnnouncement,
    RecordKind,
    RoutingHistogram,
    SignedRecord,
    Withdrawal,
    verify,
)
from swarm.registry.scarcity import MOVE_PAUSE_S
from swarm.wire import messages as m
from swarm.wire.receipts import Totals, day_of, sign_receipt
from swarm.wire.rows import RowCodec
from swarm.wire.session import WIRE_VERSIONS
from tests.peer.conftest import FakeNetwork, SmallModel, dispatch, node

IDENTITY = Identity.from_seed(bytes(range(32)))
OUR_ADDRESS = "192.0.2.99:4000"
BACKBONE, OTHER_BACKBONE = NodeId(b"b" * 32), NodeId(b"o" * 32)


class FakeEndpoint:
    """An endpoint that nobody can reach but the test, by its handler."""

    last: FakeEndpoint

    def __init__(self, identity: Identity, **options: Any) -> None:
        self.identity = identity
        self.handler = options["handler"]
        self.serves = options["serves"]
        self.is_open = False
        self.counts = ByteCounts()
        self.connections: list[Any] = []
        type(self).last = self

    @property
    def bytes_sent(self) -> int:
        return self.counts.udp_sent

    @property
    def repair_bytes(self) -> int:
        return self.counts.udp_repair

    @property
    def bytes_received(self) -> int:
        return self.counts.udp_received

    def open_connections(self) -> list[Any]:
        return self.connections

    async def __aenter__(self) -> Self:
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def ask(self, request: m.Request, *, backbone: NodeId = BACKBONE) -> Any:
        answer = self.handler(SimpleNamespace(remote=backbone), request)
        return answer if isinstance(answer, m.Result) else await answer


class FakeFinder:
    """Every address is public, and no relay is needed."""

    def __init__(self, endpoint: FakeEndpoint, **_: Any) -> None:
        self.endpoint = endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def keep_reachable(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()

    def how_reached(self) -> Reach:
        return Reach.PUBLIC

    def mapping(self) -> m.Mapping:
        return m.Mapping.NONE

    def face(self, address: str, **_: Any) -> Face:
        return Face(addresses=(address,), is_public=True, vouchers=())


class FakeRegistry:
    """The registry's client over the fake network; keeps what is published."""

    network: FakeNetwork
    published: list[Any]
    others: list[ExpertAnnouncement]
    told: list[RoutingHistogram]
    has_lost_us = False

    def __init__(self, *_: object, **_options: object) -> None:
        self.offers = self.network.offers

    async def publish(self, signed: SignedRecord) -> int:
        record = verify(signed)
        self.published.append(record)
        return record.seq

    async def holders(self, _model: object) -> list[ExpertAnnouncement]:
        return list(self.others)

    async def histograms(self, _model: object) -> list[RoutingHistogram]:
        return self.told

    async def observed_address(self) -> str:
        if self.has_lost_us and self.published:
            raise NetworkError("no registry answers")
        return OUR_ADDRESS

    async def close(self) -> None:
        pass


class FakePool:
    network: FakeNetwork

    def __init__(self, _endpoint: object, _finder: object = None) -> None:
        self.connect = self.network.connect

    async def reach(self, who: Any, **_: Any) -> Any:
        return await self.connect(who.node, [parse_address(each) for each in who.addresses])

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, network: FakeNetwork) -> None:
    FakeRegistry.network = FakePool.network = network
    FakeRegistry.published, FakeRegistry.others, FakeRegistry.has_lost_us = [], [], False
    FakeRegistry.told = []
    monkeypatch.setattr(auto, "SETTLE_S", 0.0)
    monkeypatch.setattr(daemon, "Endpoint", FakeEndpoint)
    monkeypatch.setattr(daemon, "PathFinder", FakeFinder)
    monkeypatch.setattr(daemon, "RegistryClient", FakeRegistry)
    monkeypatch.setattr(daemon, "Pool", FakePool)
    monkeypatch.setattr(fetch, "RETRY_S", 0.0)
    monkeypatch.setattr(daemon, "LINGER_S", 0.0)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., PeerConfig]:
    def make(**fields: Any) -> PeerConfig:
        values: dict[str, Any] = {
            "registry": (RegistryAddress(address=parse_address("127.0.0.1:7440"), node=None),),
            "folders": Folders.below(tmp_path),
            "experts": frozenset({1, 2, 3}),
        }
        return PeerConfig(**values | fields)

    return make


@asynccontextmanager
async def joined(config: PeerConfig, progress: Progress | None = None) -> AsyncIterator[tuple[PeerReady, FakeEndpoint]]:
    """Run a peer until it is announced; stop it at the end."""
    ready: asyncio.Future[PeerReady] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(PeerDaemon(config, IDENTITY, progress).run(ready.set_result))
    waits: list[asyncio.Future[Any]] = [ready, task]
    await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ready.result(), FakeEndpoint.last
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled(), task
        assert not FakeEndpoint.last.is_open


async def refused(config: PeerConfig) -> None:
    """Run a peer that must not become ready; whatever ends it is raised."""
    try:
        async with asyncio.timeout(10):
            await PeerDaemon(config, IDENTITY).run(lambda _: pytest.fail("it must not get ready"))
    finally:
        assert not FakeEndpoint.last.is_open


def tagged(small: SmallModel, **fields: Any) -> m.Dispatch:
    return dispatch(**({"model_tag": small.manifest.model_id.raw[:8]} | fields))


# Joining


def lying(small: SmallModel) -> Callable[[m.Request], Awaitable[m.Response]]:
    """Return a backbone's answers whose blocks are all zeros."""
    honest = small.share()

    async def lie(request: m.Request) -> m.Response:
        response = await honest.answer(request)
        return m.BlockBytes(data=bytes(len(response.data))) if isinstance(response, m.BlockBytes) else response

    return lie


async def test_a_peer_with_a_file_loads_its_slice_announces_it_and_leaves_with_a_withdrawal(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    async with joined(config(model_file=small.path, layers=frozenset({1}))) as (ready, _):
        assert ready.node == str(IDENTITY.node_id)
        assert ready.model == f"small@{small.manifest.model_id.short}"
        assert ready.experts == "experts 1-3 of layers 1"
        assert ready.address == OUR_ADDRESS
        (record,) = FakeRegistry.published
        assert isinstance(record, ExpertAnnouncement)
        assert (record.node, record.model) == (IDENTITY.node_id, small.manifest.model_id)
        assert record.experts == ExpertSet.of([1], [1, 2, 3])
        assert (record.addresses, record.exact_kernels) == ((OUR_ADDRESS,), False)
        assert record.wire_versions == WIRE_VERSIONS
    last = FakeRegistry.published[-1]
    assert isinstance(last, Withdrawal)
    assert (last.withdraws, last.model) == (RecordKind.EXPERTS, small.manifest.model_id)
    assert network.requests == [], "with a file nobody is asked for blocks"


async def test_a_slice_may_hold_other_experts_in_each_layer(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1)
    experts = ExpertSet({0: frozenset({0, 5}), 1: frozenset({2})})
    async with joined(config(experts=experts)) as (ready, endpoint):
        assert ready.experts == "experts 0,5 of layers 0; experts 2 of layers 1"
        (record,) = FakeRegistry.published
        assert record.experts == experts
        assert isinstance(await endpoint.ask(tagged(small, layer=0, experts=(0, 5))), m.Result)
        assert isinstance(await endpoint.ask(tagged(small, layer=1, experts=(2, 2))), m.Result)
        with pytest.raises(ExpertsNotHeld):
            await endpoint.ask(tagged(small, layer=1, experts=(0, 5)))
    assert sorted(network.blocks_asked()) == [(0, 0), (0, 5), (1, 2)]


async def test_a_slice_of_layers_that_the_model_does_not_have_is_the_users_mistake(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    with pytest.raises(UserError, match="layer"):
        await refused(config(model_file=small.path, experts=ExpertSet({0: frozenset({1}), 7: frozenset({1})})))


async def test_without_a_file_the_registrys_only_model_is_fetched(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1)
    seen: dict[str, list[tuple[int, int]]] = {"fetching": [], "loading": []}

    class Seen(Progress):
        def fetching(self, n_done: int, n_total: int) -> None:
            seen["fetching"].append((n_done, n_total))

        def loading(self, n_done: int, n_total: int) -> None:
            seen["loading"].append((n_done, n_total))

    async with joined(config(), Seen()) as (ready, _):
        assert ready.experts == "experts 1-3 of layers 0-1"
        assert sorted(network.blocks_asked()) == [(layer, expert) for layer in (0, 1) for expert in (1, 2, 3)]
    size = small.manifest.spec.block_size_bytes(0)
    fetched = [(n * size, 6 * size) for n in range(7)]
    assert seen == {"fetching": fetched, "loading": [(n, 6) for n in range(1, 7)]}
    network.requests.clear()
    async with joined(config()):
        assert network.blocks_asked() == [], "the blocks are there already"


async def test_a_slice_file_is_joined_with_and_its_blocks_are_verified(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, tmp_path: Path
) -> None:
    path = tmp_path / "experts-1-2.gguf"
    with GgufFile(small.path) as file:
        write_slice(file, small.manifest, ExpertSet.of([0, 1], [1, 2]), path)
    (tmp_path / "manifest.json").write_bytes(small.manifest.to_bytes())
    network.add(small, 1)
    made = config(model_file=path, experts=None)
    async with joined(made) as (ready, endpoint):
        assert ready.experts == "experts 1-2 of layers 0-1"
        assert ready.model == f"small@{small.manifest.model_id.short}"
        assert isinstance(await endpoint.ask(tagged(small, experts=(1, 2))), m.Result)
    assert network.requests == [], "nothing is fetched"
    block = small.source.read_block(1, 2)
    data = bytearray(path.read_bytes())
    data[data.index(block[:64])] ^= 1
    path.write_bytes(data)
    FakeRegistry.published.clear()
    with pytest.raises(IntegrityError, match="layer 1, expert 2 is damaged"):
        await refused(made)
    with pytest.raises(UserError, match="the slice file does not hold experts 3 of layers 0-1"):
        await refused(config(model_file=path, experts=frozenset({2, 3})))
    assert FakeRegistry.published == []


@pytest.mark.parametrize("from_file", [True, False])
async def test_without_a_registry_nothing_is_hashed_or_loaded(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    async def away(_: FakeRegistry) -> str:
        raise NetworkError("no registry answers at 127.0.0.1:7440: no answer within 5 s")

    monkeypatch.setattr(FakeRegistry, "observed_address", away)
    monkeypatch.setattr(opening, "open_model_file", lambda *_: pytest.fail("opened first"))
    monkeypatch.setattr(opening, "choose_model", lambda *_: pytest.fail("chosen first"))
    with pytest.raises(NetworkError, match=r"^no registry answers at 127\.0\.0\.1:7440: .*; nothing was loaded"):
        await refused(config(model_file=small.path if from_file else None))


async def test_a_registry_that_goes_away_while_the_slice_is_loaded_is_asked_again(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "RETRY_S", 0.0)
    n_asked = 0

    async def comes_back(_: FakeRegistry) -> str:
        nonlocal n_asked
        n_asked += 1
        if 2 <= n_asked <= 4:
            raise NetworkError("no registry answers")
        return OUR_ADDRESS

    monkeypatch.setattr(FakeRegistry, "observed_address", comes_back)
    async with joined(config(model_file=small.path)) as (ready, _):
        assert ready.address == OUR_ADDRESS
    assert n_asked > 5


async def test_a_peer_cancelled_while_it_loads_stops_loading_and_frees_its_slice(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    closed: list[ExpertFfn] = []
    has_begun, may_go_on = threading.Event(), threading.Event()
    close = ExpertFfn.close
    monkeypatch.setattr(ExpertFfn, "close", lambda ffn: (closed.append(ffn), close(ffn))[1])

    class Slow(Progress):
        def loading(self, n_done: int, n_total: int) -> None:
            seen.append(n_done)
            has_begun.set()
            assert may_go_on.wait(5)

    task = asyncio.create_task(PeerDaemon(config(model_file=small.path), IDENTITY, Slow()).run(lambda _: None))
    assert await asyncio.to_thread(has_begun.wait, 5)
    task.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert seen == [1]
    assert len(closed) == 1
    assert not FakeEndpoint.last.is_open


async def test_the_advertised_address_replaces_the_observed_one(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    async with joined(config(model_file=small.path, advertise="198.51.100.4:9000")) as (ready, _):
        assert ready.address == "198.51.100.4:9000"
        assert FakeRegistry.published[0].addresses == ("198.51.100.4:9000",)


async def test_exact_kernels_are_turned_on_before_the_library_is_loaded_and_announced(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(daemon, "use_exact_kernels", lambda: order.append("exact"))
    monkeypatch.setattr(daemon, "load_library", lambda: order.append("load"))
    async with joined(config(model_file=small.path, exact_kernels=True)):
        assert order == ["exact", "load"]
        assert FakeRegistry.published[0].exact_kernels is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": frozenset({5, 6})}, r"no such experts: got 5-6, the model's are 0-5"),
        ({"experts": frozenset()}, "no experts chosen"),
        ({"layers": frozenset({0, 2})}, "layer 2 has no experts"),
        ({"layers": frozenset()}, "no experts chosen"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False])
async def test_experts_that_the_model_does_not_have_are_the_users_mistake(
    small: SmallModel,
    config: Callable[..., PeerConfig],
    network: FakeNetwork,
    fields: dict[str, Any],
    message: str,
    from_file: bool,
) -> None:
    network.add(small, 1)
    with pytest.raises(UserError, match=message):
        await refused(config(**fields, model_file=small.path if from_file else None))
    assert FakeRegistry.published == []
    assert network.blocks_asked() == [], "nothing is downloaded first"


async def test_a_model_that_nobody_offers_is_the_users_mistake(config: Callable[..., PeerConfig]) -> None:
    with pytest.raises(UserError, match="offers no model"):
        await refused(config())


async def test_a_registry_lost_right_after_the_announcement_is_a_network_error(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    FakeRegistry.has_lost_us = True
    with pytest.raises(NetworkError, match="no registry answers"):
        await refused(config(model_file=small.path))
    assert isinstance(FakeRegistry.published[-1], Withdrawal)


# Choosing by itself


def room_for(small: SmallModel, n_experts: int) -> AutoExperts:
    """Return a budget for so many experts of both layers."""
    size = sum(small.manifest.spec.block_size_bytes(layer) for layer in (0, 1))
    return AutoExperts(memory_bytes=auto.OVERHEAD_BYTES + n_experts * size, disk_bytes=10**9)


def other_peer(small: SmallModel, experts: ExpertSet) -> ExpertAnnouncement:
    return ExpertAnnouncement(
        node=node(9),
        seq=1,
        ttl_s=60,
        model=small.manifest.model_id,
        model_name="small",
        experts=experts,
        addresses=("192.0.2.9:1",),
        exact_kernels=False,
        wire_versions=WIRE_VERSIONS,
    )


@pytest.mark.parametrize("from_file", [True, False])
async def test_a_peer_left_to_choose_claims_what_nobody_holds_before_it_loads_it(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, from_file: bool
) -> None:
    network.add(small, 1)
    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [0, 1, 3, 5]))]
    made = config(experts=room_for(small, 2), model_file=small.path if from_file else None)
    async with joined(made) as (ready, endpoint):
        assert ready.experts == "experts 2,4 of layers 0-1"
        claim, *_, last = FakeRegistry.published
        assert (claim.is_loading, last.is_loading) == (True, False)
        assert claim.experts == last.experts == ExpertSet.of([0, 1], [2, 4])
        assert isinstance(await endpoint.ask(tagged(small, experts=(2, 4))), m.Result)
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    assert set(network.blocks_asked()) == (set() if from_file else {(0, 2), (1, 2), (0, 4), (1, 4)})


async def test_a_claim_is_withdrawn_when_the_experts_cannot_be_had(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1, lying(small))
    with pytest.raises(IntegrityError):
        await refused(config(experts=room_for(small, 2)))
    *claims, last = FakeRegistry.published
    assert claims
    assert all(claim.is_loading for claim in claims)
    assert isinstance(last, Withdrawal)


async def test_a_choice_keeps_to_the_layers_that_were_asked_for(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    made = config(experts=room_for(small, 6), layers=frozenset({1}), model_file=small.path)
    async with joined(made) as (ready, _):
        assert ready.experts == "experts 0-5 of layers 1"
    with pytest.raises(UserError, match="not one expert fits"):
        await refused(config(experts=room_for(small, 0), model_file=small.path))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "REBALANCE_S", 0.01)
    monkeypatch.setattr(daemon, "GRACE_S", 0.1)
    monkeypatch.setattr("swarm.registry.scarcity.MOVE_PAUSE_S", 0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("moving")
async def test_a_peer_moves_to_what_is_scarcer_and_computes_both_until_backbones_know(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    assert MOVE_PAUSE_S >= 600
    network.add(small, 1)
    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [0, 1, 2, 3]))]
    async with joined(config(experts=room_for(small, 2))) as (_, endpoint):
        assert isinstance(await endpoint.ask(tagged(small, experts=(4, 5))), m.Result)
        FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [2, 3, 4, 5]))]
        await until(lambda: FakeRegistry.published[-1].experts == ExpertSet.of([0, 1], [0, 1]))
        assert not FakeRegistry.published[-1].is_loading
        assert isinstance(await endpoint.ask(tagged(small, experts=(4, 5))), m.Result), "who has not heard of it yet"
        assert isinstance(await endpoint.ask(tagged(small, experts=(0, 1))), m.Result)
        with pytest.raises(ExpertsNotHeld):
            await endpoint.ask(tagged(small, experts=(1, 4)))
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
        assert (status["experts"], status["n_dispatches"], status["n_assignments"]) == ([["0-1", "0-1"]], 3, 6)
        await asyncio.sleep(0.3)
        with pytest.raises(ExpertsNotHeld):
            await endpoint.ask(tagged(small, experts=(4, 5)))
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
        assert (status["n_dispatches"], status["n_assignments"]) == (3, 6), "counts go on"


@pytest.mark.usefixtures("moving")
async def test_a_peer_that_rests_does_not_move(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = False
    n_looks = 0

    async def better(self: auto.Chooser, held: ExpertSet, since_s: float) -> None:
        nonlocal n_looks
        n_looks += may_look

    monkeypatch.setattr(auto.Chooser, "better", better)
    network.add(small, 1)
    now = datetime.datetime.now()
    hour_later, hour_before = ((now + datetime.timedelta(hours=each)).time() for each in (1, -1))
    closed = Schedule(((hour_later, hour_before),))
    async with joined(config(experts=room_for(small, 2), schedule=closed)):
        await until(lambda: isinstance(FakeRegistry.published[-1], Withdrawal))
        may_look = True
        await asyncio.sleep(0.1)
        assert n_looks == 0


@pytest.mark.usefixtures("moving")
async def test_what_a_former_slice_never_answers_ends_with_it(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "ANSWERED_TIMEOUT_S", 0.1)
    monkeypatch.setattr("peer.slice.LOOK_S", 0.01)
    may_end = threading.Event()
    really_run = ExpertExecutor.run

    def run(self: ExpertExecutor, layer: int, *arguments: Any) -> Any:
        if layer == 1:
            assert may_end.wait(10)
        return really_run(self, layer, *arguments)

    monkeypatch.setattr(ExpertExecutor, "run", run)
    network.add(small, 1)
    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [0, 1, 2, 3]))]
    async with joined(config(experts=room_for(small, 2))) as (_, endpoint):
        stuck = asyncio.ensure_future(endpoint.ask(tagged(small, layer=1, experts=(4, 5))))
        waiting = asyncio.ensure_future(endpoint.ask(tagged(small, experts=(4, 5))))
        FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [2, 3, 4, 5]))]
        await until(lambda: FakeRegistry.published[-1].experts == ExpertSet.of([0, 1], [0, 1]))
        await until(waiting.done)  # beyond the grace and the deadline
        assert waiting.cancelled()
        assert not stuck.done(), "what is under way is finished"
        may_end.set()
        assert isinstance(await asyncio.wait_for(stuck, 5), m.Result)


@pytest.mark.usefixtures("moving")
async def test_a_move_that_somebody_else_has_made_first_is_given_up(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    honest = small.share()
    gap = [other_peer(small, ExpertSet.of([0, 1], [2, 3, 4, 5]))]
    filled = [other_peer(small, ExpertSet.of([0, 1], range(6)))]

    async def fill(request: m.Request) -> m.Response:
        if isinstance(request, m.GetBlock) and FakeRegistry.others == gap:
            FakeRegistry.others = filled
        return await honest.answer(request)

    network.add(small, 1, fill)
    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [0, 1, 2, 3]))]
    async with joined(config(experts=room_for(small, 2))) as (_, endpoint):
        FakeRegistry.others = gap
        await until(lambda: len(set(network.blocks_asked())) == 8)
        await asyncio.sleep(0.1)
        assert FakeRegistry.published[-1].experts == ExpertSet.of([0, 1], [4, 5])
        assert isinstance(await endpoint.ask(tagged(small, experts=(4, 5))), m.Result)


@pytest.mark.usefixtures("moving")
async def test_without_memory_for_both_slices_a_peer_stays(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.add(small, 1)
    is_asked = asyncio.Event()

    def little() -> int:
        is_asked.set()
        return 1000

    monkeypatch.setattr(daemon, "free_memory_bytes", little)
    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [0, 1, 2, 3]))]
    async with joined(config(experts=room_for(small, 2))):
        FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [2, 3, 4, 5]))]
        await asyncio.wait_for(is_asked.wait(), 10)
        await asyncio.sleep(0.05)
        assert len(set(network.blocks_asked())) == 4, "nothing is fetched"
        assert FakeRegistry.published[-1].experts == ExpertSet.of([0, 1], [4, 5])


# Integrity


async def test_a_file_that_changed_by_one_byte_since_it_was_hashed_is_refused_at_load(
    small: SmallModel, config: Callable[..., PeerConfig], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small.path.read_bytes())
    made = config(model_file=path)
    manifest_of(path, made.folders.cache)  # known by path, size and time from here on
    before = path.stat()
    block = small.source.read_block(1, 2)
    data = bytearray(path.read_bytes())
    plane = block[: small.manifest.spec.expert_tensors(1)[0].expert_size_bytes]
    assert data.count(plane) == 1
    data[data.index(plane) + 77] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(IntegrityError, match="layer 1, expert 2 is damaged"):
        await refused(made)
    assert FakeRegistry.published == [], "nothing was announced"


async def test_a_fetched_block_that_was_damaged_on_disk_is_refused_and_fetched_anew_the_next_time(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1)
    made = config()
    async with joined(made):
        pass
    FakeRegistry.published.clear()
    path = BlockStore(made.folders.cache, small.manifest).folder / "blk.0.3"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="layer 0, expert 3 is damaged"):
        await refused(made)
    assert FakeRegistry.published == []
    network.requests.clear()
    async with joined(made):
        assert network.blocks_asked() == [(0, 3)]


async def test_a_lying_backbone_is_refused_at_fetch(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1, lying(small))
    with pytest.raises(IntegrityError):
        await refused(config())
    assert FakeRegistry.published == []


async def test_a_planted_fault_changes_one_byte_after_the_check(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(ExpertFfn, "flip_byte", lambda _self, *where: flipped.append(where))
    async with joined(config(model_file=small.path, fault=(0, 2))):
        pass
    assert flipped == [(0, 2, small.manifest.spec.expert_tensors(0)[0].expert_size_bytes // 2)]
    with pytest.raises(UserError, match="layer 0, expert 5 is not in this slice"):
        await refused(config(model_file=small.path, fault=(0, 5)))


# Answering


async def test_a_dispatch_is_answered_and_counted(small: SmallModel, config: Callable[..., PeerConfig]) -> None:
    async with joined(config(model_file=small.path)) as (_, endpoint):
        assert set(endpoint.serves) == {m.Dispatch, m.GetStatus, m.GetManifest, m.GetBlock}
        result = await endpoint.ask(tagged(small))
        assert isinstance(result, m.Result)
        assert result.rows.shape == (2, 64)
        assert np.isfinite(result.rows).all()
        assert result.rows.any()
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
    assert status["role"] == "peer"
    assert status["model"] == str(small.manifest.model_id)
    assert status["experts"] == [["0-1", "1-3"]]
    assert (status["n_dispatches"], status["n_rows"], status["n_assignments"]) == (1, 2, 3)
    assert status["n_in_line"] == 0
    assert status["compute_s"] > 0


async def test_a_dispatch_of_another_model_is_not_found(small: SmallModel, config: Callable[..., PeerConfig]) -> None:
    async with joined(config(model_file=small.path)) as (_, endpoint):
        tag = bytearray(small.manifest.model_id.raw[:8])
        tag[7] ^= 1
        with pytest.raises(LookupError, match=f"serves model {small.manifest.model_id.short}"):
            await endpoint.ask(tagged(small, model_tag=bytes(tag)))
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
    assert (status["n_dispatches"], status["n_assignments"]) == (0, 0)


async def test_a_dispatch_to_an_expert_that_is_not_held_is_not_found(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    async with joined(config(model_file=small.path)) as (_, endpoint):
        with pytest.raises(ExpertsNotHeld, match="layer 0, experts 4"):  # an old view, not an attack: the link stays
            await endpoint.ask(tagged(small, experts=(1, 4)))


class HeldCompute:
    """A line in which everything stays until the test lets it go."""

    def __init__(self, *_: object) -> None:
        self.stats = ComputeStats(n_computations=10, compute_s=1.0)
        self.line: list[asyncio.Future[m.Result]] = []
        self.is_stopped = False

    def at_once(self, request: m.Dispatch, asker: object) -> None:
        return None

    def start(self, request: m.Dispatch, asker: object) -> asyncio.Future[m.Result]:
        answer: asyncio.Future[m.Result] = asyncio.get_running_loop().create_future()
        self.line.append(answer)
        return answer

    @property
    def n_in_line(self) -> int:
        return sum(not answer.done() for answer in self.line)

    def close(self) -> None:
        pass

    def stop(self) -> None:
        self.is_stopped = True

    async def wait_closed(self) -> None:
        assert self.is_stopped
        if self.line:
            await asyncio.wait(self.line)


async def let_run() -> None:
    """Let everything happen that waits for nothing but the loop."""
    for _ in range(100):
        await asyncio.sleep(0)


def some_result() -> m.Result:
    return m.Result(codec=RowCodec.F32, rows=np.zeros((1, 1), np.float32), compute_us=1, queue_us=1)


async def test_a_leaving_peer_withdraws_takes_nothing_new_and_finishes_what_it_has(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.slice.Compute", HeldCompute)
    peer = PeerDaemon(config(model_file=small.path), IDENTITY)
    ready = asyncio.Event()
    task = asyncio.create_task(peer.run(lambda _: ready.set()))
    await ready.wait()
    assert peer._slice is not None
    compute, endpoint = peer._slice.compute, FakeEndpoint.last
    assert isinstance(compute, HeldCompute)
    asked = asyncio.create_task(endpoint.ask(tagged(small)))
    await let_run()
    task.cancel()
    await let_run()
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    with pytest.raises(Leaving):
        await endpoint.ask(tagged(small))
    await let_run()
    assert not task.done(), "it has something to finish"
    assert endpoint.is_open
    compute.line[0].set_result(some_result())
    await asked
    await asyncio.wait([task])
    assert task.cancelled()
    assert not endpoint.is_open


async def test_a_peer_told_twice_to_leave_leaves_at_once(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.slice.Compute", HeldCompute)
    peer = PeerDaemon(config(model_file=small.path), IDENTITY)
    ready = asyncio.Event()
    task = asyncio.create_task(peer.run(lambda _: ready.set()))
    await ready.wait()
    asked = asyncio.create_task(FakeEndpoint.last.ask(tagged(small)))
    await let_run()
    task.cancel()
    await let_run()
    assert not task.done()
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.done(), "though what it computes is not done"
    assert peer._slice is not None
    assert isinstance(peer._slice.compute, HeldCompute)
    assert peer._slice.compute.is_stopped
    asked.cancel()


async def test_a_backbone_has_its_share_of_the_line_and_is_told_when_to_come_back(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.slice.Compute", HeldCompute)
    async with joined(config(model_file=small.path)) as (_, endpoint):

        def ask(backbone: NodeId) -> Any:
            return endpoint.handler(SimpleNamespace(remote=backbone), tagged(small))

        answers = [ask(BACKBONE) for _ in range(MAX_LINE)]
        with pytest.raises(Overloaded) as busy:
            ask(BACKBONE)
        assert busy.value.retry_after_s == daemon.MAX_RETRY_S, "128 that take 0.1 s each"
        others = [ask(OTHER_BACKBONE) for _ in range(MAX_LINE // 2)]
        with pytest.raises(Overloaded):
            ask(OTHER_BACKBONE)
        for answer in answers[: MAX_LINE // 2]:
            answer.set_result(some_result())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            ask(BACKBONE)  # it has as much as the other now
        for answer in [*answers[MAX_LINE // 2 :], *others[1:]]:
            answer.set_result(some_result())
        await asyncio.sleep(0)
        others[0].set_result(some_result())
        await asyncio.sleep(0)
        ask(BACKBONE).set_result(some_result())


async def test_anything_else_breaks_the_protocol(small: SmallModel, config: Callable[..., PeerConfig]) -> None:
    async with joined(config(model_file=small.path)) as (_, endpoint):
        with pytest.raises(RemoteProtocolError, match="not for a peer: got Watch"):
            await endpoint.ask(m.Watch(model_id=small.manifest.model_id, cursor=0))


async def test_while_it_loads_a_peer_tells_its_status_and_refuses_dispatches(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    honest, is_asked, may_answer = small.share(), asyncio.Event(), asyncio.Event()

    async def slow(request: m.Request) -> m.Response:
        is_asked.set()
        await may_answer.wait()
        return await honest.answer(request)

    network.add(small, 1, slow)
    task = asyncio.create_task(PeerDaemon(config(), IDENTITY).run(lambda _: None))
    await asyncio.wait_for(is_asked.wait(), 10)
    with pytest.raises(LookupError, match="still loading"):
        await FakeEndpoint.last.ask(tagged(small))
    status = json.loads((await FakeEndpoint.last.ask(m.GetStatus())).data)
    assert status["model"] is None
    assert "n_assignments" not in status
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    assert FakeRegistry.published == []
    assert [to for to, _ in network.requests] == [node(1)]


# What the volunteer is asked and shown


class Link:
    """A connection to a node that answers nothing."""

    rtt_s = 0.01

    def __init__(self, remote: NodeId, *, is_client: bool) -> None:
        self.remote, self.is_client, self.is_open = remote, is_client, True
        self.path = SimpleNamespace(is_relayed=False)

    def close(self) -> None:
        self.is_open = False

    async def request(self, message: m.Request, **_: Any) -> m.Response:
        raise NetworkError("no answer")


@pytest.mark.parametrize("from_file", [True, False])
async def test_a_volunteer_is_asked_before_anything_is_fetched_or_loaded(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, from_file: bool
) -> None:
    network.add(small, 1)
    made = config(model_file=small.path if from_file else None, max_upload_bytes_s=1e6)
    asked: list[Prospect] = []

    async def refuse(plan: Prospect) -> bool:
        asked.append(plan)
        return False

    with pytest.raises(NotAgreed):
        await PeerDaemon(made, IDENTITY, agree=refuse).run(lambda _: pytest.fail("it must not get ready"))
    (plan,) = asked
    assert network.blocks_asked() == []
    assert FakeRegistry.published == []
    block = small.manifest.spec.block_size_bytes(0)
    n_fetch = 0 if from_file else 6
    assert (plan.n_blocks, plan.slice_bytes, plan.n_fetch, plan.fetch_bytes) == (6, 6 * block, n_fetch, n_fetch * block)
    assert plan.publisher == ("" if from_file else str(node(1)))
    assert (plan.max_upload_bytes_s, plan.max_download_bytes_s) == (1e6, None)

    async def agree(plan: Prospect) -> bool:
        asked.append(plan)
        return True

    ready = asyncio.Event()
    task = asyncio.create_task(PeerDaemon(made, IDENTITY, agree=agree).run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    task.cancel()
    await asyncio.wait([task])
    if not from_file:
        assert len(network.blocks_asked()) == 6
        with pytest.raises(NotAgreed):
            await PeerDaemon(made, IDENTITY, agree=refuse).run(lambda _: None)
        assert asked[-1].fetch_bytes == 0, "what is here already is not fetched again"


async def test_the_demand_that_a_volunteer_is_shown_is_the_word_of_trusted_backbones_alone(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork, tmp_path: Path
) -> None:
    network.add(small, 1)
    FakeRegistry.told = [
        RoutingHistogram(
            node=node(number),
            seq=1,
            ttl_s=60,
            model=small.manifest.model_id,
            n_tokens=n_tokens,
            window_s=10,
            loads=((0, "f"),),
        )
        for number, n_tokens in ((1, 50), (2, 10**18))  # the second one has not even an offer
    ]
    asked: list[Prospect] = []

    async def refuse(plan: Prospect) -> bool:
        asked.append(plan)
        return False

    for publishers in (None, Publishers(tmp_path / "known", given=[node(1)])):
        with pytest.raises(NotAgreed):
            await PeerDaemon(config(publishers=publishers), IDENTITY, agree=refuse).run(lambda _: None)
        assert asked.pop().tokens_per_s == 5.0


async def test_a_claim_that_the_volunteer_does_not_want_is_withdrawn(
    small: SmallModel, config: Callable[..., PeerConfig], network: FakeNetwork
) -> None:
    network.add(small, 1)

    async def refuse(plan: Prospect) -> bool:
        return False

    with pytest.raises(NotAgreed):
        await PeerDaemon(config(experts=room_for(small, 2)), IDENTITY, agree=refuse).run(lambda _: None)
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    assert network.blocks_asked() == []


async def test_a_report_follows_a_peer_from_joining_to_leaving(
    small: SmallModel, config: Callable[..., PeerConfig]
) -> None:
    told = []

    class Told(Progress):
        def leaving(self) -> None:
            told.append(peer.report().standing)

    FakeRegistry.others = [other_peer(small, ExpertSet.of([0, 1], [1]))]
    peer = PeerDaemon(config(model_file=small.path, is_watched=True), IDENTITY, Told())
    assert peer.report().standing is Standing.JOINING
    ready = asyncio.Event()
    task = asyncio.create_task(peer.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    await let_run()
    FakeEndpoint.last.connections = [
        Link(remote, is_client=is_client)
        for is_client, remote in ((False, BACKBONE), (False, OTHER_BACKBONE), (True, BACKBONE))
    ]
    counts = FakeEndpoint.last.counts
    counts.udp_sent, counts.udp_repair, counts.udp_received, counts.relayed_sent = 7, 2, 5, 3
    await FakeEndpoint.last.ask(tagged(small))
    report = peer.report()
    assert (report.standing, report.why, report.reach) == (Standing.SERVING, "", "public")
    assert [view.node for view in report.backbones] == [str(BACKBONE)], "who has asked for something"
    assert (report.n_rows, report.n_pairs, report.n_in_line) == (2, 3, 0)
    assert (report.bytes_sent, report.bytes_received) == (9, 5)
    assert report.bytes_by_path == {"direct": (6, 5), "relay": (3, 0)}
    assert report.scarcity == Scarcity(n_blocks=6, n_alone=4, n_others_least=0, n_others_most=1)
    peer._pauses.why = "others need the machine"
    assert (peer.report().standing, peer.report().why) == (Standing.RESTING, "others need the machine")
    peer._pauses.why = ""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert told == [Standing.LEAVING]


async def test_a_peer_that_rests_finishes_what_it_has_and_parts_from_its_users_alone(
    small: SmallModel, config: Callable[..., PeerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.slice.Compute", HeldCompute)
    peer = PeerDaemon(config(model_file=small.path), IDENTITY)
    ready = asyncio.Event()
    task = asyncio.create_task(peer.run(lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    assert peer._slice is not None
    compute, endpoint = peer._slice.compute, FakeEndpoint.last
    assert isinstance(compute, HeldCompute)
    ours, theirs = Link(BACKBONE, is_client=True), Link(BACKBONE, is_client=False)
    endpoint.connections = [ours, theirs]
    asked = asyncio.create_task(endpoint.ask(tagged(small)))
    await let_run()
    is_busy = True
    monkeypatch.setattr(peer._pauses, "_reasons", [lambda: "others need the machine" if is_busy else ""])
    peer._pauses.look()
    await let_run()
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    assert theirs.is_open, "it has something to finish"
    with pytest.raises(Leaving):
        await endpoint.ask(tagged(small))
    compute.line[0].set_result(some_result())
    await asked
    await until(lambda: not theirs.is_open)
    is_busy = False
    peer._pauses.look()
    await until(lambda: isinstance(FakeRegistry.published[-1], ExpertAnnouncement))
    assert ours.is_open, "its own connections, to the registry, stay"
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("name", ["", "Ann"])
async def test_receipts_are_fetched_kept_and_presented_by_who_shows_a_name(
    small: SmallModel, config: Callable[..., PeerConfig], name: str
) -> None:
    backbone = Identity.from_seed(b"7" * 32)
    totals = Totals(n_rows=2, n_pairs=3, weight=3000)
    day = day_of(time.time())
    receipt = sign_receipt(backbone, peer=IDENTITY.node_id, period=bytes(8), day=day, totals=totals)

    class Asked:
        remote, is_client, is_open, rtt_s = backbone.node_id, False, True, 0.01
        n_asked = 0

        async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int) -> m.Status:
            Asked.n_asked += 1
            return m.Status(data=json.dumps({"receipts": [receipt.text]}).encode())

    settings = config(model_file=small.path, name=name)
    async with joined(settings) as (_, endpoint):
        endpoint.connections = [Asked()]
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
        assert status["contribution"] == {"n_rows": 0, "n_pairs": 0, "points": 0}
        assert ("receipts" in status) == bool(name)
        await endpoint.ask(tagged(small), backbone=backbone.node_id)
    assert Asked.n_asked == 1, "who leaves asks for the last one"
    async with joined(settings) as (_, endpoint):
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
    assert status["contribution"] == {"n_rows": 2, "n_pairs": 3, "points": 3}
    assert status.get("receipts") == ([receipt.text] if name else None)
    async with joined(config(model_file=small.path, name=name, max_upload_bytes_s=50_000.0)) as (_, endpoint):
        endpoint.counts.udp_sent += 10_000_000
        status = json.loads((await endpoint.ask(m.GetStatus())).data)
    assert "receipts" not in status, "whoever asks again and again does not make it send more than its owner allows"
