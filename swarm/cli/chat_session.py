"""A conversation with an OpenAI-compatible gateway: asks, streams the answer, keeps the turns."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from swarm.errors import NetworkError, SwarmError, UserError

CONNECT_TIMEOUT_S = 10.0
# Between two pieces of an answer; a long prompt is computed before the first. As long as the gateway's own line (guessed).
READ_TIMEOUT_S = 330.0
MAX_EVENT_BYTES = (
    8 << 20
)  # of one server-sent event; an answer's pieces are a few hundred bytes, a trace may have 1.5 MB
MAX_TOLD_CHARS = 500  # of an error that is no JSON


class AnswerFailed(SwarmError):
    """The gateway said so; its own words are the message."""


@dataclass(slots=True)
class AnswerStats:
    """Of one answer; seconds."""

    n_prompt_tokens: int = 0
    n_completion_tokens: int = 0
    first_piece_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first, whose time is the prompt's."""
        writing_s = self.total_s - self.first_piece_s
        return (self.n_completion_tokens - 1) / writing_s if self.n_completion_tokens > 1 and writing_s > 0 else 0.0


@dataclass(slots=True)
class ChatSession:
    """Use as `async with`. `turns` may be changed between answers.

    Attributes:
        url: of the API, ending in /v1.
        model: empty asks for whatever is served.
        options: more of the request's body, such as temperature.
        headers: more of the request's.
        trace: where the last answer's time went, if a header asked for it (X-Swarm-Trace).
    """

    url: str
    model: str = ""
    api_key: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)
    last: AnswerStats = field(default_factory=AnswerStats)
    headers: dict[str, str] = field(default_factory=dict)
    trace: dict[str, Any] | None = None
    _http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = self.headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=MAX_EVENT_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def served_model(self) -> str:
        """Return the name of what is served. Raises NetworkError, AnswerFailed."""
        try:
            async with self._client.get(f"{self.url}/models") as response:
                body = await _body(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.url} is no OpenAI-compatible API: it lists no model") from None

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        """Yield the answer's pieces. Turns are kept when it ends, also where the caller closes it in the middle.

        Raises:
            AnswerFailed: the gateway refused, or failed in the middle.
            NetworkError: it cannot be reached, or hung up.
        """
        started = time.monotonic()
        self.last = stats = AnswerStats()
        pieces: list[str] = []
        question = {"role": "user", "content": text}
        body = {
            **({"model": self.model} if self.model else {}),
            **self.options,
            "messages": [*self.turns, question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with (
                self._client.post(f"{self.url}/chat/completions", json=body) as response,
                aclosing(_events(response)) as events,
            ):
                async for event in events:
                    piece = _take(event, stats)
                    self.trace = event.get("swarm_trace", self.trace)
                    if piece and not pieces:
                        stats.first_piece_s = time.monotonic() - started
                    if piece:
                        pieces.append(piece)
                        yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        finally:
            stats.total_s = time.monotonic() - started
            if pieces:
                self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]
            if not stats.n_completion_tokens:  # stopped before the counts came
                stats.n_completion_tokens = len(pieces)

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise NetworkError("the session is closed")
        return self._http

    def _unreachable(self, error: Exception) -> NetworkError:
        return NetworkError(f"no answer from {self.url}: {str(error) or type(error).__name__}")


def _take(event: Any, stats: AnswerStats) -> str:
    """Return a chunk's text, and count."""
    if not isinstance(event, dict):
        raise AnswerFailed("the gateway sent something that is no chunk of an answer")
    if "error" in event:
        raise AnswerFailed(_told(event))
    usage = event.get("usage")
    if isinstance(usage, dict):
        stats.n_prompt_tokens = int(usage.get("prompt_tokens", 0))
        stats.n_completion_tokens = int(usage.get("completion_tokens", 0))
    for choice in event.get("choices") or ():
        stats.finish_reason = choice.get("finish_reason") or stats.finish_reason
        return str((choice.get("delta") or {}).get("content") or "")
    return ""


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[Any, None]:
    """Yield the JSON of each server-sent event up to `[DONE]`."""
    if response.status != 200:
        raise AnswerFailed(_told(await _body(response)))
    while True:
        try:
            line = await response.content.readline()
        except ValueError as error:  # longer than the buffer
            raise AnswerFailed("the gateway sent an event without an end") from error
        if not line:
            raise NetworkError("the gateway hung up in the middle of the answer")
        name, _, data = line.decode(errors="replace").strip().partition(":")
        if name != "data":
            continue
        if data.strip() == "[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError:
            raise AnswerFailed("the gateway sent an event that is no JSON") from None


async def _body(response: aiohttp.ClientResponse) -> Any:
    """Return an answer's JSON; raises AnswerFailed for an error."""
    text = (await response.content.read(MAX_EVENT_BYTES)).decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = {"error": {"message": f"HTTP {response.status}: {text[:MAX_TOLD_CHARS]}"}}
    if response.status != 200:
        raise AnswerFailed(_told(body))
    return body


def _told(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the gateway failed without a reason")
