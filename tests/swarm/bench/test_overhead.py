"""What `swarm bench overhead` measures: which steps, of which sequences."""

from __future__ import annotations

from pathlib import Path

from swarm.bench.overhead import N_CONTEXT, OverheadOptions, make_steps
from swarm.wire.rows import parse_wire


def options(n_streams: tuple[int, ...], n_rows: tuple[int, ...]) -> OverheadOptions:
    return OverheadOptions(models=(Path("m.gguf"),), wire=parse_wire("f32"), n_streams=n_streams, n_rows=n_rows)


def test_rows_that_do_not_divide_among_the_sequences_are_left_out() -> None:
    assert options((1, 4), (1, 4, 6, 512)).points() == [(1, 1), (1, 4), (1, 6), (1, 512), (4, 4), (4, 512)]


def test_sequences_share_the_rows_of_a_step_and_go_on_where_they_were() -> None:
    tokens = [list(range(100 * s, 100 * s + N_CONTEXT)) for s in range(4)]
    steps = make_steps(tokens[:2], 3, 2)
    assert [[(p.sequence, p.first_position, list(p.tokens)) for p in parts] for parts in steps] == [
        [(0, 0, [0, 1, 2]), (1, 0, [100, 101, 102])],
        [(0, 3, [3, 4, 5]), (1, 3, [103, 104, 105])],
    ]
    assert {part.logits for parts in steps for part in parts} == {"all"}, "else the last layer has fewer rows"


def test_a_turn_fits_the_context() -> None:
    steps = make_steps([list(range(N_CONTEXT))], 512, N_CONTEXT // 512)
    assert max(part.first_position + len(part.tokens) for parts in steps for part in parts) <= N_CONTEXT
