"""When a peer gives blocks away, and when it does not."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer.giving import BLOCK_OVERHEAD, IDLE_S, MAX_GIVEN, FileOnDemand, Giving
from peer.limits import BURST_S
from peer.traffic import Traffic
from swarm.backbone.share import ModelShare
from swarm.errors import IntegrityError, Overloaded
from swarm.ids import ModelId
from swarm.model.source import BlockSource
from swarm.wire import messages as m
from tests.peer.conftest import SmallModel

NEVER = float("-inf")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(small: SmallModel, clock: Clock, *, rate: float | None = None, source: BlockSource | None = None) -> Giving:
    counters: Any = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)
    traffic = Traffic(counters, max_upload_bytes_s=rate, max_download_bytes_s=None, now=clock)
    share = ModelShare(small.manifest, source or small.source)
    return Giving(share, traffic, small.manifest.spec.block_size_bytes, now=clock)


def block(small: SmallModel, layer: int = 0, expert: int = 1) -> m.GetBlock:
    return m.GetBlock(model_id=small.manifest.model_id, layer=layer, expert=expert)


async def test_an_idle_peer_gives_its_blocks_and_its_manifest(small: SmallModel) -> None:
    giving = made(small, Clock())
    answer = await giving.answer(block(small), last_asked=NEVER, is_computing=False)
    assert answer == m.BlockBytes(data=small.source.read_block(0, 1))
    manifest = m.GetManifest(model_id=small.manifest.model_id)
    assert await giving.answer(manifest, last_asked=NEVER, is_computing=True) == m.ManifestBytes(
        data=small.manifest.to_bytes()
    )
    assert giving.n_blocks == 1


async def test_who_computes_or_has_just_done_so_gives_none(small: SmallModel) -> None:
    clock = Clock()
    giving = made(small, clock)
    with pytest.raises(Overloaded) as busy:
        await giving.answer(block(small), last_asked=NEVER, is_computing=True)
    assert busy.value.retry_after_s == IDLE_S
    with pytest.raises(Overloaded) as just_now:
        await giving.answer(block(small), last_asked=clock.now - 0.5, is_computing=False)
    assert just_now.value.retry_after_s == IDLE_S - 0.5
    await giving.answer(block(small), last_asked=clock.now - IDLE_S, is_computing=False)


async def test_few_are_given_at_a_time(small: SmallModel) -> None:
    may_go_on = asyncio.Event()
    honest = ModelShare(small.manifest, small.source)

    class Slow:
        async def answer(self, request: m.Request) -> m.Response:
            await may_go_on.wait()
            return await honest.answer(request)

    giving = made(small, Clock())
    slow: Any = Slow()
    giving._share = slow

    def ask() -> Awaitable[m.Response]:
        return giving.answer(block(small), last_asked=NEVER, is_computing=False)

    first = [asyncio.ensure_future(ask()) for _ in range(MAX_GIVEN)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="gives blocks to others"):
        await ask()
    may_go_on.set()
    await asyncio.gather(*first)
    await ask()


async def test_the_cap_on_what_is_sent_holds_for_blocks_too(small: SmallModel) -> None:
    size = small.manifest.spec.block_size_bytes(0)
    rate = 100_000.0
    clock = Clock()
    giving = made(small, clock, rate=rate)
    clock.now += 10
    for _ in range(math.floor(rate * BURST_S / (size * BLOCK_OVERHEAD))):
        await giving.answer(block(small), last_asked=NEVER, is_computing=False)
    with pytest.raises(Overloaded, match="used up") as full:  # what is promised counts before it has gone
        await giving.answer(block(small), last_asked=NEVER, is_computing=False)
    assert full.value.retry_after_s > 0


async def test_the_cap_on_what_is_sent_holds_for_manifests_too(small: SmallModel) -> None:
    """Anybody may ask for one again and again, with a few bytes."""
    counters: Any = SimpleNamespace(bytes_sent=0, repair_bytes=0, bytes_received=0)
    traffic = Traffic(counters, max_upload_bytes_s=50_000.0, max_download_bytes_s=None, now=Clock())
    giving = Giving(ModelShare(small.manifest, small.source), traffic, small.manifest.spec.block_size_bytes)
    request = m.GetManifest(model_id=small.manifest.model_id)

    async def ask_on() -> None:
        for _ in range(1000):
            answer = await giving.answer(request, last_asked=NEVER, is_computing=False)
            assert isinstance(answer, m.ManifestBytes)
            counters.bytes_sent += len(answer.data)

    with pytest.raises(Overloaded, match="used up"):
        await ask_on()
    assert counters.bytes_sent <= 50_000.0 * BURST_S


async def test_asking_for_what_is_not_there_uses_up_nothing_of_the_line(small: SmallModel) -> None:
    rate = 100_000.0
    giving = made(small, Clock(), rate=rate)
    other = m.GetBlock(model_id=ModelId(bytes(32)), layer=0, expert=1)
    for _ in range(math.ceil(2 * rate * BURST_S / small.manifest.spec.block_size_bytes(0))):
        with pytest.raises(LookupError):
            await giving.answer(block(small, expert=999), last_asked=NEVER, is_computing=False)
        with pytest.raises(LookupError):
            await giving.answer(other, last_asked=NEVER, is_computing=False)
    await giving.answer(block(small), last_asked=NEVER, is_computing=False)


async def test_a_file_is_opened_when_somebody_asks_and_its_blocks_are_checked(
    small: SmallModel, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(small.path, path)
    on_demand = FileOnDemand(path, small.manifest, small.source.experts)
    assert on_demand.experts == small.source.experts
    assert on_demand._file is None
    assert on_demand.read_block(1, 2) == small.source.read_block(1, 2)
    data = bytearray(path.read_bytes())
    plane = small.source.places(1, 2)[0]
    data[plane.start] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        on_demand.read_block(1, 2)
    assert on_demand.read_block(1, 3) == small.source.read_block(1, 3)
    on_demand.close()
    FileOnDemand(path, small.manifest, small.source.experts).close()
