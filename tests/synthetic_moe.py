"""Small random Mixture-of-Experts files for tests: `swarm.bench.synthetic` with a test's defaults."""

from __future__ import annotations

from pathlib import Path

from swarm.bench.synthetic import SyntheticModel, write_synthetic


def write_synthetic_moe(
    path: Path,
    *,
    architecture: str = "qwen2moe",
    n_embd: int = 256,
    n_layers: int = 4,
    n_expert: int = 32,
    n_expert_used: int = 4,
    n_ff_exp: int = 256,
    n_ff_shared: int = 256,
    name: str = "synthetic",
    seed: int = 0,
) -> Path:
    """Write a random model of Q8_0 weights to `path` and return it. qwen2moe has a shared expert, qwen3moe has none."""
    model = SyntheticModel(
        n_embd=n_embd,
        n_layers=n_layers,
        n_head=4,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ff_exp=n_ff_exp,
        n_ff_shared=n_ff_shared if architecture == "qwen2moe" else 0,
        name=name,
        seed=seed,
    )
    assert model.architecture == architecture
    return write_synthetic(path, model)
