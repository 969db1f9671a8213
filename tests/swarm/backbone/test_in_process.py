"""Experts in this process behind the hook: stock llama.cpp's own bits, any set of experts, and errors as of any other backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from swarm.backbone.engine import EngineConfig
from swarm.backbone.in_process import InProcessExperts
from swarm.backbone.moe_hook import AtOnceBackend, MoeHook
from swarm.backbone.stock import StockModel
from swarm.errors import EngineError, ExpertUnavailable, UserError
from swarm.ids import ExpertSet
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import SplitModel

PROMPT = np.random.default_rng(4).integers(1, 500, 37).tolist()
CONFIG = EngineConfig(n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1)


@contextlib.contextmanager
def hooked(model: SplitModel, experts: object) -> Iterator[tuple[LlamaContext, MoeHook]]:
    hook = MoeHook(model.spec.moe_layers, experts)  # type: ignore[arg-type]
    with (
        LlamaModel(model.backbone) as llama,
        LlamaContext(llama, n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1, eval_callback=hook) as context,
    ):
        yield context, hook


class Counting:
    """Experts in this process that note how they were asked."""

    def __init__(self, experts: InProcessExperts, *, fails_at: int = -1) -> None:
        self.experts = experts
        self.n_begun = self.n_into = 0
        self.fails_at = fails_at

    def begin(self, *arguments: object) -> object:
        self.n_begun += 1
        return self.experts.begin(*arguments)  # type: ignore[arg-type]

    def compute_into(self, layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
        self.n_into += 1
        if self.n_into == self.fails_at:
            raise ExpertUnavailable(layer, (1,), "gone")
        self.experts.compute_into(layer, x, ids, weights, out)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "qwen2moe", "qwen3moe"])
def test_prefill_and_decode_are_stock_llama_cpps(open_model: Callable[[str], SplitModel], name: str) -> None:
    model = open_model(name)
    with (
        InProcessExperts.open(model.file) as experts,
        hooked(model, experts) as (context, hook),
        StockModel(model.file, CONFIG) as stock,
    ):
        tokens, position = PROMPT, 0
        for _ in range(12):
            context.decode(tokens, first_position=position, logits="all")
            assert hook.take_error() is None
            expected = stock.logits(tokens, position)
            # Where stock has interleaved weights so have we: the same kernels, the same bits.
            np.testing.assert_array_equal(context.all_logits(), expected)
            position += len(tokens)
            tokens = [int(expected[-1].argmax())]
        assert experts.n_layers_computed == 12 * len(model.spec.moe_layers)
        assert experts.compute_s > 0


def test_a_graph_that_is_used_again_is_stopped_once_a_layer(tiny: SplitModel) -> None:
    with InProcessExperts.open(tiny.file) as experts:
        counting = Counting(experts)
        assert isinstance(counting, AtOnceBackend)
        with hooked(tiny, counting) as (context, hook):
            for position in range(8):
                context.decode([position + 1], first_position=position, logits="last")
                assert hook.take_error() is None
            n_layers = len(tiny.spec.moe_layers)
            assert counting.n_begun + counting.n_into == 8 * n_layers
            assert counting.n_into >= 6 * n_layers, "all but the first graphs"


def test_graphs_of_other_shapes_in_between_change_nothing(tiny: SplitModel) -> None:
    batches = [[5], [6], PROMPT[:9], [7], [8], [9], PROMPT[:3], PROMPT[:3], [3]]
    with (
        InProcessExperts.open(tiny.file) as experts,
        hooked(tiny, experts) as (context, hook),
        StockModel(tiny.file, CONFIG) as stock,
    ):
        position = 0
        for batch in batches:
            context.decode(batch, first_position=position, logits="all")
            assert hook.take_error() is None
            np.testing.assert_array_equal(context.all_logits(), stock.logits(batch, position))
            position += len(batch)


def test_a_failure_in_a_graph_that_is_used_again_is_kept_and_the_next_step_is_right(tiny: SplitModel) -> None:
    n_layers = len(tiny.spec.moe_layers)
    with InProcessExperts.open(tiny.file) as experts:
        counting = Counting(experts)
        with hooked(tiny, counting) as (context, hook):
            rows = []
            for _ in range(2):
                context.clear()
                for position in range(6):
                    context.decode([position + 1], first_position=position, logits="last")
                    assert hook.take_error() is None
                rows.append(context.logits(-1))
                counting.fails_at = counting.n_into + 2
                context.decode([9], first_position=6, logits="last")
                assert isinstance(hook.take_error(), ExpertUnavailable)
                assert counting.n_into == counting.fails_at, "nobody is asked after a failure"
                counting.fails_at = -1
            np.testing.assert_array_equal(rows[0], rows[1])
            assert counting.n_into > n_layers


def test_some_experts_answer_for_themselves_and_no_others(tiny: SplitModel) -> None:
    held = ExpertSet({1: frozenset({2, 5, 9}), 4: frozenset({0})})
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, tiny.spec.n_embd)).astype(np.float32)
    weights = rng.random((2, 2)).astype(np.float32)
    ids = np.array([[5, 2], [9, 2]], np.int32)
    with InProcessExperts.open(tiny.file, experts=held) as some, InProcessExperts.open(tiny.file) as every:
        assert some.ffn.loaded == held
        rows = some.begin(1, x, ids, weights).result()
        np.testing.assert_allclose(rows, every.begin(1, x, ids, weights).result(), rtol=1e-5, atol=1e-6)
        with pytest.raises(ExpertUnavailable) as caught:
            some.begin(1, x, np.array([[5, 2], [9, 3]], np.int32), weights)
        assert (caught.value.layer, tuple(caught.value.experts)) == (1, (3,))
        with pytest.raises(ExpertUnavailable):
            some.begin(0, x, ids, weights)


def test_experts_outside_the_model_are_the_users_mistake(tiny: SplitModel) -> None:
    with pytest.raises(UserError):
        InProcessExperts.open(tiny.file, experts=ExpertSet.of([0], [tiny.spec.n_expert]))


def test_closed_experts_raise(tiny: SplitModel) -> None:
    experts = InProcessExperts.open(tiny.file)
    experts.close()
    experts.close()
    with pytest.raises(EngineError, match="closed"):
        experts.begin(
            0, np.zeros((1, tiny.spec.n_embd), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
        )
