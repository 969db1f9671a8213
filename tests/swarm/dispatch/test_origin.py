"""Which row of a dispatch belongs to which sequence and position, judged by a plain model of llama.cpp's graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.dispatch.origin import Origin, OriginPart, StepOrigins, next_sequence
from swarm.errors import LocalProtocolError

MOE_LAYERS = (1, 2, 5)


def rows_of(parts: list[OriginPart]) -> list[tuple[int, int, bool]]:
    """Return (sequence, position, has logits) of each row of a step."""
    rows: list[tuple[int, int, bool]] = []
    for part in parts:
        for n in range(part.n_rows):
            has_logits = part.logits == "all" or (part.logits == "last" and n == part.n_rows - 1)
            rows.append((part.sequence, part.first_position + n, has_logits))
    return rows


parts_of_a_step = st.lists(
    st.builds(
        OriginPart,
        sequence=st.integers(1, 5),
        first_position=st.integers(0, 100),
        n_rows=st.integers(1, 7),
        logits=st.sampled_from(["all", "last", "none"]),
    ),
    min_size=1,
    max_size=4,
)


@given(parts_of_a_step, st.integers(2, 9), st.booleans())
def test_each_dispatch_of_a_step_is_told_its_rows(parts: list[OriginPart], n_ubatch: int, last_shrinks: bool) -> None:
    step = StepOrigins(parts, n_ubatch=n_ubatch)
    rows = rows_of(parts)
    for at in range(0, len(rows), n_ubatch):
        graph = rows[at : at + n_ubatch]
        for layer in MOE_LAYERS:
            seen = [row for row in graph if row[2]] if last_shrinks and layer == MOE_LAYERS[-1] else graph
            if not seen:
                continue  # llama.cpp computes nothing there, and nobody asks
            origin = step.of(layer, len(seen))
            assert origin is not None
            assert origin.sequences.tolist() == [sequence for sequence, _, _ in seen]
            assert origin.positions.tolist() == [position for _, position, _ in seen]


def test_a_model_whose_only_moe_layer_is_its_last_skips_the_graphs_without_logits() -> None:
    step = StepOrigins([OriginPart(sequence=7, first_position=0, n_rows=10, logits="last")], n_ubatch=4)
    origin = step.of(3, 1)
    assert origin is not None
    assert origin.positions.tolist() == [9]


def test_a_number_of_rows_that_no_graph_has_has_no_origin() -> None:
    step = StepOrigins([OriginPart(sequence=7, first_position=0, n_rows=3, logits="last")], n_ubatch=8)
    assert step.of(1, 2) is None


def test_the_first_position_of_each_sequence_and_a_part_of_the_rows() -> None:
    origin = Origin(sequences=np.array([4, 9, 4, 9]), positions=np.array([12, 3, 11, 4]))
    assert origin.firsts() == {4: 11, 9: 3}
    assert origin.of(np.array([0, 3])).firsts() == {4: 12, 9: 4}
    assert len(origin) == 4


def test_shapes_that_do_not_agree_are_our_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="bad origin"):
        Origin(sequences=np.zeros(2, np.int64), positions=np.zeros(3, np.int64))


def test_sequence_ids_are_unique_over_threads() -> None:
    found: list[int] = []

    def take() -> None:
        mine = [next_sequence() for _ in range(1000)]
        found.extend(mine)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 4000
