"""The routed experts of a whole model file, computed in this process. A test helper.

Stands in for a swarm: an `ExpertBackend` for a hook, and a `LayerDispatcher` for an engine. The weighting is plain numpy,
in the order that llama.cpp documents: y0*w0, then + y1*w1, and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.experts.expert_ffn import ExpertFfn
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.model.slices import write_backbone
from swarm.model.source import GgufSource
from swarm.model.spec import ModelSpec

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model file and the backbone that was cut from it."""

    file: Path
    manifest: Manifest
    backbone: Path

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec


def split(path: Path, folder: Path) -> SplitModel:
    with GgufFile(path) as file:
        manifest = build_manifest(file)
        backbone = folder / f"{path.stem}.backbone.gguf"
        write_backbone(file, manifest, backbone)
    return SplitModel(file=path, manifest=manifest, backbone=backbone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's dispatch as the hook made it."""

    layer: int
    x: Rows
    ids: npt.NDArray[np.int32]
    weights: Rows


class Answer:
    """A `LayerResult`; an exception as the outcome is raised."""

    def __init__(self, outcome: Rows | BaseException) -> None:
        self._outcome = outcome

    def result(self) -> Rows:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class LocalExperts:
    """Every expert of a model, in one slice.

    Attributes:
        calls: what was dispatched so far.
        at_begin, at_result: called with a call's number, from 0; what they raise is what the layer raises.
        held: number of the call that waits until it is cancelled or `release` is set; `is_waiting` tells that it does.
        n_waiting: dispatches that have begun and not ended.
    """

    def __init__(self, model: SplitModel) -> None:
        self.ffn = ExpertFfn(model.spec, model.spec.all_experts)
        with GgufFile(model.file) as file:
            source = GgufSource(file)
            for layer, expert in model.spec.all_experts:
                self.ffn.load(layer, expert, source.read_block(layer, expert))
        self.n_waiting = 0
        self.reset()

    def reset(self) -> None:
        """Forget the calls; fail and hold nothing any more."""
        self.calls: list[Call] = []
        self.at_begin: Callable[[int], None] = lambda _: None
        self.at_result: Callable[[int], None] = lambda _: None
        self.held = -1
        self.is_waiting = asyncio.Event()  # new ones: an event belongs to the loop that first waited for it
        self.release = asyncio.Event()

    def compute(self, layer: int, x: Rows, ids: npt.NDArray[np.int32], weights: Rows) -> Rows:
        n_tokens, n_used = ids.shape
        rows = np.repeat(np.arange(n_tokens), n_used)
        raw = self.ffn.compute(layer, x, rows, ids.ravel()).reshape(n_tokens, n_used, -1)
        raw = raw * weights[:, :, np.newaxis]
        out = raw[:, 0]
        for slot in range(1, n_used):
            out = out + raw[:, slot]
        return out

    def begin(self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows) -> Answer:
        number = len(self.calls)
        self.calls.append(Call(layer=layer, x=x, ids=topk_ids, weights=topk_weights))
        self.at_begin(number)
        try:
            self.at_result(number)
            return Answer(self.compute(layer, x, topk_ids, topk_weights))
        except BaseException as error:
            return Answer(error)

    async def dispatch(
        self, layer: int, x: Rows, topk_ids: npt.NDArray[np.int32], topk_weights: Rows, origin: object = None
    ) -> Any:
        number = len(self.calls)
        self.calls.append(Call(layer=layer, x=x, ids=topk_ids, weights=topk_weights))
        self.n_waiting += 1
        try:
            if number == self.held:
                self.is_waiting.set()
                await self.release.wait()
            self.at_result(number)
            return self.compute(layer, x, topk_ids, topk_weights)
        finally:
            self.n_waiting -= 1
