"""What is turned off in llama.cpp's graph: all that is computed of stubs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swarm.backbone.moe_hook import MoeHook
from swarm.backbone.stub_nodes import StubNodes
from swarm.native.ggml import TensorContext, op_code, tensor_name, tensor_op
from swarm.native.layouts import GGML_TYPE_F32, GGML_TYPE_I32, GgmlTensor
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel

TOKENS = np.random.default_rng(3).integers(1, 500, 5).tolist()
PRODUCTS = ("ffn_moe_up-", "ffn_moe_gate-", "ffn_moe_gate_up-", "ffn_moe_down-")


@pytest.mark.parametrize("name", ["Q8_0", "qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("at_once", [False, True])
def test_every_product_of_a_stub_is_off_and_every_other_node_is_on(
    open_model: Callable[[str], SplitModel], name: str, at_once: bool
) -> None:
    model = open_model(name)
    experts = LocalExperts(model)
    if at_once:

        def compute_into(layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
            out[:] = experts.compute(layer, x, ids, weights)

        experts.compute_into = compute_into  # type: ignore[attr-defined]
    hook = MoeHook(model.spec.moe_layers, experts)
    ops: list[dict[str, list[int]]] = []

    def watch(tensor: int, ask: bool) -> bool:
        before = tensor_op(tensor)
        wanted = hook(tensor, ask)
        if ask:
            ops[-1].setdefault(tensor_name(tensor), []).extend([before, tensor_op(tensor)])
        return wanted

    with (
        LlamaModel(model.backbone) as llama,
        LlamaContext(llama, n_ctx=64, n_batch=16, n_ubatch=16, n_threads=1, eval_callback=watch) as context,
    ):
        for position in range(3):
            ops.append({})
            context.decode([position + 1], first_position=position, logits="last")
            assert hook.take_error() is None
    none = op_code("NONE")
    for seen in ops:
        products = [node for node in seen if node.startswith(PRODUCTS) and "(" not in node]
        assert len(products) >= 2 * len(model.spec.moe_layers)
        assert all(seen[node][-1] == none for node in products)
        assert all(seen[f"ffn_moe_out-{layer}"][-1] == none for layer in model.spec.moe_layers)
        alive = [
            node
            for node in seen
            if node.startswith(("ffn_moe_logits", "ffn_moe_weights-", "ffn_norm", "l_out", "Qcur"))
        ]
        assert alive
        assert all(seen[node][::2] == seen[node][1::2] and none not in seen[node] for node in alive)
    last = ops[2]
    assert all(last[node][0] == none for node in last if node.startswith(PRODUCTS) and "(" not in node), "still off"


def graph(context: TensorContext) -> dict[str, int]:
    """Return a made-up layer: product -> sum with something live -> output."""
    w = context.new_tensor(GGML_TYPE_F32, 4, 2, 3)
    GgmlTensor.from_address(w).name = b"blk.0.ffn_up_exps.weight"
    x = context.new_tensor(GGML_TYPE_F32, 4, 1, 1)
    ids = context.new_tensor(GGML_TYPE_I32, 1, 1)
    product = context.mul_mat_id(w, x, ids)
    live = context.mul(x, x)
    view = context.slot(product, 0)
    return {"product": product, "live": live, "view": view, "sum": context.add(view, view)}


def test_what_depends_on_a_product_is_dead_through_views_and_the_rest_lives() -> None:
    context = TensorContext(16, with_graph=True)
    nodes = graph(context)
    stubs = StubNodes()
    assert stubs.is_product(nodes["product"])
    assert not stubs.is_product(nodes["sum"])
    assert not stubs.is_searching
    stubs.start(nodes["product"])
    assert stubs.is_searching
    for name in ("view", "sum"):
        stubs.follow(nodes[name])
        assert stubs.is_off(nodes[name])
        assert not stubs.is_product(nodes[name]), "off, and no product"
    stubs.end(3)
    assert stubs.is_closed(3)
    assert not stubs.is_closed(4)
    assert stubs.is_product(nodes["product"])
    context.close()


def test_a_layer_in_which_something_else_is_computed_is_not_closed() -> None:
    context = TensorContext(16, with_graph=True)
    nodes = graph(context)
    stubs = StubNodes()
    stubs.start(nodes["product"])
    stubs.follow(nodes["live"])
    assert not stubs.is_off(nodes["live"])
    stubs.end(3)
    assert not stubs.is_closed(3)
    context.close()
