"""Which experts are kept follows what the router chooses, and is known again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swarm.backbone import local_keeper
from swarm.backbone.local_experts import LocalExperts
from swarm.backbone.local_keeper import FIRST_TOKENS, LocalBudget, LocalKeeper
from swarm.dispatch.popularity import Popularity
from swarm.errors import IntegrityError, NetworkError, UserError
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import BlockSource, GgufSource
from tests.swarm.backbone.local_experts import SplitModel


class Store:
    """Blocks of a file of which only those fetched can be read."""

    def __init__(self, source: BlockSource) -> None:
        self.source = source
        self.fetched: list[ExpertSet] = []
        self.failure: Exception | None = None
        self.damages = False

    @property
    def experts(self) -> ExpertSet:
        return self.source.experts

    async def fetch(self, experts: ExpertSet) -> None:
        if self.failure is not None:
            raise self.failure
        self.fetched.append(experts)

    def read_block(self, layer: int, expert: int) -> bytes:
        block = self.source.read_block(layer, expert)
        return bytes([block[0] ^ 1]) + block[1:] if self.damages else block


class Bench:
    def __init__(self, model: SplitModel, state: Path, source: BlockSource) -> None:
        self.model, self.state = model, state
        self.store = Store(source)
        self.time = 0.0
        self.n_each = 4  # experts a layer that fit
        self.open(fetches=False)

    def open(self, *, fetches: bool) -> None:
        spec = self.model.spec
        self.local = LocalExperts(spec)
        self.popularity = Popularity(spec.moe_layers, spec.n_expert, now=self.time)
        self.keeper = LocalKeeper(
            self.local,
            self.popularity,
            self.model.manifest,
            self.store,
            budget_bytes=self.n_each * sum(map(spec.block_size_bytes, spec.moe_layers)),
            state=self.state,
            now=lambda: self.time,
            fetch=self.store.fetch if fetches else None,
        )

    def route(self, experts: tuple[int, ...], n_tokens: int = FIRST_TOKENS) -> None:
        """So many tokens choose these, in every layer."""
        for layer in self.popularity.layers:
            self.popularity.add(layer, np.tile(np.array([experts], np.int32), (n_tokens, 1)))

    @property
    def kept(self) -> list[int]:
        (group,) = set(self.local.experts.by_layer.values()) or {frozenset[int]()}
        return sorted(group)


@pytest.fixture
def bench(tiny: SplitModel, tmp_path: Path) -> Iterator[Bench]:
    with GgufFile(tiny.file) as file:
        found = Bench(tiny, tmp_path / "state", GgufSource(file))
        yield found
        found.local.close()


async def test_from_a_file_experts_are_kept_at_once_and_the_popular_ones_once_they_are_known(bench: Bench) -> None:
    assert await bench.keeper.look()
    assert bench.kept == [0, 1, 2, 3]
    bench.route((5, 6, 7, 8), FIRST_TOKENS - 1)
    assert not await bench.keeper.look()
    bench.route((5, 6, 7, 8), 1)
    assert await bench.keeper.look()
    assert bench.kept == [5, 6, 7, 8]
    assert not await bench.keeper.look()


async def test_nothing_is_fetched_before_anything_is_known(bench: Bench) -> None:
    bench.open(fetches=True)
    assert not await bench.keeper.look()
    bench.route((2, 3, 4, 9))
    assert await bench.keeper.look()
    assert bench.kept == [2, 3, 4, 9]
    assert [len(each) for each in bench.store.fetched] == [4 * len(bench.popularity.layers)]


async def test_it_follows_as_popularity_moves_but_not_for_noise(bench: Bench) -> None:
    bench.route((0, 1, 2, 3), 1000)
    await bench.keeper.look()
    bench.route((4, 1, 2, 3), 1100)
    assert not await bench.keeper.look(), "4 is hardly more popular than 0"
    bench.time += 3600.0
    bench.route((4, 1, 2, 3), 1000)
    assert await bench.keeper.look()
    assert bench.kept == [1, 2, 3, 4]


async def test_a_restart_knows_what_was_popular(bench: Bench) -> None:
    bench.route((5, 6, 7, 8))
    await bench.keeper.look()
    bench.keeper.save().result(60)
    bench.local.close()
    bench.open(fetches=True)
    assert await bench.keeper.look()
    assert bench.kept == [5, 6, 7, 8]


async def test_who_leaves_waits_until_it_is_written(bench: Bench) -> None:
    bench.route((5, 6, 7, 8))
    await bench.keeper.close()
    [path] = bench.state.iterdir()
    assert path.suffix == ".json", "the thread that writes ends with the process: nothing is half written"
    assert bench.popularity.restore(path.read_bytes())


async def test_a_disk_that_is_full_keeps_nobody(bench: Bench) -> None:
    bench.state.write_bytes(b"a file where the folder should be")
    await bench.keeper.close()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\x00"])
async def test_a_damaged_state_is_as_good_as_none(bench: Bench, damage: bytes) -> None:
    bench.keeper.save().result(60)
    (path,) = bench.state.iterdir()
    path.write_bytes(damage)
    bench.local.close()
    bench.open(fetches=False)
    assert bench.popularity.n_tokens == 0
    assert await bench.keeper.look()


async def test_what_fails_is_tried_again_and_the_old_set_serves_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.open(fetches=True)
    bench.route((0, 1, 2, 3))
    await bench.keeper.look()
    bench.route((4, 5, 6, 7), 10_000)
    bench.store.failure = NetworkError("nobody")
    with pytest.raises(NetworkError):
        await bench.keeper.look()
    assert bench.kept == [0, 1, 2, 3]
    bench.store.failure, bench.store.damages = None, True
    with pytest.raises(IntegrityError):
        await bench.keeper.look()
    assert bench.kept == [0, 1, 2, 3]
    bench.store.damages = False

    looks = asyncio.Event()
    bench.store.failure = NetworkError("nobody")
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        looks.set()
        bench.store.failure = None
        await real_sleep(0)
        if bench.kept == [4, 5, 6, 7]:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with contextlib.suppress(asyncio.CancelledError):
        await bench.keeper.run()
    assert bench.kept == [4, 5, 6, 7]
    assert "cannot change the local experts: nobody" in caplog.text
    assert looks.is_set()


def test_the_budget_is_what_is_given_or_half_of_what_is_free(tiny: SplitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(free: int | None) -> Callable[[], int | None]:
        return lambda: free

    monkeypatch.setattr(local_keeper, "free_memory_bytes", says(10**9))
    assert LocalBudget(7_000_000).settle(tiny.spec) == 7_000_000
    assert LocalBudget().settle(tiny.spec) == 500_000_000
    with pytest.raises(UserError, match="at least"):
        LocalBudget(10).settle(tiny.spec)
    monkeypatch.setattr(local_keeper, "free_memory_bytes", says(None))
    with pytest.raises(UserError, match="--local-experts SIZE"):
        LocalBudget().settle(tiny.spec)
