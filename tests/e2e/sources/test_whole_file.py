"""A whole model from the web, for who serves it: what is fetched twice, and what becomes of a cut."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp.web
import pytest
import pytest_asyncio

from swarm.errors import NetworkError, SourceUnusable, UserError
from swarm.sources import whole_file
from swarm.sources.locations import locate
from swarm.sources.web import Web
from swarm.sources.whole_file import fetch_model
from tests.e2e.sources.file_server import FileServer, serving
from tests.gguf_shards import write_shards
from tests.synthetic_moe import write_synthetic_moe


class Stage:
    def __init__(self, server: FileServer, web: Web, folder: Path) -> None:
        self.server = server
        self.web = web
        self.folder = folder
        self.told: list[tuple[int, int]] = []

    async def fetch(self, name: str = "m.gguf") -> Path:
        location = locate(f"{self.server.url}/{name}", is_asked=True)
        return await fetch_model(self.web, location, self.folder / "cache", lambda *done: self.told.append(done))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_moe(
        tmp_path_factory.mktemp("whole") / "m.gguf", n_layers=1, n_expert=4, n_expert_used=2, n_embd=256, n_ff_exp=256
    )


@pytest.fixture(scope="module")
def whole(made: Path) -> bytes:
    return made.read_bytes()


@pytest_asyncio.fixture
async def stage(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(whole_file, "PART_BYTES", 200_000)
    monkeypatch.setattr(whole_file, "FIRST_REST_S", 0.01)
    async with serving(FileServer({"/m.gguf": whole})) as server, Web() as web:
        yield Stage(server, web, tmp_path)


async def test_every_byte_comes_once_over_several_connections(stage: Stage, whole: bytes) -> None:
    path = await stage.fetch()
    assert path.name == "m.gguf"
    assert path.read_bytes() == whole
    assert stage.server.n_sent == len(whole) + 1, "one byte tells how long it is"
    assert stage.server.n_most <= whole_file.N_CONNECTIONS
    assert stage.told[-1] == (len(whole), len(whole))
    assert [each for each in path.parent.iterdir() if each != path] == []
    assert await stage.fetch() == path
    assert stage.server.n_sent == len(whole) + 2, "the same version is there already"


async def test_a_download_that_was_cut_goes_on_with_what_is_missing(
    stage: Stage, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_file, "N_ATTEMPTS", 1)
    monkeypatch.setattr(whole_file, "N_CONNECTIONS", 1)
    monkeypatch.setattr("swarm.sources.web_file.N_RESUMES", 0)
    stage.server.cuts_after = [1, 200_000, 200_000, 200_000, 1000]
    with pytest.raises(NetworkError):
        await stage.fetch()
    await stage.server.is_quiet()
    before = stage.server.n_sent
    path = await stage.fetch()
    assert path.read_bytes() == whole
    assert stage.server.n_sent - before == 1 + len(whole) - 600_000


async def test_another_version_is_another_file(stage: Stage, whole: bytes) -> None:
    first = await stage.fetch()
    changed = bytearray(whole)
    changed[-100] ^= 1
    stage.server.files["/m.gguf"] = bytes(changed)
    stage.server.etag = '"two"'
    second = await stage.fetch()
    assert second != first
    assert second.read_bytes() == changed


async def test_a_file_that_changes_meanwhile_is_never_mixed(stage: Stage) -> None:
    told = stage.told

    class Told(list[tuple[int, int]]):
        def append(self, done: tuple[int, int]) -> None:
            told.append(done)
            stage.server.etag = '"two"'

    stage.told = Told()
    with pytest.raises(SourceUnusable, match="has changed"):
        await stage.fetch()
    assert list((stage.folder / "cache" / "models").glob("*/m.gguf")) == []


async def test_failures_that_pass_are_waited_out(stage: Stage, whole: bytes) -> None:
    stage.server.fails = []
    first = await stage.fetch()
    first.unlink()
    stage.server.cuts_after = [1, *random.Random(1).choices(range(1, 150_000), k=6)]
    assert (await stage.fetch()).read_bytes() == whole


async def test_a_server_that_ignores_ranges_is_read_once(stage: Stage, whole: bytes) -> None:
    stage.server.ignores_ranges = True
    path = await stage.fetch()
    assert path.read_bytes() == whole
    assert len(stage.server.asked) == 2


async def test_shards_are_fetched_beside_the_first(stage: Stage, made: Path, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, made, 3)
    stage.server.files = {f"/{path.name}": path.read_bytes() for path in paths}
    first = await stage.fetch(paths[0].name)
    assert sorted(path.name for path in first.parent.glob("*.gguf")) == [path.name for path in paths]


async def test_a_shard_that_changes_alone_is_fetched_anew_and_never_mixed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_file, "PART_BYTES", 50_000)
    monkeypatch.setattr(whole_file, "N_ATTEMPTS", 1)
    monkeypatch.setattr(whole_file, "N_CONNECTIONS", 1)
    monkeypatch.setattr("swarm.sources.web_file.N_RESUMES", 0)
    paths = write_shards(tmp_path, made, 2)
    files = {f"/{path.name}": path.read_bytes() for path in paths}
    last = f"/{paths[1].name}"

    class Server(FileServer):
        etags = dict.fromkeys(files, '"one"')

        async def answer(self, request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
            self.etag = self.etags[request.path]
            return await super().answer(request)

    async with serving(Server(files)) as server, Web() as web:
        stage = Stage(server, web, tmp_path)
        n_first = 1 + -(-len(files[f"/{paths[0].name}"]) // 50_000)
        server.cuts_after = [*[1 << 30] * n_first, 1, 50_000, 50_000, 10]  # in the midst of the second shard
        with pytest.raises(NetworkError):
            await stage.fetch(paths[0].name)
        for version in ("two", "three"):  # the first that comes after a cut, the second after a whole one
            files[last] = bytes(each ^ 1 for each in files[last])
            Server.etags[last] = f'"{version}"'
            first = await stage.fetch(paths[0].name)
            assert first.with_name(paths[1].name).read_bytes() == files[last], version


async def test_without_room_nothing_is_fetched(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "SPARE_DISK_BYTES", 1 << 60)
    with pytest.raises(UserError, match="not enough space"):
        await stage.fetch()
    assert stage.server.n_sent <= 1
