"""A backbone file on a hooked llama.cpp context, without event loop or network: one call is one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from swarm.backbone.engine import EngineConfig
from swarm.backbone.moe_hook import ExpertBackend, MoeHook
from swarm.errors import EngineError, SwarmError
from swarm.model.spec import ModelSpec
from swarm.native.llama import LlamaContext, LlamaModel


class HookedModel:
    """Use as a context manager."""

    def __init__(self, path: Path, spec: ModelSpec, config: EngineConfig, experts: ExpertBackend) -> None:
        """Load a backbone file; `config.n_ctx` must be given."""
        self.model = LlamaModel(path, exact_kernels=config.exact_kernels)
        self._hook = MoeHook(spec.moe_layers, experts, output=spec.expert_kind.output_node)
        try:
            self._context = LlamaContext(
                self.model,
                n_ctx=config.n_ctx,
                n_batch=config.n_batch,
                n_ubatch=config.n_ubatch,
                n_threads=config.n_threads,
                eval_callback=self._hook,
            )
        except BaseException:
            self.model.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()  # its context too

    def clear(self) -> None:
        """Forget everything."""
        self._context.clear()

    def logits(self, tokens: Sequence[int], first_position: int) -> npt.NDArray[np.float32]:
        """Return the logits of all these tokens, [T, V].

        Raises:
            SwarmError: what the experts raised. The tokens are not in the KV cache then.
        """
        failure: BaseException | None = None
        try:
            self._context.decode(tokens, first_position=first_position, logits="all")
        except EngineError as error:
            failure = error
        failures = (self._hook.take_error(has_run=failure is None), self._context.take_callback_error(), failure)
        first = next((error for error in failures if error is not None), None)
        if first is None:
            return self._context.all_logits()
        if not self._context.remove(0, first_position):
            self._context.clear()
        if isinstance(first, SwarmError):
            raise first
        raise EngineError(f"a layer failed: {first!r}") from first
