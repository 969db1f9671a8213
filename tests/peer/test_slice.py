"""A slice is loaded whole and checked, or not at all; what it computes is what its blocks say."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from peer import slice as slice_module
from peer.disk_bound import DiskBoundExecutor
from peer.model_file import OpenModel
from peer.slice import Slice, load_slice
from swarm.errors import IntegrityError, UserError
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.source import BlockSource
from tests.peer.conftest import SmallModel, dispatch

HELD = ExpertSet.of([0, 1], [1, 2, 3])


class OneBadBlock:
    """A source one of whose blocks has a wrong byte."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source

    def read_block(self, layer: int, expert: int) -> bytes:
        block = bytearray(self._source.read_block(layer, expert))
        if (layer, expert) == (1, 2):
            block[-1] ^= 1
        return bytes(block)


async def load(small: SmallModel, *, source: Any = None, **options: Any) -> Slice:
    model = OpenModel(manifest=small.manifest, name="small", source=source or small.source, held=None)
    values: dict[str, Any] = {"n_threads": 1, "device": "cpu", "fault": None, "disk_bytes_per_s": None}
    return await load_slice(model, HELD, **values | {"on_loaded": lambda n_done, n_total: None} | options)


async def test_each_block_is_told_of_and_the_slice_computes(small: SmallModel) -> None:
    told: list[tuple[int, int]] = []
    loaded = await load(small, on_loaded=lambda *each: told.append(each))
    try:
        assert told == [(n, 6) for n in range(1, 7)]
        assert loaded.experts == HELD
        answer = await asyncio.wait_for(loaded.compute.start(dispatch(1)), 5)
        assert answer.rows.shape == (2, small.manifest.spec.n_embd)
        assert np.isfinite(answer.rows).all()
        assert loaded.executor.assignments().total == 3
    finally:
        await loaded.wait_closed()


async def test_a_wrong_byte_ends_it_by_name_and_frees_what_was_loaded(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ExpertFfn] = []
    close = ExpertFfn.close

    def close_and_note(ffn: ExpertFfn) -> None:
        closed.append(ffn)
        close(ffn)

    monkeypatch.setattr(ExpertFfn, "close", close_and_note)
    with pytest.raises(IntegrityError, match="layer 1, expert 2"):
        await load(small, source=OneBadBlock(small.source))
    assert len(closed) == 1


async def test_a_fault_is_planted_only_in_what_is_held(small: SmallModel) -> None:
    with pytest.raises(UserError, match="layer 0, expert 5 is not in this slice"):
        await load(small, fault=(0, 5))
    good, bad = await load(small), await load(small, fault=(0, 2))
    try:
        one, other = [await asyncio.wait_for(each.compute.start(dispatch(0)), 5) for each in (good, bad)]
        assert not np.array_equal(one.rows, other.rows)
    finally:
        await good.wait_closed()
        await bad.wait_closed()


async def test_it_may_be_as_slow_as_a_disk(small: SmallModel) -> None:
    loaded = await load(small, disk_bytes_per_s=1e9)
    try:
        assert isinstance(loaded.executor, DiskBoundExecutor)
    finally:
        await loaded.wait_closed()


async def test_waiting_for_the_last_answers_has_an_end(small: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_module, "LOOK_S", 0.01)
    loaded = await load(small)
    may_end = threading.Event()
    run = loaded.executor.run

    def held(*arguments: Any) -> Any:
        assert may_end.wait(5)
        return run(*arguments)

    monkeypatch.setattr(loaded.executor, "run", held)
    await asyncio.wait_for(loaded.answered(5.0), 1)  # nothing is in line
    answer = loaded.compute.start(dispatch(0))
    await loaded.answered(0.05)
    assert not answer.done()
    may_end.set()
    await asyncio.wait_for(loaded.answered(5.0), 5)
    assert answer.done()
    await loaded.wait_closed()
