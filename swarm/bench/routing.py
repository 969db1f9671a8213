"""A random router whose tokens are of kinds, so that some experts are often chosen together. Pure.

Real routers do that: text has topics, and a topic's tokens share experts. Random weights route evenly and show nothing of it.
A token of kind q chooses the K largest of

    preference[q] + popularity + Gumbel noise        preference ~ 2 N(0, 1) for each kind and expert, popularity ~ skew N(0, 1)

which are K draws without replacement from softmax(preference[q] + popularity) (Efraimidis and Spirakis 2006; Vieira 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PREFERENCE = (
    2.0  # standard deviation, natural log; a guess: with it 16 clustered slices save a fifth of the destinations
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRouter:
    """One layer's router.

    Attributes:
        skew: standard deviation of the experts' popularity, natural log; 0.5: nearly even.
        seed: of the router; tokens are drawn with a generator of the caller's.
    """

    n_expert: int
    n_expert_used: int
    n_kinds: int = 20
    skew: float = 0.5
    seed: int = 0

    def draw(self, rng: np.random.Generator, n_tokens: int) -> npt.NDArray[np.int32]:
        """Return the experts that tokens of random kinds choose, int32 [T, K], distinct in each row."""
        router = np.random.default_rng(self.seed)
        scores = PREFERENCE * router.standard_normal((self.n_kinds, self.n_expert))
        scores += self.skew * router.standard_normal(self.n_expert)
        keys = scores[rng.integers(0, self.n_kinds, n_tokens)] + rng.gumbel(size=(n_tokens, self.n_expert))  # [T, E]
        return np.argsort(-keys, axis=1)[:, : self.n_expert_used].astype(np.int32)  # [T, K]


def draw_weights(rng: np.random.Generator, topk_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return weights [T, K] for a choice of experts, none of them small; those of a row add up to one."""
    weights = rng.random(topk_ids.shape, dtype=np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights
