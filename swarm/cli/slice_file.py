"""A slice as a file, for sets of experts that differ from layer to layer: JSON, layer -> experts.

    {"0": "3,17,20-22", "1": "0,5,9-11"}

`swarm bench fanout --save` writes them, `swarm join --slice` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.ids import ExpertSet, format_index_set, parse_index_set

MAX_BYTES = 1 << 20  # guessed: a record of such a slice must fit 16 KB anyway


def write_slice_file(path: Path, experts: ExpertSet) -> None:
    """Write the set."""
    slices = {str(layer): format_index_set(ids) for layer, ids in experts.by_layer.items()}
    write_atomically(path, json.dumps(slices, indent=1).encode() + b"\n")


def read_slice_file(path: Path) -> ExpertSet:
    """Return the set; raises UserError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is too large for a slice file: expected at most {MAX_BYTES} bytes")
        slices = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the slice file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read the slice file {path}: {error}") from error
    if not isinstance(slices, dict) or not slices or not all(isinstance(ids, str) for ids in slices.values()):
        raise UserError(f'cannot read the slice file {path}: expected layers and experts like {{"0": "3,17,20-22"}}')
    by_layer: dict[int, frozenset[int]] = {}
    for text, ids in slices.items():
        layers = parse_index_set(text, "layers")
        if len(layers) != 1 or not layers.isdisjoint(by_layer):
            raise UserError(f"cannot read the slice file {path}: got layer {text!r}, expected one number, each once")
        by_layer[min(layers)] = parse_index_set(ids)
    return ExpertSet(by_layer)
