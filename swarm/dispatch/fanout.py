"""Which experts live together, so that a token meets few peers. Pure.

A token that uses K experts of a layer sends its row to every peer that holds one of them: distinct destinations are bytes, and
the layer waits for the slowest of them. Slices may be any set of experts, and another one in each layer, so experts that are
often chosen together can live together.

*Objective.* The distinct peers of a token are its K choices less those that share a peer with another; to second order that is
K less the number of co-located pairs. So a layer's slices are chosen to hold as many co-activated pairs as they can. Packing the
popular experts together would do that too, and overload their peer: a pair therefore counts by how much oftener it is chosen
than two experts so popular would be by chance (Newman's modularity),

    value(i, j) = co[i, j] - BALANCE * d[i] * d[j] / sum(d)      d[i]: pairs that expert i is in

which is the same as adding the square of every peer's load as a cost. Sizes are fixed, so the search is by swaps: all E x E of
them are judged at once, the best is made, until none helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm.ids import ExpertSet
from swarm.plan.traffic import touch_probability

# Weight of even load against co-activation; 0 is none. Measured (docs/fanout.md): on the embedded model, whose experts are
# almost evenly used, 0 to 1.5 make no difference; on a skewed random router (E = 128, K = 8, 16 peers) the busiest peer has 4.1
# times the mean with 0, 2.7 with 1, 1.8 with 1.5: no more than with contiguous slices.
BALANCE = 1.5
# Random beginnings of the search besides the greedy and the contiguous one; the best end wins. More gain less than 0.01 peers
# a token.
N_RANDOM_STARTS = 2
SEARCH_SEED = 0  # any: the same counts give the same slices everywhere


def co_activation(topk_ids: npt.NDArray[np.integer], n_expert: int) -> npt.NDArray[np.int64]:
    """Return how many tokens chose both experts, [E, E]; its diagonal is how many chose each. `topk_ids` is [T, K]."""
    chosen = np.zeros((len(topk_ids), n_expert), np.float32)
    np.put_along_axis(chosen, topk_ids.astype(np.int64), 1.0, axis=1)
    return np.rint(chosen.T.astype(np.float64) @ chosen).astype(np.int64)


def destinations_per_token(topk_ids: npt.NDArray[np.integer], owner_of: npt.NDArray[np.integer]) -> float:
    """Return the mean number of distinct owners that a token of `topk_ids` [T, K] meets; `owner_of` is [E]."""
    if len(topk_ids) == 0:
        return 0.0
    owners = np.sort(owner_of[topk_ids], axis=1)  # [T, K]
    return float((1 + (np.diff(owners, axis=1) != 0).sum(axis=1)).mean())


def uniform_destinations(n_expert: int, n_expert_used: int, n_peers: int) -> float:
    """Return what a router without preferences gives, whatever the slices: the sum of the peers' chances to be met."""
    sizes = np.diff(_cuts(n_expert, n_peers)).tolist()
    return sum(touch_probability(n_expert, n_expert_used, size) for size in sizes)


def load_imbalance(topk_ids: npt.NDArray[np.integer], owner_of: npt.NDArray[np.integer], n_peers: int) -> float:
    """Return max over mean of the peers' (token, expert) pairs in one layer."""
    loads = np.bincount(owner_of[topk_ids].ravel(), minlength=n_peers)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def owners_of(shares: Sequence[ExpertSet], layer: int, n_expert: int) -> npt.NDArray[np.int64]:
    """Return which share holds each expert of a layer, [E]; -1 for none."""
    owner_of = np.full(n_expert, -1, np.int64)
    for index, share in enumerate(shares):
        owner_of[sorted(share.by_layer.get(layer, ()))] = index
    return owner_of


def contiguous_shares(n_expert: int, n_peers: int, layers: Sequence[int]) -> list[ExpertSet]:
    """Return equal ranges of experts, the same in each layer: what peers hold who do not know the routing."""
    cuts = _cuts(n_expert, n_peers)
    return [ExpertSet.of(layers, range(low, high)) for low, high in itertools.pairwise(cuts.tolist())]


