"""The terms of both questions add up, and the answer follows from them."""

from __future__ import annotations

import pytest

from swarm.plan.verdict import Skipping, Verdict, decide, paged_s, weigh_skipping


def two_of_eight(movement_s: float = 0.1) -> Skipping:
    return weigh_skipping(dense_s=4.0, expert_share=0.25, even_s=1.5, busiest_s=1.7, movement_s=movement_s)


def test_the_terms_lead_from_all_experts_to_what_it_really_takes() -> None:
    found = two_of_eight()
    assert (found.ideal_speedup, found.ideal_s, found.saved_s) == (4, 1, 3)
    assert found.small_batches_s == pytest.approx(0.5)
    assert found.imbalance_s == pytest.approx(0.2)
    rest = found.dense_s - found.saved_s + found.small_batches_s + found.imbalance_s + found.movement_s
    assert found.speedup == pytest.approx(4 / rest)
    assert found.speedup < found.ideal_speedup


@pytest.mark.parametrize(("movement_s", "pays"), [(0.1, True), (2.29, True), (2.31, False)])
def test_skipping_pays_while_it_saves_more_than_it_costs(movement_s: float, pays: bool) -> None:
    found = two_of_eight(movement_s)
    assert found.pays is pays is (found.speedup > 1)


def verdict(swarm_step_s: float, memory_bytes: float) -> Verdict:
    return decide(
        skipping=two_of_eight(),
        swarm_step_s=swarm_step_s,
        here_memory_step_s=1.0,
        here_paged_step_s=10.0,
        here_memory_bytes=memory_bytes,
        model_bytes=100.0,
    )


@pytest.mark.parametrize(
    ("swarm_step_s", "memory_bytes", "answer"), [(0.5, 100, "yes"), (2, 100, "no"), (2, 99, "yes"), (20, 99, "no")]
)
def test_the_answer_compares_with_what_this_machine_can_do(
    swarm_step_s: float, memory_bytes: float, answer: str
) -> None:
    found = verdict(swarm_step_s, memory_bytes)
    assert found.answer == answer
    assert found.here_step_s == (1.0 if memory_bytes >= 100 else 10.0)
    assert ("faster" if answer == "yes" else "slower") in found.reason
    assert (found.beats_memory, found.beats_paged) == (swarm_step_s < 1, swarm_step_s < 10)


def test_only_what_does_not_fit_is_read_from_the_ssd() -> None:
    def paged(memory_bytes: float) -> float:
        return paged_s(read_bytes=8.0, experts_bytes=100.0, memory_bytes=memory_bytes, ssd_bytes_per_s=2.0)

    assert [paged(size) for size in (-5, 0, 50, 100, 500)] == [4, 4, 2, 0, 0]
