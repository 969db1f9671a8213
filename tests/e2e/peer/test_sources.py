"""A peer joins, and its blocks come from the web, from other peers, or a backbone: who gives what, and what is fetched once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from peer import fetch, giving, opening, web_sources
from peer.config import PeerConfig, PeerReady
from peer.daemon import PeerDaemon
from relay.daemon import RelayConfig, RelayDaemon, RelayReady
from swarm.backbone.share import SERVES, ModelShare
from swarm.errors import IntegrityError, NetworkError, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet
from swarm.model import block_store
from swarm.model.block_store import BlockStore
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.model.slices import write_slice
from swarm.model.source import GgufSource
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import sign
from swarm.sources import web_model
from swarm.wire import messages as m
from tests.e2e.peer.test_wire import running
from tests.e2e.sources.file_server import FileServer, serving
from tests.gguf_shards import write_shards
from tests.sample_records import sample_announcement, sample_offer
from tests.synthetic_moe import write_synthetic_moe

TIMEOUT_S = 30.0
PROBE_BYTES = 2000  # of the header, asked for at first
SOURCE = "hf://owner/repo/m.gguf"
PATH = "/owner/repo/resolve/main/m.gguf"
WANTED = ExpertSet.of([0, 1], [0, 1, 2])


class Node:
    """A node that gives blocks of the model: a backbone, or a peer; it may lie."""

    def __init__(self, endpoint: Endpoint, share: ModelShare) -> None:
        self.endpoint = endpoint
        self.share = share
        self.n_blocks = 0
        self.lies = False

    async def answer(self, _connection: Connection, request: m.Request) -> m.Response:
        response = await self.share.answer(request)
        if isinstance(response, m.BlockBytes):
            self.n_blocks += 1
            if self.lies:
                return m.BlockBytes(data=response.data[:-1] + bytes([response.data[-1] ^ 1]))
        return response


class Stage:
    """A registry, a web server that is Hugging Face, and the nodes that a test adds."""

    def __init__(self, path: Path, manifest: Manifest, source: GgufSource, registry: str, folder: Path) -> None:
        self.path = path
        self.manifest = manifest
        self.source = source
        self.registry = registry
        self.folder = folder
        self.server = FileServer({PATH: path.read_bytes()})
        self.stack = contextlib.AsyncExitStack()
        self.n_joined = 0

    @property
    def block_bytes(self) -> int:
        return self.manifest.spec.block_size_bytes(0)

    async def add_node(self, *, sources: tuple[str, ...] | None = None, offers_blocks: bool = True) -> Node:
        """Add a backbone, or with `sources` None a peer that announces all experts."""
        identity = Identity.generate()

        async def answer(connection: Connection, request: m.Request) -> m.Response:
            return await node.answer(connection, request)

        endpoint = Endpoint(identity, host="127.0.0.1", handler=answer, serves=SERVES)
        await self.stack.enter_async_context(endpoint)
        node = Node(endpoint, ModelShare(self.manifest, self.source if offers_blocks else None))
        common = {
            "model": self.manifest.model_id,
            "model_name": "small",
            "addresses": (f"127.0.0.1:{endpoint.port}",),
        }
        client = RegistryClient(endpoint, parse_registry(self.registry))
        if sources is None:
            experts = self.manifest.spec.all_experts
            record = sign(sample_announcement(identity.node_id, **common, experts=experts), identity)
        else:
            offer = sample_offer(
                identity.node_id,
                **common,
                n_expert=6,
                moe_layers="0-1",
                n_embd=256,
                size_bytes=self.path.stat().st_size,
                offers_blocks=offers_blocks,
                sources=sources,
            )
            record = sign(offer, identity)
        await client.publish(record)
        return node

    def config(self, **fields: object) -> PeerConfig:
        self.n_joined += 1
        values: dict[str, object] = {
            "registry": parse_registry(self.registry),
            "folders": Folders.below(self.folder / f"home{self.n_joined}"),
            "experts": frozenset({0, 1, 2}),
            "host": "127.0.0.1",
        }
        return PeerConfig(**values | fields)  # type: ignore[arg-type]

    async def join(self, config: PeerConfig) -> None:
        """Join, check that all blocks are there and right, and leave."""
        async with running(PeerDaemon(config, Identity.generate()), PeerReady):
            self.check(config)

    def check(self, config: PeerConfig, wanted: ExpertSet = WANTED) -> None:
        store = BlockStore(config.folders.cache, self.manifest)
        for layer, expert in wanted:
            assert store.read_block(layer, expert) == self.source.read_block(layer, expert)

    async def refused(self, config: PeerConfig) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await PeerDaemon(config, Identity.generate()).run(lambda _: pytest.fail("it must not get ready"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_moe(
        tmp_path_factory.mktemp("model") / "m.gguf", n_layers=2, n_expert=6, n_expert_used=2, n_embd=256, n_ff_exp=256
    )


@pytest_asyncio.fixture
async def stage(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    monkeypatch.setattr(web_sources, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(web_model, "FIRST_BYTES", PROBE_BYTES)
    monkeypatch.setattr(web_model, "STEP_BYTES", 20_000)
    relay = RelayDaemon(RelayConfig(host="127.0.0.1", port=0), Identity.generate())
    with GgufFile(made) as file:
        manifest = build_manifest(file)
        async with running(relay, RelayReady) as registry:
            stage = Stage(made, manifest, GgufSource(file), registry.registry, tmp_path)
            async with stage.stack, serving(stage.server):
                monkeypatch.setenv("HF_ENDPOINT", stage.server.url)
                monkeypatch.setenv("HF_TOKEN", "t0ken")
                yield stage


# From the web


async def test_only_the_slices_bytes_come_from_the_records_source_and_no_node_is_asked(stage: Stage) -> None:
    backbone = await stage.add_node(sources=(SOURCE,))
    await stage.join(stage.config())
    assert backbone.n_blocks == 0
    header = stage.server.n_sent - len(WANTED) * stage.block_bytes
    assert PROBE_BYTES <= header < 100_000
    assert {each["Authorization"] for each in stage.server.headers_seen} == {"Bearer t0ken"}
    assert stage.server.n_most <= fetch.N_PARALLEL


async def test_a_file_on_the_web_that_the_volunteer_names_is_found_by_its_length_and_tensors(stage: Stage) -> None:
    await stage.add_node(sources=(), offers_blocks=False)
    stage.server.files = {"/any/name.gguf": stage.path.read_bytes()}
    await stage.join(stage.config(model_url=f"{stage.server.url}/any/name.gguf"))


async def test_a_server_that_is_busy_at_first_is_asked_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FIRST_REST_S", 0.01)
    await stage.add_node(sources=(SOURCE,), offers_blocks=False)
    stage.server.fails = [(429, {"Retry-After": "0"}), (500, {})]
    await stage.join(stage.config(model_url=SOURCE))


async def test_with_all_blocks_here_the_web_may_be_away(stage: Stage) -> None:
    await stage.add_node(sources=(SOURCE,), offers_blocks=False)
    config = stage.config(model_url=SOURCE)
    await stage.join(config)
    stage.server.files.clear()
    await stage.join(config)


async def test_a_file_of_which_nobody_knows_what_it_is_needs_its_manifest_beside_it(stage: Stage) -> None:
    config = stage.config(model_url=SOURCE)
    with pytest.raises(UserError, match=r"cannot tell what hf://owner/repo/m\.gguf is: nobody in the registry serves"):
        await stage.refused(config)
    stage.server.files["/owner/repo/resolve/main/manifest.json"] = stage.manifest.to_bytes()
    await stage.join(config)


async def test_a_slice_on_the_web_is_held_whole(stage: Stage, tmp_path: Path) -> None:
    await stage.add_node(sources=(), offers_blocks=False)
    with GgufFile(stage.path) as file:
        write_slice(file, stage.manifest, WANTED, tmp_path / "slice.gguf")
    stage.server.files = {"/s/slice.gguf": (tmp_path / "slice.gguf").read_bytes()}
    await stage.join(stage.config(model_url=f"{stage.server.url}/s/slice.gguf", experts=None))


async def test_shards_are_fetched_from_as_one_model(stage: Stage, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, stage.path, 3)
    backbone = await stage.add_node(sources=(f"hf://owner/repo/{paths[0].name}",))
    stage.server.files = {f"/owner/repo/resolve/main/{path.name}": path.read_bytes() for path in paths}
    await stage.join(stage.config())
    assert backbone.n_blocks == 0


async def test_a_server_that_ignores_ranges_is_read_once(stage: Stage) -> None:
    backbone = await stage.add_node(sources=(SOURCE,))
    stage.server.ignores_ranges = True
    config = stage.config()
    daemon = PeerDaemon(config, Identity.generate())
    async with running(daemon, PeerReady):
        stage.check(config)
    assert backbone.n_blocks == 0
    whole = stage.path.stat().st_size
    assert len([span for span in stage.server.asked if span.end > 100_000]) == 1, "one reading beside the header's"
    assert daemon._traffic is not None
    assert len(WANTED) * stage.block_bytes < daemon._traffic._n_web < whole + 1_000_000


async def test_a_server_that_ignores_ranges_of_too_large_a_file_is_passed_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = await stage.add_node(sources=(SOURCE,))
    stage.server.ignores_ranges = True
    monkeypatch.setattr(web_model, "MAX_STREAM_BYTES", 1000)
    await stage.join(stage.config())
    assert backbone.n_blocks == len(WANTED)


async def test_one_who_wants_to_be_asked_later_is(stage: Stage) -> None:
    await stage.add_node(sources=(SOURCE,), offers_blocks=False)
    stage.server.fails = [(429, {"Retry-After": "0"}), (503, {}), (500, {})]
    stage.server.cuts_after = [1000, 5000]
    await stage.join(stage.config())


async def test_while_the_web_rests_nodes_are_asked(stage: Stage) -> None:
    backbone = await stage.add_node(sources=(SOURCE,))
    stage.server.fails = [(429, {"Retry-After": "1000"})]
    await stage.join(stage.config())
    assert backbone.n_blocks == len(WANTED)


@pytest.mark.parametrize("fault", ["gone", "wrong bytes", "another part", "another model"])
async def test_a_bad_source_costs_nothing_but_its_bytes(stage: Stage, fault: str, tmp_path: Path) -> None:
    backbone = await stage.add_node(sources=(SOURCE,))
    if fault == "gone":
        stage.server.files.clear()
    elif fault == "wrong bytes":
        whole = bytearray(stage.path.read_bytes())
        whole[-len(whole) * 9 // 10 :] = bytes(len(whole) * 9 // 10)
        stage.server.files[PATH] = bytes(whole)
    elif fault == "another part":
        stage.server.lies = {"Content-Range": "bytes 0-99/1000"}
    else:
        other = write_synthetic_moe(
            tmp_path / "o.gguf", n_layers=2, n_expert=6, n_expert_used=2, n_embd=256, n_ff_exp=128
        )
        stage.server.files[PATH] = other.read_bytes()
    await stage.join(stage.config())
    assert backbone.n_blocks > 0


async def test_a_second_source_gives_what_the_first_does_not(stage: Stage) -> None:
    backbone = await stage.add_node(sources=(SOURCE, "hf://other/repo@v1/m.gguf", "https://127.0.0.1/m.gguf"))
    stage.server.files = {"/other/repo/resolve/v1/m.gguf": stage.path.read_bytes()}
    await stage.join(stage.config())
    assert backbone.n_blocks == 0


async def test_no_source_at_all_says_what_the_last_one_said(stage: Stage) -> None:
    await stage.add_node(sources=(SOURCE,), offers_blocks=False)
    stage.server.files.clear()
    with pytest.raises(NetworkError, match=r"nobody gives layer \d, expert \d: hf://owner/repo/m.gguf: .* 404"):
        await stage.refused(stage.config())


# What is kept


async def test_a_full_disk_loses_nothing_that_was_checked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.add_node(sources=(SOURCE,))
    config = stage.config(experts=frozenset({0, 2, 4}))
    wanted = ExpertSet.of([0, 1], [0, 2, 4])
    written = itertools.count(1)  # several threads write
    write = block_store.write_atomically

    def full(path: Path, data: bytes) -> None:
        if next(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(block_store, "write_atomically", full)
    with pytest.raises(UserError, match="No space left on device"):
        await stage.refused(config)
    monkeypatch.setattr(block_store, "write_atomically", write)
    store = BlockStore(config.folders.cache, stage.manifest)
    kept = set(store.experts)
    assert len(kept) == 2
    await stage.server.is_quiet()
    before = stage.server.n_sent
    async with running(PeerDaemon(config, Identity.generate()), PeerReady):
        stage.check(config, wanted)
    assert stage.server.n_sent - before == PROBE_BYTES + (len(wanted) - 2) * stage.block_bytes


@pytest.mark.parametrize("room", [5, 6])
async def test_the_cap_on_the_disk_holds_and_is_looked_at_before(stage: Stage, room: int) -> None:
    await stage.add_node(sources=(SOURCE,))
    config = stage.config(disk_bytes=room * stage.block_bytes)
    store = BlockStore(config.folders.cache, stage.manifest)
    for layer, expert in ((0, 0), (0, 5), (1, 5)):
        store.add(layer, expert, stage.source.read_block(layer, expert))
    if room < len(WANTED):
        with pytest.raises(UserError, match=r"do not fit into --disk: got .* expected at least"):
            await stage.refused(config)
    else:
        await stage.join(config)
        assert store.experts == WANTED, "what an earlier choice had fetched has made room"


async def test_without_room_nothing_is_fetched(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.add_node(sources=(SOURCE,))
    monkeypatch.setattr(fetch, "SPARE_DISK_BYTES", 1 << 60)
    with pytest.raises(UserError, match="not enough space"):
        await stage.refused(stage.config())
    assert stage.server.n_sent == 0


# From peers


async def test_a_peer_is_the_only_source(stage: Stage) -> None:
    await stage.add_node(sources=(SOURCE,), offers_blocks=False)
    first = stage.config()
    async with running(PeerDaemon(first, Identity.generate()), PeerReady):
        stage.server.files.clear()
        n_asked = len(stage.server.asked)
        await stage.join(stage.config())
        assert len(stage.server.asked) == n_asked


async def test_a_peer_with_a_file_gives_its_blocks_too(stage: Stage) -> None:
    await stage.add_node(sources=(), offers_blocks=False)
    async with running(PeerDaemon(stage.config(model_file=stage.path), Identity.generate()), PeerReady):
        await stage.join(stage.config())


async def test_peers_are_asked_before_backbones(stage: Stage) -> None:
    backbone = await stage.add_node(sources=())
    peer = await stage.add_node()
    await stage.join(stage.config())
    assert (peer.n_blocks, backbone.n_blocks) == (len(WANTED), 0)


async def test_a_peer_that_lies_is_found_out_and_asked_no_more(stage: Stage) -> None:
    peer = await stage.add_node()
    peer.lies = True
    backbone = await stage.add_node(sources=())
    await stage.join(stage.config())
    assert backbone.n_blocks == len(WANTED)
    assert peer.n_blocks <= fetch.N_PARALLEL, "once for each request that was under way"


async def test_with_nobody_but_a_liar_nothing_is_kept(stage: Stage) -> None:
    peer = await stage.add_node()
    peer.lies = True
    await stage.add_node(sources=(), offers_blocks=False)
    config = stage.config()
    with pytest.raises(IntegrityError, match="is damaged"):
        await stage.refused(config)
    assert not len(BlockStore(config.folders.cache, stage.manifest).experts)


async def test_a_peer_that_computes_gives_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = await stage.add_node(sources=())
    monkeypatch.setattr(giving, "IDLE_S", 1000.0)
    daemon = PeerDaemon(stage.config(model_file=stage.path), Identity.generate())
    async with running(daemon, PeerReady):
        daemon._last_asked = asyncio.get_running_loop().time()
        await stage.join(stage.config())
    assert backbone.n_blocks == len(WANTED)


# kill -9


async def test_after_kill_9_no_checked_byte_is_fetched_again(stage: Stage) -> None:
    await stage.add_node(sources=(), offers_blocks=False)
    home = stage.folder / "volunteer"
    stage.server.files = {"/m.gguf": stage.path.read_bytes()}
    # One for the header. Of four connections, each may be within a block of three parts: so at least (14 - 4 * 2) / 3 blocks
    # come, and 14 / 3 at most.
    stage.server.holds_after = 1 + 14
    arguments = ["join", "--experts", "0,2,4", "--model", f"{stage.server.url}/m.gguf", "--registry", stage.registry]
    arguments += ["--host", "127.0.0.1", "--json", "--yes"]

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "swarm",
            *arguments,
            env=os.environ | {"SWARM_HOME": str(home), "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    store = BlockStore(Folders.below(home).cache, stage.manifest)
    process = await start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while len(store.experts) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        process.kill()
        await process.wait()
        kept = len(store.experts)
        assert 2 <= kept <= 4, "in the middle of it"
        await stage.server.is_quiet()
        before = stage.server.n_sent
        stage.server.holds_after = None
        process = await start()
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            async for line in process.stdout:
                if b'"ready"' in line:
                    break
            else:
                pytest.fail("it ended before it was ready")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    probe = 64 << 10
    assert stage.server.n_sent - before == probe + (6 - kept) * stage.block_bytes
    assert set(store.experts) == set(ExpertSet.of([0, 1], [0, 2, 4]))
