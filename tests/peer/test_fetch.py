"""Getting a slice from others: who is asked for what, what is believed, what is kept."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import fetch
from peer.fetch import SliceFetcher, choose_model, fetch_manifest
from swarm.errors import (
    ConnectionLost,
    IntegrityError,
    NetworkError,
    Overloaded,
    RemoteProtocolError,
    RemoteRefused,
    UserError,
)
from swarm.ids import ExpertSet, ModelId
from swarm.model import block_store
from swarm.model.block_store import BlockStore
from swarm.wire import messages as m
from tests.peer.conftest import Answer, FakeNetwork, SmallModel, announcement, node, offer, wait_until

A, B = ModelId(bytes.fromhex("abcd" + "11" * 30)), ModelId(bytes.fromhex("abce" + "22" * 30))
WANTED = ExpertSet.of([0, 1], [1, 2, 5])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RETRY_S", 0.0)


# Which model


def test_the_only_model_needs_no_name() -> None:
    offers = [offer(A, 1), offer(A, 2)]
    assert choose_model(offers, None) == (A, offers)


@pytest.mark.parametrize("wanted", ["one", f"one@{A.short}", str(A), str(A)[:4], A.short])
def test_a_model_is_found_by_name_and_by_the_beginning_of_its_id(wanted: str) -> None:
    one, two = offer(A, 1, model_name="one"), offer(B, 2, model_name="two")
    assert choose_model([two, one], wanted) == (A, [one])


@pytest.mark.parametrize("wanted", ["three", f"one@{B.short}", "abc", "ONE", "one@", str(A)[1:], "cd11"])
def test_another_name_finds_nothing_and_is_said(wanted: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"no model {wanted!r}")):
        choose_model([offer(A, 1, model_name="one"), offer(B, 2, model_name="two")], wanted)


def test_several_models_are_listed_to_choose_from() -> None:
    offers = [offer(A, 1, model_name="one"), offer(B, 2, model_name="two"), offer(A, 3, model_name="one")]
    with pytest.raises(UserError, match=f"several models fit, .*: one@{A.short}, two@{B.short}$"):
        choose_model(offers, None)


def test_a_name_that_two_models_have_does_not_choose_between_them() -> None:
    with pytest.raises(UserError, match="several models fit"):
        choose_model([offer(A, 1), offer(B, 2)], "small")
    assert choose_model([offer(A, 1), offer(B, 2)], f"small@{B.short}")[0] == B


def test_an_offer_without_blocks_is_no_source() -> None:
    bare = offer(B, 2, offers_blocks=False)
    assert choose_model([bare, offer(A, 1)], None) == (A, [offer(A, 1)])
    for wanted in (None, "small", B.short):
        with pytest.raises(
            UserError,
            match=f"^model small@{B.short} is served, but no backbone offers its experts; give --model FILE$",
        ):
            choose_model([bare, bare], wanted)
    with pytest.raises(UserError, match=f"^models one@{A.short}, small@{B.short} are served, but"):
        choose_model([bare, offer(A, 1, model_name="one", offers_blocks=False)], None)
    with pytest.raises(UserError, match="no model 'other'"):
        choose_model([bare], "other")


def test_the_web_or_peers_make_up_for_a_backbone_without_blocks() -> None:
    on_the_web = offer(A, 1, offers_blocks=False, sources=("hf://owner/repo/m.gguf",))
    assert choose_model([on_the_web], None) == (A, [on_the_web])
    bare = offer(B, 2, offers_blocks=False)
    assert choose_model([bare], None, held={B}) == (B, [bare])
    with pytest.raises(UserError, match="no backbone offers its experts"):
        choose_model([bare], None, held={A})


def test_no_model_at_all_says_what_to_do() -> None:
    with pytest.raises(
        UserError, match=r"^the registry offers no model yet; start a backbone with swarm serve, or give"
    ):
        choose_model([], None)


# The manifest


def lying_manifest(change: Callable[[bytes], bytes], small: SmallModel) -> Answer:
    honest = small.share()

    async def answer(request: m.Request) -> m.Response:
        response = await honest.answer(request)
        return m.ManifestBytes(data=change(response.data)) if isinstance(response, m.ManifestBytes) else response

    return answer


async def test_the_manifest_comes_from_the_first_who_gives_the_right_one(
    network: FakeNetwork, small: SmallModel
) -> None:
    network.add(small, 1, lying_manifest(lambda data: data.replace(b'"n_layers":2', b'"n_layers":3'), small))
    network.add(small, 2)
    network.add(small, 3)
    assert network.listed
    manifest = await fetch_manifest(network, small.manifest.model_id, network.listed)  # type: ignore[arg-type]
    assert manifest == small.manifest
    assert [to for to, _ in network.requests] == [node(1), node(2)]


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-1], lambda data: data + b" ", lambda data: b"[" * 1000]
)
async def test_a_manifest_that_is_not_the_models_is_refused(
    network: FakeNetwork, small: SmallModel, change: Callable[[bytes], bytes]
) -> None:
    network.add(small, 1, lying_manifest(change, small))
    with pytest.raises(NetworkError, match=f"nobody gives the manifest.*node {node(1).short}"):
        await fetch_manifest(network, small.manifest.model_id, network.listed or [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [NetworkError("gone"), RemoteProtocolError("bad frame"), LookupError("not here"), Overloaded("busy")]
)
async def test_a_node_that_fails_is_passed_over(network: FakeNetwork, small: SmallModel, error: Exception) -> None:
    async def fail(_request: m.Request) -> m.Response:
        raise error

    network.add(small, 1, fail)
    unreachable = network.add(small, 2)
    del network.nodes[unreachable.node]
    network.add(small, 3)
    manifest = await fetch_manifest(network, small.manifest.model_id, network.listed or [])  # type: ignore[arg-type]
    assert manifest == small.manifest


# Blocks


def fetcher(network: FakeNetwork, store: BlockStore, progress: Any = lambda *_: None) -> SliceFetcher:
    return SliceFetcher(network, network, store, progress)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path, small: SmallModel) -> BlockStore:
    return BlockStore(tmp_path, small.manifest)


def flipping(small: SmallModel, layer: int, expert: int, *, at: int = 100) -> Answer:
    """Return an answer in which one byte of one block is flipped."""
    honest = small.share()

    async def answer(request: m.Request) -> m.Response:
        response = await honest.answer(request)
        if isinstance(request, m.GetBlock) and (request.layer, request.expert) == (layer, expert):
            assert isinstance(response, m.BlockBytes)
            data = bytearray(response.data)
            data[at] ^= 1
            return m.BlockBytes(data=bytes(data))
        return response

    return answer


async def test_each_block_is_one_request_and_is_kept(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    seen: list[tuple[int, int]] = []
    await fetcher(network, store, lambda done, total: seen.append((done, total))).fetch(WANTED)
    assert Counter(network.blocks_asked()) == Counter(iter(WANTED))
    assert store.experts == WANTED
    for layer, expert in WANTED:
        assert store.read_block(layer, expert) == small.source.read_block(layer, expert)
    size = small.manifest.spec.block_size_bytes(0)
    assert seen == [(n * size, 6 * size) for n in range(7)]
    assert network.n_lookups == 1, "the registry is not asked for each block"


async def test_each_block_waits_for_the_cap_on_traffic(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    n_asked: list[int] = []

    async def pace() -> None:
        n_asked.append(len(network.blocks_asked()))

    await SliceFetcher(network, network, store, lambda *_: None, pace=pace).fetch(WANTED)  # type: ignore[arg-type]
    assert len(n_asked) == 6
    assert n_asked[0] == 0


async def test_a_folder_that_was_taken_away_is_made_again(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    store.folder.rmdir()
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED


async def test_few_blocks_are_under_way_at_a_time(network: FakeNetwork, small: SmallModel, store: BlockStore) -> None:
    honest, n_now, n_most = small.share(), 0, 0

    async def answer(request: m.Request) -> m.Response:
        nonlocal n_now, n_most
        n_now += 1
        n_most = max(n_most, n_now)
        for _ in range(5):
            await asyncio.sleep(0)
        n_now -= 1
        return await honest.answer(request)

    network.add(small, 1, answer)
    await fetcher(network, store).fetch(small.manifest.spec.all_experts)
    assert n_most == fetch.N_PARALLEL


async def test_a_block_with_one_flipped_byte_is_refused_by_name_and_not_kept(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1, flipping(small, 1, 2))
    with pytest.raises(IntegrityError, match="layer 1, expert 2 is damaged"):
        await fetcher(network, store).fetch(WANTED)
    assert not store.has(1, 2)
    assert not [path for path in store.folder.iterdir() if "1.2" in path.name]
    for layer, expert in store.experts:  # whatever else was kept is right
        assert store.read_block(layer, expert) == small.source.read_block(layer, expert)


@pytest.mark.parametrize("cut", [b"", b"x", "longer"])
async def test_a_block_of_a_wrong_length_is_refused(
    network: FakeNetwork, small: SmallModel, store: BlockStore, cut: bytes | str
) -> None:
    async def answer(request: m.Request) -> m.Response:
        assert isinstance(request, m.GetBlock)
        whole = small.source.read_block(request.layer, request.expert)
        return m.BlockBytes(data=whole + b"x" if isinstance(cut, str) else cut)

    network.add(small, 1, answer)
    with pytest.raises(IntegrityError, match="layer 0, expert 1 has a wrong length"):
        await fetcher(network, store).fetch(ExpertSet.of([0], [1]))
    assert not len(store.experts)


async def test_another_experts_block_is_refused(network: FakeNetwork, small: SmallModel, store: BlockStore) -> None:
    async def answer(request: m.Request) -> m.Response:
        assert isinstance(request, m.GetBlock)
        return m.BlockBytes(data=small.source.read_block(request.layer, (request.expert + 1) % 6))

    network.add(small, 1, answer)
    with pytest.raises(IntegrityError):
        await fetcher(network, store).fetch(WANTED)
    assert not len(store.experts)


async def test_an_honest_second_node_is_used_instead(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1, flipping(small, 0, 5))
    network.add(small, 2)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED
    assert (0, 5) in network.blocks_asked(2)
    asked = Counter(network.blocks_asked())
    assert {pair: n for pair, n in asked.items() if pair != (0, 5)} == dict.fromkeys(set(WANTED) - {(0, 5)}, 1)


async def test_who_has_failed_is_asked_last(network: FakeNetwork, small: SmallModel, store: BlockStore) -> None:
    async def fail(_request: m.Request) -> m.Response:
        raise ConnectionLost("a black hole")

    network.add(small, 1, fail)
    network.add(small, 2)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED
    assert len(network.blocks_asked(1)) <= fetch.N_PARALLEL, "once for each worker that had begun"


async def test_a_publisher_that_is_not_trusted_is_never_asked(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    network.add(small, 2)
    trusting = SliceFetcher(network, network, store, lambda *_: None, trusts=lambda each: each.node == node(2))  # type: ignore[arg-type]
    await trusting.fetch(WANTED)
    assert network.blocks_asked(1) == []
    assert store.experts == WANTED


@pytest.mark.parametrize(
    "error", [ConnectionLost("gone"), RemoteProtocolError("bad"), LookupError("no"), Overloaded("")]
)
async def test_a_node_that_fails_on_a_block_is_replaced(
    network: FakeNetwork, small: SmallModel, store: BlockStore, error: Exception
) -> None:
    async def fail(_request: m.Request) -> m.Response:
        raise error

    network.add(small, 1, fail)
    network.add(small, 2)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED


async def test_a_download_that_was_cut_goes_on_where_it_stopped(
    network: FakeNetwork, small: SmallModel, store: BlockStore, tmp_path: Path
) -> None:
    honest = small.share()

    async def first_layer(request: m.Request) -> m.Response:
        assert isinstance(request, m.GetBlock)
        if request.layer == 0:
            return await honest.answer(request)
        await wait_until(lambda: len(store.experts) == 3)
        raise ConnectionLost("the network is gone")

    network.add(small, 1, first_layer)
    with pytest.raises(NetworkError, match=r"nobody gives layer 1, expert \d: the network is gone"):
        await fetcher(network, store).fetch(WANTED)
    kept = set(store.experts)
    assert kept == {(0, 1), (0, 2), (0, 5)}
    network.requests.clear()
    network.nodes[node(1)] = honest.answer
    again = BlockStore(tmp_path, small.manifest)  # as after a restart
    seen: list[int] = []
    await fetcher(network, again, lambda done, _total: seen.append(done)).fetch(WANTED)
    assert Counter(network.blocks_asked()) == Counter(set(WANTED) - kept)
    assert again.experts == WANTED
    assert [n / small.manifest.spec.block_size_bytes(0) for n in seen] == [3, 4, 5, 6]


async def test_nobody_is_asked_when_nothing_is_missing(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    for layer, expert in WANTED:
        store.add(layer, expert, small.source.read_block(layer, expert))
    network.listed = None
    await fetcher(network, store).fetch(WANTED)
    assert (network.n_lookups, network.requests) == (0, [])


async def test_a_node_that_comes_while_others_fail_is_found(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    async def fail(_request: m.Request) -> m.Response:
        if len(network.nodes) == 1:
            network.add(small, 2)
        raise ConnectionLost("gone")

    network.add(small, 1, fail)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED


async def test_a_registry_that_goes_away_does_not_end_a_download(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    honest, failed = small.share(), set()

    async def fails_once(request: m.Request) -> m.Response:
        network.listed = None
        if request not in failed:
            failed.add(request)
            raise ConnectionLost("a hiccup")
        return await honest.answer(request)

    network.add(small, 1, fails_once)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED


async def test_who_offers_no_blocks_is_not_asked_for_them(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.listed = [offer(small.manifest, 1, offers_blocks=False)]
    network.nodes[node(1)] = small.share().answer
    with pytest.raises(NetworkError, match="no offer left"):
        await fetcher(network, store).fetch(WANTED)
    assert network.requests == []


async def test_peers_are_asked_for_what_they_hold_and_before_backbones(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    network.add_peer(small, 2, ExpertSet.of([0], [1, 2]))
    network.peers.append(announcement(small.manifest, 3, WANTED, is_loading=True))
    await fetcher(network, store).fetch(WANTED)
    assert sorted(network.blocks_asked(2)) == [(0, 1), (0, 2)]
    assert sorted(network.blocks_asked(1)) == sorted(set(WANTED) - {(0, 1), (0, 2)})


async def test_a_peer_does_not_ask_itself(network: FakeNetwork, small: SmallModel, store: BlockStore) -> None:
    network.add(small, 1)
    me = network.add_peer(small, 2, WANTED)
    await SliceFetcher(network, network, store, lambda *_: None, me=me).fetch(WANTED)  # type: ignore[arg-type]
    assert network.blocks_asked(2) == []


async def test_a_busy_peer_is_passed_over_and_a_lying_one_is_left_for_good(
    network: FakeNetwork, small: SmallModel, store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def busy(_request: m.Request) -> m.Response:
        raise LookupError("computing")

    network.add(small, 1)
    network.add_peer(small, 2, WANTED, busy)
    network.add_peer(small, 3, small.manifest.spec.all_experts, flipping(small, 0, 1))
    await fetcher(network, store).fetch(ExpertSet.of([0], [1]))
    again = fetcher(network, store)
    await again.fetch(WANTED)
    assert store.experts == WANTED
    assert not [record for record in caplog.records if "computing" in record.message and record.levelname == "WARNING"]


async def test_a_busy_peer_is_waited_for_where_nobody_else_has_the_block(
    network: FakeNetwork, small: SmallModel, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, n_refusals, waits = small.share(), 0, list[float]()

    async def busy_at_first(request: m.Request) -> m.Response:
        nonlocal n_refusals
        if n_refusals < 5 * fetch.N_ATTEMPTS:
            n_refusals += 1
            raise RemoteRefused("computing", remote_code=m.ErrorCode.BUSY, retry_after_s=2.0)
        return await honest.answer(request)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(fetch.asyncio, "sleep", sleep)
    network.add_peer(small, 2, WANTED, busy_at_first)
    await fetcher(network, store).fetch(ExpertSet.of([0], [1]))
    assert waits == [2.0] * 5 * fetch.N_ATTEMPTS
    monkeypatch.setattr(fetch, "BUSY_PATIENCE_S", 0.0)
    n_refusals = -1000
    with pytest.raises(NetworkError, match="nobody gives layer 0, expert 2: computing"):
        await fetcher(network, store).fetch(ExpertSet.of([0], [2]))


async def test_one_block_nobody_gives_ends_the_rest(network: FakeNetwork, small: SmallModel, store: BlockStore) -> None:
    network.add(small, 1, flipping(small, 0, 0))
    with pytest.raises(IntegrityError):
        await fetcher(network, store).fetch(small.manifest.spec.all_experts)
    n_asked = len(network.requests)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(network.requests) == n_asked


async def test_a_disk_that_takes_no_block_is_said(
    network: FakeNetwork, small: SmallModel, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_store, "write_atomically", full)
    network.add(small, 1)
    with pytest.raises(UserError, match=r"cannot keep blocks in .*: No space left on device"):
        await fetcher(network, store).fetch(WANTED)


class _FakeWeb:
    """Places on the web: brings blocks by the side of the store, as another process with the same cache does."""

    is_alive, error = True, None

    def __init__(self, small: SmallModel, store: BlockStore) -> None:
        self.small, self.store, self.n_asked = small, store, 0

    def best(self) -> object:
        return self

    def patience_s(self, source: object, n_bytes: int) -> float:
        return 60.0

    async def fetch(self, source: object, layer: int, experts: Any, missing: Any, keep: Any) -> None:
        self.n_asked += 1
        assert self.n_asked < 100, "asked for ever, and nothing else runs"
        for expert in experts:
            if not self.store.has(layer, expert):
                self.store.add(layer, expert, self.small.source.read_block(layer, expert))


async def test_blocks_that_another_process_brings_meanwhile_count_as_there(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    seen: list[tuple[int, int]] = []
    web: Any = _FakeWeb(small, store)
    registry: Any = network
    await SliceFetcher(registry, registry, store, lambda *told: seen.append(told), web=web).fetch(WANTED)
    assert store.experts == WANTED
    assert seen[-1][0] == seen[-1][1]


class _Place:
    """A place on the web that brings what it is asked for, fails, or never ends, as it is told."""

    def __init__(self, name: str, does: str) -> None:
        self.location = SimpleNamespace(name=name)
        self.does = does
        self.has_ranges = True
        self.n_asked = self.n_cancelled = 0
        self.may_go_on = asyncio.Event()


class _SlowWeb:
    """Places on the web, asked in their order; nobody has any patience with them."""

    is_alive, error = True, None

    def __init__(self, small: SmallModel, store: BlockStore, *places: _Place) -> None:
        self.small, self.store, self.places = small, store, list(places)
        self.outran: list[_Place] = []

    def best(self, *, but: _Place | None = None) -> _Place | None:
        free = [each for each in self.places if each is not but and each not in self.outran]
        return free[0] if free else None

    def patience_s(self, source: _Place, n_bytes: int) -> float:
        return 0.0

    def outrun(self, source: _Place, n_bytes: int, seconds: float) -> None:
        self.outran.append(source)

    async def fetch(self, source: _Place, layer: int, experts: Any, missing: Any, keep: Any) -> None:
        source.n_asked += 1
        try:
            if source.does == "trickle":
                await source.may_go_on.wait()
            if source.does == "fail":
                await asyncio.sleep(0)
                return
        except asyncio.CancelledError:
            source.n_cancelled += 1
            raise
        for expert in experts:
            if not self.store.has(layer, expert):
                self.store.add(layer, expert, self.small.source.read_block(layer, expert))
                keep((layer, expert))


async def fetch_slowly(network: FakeNetwork, web: _SlowWeb, experts: ExpertSet = WANTED) -> None:
    any_registry: Any = network
    any_web: Any = web
    async with asyncio.timeout(60):
        await SliceFetcher(any_registry, any_registry, web.store, lambda *_: None, web=any_web).fetch(experts)
    assert web.store.experts == experts


async def test_what_a_server_trickles_is_asked_of_another_which_is_enough(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    slow, fast = _Place("slow", "trickle"), _Place("fast", "bring")
    web = _SlowWeb(small, store, slow, fast)
    await fetch_slowly(network, web)
    assert set(map(id, web.outran)) == {id(slow)}
    assert slow.n_cancelled == slow.n_asked
    assert not network.blocks_asked(), "nodes are the last"


async def test_where_the_web_has_nobody_else_nodes_give_what_a_server_trickles(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    web = _SlowWeb(small, store, _Place("slow", "trickle"))
    await fetch_slowly(network, web)
    assert Counter(network.blocks_asked()) == Counter(iter(WANTED))
    assert web.outran
    assert web.places[0].n_cancelled == web.places[0].n_asked


async def test_a_slow_server_that_is_there_first_is_not_to_blame(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    slow, other = _Place("slow", "trickle"), _Place("other", "trickle")
    web = _SlowWeb(small, store, slow, other)
    fetching = asyncio.create_task(fetch_slowly(network, web, ExpertSet.of([0], [1, 2])))
    await wait_until(lambda: other.n_asked == 1)
    slow.may_go_on.set()
    await fetching
    assert web.outran == []
    assert (slow.n_cancelled, other.n_cancelled) == (0, 1)


async def test_a_slow_server_is_waited_for_where_others_fail_and_they_are_asked_again(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    slow, other = _Place("slow", "trickle"), _Place("other", "fail")
    web = _SlowWeb(small, store, slow, other)
    fetching = asyncio.create_task(fetch_slowly(network, web, ExpertSet.of([0], [1, 2])))
    await wait_until(lambda: other.n_asked >= 3)
    slow.may_go_on.set()
    await fetching
    assert (web.outran, slow.n_cancelled, slow.n_asked) == ([], 0, 1)


async def test_when_a_slow_server_fails_the_slow_one_beside_it_is_watched_as_it_was(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    network.add(small, 1)
    slow, other = _Place("slow", "trickle"), _Place("other", "trickle")
    web = _SlowWeb(small, store, slow, other)
    fetching = asyncio.create_task(fetch_slowly(network, web, ExpertSet.of([0], [1, 2])))
    await wait_until(lambda: other.n_asked == 1)
    slow.does = "fail"
    web.places.remove(slow)  # it rests
    slow.may_go_on.set()
    await fetching
    assert web.outran == [other]
    assert len(network.blocks_asked()) == 2


async def test_a_server_that_gives_everything_in_one_reading_is_not_called_slow(
    network: FakeNetwork, small: SmallModel, store: BlockStore
) -> None:
    slow, other = _Place("slow", "trickle"), _Place("other", "bring")
    slow.has_ranges = False
    web = _SlowWeb(small, store, slow, other)
    fetching = asyncio.create_task(fetch_slowly(network, web, ExpertSet.of([0], [1, 2])))
    await wait_until(lambda: slow.n_asked == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert other.n_asked == 0
    slow.may_go_on.set()
    await fetching


async def test_a_full_disk_ends_a_fetch_from_two_places_too(
    network: FakeNetwork, small: SmallModel, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("cannot keep blocks")

    monkeypatch.setattr(store, "add", full)
    web = _SlowWeb(small, store, _Place("slow", "trickle"), _Place("fast", "bring"))
    with pytest.raises(UserError, match="cannot keep"):
        await fetch_slowly(network, web)
    assert web.places[0].n_cancelled == web.places[0].n_asked


async def test_a_busy_peer_cannot_have_itself_asked_without_a_pause(
    network: FakeNetwork, small: SmallModel, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def busy(request: m.Request) -> m.Response:
        raise RemoteRefused("at once", remote_code=m.ErrorCode.BUSY, retry_after_s=0.0)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            monkeypatch.setattr(fetch, "BUSY_PATIENCE_S", 0.0)
            raise ConnectionLost("enough")

    monkeypatch.setattr(fetch, "RETRY_S", 0.5)
    monkeypatch.setattr(fetch.asyncio, "sleep", sleep)
    network.add_peer(small, 2, WANTED, busy)
    with pytest.raises(ConnectionLost, match="enough"):
        await fetcher(network, store).fetch(ExpertSet.of([0], [1]))
    assert min(waits) == 0.5


async def test_a_peer_that_gives_slowly_is_asked_after_backbones(
    network: FakeNetwork, small: SmallModel, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, now = small.share(), 100.0

    async def slow(request: m.Request) -> m.Response:
        nonlocal now
        now += fetch.PEER_TIMEOUT_S - 1.0
        return await honest.answer(request)

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    monkeypatch.setattr(fetch, "N_PARALLEL", 1)
    network.add(small, 1)
    network.add_peer(small, 2, WANTED, slow)
    await fetcher(network, store).fetch(WANTED)
    assert store.experts == WANTED
    assert (len(network.blocks_asked(2)), len(network.blocks_asked(1))) == (1, len(WANTED) - 1)
