"""The wrapper of models, contexts and samplers, on the embedded model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from swarm.backbone.requests import SamplingParams
from swarm.errors import EngineError
from swarm.native import ggml
from swarm.native.llama import BatchPart, LlamaContext, LlamaModel, LogitsChoice, Sampler, set_log_handler

FILE = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model-Q8_0.gguf"
PROMPT = "The open() function returns a file object and is most commonly used with"


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    with LlamaModel(FILE, exact_kernels=True) as model:
        yield model


def make_context(model: LlamaModel, callback: Callable[[int, bool], bool] | None = None) -> LlamaContext:
    return LlamaContext(model, n_ctx=256, n_batch=64, n_ubatch=16, n_threads=1, eval_callback=callback)


@pytest.fixture
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    with make_context(model) as context:
        yield context


@pytest.fixture(scope="module")
def prompt(model: LlamaModel) -> list[int]:
    return model.tokenize(PROMPT, add_special=True, parse_special=False)


def greedy(context: LlamaContext, prompt: list[int], n_tokens: int) -> list[int]:
    answer: list[int] = []
    context.decode(prompt, first_position=0, logits="last")
    for position in range(len(prompt), len(prompt) + n_tokens):
        answer.append(int(context.logits(-1).argmax()))
        context.decode(answer[-1:], first_position=position, logits="last")
    return answer


@pytest.mark.parametrize("text", [PROMPT, "", "é 漢字 🙂 \t\n", "a\0b", "x" * 2000])
def test_pieces_of_tokens_are_the_text_again(model: LlamaModel, text: str) -> None:
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    assert all(0 <= token < model.n_vocab for token in tokens)
    assert b"".join(model.piece(token) for token in tokens).decode() == text


def test_special_tokens_are_read_and_written_only_on_demand(model: LlamaModel) -> None:
    assert model.eos_token is not None
    text = model.piece(model.eos_token, special=True).decode()
    assert model.piece(model.eos_token) == b""
    assert model.tokenize(text, add_special=False, parse_special=True) == [model.eos_token]
    assert model.eos_token not in model.tokenize(text, add_special=False, parse_special=False)
    assert model.is_end_of_generation(model.eos_token)
    assert not model.is_end_of_generation(model.tokenize("x", add_special=False, parse_special=False)[0])


def test_metadata_is_text_of_any_length_or_none(model: LlamaModel) -> None:
    assert (model.n_vocab, model.n_ctx_train) == (2048, 1024)
    assert model.metadata("general.architecture") == "qwen2moe"
    assert model.metadata("qwen2moe.expert_count") == "32"
    notice = model.metadata("general.license.notice")
    assert notice is not None
    assert len(notice) > 256
    assert model.metadata("no.such.key") is None
    assert model.chat_template is not None
    assert "messages" in model.chat_template


@pytest.mark.parametrize("token", [-1, 2048])
def test_a_token_out_of_range_is_an_error(model: LlamaModel, context: LlamaContext, token: int) -> None:
    with pytest.raises(EngineError, match="no such token"):
        model.piece(token)
    with pytest.raises(EngineError, match="no such token"):
        model.is_end_of_generation(token)
    with pytest.raises(EngineError, match="token out of range"):
        context.decode([token], first_position=0, logits="last")


def test_a_file_that_is_no_model_is_an_error_with_llama_cpps_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match="No such file"):
        LlamaModel(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all")
    with (
        caplog.at_level(logging.DEBUG, "swarm.native"),
        pytest.raises(EngineError, match=r"broken\.gguf: .*invalid magic"),
    ):
        LlamaModel(broken)
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def test_the_log_goes_to_logging_without_line_ends_and_not_to_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    set_log_handler()
    with caplog.at_level(logging.DEBUG, "swarm.native"):
        LlamaModel(FILE).close()
    lines = [record.getMessage() for record in caplog.records]
    assert any("general.architecture" in line for line in lines)
    assert not any("\n" in line for line in lines)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_a_file_that_was_read_is_not_mapped_and_gives_the_same_logits(prompt: list[int]) -> None:
    def n_mappings() -> int:
        return sum(line.endswith(FILE.name) for line in Path("/proc/self/maps").read_text().splitlines())

    logits = []
    n_before = n_mappings()  # of the other tests' model
    for is_mapped in (True, False):
        with (
            LlamaModel(FILE, exact_kernels=True, is_mapped=is_mapped) as own,
            LlamaContext(own, n_ctx=64, n_batch=32, n_ubatch=32, n_threads=1) as context,
        ):
            assert n_mappings() == n_before + is_mapped
            context.decode(prompt, first_position=0, logits="last")
            logits.append(context.logits(-1))
    assert np.array_equal(*logits)


def test_greedy_decoding_is_deterministic(model: LlamaModel, prompt: list[int]) -> None:
    with make_context(model) as one, make_context(model) as two:
        answer = greedy(one, prompt, 16)
        assert greedy(two, prompt, 16) == answer
        one.clear()
        assert greedy(one, prompt, 16) == answer
    assert len(set(answer)) > 4


def test_logits_come_for_the_tokens_asked_for(context: LlamaContext, prompt: list[int]) -> None:
    n = len(prompt)
    context.decode(prompt, first_position=0, logits="all")
    everything = context.all_logits()
    assert everything.shape == (n, 2048)
    assert everything.dtype == np.float32
    np.testing.assert_array_equal(context.logits(0), everything[0])
    np.testing.assert_array_equal(context.logits(-1), everything[n - 1])

    context.clear()
    context.decode(prompt, first_position=0, logits="last")
    assert context.all_logits().shape == (1, 2048)
    np.testing.assert_array_equal(context.logits(n - 1), context.all_logits()[0])
    np.testing.assert_allclose(context.logits(-1), everything[-1], atol=1e-4)
    for index in (0, n, -2):
        with pytest.raises(EngineError, match=r"the last batch made 1 rows"):
            context.logits(index)

    context.decode(prompt, first_position=n, logits="none")
    assert context.all_logits().shape == (0, 2048)
    with pytest.raises(EngineError, match="made 0 rows"):
        context.logits(-1)


def test_logits_are_a_copy(context: LlamaContext, prompt: list[int]) -> None:
    context.decode(prompt, first_position=0, logits="last")
    row, rows = context.logits(-1), context.all_logits()
    kept = row.copy()
    context.decode([5], first_position=len(prompt), logits="last")
    np.testing.assert_array_equal(row, kept)
    np.testing.assert_array_equal(rows[0], kept)


def test_removing_tokens_and_decoding_again_gives_the_same_logits(context: LlamaContext, prompt: list[int]) -> None:
    context.decode(prompt, first_position=0, logits="last")
    context.decode([17], first_position=len(prompt), logits="last")
    expected = context.logits(-1)
    context.decode([1999, 3], first_position=len(prompt) + 1, logits="none")
    assert context.remove(0, len(prompt))
    context.decode([17], first_position=len(prompt), logits="last")
    np.testing.assert_array_equal(context.logits(-1), expected)


def test_sequences_do_not_see_each_other(model: LlamaModel, prompt: list[int]) -> None:
    with LlamaContext(model, n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, n_seq_max=2) as context:
        context.decode(prompt, first_position=0, sequence=0, logits="last")
        expected = context.logits(-1)
        context.decode(prompt[:4], first_position=0, sequence=1, logits="last")
        assert not np.array_equal(context.logits(-1), expected)
        assert context.remove(0, 0)
        context.decode(prompt, first_position=0, sequence=0, logits="last")
        np.testing.assert_allclose(context.logits(-1), expected, atol=1e-4)
        with pytest.raises(EngineError, match="no such sequence: got 2"):
            context.decode([1], first_position=0, sequence=2, logits="last")


def several(model: LlamaModel, **options: int) -> LlamaContext:
    return LlamaContext(
        model, **({"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_seq_max": 3} | options)
    )


def part(tokens: list[int], first_position: int, sequence: int, logits: LogitsChoice = "last") -> BatchPart:
    return BatchPart(tokens=tokens, first_position=first_position, sequence=sequence, logits=logits)


def test_a_batch_of_several_sequences_is_one_graph_and_gives_each_its_own_logits(
    model: LlamaModel, prompt: list[int]
) -> None:
    expected = []
    with several(model) as context:
        for tokens in (prompt, prompt[:5]):
            context.decode(tokens, first_position=0, logits="last")
            context.decode([7], first_position=len(tokens), logits="last")
            expected.append(context.logits(-1))
            context.clear()
    names: list[str] = []

    def note(tensor: int, ask: bool) -> bool:
        if ask:
            names.append(ggml.tensor_name(tensor))
        return False

    with LlamaContext(
        model, n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1, n_seq_max=3, eval_callback=note
    ) as context:
        context.decode_parts([part(prompt, 0, 0, "none"), part(prompt[:5], 0, 2, "none")])
        names.clear()
        context.decode_parts([part([7], len(prompt), 0), part([7], 5, 2), part(prompt[:9], 0, 1, "all")])
        assert names.count("ffn_moe_out-1") == 1, "unequal parts took several graphs: several round trips"
        assert context.n_outputs == 11
        np.testing.assert_allclose(context.logits(0), expected[0], atol=1e-3)
        np.testing.assert_allclose(context.logits(1), expected[1], atol=1e-3)
        np.testing.assert_array_equal(context.logits(-1), context.logits(10))


def test_a_sequence_that_was_saved_goes_on_in_another_context(model: LlamaModel, prompt: list[int]) -> None:
    with several(model) as first, several(model, n_ctx=256) as second:
        first.decode(prompt, first_position=0, sequence=1, logits="last")
        state = first.save(1)
        first.decode([7], first_position=len(prompt), sequence=1, logits="last")
        expected = first.logits(-1)
        second.decode([9, 9], first_position=0, sequence=0, logits="last")
        assert second.restore(2, state)
        second.decode([7], first_position=len(prompt), sequence=2, logits="last")
        np.testing.assert_allclose(second.logits(-1), expected, atol=1e-4)


def test_a_state_that_finds_no_room_leaves_its_sequence_empty(model: LlamaModel) -> None:
    tokens = list(range(1, 65))
    with several(model) as first, several(model, n_ctx=256) as second:
        for at in range(0, 256, 64):
            first.decode(tokens, first_position=at, logits="none")
        state = first.save(0)
        second.decode(tokens, first_position=0, sequence=1, logits="none")
        assert not second.restore(0, state)
        second.decode([5], first_position=0, sequence=0, logits="last")


def test_a_copied_beginning_is_shared_and_then_goes_its_own_way(model: LlamaModel, prompt: list[int]) -> None:
    with several(model) as context:
        context.decode(prompt, first_position=0, logits="last")
        context.copy(0, 2, 6)
        context.decode([7], first_position=6, sequence=2, logits="last")
        found = context.logits(-1)
        assert context.remove(0, 0)
        context.decode([8], first_position=7, sequence=2, logits="last")  # its cells outlive the other sequence
        context.clear()
        context.decode(prompt[:6], first_position=0, logits="last")
        context.decode([7], first_position=6, logits="last")
        np.testing.assert_allclose(context.logits(-1), found, atol=1e-3)


def test_a_cache_of_quantised_values_runs_and_is_smaller(model: LlamaModel, prompt: list[int]) -> None:
    sizes = {}
    for kv_types in (("f16", "f16"), ("q8_0", "q8_0")):
        with LlamaContext(model, n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, kv_types=kv_types) as context:
            context.decode(prompt, first_position=0, logits="last")
            assert np.isfinite(context.logits(-1)).all()
            sizes[kv_types[0]] = len(context.save(0))
    assert sizes["q8_0"] < 0.6 * sizes["f16"]


def test_a_sampler_and_its_copy_draw_the_same_from_here_on(context: LlamaContext, prompt: list[int]) -> None:
    context.decode(prompt, first_position=0, logits="last")
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=1.0)
    with Sampler(params, context.model.n_vocab) as sampler:
        for _ in range(3):
            sampler.sample(context)
        with sampler.copy() as copy:
            drawn = [sampler.sample(context) for _ in range(20)]
            assert [copy.sample(context) for _ in range(20)] == drawn
        sampler.close()
        with pytest.raises(EngineError, match="closed"):
            sampler.copy()


@pytest.mark.parametrize("n", [0, 257])
def test_too_many_sequences_are_an_error_before_llama_cpp_sees_them(model: LlamaModel, n: int) -> None:
    with pytest.raises(EngineError, match=f"number of sequences out of range: got {n}"):
        several(model, n_seq_max=n)


@pytest.mark.parametrize(
    ("n_tokens", "first_position", "message"),
    [
        (0, 0, "got 0 tokens"),
        (65, 0, "got 65 tokens, expected 1 to 64"),
        (2, 255, "expected 0 to 255"),
        (1, -1, "got positions -1"),
        (1, 9, "status -1"),
    ],
)
def test_a_batch_that_does_not_fit_is_an_error_and_leaves_the_context_usable(
    context: LlamaContext, n_tokens: int, first_position: int, message: str
) -> None:
    context.decode([1, 2], first_position=0, logits="last")
    with pytest.raises(EngineError, match=message):
        context.decode([1] * n_tokens, first_position=first_position, logits="last")
    context.decode([3], first_position=2, logits="last")
    assert np.isfinite(context.logits(-1)).all()


def test_the_eval_callback_sees_nodes_and_their_computed_values(model: LlamaModel, prompt: list[int]) -> None:
    asked: list[str] = []
    topk_ids: list[np.ndarray] = []

    def callback(tensor: int, ask: bool) -> bool:
        name = ggml.tensor_name(tensor)
        if ask:
            asked.append(name)
            return name == "ffn_moe_topk-2"
        topk_ids.append(ggml.read_tensor(tensor))
        return True

    with make_context(model, callback) as context:
        context.decode(prompt[:10], first_position=0, logits="all")
    assert {f"ffn_moe_out-{layer}" for layer in range(6)} <= set(asked)
    (ids,) = topk_ids
    assert ids.shape == (1, 1, 10, 4)
    assert ids.min() >= 0
    assert ids.max() < 32
    assert all(len(set(row)) == 4 for row in ids.reshape(10, 4).tolist())


def test_writing_a_node_in_the_callback_changes_the_logits(model: LlamaModel, prompt: list[int]) -> None:
    def callback(tensor: int, ask: bool) -> bool:
        if ask:
            return ggml.tensor_name(tensor) == "ffn_moe_out-5"
        ggml.write_tensor(tensor, np.zeros_like(ggml.read_tensor(tensor)))
        return True

    with make_context(model, callback) as hooked, make_context(model) as plain:
        for context in (hooked, plain):
            context.decode(prompt, first_position=0, logits="last")
        assert not np.allclose(hooked.logits(-1), plain.logits(-1), atol=1e-3)


@pytest.mark.parametrize("error", [ValueError("from the hook"), KeyboardInterrupt()])
@pytest.mark.parametrize("in_ask", [True, False])
def test_an_exception_in_the_callback_surfaces_once_and_the_context_lives_on(
    model: LlamaModel, prompt: list[int], error: BaseException, in_ask: bool
) -> None:
    calls_after = 0
    failing = True

    def callback(tensor: int, ask: bool) -> bool:
        nonlocal calls_after, failing
        is_hooked = ggml.tensor_name(tensor) == "ffn_moe_up-1"
        if failing and is_hooked and ask == in_ask:
            failing = False
            raise error
        calls_after += not failing
        return is_hooked

    with make_context(model, callback) as context:
        context.decode(prompt, first_position=0, logits="last")
        assert calls_after == 0
        for read in (lambda: context.logits(-1), context.all_logits, lambda: greedy(context, [1], 1)):
            with pytest.raises(EngineError, match="the eval callback failed") as caught:
                read()
            assert caught.value.__cause__ is error
        with Sampler(SamplingParams(temperature=0), model.n_vocab) as sampler, pytest.raises(EngineError):
            sampler.sample(context)
        assert context.take_callback_error() is error
        assert context.take_callback_error() is None

        assert context.remove(0, 0)
        context.decode(prompt, first_position=0, logits="last")
        with make_context(model) as plain:
            plain.decode(prompt, first_position=0, logits="last")
            np.testing.assert_allclose(context.logits(-1), plain.logits(-1), atol=1e-4)


def test_temperature_zero_is_the_likeliest_token(model: LlamaModel, context: LlamaContext, prompt: list[int]) -> None:
    context.decode(prompt, first_position=0, logits="all")
    with Sampler(SamplingParams(temperature=0), model.n_vocab) as sampler:
        for index in (0, 3, -1):
            assert sampler.sample(context, index) == context.logits(index).argmax()


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_each_token_drawn(
    model: LlamaModel, context: LlamaContext, prompt: list[int], penalty: str
) -> None:
    context.decode(prompt, first_position=0, logits="last")
    logits, counts, expected = context.logits(-1), np.zeros(model.n_vocab, np.float32), []
    for _ in range(20):
        expected.append(int((logits - np.float32(1.5) * (counts if penalty[0] == "f" else counts > 0)).argmax()))
        counts[expected[-1]] += 1
    assert len(set(expected)) > 2
    params = dataclasses.replace(SamplingParams(temperature=0), **{penalty: 1.5})  # type: ignore[arg-type]
    with Sampler(params, model.n_vocab) as sampler:
        assert [sampler.sample(context) for _ in range(20)] == expected


def test_a_seed_repeats_its_draws_and_another_does_not(
    model: LlamaModel, context: LlamaContext, prompt: list[int]
) -> None:
    context.decode(prompt, first_position=0, logits="last")

    def draws(seed: int | None) -> list[int]:
        with Sampler(SamplingParams(temperature=2.0, seed=seed), model.n_vocab) as sampler:
            return [sampler.sample(context) for _ in range(24)]

    assert draws(1) == draws(1)
    assert draws(2**32 + 7) == draws(2**32 + 7)
    assert draws(2**32 - 1) == draws(2**32 - 1)  # llama.cpp's own "any seed"
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_top_k_top_p_and_min_p_cut_the_tail(model: LlamaModel, context: LlamaContext, prompt: list[int]) -> None:
    context.decode(prompt, first_position=0, logits="last")
    logits = context.logits(-1).astype(np.float64)
    order = np.argsort(-logits)
    p = np.exp(logits[order] - logits.max())
    p /= p.sum()
    kept_by_p = int(np.searchsorted(np.cumsum(p), 0.5)) + 1
    kept_by_min = int((p >= 0.2 * p[0]).sum())
    for cut, n_kept in (({"top_k": 3}, 3), ({"top_p": 0.5}, kept_by_p), ({"min_p": 0.2}, kept_by_min)):
        with Sampler(SamplingParams(temperature=4.0, seed=3, **cut), model.n_vocab) as sampler:
            drawn = {sampler.sample(context) for _ in range(60)}
        assert drawn <= set(order[:n_kept].tolist()), cut
        assert len(drawn) > 1 or n_kept == 1, cut


def test_sampling_without_logits_is_an_error(model: LlamaModel, context: LlamaContext) -> None:
    with Sampler(SamplingParams(), model.n_vocab) as sampler:
        with pytest.raises(EngineError, match="made 0 rows"):
            sampler.sample(context)
        context.decode([1, 2], first_position=0, logits="last")
        with pytest.raises(EngineError, match="no logits at index 0"):
            sampler.sample(context, 0)
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(context)


def test_closing_twice_is_quiet_and_using_what_is_closed_is_an_error(model: LlamaModel) -> None:
    own = LlamaModel(FILE)
    context = make_context(own)
    own.close()  # closes its contexts first
    own.close()
    context.close()
    for use in (
        lambda: context.decode([1], first_position=0, logits="last"),
        lambda: context.logits(-1),
        lambda: context.remove(0, 0),
        lambda: own.tokenize("x", add_special=False, parse_special=False),
        lambda: own.piece(1),
        lambda: own.metadata("general.name"),
        lambda: make_context(own),
    ):
        with pytest.raises(EngineError, match="is closed"):
            use()
    assert model.piece(300) != b""
