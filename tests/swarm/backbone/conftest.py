"""The embedded models and two synthetic ones, each with its backbone, cut once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.swarm.backbone.local_experts import LocalExperts, SplitModel, split
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"


@pytest.fixture(scope="session")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SplitModel]:
    """Return a model by name: `Q8_0`, `Q4_K_M` (embedded), `qwen2moe`, `qwen3moe` (synthetic)."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def find(name: str) -> SplitModel:
        path = EMBEDDED / f"model-{name}.gguf"
        if name.startswith("qwen"):
            path = write_synthetic_moe(folder / f"{name}.gguf", architecture=name, n_layers=3, seed=5)
        return split(path, folder)

    return find


@pytest.fixture(scope="session")
def tiny(open_model: Callable[[str], SplitModel]) -> SplitModel:
    return open_model("Q8_0")


@pytest.fixture(scope="session")
def _tiny_experts(tiny: SplitModel) -> Iterator[LocalExperts]:
    experts = LocalExperts(tiny)
    yield experts
    experts.ffn.close()


@pytest.fixture
def experts(_tiny_experts: LocalExperts) -> LocalExperts:
    """All experts of the embedded Q8_0 model, with a clean record."""
    _tiny_experts.reset()
    return _tiny_experts
