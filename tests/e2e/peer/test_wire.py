"""A peer over real sockets, all parts in this process: what it fetches, and what it says to those who break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from peer import compute, fetch
from peer.config import PeerConfig, PeerReady
from peer.daemon import PeerDaemon
from relay.daemon import RelayConfig, RelayDaemon, RelayReady
from swarm.backbone.share import SERVES, ModelShare
from swarm.errors import ConnectionLost, IntegrityError, NetworkError, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.model.source import GgufSource
from swarm.net.addresses import parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import sign
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from tests.sample_records import sample_offer
from tests.synthetic_moe import write_synthetic_moe

TIMEOUT_S = 10.0
D = 64


class Stage:
    """A registry, a backbone's share of a small model, and what a test makes of them."""

    def __init__(self, manifest: Manifest, share: ModelShare, registry: str, folder: Path) -> None:
        self.manifest = manifest
        self.share = share
        self.registry = registry
        self.folder = folder
        self.n_blocks = 0
        self.flip: tuple[int, int] | None = None  # the (layer, expert) that is sent with one byte flipped

    async def answer(self, _connection: Connection, request: m.Request) -> m.Response:
        response = await self.share.answer(request)
        if isinstance(request, m.GetBlock) and isinstance(response, m.BlockBytes):
            self.n_blocks += 1
            if (request.layer, request.expert) == self.flip:
                return m.BlockBytes(data=response.data[:-1] + bytes([response.data[-1] ^ 1]))
        return response

    def config(self) -> PeerConfig:
        return PeerConfig(
            registry=parse_registry(self.registry),
            folders=Folders(self.folder / "config", self.folder / "state", self.folder / "cache"),
            experts=frozenset({0, 1, 2}),
            host="127.0.0.1",
        )

    def dispatch(self, **fields: Any) -> m.Dispatch:
        values: dict[str, Any] = {
            "model_tag": self.manifest.model_id.raw[:8],
            "layer": 1,
            "rows_codec": RowCodec.EXACT,
            "result_codec": RowCodec.EXACT,
            "row_counts": np.array([2], np.uint8),
            "expert_ids": np.array([0, 2], np.uint16),
            "weights": None,
            "rows": np.ones((1, D), np.float32),
        }
        return m.Dispatch(**values | fields)


@contextlib.asynccontextmanager
async def running(daemon: Any, kind: type) -> AsyncIterator[Any]:
    """Run a daemon; yield what it says when it is ready."""
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(daemon.run(ready.set_result))
    await asyncio.wait([ready, task], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    assert isinstance(ready.result(), kind)
    try:
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=TIMEOUT_S)


@pytest_asyncio.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    path = write_synthetic_moe(
        tmp_path / "small.gguf", n_layers=2, n_expert=6, n_expert_used=2, n_embd=D, n_ff_exp=32, n_ff_shared=32
    )
    relay = RelayDaemon(RelayConfig(host="127.0.0.1", port=0), Identity.generate())
    with GgufFile(path) as file:
        manifest = build_manifest(file)
        async with running(relay, RelayReady) as registry:
            made = Stage(manifest, ModelShare(manifest, GgufSource(file)), registry.registry, tmp_path)
            identity = Identity.generate()
            async with Endpoint(identity, host="127.0.0.1", handler=made.answer, serves=SERVES) as backbone:
                client = RegistryClient(backbone, parse_registry(registry.registry))
                offer = sample_offer(
                    identity.node_id,
                    model=manifest.model_id,
                    model_name="small",
                    n_expert=6,
                    moe_layers="0-1",
                    n_embd=D,
                    size_bytes=path.stat().st_size,
                    addresses=(f"127.0.0.1:{backbone.port}",),
                )
                await client.publish(sign(offer, identity))
                yield made


@pytest_asyncio.fixture
async def dialler() -> AsyncIterator[Endpoint]:
    async with Endpoint(Identity.generate(), host="127.0.0.1") as endpoint:
        yield endpoint


async def dial(dialler: Endpoint, ready: PeerReady) -> Connection:
    return await dialler.dial(parse_address(ready.address), expected=NodeId.parse(ready.node))


