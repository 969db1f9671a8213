"""A recurrent memory takes its latest step back and computes on as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.native.llama import LlamaContext, LlamaModel


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LlamaModel]:
    folder = tmp_path_factory.mktemp("recurrent")

    @cache
    def find(name: str) -> LlamaModel:
        path: Path = folder / f"{name}.gguf"
        write_model(path, next(recipe for recipe in RECIPES if recipe.architecture == name), Variant(name="plain"))
        return LlamaModel(path)

    return find


def run(model: LlamaModel, *, fails: bool) -> npt.NDArray[np.float32]:
    """Decode in steps at sequence 1; with `fails`, each but the first only after one that is taken back."""
    with LlamaContext(model, n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1, n_seq_max=2) as context:
        context.decode([9, 8, 7], first_position=0, logits="none", sequence=0)
        position = 0
        for tokens in ([*range(1, 20)], [5], [6, 7]):
            if fails and position:
                context.decode([40, 41, 42], first_position=position, logits="none", sequence=1)
                assert context.remove(1, position)
            context.decode(tokens, first_position=position, logits="last", sequence=1)
            position += len(tokens)
        return context.logits(-1)


@pytest.mark.parametrize("name", ["qwen3next", "jamba", "lfm2moe", "kimi-linear", "qwen3moe"])
def test_a_step_that_was_taken_back_leaves_no_trace(model_of: Callable[[str], LlamaModel], name: str) -> None:
    model = model_of(name)
    assert model.has_recurrent_state == (name != "qwen3moe")
    np.testing.assert_array_equal(run(model, fails=True), run(model, fails=False))


def test_a_recurrent_memory_cannot_go_back_into_a_step_and_says_so(model_of: Callable[[str], LlamaModel]) -> None:
    with LlamaContext(model_of("jamba"), n_ctx=64, n_batch=32, n_ubatch=32, n_threads=1) as context:
        context.decode([1, 2, 3], first_position=0, logits="none")
        context.decode([4, 5, 6], first_position=3, logits="none")
        assert not context.remove(0, 5), "in the middle of the latest step"
        assert context.remove(0, 3), "the latest step as a whole"
        assert not context.remove(0, 2), "the step before it"
        assert context.remove(0, 0)
        context.decode([1, 2, 3], first_position=0, logits="last")
