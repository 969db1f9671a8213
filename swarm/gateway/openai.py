"""OpenAI's request bodies -> `GenerationRequest`. Pure values; answers and errors are in `answers` and `errors`.

What a body may hold, for both endpoints (null stands for a default everywhere):

    model                       the served model's name, its label, or 4+ hex digits of its id; absent: the served model
    max_tokens                  1 or more; from n_ctx on it means "to the end of the context"
    temperature, top_p          as OpenAI; 0 is greedy
    presence_, frequency_penalty
    top_k, min_p                llama.cpp's extensions; top_k 0 or -1 keeps all
    repeat_penalty              likewise; also called repetition_penalty
    logit_bias                  {"token id": -100 to 100}, or llama.cpp's list of [id, bias], where false bans the token
    seed                        any 64-bit integer, folded into llama.cpp's 32 bits; -1 draws one, as in llama.cpp
    stop                        a string or up to 16 of them
    ignore_eos                  vLLM's and llama.cpp's: never end before max_tokens
    stream, stream_options      {"include_usage": true} adds a last chunk with the counts
    n                           so many answers, with seeds that count up
    response_format             text, json_object, json_schema; also llama.cpp's json_schema and grammar (GBNF)
    logprobs                    of chats a boolean, with top_logprobs; of completions a number

Of chats: tools, tool_choice, parallel_tool_calls (`tools`); chat_template_kwargs and reasoning_effort, which the template reads.

A parameter that would change the answer in a way that we cannot honour is refused (`refused`). Others, like `user`
or `metadata`, are ignored, as are names that OpenAI does not define.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swarm.backbone.requests import GenerationRequest, Grammar, GrammarKind, SamplingParams
from swarm.gateway.chat_template import Message
from swarm.gateway.errors import Json, RequestRefused
from swarm.gateway.refused import check_refused
from swarm.gateway.tools import Tool, ToolChoice

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat goes on to the end of the context
# More bytes for each token of context cannot be a prompt that fits. Vocabularies hold longer tokens (runs of up to 128
# spaces), but no text is made of those alone: ordinary text has 2 to 5. Tokenising what is refused here would take seconds.
MAX_BYTES_PER_TOKEN = 64
MAX_STOPS = 16  # OpenAI takes 4; llama.cpp's clients send a few more
MAX_STOP_CHARS = 1024  # guessed
MAX_TOKEN_ID = 2**31 - 1  # llama_token is an int32
LLAMA_SEEDS = 0xFFFF_FFFF  # seeds are below it: that number itself asks llama.cpp for a random one
MAX_ANSWERS = 16  # of one request; guessed
MAX_LOGPROBS = 20  # OpenAI's
MAX_BIASES = 1024  # guessed
MAX_TOOLS, MAX_TOOL_NAME_CHARS = 128, 64  # OpenAI's
MAX_DETOKENIZED = 1 << 20  # guessed

ROLES = ("system", "user", "assistant", "tool")


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
    """What both endpoints read from a body, but for the prompt.

    Attributes:
        n: how many answers.
        tools: what a chat's answer may call.
        template_variables: what a chat's template reads beside the messages.
        ignores_end: go on to `max_tokens`, whatever is drawn.
    """

    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    n: int = 1
    n_logprobs: int | None = None
    grammar: Grammar | None = None
    tools: ToolChoice = field(default_factory=ToolChoice)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    ignores_end: bool = False

    def generation(
        self,
        prompt: str | tuple[int, ...],
        *,
        index: int = 0,
        grammar: Grammar | None = None,
        is_traced: bool = False,
    ) -> GenerationRequest:
        """Return the request for the engine. Special tokens written in a prompt count as such, as in llama.cpp.

        Args:
            index: of the `n` answers; each has its own seed.
            grammar: in place of the call's own.
            is_traced: tell where the time went; of the first answer.
        """
        sampling = self.sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + index) % LLAMA_SEEDS)
        return GenerationRequest(
            prompt=prompt,
            max_tokens=self.max_tokens,
            sampling=sampling,
            stop=self.stop,
            parse_special=True,
            grammar=grammar or self.grammar,
            n_logprobs=self.n_logprobs,
            shows_special=bool(self.tools.tools),
            is_traced=is_traced and index == 0,
            is_stream=self.is_stream,
            ignores_end=self.ignores_end,
        )


def parse_completion(body: object, served: ServedModel) -> tuple[Call, str | tuple[int, ...], str]:
    """Return the call, its prompt, and the text to echo before the answer. Raises RequestRefused."""
    fields = _fields(body, served)
    prompt = _prompt(fields.get("prompt"), served)
    echo = _value(fields, "echo", bool, False)
    if echo and not isinstance(prompt, str):
        raise RequestRefused("a prompt of token ids cannot be echoed: send it as text", param="echo")
    max_tokens = _max_tokens(fields, "max_tokens", served.n_ctx, default=DEFAULT_COMPLETION_TOKENS)
    n_logprobs = None if fields.get("logprobs") is False else _ranged(fields, "logprobs", 0, MAX_LOGPROBS)
    if echo and n_logprobs is not None:
        raise RequestRefused("a prompt's log probabilities are not returned: leave out echo", param="logprobs")
    best_of, n = (_ranged(fields, name, 1, MAX_ANSWERS) or 1 for name in ("best_of", "n"))
    if best_of > n:
        raise RequestRefused(
            "best_of is not supported: all n answers are returned", param="best_of", code="unsupported_parameter"
        )
    call = replace(_call(fields, max_tokens), n_logprobs=n_logprobs)
    return call, prompt, prompt if echo and isinstance(prompt, str) else ""


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
    call = _call(fields, _max_tokens(fields, name, served.n_ctx, default=None))
    tools = _tool_choice(fields)
    if tools.is_required and call.grammar is not None:
        raise RequestRefused("an answer cannot be a tool's call and follow a response_format", param="tool_choice")
    has_logprobs = _value(fields, "logprobs", bool, False)
    n_top = _ranged(fields, "top_logprobs", 0, MAX_LOGPROBS) or 0
    if n_top and not has_logprobs:
        raise RequestRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
    variables = _value(fields, "chat_template_kwargs", dict, {})
    if effort := _value(fields, "reasoning_effort", str, ""):
        variables = {"reasoning_effort": _text(effort, "reasoning_effort"), **variables}
    return replace(
        call, tools=tools, n_logprobs=n_top if has_logprobs else None, template_variables=variables
    ), messages


def parse_tokenize(body: object, served: ServedModel) -> GenerationRequest:
    """Return what to tokenise, of llama.cpp's `/tokenize`. Raises RequestRefused."""
    fields = _fields(body, served)
    content = _value(fields, "content", str, "")
    check_prompt(content, served, "content")
    return GenerationRequest(
        prompt=_text(content, "content"),
        parse_special=_value(fields, "parse_special", bool, True),
        add_special=_value(fields, "add_special", bool, False),
    )


