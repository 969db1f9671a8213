"""What is turned off in llama.cpp's graph: all that is computed of stubs, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from swarm.backbone.moe_hook import MoeHook
from swarm.backbone.stub_nodes import GIVEN_FROM_BYTES, StubNodes
from swarm.native.ggml import CpuBackend, HostBuffer, TensorContext, op_code, tensor_name, tensor_op
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


def long_layer(context: TensorContext, backend: CpuBackend) -> tuple[dict[str, int], HostBuffer]:
    """Return a made-up layer whose stub's result takes memory, all ones as other nodes left it; its weights are ones too."""
    up = context.new_tensor(GGML_TYPE_F32, 4, 1, 3)
    down = context.new_tensor(GGML_TYPE_F32, 1, GIVEN_FROM_BYTES // 8, 3)
    for weights, name in ((up, b"blk.0.ffn_up_exps.weight"), (down, b"blk.0.ffn_down_exps.weight")):
        GgmlTensor.from_address(weights).name = name
    x = context.new_tensor(GGML_TYPE_F32, 4, 1, 1)
    ids = context.new_tensor(GGML_TYPE_I32, 2, 1)
    product = context.mul_mat_id(up, x, ids)
    nodes = {"product": product, "live": context.mul(x, x), "result": context.mul_mat_id(down, product, ids)}
    result_bytes = GgmlTensor.from_address(nodes["result"]).nb[3]
    assert result_bytes == GIVEN_FROM_BYTES
    buffer = backend.allocate(4 * GIVEN_FROM_BYTES)
    buffer.data[:] = 1
    buffer.place(nodes["result"], 0)
    buffer.place(down, 2 * GIVEN_FROM_BYTES)
    return nodes, buffer


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no memory is given back")
@pytest.mark.parametrize("has_live", [False, True])
def test_the_memory_of_a_stubs_result_is_given_back_unless_something_lives_before_it(has_live: bool) -> None:
    with CpuBackend() as backend:
        context = TensorContext(16)
        nodes, buffer = long_layer(context, backend)
        result, weights = buffer.data[4096 : GIVEN_FROM_BYTES - 4096], buffer.data[2 * GIVEN_FROM_BYTES :]
        stubs = StubNodes()
        stubs.start(nodes["product"])
        if has_live:
            stubs.follow(nodes["live"])
        stubs.follow(nodes["result"])
        stubs.end(0)
        assert result.all() if has_live else not result.any()
        assert not weights[4096 : GIVEN_FROM_BYTES + GIVEN_FROM_BYTES // 2 - 4096].any(), "a stub's weights"
        assert buffer.data[GIVEN_FROM_BYTES : 2 * GIVEN_FROM_BYTES].all(), "what lies between"
        result[:] = 1
        stubs.end_step(has_run=False)
        assert result.all(), "of a step that was not computed nothing is known"
        stubs.end_step(has_run=True)
        assert result.all(), "and it is forgotten"
        del result, weights
        context.close()
        buffer.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no memory is given back")
def test_at_the_end_of_a_step_it_is_given_back_once_more() -> None:
    with CpuBackend() as backend:
        context = TensorContext(16)
        nodes, buffer = long_layer(context, backend)
        result = buffer.data[4096 : GIVEN_FROM_BYTES - 4096]
        stubs = StubNodes()
        stubs.start(nodes["product"])
        stubs.follow(nodes["result"])
        stubs.end(0)
        result[:] = 1
        stubs.end_step(has_run=True)
        assert not result.any()
        del result
        context.close()
        buffer.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no memory is given back")
def test_weights_that_are_no_stubs_are_never_given_back() -> None:
    with CpuBackend() as backend:
        context = TensorContext(16)
        wide = context.new_tensor(GGML_TYPE_F32, 64, 64, 4)
        GgmlTensor.from_address(wide).name = b"blk.0.ffn_up_exps.weight"
        x = context.new_tensor(GGML_TYPE_F32, 64, 1, 1)
        product = context.mul_mat_id(wide, x, context.new_tensor(GGML_TYPE_I32, 1, 1))
        buffer = backend.allocate(1 << 17)
        buffer.data[:] = 1
        buffer.place(wide, 0)
        StubNodes().start(product)
        assert buffer.data.all()
        context.close()
        buffer.close()
