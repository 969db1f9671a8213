"""The hook in a real llama.cpp graph, with experts in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES
from swarm.backbone.moe_hook import MoeHook
from swarm.errors import EngineError, ExpertUnavailable
from swarm.native.ggml import read_tensor, tensor_name
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import LocalExperts, SplitModel, split

TOKENS = np.random.default_rng(3).integers(1, 500, 37).tolist()
Callback = Callable[[int, bool], bool]
Rows = npt.NDArray[np.float32]


class Hooked:
    """A hooked context over a backbone file."""

    def __init__(self, context: LlamaContext, hook: MoeHook, experts: LocalExperts) -> None:
        self.context = context
        self.hook = hook
        self.experts = experts

    def decode(self, tokens: list[int], position: int = 0) -> npt.NDArray[np.float32]:
        self.context.decode(tokens, first_position=position, logits="all")
        return self.context.all_logits()


@contextlib.contextmanager
def hooked(
    model: SplitModel,
    experts: LocalExperts,
    *,
    moe_layers: tuple[int, ...] | None = None,
    n_ubatch: int = 64,
    wrap: Callable[[Callback], Callback] = lambda hook: hook,
) -> Iterator[Hooked]:
    hook = MoeHook(moe_layers or model.spec.moe_layers, experts)
    with (
        LlamaModel(model.backbone) as llama,
        LlamaContext(llama, n_ctx=128, n_batch=64, n_ubatch=n_ubatch, n_threads=1, eval_callback=wrap(hook)) as context,
    ):
        yield Hooked(context, hook, experts)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "qwen2moe", "qwen3moe"])
def test_the_choice_is_the_routers_by_plain_numpy(open_model: Callable[[str], SplitModel], name: str) -> None:
    model = open_model(name)
    experts = LocalExperts(model)
    with hooked(model, experts) as run:
        run.decode(TOKENS)
        assert run.hook.take_error() is None
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model.file).tensors}
    assert [call.layer for call in experts.calls] == list(model.spec.moe_layers)
    n_clear = 0
    for call in experts.calls:
        assert call.x.shape == (37, model.spec.n_embd)
        assert call.ids.shape == call.weights.shape == (37, model.spec.n_expert_used)
        router = tensors[f"blk.{call.layer}.ffn_gate_inp.weight"].data  # [E, D], float32
        logits = call.x.astype(np.float64) @ router.astype(np.float64).T  # [T, E]
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        order = np.argsort(-probs, axis=1)[:, : model.spec.n_expert_used + 1]  # [T, K+1]
        gaps = -np.diff(np.take_along_axis(logits, order, axis=1), axis=1)  # [T, K], of neighbours in rank
        clear = (gaps > 1e-4).all(axis=1)  # float32 may order nearer ones otherwise
        n_clear += int(clear.sum())
        np.testing.assert_array_equal(call.ids[clear], order[clear, :-1])
        weights = np.take_along_axis(probs, call.ids.astype(np.int64), axis=1)
        if model.spec.architecture == "qwen3moe":  # its weights are made to add up to one
            weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(call.weights, weights, rtol=1e-4)
    assert n_clear > 0.95 * 37 * len(experts.calls)


def test_only_the_rows_whose_logits_are_wanted_reach_the_last_layer(tiny: SplitModel, experts: LocalExperts) -> None:
    with hooked(tiny, experts) as run:
        run.context.decode(TOKENS, first_position=0, logits="last")
        assert run.hook.take_error() is None
    assert [len(call.x) for call in experts.calls] == [37] * 5 + [1]


@pytest.mark.parametrize("logits", ["last", "none"])
def test_a_graph_whose_last_layer_has_no_rows_dispatches_nothing_there(
    tiny: SplitModel, experts: LocalExperts, logits: str
) -> None:
    with hooked(tiny, experts, n_ubatch=16) as run:
        run.context.decode(TOKENS, first_position=0, logits=logits)  # type: ignore[arg-type]
        assert run.hook.take_error() is None
    seen = [(call.layer, len(call.x)) for call in experts.calls]
    expected = [(layer, n) for n in (16, 16, 5) for layer in range(5)]
    assert seen == expected + ([(5, 1)] if logits == "last" else [])


def test_a_batch_above_n_ubatch_is_computed_as_several_graphs(tiny: SplitModel, experts: LocalExperts) -> None:
    with hooked(tiny, experts, n_ubatch=16) as run:
        cut = run.decode(TOKENS)
        assert run.hook.take_error() is None
        seen = [(call.layer, len(call.x)) for call in experts.calls]
        assert seen == [(layer, n) for n in (16, 16, 5) for layer in range(6)]
    with hooked(tiny, experts) as run:
        whole = run.decode(TOKENS)
    np.testing.assert_allclose(cut, whole, rtol=0, atol=0.2)  # other batch sizes take other kernels
    assert (cut.argmax(axis=1) == whole.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("where", ["at_begin", "at_result"])
@pytest.mark.parametrize(
    "error",
    [
        ExpertUnavailable(3, (4, 5), "no live peer holds them"),
        KeyError("layer"),
        concurrent.futures.CancelledError(),
    ],
    ids=["unavailable", "wrong type", "cancelled"],
)
def test_the_first_failure_is_kept_and_nobody_is_asked_any_more(
    tiny: SplitModel, experts: LocalExperts, where: str, error: Exception
) -> None:
    def fail(number: int) -> None:
        if number >= 3:
            raise error

    with hooked(tiny, experts) as run:
        expected = run.decode(TOKENS)
        run.context.clear()
        experts.reset()
        setattr(experts, where, fail)
        run.context.decode(TOKENS, first_position=0, logits="all")
        assert [call.layer for call in experts.calls] == [0, 1, 2, 3]
        assert run.hook.take_error() is error
        assert run.hook.take_error() is None
        assert run.context.take_callback_error() is None
        # The next step starts clean, and gives the bits it would have given.
        run.context.clear()
        experts.reset()
        np.testing.assert_array_equal(run.decode(TOKENS).view(np.uint32), expected.view(np.uint32))
        assert run.hook.take_error() is None


def test_a_failure_lasts_through_the_other_graphs_of_the_batch(tiny: SplitModel, experts: LocalExperts) -> None:
    error = ExpertUnavailable(0, (1,), "gone")

    def fail(_number: int) -> None:
        raise error

    experts.at_result = fail
    with hooked(tiny, experts, n_ubatch=16) as run:
        run.context.decode(TOKENS, first_position=0, logits="all")
        assert len(experts.calls) == 1
        assert run.hook.take_error() is error


def test_an_interrupt_in_a_wait_does_not_reach_llama_cpp(tiny: SplitModel, experts: LocalExperts) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    experts.at_result = fail
    with hooked(tiny, experts) as run:
        run.context.decode(TOKENS, first_position=0, logits="last")
        assert isinstance(run.hook.take_error(), KeyboardInterrupt)
        assert run.context.take_callback_error() is None


def test_an_answer_of_a_wrong_size_is_an_error_of_that_step(tiny: SplitModel, experts: LocalExperts) -> None:
    compute = experts.compute
    experts.compute = lambda layer, *rest: compute(layer, *rest)[:-1]  # type: ignore[method-assign]
    try:
        with hooked(tiny, experts) as run:
            run.context.decode(TOKENS, first_position=0, logits="all")
            with pytest.raises(EngineError, match="ffn_moe_out-0"):
                raise run.hook.take_error() or AssertionError
            assert run.context.take_callback_error() is None
    finally:
        del experts.compute


def test_a_layer_that_the_spec_does_not_have_is_an_error(tiny: SplitModel, experts: LocalExperts) -> None:
    with hooked(tiny, experts, moe_layers=(0, 1, 2)) as run:
        run.context.decode(TOKENS, first_position=0, logits="all")
        assert [call.layer for call in experts.calls] == [0, 1, 2]
        with pytest.raises(EngineError, match="layer 3 is not as the model's spec says"):
            raise run.hook.take_error() or AssertionError


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("ffn_moe_out", r"no node to wait at for layers \[0, 1, 2, 3, 4, 5\]"),
        ("ffn_moe_up", "nothing was dispatched for layer 0"),
        ("ffn_moe_weights", "layer 0 is not as the model's spec says"),
    ],
)
def test_a_graph_without_a_node_the_hook_needs_is_an_error(
    tiny: SplitModel, experts: LocalExperts, missing: str, message: str
) -> None:
    def without(hook: Callback) -> Callback:
        return lambda tensor, ask: not ask if tensor_name(tensor).startswith(missing) else hook(tensor, ask)

    with hooked(tiny, experts, wrap=without) as run:
        run.context.decode(TOKENS, first_position=0, logits="all")
        with pytest.raises(EngineError, match=message):
            raise run.hook.take_error() or AssertionError
        assert run.hook.take_error() is None


def test_a_step_whose_layers_were_never_seen_is_an_error_and_not_a_stubs_answer(
    tiny: SplitModel, experts: LocalExperts
) -> None:
    def blind(hook: Callback) -> Callback:
        return lambda tensor, ask: not ask if tensor_name(tensor).startswith("ffn_moe") else hook(tensor, ask)

    with hooked(tiny, experts, wrap=blind) as run:
        run.context.decode(TOKENS, first_position=0, logits="all")
        with pytest.raises(EngineError, match=r"the graph of layers \[0, 1, 2, 3, 4, 5\] is not known: ffn_moe_out"):
            raise run.hook.take_error(has_run=True) or AssertionError
    with hooked(tiny, experts) as run:
        for position in range(2):
            run.decode(TOKENS[position : position + 1], position)
            assert run.hook.take_error(has_run=True) is None


def test_rows_that_carry_their_weights_are_asked_for_one_by_one_and_summed_in_order(tmp_path: Path) -> None:
    """llama4: each choice has a row of its own, already multiplied; nothing may be multiplied again."""
    path = tmp_path / "llama4.gguf"
    write_model(path, next(r for r in RECIPES if r.architecture == "llama4"), Variant(name="two experts of a row"))
    model = split(path, tmp_path)
    asked: list[tuple[int, Rows, npt.NDArray[np.int32], Rows]] = []
    answers = np.random.default_rng(4)

    class Ready:
        def __init__(self, rows: Rows) -> None:
            self._rows = rows

        def result(self) -> Rows:
            return self._rows

    class Noting:
        def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Ready:
            given = answers.standard_normal(x.shape).astype(np.float32)
            asked.append((layer, x, topk_ids, given))
            assert (topk_weights == 1).all()
            return Ready(given)

    written: list[Rows] = []
    hook = MoeHook(model.spec.moe_layers, Noting())

    def watch(tensor: int, ask: bool) -> bool:
        wanted = hook(tensor, ask)
        if not ask and tensor_name(tensor) == "ffn_moe_out-1":
            written.append(read_tensor(tensor)[0, 0])
        return wanted

    with (
        LlamaModel(model.backbone) as llama,
        LlamaContext(llama, n_ctx=64, n_batch=16, n_ubatch=16, n_threads=1, eval_callback=watch) as context,
    ):
        context.decode([5, 6, 7], first_position=0, logits="all")
        assert hook.take_error(has_run=True) is None
    assert [each[0] for each in asked] == [1, 3]
    _, x, ids, given = asked[0]
    assert x.shape == (6, model.spec.n_embd)
    assert ids.shape == (6, 1)
    ratio = x[0::2] / x[1::2]  # a token's two rows differ by their weights alone
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-4)
    np.testing.assert_array_equal(written[0], given[0::2] + given[1::2])


class WaitingExperts:
    """Experts whose answers note when they are waited for, among the nodes that were computed."""

    def __init__(self, experts: LocalExperts, log: list[str]) -> None:
        self._experts = experts
        self._log = log

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> WaitingAnswer:
        rows = self._experts.compute(layer, x, topk_ids, topk_weights)
        return WaitingAnswer(layer, rows, self._log)


class WaitingAnswer:
    def __init__(self, layer: int, rows: Rows, log: list[str]) -> None:
        self._layer, self._rows, self._log = layer, rows, log
        self.done_at = time.perf_counter() + 1e9  # as if it were on its way for ever

    def result(self) -> Rows:
        self._log.append(f"wait-{self._layer}")
        return self._rows


def noting(log: list[str]) -> Callable[[Callback], Callback]:
    """Return what wraps a hook so that the nodes' names are noted as they are asked about."""

    def wrap(hook: Callback) -> Callback:
        def note(tensor: int, ask: bool) -> bool:
            if ask:
                log.append(tensor_name(tensor))
            return hook(tensor, ask)

        return note

    return wrap


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("Q8_0", "ffn_shexp_out", "ffn_out"),  # the gated shared expert is the last before the sum
        ("qwen2moe", "ffn_shexp_out", "ffn_out"),
        ("qwen3moe", "ffn_moe_out", "l_out"),  # no shared expert: nothing to wait behind
    ],
)
def test_the_shared_expert_is_computed_while_the_answer_is_on_its_way(
    open_model: Callable[[str], SplitModel], name: str, before: str, after: str
) -> None:
    model = open_model(name)
    log: list[str] = []
    experts = WaitingExperts(LocalExperts(model), log)

    with hooked(model, experts, wrap=noting(log)) as run:  # type: ignore[arg-type]
        first = run.decode(TOKENS)
        assert run.hook.take_error() is None
        run.context.clear()
        log.clear()
        second = run.decode(TOKENS)
        assert run.hook.take_error() is None
        assert run.hook.overlap.hidden_share == 1
    np.testing.assert_array_equal(first, second)  # bit for bit: where it waits changes nothing
    for layer in model.spec.moe_layers[:-1]:
        at = log.index(f"wait-{layer}")
        assert log[at - 1] == f"{before}-{layer}", log[at - 5 : at + 5]
        assert log[at + 1].startswith(f"{after}-{layer}"), log[at - 5 : at + 5]


