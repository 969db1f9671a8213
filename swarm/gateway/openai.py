"""OpenAI's HTTP shapes: request bodies -> `GenerationRequest`, answers and errors -> JSON objects. Pure values.

What a body may hold, for both endpoints (null stands for a default everywhere):

    model                       the served model's name, its label, or 4+ hex digits of its id; absent: the served model
    max_tokens                  1 or more; from n_ctx on it means "to the end of the context"
    temperature, top_p          as OpenAI; 0 is greedy
    presence_, frequency_penalty
    top_k, min_p                llama.cpp's extensions; top_k 0 or -1 keeps all
    seed                        any 64-bit integer, folded into llama.cpp's 32 bits; -1 draws one, as in llama.cpp
    stop                        a string or up to 16 of them
    stream, stream_options      {"include_usage": true} adds a last chunk with the counts

A parameter that would change the answer in a way that we cannot honour is refused (`_REFUSED`). Others, like `user`
or `metadata`, are ignored, as are names that OpenAI does not define.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from swarm.backbone.requests import FinishReason, GenerationRequest, SamplingParams, TextDelta
from swarm.errors import ExpertUnavailable, Overloaded, UserError
from swarm.gateway.chat_template import Message

Json = dict[str, Any]
T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat goes on to the end of the context
# More bytes for each token of context cannot be a prompt that fits. Vocabularies hold longer tokens (runs of up to 128
# spaces), but no text is made of those alone: ordinary text has 2 to 5. Tokenising what is refused here would take seconds.
MAX_BYTES_PER_TOKEN = 64
MAX_STOPS = 16  # OpenAI takes 4; llama.cpp's clients send a few more
MAX_STOP_CHARS = 1024  # guessed
MAX_TOKEN_ID = 2**31 - 1  # llama_token is an int32
EXPERT_RETRY_S = 5.0  # guessed: a lost peer's replacement is found, or the peer is back

ROLES = ("system", "user", "assistant")

# Parameter -> (values that ask for nothing, why others are refused).
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "one answer per request: send the request again for another"),
    "best_of": ((1,), "one answer per request"),
    "suffix": (("",), "text cannot be inserted before a suffix"),
    "logprobs": ((False,), "log probabilities are not returned"),
    "top_logprobs": ((0,), "log probabilities are not returned"),
    "logit_bias": (({},), "logits cannot be biased"),
    "response_format": (({"type": "text"},), 'answers are plain text: only {"type": "text"} is served'),
    "grammar": (("",), "answers cannot be held to a grammar"),
    "json_schema": (({},), "answers cannot be held to a schema"),
    "tools": (([],), "tools are not served"),
    "tool_choice": (("none", "auto"), "tools are not served"),
    "functions": (([],), "tools are not served"),
    "function_call": (("none", "auto"), "tools are not served"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "predicted outputs are not served"),
    "web_search_options": ((), "the web is not searched"),
}


class RequestRefused(UserError):
    """A request that OpenAI's protocol, or this gateway, does not allow.

    Attributes:
        param: the parameter at fault, if one is.
        code: OpenAI's word for it, if there is one.
        status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model behind a gateway: `label@8hex`, and its context."""

    name: str
    n_ctx: int

    def is_called(self, text: str) -> bool:
        """Return whether `text` is the name, its label, or at least 4 digits of its id's first 8."""
        label, _, short_id = self.name.rpartition("@")
        return text in (self.name, label) or (len(text) >= 4 and short_id.startswith(text.lower()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What both endpoints read from a body, but for the prompt."""

    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    is_stream: bool
    include_usage: bool

    def generation(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        """Return the request for the engine. Special tokens written in a prompt count as such, as in llama.cpp."""
        return GenerationRequest(
            prompt=prompt, max_tokens=self.max_tokens, sampling=self.sampling, stop=self.stop, parse_special=True
        )


def parse_completion(body: object, served: ServedModel) -> tuple[Call, str | tuple[int, ...], str]:
    """Return the call, its prompt, and the text to echo before the answer. Raises RequestRefused."""
    fields = _fields(body, served)
    prompt = _prompt(fields.get("prompt"), served)
    echo = _value(fields, "echo", bool, False)
    if echo and not isinstance(prompt, str):
        raise RequestRefused("a prompt of token ids cannot be echoed: send it as text", param="echo")
    max_tokens = _max_tokens(fields, "max_tokens", served.n_ctx, default=DEFAULT_COMPLETION_TOKENS)
    return _call(fields, max_tokens), prompt, prompt if echo and isinstance(prompt, str) else ""


def parse_chat(body: object, served: ServedModel) -> tuple[Call, tuple[Message, ...]]:
    """Return the call and the conversation to render. Raises RequestRefused."""
    fields = _fields(body, served)
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    if len(turns) > served.n_ctx:  # each is at least one token
        raise _too_long("messages", f"got {len(turns)} messages, expected at most {served.n_ctx}")
    messages = tuple(_message(turn, f"messages[{index}]") for index, turn in enumerate(turns))
    _check_bytes(sum(len(message.content.encode()) for message in messages), served, "messages")
    name = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return _call(fields, _max_tokens(fields, name, served.n_ctx, default=None)), messages


def check_prompt(prompt: str, served: ServedModel, param: str) -> None:
    """Raise RequestRefused if a text has too many bytes for the model's context, before it is tokenised."""
    _check_bytes(len(prompt), served, param)  # at least as many bytes: what is far too long need not be encoded
    _check_bytes(len(prompt.encode(errors="replace")), served, param)


def _check_bytes(n_bytes: int, served: ServedModel, param: str) -> None:
    limit = served.n_ctx * MAX_BYTES_PER_TOKEN
    if n_bytes > limit:
        raise _too_long(param, f"got {n_bytes} bytes, expected at most {limit} for {served.n_ctx} tokens of context")


def _too_long(param: str, what: str) -> RequestRefused:
    return RequestRefused(f"the prompt is too long: {what}", param=param, code="context_length_exceeded")


def _fields(body: object, served: ServedModel) -> Json:
    """Return the body's fields once the model is ours and nothing is asked that we refuse."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the body must be a JSON object: got {_kind(body)}")
    model = _value(body, "model", str, "")
    if model and not served.is_called(model):
        raise RequestRefused(
            f"the model {model[:100]!r} is not served here: expected {served.name}",
            param="model",
            code="model_not_found",
            status=404,
        )
    for name, (harmless, reason) in _REFUSED.items():
        value = body.get(name)
        # 1 == True and 0 == False in Python, not in JSON
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise RequestRefused(f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")
    return body


def _call(fields: Json, max_tokens: int | None) -> Call:
    options = _value(fields, "stream_options", dict, {})
    return Call(
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        stop=_stop(fields.get("stop")),
        is_stream=_value(fields, "stream", bool, False),
        include_usage=_value(options, "include_usage", bool, False, param="stream_options.include_usage"),
    )


def _sampling(fields: Json) -> SamplingParams:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    given: dict[str, Any] = {name: _number(fields, name) for name in names if fields.get(name) is not None}
    top_k = _value(fields, "top_k", int, 0)
    given["top_k"] = 0 if top_k == -1 else min(top_k, MAX_TOKEN_ID)
    seed = _value(fields, "seed", int, -1)
    if not -(2**63) <= seed < 2**63:
        raise RequestRefused("seed out of range: expected a 64-bit integer", param="seed")
    given["seed"] = None if seed == -1 else seed % 0xFFFF_FFFF  # that number itself asks llama.cpp for a random seed
    for name, value in given.items():  # one by one, so that the error names its parameter
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise RequestRefused(str(error), param=name) from error
    return SamplingParams(**given)


def _max_tokens(fields: Json, name: str, n_ctx: int, *, default: int | None) -> int | None:
    value = fields.get(name)
    n_tokens = default if value is None else _value(fields, name, int, 0)
    if n_tokens is not None and n_tokens < 1:
        raise RequestRefused(f"{name} out of range: got {n_tokens}, expected 1 or more", param=name)
    return None if n_tokens is None or n_tokens >= n_ctx else n_tokens


def _stop(value: object) -> tuple[str, ...]:
    stops: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise RequestRefused(f"too many stop strings: got {len(stops)}, expected at most {MAX_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestRefused(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters", param="stop")
    return tuple(_text(stop, "stop") for stop in stops)


def _prompt(value: object, served: ServedModel) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise RequestRefused(f"one prompt per request: got {len(value)}", param="prompt")
        value = value[0]
    if isinstance(value, str):
        check_prompt(value, served, "prompt")
        return _text(value, "prompt")
    if isinstance(value, list) and len(value) > served.n_ctx:
        raise _too_long("prompt", f"got {len(value)} tokens, expected at most {served.n_ctx - 1}")
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value):
        return tuple(value)
    raise RequestRefused("prompt must be a string, a list with one string, or a list of token ids", param="prompt")


def _message(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise RequestRefused(f"{where} must be an object: got {_kind(turn)}", param=where)
    role = turn.get("role")
    if role == "developer":  # OpenAI's newer word, which templates do not know
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        raise RequestRefused(f"{where}.role must be one of {', '.join(ROLES)}, developer", param=f"{where}.role")
    if turn.get("tool_calls") or turn.get("function_call"):
        raise RequestRefused(
            f"{where}: tools are not served", param=f"{where}.tool_calls", code="unsupported_parameter"
        )
    content = turn.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestRefused(f"{where}.content must be text, or a list of text parts", param=f"{where}.content")
        texts.append(_text(text, f"{where}.content"))
    return Message(role=role, content="".join(texts))


def _value(fields: Json, name: str, kind: type[T], default: T, *, param: str | None = None) -> T:
    """Return a field of exactly this type (True is no int), or the default when absent or null."""
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise RequestRefused(
            f"{param or name} has a wrong type: got {_kind(value)}, expected {_KINDS[kind]}", param=param or name
        )
    return value


def _number(fields: Json, name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float):
        raise RequestRefused(f"{name} has a wrong type: got {_kind(value)}, expected a number", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number  # its range is SamplingParams' affair; infinity is in none


def _text(text: str, param: str) -> str:
    """Return the text if it can be written as UTF-8: JSON's escapes can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"{param} holds half of a surrogate pair", param=param) from error
    return text


_KINDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS[type(value)]


def usage_of(last: TextDelta) -> Json:
    """Return the counts of a finished answer."""
    n_prompt, n_completion = last.n_prompt_tokens, last.n_completion_tokens
    return {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Shapes one answer, whole or as the chunks of a stream.

    Attributes:
        created: Unix time, in seconds.
        has_usage: every chunk then carries `usage`, null but in the last.
    """

    answer_id: str
    created: int
    model: str
    has_usage: bool = False

    def _object(self, kind: str, choices: list[Json]) -> Json:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def _chunk(self, kind: str, choice: Json, finish_reason: FinishReason | None) -> Json:
        choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}]
        return {**self._object(kind, choices), **({"usage": None} if self.has_usage else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer(Answer):
    """`chat.completion` and its chunks."""

    def whole(self, text: str, last: TextDelta) -> Json:
        """Return the answer in one piece."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": last.finish_reason}
        return {**self._object("chat.completion", [choice]), "usage": usage_of(last)}

    def opening(self) -> list[Json]:
        """Return the chunks that come before the first text."""
        return [self._delta({"role": "assistant", "content": ""})]

    def text(self, text: str) -> Json:
        """Return the chunk for a piece of text."""
        return self._delta({"content": text})

    def closing(self, last: TextDelta) -> list[Json]:
        """Return the chunks that come after the last text."""
        counts = {**self._object("chat.completion.chunk", []), "usage": usage_of(last)}
        return [self._delta({}, last.finish_reason), *([counts] if self.has_usage else [])]

    def _delta(self, delta: Json, finish_reason: FinishReason | None = None) -> Json:
        return self._chunk("chat.completion.chunk", {"delta": delta}, finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer(Answer):
    """`text_completion`, whose chunks have the same shape.

    Attributes:
        echo: text to put before the answer.
    """

    echo: str = ""

    def whole(self, text: str, last: TextDelta) -> Json:
        """Return the answer in one piece."""
        choice = {"index": 0, "text": self.echo + text, "logprobs": None, "finish_reason": last.finish_reason}
        return {**self._object("text_completion", [choice]), "usage": usage_of(last)}

    def opening(self) -> list[Json]:
        """Return the chunks that come before the first text."""
        return [self.text(self.echo)] if self.echo else []

    def text(self, text: str) -> Json:
        """Return the chunk for a piece of text."""
        return self._chunk("text_completion", {"text": text}, None)

    def closing(self, last: TextDelta) -> list[Json]:
        """Return the chunks that come after the last text."""
        finish = self._chunk("text_completion", {"text": ""}, last.finish_reason)
        counts = {**self._object("text_completion", []), "usage": usage_of(last)}
        return [finish, *([counts] if self.has_usage else [])]


def model_entry(served: ServedModel, created: int) -> Json:
    """Return the model as `/v1/models` lists it; `meta` is where llama.cpp tells of the context too."""
    meta = {"n_ctx": served.n_ctx}
    return {"id": served.name, "object": "model", "created": created, "owned_by": "swarm", "meta": meta}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as a client sees it.

    Attributes:
        fields: more of the error object, beside OpenAI's four.
        retry_after_s: when to try again, if that may help.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    fields: Mapping[str, object] | None = None
    retry_after_s: float | None = None

    def body(self) -> Json:
        """Return the JSON object; also what a stream sends in place of its next chunk."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**error, **(self.fields or {})}}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that belong to it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def error_answer(error: Exception) -> ErrorAnswer:
    """Return what to tell a client. An exception that is not expected here tells nothing: status 500."""
    match error:
        case RequestRefused():
            return ErrorAnswer(status=error.status, message=str(error), param=error.param, code=error.code)
        case UserError():
            return ErrorAnswer(status=400, message=str(error))
        case ExpertUnavailable():
            return ErrorAnswer(
                status=503,
                message=str(error),
                kind="server_error",
                code="expert_unavailable",
                fields={"layer": error.layer, "experts": list(error.experts)},
                retry_after_s=EXPERT_RETRY_S,
            )
        case Overloaded():
            return ErrorAnswer(
                status=429,
                message=str(error),
                kind="rate_limit_error",
                code="overloaded",
                retry_after_s=error.retry_after_s,
            )
        case _:
            return ErrorAnswer(status=500, message="internal error", kind="server_error", code="internal_error")
