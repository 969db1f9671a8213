"""Which of several places on the web is asked, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from peer import web_sources as module
from peer.web_sources import (
    MAX_FAILURES,
    MAX_STRIKES,
    SLOW_S,
    SLOWER,
    USUAL_BYTES_S,
    WebSource,
    WebSources,
    web_sources,
)
from swarm.errors import IntegrityError, NetworkError, Overloaded, RemoteProtocolError, SourceUnusable, SwarmError
from swarm.model.block_store import BlockStore
from swarm.model.manifest import Manifest
from swarm.model.ranges import Pair
from swarm.sources.locations import locate
from swarm.sources.web_file import RangesIgnored
from tests.peer.conftest import SmallModel


class FakeModel:
    """A model on the web; raises what it is told, and gives wrong blocks where it is told."""

    def __init__(self, small: SmallModel) -> None:
        self.small = small
        self.has_ranges = True
        self.error: SwarmError | None = None
        self.wrong: set[Pair] = set()
        self.why = ""
        self.asked: list[Pair] = []
        self.n_open = 0

    def is_part_of(self, manifest: Manifest) -> bool:
        return manifest == self.small.manifest

    def why_no_stream(self, _: object) -> str:
        return self.why

    def block(self, pair: Pair) -> bytes:
        self.asked.append(pair)
        data = self.small.source.read_block(*pair)
        return bytes(len(data)) if pair in self.wrong else data

    async def read_blocks(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        if self.error is not None:
            raise self.error
        return ((expert, self.block((layer, expert))) for expert in experts)

    async def stream_blocks(self, pairs: Sequence[Pair]) -> Any:
        self.n_open += 1
        try:
            for pair in pairs:
                yield pair, self.block(pair)
        finally:
            self.n_open -= 1


class Stage:
    def __init__(self, small: SmallModel, folder: Path) -> None:
        self.store = BlockStore(folder, small.manifest)
        self.folder = folder
        self.now = 1000.0
        self.models = [FakeModel(small) for _ in range(3)]
        self.sources = []
        for number, model in enumerate(self.models):
            web: Any = None
            source = WebSource(web, locate(f"https://h{number}.example/m.gguf", is_asked=False), self.store, folder)
            fake: Any = model
            source.use(fake)
            self.sources.append(source)
        self.all = WebSources(self.sources, now=lambda: self.now)
        self.kept: list[Pair] = []

    async def fetch(self, source: WebSource, layer: int = 0, experts: Sequence[int] = (1, 2)) -> None:
        missing = [pair for pair in self.store.manifest.spec.all_experts if not self.store.has(*pair)]
        await self.all.fetch(source, layer, experts, missing, self.kept.append)


@pytest.fixture
def stage(small: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(small, tmp_path)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    return made


async def test_each_is_measured_once_and_then_the_fastest_is_asked(stage: Stage) -> None:
    one, two, three = stage.sources
    one.rate_bytes_s, two.rate_bytes_s = 100.0, 300.0
    assert stage.all.best() is three, "nobody knows how fast it is"
    three.rate_bytes_s = 200.0
    assert stage.all.best() is two
    two.failed(NetworkError("gone"), stage.now)
    assert stage.all.best() is three
    stage.now += 100
    assert stage.all.best() is two


async def test_patience_follows_the_fastest_other_within_reason(stage: Stage) -> None:
    one, two, three = stage.sources
    n_bytes = 16_000_000
    assert stage.all.patience_s(one, n_bytes) == n_bytes / USUAL_BYTES_S
    assert stage.all.patience_s(one, 1) == SLOW_S
    one.rate_bytes_s = 1e9
    assert stage.all.patience_s(one, n_bytes) == n_bytes / USUAL_BYTES_S, "its own past is no excuse, nor a measure"
    two.rate_bytes_s, three.rate_bytes_s = 1e6, 2e6
    assert stage.all.patience_s(one, n_bytes) == SLOWER * 8.0
    three.failed(SourceUnusable("not there"), stage.now)
    assert stage.all.patience_s(one, n_bytes) == SLOWER * 16.0


async def test_who_is_outrun_rests_and_is_slower_than_others_from_then_on(stage: Stage) -> None:
    one, two, three = stage.sources
    one.rate_bytes_s, two.rate_bytes_s, three.rate_bytes_s = 1e6, 5e5, 4e5
    assert stage.all.best() is one
    assert stage.all.best(but=one) is two
    stage.all.outrun(one, 1_000_000, 10.0)
    assert stage.all.best() is two
    stage.now = one.rests_until
    assert stage.all.best() is two, "100 kB/s at most"
    assert "slower" in str(stage.all.error)
    for _ in range(MAX_FAILURES - 1):
        stage.now = one.rests_until
        stage.all.outrun(one, 1_000_000, 10.0)
    assert one.is_dead


async def test_who_gives_no_parts_is_asked_last(stage: Stage) -> None:
    stage.models[0].has_ranges = stage.models[1].has_ranges = False
    stage.sources[2].rate_bytes_s = 1.0
    assert stage.all.best() is stage.sources[2]


async def test_blocks_are_kept_one_by_one_and_the_wrong_ones_are_not(stage: Stage) -> None:
    stage.models[0].wrong = {(0, 1)}
    await stage.fetch(stage.sources[0], 0, (1, 2, 3))
    assert stage.kept == [(0, 2), (0, 3)]
    assert isinstance(stage.all.error, IntegrityError)
    assert stage.all.best() is stage.sources[0], "once may be somebody on the way"
    await stage.fetch(stage.sources[0], 0, (1, 2, 3))
    assert stage.models[0].asked == [(0, 1), (0, 2), (0, 3), (0, 1)], "what is there is not asked for again"
    assert stage.sources[0].is_dead


@pytest.mark.parametrize("error", [IntegrityError("wrong"), RemoteProtocolError("a lie")])
async def test_who_lies_is_soon_asked_no_more(stage: Stage, error: SwarmError) -> None:
    for n in range(MAX_STRIKES):
        assert not stage.sources[0].is_dead
        stage.sources[0].failed(type(error)(f"{error} {n}"), stage.now)
    assert stage.sources[0].is_dead


async def test_a_server_that_begins_to_ignore_ranges_breaks_no_rule(stage: Stage) -> None:
    """All connections find it out at once; what is missing is then read from the beginning on."""
    source = stage.sources[0]
    for n in range(4):
        source.failed(RangesIgnored(f"the whole file {n}"), stage.now)
    assert not source.is_dead
    for n in range(MAX_FAILURES):
        stage.now = source.rests_until
        source.failed(RangesIgnored(f"again {n}"), stage.now)
    assert source.is_dead, "but not for ever"


async def test_of_a_stream_with_a_wrong_block_nothing_stays_open(stage: Stage) -> None:
    stage.models[0].has_ranges = False
    stage.models[0].wrong = {(0, 1)}
    await stage.fetch(stage.sources[0])
    assert isinstance(stage.all.error, IntegrityError)
    assert stage.models[0].n_open == 0


async def test_who_does_not_have_the_file_is_not_asked_again(stage: Stage) -> None:
    stage.models[0].error = SourceUnusable("404")
    await stage.fetch(stage.sources[0])
    assert stage.sources[0].is_dead
    assert stage.all.is_alive
    for source in stage.sources[1:]:
        source.failed(SourceUnusable("404"), stage.now)
    assert not stage.all.is_alive
    assert stage.all.best() is None
    assert str(stage.all.error) == "404"


async def test_a_rest_doubles_and_failures_of_one_outage_count_once(stage: Stage) -> None:
    source, rests = stage.sources[0], []
    for n in range(MAX_FAILURES):
        for connection in range(4):
            source.failed(NetworkError(f"down {n} {connection}"), stage.now)
        rests.append(source.rests_until - stage.now)
        stage.now = source.rests_until
        assert source.is_dead == (n == MAX_FAILURES - 1)
    assert rests[1] > rests[0] * 1.05
    assert rests[3] > rests[1]
    assert max(rests) <= module.MAX_REST_S * 1.3


async def test_a_success_ends_a_row_of_failures(stage: Stage) -> None:
    source = stage.sources[0]
    for n in range(3 * MAX_FAILURES):
        source.failed(NetworkError(f"down {n}"), stage.now)
        stage.now = source.rests_until
        expert = n % 6
        stage.store.remove(0, expert)
        await stage.fetch(source, 0, (expert,))
    assert not source.is_dead


async def test_a_server_says_when_to_come_again(stage: Stage) -> None:
    stage.sources[0].failed(Overloaded("429", retry_after_s=200.0), stage.now)
    assert stage.sources[0].rests_until == stage.now + 200.0
    for source in stage.sources[1:]:
        source.failed(Overloaded("429", retry_after_s=300.0), stage.now)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    assert stage.all.best() is None
    await stage.all.until_rested(sleep)
    assert waits == [200.0]


async def test_without_parts_all_that_is_missing_comes_at_once(stage: Stage) -> None:
    stage.models[0].has_ranges = False
    await stage.fetch(stage.sources[0], 0, (1,))
    assert set(stage.kept) == set(stage.store.manifest.spec.all_experts)
    await stage.fetch(stage.sources[0], 1, (1,))
    assert len(stage.models[0].asked) == len(stage.kept)


async def test_too_much_to_read_for_some_blocks_is_not_read(stage: Stage) -> None:
    stage.models[0].has_ranges, stage.models[0].why = False, "it is too much"
    await stage.fetch(stage.sources[0])
    assert stage.sources[0].is_dead
    assert "it is too much" in str(stage.all.error)
    assert stage.models[0].asked == []


def test_names_that_lead_nowhere_are_left_out(small: SmallModel, tmp_path: Path) -> None:
    store = BlockStore(tmp_path, small.manifest)
    web: Any = None
    names = ["https://h.example/m.gguf", "https://u:p@h.example/m.gguf", "https://h.example/m.gguf", "hf://o/r"]
    found = web_sources(web, names, store, tmp_path)
    assert found is not None
    assert [each.location.name for each in found._sources] == ["https://h.example/m.gguf"]
    assert web_sources(web, ["hf://o/r"], store, tmp_path) is None