async def status(connection: Connection) -> dict[str, Any]:
    answer = await connection.request(m.GetStatus(), timeout_s=TIMEOUT_S)
    assert isinstance(answer, m.Status)
    found: dict[str, Any] = json.loads(answer.data)
    return found


async def test_a_peer_fetches_each_block_once_and_computes(stage: Stage, dialler: Endpoint) -> None:
    async with running(PeerDaemon(stage.config(), Identity.generate()), PeerReady) as ready:
        assert stage.n_blocks == 2 * 3
        connection = await dial(dialler, ready)
        result = await connection.request(stage.dispatch(), timeout_s=TIMEOUT_S)
        assert isinstance(result, m.Result)
        assert result.rows.shape == (2, D)
        found = await status(connection)
        assert (found["n_dispatches"], found["n_assignments"]) == (1, 2)


async def test_a_block_with_one_flipped_byte_is_refused_and_nothing_announced(stage: Stage, dialler: Endpoint) -> None:
    stage.flip = (1, 2)
    with pytest.raises(IntegrityError, match="layer 1, expert 2 is damaged"):
        async with asyncio.timeout(TIMEOUT_S):
            await PeerDaemon(stage.config(), Identity.generate()).run(lambda _: pytest.fail("it must not get ready"))
    registry = RegistryClient(dialler, parse_registry(stage.registry))
    assert await registry.holders(stage.manifest.model_id) == []
    # An honest backbone later: only what is missing is fetched.
    n_before, stage.flip = stage.n_blocks, None
    async with running(PeerDaemon(stage.config(), Identity.generate()), PeerReady):
        assert 1 <= stage.n_blocks - n_before < 6
        assert len(await registry.holders(stage.manifest.model_id)) == 1


async def test_who_breaks_the_protocol_loses_his_link_and_the_peer_goes_on(stage: Stage, dialler: Endpoint) -> None:
    bad = [
        stage.dispatch(layer=9),
        stage.dispatch(expert_ids=np.array([0, 65_535], np.uint16)),
        stage.dispatch(rows=np.ones((1, D + 1), np.float32)),
        stage.dispatch(result_codec=RowCodec.F32, weights=np.array([1, np.nan], np.float32)),
    ]
    async with running(PeerDaemon(stage.config(), Identity.generate()), PeerReady) as ready:
        for dispatch in bad:
            connection = await dial(dialler, ready)
            with pytest.raises((RemoteProtocolError, NetworkError)):
                await connection.request(dispatch, timeout_s=TIMEOUT_S)
            assert not connection.is_open
        connection = await dial(dialler, ready)
        assert isinstance(await connection.request(stage.dispatch(), timeout_s=TIMEOUT_S), m.Result)
        assert (await status(connection))["n_assignments"] == 2


async def test_a_wrong_model_and_a_full_line_are_refused_and_the_link_stays(
    stage: Stage, dialler: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(PeerDaemon(stage.config(), Identity.generate()), PeerReady) as ready:
        connection = await dial(dialler, ready)

        async def code(dispatch: m.Dispatch) -> int:
            with pytest.raises(RemoteRefused) as caught:
                await connection.request(dispatch, timeout_s=TIMEOUT_S)
            return caught.value.remote_code

        assert await code(stage.dispatch(model_tag=bytes(8))) == m.ErrorCode.NOT_FOUND
        monkeypatch.setattr(compute, "MAX_LINE", 0)
        assert await code(stage.dispatch()) == m.ErrorCode.BUSY
        monkeypatch.undo()
        assert isinstance(await connection.request(stage.dispatch(), timeout_s=TIMEOUT_S), m.Result)


async def test_a_peer_that_leaves_is_withdrawn_and_its_links_end(stage: Stage, dialler: Endpoint) -> None:
    registry = RegistryClient(dialler, parse_registry(stage.registry))
    async with running(PeerDaemon(stage.config(), Identity.generate()), PeerReady) as ready:
        connection = await dial(dialler, ready)
        assert len(await registry.holders(stage.manifest.model_id)) == 1
    assert await registry.holders(stage.manifest.model_id) == []
    async with asyncio.timeout(TIMEOUT_S):
        await connection.wait_gone()
    with pytest.raises((ConnectionLost, SwarmError)):
        await connection.request(stage.dispatch(), timeout_s=TIMEOUT_S)
