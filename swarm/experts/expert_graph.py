"""The nodes of an expert's feed-forward network, in llama.cpp's order: products, scales, biases, activation, down product.

One function for all architectures: what is computed follows from the tensors a layer has and from its activation. It places no
memory and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.model.expert_kinds import Activation
from swarm.model.spec import ModelSpec
from swarm.native.ggml import TensorContext
from swarm.native.layouts import GGML_TYPE_F32

_N_ACTIVATION_NODES = {"relu_sqr": 2, "silu_clamp": 4, "situ": 9}  # others: 1


@dataclass(slots=True)
class ExpertNodes:
    """The nodes of one graph.

    Attributes:
        output: raw outputs of the pairs, (D, K, N).
        placed: nodes and inputs that need memory, in the order in which they are computed.
        views: nodes that lie in another's memory.
        scales: product -> input (1, K, N) for the experts' numbers.
    """

    output: int
    placed: list[int] = field(default_factory=list)
    views: list[int] = field(default_factory=list)
    scales: dict[str, int] = field(default_factory=dict)

    @property
    def computed(self) -> list[int]:
        """Those that are computed, and not inputs."""
        return [node for node in self.placed if node not in self.scales.values()]


def pair_size_bytes(spec: ModelSpec, layer: int) -> int:
    """Return how much memory `build` needs for each (row, expert) pair, without x and ids."""
    kinds = [tensor.kind for tensor in spec.expert_tensors(layer)]
    n_products = 2 if "gate_up" in kinds else sum(kind in ("gate", "up") for kind in kinds)
    n_more = sum("." in kind and not kind.startswith("down") for kind in kinds) * (2 if "gate_up" in kinds else 1)
    n_wide = n_products + n_more + _N_ACTIVATION_NODES.get(spec.activation(layer).name, 1)
    n_out = 1 + sum(kind.startswith("down.") for kind in kinds)
    return 4 * (n_wide * spec.width(layer) + n_out * spec.n_embd + sum(kind.endswith("scale") for kind in kinds))


def build(
    context: TensorContext, planes: Mapping[str, int], activation: Activation, x: int, ids: int, shape: tuple[int, int]
) -> ExpertNodes:
    """Return the nodes for x and ids of `shape` (K, N).

    Args:
        planes: kind -> tensor, as `SliceMemory.pointers`.
    """
    nodes = ExpertNodes(0)

    def product(name: str, of: int) -> int:
        result = context.mul_mat_id(planes[name], of, ids)
        nodes.placed.append(result)
        if f"{name}.scale" in planes:
            scale = nodes.scales[name] = context.new_tensor(GGML_TYPE_F32, 1, *shape)
            result = context.mul(result, scale)
            nodes.placed += [scale, result]
        if f"{name}.bias" in planes:
            result = context.add_id(result, planes[f"{name}.bias"], ids)
            nodes.placed.append(result)
        return result

    gate: int | None = None
    if "gate_up" in planes:
        gate, up = context.halves(product("gate_up", x))
        nodes.views += [gate, up]
    else:
        up = product("up", x)
        gate = product("gate", x) if "gate" in planes else None
    nodes.output = product("down", _activate(context, activation, gate, up, nodes))
    return nodes


def _activate(context: TensorContext, activation: Activation, gate: int | None, up: int, nodes: ExpertNodes) -> int:
    def keep(node: int) -> int:
        nodes.placed.append(node)
        return node

    name, numbers = activation.name, activation.numbers
    if gate is None:
        if name == "relu_sqr":
            return keep(context.unary("sqr", keep(context.unary("relu", up))))
        return keep(context.unary(name, up))
    if name == "swiglu_oai":
        return keep(context.swiglu_oai(gate, up, *numbers))
    if name == "swiglu_clamp":
        return keep(context.swiglu_clamp(gate, up, *numbers))
    if name == "silu_clamp":
        (limit,) = numbers
        up = keep(context.clamp(up, -limit, limit))
        gate = keep(context.clamp(keep(context.unary("silu", gate)), -math.inf, limit))
        return keep(context.mul(gate, up))
    if name == "situ":
        beta, linear_beta = numbers
        bent = keep(context.scale(keep(context.unary("tanh", keep(context.scale(gate, 1 / beta)))), beta))
        bent = keep(context.mul(bent, keep(context.unary("sigmoid", gate))))
        if linear_beta > 0:
            up = keep(context.scale(keep(context.unary("tanh", keep(context.scale(up, 1 / linear_beta)))), linear_beta))
        return keep(context.mul(bent, up))
    return keep(context.glu(name, gate, up))
