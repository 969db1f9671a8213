from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.backbone.requests import FinishReason, GenerationRequest, SamplingParams, TextDelta
from swarm.errors import EngineError, ExpertUnavailable, Overloaded, UserError
from swarm.gateway.chat_template import Message
from swarm.gateway.openai import (
    MAX_BYTES_PER_TOKEN,
    ChatAnswer,
    CompletionAnswer,
    RequestRefused,
    ServedModel,
    check_prompt,
    error_answer,
    parse_chat,
    parse_completion,
)

SERVED = ServedModel(name="tiny-moe@1a2b3c4d", n_ctx=512)
HELLO = [{"role": "user", "content": "hello"}]
LAST = TextDelta(text="!", n_prompt_tokens=3, n_completion_tokens=2, finish_reason=FinishReason.STOP)


def chat(**fields: Any) -> GenerationRequest:
    call, _ = parse_chat({"messages": HELLO, **fields}, SERVED)
    return call.generation("rendered")


def completion(**fields: Any) -> GenerationRequest:
    call, prompt, _ = parse_completion({"prompt": "hello", **fields}, SERVED)
    return call.generation(prompt)


def test_every_parameter_reaches_the_engine() -> None:
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "seed": 42,
        "stop": ["\n", "END"],
    }
    sampling = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=1.0, frequency_penalty=-1.5, seed=42
    )
    rest: dict[str, Any] = {"max_tokens": 7, "sampling": sampling, "stop": ("\n", "END"), "parse_special": True}
    assert chat(**given) == GenerationRequest(prompt="rendered", **rest)
    assert completion(**given) == GenerationRequest(prompt="hello", **rest)


def test_absent_and_null_give_openais_defaults() -> None:
    names = ["model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"]
    names += ["presence_penalty", "frequency_penalty", "stream", "stream_options", "n", "best_of", "logprobs", "echo"]
    nulls = dict.fromkeys([*names, "suffix", "tools", "response_format"])
    for fields in ({}, nulls):
        assert chat(**fields) == GenerationRequest(prompt="rendered", parse_special=True)
        assert completion(**fields) == GenerationRequest(prompt="hello", max_tokens=16, parse_special=True)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 511}, 511),
        ({"max_tokens": 512}, None),
        ({"max_tokens": 10**30}, None),
    ],
)
def test_max_tokens_beyond_the_context_means_to_its_end(fields: dict[str, int], max_tokens: int | None) -> None:
    assert chat(**fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("given", "seed"), [(0, 0), (-1, None), (2**32 - 2, 2**32 - 2), (2**32 - 1, 0), (2**32, 1), (-2, 2**32 - 3)]
)
def test_a_seed_folds_into_32_bits_without_llama_cpps_random_one(given: int, seed: int | None) -> None:
    assert chat(seed=given).sampling.seed == seed


def test_top_k_of_minus_one_keeps_all() -> None:
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(top_k=10**30).sampling.top_k == 2**31 - 1


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        ("", ""),
        (["text"], "text"),
        ([1, 0, 2**31 - 1], (1, 0, 2**31 - 1)),
        ([[1, 2]], (1, 2)),
    ],
)
def test_a_prompt_may_be_text_or_tokens(prompt: object, read: object) -> None:
    assert completion(prompt=prompt).prompt == read


