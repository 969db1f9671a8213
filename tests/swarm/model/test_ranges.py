"""Which ranges bring which blocks: everything that is wanted, nothing twice, few requests, little at a time."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from swarm.model.gguf_file import GgufFile
from swarm.model.ranges import Group, Pair, Plane, Span, cut_out, groups_of, most_held, spans_of
from swarm.model.source import GgufSource
from tests.gguf_shards import write_shards
from tests.synthetic_moe import write_synthetic_moe


def test_neighbours_are_one_group_up_to_its_limit() -> None:
    pairs = [(0, 3), (0, 1), (0, 2), (0, 7), (2, 4), (2, 5), (2, 6)]
    assert groups_of(pairs, lambda layer: 10, limit=20) == [
        Group(0, (1, 2)),
        Group(0, (3,)),
        Group(0, (7,)),
        Group(2, (4, 5)),
        Group(2, (6,)),
    ]


def test_layers_are_not_grouped_though_their_experts_follow() -> None:
    assert groups_of([(0, 1), (1, 2)], lambda _: 1) == [Group(0, (1,)), Group(1, (2,))]


def test_one_block_above_the_limit_is_a_group_of_its_own() -> None:
    assert groups_of([(0, 0), (0, 1)], lambda _: 50, limit=20) == [Group(0, (0,)), Group(0, (1,))]
    assert groups_of([], lambda _: 50) == []


def test_every_block_is_in_one_group() -> None:
    rng = random.Random(7)
    pairs = {(rng.randrange(4), rng.randrange(30)) for _ in range(60)}
    groups = groups_of(pairs, lambda layer: 10 + layer, limit=45)
    assert sorted((each.layer, expert) for each in groups for expert in each.experts) == sorted(pairs)
    assert all(len(each.experts) * (10 + each.layer) <= 45 for each in groups)


def test_planes_side_by_side_are_one_span() -> None:
    planes = [Plane("a", 100, 50), Plane("a", 50, 50), Plane("b", 150, 10), Plane("a", 300, 10)]
    assert spans_of(planes, max_gap=0) == [Span("a", 50, 150), Span("a", 300, 310), Span("b", 150, 160)]


def test_a_small_gap_is_read_and_a_large_one_asked_around() -> None:
    planes = [Plane("a", 0, 10), Plane("a", 20, 10), Plane("a", 41, 10)]
    assert spans_of(planes, max_gap=10) == [Span("a", 0, 30), Span("a", 41, 51)]


def test_a_plane_is_cut_out_of_its_span() -> None:
    spans = [Span("a", 10, 20), Span("b", 10, 20)]
    data = [bytes(range(10)), bytes(range(100, 110))]
    assert bytes(cut_out(Plane("b", 12, 3), spans, data)) == bytes([102, 103, 104])
    assert bytes(cut_out(Plane("a", 10, 10), spans, data)) == data[0]


def test_random_planes_come_back_whole_out_of_their_spans() -> None:
    rng = random.Random(3)
    files = {"a": rng.randbytes(5000), "b": rng.randbytes(5000)}
    for _ in range(50):
        planes = [Plane(rng.choice("ab"), rng.randrange(4000), rng.randrange(1, 900)) for _ in range(8)]
        spans = spans_of(planes, max_gap=rng.choice([0, 100]))
        data = [files[span.file][span.start : span.end] for span in spans]
        for plane in planes:
            assert cut_out(plane, spans, data) == files[plane.file][plane.start : plane.end]
        for earlier, later in itertools.pairwise(spans):
            assert earlier.file != later.file or earlier.end < later.start, "no byte is asked for twice"


def test_what_waits_for_the_rest_of_its_block_is_counted() -> None:
    def by_block(layer: int, expert: int) -> list[Plane]:  # each block's planes together
        return [Plane("a", expert * 100 + part * 10, 10) for part in range(3)]

    def by_part(layer: int, expert: int) -> list[Plane]:  # all first planes, then all second ones
        return [Plane("a", part * 100 + expert * 10, 10) for part in range(3)]

    pairs: list[Pair] = [(0, expert) for expert in range(4)]
    assert most_held(pairs, by_block) == 30
    assert most_held(pairs, by_part) == 90, "two planes of each, and the third of the first"
    assert most_held([], by_part) == 0


def test_the_places_of_a_file_are_where_its_blocks_are(tmp_path: Path) -> None:
    whole = write_synthetic_moe(tmp_path / "m.gguf", n_layers=2, n_expert=4, n_expert_used=2, n_embd=64, n_ff_exp=32)
    shards = write_shards(tmp_path, whole, 3)
    for first in (whole, shards[0]):
        data = {path.name: path.read_bytes() for path in (whole, *shards)}
        with GgufFile(first) as file:
            source = GgufSource(file)
            for layer, expert in source.experts:
                planes = source.places(layer, expert)
                found = b"".join(data[plane.file][plane.start : plane.end] for plane in planes)
                assert found == source.read_block(layer, expert)
            assert source.places(0, 4) == source.places(9, 0) == []
