"""Continues prompts on an engine: one request at a time, first come first served, behind a bounded line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator

from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import Engine
from swarm.backbone.requests import FinishReason, GenerationRequest, TextDelta
from swarm.backbone.text_stream import TextStream
from swarm.dispatch.holders import Holders
from swarm.errors import Overloaded, UserError
from swarm.native.llama import Sampler
from swarm.speculation.accept import DraftStats

logger = logging.getLogger(__name__)

MAX_LINE = 64  # requests waiting or under way; guessed. More are refused with a time to try again
LINE_TIMEOUT_S = 300.0  # guessed: longer than the clients' own patience, so that none waits here in vain for ever
COVER_WAIT_S = 3.0  # how long a request waits for a missing expert's holder before it fails


class Backbone:
    """A `TextGenerator` over one engine."""

    def __init__(self, engine: Engine, holders: Holders, model_name: str, *, n_batch: int, n_draft: int = 0) -> None:
        """`n_draft`: most tokens that a step drafts by prompt lookup; 0: one token a step."""
        self.drafts = DraftStats()
        self._n_draft = n_draft
        self._engine = engine
        self._holders = holders
        self._model_name = model_name
        self._n_batch = n_batch
        self._turn = asyncio.Lock()
        self._n_in_line = 0

    @property
    def model_name(self) -> str:
        """`label@8hex`."""
        return self._model_name

    @property
    def n_ctx(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._engine.context.n_ctx

    @property
    def chat_template(self) -> str | None:
        """The GGUF's own Jinja2 template."""
        return self._engine.model.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and `eos_token` as text; empty where the model has none."""
        model = self._engine.model
        named = {"bos_token": model.bos_token, "eos_token": model.eos_token}
        return {
            name: "" if token is None else model.piece(token, special=True).decode(errors="replace")
            for name, token in named.items()
        }

    def tokenize(self, request: GenerationRequest) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            UserError: it is empty, has unknown tokens, or leaves no room for an answer.
        """
        model = self._engine.model
        if isinstance(request.prompt, str):
            tokens = model.tokenize(request.prompt, add_special=True, parse_special=request.parse_special)
            if model.bos_token is not None and tokens[:2] == [model.bos_token] * 2:
                del tokens[0]  # the chat template wrote one already
        else:
            tokens = list(request.prompt)
            if any(not 0 <= token < model.n_vocab for token in tokens):
                raise UserError(f"unknown token in the prompt: expected 0 to {model.n_vocab - 1}")
        if not tokens:
            raise UserError("the prompt is empty")
        if len(tokens) >= self.n_ctx:
            raise UserError(f"the prompt is too long: got {len(tokens)} tokens, expected at most {self.n_ctx - 1}")
        return tokens

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer; closing the iterator gives up the layer under way and frees the engine.

        Raises:
            UserError: the prompt is empty or does not fit.
            ExpertUnavailable: no live holder for some experts, at the start or in the middle.
            Overloaded: the line is full.
        """
        if self._n_in_line >= MAX_LINE:
            raise Overloaded(f"{self._n_in_line} requests are waiting", retry_after_s=5.0)
        self._n_in_line += 1
        try:
            tokens = await asyncio.to_thread(self.tokenize, request)  # a long text takes a good part of a second
            async with self._in_turn():
                if self._holders.missing():
                    await self._holders.wait_complete(COVER_WAIT_S)
                async with contextlib.aclosing(self._answer(tokens, request)) as deltas:
                    async for delta in deltas:
                        yield delta
        finally:
            self._n_in_line -= 1

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait in line, not for ever, and hold the engine."""
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(f"no turn within {LINE_TIMEOUT_S:g} s", retry_after_s=30.0) from None
        try:
            yield
        finally:
            self._turn.release()

    async def _answer(self, prompt: list[int], request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        engine = self._engine
        n_prompt, n_completion = len(prompt), 0
        room = self.n_ctx - n_prompt
        n_most = room if request.max_tokens is None else min(request.max_tokens, room)
        stream = TextStream(request.stop)
        started = time.monotonic()
        sampler = Sampler(request.sampling, engine.model.n_vocab)
        continuation = Continuation(
            engine,
            lambda row: sampler.sample(engine.context, row),
            n_batch=self._n_batch,
            n_draft=self._n_draft,
            stats=self.drafts,
        )
        try:
            await continuation.start(prompt)
            reason = FinishReason.LENGTH
            async with contextlib.aclosing(continuation.tokens(n_most)) as tokens:
                async for token in tokens:
                    n_completion += 1
                    if engine.model.is_end_of_generation(token):
                        reason = FinishReason.STOP
                        break
                    text = stream.feed(engine.model.piece(token))
                    yield TextDelta(text=text, n_prompt_tokens=n_prompt, n_completion_tokens=n_completion)
                    if stream.is_stopped:
                        reason = FinishReason.STOP
                        break
            yield TextDelta(
                text=stream.finish(),
                n_prompt_tokens=n_prompt,
                n_completion_tokens=n_completion,
                finish_reason=reason,
            )
            logger.info("answered %d + %d tokens in %.2f s", n_prompt, n_completion, time.monotonic() - started)
        finally:
            sampler.close()
