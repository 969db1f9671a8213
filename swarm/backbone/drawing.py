"""Draws an answer's tokens: llama.cpp's samplers, behind what they do not do: grammar, biases, log probabilities.

All of it happens on the engine's thread, in the row of logits that llama.cpp computed.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from swarm.backbone.grammar import GrammarMatcher
from swarm.backbone.requests import GenerationRequest, TokenLogprob
from swarm.errors import UserError
from swarm.native.llama import LlamaContext, LlamaModel, Sampler

# Draws between two places that a held answer can go back to. Guessed: a sampler's copy takes 2.5 KB.
HISTORY_EVERY = 16


class Drawer:
    """Of one answer.

    Attributes:
        logprobs: of each token drawn, in order, if the request asks for them; the reader takes them out.
    """

    def __init__(self, request: GenerationRequest, model: LlamaModel, matcher: GrammarMatcher | None = None) -> None:
        """`matcher`: of the request's grammar.

        Raises:
            UserError: a bias of a token that the model does not have.
        """
        bias = request.sampling.logit_bias
        if request.ignores_end:
            bias += tuple((token, -np.inf) for token in model.end_tokens)
        self._ids = np.array([token for token, _ in bias], np.int64)
        self._biases = np.array([value for _, value in bias], np.float32)
        if bias and not 0 <= self._ids.min() <= self._ids.max() < model.n_vocab:
            raise UserError(f"logit_bias names an unknown token: expected 0 to {model.n_vocab - 1}")
        self._model = model
        self._matcher = matcher
        self._n_logprobs = request.n_logprobs
        self._sampler = Sampler(request.sampling, model.n_vocab)
        self._is_held = not request.is_stream
        # Places to go back to, (tokens drawn, sampler, matcher): the start and, of a held answer, some on its way.
        self._history = [(0, self._sampler.copy(), _copy(matcher))]
        self._n_drawn = 0
        self.logprobs: deque[TokenLogprob] = deque()

    def draw(self, context: LlamaContext, index: int = -1) -> int:
        """Return a token drawn from a row of the last step's logits (index as in `LlamaContext.logits`), which it may change.

        Raises:
            UserError: the grammar went past a limit.
            EngineError: there is no such row.
        """
        token = self._draw(context, index)
        self._n_drawn += 1
        if self._is_held and self._n_drawn % HISTORY_EVERY == 0:
            self._history.append((self._n_drawn, self._sampler.copy(), _copy(self._matcher)))
        return token

    def rewind(self, n_drawn: int) -> int:
        """Go back to where `n_drawn` tokens were drawn, or fewer; return how many: none, of an answer that streams.

        Log probabilities that were not taken out are forgotten.
        """
        while len(self._history) > 1 and self._history[-1][0] > n_drawn:
            self._history.pop()[1].close()
        self._n_drawn, sampler, matcher = self._history[-1]
        self._sampler.close()
        self._sampler, self._matcher = sampler.copy(), _copy(matcher)
        self.logprobs.clear()
        return self._n_drawn

    def _draw(self, context: LlamaContext, index: int) -> int:
        if self._matcher is None and self._n_logprobs is None and not len(self._ids):
            return self._sampler.sample(context, index)
        row = context.logits_in_place(index)
        logprobs = None if self._n_logprobs is None else _log_softmax(row)
        row[self._ids] += self._biases
        if self._matcher is not None:
            row[~self._matcher.allowed()] = -np.inf
        token = self._sampler.sample(context, index)
        if self._matcher is not None:
            self._matcher.accept(token)
        if logprobs is not None:
            self.logprobs.append(self._entry(token, logprobs))
        return token

    def close(self) -> None:
        """Free the samplers; a second call does nothing."""
        self._sampler.close()
        for _, sampler, _ in self._history:
            sampler.close()
        self._history.clear()

    def _entry(self, token: int, logprobs: npt.NDArray[np.float32]) -> TokenLogprob:
        n = self._n_logprobs or 0
        best = np.argpartition(logprobs, -n)[-n:] if n else np.empty(0, np.int64)
        best = best[np.argsort(-logprobs[best], kind="stable")]
        return TokenLogprob(
            piece=self._piece(token),
            logprob=float(logprobs[token]),
            likeliest=tuple((self._piece(int(each)), float(logprobs[each])) for each in best),
        )

    def _piece(self, token: int) -> bytes:
        return self._model.piece(token, special=True)


def _copy(matcher: GrammarMatcher | None) -> GrammarMatcher | None:
    return None if matcher is None else matcher.copy()


def _log_softmax(row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = row - row.max()
    logprobs: npt.NDArray[np.float32] = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return logprobs
