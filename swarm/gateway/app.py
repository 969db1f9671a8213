"""The OpenAI-compatible HTTP server over one `TextGenerator`. Shapes and parsing are in `openai`; here is the plumbing.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models    GET /v1/models/{id}    GET /health
    GET /map    GET /map.json                            (`peer_map`)

- A stream's first step runs before its headers leave, so that an early failure has its own HTTP status. A later one
  is sent as `data: {"error": ...}`, and the connection closes without `[DONE]`.
- A client that hangs up, or stops reading for `stall_s`, has its generator closed, whatever the generator is doing.
- No CORS headers, and only bodies declared as `application/json`: so a web page that somebody has open cannot make
  its browser spend the swarm's work. Put a proxy in front to allow pages of your own. Such a page could still have its
  own name point to this machine (DNS rebinding) and so be of the same origin: with `allowed_hosts`, a request must call
  the gateway by a name of this machine alone, or by one that was allowed.
- Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, NoReturn

from aiohttp import web

from swarm.backbone.requests import GenerationRequest, TextDelta, TextGenerator
from swarm.errors import EngineError, UserError
from swarm.gateway.chat_template import ChatTemplate
from swarm.gateway.openai import (
    Call,
    ChatAnswer,
    CompletionAnswer,
    ErrorAnswer,
    Json,
    RequestRefused,
    ServedModel,
    check_prompt,
    error_answer,
    model_entry,
    parse_chat,
    parse_completion,
)
from swarm.gateway.peer_map import add_map
from swarm.net.addresses import is_loopback, parse_address

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024  # guessed: over a million tokens of text
STALL_S = 60.0  # guessed: a reader slower than this holds up others for nothing
WATCH_S = 0.05  # how soon a hang-up is seen between two steps; while writing it shows at once
STATUS_CLIENT_GONE = 499  # nginx's, for the access log: nobody is left to read it

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Middleware = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]


def create_app(
    generator: TextGenerator,
    *,
    status: Callable[[], dict[str, Any]] | None = None,
    stall_s: float = STALL_S,
    allowed_hosts: Collection[str] | None = None,
    peer_map: Callable[[], dict[str, Any]] | None = None,
) -> web.Application:
    """Return the gateway, to be run by aiohttp's runner.

    Args:
        status: what `/health` adds to its answer. A list `reasons` that is not empty makes it a 503.
        stall_s: how long a stream waits for a client that does not read.
        allowed_hosts: for a gateway that listens on loopback alone: names that a `Host` header may hold, besides
            `localhost` and loopback IP literals; a request with any other is refused. None takes every host.
        peer_map: what `/map.json` and `/map` show; None: there is none.
    """
    gateway = _Gateway(generator, status, stall_s)
    middlewares: list[Any] = [_shape_errors]
    if allowed_hosts is not None:
        middlewares.append(_host_check(frozenset(host.lower().removesuffix(".") for host in allowed_hosts)))
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", gateway.chat)
    app.router.add_post("/v1/completions", gateway.completion)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_get("/v1/models/{id:.+}", gateway.model)
    app.router.add_get("/health", gateway.health)
    if peer_map is not None:
        add_map(app, peer_map)
    return app


class _ClientGone(Exception):
    """The client hung up, or stopped reading."""


class _Gateway:
    def __init__(self, generator: TextGenerator, status: Callable[[], dict[str, Any]] | None, stall_s: float) -> None:
        self._generator = generator
        self._status = status
        self._stall_s = stall_s
        self._created = int(time.time())
        self._template: ChatTemplate | UserError
        try:
            self._template = ChatTemplate(generator.chat_template, generator.special_tokens)
        except UserError as error:  # /v1/completions works all the same
            logger.warning("chats will be refused: %s", error)
            self._template = error

    @property
    def _served(self) -> ServedModel:
        return ServedModel(name=self._generator.model_name, n_ctx=self._generator.n_ctx)

    async def models(self, request: web.Request) -> web.Response:
        return _json_response({"object": "list", "data": [model_entry(self._served, self._created)]})

    async def model(self, request: web.Request) -> web.Response:
        served = self._served
        if not served.is_called(request.match_info["id"]):
            message = f"the model {request.match_info['id'][:100]!r} is not served here: expected {served.name}"
            raise RequestRefused(message, param="model", code="model_not_found", status=404)
        return _json_response(model_entry(served, self._created))

    async def health(self, request: web.Request) -> web.Response:
        details = self._status() if self._status is not None else {}
        is_ok = not details.get("reasons")
        return _json_response({**details, "status": "ok" if is_ok else "unavailable"}, status=200 if is_ok else 503)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        served = self._served
        call, messages = parse_chat(await _read_json(request), served)
        if isinstance(self._template, UserError):
            raise RequestRefused(str(self._template))
        # In a thread: a slow template must not hold up the swarm's traffic. It ends by its own deadline.
        prompt = await asyncio.to_thread(self._template.render, messages)
        check_prompt(prompt, served, "messages")
        answer = ChatAnswer(
            answer_id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=served.name,
            has_usage=call.include_usage,
        )
        return await self._answer(request, call, call.generation(prompt), answer)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        served = self._served
        call, prompt, echo = parse_completion(await _read_json(request), served)
        answer = CompletionAnswer(
            answer_id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=served.name,
            has_usage=call.include_usage,
            echo=echo,
        )
        return await self._answer(request, call, call.generation(prompt), answer)

    async def _answer(
        self, request: web.Request, call: Call, generation: GenerationRequest, answer: ChatAnswer | CompletionAnswer
    ) -> web.StreamResponse:
        async def work() -> web.StreamResponse:
            response: web.StreamResponse | None = None
            try:
                async with contextlib.aclosing(self._generator.generate(generation)) as deltas:
                    respond = self._stream if call.is_stream else self._whole
                    response = await respond(request, answer, deltas)
            except Exception as error:
                told = _tell(error)
                if response is None:  # else closing failed, after the client had its answer
                    response = _error_response(told)
            return response

        return await _while_connected(request, work())

    async def _whole(
        self, request: web.Request, answer: ChatAnswer | CompletionAnswer, deltas: AsyncIterator[TextDelta]
    ) -> web.StreamResponse:
        texts: list[str] = []
        while True:
            delta = await _next(deltas)
            texts.append(delta.text)
            if delta.finish_reason is not None:
                _log_finish(answer.answer_id, delta)
                return _json_response(answer.whole("".join(texts), delta))

    async def _stream(
        self, request: web.Request, answer: ChatAnswer | CompletionAnswer, deltas: AsyncIterator[TextDelta]
    ) -> web.StreamResponse:
        delta = await _next(deltas)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would collect the chunks
            }
        )

        async def send(event: bytes) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(b"data: " + event + b"\n\n")
            except (ConnectionError, TimeoutError) as error:
                if request.transport is not None:
                    request.transport.abort()
                raise _ClientGone from error

        try:
            for chunk in answer.opening():
                await send(_encode(chunk))
            while True:
                if delta.text:
                    await send(_encode(answer.text(delta.text)))
                if delta.finish_reason is not None:
                    break
                delta = await _next(deltas)
            for chunk in answer.closing(delta):
                await send(_encode(chunk))
            await send(b"[DONE]")
            _log_finish(answer.answer_id, delta)
        except _ClientGone:
            logger.info("%s: the client went away after %d tokens", answer.answer_id, delta.n_completion_tokens)
        except Exception as error:
            response.force_close()
            with contextlib.suppress(_ClientGone):
                await send(_encode(_tell(error).body()))
        return response


async def _next(deltas: AsyncIterator[TextDelta]) -> TextDelta:
    try:
        return await anext(deltas)
    except StopAsyncIteration:
        raise EngineError("the answer ended too early: got no finish reason") from None


async def _while_connected(request: web.Request, work: Coroutine[Any, Any, web.StreamResponse]) -> web.StreamResponse:
    """Return what `work` answers, which must not raise; cancel it once the client is gone.

    aiohttp can cancel handlers itself (`handler_cancellation`), but only if whoever runs the app asks for it.
    """
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(work)
        gone = group.create_task(_until_gone(request))
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        gone.cancel()
    return web.Response(status=STATUS_CLIENT_GONE) if answer.cancelled() else answer.result()


async def _until_gone(request: web.Request) -> None:
    """Return once the connection is closed or closing; aiohttp has no event for it."""
    while (transport := request.transport) is not None and not transport.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(WATCH_S)


async def _read_json(request: web.Request) -> object:
    """Return the body's JSON value. Raises RequestRefused."""
    if request.content_type != "application/json":
        raise RequestRefused("send the body with Content-Type: application/json", status=415)
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES)
    data = await request.read()
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and endless digits are ValueErrors too
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise RequestRefused(f"the body is not valid JSON: {reason}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure in OpenAI's shape, aiohttp's own refusals too."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = {
            404: f"nothing is served at {request.method} {request.path[:200]}",
            405: f"{request.method} is not allowed here: expected {error.headers.get('Allow', 'another method')}",
            413: f"the body is too large: expected at most {MAX_BODY_BYTES} bytes",
        }.get(error.status, error.reason)
        response = _error_response(ErrorAnswer(status=error.status, message=message))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.RequestPayloadError:
        message = "the body cannot be read: its framing or compression is broken"
        response = _error_response(ErrorAnswer(status=400, message=message))
        response.force_close()  # where the next request would begin is unknown
        return response
    except ConnectionError:  # the client hung up in its body; aiohttp ends it quietly
        raise
    except Exception as error:
        return _error_response(_tell(error))


def _host_check(allowed: frozenset[str]) -> Middleware:
    """Return a middleware that refuses requests whose `Host` names neither this machine nor one of `allowed`."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        host = _without_port(hosts[0]) if len(hosts) == 1 else ""
        if not is_loopback(host) and host not in allowed:
            shown = ", ".join(hosts)[:100]
            raise RequestRefused(
                f"this gateway is not called {shown!r}: expected localhost; `swarm serve --allow-host` allows more",
                code="host_not_allowed",
                status=403,
            )
        return await handler(request)

    return check


def _without_port(host: str) -> str:
    """Return a Host header's name or IP literal, lower case; empty if it is malformed."""
    has_port = host.rpartition(":")[2].isdigit() and not host.endswith("]")
    try:
        name = parse_address(host if has_port else f"{host}:80")[0]
    except UserError:
        return ""
    return name.lower().removesuffix(".")


def _tell(error: Exception) -> ErrorAnswer:
    """Return what to tell the client, and log what only the operator can mend."""
    told = error_answer(error)
    if told.status == 500:
        logger.error("a request failed", exc_info=error)
    return told


def _log_finish(answer_id: str, last: TextDelta) -> None:
    n_prompt, n_completion = last.n_prompt_tokens, last.n_completion_tokens
    logger.info("%s: finished (%s), %d + %d tokens", answer_id, last.finish_reason, n_prompt, n_completion)


def _encode(value: Json) -> bytes:
    # Half of a surrogate pair, say in a template's words, becomes a JSON escape.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _json_response(value: Json, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=status, content_type="application/json", charset="utf-8")


def _error_response(error: ErrorAnswer) -> web.Response:
    response = _json_response(error.body(), status=error.status)
    response.headers.update(error.headers())
    return response
