"""Drafts by a smaller model with the same vocabulary, on the backbone's machine.

It runs on the engine's thread, with as many threads, so that no second pool of OpenMP threads spins beside the engine's. Each
engine gets a context of its own over shared weights; a sequence has the same number in both.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from swarm.backbone.engine import Engine
from swarm.errors import EngineError, UserError
from swarm.native.llama import LlamaContext, LlamaModel

N_BATCH = 512


class DraftModel:
    """The smaller model's weights. Close it after the engines that it drafts for."""

    def __init__(self, path: Path, *, n_threads: int = 1, n_sequences: int = 1) -> None:
        """Load it.

        Raises:
            EngineError: llama.cpp cannot load the file.
        """
        self._model = LlamaModel(path)
        self._path = path
        self._n_threads = n_threads
        self._n_sequences = n_sequences
        self._contexts: dict[int, LlamaContext] = {}
        self._lock = threading.Lock()

    def require_same_vocabulary(self, other: LlamaModel) -> None:
        """Raise UserError unless both models have the same tokens, byte for byte, and end answers alike."""
        mine = self._model
        if mine.n_vocab != other.n_vocab:
            raise UserError(
                f"the draft model {self._path.name} has another vocabulary: got {mine.n_vocab} tokens, expected {other.n_vocab}"
            )
        for token in range(mine.n_vocab):
            if mine.piece(token, special=True) != other.piece(token, special=True) or (
                mine.is_end_of_generation(token) != other.is_end_of_generation(token)
            ):
                raise UserError(f"the draft model {self._path.name} has another vocabulary: token {token} differs")

    def drafter(self, engine: Engine, sequence: int) -> ModelDrafter:
        """Return a drafter for one sequence of an engine, from its beginning."""
        with self._lock:
            context = self._contexts.get(id(engine))
            if context is None:
                context = self._contexts[id(engine)] = LlamaContext(
                    self._model,
                    n_ctx=engine.n_ctx * self._n_sequences,
                    n_batch=N_BATCH,
                    n_ubatch=N_BATCH,
                    n_threads=self._n_threads,
                    n_seq_max=self._n_sequences,
                )
        return ModelDrafter(context, sequence)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._model.close()  # its contexts too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelDrafter:
    """A `Drafter` of one sequence; greedy."""

    def __init__(self, context: LlamaContext, sequence: int) -> None:
        self._context = context
        self._sequence = sequence
        self._known: list[int] = []  # tokens in the cache
        self._is_usable = True

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to `n` tokens; what is new since the last call is computed first.

        Raises:
            EngineError: llama.cpp failed.
        """
        context = self._context
        n = min(n, context.n_ctx - len(tokens))
        if n < 1 or not self._is_usable:
            return []
        n_same = 0
        for mine, token in zip(self._known, tokens[:-1], strict=False):
            if mine != token:
                break
            n_same += 1
        if n_same < len(self._known) or not self._known:
            if not context.remove(self._sequence, n_same):  # a memory that cannot forget a part
                context.remove(self._sequence, 0)
                n_same = 0
            del self._known[n_same:]
        drafts: list[int] = []
        try:
            for at in range(len(self._known), len(tokens), N_BATCH):
                part = list(tokens[at : at + N_BATCH])
                context.decode(part, first_position=at, sequence=self._sequence, logits="last")
                self._known += part
            while True:
                token = int(context.logits(-1).argmax())
                if context.model.is_end_of_generation(token):
                    break
                drafts.append(token)
                if len(drafts) == n:
                    break
                context.decode([token], first_position=len(self._known), sequence=self._sequence, logits="last")
                self._known.append(token)
        except EngineError:
            self._is_usable = False
            raise
        return drafts
