"""The embedded models' experts, read with the gguf package: independent of swarm's own reader."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec, read_spec

FOLDER = Path(__file__).parents[3] / "examples" / "tiny_moe"


class ReferenceModel:
    """One file: its spec, its blocks as bytes, and its experts in plain numpy."""

    def __init__(self, path: Path) -> None:
        with GgufFile(path) as file:
            self.spec: ModelSpec = read_spec(file)
        self._tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self._weights = cache(self._dequantised)

    def block(self, layer: int, expert: int) -> bytes:
        names = sorted(name for name in self._tensors if name.startswith(f"blk.{layer}.") and "_exps." in name)
        return b"".join(self._tensors[name].data[expert].tobytes() for name in names)

    def _dequantised(self, layer: int, kind: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[f"blk.{layer}.ffn_{kind}_exps.weight"]
        weights: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return weights

    def expert(self, layer: int, expert: int, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        gate, up = (self._weights(layer, kind)[expert] @ x for kind in ("gate", "up"))
        y: npt.NDArray[np.float32] = self._weights(layer, "down")[expert] @ (gate / (1 + np.exp(-gate)) * up)
        return y

    def ffn(self, experts: ExpertSet) -> ExpertFfn:
        ffn = ExpertFfn(self.spec, experts)
        for layer, expert in experts:
            ffn.load(layer, expert, self.block(layer, expert))
        return ffn


@pytest.fixture(scope="session", params=["Q8_0", "Q4_K_M"])
def reference(request: pytest.FixtureRequest) -> ReferenceModel:
    return ReferenceModel(FOLDER / f"model-{request.param}.gguf")


@pytest.fixture(scope="session")
def open_reference() -> Callable[[str], ReferenceModel]:
    return cache(lambda name: ReferenceModel(FOLDER / f"model-{name}.gguf"))