MOST_BYTES = SERVED.n_ctx * MAX_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    "prompt", ["a" * (MOST_BYTES + 1), "日" * (MOST_BYTES // 3 + 1), ["a" * (MOST_BYTES + 1)], [1] * (SERVED.n_ctx + 1)]
)
def test_a_prompt_that_cannot_fit_the_context_is_refused_before_it_is_tokenised(prompt: object) -> None:
    with pytest.raises(RequestRefused, match="the prompt is too long") as refusal:
        completion(prompt=prompt)
    assert (refusal.value.status, refusal.value.param) == (400, "prompt")
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["a" * MOST_BYTES, "日" * (MOST_BYTES // 3), [1] * (SERVED.n_ctx - 1)])
def test_a_prompt_that_may_fit_is_left_to_the_tokeniser(prompt: object) -> None:
    completion(prompt=prompt)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "日" * (MOST_BYTES // 6 + 1)}] * 2,
        [{"role": "user", "content": [{"type": "text", "text": "a" * (MOST_BYTES // 4 + 1)}] * 4}],
        [{"role": "user", "content": ""}] * (SERVED.n_ctx + 1),
    ],
)
def test_a_conversation_that_cannot_fit_the_context_is_refused(messages: list[Any]) -> None:
    with pytest.raises(RequestRefused, match="the prompt is too long") as refusal:
        chat(messages=messages)
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")


def test_what_a_template_rendered_is_judged_with_its_half_surrogates() -> None:
    check_prompt("\ud800" * 3, SERVED, "messages")
    with pytest.raises(RequestRefused):
        check_prompt("x" * (MOST_BYTES + 1), SERVED, "messages")


def test_echo_puts_the_prompt_before_the_answer() -> None:
    assert parse_completion({"prompt": ["ab"], "echo": True}, SERVED)[2] == "ab"
    assert parse_completion({"prompt": "ab", "echo": False}, SERVED)[2] == ""


def test_contents_may_be_text_parts_and_a_developer_is_a_system() -> None:
    turns = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "ü"}], "name": "x"},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
    ]
    _, messages = parse_chat({"messages": turns}, SERVED)
    assert messages == (
        Message(role="system", content="rules"),
        Message(role="user", content="aü"),
        Message(role="assistant", content=""),
    )


@pytest.mark.parametrize("model", ["tiny-moe@1a2b3c4d", "tiny-moe", "1a2b3c4d", "1a2b", "1A2B3", "", None])
def test_the_model_answers_to_name_label_and_id_prefix(model: str | None) -> None:
    assert chat(model=model)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe@", "@1a2b3c4d", "1a2", "2b3c4d", "1a2b3c4d00", "gpt-4o", "\ud800"])
def test_another_model_is_not_found(model: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        completion(model=model)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


HARMLESS = [
    {"n": 1, "best_of": 1, "suffix": "", "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
    {"response_format": {"type": "text"}, "grammar": "", "json_schema": {}, "tools": [], "tool_choice": "auto"},
    {"functions": [], "function_call": "none", "modalities": ["text"], "user": "u", "metadata": {}, "store": False},
    {"reasoning_effort": "low", "parallel_tool_calls": True, "cache_prompt": True},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_values_that_ask_for_nothing_special_pass(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()
    assert completion(**fields) == completion()


REFUSED: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", True),
    ("n", 1.0),
    ("best_of", 3),
    ("suffix", "tail"),
    ("logprobs", True),
    ("logprobs", 0),
    ("logprobs", 5),
    ("top_logprobs", 2),
    ("logit_bias", {"50256": -100}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("grammar", 'root ::= "a"'),
    ("json_schema", {"type": "object"}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
@pytest.mark.parametrize("parse", [chat, completion])
def test_what_cannot_be_honoured_is_refused_by_name(parse: Any, name: str, value: Any) -> None:
    with pytest.raises(RequestRefused, match=f"{name} is not supported") as caught:
        parse(**{name: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)


BAD: list[tuple[str, Any]] = [
    ("model", 7),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "9"),
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", 2),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", "x" * 1025),
    ("stop", ["x"] * 17),
    ("stop", "\udc00"),
    ("stream", 1),
    ("stream_options", []),
]


@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_bad_value_names_its_parameter(parse: Any, name: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    "prompt", [None, 5, [], {}, ["a", "b"], [[1], [2]], [[]], [-1], [1.0], [True], [2**31], [1, "a"], "\ud800", [["a"]]]
)
def test_a_bad_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RequestRefused) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_tokens_cannot_be_echoed() -> None:
    with pytest.raises(RequestRefused) as caught:
        completion(prompt=[1, 2], echo=True)
    assert caught.value.param == "echo"


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
def test_a_bad_conversation_says_where(turns: object, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        chat(messages=turns)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("body", [None, [], "text", 5, 1.5, True])
def test_a_body_must_be_an_object(body: object) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestRefused, match="must be a JSON object"):
            parse(body, SERVED)


NAMES = [*dict(REFUSED), *dict(BAD), "prompt", "messages", "echo", "max_completion_tokens", "user"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(["user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
PLAUSIBLE = {"prompt": "hello", "messages": HELLO}
BODIES = (
    JSON
    | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3).map(lambda body: {**PLAUSIBLE, **body})
    | (st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(BODIES)
def test_any_json_is_read_or_refused(body: object) -> None:
    for parse in (parse_chat, parse_completion):
        with contextlib.suppress(RequestRefused):
            call = parse(body, SERVED)[0]
            assert call.max_tokens is None or 1 <= call.max_tokens < SERVED.n_ctx


def test_a_chat_answer_has_openais_shape() -> None:
    answer = ChatAnswer(answer_id="chatcmpl-1", created=9, model="m@1", has_usage=True)
    head = {"id": "chatcmpl-1", "created": 9, "model": "m@1"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    message = {"role": "assistant", "content": "hi!", "refusal": None}
    assert answer.whole("hi!", LAST) == {
        **head,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage,
    }

    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "object": "chat.completion.chunk", "choices": [choice], "usage": None}

    assert answer.opening() == [chunk({"role": "assistant", "content": ""})]
    assert answer.text("hi") == chunk({"content": "hi"})
    last_chunk = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}
    assert answer.closing(LAST) == [chunk({}, "stop"), last_chunk]
    assert json.loads(json.dumps(answer.closing(LAST)[0]))["choices"][0]["finish_reason"] == "stop"


def test_a_completion_answer_has_openais_shape() -> None:
    answer = CompletionAnswer(answer_id="cmpl-1", created=9, model="m@1", echo="say ")
    head = {"id": "cmpl-1", "object": "text_completion", "created": 9, "model": "m@1"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    def choices(text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]

    assert answer.whole("hi!", LAST) == {**head, "choices": choices("say hi!", "stop"), "usage": usage}
    assert answer.opening() == [{**head, "choices": choices("say ", None)}]
    assert answer.text("hi") == {**head, "choices": choices("hi", None)}
    assert answer.closing(LAST) == [{**head, "choices": choices("", "stop")}]


def test_errors_map_to_statuses_and_codes() -> None:
    lost = error_answer(ExpertUnavailable(3, (5, 9), "peer lost"))
    assert lost.status == 503
    assert lost.headers() == {"Retry-After": "5"}
    assert lost.body() == {
        "error": {
            "message": "no answer for layer 3, experts 5, 9: peer lost",
            "type": "server_error",
            "param": None,
            "code": "expert_unavailable",
            "layer": 3,
            "experts": [5, 9],
        }
    }
    busy = error_answer(Overloaded("8 requests wait", retry_after_s=2.2))
    assert (busy.status, busy.code, busy.headers()) == (429, "overloaded", {"Retry-After": "3"})
    assert error_answer(UserError("the prompt is empty")).body()["error"]["message"] == "the prompt is empty"
    for error in (EngineError("secret"), RuntimeError("secret")):
        told = error_answer(error)
        assert (told.status, told.code, told.message) == (500, "internal_error", "internal error")