def parse_detokenize(body: object, served: ServedModel) -> tuple[int, ...]:
    """Return the tokens of llama.cpp's `/detokenize`. Raises RequestRefused."""
    tokens = _fields(body, served).get("tokens")
    if not isinstance(tokens, list) or len(tokens) > MAX_DETOKENIZED or any(type(each) is not int for each in tokens):
        raise RequestRefused(f"tokens must be a list of at most {MAX_DETOKENIZED} token ids", param="tokens")
    return tuple(tokens)


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
    check_refused(body)
    return body


def _call(fields: Json, max_tokens: int | None) -> Call:
    options = _value(fields, "stream_options", dict, {})
    return Call(
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        stop=_stop(fields.get("stop")),
        is_stream=_value(fields, "stream", bool, False),
        include_usage=_value(options, "include_usage", bool, False, param="stream_options.include_usage"),
        n=_ranged(fields, "n", 1, MAX_ANSWERS) or 1,
        grammar=_grammar(fields),
        ignores_end=_value(fields, "ignore_eos", bool, False),
    )


def _grammar(fields: Json) -> Grammar | None:
    """Return what the answer is held to, by whichever of the parameters says so."""
    form = _value(fields, "response_format", dict, {})
    found: list[Grammar] = []
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            name = "value" if form.get("schema") is None else "schema"  # Hugging Face's client, and llama.cpp's
            schema = _value(form, name, dict, {"type": "object"}, param="response_format")
            found.append(_schema(schema))
        case "json_schema":
            outer = _value(form, "json_schema", dict, {}, param="response_format.json_schema")
            given = outer.get("schema", form.get("schema"))
            if not isinstance(given, dict):
                raise RequestRefused("response_format.json_schema.schema must be an object", param="response_format")
            found.append(_schema(given))
        case other:
            raise RequestRefused(
                f"response_format.type is not supported: got {str(other)[:50]!r}, expected text, json_object or json_schema",
                param="response_format",
                code="unsupported_parameter",
            )
    if schema := _value(fields, "json_schema", dict, {}):
        found.append(_schema(schema))
    if text := _value(fields, "grammar", str, ""):
        found.append(Grammar(kind=GrammarKind.GBNF, text=_text(text, "grammar")))
    if len(found) > 1:
        raise RequestRefused("give one of response_format, json_schema and grammar", param="response_format")
    return found[0] if found else None


