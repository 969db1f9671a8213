"""One answer as it grows: tokens in, text out, and whoever reads it.

Fed on the event loop by a lane, read by one caller. What is not for streaming is held until it is complete, so that it can still
be rewound: tokens that turned out wrong were then seen by nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from swarm.backbone.requests import FinishReason, GenerationRequest, TextDelta, TokenLogprob
from swarm.backbone.text_stream import TextStream


class Vocabulary(Protocol):
    """What an answer needs of a model."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the token's bytes."""
        ...

    def is_end_of_generation(self, token: int) -> bool:
        """Return whether the token ends an answer."""
        ...


class Answer:
    """Of one request.

    Attributes:
        is_held: nothing is read before it is complete.
        n_tokens: drawn so far, the end of generation too.
        n_read: of those, how many their reader has.
        n_cached: tokens of the prompt that were computed before.
        finish_reason: set once it is complete.
        on_read: called when its reader has taken something.
    """

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, n_prompt: int, n_most: int) -> None:
        """`n_most`: tokens after which it ends by length."""
        self.is_held = not request.is_stream
        self.n_tokens = 0
        self.n_read = 0
        self.n_cached = 0
        self.finish_reason: FinishReason | None = None
        self.on_read: Callable[[], None] = lambda: None
        self._request = request
        self._vocabulary = vocabulary
        self._n_prompt = n_prompt
        self._n_most = n_most
        self._stream = TextStream(request.stop)
        self._deltas: deque[TextDelta] = deque()
        self._fed: list[tuple[int, tuple[TokenLogprob, ...]]] = []  # kept only while it is held
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        if n_most < 1:
            self._finish(FinishReason.LENGTH)

    @property
    def n_unread(self) -> int:
        """Deltas that wait for their reader; 0 of what is held."""
        return 0 if self.is_held else len(self._deltas)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None or self._error is not None

    def feed(self, token: int, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """Add a token; ignored once the answer is over."""
        if self.is_over:
            return
        self.n_tokens += 1
        if self.is_held:
            self._fed.append((token, logprobs))
        if self._vocabulary.is_end_of_generation(token):
            self._finish(FinishReason.STOP, logprobs)
            return
        text = self._stream.feed(self._vocabulary.piece(token, special=self._request.shows_special))
        self._append(text, None, logprobs)
        if self._stream.is_stopped:
            self._finish(FinishReason.STOP)
        elif self.n_tokens >= self._n_most:
            self._finish(FinishReason.LENGTH)

    def reopen(self) -> None:
        """Let it be incomplete again, until `rewind` has said what stays of it."""
        self.finish_reason = None

    def rewind(self, n_tokens: int) -> None:
        """Forget all tokens but the first `n_tokens`, as if the others had never come; only while it is held."""
        assert self.is_held
        fed = self._fed[:n_tokens]
        self._fed = []
        self._deltas.clear()
        self._stream = TextStream(self._request.stop)
        self.n_tokens = 0
        self.finish_reason = None
        for token, logprobs in fed:
            self.feed(token, logprobs)

    def fail(self, error: BaseException) -> None:
        """End it: its reader gets what is there and then this error. Ignored once it is over and cannot be rewound any more."""
        if self._error is None and (self.finish_reason is None or self.is_held):
            self._error = error
            self._changed.set()

    async def complete(self) -> None:
        """Wait until nothing more comes."""
        while not self.is_over:
            self._changed.clear()
            await self._changed.wait()

    def let_go(self) -> None:
        """Let its reader have it: a complete answer is not held any more, as what was read cannot be rewound."""
        self.is_held = self.is_held and (self.finish_reason is None or self._error is not None)

    async def read(self) -> TextDelta | None:
        """Return the next piece, None after the last; raises what the answer failed with."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                return None
            self._changed.clear()
            await self._changed.wait()
        if self.is_held and self._error is not None:
            raise self._error
        delta = self._deltas.popleft()
        self.n_read = delta.n_completion_tokens
        self.on_read()
        return delta

    def _finish(self, reason: FinishReason, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        self.finish_reason = reason
        self._append(self._stream.finish(), reason, logprobs)

    def _append(self, text: str, reason: FinishReason | None, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._deltas.append(
            TextDelta(
                text=text,
                n_prompt_tokens=self._n_prompt,
                n_completion_tokens=self.n_tokens,
                finish_reason=reason,
                logprobs=logprobs,
                n_cached_tokens=self.n_cached,
            )
        )
        self._changed.set()
