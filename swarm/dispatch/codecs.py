"""In which codec a wire form travels for a given layer: one rule for the dispatcher and for the gate. Pure."""

from __future__ import annotations

from swarm.model.spec import ModelSpec
from swarm.wire.rows import RowCodec, Wire, back_codec, out_codec

TAKES_ROWS = ("gate", "up", "gate_up")  # kinds of expert tensors that x meets


def codecs_of(wire: Wire, spec: ModelSpec, layer: int) -> tuple[RowCodec, RowCodec]:
    """Return what a form is written in at this layer, out and back: x meets the gate and up weights, so they decide."""
    x_types = [tensor.ggml_type for tensor in spec.expert_tensors(layer) if tensor.kind in TAKES_ROWS]
    return out_codec(wire.out, spec.n_embd, x_types), back_codec(wire.back)
