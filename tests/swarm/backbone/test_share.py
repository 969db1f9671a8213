"""What a node gives away of its model, and what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from pathlib import Path

import pytest

from swarm.backbone import share
from swarm.backbone.share import SERVES, ModelShare
from swarm.errors import ExpertUnavailable, IntegrityError, RemoteProtocolError, SwarmError, UserError
from swarm.ids import ExpertSet, ModelId
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest
from swarm.model.source import GgufSource
from swarm.wire import messages as m
from tests.swarm.backbone.local_experts import SplitModel


def block_request(manifest: Manifest, layer: int, expert: int) -> m.GetBlock:
    return m.GetBlock(model_id=manifest.model_id, layer=layer, expert=expert)


async def test_the_manifest_and_every_block_are_what_the_model_id_says(tiny: SplitModel) -> None:
    manifest = tiny.manifest
    with GgufFile(tiny.file) as file:
        offered = ModelShare(manifest, GgufSource(file))
        answer = await offered.answer(m.GetManifest(model_id=manifest.model_id))
        assert isinstance(answer, m.ManifestBytes)
        assert hashlib.sha256(answer.data).digest() == manifest.model_id.raw
        for layer, expert in [(0, 0), (3, 31), (5, 7)]:
            block = await offered.answer(block_request(manifest, layer, expert))
            assert isinstance(block, m.BlockBytes)
            assert hashlib.sha256(block.data).digest() == manifest.block_hashes[layer][expert]


@pytest.mark.parametrize(("layer", "expert"), [(6, 0), (0, 32), (65_535, 65_535)])
async def test_a_block_that_the_model_does_not_have_is_not_found(tiny: SplitModel, layer: int, expert: int) -> None:
    with GgufFile(tiny.file) as file:
        offered = ModelShare(tiny.manifest, GgufSource(file))
        with pytest.raises(LookupError, match=f"does not have layer {layer}, expert {expert}$"):
            await offered.answer(block_request(tiny.manifest, layer, expert))


@pytest.mark.parametrize(
    "error",
    [
        UserError("/home/ann/models/secret.gguf changed while it was read"),
        IntegrityError("/home/ann/x"),
        OSError(5, "Input/output error", "/home/ann/models/secret.gguf"),
        ExpertUnavailable(0, (1,), "/home/ann/models/secret.gguf does not hold it"),
    ],
)
async def test_a_stranger_is_told_no_path_of_this_machine_but_the_log_is(
    tiny: SplitModel, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        experts = tiny.spec.all_experts

        def read_block(self, layer: int, expert: int) -> bytes:
            raise error

    offered = ModelShare(tiny.manifest, Broken())
    for _ in range(3):
        with pytest.raises((LookupError, SwarmError), match="layer 0, expert 1") as caught:
            await offered.answer(block_request(tiny.manifest, 0, 1))
        assert "/home" not in str(caught.value)
    if not isinstance(error, ExpertUnavailable):
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "/home/ann" in line, "said once, to who can mend it"


async def test_a_real_file_that_became_shorter_is_no_path_on_the_wire(tiny: SplitModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.file.read_bytes())
    with GgufFile(path) as file:
        offered = ModelShare(tiny.manifest, GgufSource(file))
        path.write_bytes(b"")
        with pytest.raises(SwarmError) as caught:
            await offered.answer(block_request(tiny.manifest, 5, 31))
    assert str(tmp_path) not in str(caught.value)


async def test_another_model_is_not_found(tiny: SplitModel) -> None:
    offered = ModelShare(tiny.manifest, None)
    other = ModelId(bytes(32))
    for request in (m.GetManifest(model_id=other), m.GetBlock(model_id=other, layer=0, expert=0)):
        with pytest.raises(LookupError, match=tiny.manifest.model_id.short):
            await offered.answer(request)


async def test_a_node_without_experts_gives_the_manifest_alone(tiny: SplitModel) -> None:
    offered = ModelShare(tiny.manifest, None)
    assert isinstance(await offered.answer(m.GetManifest(model_id=tiny.manifest.model_id)), m.ManifestBytes)
    with pytest.raises(LookupError, match="offers no blocks"):
        await offered.answer(block_request(tiny.manifest, 0, 0))


async def test_nothing_else_is_answered(tiny: SplitModel) -> None:
    with pytest.raises(RemoteProtocolError):
        await ModelShare(tiny.manifest, None).answer(m.GetStatus())
    assert set(SERVES) == {m.GetManifest, m.GetBlock}


async def test_few_blocks_are_in_memory_at_a_time_and_the_loop_stays_awake(tiny: SplitModel) -> None:
    class SlowSource:
        def __init__(self) -> None:
            self.n_now = self.n_most = 0
            self.lock = threading.Lock()
            self.is_full, self.may_end = threading.Event(), threading.Event()

        @property
        def experts(self) -> ExpertSet:
            raise AssertionError

        def read_block(self, layer: int, expert: int) -> bytes:
            with self.lock:
                self.n_now += 1
                self.n_most = max(self.n_most, self.n_now)
                if self.n_now == share.MAX_READS:
                    self.is_full.set()
            assert self.may_end.wait(5)
            with self.lock:
                self.n_now -= 1
            if expert == 0:
                raise ExpertUnavailable(layer, (expert,), "gone")
            return bytes([expert])

    source = SlowSource()
    offered = ModelShare(tiny.manifest, source)
    tasks = [asyncio.create_task(offered.answer(block_request(tiny.manifest, 0, i))) for i in range(12)]
    assert await asyncio.to_thread(source.is_full.wait, 5)
    for _ in range(20):
        await asyncio.sleep(0)
    source.may_end.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert source.n_most == share.MAX_READS
    assert isinstance(answers[0], LookupError)
    assert [a.data for a in answers[1:] if isinstance(a, m.BlockBytes)] == [bytes([i]) for i in range(1, 12)]
