"""A volunteer that chooses by itself: alone, beside others, and at the same moment as another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer import auto
from peer.auto import OVERHEAD_BYTES, SETTLE_S, AutoExperts, Chooser, require_memory
from swarm.errors import NetworkError, SwarmError, UserError
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.spec import ModelSpec
from swarm.registry.publishers import Publishers
from swarm.registry.records import ExpertAnnouncement, ModelOffer, RoutingHistogram, levels_of
from swarm.registry.scarcity import MOVE_PAUSE_S
from tests import virtual_time
from tests.peer.conftest import offer

MODEL = ModelId(b"m" * 32)
LAYERS, N_EXPERT, BLOCK = (0, 1), 8, 1000
NODES = [NodeId(bytes([n]) * 32) for n in range(9)]


@dataclass(frozen=True)
class Spec:
    moe_layers = LAYERS
    n_expert = N_EXPERT
    all_experts = ExpertSet.of(LAYERS, range(N_EXPERT))

    def block_size_bytes(self, layer: int) -> int:
        assert layer in LAYERS
        return BLOCK


@dataclass
class Pool:
    """A registry: what is announced by now."""

    listed: dict[NodeId, ExpertAnnouncement] = field(default_factory=dict)
    used: list[RoutingHistogram] = field(default_factory=list)
    offered: list[ModelOffer] = field(default_factory=list)
    error: SwarmError | None = None

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        if self.error is not None:
            raise self.error
        return [self.listed[node] for node in sorted(self.listed)]

    async def histograms(self, model: ModelId) -> list[RoutingHistogram]:
        return self.used

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        return self.offered

    def announce(
        self, node: NodeId, experts: ExpertSet, *, is_loading: bool = False, is_choosing: bool = False
    ) -> None:
        self.listed[node] = ExpertAnnouncement(
            node=node,
            seq=1,
            ttl_s=60,
            model=MODEL,
            model_name="small",
            experts=experts,
            addresses=("192.0.2.1:7",),
            exact_kernels=False,
            wire_versions=(1,),
            is_loading=is_loading,
            is_choosing=is_choosing,
        )


def chooser(pool: Pool, node: NodeId, n_experts: int, publishers: Publishers | None = None) -> Chooser:
    budget = n_experts * len(LAYERS) * BLOCK
    return Chooser(pool, cast(ModelSpec, Spec()), MODEL, node, budget_bytes=budget, publishers=publishers)


async def join(pool: Pool, node: NodeId, n_experts: int) -> ExpertSet:
    async def claim(experts: ExpertSet) -> None:
        await asyncio.sleep(0.05)  # a round trip
        pool.announce(node, experts, is_loading=True, is_choosing=True)

    chosen = await chooser(pool, node, n_experts).join(claim)
    pool.announce(node, chosen, is_loading=True)
    return chosen


@pytest.mark.parametrize("pair", [(1, 2), (3, 7), (8, 4), (5, 6)])
def test_two_who_join_at_once_hold_different_experts_and_together_everything(pair: tuple[int, int]) -> None:
    async def main() -> None:
        pool = Pool()
        first, second = await asyncio.gather(*(join(pool, NODES[number], 4) for number in pair))
        assert len(first) == len(second) == 4 * len(LAYERS)
        assert not set(first) & set(second)

    virtual_time.run(main())


def test_four_who_join_at_once_cover_the_model() -> None:
    async def main() -> None:
        pool = Pool()
        slices = await asyncio.gather(*(join(pool, NODES[number], 2) for number in (2, 4, 6, 8)))
        assert set().union(*map(set, slices)) == set(Spec.all_experts)

    virtual_time.run(main())


@pytest.mark.parametrize("spread_s", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_ten_who_come_within_seconds_leave_no_block_with_three_holders_while_another_has_one(
    seed: int, spread_s: float
) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3, 4)) for _ in range(10)]
    nodes = [NodeId(rng.randbytes(32)) for _ in sizes]

    async def main() -> None:
        pool = Pool()

        async def late(node: NodeId, size: int) -> None:
            await asyncio.sleep(rng.uniform(0, spread_s))
            await join(pool, node, size)

        await asyncio.gather(*(late(node, size) for node, size in zip(nodes, sizes, strict=True)))
        counts = Counter(block for record in pool.listed.values() for block in record.experts)
        n_holders = [counts[block] for block in Spec.all_experts]
        assert min(n_holders) >= 1
        assert not (max(n_holders) >= 3 and min(n_holders) == 1), sorted(n_holders)

    virtual_time.run(main())


def test_a_newcomer_that_keeps_to_some_layers_is_taken_at_its_word() -> None:
    async def main() -> None:
        pool = Pool()
        pool.announce(NODES[0], ExpertSet({0: frozenset({1, 2})}), is_loading=True, is_choosing=True)
        chosen = await join(pool, NODES[5], 7)
        assert not {(0, 1), (0, 2)} & set(chosen)

    virtual_time.run(main())


def test_one_who_comes_later_takes_what_is_left_whatever_its_id() -> None:
    async def main() -> None:
        pool = Pool()
        first = await join(pool, NODES[8], 5)
        await asyncio.sleep(10)  # it is still loading
        second = await join(pool, NODES[1], 3)
        assert set(first) | set(second) == set(Spec.all_experts)

    virtual_time.run(main())


def test_it_looks_once_more_after_its_claim_and_a_registry_lost_by_then_changes_nothing() -> None:
    async def main() -> None:
        pool = Pool()
        task = asyncio.create_task(join(pool, NODES[1], 3))
        await asyncio.sleep(SETTLE_S / 2)
        pool.error = NetworkError("no registry answers")
        assert len(await task) == 3 * len(LAYERS)

    virtual_time.run(main())


def test_only_histograms_of_trusted_publishers_count(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Pool()
        for number in (1, 2):
            pool.announce(NODES[number], Spec.all_experts)
        ours, stranger = offer(MODEL, 1), offer(MODEL, 2)
        pool.offered = [ours, stranger]

        def histogram(node: NodeId, expert: int, n_tokens: int) -> RoutingHistogram:
            counts = [100 if each == expert else 1 for each in range(N_EXPERT)]
            return RoutingHistogram(
                node=node,
                seq=1,
                ttl_s=300,
                model=MODEL,
                n_tokens=n_tokens,
                window_s=100,
                loads=tuple((layer, levels_of(counts)) for layer in LAYERS),
            )

        pool.used = [histogram(ours.node, 3, 10**4), histogram(stranger.node, 6, 10**9)]
        known = Publishers(tmp_path / "known", given={ours.node})

        async def claim(_: ExpertSet) -> None:
            pass

        chosen = await chooser(pool, NODES[5], 1, known).join(claim)
        assert chosen == ExpertSet.of(LAYERS, [3])
        pool.used = pool.used[1:]
        pool.offered = [ours]
        assert await chooser(pool, NODES[5], 1, known).join(claim) != ExpertSet.of(LAYERS, [6])

    virtual_time.run(main())


def test_a_peer_that_doubles_others_moves_to_the_gap_and_then_stays() -> None:
    async def main() -> None:
        pool = Pool()
        pool.announce(NODES[1], ExpertSet.of(LAYERS, range(6)))
        held = ExpertSet.of(LAYERS, [0, 1])
        pool.announce(NODES[2], held)
        mine = chooser(pool, NODES[2], 2)
        assert await mine.better(held, MOVE_PAUSE_S - 1) is None
        better = await mine.better(held, MOVE_PAUSE_S)
        assert better == ExpertSet.of(LAYERS, [6, 7])
        pool.announce(NODES[2], better)
        assert await mine.better(better, float("inf")) is None
        assert mine.size_bytes(better) == 4 * BLOCK

    virtual_time.run(main())


def test_named_experts_that_do_not_fit_are_the_users_mistake() -> None:
    spec, experts = cast(ModelSpec, Spec()), ExpertSet.of(LAYERS, range(3))
    require_memory(spec, experts, None)
    require_memory(spec, experts, OVERHEAD_BYTES + 6 * BLOCK)
    with pytest.raises(UserError, match=f"got {OVERHEAD_BYTES} bytes, expected at least {OVERHEAD_BYTES + 6 * BLOCK}"):
        require_memory(spec, experts, OVERHEAD_BYTES)


def test_a_budget_in_which_nothing_fits_is_the_users_mistake() -> None:
    async def main() -> None:
        with pytest.raises(UserError, match="not one expert fits: got 0 bytes for the slice, expected at least 1000"):
            await join(Pool(), NODES[1], 0)

    virtual_time.run(main())


def test_the_budget_is_what_is_given_or_a_share_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = SimpleNamespace(free=10**9)
    monkeypatch.setattr(auto, "free_memory_bytes", lambda: 8 * 10**9)
    monkeypatch.setattr(auto.shutil, "disk_usage", lambda _: usage)
    assert AutoExperts().budget_bytes(None) == 4 * 10**9 - OVERHEAD_BYTES
    assert AutoExperts().budget_bytes(tmp_path) == 9 * 10**8
    assert AutoExperts(disk_bytes=7).budget_bytes(tmp_path) == 7
    assert AutoExperts(memory_bytes=10**9).budget_bytes(None) == 10**9 - OVERHEAD_BYTES
    monkeypatch.setattr(auto, "free_memory_bytes", lambda: None)
    with pytest.raises(UserError, match="--memory"):
        AutoExperts().budget_bytes(None)