def _schema(schema: Json) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def _tool_choice(fields: Json) -> ToolChoice:
    given = _value(fields, "tools", list, [])
    if len(given) > MAX_TOOLS:
        raise RequestRefused(f"too many tools: got {len(given)}, expected at most {MAX_TOOLS}", param="tools")
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(given))
    has_several = _value(fields, "parallel_tool_calls", bool, True)
    choice = fields.get("tool_choice")
    match choice:
        case None | "auto":
            return ToolChoice(tools=tools, has_several=has_several)
        case "none":
            return ToolChoice()
        case "required":
            chosen = tools
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = tuple(tool for tool in tools if tool.name == name)
        case _:
            chosen = ()
    if not chosen:
        raise RequestRefused("tool_choice must be none, auto, required, or name one of the tools", param="tool_choice")
    return ToolChoice(tools=chosen, is_required=True, has_several=has_several)


def _tool(given: object, where: str) -> Tool:
    function = (
        given.get("function") if isinstance(given, dict) and given.get("type", "function") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS:
        raise RequestRefused(f"{where} must be a function with a name", param=where)
    return Tool(
        name=_text(name, where),
        description=_text(_value(function, "description", str, "", param=f"{where}.description"), where),
        parameters=_value(
            function, "parameters", dict, {"type": "object", "properties": {}}, param=f"{where}.parameters"
        ),
    )


def _sampling(fields: Json) -> SamplingParams:
    if fields.get("repeat_penalty") is None and fields.get("repetition_penalty") is not None:
        fields = {**fields, "repeat_penalty": fields["repetition_penalty"]}
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty")
    given: dict[str, Any] = {name: _number(fields, name) for name in names if fields.get(name) is not None}
    given["logit_bias"] = _logit_bias(fields.get("logit_bias"))
    top_k = _value(fields, "top_k", int, 0)
    given["top_k"] = 0 if top_k == -1 else min(top_k, MAX_TOKEN_ID)
    seed = _value(fields, "seed", int, -1)
    if not -(2**63) <= seed < 2**63:
        raise RequestRefused("seed out of range: expected a 64-bit integer", param="seed")
    given["seed"] = None if seed == -1 else seed % LLAMA_SEEDS
    for name, value in given.items():  # one by one, so that the error names its parameter
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise RequestRefused(str(error), param=name) from error
    return SamplingParams(**given)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs: list[Any] = [] if value is None else list(value.items()) if isinstance(value, dict) else [value]
    if isinstance(value, list):
        pairs = value
    if len(pairs) > MAX_BIASES:
        raise RequestRefused(f"too many biases: got {len(pairs)}, expected at most {MAX_BIASES}", param="logit_bias")
    found: list[tuple[int, float]] = []
    for pair in pairs:
        match pair:
            case (str(text), bias) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_TOKEN_ID)):
                token = int(text)
            case (int(token), bias) | [int(token), bias]:
                pass
            case _:
                raise RequestRefused("logit_bias must map token ids to numbers", param="logit_bias")
        if bias is False and 0 <= token <= MAX_TOKEN_ID:
            found.append((token, -math.inf))
        elif type(bias) in (int, float) and -100 <= bias <= 100 and 0 <= token <= MAX_TOKEN_ID:
            found.append((token, float(bias)))
        else:
            raise RequestRefused("logit_bias out of range: expected token ids and -100 to 100", param="logit_bias")
    return tuple(found)


def _ranged(fields: Json, name: str, least: int, most: int) -> int | None:
    """Return an integer field, None where it is absent."""
    if fields.get(name) is None:
        return None
    value = _value(fields, name, int, least)
    if not least <= value <= most:
        raise RequestRefused(f"{name} out of range: got {value}, expected {least} to {most}", param=name)
    return value


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
    calls = tuple(_past_call(call, where) for call in _value(turn, "tool_calls", list, [], param=f"{where}.tool_calls"))
    if calls and role != "assistant":
        raise RequestRefused(f"{where}.tool_calls belongs to an assistant's turn", param=f"{where}.tool_calls")
    content = turn.get("content")
    if content is None and calls:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestRefused(f"{where}.content must be text, or a list of text parts", param=f"{where}.content")
        texts.append(_text(text, f"{where}.content"))
    answered = name = ""
    if role == "tool":
        answered = _text(_value(turn, "tool_call_id", str, "", param=f"{where}.tool_call_id"), where)
        name = _text(_value(turn, "name", str, "", param=f"{where}.name"), where)
    return Message(
        role=role, content="".join(texts), tool_calls=calls, tool_call_id=answered or None, name=name or None
    )


def _past_call(call: object, where: str) -> Json:
    """Return a call of an earlier turn as templates read it: with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{where}.tool_calls must hold calls of functions", param=f"{where}.tool_calls")
    arguments: Any = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # a model wrote it: shown as it is
            pass
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


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
