"""The OpenAI-compatible HTTP server over one `TextGenerator`. Shapes and parsing are in `openai`; here is the plumbing.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models    GET /v1/models/{id}
    POST /tokenize    POST /detokenize    GET /health    GET /ready
    GET /map    GET /map/plain    GET /map.json    GET /map/events    (`swarm.web.map_server`)

- A stream's first step runs before its headers leave, so that an early failure has its own HTTP status. A later one
  is sent as `data: {"error": ...}`, and the connection closes without `[DONE]`.
- A client that hangs up, or stops reading for `stall_s`, has its generator closed, whatever the generator is doing.
- No CORS headers, unless an origin is allowed, and only bodies declared as `application/json`: so a web page that
  somebody has open cannot make its browser spend the swarm's work. Such a page could still have its own name point to
  this machine (DNS rebinding) and so be of the same origin: with `allowed_hosts`, a request must call the gateway by a
  name of this machine alone, or by one that was allowed.
- Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NoReturn

from aiohttp import web

from swarm.backbone.requests import GenerationRequest, TextDelta, TextGenerator
from swarm.errors import EngineError, UserError
from swarm.gateway.access import Access, Handler, add_cors_headers, middlewares_for
from swarm.gateway.answers import ChatAnswer, Choice, CompletionAnswer, model_entry
from swarm.gateway.chat_template import ChatTemplate
from swarm.gateway.errors import ErrorAnswer, Json, RequestRefused, error_answer, not_found
from swarm.gateway.merging import merged
from swarm.gateway.openai import (
    Call,
    ServedModel,
    check_prompt,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from swarm.gateway.tools import CallReader, format_of, knows_tools, plain_messages, required_call
from swarm.web.exposition import MetricsRegistry, add_metrics
from swarm.web.map_server import add_map

logger = logging.getLogger(__name__)

STALL_S = 60.0  # guessed: a reader slower than this holds up others for nothing
BODY_S = 60.0  # guessed: 8 MiB over a slow line; whoever sends slower on purpose ties up a connection for so long
WATCH_S = 0.05  # how soon a hang-up is seen between two steps; while writing it shows at once
STATUS_CLIENT_GONE = 499  # nginx's, for the access log: nobody is left to read it


def create_app(
    generator: TextGenerator,
    *,
    status: Callable[[], dict[str, Any]] | None = None,
    stall_s: float = STALL_S,
    access: Access | None = None,
    peer_map: Callable[[], dict[str, Any]] | None = None,
    metrics: MetricsRegistry | None = None,
) -> web.Application:
    """Return the gateway, to be run by aiohttp's runner.

    Args:
        status: what `/health` adds to its answer. A list `reasons` that is not empty makes it a 503.
        stall_s: how long a stream waits for a client that does not read.
        access: who may use it; None: everybody.
        peer_map: what `/map` and its kin show; None: there is none.
        metrics: what `/metrics` shows; None: there is none.
    """
    access = access or Access()
    gateway = _Gateway(generator, status, stall_s, access.max_body_bytes)
    app = web.Application(
        middlewares=[_shape_errors(access.max_body_bytes), *middlewares_for(access)],
        client_max_size=access.max_body_bytes,
    )
    app.on_response_prepare.append(add_cors_headers)
    app.router.add_post("/v1/chat/completions", gateway.chat)
    app.router.add_post("/v1/completions", gateway.completion)
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_get("/v1/models/{id:.+}", gateway.model)
    app.router.add_post("/v1/embeddings", gateway.embeddings)
    app.router.add_post("/tokenize", gateway.tokenize)
    app.router.add_post("/detokenize", gateway.detokenize)
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/ready", gateway.ready)
    if peer_map is not None:
        add_map(app, peer_map, has_chat=True)
    if metrics is not None:
        add_metrics(app, metrics)
    return app


class _ClientGone(Exception):
    """The client hung up, or stopped reading."""


class _Gateway:
    def __init__(
        self,
        generator: TextGenerator,
        status: Callable[[], dict[str, Any]] | None,
        stall_s: float,
        max_body_bytes: int,
    ) -> None:
        self._generator = generator
        self._status = status
        self._stall_s = stall_s
        self._max_body_bytes = max_body_bytes
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

    async def ready(self, request: web.Request) -> web.Response:
        """Tell a load balancer, in a word, whether a request would be answered."""
        reasons = (self._status() if self._status is not None else {}).get("reasons")
        return _json_response({"ready": not reasons}, status=503 if reasons else 200)

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = parse_tokenize(await self._read(request), self._served)
        tokens = await asyncio.to_thread(self._generator.tokenize, asked) if asked.prompt else []
        return _json_response({"tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        tokens = parse_detokenize(await self._read(request), self._served)
        return _json_response({"content": await asyncio.to_thread(self._generator.detokenize, tokens)})

    async def embeddings(self, request: web.Request) -> web.Response:
        raise RequestRefused(
            f"{self._served.name} writes text and gives no embeddings: ask a gateway of an embedding model",
            param="model",
            code="unsupported_endpoint",
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        served = self._served
        call, messages = parse_chat(await self._read(request), served)
        if isinstance(self._template, UserError):
            raise RequestRefused(str(self._template))
        tools, source = call.tools, self._generator.chat_template
        has_tools = knows_tools(source)
        if not has_tools:
            messages = plain_messages(messages, tools.tools)
        render = functools.partial(
            self._template.render,
            messages,
            tools=[tool.as_json() for tool in tools.tools] if has_tools else [],
            variables=call.template_variables,
        )
        # In a thread: a slow template must not hold up the swarm's traffic. It ends by its own deadline.
        prompt = await asyncio.to_thread(render)
        grammar, form = None, format_of(source)
        if tools.is_required:
            begin, grammar = required_call(tools, form)
            prompt += begin
        check_prompt(prompt, served, "messages")
        answer = ChatAnswer(
            answer_id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=served.name,
            has_usage=call.include_usage,
        )
        choices = [
            Choice(index=index, reader=CallReader(tools, form) if tools.tools else None) for index in range(call.n)
        ]
        generations = [
            call.generation(prompt, index=index, grammar=grammar, is_traced=_is_traced(request))
            for index in range(call.n)
        ]
        return await self._answer(request, call, generations, choices, answer)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        served = self._served
        call, prompt, echo = parse_completion(await self._read(request), served)
        answer = CompletionAnswer(
            answer_id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=served.name,
            has_usage=call.include_usage,
            echo=echo,
        )
        choices = [Choice(index=index, offset=len(echo)) for index in range(call.n)]
        generations = [call.generation(prompt, index=index, is_traced=_is_traced(request)) for index in range(call.n)]
        return await self._answer(request, call, generations, choices, answer)

    async def _read(self, request: web.Request) -> object:
        return await _read_json(request, self._max_body_bytes)

    async def _answer(
        self,
        request: web.Request,
        call: Call,
        generations: Sequence[GenerationRequest],
        choices: Sequence[Choice],
        answer: ChatAnswer | CompletionAnswer,
    ) -> web.StreamResponse:
        async def work() -> web.StreamResponse:
            response: web.StreamResponse | None = None
            try:
                streams = [self._generator.generate(each) for each in generations]
                async with contextlib.aclosing(merged(streams)) as deltas:
                    respond = self._stream if call.is_stream else self._whole
                    response = await respond(request, answer, choices, deltas)
            except Exception as error:
                told = _tell(error)
                if response is None:  # else closing failed, after the client had its answer
                    response = _error_response(told)
            return response

        return await _while_connected(request, work())

    async def _whole(
        self,
        request: web.Request,
        answer: ChatAnswer | CompletionAnswer,
        choices: Sequence[Choice],
        deltas: AsyncIterator[tuple[int, TextDelta]],
    ) -> web.StreamResponse:
        while any(choice.last is None for choice in choices):
            index, delta = await _next(deltas)
            choices[index].feed(delta)
        _log_finish(answer.answer_id, choices)
        return _json_response(answer.whole(choices))

    async def _stream(
        self,
        request: web.Request,
        answer: ChatAnswer | CompletionAnswer,
        choices: Sequence[Choice],
        deltas: AsyncIterator[tuple[int, TextDelta]],
    ) -> web.StreamResponse:
        index, delta = await _next(deltas)
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
            for choice in choices:
                for chunk in answer.opening(choice):
                    await send(_encode(chunk))
            while True:
                choice = choices[index]
                for chunk in answer.piece(choice, choice.feed(delta)):
                    await send(_encode(chunk))
                if choice.last is not None:
                    for chunk in answer.closing(choice):
                        await send(_encode(chunk))
                    if all(each.last is not None for each in choices):
                        break
                index, delta = await _next(deltas)
            for chunk in answer.end(choices):
                await send(_encode(chunk))
            await send(b"[DONE]")
            _log_finish(answer.answer_id, choices)
        except _ClientGone:
            logger.info("%s: the client went away after %d tokens", answer.answer_id, delta.n_completion_tokens)
        except Exception as error:
            response.force_close()
            with contextlib.suppress(_ClientGone):
                await send(_encode(_tell(error).body()))
        return response


def _is_traced(request: web.Request) -> bool:
    """Return whether the client wants to know where the time went (`swarm trace`)."""
    return request.headers.get("X-Swarm-Trace", "") == "1"


async def _next(deltas: AsyncIterator[tuple[int, TextDelta]]) -> tuple[int, TextDelta]:
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


async def _read_json(request: web.Request, max_bytes: int) -> object:
    """Return the body's JSON value. Raises RequestRefused."""
    if request.content_type != "application/json":
        raise RequestRefused("send the body with Content-Type: application/json", status=415)
    if request.content_length is not None and request.content_length > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes)
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.read()
    except TimeoutError:
        raise RequestRefused(f"the body did not come within {BODY_S:g} s", status=408) from None
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and endless digits are ValueErrors too
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise RequestRefused(f"the body is not valid JSON: {reason}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shape_errors(max_body_bytes: int) -> Any:
    """Return a middleware that answers every failure in OpenAI's shape, aiohttp's own refusals too."""

    @web.middleware
    async def shape(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            if error.status == 404:
                return _error_response(not_found(request.method, request.path))
            message = {
                405: f"{request.method} is not allowed here: expected {error.headers.get('Allow', 'another method')}",
                413: f"the body is too large: expected at most {max_body_bytes} bytes",
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

    return shape


def _tell(error: Exception) -> ErrorAnswer:
    """Return what to tell the client, and log what only the operator can mend."""
    told = error_answer(error)
    if told.status == 500:
        logger.error("a request failed", exc_info=error)
    return told


def _log_finish(answer_id: str, choices: Sequence[Choice]) -> None:
    for last in (choice.last for choice in choices if choice.last is not None):
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
