from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.backbone.requests import GenerationRequest, Grammar, GrammarKind, SamplingParams
from swarm.gateway.chat_template import Message
from swarm.gateway.errors import RequestRefused
from swarm.gateway.openai import (
    MAX_BYTES_PER_TOKEN,
    Call,
    ServedModel,
    check_prompt,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from swarm.gateway.tools import Tool, ToolChoice

SERVED = ServedModel(name="tiny-moe@1a2b3c4d", n_ctx=512)
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


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
    rest["is_stream"] = False
    assert chat(**given) == GenerationRequest(prompt="rendered", **rest)
    assert completion(**given) == GenerationRequest(prompt="hello", **rest)


def test_absent_and_null_give_openais_defaults() -> None:
    names = ["model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"]
    names += ["presence_penalty", "frequency_penalty", "stream", "stream_options", "n", "best_of", "logprobs", "echo"]
    nulls = dict.fromkeys([*names, "suffix", "tools", "response_format"])
    for fields in ({}, nulls):
        assert chat(**fields) == GenerationRequest(prompt="rendered", parse_special=True, is_stream=False)
        expected = GenerationRequest(prompt="hello", max_tokens=16, parse_special=True, is_stream=False)
        assert completion(**fields) == expected


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
    {"parallel_tool_calls": True, "cache_prompt": True, "ignore_eos": False, "min_tokens": 0, "stop_token_ids": []},
    {"mirostat": 0, "typical_p": 1.0, "xtc_probability": 0, "dry_multiplier": 0.0, "top_n_sigma": -1, "lora": []},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_values_that_ask_for_nothing_special_pass(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()
    assert completion(**fields) == completion()


REFUSED: list[tuple[str, Any]] = [
    ("suffix", "tail"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("stop_token_ids", [1]),
    ("min_tokens", 5),
    ("guided_regex", "a+"),
    ("mirostat", 2),
    ("typical_p", 0.9),
    ("samplers", ["top_k"]),
    ("n_predict", 8),
]


def test_an_answer_may_be_asked_not_to_end() -> None:
    for parse in (chat, completion):
        assert parse(ignore_eos=True).ignores_end is True
        assert parse().ignores_end is False


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
    ("n", 0),
    ("n", 17),
    ("n", True),
    ("n", 1.0),
    ("repeat_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"99999999999": 1}),
    ("logit_bias", [[5]]),
    ("logit_bias", [[-1, 1]]),
    ("logit_bias", [[-1, False]]),
    ("logit_bias", [[10**30, False]]),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("response_format", "json"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("grammar", 5),
    ("grammar", "\ud800"),
    ("json_schema", "x"),
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
        ([{"role": "function", "content": "hi"}], "messages[0].role"),
        ([{"role": "tool", "content": "hi", "tool_call_id": 5}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
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


NAMES = [
    *dict(REFUSED),
    *dict(BAD),
    "tools",
    "tool_choice",
    "logprobs",
    "best_of",
    "prompt",
    "messages",
    "echo",
    "max_completion_tokens",
    "user",
]
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


# What goes beyond plain text


def test_biases_and_penalties_reach_the_sampler() -> None:
    sampling = chat(logit_bias={"7": -100, "9": 1.5}, repetition_penalty=1.25).sampling
    assert (sampling.logit_bias, sampling.repeat_penalty) == (((7, -100.0), (9, 1.5)), 1.25)
    assert chat(logit_bias=[[7, False], [9, 2]]).sampling.logit_bias == ((7, float("-inf")), (9, 2.0))
    assert chat(repeat_penalty=1.5, repetition_penalty=1.25).sampling.repeat_penalty == 1.5


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"grammar": 'root ::= "a"'}, GrammarKind.GBNF, 'root ::= "a"'),
    ],
)
def test_what_an_answer_must_look_like(fields: dict[str, Any], kind: GrammarKind, text: object) -> None:
    for grammar in (chat(**fields).grammar, completion(**fields).grammar):
        assert isinstance(grammar, Grammar)
        assert grammar.kind is kind
        assert (json.loads(grammar.text) if kind is GrammarKind.JSON_SCHEMA else grammar.text) == text


def test_two_shapes_for_one_answer_are_refused() -> None:
    with pytest.raises(RequestRefused, match="one of"):
        chat(response_format={"type": "json_object"}, grammar='root ::= "a"')


def test_log_probabilities_of_chats_and_completions() -> None:
    assert chat(logprobs=True).n_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).n_logprobs == 20
    assert chat(logprobs=False).n_logprobs is None
    assert completion(logprobs=0).n_logprobs == 0
    assert completion(logprobs=5).n_logprobs == 5
    for parse, fields in (
        (chat, {"top_logprobs": 3}),
        (chat, {"logprobs": 3}),
        (chat, {"logprobs": True, "top_logprobs": 21}),
        (completion, {"logprobs": True}),
        (completion, {"logprobs": 21}),
        (completion, {"logprobs": 1, "echo": True}),
    ):
        with pytest.raises(RequestRefused):
            parse(**fields)


def test_several_answers_have_seeds_that_count_up() -> None:
    call: Call = parse_completion({"prompt": "x", "n": 3, "best_of": 3, "seed": 2**32 - 3}, SERVED)[0]
    assert call.n == 3
    seeds = [call.generation("x", index=index).sampling.seed for index in range(3)]
    assert seeds == [2**32 - 3, 2**32 - 2, 0]
    assert parse_completion({"prompt": "x", "n": 2}, SERVED)[0].generation("x", index=1).sampling.seed is None
    with pytest.raises(RequestRefused) as caught:
        completion(n=1, best_of=2)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")


def tools_of(**fields: Any) -> ToolChoice:
    return parse_chat({"messages": HELLO, **fields}, SERVED)[0].tools


def test_tools_and_which_of_them_must_be_called() -> None:
    tool = Tool(name="add", description="Adds.", parameters={"type": "object"})
    other = {"type": "function", "function": {"name": "sub"}}
    assert tools_of(tools=[TOOL]) == ToolChoice(tools=(tool,))
    assert tools_of(tools=[TOOL], parallel_tool_calls=False) == ToolChoice(tools=(tool,), has_several=False)
    assert tools_of(tools=[TOOL], tool_choice="none") == ToolChoice()
    assert [each.name for each in tools_of(tools=[TOOL, other], tool_choice="required").tools] == ["add", "sub"]
    named = tools_of(tools=[TOOL, other], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named == ToolChoice(tools=(tool,), is_required=True)
    assert chat(tools=[TOOL]).shows_special
    assert not chat().shows_special


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "x" * 65}}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].parameters"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_bad_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_turns_with_calls_and_their_answers() -> None:
    turns = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "user", "name": "Ann", "content": "thanks"},
    ]
    _, messages = parse_chat({"messages": turns}, SERVED)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert messages == (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2", tool_call_id="c1", name="add"),
        Message(role="user", content="thanks"),
    )


def test_bodies_of_tokenize_and_detokenize() -> None:
    asked = parse_tokenize({"content": "a b"}, SERVED)
    assert (asked.prompt, asked.parse_special, asked.add_special) == ("a b", True, False)
    assert parse_tokenize({"content": "a", "add_special": True}, SERVED).add_special
    assert not parse_tokenize({"content": "", "parse_special": False}, SERVED).parse_special
    assert parse_detokenize({"tokens": [1, 2]}, SERVED) == (1, 2)
    for parse, body in (
        (parse_tokenize, {"content": 5}),
        (parse_tokenize, {"content": "a" * (MOST_BYTES + 1)}),
        (parse_detokenize, {}),
        (parse_detokenize, {"tokens": ["a"]}),
        (parse_detokenize, {"tokens": [True]}),
    ):
        with pytest.raises(RequestRefused):
            parse(body, SERVED)  # type: ignore[operator]
