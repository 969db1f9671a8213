"""Dimensions on the command line and specs of files become the same sizes; mistakes are the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.plan.shape import parse_shape, shape_of_model
from tests.synthetic_moe import write_synthetic_moe


def test_dimensions_give_the_sizes_that_follow_from_them() -> None:
    shape = parse_shape("d=4096,E=8,k=2,ff=14336,b=2,bw=0.5,layers=32,shared=512,vocab=1000")
    assert (shape.n_embd, shape.n_expert, shape.n_expert_used, shape.n_ff_exp, shape.n_layers) == (
        4096,
        8,
        2,
        14336,
        32,
    )
    assert (shape.bytes_per_value, shape.bytes_per_weight) == (2, 0.5)
    assert shape.expert_bytes == 3 * 4096 * 14336 * 0.5
    assert shape.experts_bytes == 32 * 8 * shape.expert_bytes
    assert shape.backbone_bytes == 0.5 * (32 * (4 * 4096**2 + 3 * 4096 * 512) + 1000 * 4096)
    assert shape.flops_per_assignment == 6 * 4096 * 14336


def test_absent_dimensions_have_their_defaults() -> None:
    shape = parse_shape("d=64, E=4, K=2")
    assert (shape.n_ff_exp, shape.n_layers, shape.bytes_per_value, shape.bytes_per_weight) == (256, 1, 2, 2)


@pytest.mark.parametrize(
    "text",
    ["", "d", "d=4096", "d=x,E=8,k=2", "d=0,E=8,k=2", "d=8,E=2,k=3", "d=8,E=2,k=0", "d=8,E=2,k=1,b=0", "d=8,E=2,k=1,b=nan",
     "d=8,E=2,k=1,b=99", "d=8,E=2,k=1,z=1", "d=8,d=9,E=2,k=1", "d=-8,E=2,k=1", "d=8,E=99999,k=1", "d=1.5,E=2,k=1"],
)  # fmt: skip
def test_impossible_dimensions_are_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_shape(text)


def test_a_file_gives_its_own_sizes(tmp_path: Path) -> None:
    path = write_synthetic_moe(tmp_path / "m.gguf", n_embd=64, n_layers=3, n_expert=8, n_expert_used=2, n_ff_exp=32)
    with GgufFile(path) as file:
        shape = shape_of_model(read_spec(file), name="m", backbone_bytes=1000)
    assert (shape.n_embd, shape.n_expert, shape.n_expert_used, shape.n_ff_exp, shape.n_layers) == (64, 8, 2, 32, 3)
    assert shape.bytes_per_weight == 34 / 32  # Q8_0
    assert shape.expert_bytes == 3 * 64 * 32 * 34 / 32
    assert shape.ggml_types == (8,)
