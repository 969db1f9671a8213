"""Answers in OpenAI's shape, whole or as the chunks of a stream. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.backbone.requests import FinishReason, TextDelta, TokenLogprob
from swarm.gateway.errors import Json
from swarm.gateway.openai import ServedModel
from swarm.gateway.tools import CallReader, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one delta adds to an answer.

    Attributes:
        first_call, offset: calls and characters that came before it.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    first_call: int = 0
    offset: int = 0

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.logprobs)


@dataclass(slots=True, kw_only=True)
class Choice:
    """One of the answers to a request, as its deltas come.

    Attributes:
        reader: finds calls of tools in it; None: it is text.
        offset: characters of the tokens so far, after those that are echoed.
        last: its last delta, once it is there.
    """

    index: int = 0
    reader: CallReader | None = None
    offset: int = 0
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: TextDelta | None = None

    def feed(self, delta: TextDelta) -> Piece:
        """Take a delta in and return what may be shown of it."""
        text, calls = delta.text, list[ToolCall]()
        if self.reader is not None:
            text, calls = self.reader.feed(text)
            if delta.finish_reason is not None:
                rest, more = self.reader.finish()
                text, calls = text + rest, calls + more
        piece = Piece(
            text=text,
            calls=tuple(calls),
            logprobs=delta.logprobs,
            first_call=len(self.calls),
            offset=self.offset,
        )
        self.texts.append(text)
        self.calls += calls
        self.logprobs += delta.logprobs
        self.offset += sum(len(_text(each.piece)) for each in delta.logprobs)
        if delta.finish_reason is not None:
            self.last = delta
        return piece

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in OpenAI's words; None before."""
        if self.last is None:
            return None
        is_calling = self.calls and self.last.finish_reason is FinishReason.STOP
        return "tool_calls" if is_calling else self.last.finish_reason


def usage_of(choices: Sequence[Choice]) -> Json:
    """Return the counts of finished answers to one prompt."""
    lasts = [choice.last for choice in choices if choice.last is not None]
    n_prompt = lasts[0].n_prompt_tokens if lasts else 0
    n_completion = sum(last.n_completion_tokens for last in lasts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": lasts[0].n_cached_tokens if lasts else 0},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Shapes the answers to one request.

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

    def _chunk(
        self, kind: str, choice: Choice, content: Json, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        choices = [{"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}]
        return {**self._object(kind, choices), **({"usage": None} if self.has_usage else {})}

    def _counts(self, kind: str, choices: Sequence[Choice]) -> list[Json]:
        last = {**({"usage": usage_of(choices)} if self.has_usage else {}), **_trace_of(choices)}
        return [{**self._object(kind, []), **last}] if last else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer(Answer):
    """`chat.completion` and its chunks."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the finished answers in one piece."""
        shaped = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return {**self._object("chat.completion", shaped), "usage": usage_of(choices), **_trace_of(choices)}

    def opening(self, choice: Choice) -> list[Json]:
        """Return the chunks that come before an answer's first text."""
        return [self._delta(choice, {"role": "assistant", "content": ""})]

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """Return the chunks of what came in."""
        chunks = []
        if piece.text or piece.logprobs:
            chunks.append(self._delta(choice, {"content": piece.text}, logprobs=_chat_logprobs(piece.logprobs)))
        for index, call in enumerate(piece.calls, piece.first_call):
            chunks.append(self._delta(choice, {"tool_calls": [{"index": index, **self._call(choice, index, call)}]}))
        return chunks

    def closing(self, choice: Choice) -> list[Json]:
        """Return the chunks that come after an answer's last text."""
        return [self._delta(choice, {}, choice.finish_reason)]

    def end(self, choices: Sequence[Choice]) -> list[Json]:
        """Return the chunks that come after all answers."""
        return self._counts("chat.completion.chunk", choices)

    def _message(self, choice: Choice) -> Json:
        text = "".join(choice.texts)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [self._call(choice, index, call) for index, call in enumerate(choice.calls)]
        return message

    def _call(self, choice: Choice, index: int, call: ToolCall) -> Json:
        call_id = f"call_{self.answer_id.rpartition('-')[2]}_{choice.index}_{index}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _delta(
        self, choice: Choice, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        return self._chunk("chat.completion.chunk", choice, {"delta": delta}, finish_reason, logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer(Answer):
    """`text_completion`, whose chunks have the same shape.

    Attributes:
        echo: text to put before each answer.
    """

    echo: str = ""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the finished answers in one piece."""
        shaped = [
            {
                "index": choice.index,
                "text": self.echo + "".join(choice.texts),
                "logprobs": _completion_logprobs(choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return {**self._object("text_completion", shaped), "usage": usage_of(choices), **_trace_of(choices)}

    def opening(self, choice: Choice) -> list[Json]:
        """Return the chunks that come before an answer's first text."""
        return [self._chunk("text_completion", choice, {"text": self.echo})] if self.echo else []

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """Return the chunks of what came in."""
        logprobs = _completion_logprobs(piece.logprobs, piece.offset)
        return [self._chunk("text_completion", choice, {"text": piece.text}, None, logprobs)] if piece else []

    def closing(self, choice: Choice) -> list[Json]:
        """Return the chunks that come after an answer's last text."""
        return [self._chunk("text_completion", choice, {"text": ""}, choice.finish_reason)]

    def end(self, choices: Sequence[Choice]) -> list[Json]:
        """Return the chunks that come after all answers."""
        return self._counts("text_completion", choices)


def _trace_of(choices: Sequence[Choice]) -> Json:
    """Return where the first answer's time went, if that was asked for; a field of ours beside OpenAI's."""
    traces = (choice.last.trace for choice in choices if choice.last is not None and choice.last.trace is not None)
    return {"swarm_trace": trace} if (trace := next(traces, None)) is not None else {}


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> Json | None:
    def shaped(piece: bytes, logprob: float) -> Json:
        return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}

    if not entries:
        return None
    content = [
        {**shaped(each.piece, each.logprob), "top_logprobs": [shaped(*other) for other in each.likeliest]}
        for each in entries
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(entries: Sequence[TokenLogprob], offset: int) -> Json | None:
    if not entries:
        return None
    tokens = [_text(each.piece) for each in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(each.logprob) for each in entries],
        "top_logprobs": [{_text(piece): _finite(logprob) for piece, logprob in each.likeliest} for each in entries],
        "text_offset": [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))],
    }


def _finite(logprob: float) -> float:
    """Return a number that JSON has: OpenAI writes -9999 for what is next to impossible."""
    return max(logprob, -9999.0)


def model_entry(served: ServedModel, created: int) -> Json:
    """Return the model as `/v1/models` lists it; vLLM tells of the context in `max_model_len`, llama.cpp in `meta`."""
    entry = {"id": served.name, "object": "model", "created": created, "owned_by": "swarm"}
    return {**entry, "max_model_len": served.n_ctx, "meta": {"n_ctx": served.n_ctx}}
