"""Run in a process of its own, with exact kernels: prints as JSON what must be bit-identical.

Compares with stock llama.cpp on the whole file: inputs, choices and results of its own expert products are read from its
graph by an eval callback, and computed again by slices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import ModelSpec, read_spec
from swarm.native import ggml, library
from swarm.native.llama import LlamaContext, LlamaModel

SLICES = (range(9), range(9, 20), range(20, 32))  # three peers


def load_slices(path: Path, spec: ModelSpec) -> list[ExpertFfn]:
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    slices = []
    for experts in SLICES:
        ffn = ExpertFfn(spec, ExpertSet.of(spec.moe_layers, experts))
        for layer, expert in ffn.experts:
            names = [tensor.name for tensor in spec.expert_tensors(layer)]
            ffn.load(layer, expert, b"".join(tensors[name][expert].tobytes() for name in names))
        slices.append(ffn)
    return slices


def watch(path: Path, tokens: list[int]) -> list[dict[str, Any]]:
    """Return x, ids and the raw rows of every layer of one batch of stock llama.cpp."""
    layers: list[dict[str, Any]] = []

    def callback(tensor: int, ask: bool) -> bool:
        name = ggml.tensor_name(tensor)
        is_wanted = name.startswith(("ffn_moe_up-", "ffn_moe_down-"))
        if not ask and name.startswith("ffn_moe_up-"):
            x, ids = (ggml.read_tensor(ggml.tensor_source(tensor, index) or 0) for index in (1, 2))
            layers.append({"layer": int(name.split("-")[1]), "x": x.reshape(-1, x.shape[-1]), "ids": ids[0, 0]})
        elif not ask and is_wanted:
            y = ggml.read_tensor(tensor)
            layers[-1]["y"] = y.reshape(-1, y.shape[-1])
        return is_wanted

    with (
        LlamaModel(path, exact_kernels=True) as model,
        LlamaContext(model, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, eval_callback=callback) as context,
    ):
        context.decode(tokens, first_position=0, logits="all")
        error = context.take_callback_error()
        if error is not None:
            raise error
    return layers


def compute_in_cuts(
    slices: list[ExpertFfn], layer: int, x: np.ndarray, ids: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    rows, experts = np.repeat(np.arange(len(x)), ids.shape[1]), ids.ravel()
    y = np.empty((len(experts), x.shape[1]), np.float32)
    for ffn in slices:
        left = np.flatnonzero(np.isin(experts, list(ffn.experts.by_layer[layer])))
        while len(left):
            n = int(rng.integers(1, len(left) + 1))
            cut, left = left[:n], left[n:]
            y[cut] = ffn.compute(layer, x, rows[cut], experts[cut])
    return y


def check(path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    with GgufFile(path) as file:
        spec = read_spec(file)
    slices = load_slices(path, spec)
    result: dict[str, Any] = {"layers": 0, "pairs": 0, "as_stock": True, "in_small_graphs": True}
    for n_tokens in (1, 37, 300):
        for seen in watch(path, rng.integers(1, 2048, n_tokens).tolist()):
            layer, x, ids, y = seen["layer"], seen["x"], seen["ids"], seen["y"]
            result["layers"] += 1
            result["pairs"] += len(y)
            result["as_stock"] &= np.array_equal(compute_in_cuts(slices, layer, x, ids, rng), y)
    ffn = slices[0]
    ffn.max_pairs = 7
    own = np.isin(ids.ravel(), list(ffn.experts.by_layer[layer]))
    rows, experts = np.repeat(np.arange(len(x)), ids.shape[1])[own], ids.ravel()[own]
    result["in_small_graphs"] = np.array_equal(ffn.compute(layer, x, rows, experts), y[own])
    many = np.full(300, experts[0])  # far above the tiled kernels' threshold of rows for one expert
    one_graph = slices[0].compute(layer, np.repeat(x[:1], 300, axis=0), np.arange(300), many)
    result["same_rows_same_bits"] = bool((one_graph == one_graph[0]).all())
    ffn.flip_byte(layer, int(experts[0]), 1000)
    result["as_stock_after_a_flipped_byte"] = np.array_equal(ffn.compute(layer, x, rows, experts), y[own])
    return result


if __name__ == "__main__":
    library.use_exact_kernels()
    print(json.dumps({Path(name).name: check(Path(name)) for name in sys.argv[1:]}))
