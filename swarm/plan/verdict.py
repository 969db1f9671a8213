"""Two of eight experts: why is it not four times faster? And: should this model run here instead?

First question, of the routed experts of one step, on the same N devices. `dense` computes every expert for every token
and moves nothing; ideally K of E experts' work is left, an E/K-fold gain.

    saved    dense - dense x K/E                          expert work that the router skips
    costs    movement                                     RTT, transfer, software of every layer
             small batches  even share - dense x K/E      few rows per expert: weights are read for little arithmetic
             imbalance      busiest device - even share   everybody waits for it
    skipping pays when saved > the sum of the costs

Second question: the whole step over the swarm against the same sparse model on this machine alone, its weights in
memory or, as far as they do not fit, read from the SSD at every use.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """The first question; seconds of one step, all layers.

    Attributes:
        ideal_speedup: E/K.
        speedup: dense_s over everything that the sparse form takes.
    """

    dense_s: float
    ideal_s: float
    saved_s: float
    movement_s: float
    small_batches_s: float
    imbalance_s: float
    ideal_speedup: float
    speedup: float
    pays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Both questions, and one answer with its reason.

    Attributes:
        here_memory_step_s: this machine alone, with all weights in memory.
        here_paged_step_s: this machine alone, with what does not fit read from the SSD.
        here_step_s: the one of the two that this machine can do.
        answer: `yes` when the swarm's step is the shorter one.
    """

    skipping: Skipping
    swarm_step_s: float
    here_memory_step_s: float
    here_paged_step_s: float
    here_step_s: float
    here_memory_bytes: float
    model_bytes: float
    is_in_memory_here: bool
    beats_memory: bool
    beats_paged: bool
    answer: str
    reason: str


def weigh_skipping(
    *, dense_s: float, expert_share: float, even_s: float, busiest_s: float, movement_s: float
) -> Skipping:
    """Return the terms of the first question; `expert_share` is K/E."""
    ideal_s = dense_s * expert_share
    saved_s = dense_s - ideal_s
    small_batches_s = even_s - ideal_s
    imbalance_s = busiest_s - even_s
    return Skipping(
        dense_s=dense_s,
        ideal_s=ideal_s,
        saved_s=saved_s,
        movement_s=movement_s,
        small_batches_s=small_batches_s,
        imbalance_s=imbalance_s,
        ideal_speedup=1 / expert_share,
        speedup=dense_s / (busiest_s + movement_s),
        pays=saved_s > movement_s + small_batches_s + imbalance_s,
    )


def paged_s(*, read_bytes: float, experts_bytes: float, memory_bytes: float, ssd_bytes_per_s: float) -> float:
    """Return the time to read from the SSD what a step needs of the experts and does not find in memory.

    Any expert is as likely cached as any other: of a uniform router's reads, the share that does not fit misses.
    """
    cached = min(1.0, max(0.0, memory_bytes) / experts_bytes)
    return (1 - cached) * read_bytes / ssd_bytes_per_s


def decide(
    *,
    skipping: Skipping,
    swarm_step_s: float,
    here_memory_step_s: float,
    here_paged_step_s: float,
    here_memory_bytes: float,
    model_bytes: float,
) -> Verdict:
    """Return the verdict."""
    fits = model_bytes <= here_memory_bytes
    here_step_s = here_memory_step_s if fits else here_paged_step_s
    is_faster = swarm_step_s < here_step_s
    way = "in memory" if fits else "paged from SSD, since it does not fit in memory"
    ratio = here_step_s / swarm_step_s if is_faster else swarm_step_s / here_step_s
    reason = (
        f"a step over the swarm takes {_shown(swarm_step_s)}, here ({way}) {_shown(here_step_s)}: "
        f"the swarm is {ratio:.3g}x {'faster' if is_faster else 'slower'}"
    )
    return Verdict(
        skipping=skipping,
        swarm_step_s=swarm_step_s,
        here_memory_step_s=here_memory_step_s,
        here_paged_step_s=here_paged_step_s,
        here_step_s=here_step_s,
        here_memory_bytes=here_memory_bytes,
        model_bytes=model_bytes,
        is_in_memory_here=fits,
        beats_memory=swarm_step_s < here_memory_step_s,
        beats_paged=swarm_step_s < here_paged_step_s,
        answer="yes" if is_faster else "no",
        reason=reason,
    )


def _shown(time_s: float) -> str:
    return f"{time_s:.3g} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"
