"""The embedded models for the gate, each with its backbone, cut once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from swarm.gate.form_table import GateModel
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from tests.swarm.backbone.local_experts import split
from tests.synthetic_moe import write_synthetic_moe


@pytest.fixture(scope="session")
def gate_model(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> Iterator[Callable[[str], GateModel]]:
    """Return a model by name: `Q8_0`, `Q4_K_M` (embedded), `synthetic` (random weights, 3 layers)."""
    folder = tmp_path_factory.mktemp("gate")
    with ExitStack() as stack:

        @cache
        def find(name: str) -> GateModel:
            if name == "synthetic":
                path = write_synthetic_moe(folder / "synthetic.gguf", n_layers=3, seed=7)
            else:
                path = tiny_moe / f"model-{name}.gguf"
            model = split(path, folder)
            source = GgufSource(stack.enter_context(GgufFile(path)))
            return GateModel(path=path, backbone_path=model.backbone, spec=model.spec, source=source)

        yield find


@pytest.fixture(scope="session")
def heldout(tiny_moe: Path) -> str:
    """The embedded model's held-out text."""
    return (tiny_moe / "heldout.txt").read_text(encoding="utf-8")
