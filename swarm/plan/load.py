"""How unevenly a uniform router loads experts and peers: means and expected maxima.

Each expert's (or peer's) count has an exact binomial or hypergeometric law; the maximum treats the counts as
independent, which they nearly are (their negative correlation makes the true maximum a little smaller). Real routers
are less even than this: the figures are a floor.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from swarm.plan.traffic import touch_probability

N_SIGMAS = 12.0  # counts further from the mean have no weight in float64 (about 1e-30)
N_SPARE = 40  # and some more, since a small mean's tail is Poisson's, not normal's


def active_experts(n_expert: int, n_expert_used: float, n_tokens: int) -> float:
    """Return the expected number of experts that at least one of T tokens picks: E (1 - (1 - K/E)^T)."""
    return n_expert * (1 - (1 - n_expert_used / n_expert) ** n_tokens)


def expected_max_binomial(n_trials: int, probability: float, n_cells: int) -> float:
    """Return the expected maximum of `n_cells` counts, each Binomial(n, p): the sum over m of 1 - F(m)^cells."""
    if n_trials <= 0 or probability <= 0:
        return 0.0
    if probability >= 1:
        return float(n_trials)
    mean = n_trials * probability
    spread = N_SIGMAS * math.sqrt(mean * (1 - probability)) + N_SPARE
    low, high = max(0, math.floor(mean - spread)), min(n_trials, math.ceil(mean + spread))
    log_odds = math.log(probability), math.log1p(-probability)
    counts = range(low, high + 1)
    log_pmf = [
        math.lgamma(n_trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(n_trials - count + 1)
        + count * log_odds[0]
        + (n_trials - count) * log_odds[1]
        for count in counts
    ]
    return low + _expected_max(np.exp(np.asarray(log_pmf)), n_cells)


def rows_imbalance(n_expert: int, n_expert_used: int, n_tokens: int) -> float:
    """Return max over mean of the rows per expert: each expert gets Binomial(T, K/E) of them."""
    largest = expected_max_binomial(n_tokens, n_expert_used / n_expert, n_expert)
    return largest / (n_tokens * n_expert_used / n_expert)


def most_active_experts(n_expert: int, n_expert_used: int, n_tokens: int, n_groups: int, local_share: float) -> float:
    """Return how many experts the busiest of `n_groups` peers must read in one layer."""
    size = math.ceil(n_expert / n_groups)
    if n_groups == 1:
        return active_experts(n_expert, n_expert_used * (1 - local_share), n_tokens)
    if n_tokens == 1 and local_share <= 0:
        total = math.comb(n_expert, n_expert_used)
        pmf = [
            math.comb(size, count) * math.comb(n_expert - size, n_expert_used - count) / total
            for count in range(min(size, n_expert_used) + 1)
        ]
        return _expected_max(np.asarray(pmf), n_groups)
    chance = 1 - (1 - n_expert_used * (1 - local_share) / n_expert) ** n_tokens
    return expected_max_binomial(size, chance, n_groups)


def most_assignments(n_expert: int, n_expert_used: int, n_tokens: int, n_groups: int, local_share: float) -> float:
    """Return how many (token, expert) pairs the busiest of `n_groups` peers gets in one layer."""
    n_remote = n_tokens * n_expert_used * (1 - local_share)
    if n_groups == 1:
        return n_remote
    if n_tokens == 1:
        return most_active_experts(n_expert, n_expert_used, 1, n_groups, local_share)
    return expected_max_binomial(max(1, round(n_remote)), 1 / n_groups, n_groups) if n_remote else 0.0


def peer_imbalance(n_expert: int, n_expert_used: int, n_tokens: int, n_groups: int) -> float:
    """Return max over mean of the rows per peer: each gets Binomial(T, probability that a row needs it)."""
    chance = touch_probability(n_expert, n_expert_used, math.ceil(n_expert / n_groups))
    return expected_max_binomial(n_tokens, chance, n_groups) / (n_tokens * chance)


def _expected_max(pmf: npt.NDArray[np.float64], n_cells: int) -> float:
    """Return the expected maximum of independent counts 0, 1, ... with this law."""
    cdf = np.minimum(np.cumsum(pmf), 1.0)
    return float(np.sum(1 - cdf[:-1] ** n_cells))