def test_without_overlap_it_waits_at_the_experts_output(tiny: SplitModel, experts: LocalExperts) -> None:
    log: list[str] = []
    waiting = WaitingExperts(experts, log)

    hook = MoeHook(tiny.spec.moe_layers, waiting, overlaps=False)
    with (
        LlamaModel(tiny.backbone) as llama,
        LlamaContext(
            llama, n_ctx=128, n_batch=64, n_ubatch=64, n_threads=1, eval_callback=noting(log)(hook)
        ) as context,
    ):
        for _ in range(2):
            context.clear()
            log.clear()
            context.decode(TOKENS, first_position=0, logits="all")
            assert hook.take_error() is None
            assert all(log[log.index(f"wait-{layer}") - 1] == f"ffn_moe_out-{layer}" for layer in range(6))


@pytest.mark.parametrize("name", ["Q8_0", "qwen3moe"])
def test_a_graph_that_runs_again_is_read_and_written_where_it_lies_and_says_the_same(
    open_model: Callable[[str], SplitModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = open_model(name)
    experts = LocalExperts(model)
    n_read = 0

    def counting(tensor: int) -> npt.NDArray[Any]:
        nonlocal n_read
        n_read += 1
        return read_tensor(tensor)

    def elsewhere(tensor: int) -> npt.NDArray[Any]:
        raise EngineError("in a device's memory")

    def run_through(run: Hooked) -> list[Rows]:
        """A prompt, some tokens, a longer step in between, and tokens again."""
        rows, at = [], 0
        for n in (20, 1, 1, 1, 5, 1, 1, 1, 1):
            before = n_read
            rows.append(run.decode(TOKENS[at : at + n], at))
            at += n
            reads.append(n_read - before)
            assert run.hook.take_error(has_run=True) is None
        return rows

    monkeypatch.setattr("swarm.backbone.moe_hook.read_tensor", counting)
    reads: list[int] = []
    with hooked(model, experts) as run:
        in_place = run_through(run)
    places, calls = list(reads), list(experts.calls)
    experts.reset()
    reads.clear()
    monkeypatch.setattr("swarm.backbone.moe_hook.view_tensor", elsewhere)
    with hooked(model, experts) as run:
        copied = run_through(run)
    for one, other in zip(in_place, copied, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
    for call, again in zip(calls, experts.calls, strict=True):  # what was given is not the graph's memory: it stays
        np.testing.assert_array_equal(call.x.view(np.uint32), again.x.view(np.uint32))
        np.testing.assert_array_equal(call.ids, again.ids)
        np.testing.assert_array_equal(call.weights.view(np.uint32), again.weights.view(np.uint32))
    each = 3 * len(model.spec.moe_layers)
    assert set(reads) == {each}
    assert places[0] == places[1] == places[4] == places[5] == each  # graphs of another shape are new ones
    assert places[3] == places[7] == places[8] == 0
