"""Stock llama.cpp on the whole model: the measure of truth and of speed. No hook, no stub, nothing of swarm's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.native.llama import LlamaContext, LlamaModel


class StockModel:
    """A whole GGUF file on an unhooked context. Use as a context manager."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self._model = LlamaModel(path, exact_kernels=config.exact_kernels)
        try:
            self._context = LlamaContext(
                self._model,
                n_ctx=config.n_ctx or min(self._model.n_ctx_train or 4096, 4096),
                n_batch=config.n_batch,
                n_ubatch=config.n_ubatch,
                n_threads=config.n_threads,
            )
        except BaseException:
            self._model.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self._model.close()

    @property
    def n_vocab(self) -> int:
        """V."""
        return self._model.n_vocab

    def clear(self) -> None:
        """Forget everything."""
        self._context.clear()

    def logits(self, tokens: Sequence[int], first_position: int) -> npt.NDArray[np.float32]:
        """Return the logits of all these tokens, [T, V] float32."""
        self._context.decode(tokens, first_position=first_position, logits="all")
        return self._context.all_logits()

    def tokens_per_s(self, prompt: Sequence[int], n_tokens: int) -> float:
        """Return the speed of greedy decoding after `prompt`, its prefill not counted."""
        self.clear()
        for start in range(0, len(prompt), self._context.n_batch):
            chunk = prompt[start : start + self._context.n_batch]
            self._context.decode(chunk, first_position=start, logits="last")
        token = int(self._context.logits(-1).argmax())
        started = time.perf_counter()
        for i in range(n_tokens):
            self._context.decode([token], first_position=len(prompt) + i, logits="last")
            token = int(self._context.logits(-1).argmax())
        return n_tokens / (time.perf_counter() - started)
