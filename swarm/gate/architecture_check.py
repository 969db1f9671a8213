"""Compares one architecture with stock llama.cpp: small random models of it, split, served in the form `exact`, bit for bit.

    recipe -> model file -> backbone with stubs -> hooked context over three simulated peers -> logits == stock's?

Run it in a process of its own: `python -m swarm.gate.architecture_check NAME`, which prints one JSON object. llama.cpp aborts
on much that it does not like, and a comparison must not take the others with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.architectures.generator import Variant, write_model
from swarm.architectures.recipes import RECIPES, Recipe
from swarm.architectures.variants import variants_of
from swarm.backbone.engine import EngineConfig
from swarm.backbone.moe_hook import ExpertBackend, LayerResult
from swarm.backbone.stock import StockModel
from swarm.errors import ExpertUnavailable, SwarmError, UserError
from swarm.experts.executor import ExpertExecutor
from swarm.gate.hooked_model import HookedModel
from swarm.gate.simulated_peers import PeerPlan, SimulatedPeers, load_experts
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import build_manifest, hash_backbone
from swarm.model.slices import write_backbone
from swarm.model.source import GgufSource
from swarm.native.library import use_exact_kernels
from swarm.wire.rows import Wire, WireForm

PROMPTS = (1, 37, 160)  # tokens; above 128 other kernels are used
N_DECODED = 3  # tokens after each prompt, one at a time
N_CTX = 512
SEED = 1
STAGE = "comparing "  # what a line on stderr begins with that says how far it came
EXACT = Wire(WireForm.EXACT, WireForm.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureReport:
    """What the comparison of one architecture says.

    Attributes:
        identical: every logit of every variant is stock's, bit for bit.
        min_cosine: the worst position of all; None where nothing could be compared.
        status: `identical`, `differs` or `failed`.
        reason: what failed or differs; empty otherwise.
        variants: names of those that were identical.
        activations: as the spec has them.
    """

    name: str
    source: str
    status: str
    min_cosine: float | None = None
    reason: str = ""
    variants: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether everything was compared and equal."""
        return self.status == "identical"

    def to_json(self) -> dict[str, Any]:
        """Return a plain object."""
        return {
            "name": self.name,
            "source": self.source,
            "identical": self.identical,
            "min_cosine": self.min_cosine,
            "status": self.status,
            "reason": self.reason,
            "variants": list(self.variants),
            "activations": list(self.activations),
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> ArchitectureReport:
        """Return what `to_json` wrote."""
        return cls(
            name=plain["name"],
            source=plain["source"],
            status=plain["status"],
            min_cosine=plain["min_cosine"],
            reason=plain["reason"],
            variants=tuple(plain["variants"]),
            activations=tuple(plain["activations"]),
        )


@dataclass(slots=True)
class Comparison:
    """Logits of two runs, compared.

    Attributes:
        n_different: rows that are not equal bit for bit.
        n_not_finite: rows of stock with a NaN or infinity in them: they prove nothing.
        n_blind: rows that were equal although the experts computed nothing.
    """

    n_rows: int = 0
    n_different: int = 0
    n_not_finite: int = 0
    n_blind: int = 0
    min_cosine: float = 1.0
    activations: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    def add(self, ours: npt.NDArray[np.float32], stock: npt.NDArray[np.float32]) -> None:
        """Count rows of logits, [T, V]."""
        self.n_rows += len(stock)
        self.n_different += int((ours.view(np.uint32) != stock.view(np.uint32)).any(axis=1).sum())
        self.n_not_finite += int((~np.isfinite(stock)).any(axis=1).sum())
        a, b = ours.astype(np.float64), stock.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        self.min_cosine = min(self.min_cosine, float(np.nan_to_num(cosines, nan=-1.0).min()))

    @property
    def fault(self) -> str:
        """What is wrong, empty where nothing is."""
        if self.faults:
            return self.faults[0]
        if self.n_not_finite:
            return f"stock's logits are not finite in {self.n_not_finite} of {self.n_rows} positions"
        if self.n_different:
            return f"{self.n_different} of {self.n_rows} positions differ, worst cosine {self.min_cosine:.6f}"
        if self.n_blind:
            return f"{self.n_blind} positions do not change when the experts give zeros: nothing is proven"
        return ""


class _SometimesFailing:
    """An `ExpertBackend` that fails when it is told to: a peer that died without a replica."""

    def __init__(self, experts: ExpertBackend) -> None:
        self._experts = experts
        self.fails = False

    def begin(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
    ) -> LayerResult:
        if self.fails:
            raise ExpertUnavailable(layer, (0,), "it was made to fail")
        return self._experts.begin(layer, x, topk_ids, topk_weights)


class _ZeroExperts:
    """An `ExpertBackend` that computes nothing: the control."""

    def begin(self, layer: int, x: npt.NDArray[np.float32], topk_ids: object, topk_weights: object) -> _ZeroExperts:
        self._rows = np.zeros_like(x)
        return self

    def result(self) -> npt.NDArray[np.float32]:
        return self._rows


def compare_model(
    path: Path, folder: Path, *, prompts: Sequence[int] = PROMPTS, is_control: bool = False
) -> Comparison:
    """Return how a model file, split and served by three simulated peers in the form `exact`, compares with stock llama.cpp.

    Call `use_exact_kernels` before.

    Args:
        folder: for the backbone file.
        is_control: also make sure that the logits depend on the experts, and that failed steps can be taken back.

    Raises:
        SwarmError: the model cannot be split, loaded or computed.
    """
    comparison = Comparison()
    backbone = folder / "backbone.gguf"
    config = EngineConfig(n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, n_threads=1, exact_kernels=True)
    with GgufFile(path) as file:
        manifest = build_manifest(file)
        write_backbone(file, manifest, backbone)
        spec = manifest.spec
        comparison.activations = tuple(dict.fromkeys(map(str, spec.activations)))
        with GgufFile(backbone) as cut:
            if hash_backbone(cut) != manifest.backbone_hash:
                comparison.faults.append("the backbone cut from the file has another hash than the file's own")
        ffn = load_experts(spec, GgufSource(file), spec.all_experts)
        try:
            peers = SimulatedPeers(ExpertExecutor(ffn, spec), spec, EXACT, PeerPlan.contiguous(spec))
            failing = _SometimesFailing(peers)
            with StockModel(path, config) as stock, HookedModel(backbone, spec, config, failing) as ours:
                for n_prompt in prompts:
                    _compare_prompt(comparison, stock, ours, n_prompt)
                if is_control:
                    _compare_after_failures(comparison, stock, ours, failing)
            if is_control:
                with StockModel(path, config) as stock, HookedModel(backbone, spec, config, _ZeroExperts()) as blind:
                    tokens = _tokens(stock.n_vocab, 8)
                    same = blind.logits(tokens, 0) == stock.logits(tokens, 0)
                    comparison.n_blind = int(same.all(axis=1).sum())
        finally:
            ffn.close()
    return comparison


def _compare_prompt(comparison: Comparison, stock: StockModel, ours: HookedModel, n_prompt: int) -> None:
    stock.clear()
    ours.clear()
    tokens = _tokens(stock.n_vocab, n_prompt + N_DECODED)
    position = 0
    for n in (n_prompt, *[1] * N_DECODED):
        part = tokens[position : position + n]
        comparison.add(ours.logits(part, position), stock.logits(part, position))
        position += n


def _compare_after_failures(
    comparison: Comparison, stock: StockModel, ours: HookedModel, experts: _SometimesFailing
) -> None:
    """Count rows that were computed after steps that failed and were taken back."""
    stock.clear()
    ours.clear()
    tokens = _tokens(stock.n_vocab, 24)
    position = 0
    for n in (12, 5, 1):
        if position:
            experts.fails = True
            with contextlib.suppress(ExpertUnavailable):
                ours.logits(tokens[position : position + 2], position)
            experts.fails = False
        part = tokens[position : position + n]
        comparison.add(ours.logits(part, position), stock.logits(part, position))
        position += n


def _tokens(n_vocab: int, n: int) -> list[int]:
    rng = np.random.default_rng(SEED)
    return [int(token) for token in rng.integers(1, n_vocab, n)]


def check_architecture(recipe: Recipe, variants: Sequence[Variant]) -> ArchitectureReport:
    """Return the report of one architecture; llama.cpp may end the process instead."""
    if recipe.why_not:
        return ArchitectureReport(
            name=recipe.architecture, source=recipe.source, status="failed", reason=recipe.why_not
        )
    done: list[str] = []
    activations: list[str] = []
    worst: float | None = None
    reasons: list[str] = []
    status = "identical"
    with tempfile.TemporaryDirectory(prefix="swarm-architecture-") as name:
        folder = Path(name)
        for variant in variants:
            # What a crash leaves as the last line says where it happened.
            print(f"{STAGE}{recipe.architecture}: {variant.name}", file=sys.stderr, flush=True)
            path = folder / "model.gguf"
            try:
                write_model(path, recipe, variant)
                comparison = compare_model(path, folder, is_control=variant is variants[0])
            except (SwarmError, ValueError) as error:
                status = "failed"
                reasons.append(f"{variant.name}: {error}".replace(str(folder) + "/", ""))
                continue
            activations += [text for text in comparison.activations if text not in activations]
            worst = comparison.min_cosine if worst is None else min(worst, comparison.min_cosine)
            if comparison.fault:
                status = "differs" if status == "identical" else status
                reasons.append(f"{variant.name}: {comparison.fault}")
            else:
                done.append(variant.name)
    return ArchitectureReport(
        name=recipe.architecture,
        source=recipe.source,
        status=status,
        min_cosine=worst,
        reason="; ".join(reasons[:3]),
        variants=tuple(done),
        activations=tuple(activations),
    )


def main(arguments: Sequence[str]) -> None:
    """Print the report of the architecture named first as JSON."""
    recipe = next((recipe for recipe in RECIPES if recipe.architecture == arguments[0]), None)
    if recipe is None:
        raise UserError(f"no recipe for {arguments[0]}")
    use_exact_kernels()
    report = check_architecture(recipe, variants_of(recipe))
    print(json.dumps(report.to_json()), flush=True)
    os._exit(0)  # closing llama.cpp once more could only spoil what was found


if __name__ == "__main__":
    main(sys.argv[1:])
