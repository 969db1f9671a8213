"""Answers in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

from swarm.backbone.requests import FinishReason, TextDelta, TokenLogprob
from swarm.gateway.answers import ChatAnswer, Choice, CompletionAnswer, usage_of
from swarm.gateway.tools import HERMES, CallReader, Tool, ToolChoice

LAST = TextDelta(text="!", n_prompt_tokens=3, n_completion_tokens=2, finish_reason=FinishReason.STOP)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}
LOGPROB = TokenLogprob(piece="日".encode()[:2], logprob=-0.5, likeliest=((b"hi", -0.25),))
CHOICE = ToolChoice(tools=(Tool(name="add", description="", parameters={}),))


def delta(text: str, **more: Any) -> TextDelta:
    return TextDelta(text=text, n_prompt_tokens=3, n_completion_tokens=1, **more)


def finished(*deltas: TextDelta, **options: Any) -> Choice:
    choice = Choice(**options)
    for each in (*deltas, LAST):
        choice.feed(each)
    return choice


def test_a_chat_answer_has_openais_shape() -> None:
    answer = ChatAnswer(answer_id="chatcmpl-1", created=9, model="m@1", has_usage=True)
    head = {"id": "chatcmpl-1", "created": 9, "model": "m@1"}
    message = {"role": "assistant", "content": "hi!", "refusal": None}
    assert answer.whole([finished(delta("hi"))]) == {
        **head,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }

    def chunk(content: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        shaped = {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "object": "chat.completion.chunk", "choices": [shaped], "usage": None}

    choice = Choice()
    assert answer.opening(choice) == [chunk({"role": "assistant", "content": ""})]
    assert answer.piece(choice, choice.feed(delta("hi"))) == [chunk({"content": "hi"})]
    assert answer.piece(choice, choice.feed(delta(""))) == []
    choice.feed(LAST)
    assert answer.closing(choice) == [chunk({}, "stop")]
    assert json.loads(json.dumps(answer.closing(choice)[0]))["choices"][0]["finish_reason"] == "stop"
    assert answer.end([choice]) == [{**head, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}]


def test_a_completion_answer_has_openais_shape() -> None:
    answer = CompletionAnswer(answer_id="cmpl-1", created=9, model="m@1", echo="say ")
    head = {"id": "cmpl-1", "object": "text_completion", "created": 9, "model": "m@1"}

    def choices(text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}]

    choice = Choice()
    assert answer.opening(choice) == [{**head, "choices": choices("say ", None)}]
    assert answer.piece(choice, choice.feed(delta("hi"))) == [{**head, "choices": choices("hi", None)}]
    choice.feed(LAST)
    assert answer.whole([choice]) == {**head, "choices": choices("say hi!", "stop"), "usage": USAGE}
    assert answer.closing(choice) == [{**head, "choices": choices("", "stop")}]
    assert answer.end([choice]) == []


def test_several_answers_share_the_prompt_in_the_counts() -> None:
    both = [finished(delta("a")), finished(delta("b"), index=1)]
    assert usage_of(both) == USAGE | {"completion_tokens": 4, "total_tokens": 7}
    whole = ChatAnswer(answer_id="chatcmpl-1", created=9, model="m@1").whole(both)
    assert [(each["index"], each["message"]["content"]) for each in whole["choices"]] == [(0, "a!"), (1, "b!")]


def test_log_probabilities_of_a_chat_hold_the_tokens_bytes() -> None:
    answer = ChatAnswer(answer_id="chatcmpl-1", created=9, model="m@1")
    choice = Choice()
    (chunk,) = answer.piece(choice, choice.feed(delta("", logprobs=(LOGPROB,))))
    shaped = {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xE6, 0x97],
        "top_logprobs": [{"token": "hi", "logprob": -0.25, "bytes": [104, 105]}],
    }
    assert chunk["choices"][0]["logprobs"] == {"content": [shaped], "refusal": None}
    choice.feed(LAST)
    assert answer.whole([choice])["choices"][0]["logprobs"]["content"] == [shaped]


def test_log_probabilities_of_a_completion_count_characters() -> None:
    answer = CompletionAnswer(answer_id="cmpl-1", created=9, model="m@1")
    first, second = (
        TokenLogprob(piece=piece, logprob=value) for piece, value in ((b"one", -1.0), (b"two", -float("inf")))
    )
    choice = Choice(offset=10)
    chunks = [answer.piece(choice, choice.feed(delta("x", logprobs=(each,))))[0] for each in (first, second)]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[10], [13]]
    assert chunks[1]["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_a_call_of_a_tool_takes_the_place_of_its_text() -> None:
    answer = ChatAnswer(answer_id="chatcmpl-ab", created=9, model="m@1")
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    whole = finished(delta(text[:20]), delta(text[20:]), reader=CallReader(CHOICE, HERMES))
    whole.texts.clear()
    (choice,) = answer.whole([whole])["choices"]
    call = {"id": "call_ab_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    assert choice["finish_reason"] == "tool_calls"

    streamed = Choice(reader=CallReader(CHOICE, HERMES))
    chunks = [each for part in (text[:20], text[20:]) for each in answer.piece(streamed, streamed.feed(delta(part)))]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"tool_calls": [{"index": 0, **call}]}]
