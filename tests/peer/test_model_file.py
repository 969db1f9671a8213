"""A peer's experts from its own disk: a whole model, or a slice file with or without the manifest beside it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peer.model_file import OpenModel, choose_experts, open_model_file
from swarm.errors import NetworkError, UserError
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import MANIFEST_NAME, verify_block
from swarm.model.slices import write_backbone, write_slice
from swarm.wire import messages as m
from tests.peer.conftest import FakeNetwork, SmallModel, offer
from tests.synthetic_moe import write_synthetic_moe

HELD = ExpertSet({0: frozenset({1, 3}), 1: frozenset({0, 3})})


@pytest.fixture
def slice_file(small: SmallModel, tmp_path: Path) -> Path:
    """A slice file alone in its folder."""
    folder = tmp_path / "split"
    folder.mkdir()
    with GgufFile(small.path) as file:
        write_slice(file, small.manifest, HELD, folder / "experts.gguf")
    return folder / "experts.gguf"


@asynccontextmanager
async def opened(path: Path, network: FakeNetwork, tmp_path: Path) -> AsyncIterator[OpenModel]:
    pool: Any = network
    registry: Any = network
    async with open_model_file(path, tmp_path / "cache", registry, pool, lambda *_: None) as model:
        yield model


async def test_a_whole_model_is_hashed_and_closed_at_the_end(
    small: SmallModel, network: FakeNetwork, tmp_path: Path
) -> None:
    async with opened(small.path, network, tmp_path) as model:
        assert (model.manifest, model.name, model.held) == (small.manifest, "small", None)
        verify_block(small.manifest, 1, 5, model.source.read_block(1, 5))
    with pytest.raises(ValueError, match="closed file"):
        model.source.read_block(1, 5)
    assert network.requests == []


async def test_a_slice_with_its_manifest_beside_it_asks_nobody_for_it(
    small: SmallModel, slice_file: Path, network: FakeNetwork, tmp_path: Path
) -> None:
    slice_file.with_name(MANIFEST_NAME).write_bytes(small.manifest.to_bytes())
    async with opened(slice_file, network, tmp_path) as model:
        assert (model.manifest, model.held) == (small.manifest, HELD)
        for layer, expert in HELD:
            verify_block(small.manifest, layer, expert, model.source.read_block(layer, expert))
    assert network.requests == []
    network.add(small, 1)
    async with opened(slice_file, network, tmp_path) as model:
        assert model.name == "small", "as the registry calls the model, not as the file is called"
    assert network.requests == []


@pytest.mark.parametrize("beside", ["nothing", "damaged", "of another model"])
async def test_without_a_manifest_of_its_own_a_slice_takes_it_from_whoever_serves_the_model(
    small: SmallModel, slice_file: Path, network: FakeNetwork, tmp_path: Path, beside: str
) -> None:
    data = small.manifest.to_bytes()
    if beside == "damaged":
        slice_file.with_name(MANIFEST_NAME).write_bytes(data[:-1])
    elif beside == "of another model":
        digit = small.manifest.backbone_hash.hex()
        other = ("0" if digit[0] != "0" else "1") + digit[1:]
        slice_file.with_name(MANIFEST_NAME).write_bytes(data.replace(digit.encode(), other.encode()))
    with pytest.raises(NetworkError, match=f"a slice of model {small.manifest.model_id.short}: .*nobody serves that"):
        async with opened(slice_file, network, tmp_path):
            pytest.fail("nobody gives the manifest")
    assert network.listed is not None
    listed = network.add(small, 1)
    network.listed[:] = [offer(small.manifest, 1, offers_blocks=False)]  # the manifest is all that is needed
    async with opened(slice_file, network, tmp_path) as model:
        assert (model.manifest, model.name, model.held) == (small.manifest, "small", HELD)
    (request,) = network.requests
    assert request == (listed.node, m.GetManifest(model_id=small.manifest.model_id))


async def test_a_backbone_file_holds_no_experts(small: SmallModel, network: FakeNetwork, tmp_path: Path) -> None:
    with GgufFile(small.path) as file:
        write_backbone(file, small.manifest, tmp_path / "backbone.gguf")
    with pytest.raises(UserError, match="is a backbone written by swarm split"):
        async with opened(tmp_path / "backbone.gguf", network, tmp_path):
            pytest.fail("it has none")


async def test_a_cancelled_peer_does_not_hash_on(network: FakeNetwork, tmp_path: Path) -> None:
    path = write_synthetic_moe(tmp_path / "m.gguf", n_embd=64, n_layers=2, n_expert=4, n_expert_used=2, n_ff_exp=32)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    seen: list[int] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hashing(n_done: int, n_total: int) -> None:
        seen.append(n_done)
        has_begun.set()
        assert may_go_on.wait(5)

    async def start() -> None:
        fake: Any = network
        async with open_model_file(path, tmp_path / "cache", fake, fake, hashing):
            pytest.fail("it must not open")

    task = asyncio.create_task(start())
    assert await asyncio.to_thread(has_begun.wait, 5)
    task.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert len(seen) == 1, "the next piece was not hashed"


# Which experts


def test_a_slice_file_is_held_whole_unless_less_is_asked_for(small: SmallModel) -> None:
    spec = small.manifest.spec
    assert choose_experts(spec, None, None, HELD) == HELD
    assert choose_experts(spec, None, frozenset({1}), HELD) == ExpertSet.of([1], [0, 3])
    assert choose_experts(spec, frozenset({3}), None, HELD) == ExpertSet.of([0, 1], [3])
    assert choose_experts(spec, ExpertSet.of([0], [1]), None, HELD) == ExpertSet.of([0], [1])
    only_one = ExpertSet.of([1], [2])
    assert choose_experts(spec, frozenset({2}), None, only_one) == only_one, "of the layers that it has"


def test_a_model_is_held_as_asked(small: SmallModel) -> None:
    spec = small.manifest.spec
    assert choose_experts(spec, frozenset({2}), None, None) == ExpertSet.of([0, 1], [2])
    assert choose_experts(spec, frozenset({2}), frozenset({1}), None) == ExpertSet.of([1], [2])
    with pytest.raises(UserError, match="which experts"):
        choose_experts(spec, None, None, None)


@pytest.mark.parametrize(
    ("experts", "layers", "message"),
    [
        (frozenset({1}), None, "does not hold experts 1 of layers 1: it holds experts 1,3 of layers 0; experts 0,3 of"),
        (ExpertSet.of([0], [1, 2]), None, "does not hold experts 2 of layers 0"),
        (frozenset({9}), None, "no such experts: got 9"),
        (None, frozenset({1, 7}), "the slice file has nothing of layers 7: it holds experts 1,3 of layers 0"),
        (frozenset({1}), frozenset({7}), "layer 7 has no experts"),
    ],
)
def test_more_than_the_slice_file_holds_is_refused_by_name(
    small: SmallModel, experts: Any, layers: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose_experts(small.manifest.spec, experts, layers, HELD)


def test_a_layer_that_the_slice_file_lacks_is_refused(small: SmallModel) -> None:
    held = ExpertSet.of([0], [1])
    with pytest.raises(UserError, match="does not hold experts 1 of layers 1"):
        choose_experts(small.manifest.spec, frozenset({1}), frozenset({0, 1}), held)
    with pytest.raises(UserError, match="has nothing of layers 1"):
        choose_experts(small.manifest.spec, None, frozenset({1}), held)


def test_a_slice_file_that_claims_more_than_the_model_has_is_refused(small: SmallModel) -> None:
    with pytest.raises(UserError, match="no such experts"):
        choose_experts(small.manifest.spec, None, None, ExpertSet.of([0], [77]))