def clustered_shares(
    co_counts: npt.NDArray[np.integer], n_peers: int, layers: Sequence[int] | None = None
) -> list[ExpertSet]:
    """Return `n_peers` shares that cover every expert of every layer once, those that are chosen together held together.

    In each layer, and over all of them, the shares' sizes differ by at most one expert. Which cluster of a layer goes to which
    peer does not change fan-out, so it evens out the peers' loads over all layers.

    Args:
        co_counts: [L, E, E], of each layer what `co_activation` returns. A few seconds for 48 x 128 x 128 and 16 peers.
        layers: the N of `blk.N` of each; None: 0 to L-1.
    """
    if co_counts.ndim != 3 or co_counts.shape[1] != co_counts.shape[2]:
        raise ValueError(f"co-activation counts have a wrong shape: got {co_counts.shape}, expected [L, E, E]")
    sizes, loads = np.zeros(n_peers), np.zeros(n_peers)  # of the peers, over the layers so far
    by_peer: list[dict[int, frozenset[int]]] = [{} for _ in range(n_peers)]
    for layer, counts in zip(range(len(co_counts)) if layers is None else layers, co_counts, strict=True):
        cluster_of = _clusters(counts.astype(np.float64), n_peers)  # [E]
        cluster_sizes = np.bincount(cluster_of, minlength=n_peers)
        cluster_loads = np.bincount(cluster_of, np.diagonal(counts), minlength=n_peers)
        clusters = np.lexsort((-cluster_loads, -cluster_sizes))  # the larger first, of equal ones the busier
        peers = np.lexsort((loads, sizes))  # the emptier first, of equal ones the idler
        n_larger = counts.shape[0] % n_peers
        for part in (peers[:n_larger], peers[n_larger:]):
            part[:] = part[np.argsort(loads[part], kind="stable")]
        for peer, cluster in zip(peers.tolist(), clusters.tolist(), strict=True):
            by_peer[peer][layer] = frozenset(np.flatnonzero(cluster_of == cluster).tolist())
            sizes[peer] += cluster_sizes[cluster]
            loads[peer] += cluster_loads[cluster]
    return [ExpertSet(by_layer) for by_layer in by_peer]


def _cuts(n_expert: int, n_peers: int) -> npt.NDArray[np.int64]:
    """Return where equal ranges begin and end, [n_peers + 1]."""
    if not 1 <= n_peers <= n_expert:
        raise ValueError(f"number of peers out of range: got {n_peers}, expected 1 to {n_expert}")
    return np.arange(n_peers + 1) * n_expert // n_peers


def _clusters(co: npt.NDArray[np.float64], n_peers: int) -> npt.NDArray[np.int64]:
    """Return the best cluster found for each expert of one layer, [E], from its counts [E, E]."""
    sizes = np.diff(_cuts(len(co), n_peers))
    pairs = co - np.diag(np.diagonal(co))
    degrees = pairs.sum(axis=1)  # [E]
    if degrees.any():
        value = pairs - BALANCE * np.outer(degrees, degrees) / degrees.sum()
    else:  # one expert a token: nothing to cluster, but loads to even out
        value = -np.outer(np.diagonal(co), np.diagonal(co))
    np.fill_diagonal(value, 0.0)
    contiguous = np.repeat(np.arange(n_peers), sizes)
    rng = np.random.default_rng(SEARCH_SEED)
    starts = [contiguous, _grown(value, np.diagonal(co), sizes)]
    starts += [rng.permutation(contiguous) for _ in range(N_RANDOM_STARTS)]
    ends = [_swapped(value, start, n_peers) for start in starts]
    return max(ends, key=lambda cluster_of: float(value[cluster_of[:, np.newaxis] == cluster_of].sum()))


def _grown(
    value: npt.NDArray[np.float64], popularity: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return clusters [E] grown one after the other, each from the most popular expert left."""
    cluster_of = np.full(len(value), -1, np.int64)
    for cluster, size in enumerate(sizes.tolist()):
        gain = popularity.astype(np.float64)
        for _ in range(size):
            expert = int(np.argmax(np.where(cluster_of < 0, gain, -math.inf)))
            cluster_of[expert] = cluster
            gain = value[:, cluster_of == cluster].sum(axis=1)
    return cluster_of


def _swapped(value: npt.NDArray[np.float64], cluster_of: npt.NDArray[np.int64], n_peers: int) -> npt.NDArray[np.int64]:
    """Return clusters [E] that no swap of two experts improves; the total value only rises."""
    cluster_of = cluster_of.copy()
    experts = np.arange(len(value))
    # A swap that gains less is rounding, and might be undone for ever.
    least = 1e-9 * (1.0 + float(np.abs(value).max()))
    affinity = value @ (cluster_of[:, np.newaxis] == np.arange(n_peers))  # [E, P], of an expert to a cluster
    while True:
        leaves = affinity[experts, cluster_of]  # [E]
        enters = affinity[:, cluster_of]  # [E, E], of i to the cluster of j
        gain = enters + enters.T - leaves[:, np.newaxis] - leaves - 2 * value
        gain[cluster_of[:, np.newaxis] == cluster_of] = 0.0  # a swap within a cluster is none
        i, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[i, j] <= least:
            return cluster_of
        from_i, from_j = cluster_of[i], cluster_of[j]
        change = value[:, j] - value[:, i]  # [E]: j comes to i's cluster, i leaves it
        affinity[:, from_i] += change
        affinity[:, from_j] -= change
        cluster_of[i], cluster_of[j] = from_j, from_i
