"""Whether a wire form is good enough for a model: thresholds, figures, and the reasons of a refusal.

Pure; knows neither how the figures were measured nor what is done with the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.dispatch.codecs import codecs_of
from swarm.gate.statistics import FormStatistics
from swarm.model.spec import ModelSpec
from swarm.wire.rows import Wire, WireForm, row_bytes

# Measured on the embedded files: the standard error of the perplexity ratio is then 0.0003 for q8, of a threshold of 0.005.
MIN_TEXT_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a form must reach.

    Attributes:
        min_mean_cosine: of logits; of logits. 0.998: what others ask of two backends of one model; 0.9998 or more in every form.
        min_clear_agreement: share of clear positions with stock's likeliest token. 0.999: chosen; on the embedded
            Q4_K_M f32 reaches 0.99994, q8 0.9998, fp8 0.9990.
        max_perplexity_change: |ratio - 1|. 0.005: chosen; 0.0003 or less in every form on the embedded Q4_K_M.
        min_layer_cosine: layer by layer, mean cosine of a layer's expert output with f32's. Set between the forms that pass
            by logits on both embedded files (0.9998 and more) and fp8, which fails on one (0.9995 and less).
    """

    min_mean_cosine: float = 0.998
    min_clear_agreement: float = 0.999
    max_perplexity_change: float = 0.005
    min_layer_cosine: float = 0.9995

    def to_json(self) -> dict[str, float]:
        """Return a plain object."""
        return {
            "min_mean_cosine": self.min_mean_cosine,
            "min_clear_agreement": self.min_clear_agreement,
            "max_perplexity_change": self.max_perplexity_change,
            "min_layer_cosine": self.min_layer_cosine,
        }


DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class FormReport:
    """One form's figures and verdict. A figure that was not measured is None.

    Attributes:
        bytes_per_row: of values alone, out and back, for a row that meets one destination (`bytes_per_row`).
        identical: every logit is stock's, bit for bit.
        perplexity_error: standard error of the ratio (`FormStatistics.perplexity_error`).
        audit_error: the largest relative difference of a row between two honest peers' answers (`audit_errors`).
        reasons: why it did not pass; empty when it did.
    """

    wire: Wire
    bytes_per_row: int
    n_positions: int
    identical: bool | None
    argmax_agreement: float | None
    clear_agreement: float | None
    min_cosine: float | None
    mean_cosine: float | None
    perplexity_ratio: float | None
    perplexity_error: float | None = None
    audit_error: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the form may be used."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Return a plain object with the keys that scripts rely on."""
        return {
            "wire": str(self.wire),
            "bytes_per_row": self.bytes_per_row,
            "n_positions": self.n_positions,
            "identical": self.identical,
            "argmax_agreement": self.argmax_agreement,
            "clear_agreement": self.clear_agreement,
            "min_cosine": self.min_cosine,
            "mean_cosine": self.mean_cosine,
            "perplexity_ratio": self.perplexity_ratio,
            "perplexity_error": self.perplexity_error,
            "audit_error": self.audit_error,
            "passed": self.passed,
            "reasons": list(self.reasons),
        }


def bytes_per_row(wire: Wire, spec: ModelSpec) -> int:
    """Return what a row costs out and back at one destination that holds all its experts, in bytes: the layers' mean.

    The order of forms by cost. `exact` brings back a row for each expert, every other form one partial sum.
    """
    n_back = spec.n_expert_used if wire.back is WireForm.EXACT else 1
    total = 0
    for layer in spec.moe_layers:
        out, back = codecs_of(wire, spec, layer)
        total += row_bytes(spec.n_embd, out) + n_back * row_bytes(spec.n_embd, back)
    return round(total / len(spec.moe_layers))


def judge(
    wire: Wire,
    statistics: FormStatistics,
    thresholds: Thresholds,
    spec: ModelSpec,
    *,
    needs_perplexity: bool = True,
) -> FormReport:
    """Return the form's report. `exact` must be bit-identical too; nothing measured never passes."""
    reasons = []
    if not statistics.n_positions:
        reasons.append("nothing was measured")
    if statistics.n_not_finite:
        reasons.append(f"not finite: {statistics.n_not_finite} of {statistics.n_positions} positions")
    if wire.back is WireForm.EXACT and not statistics.identical:
        reasons.append(f"not identical: {statistics.n_different} of {statistics.n_positions} positions differ")
    reasons += require_at_least("mean cosine", statistics.mean_cosine, thresholds.min_mean_cosine)
    reasons += require_at_least("clear agreement", statistics.clear_agreement, thresholds.min_clear_agreement)
    ratio = statistics.perplexity_ratio
    if needs_perplexity and ratio is None:
        reasons.append("perplexity was not measured")
    if ratio is not None and not abs(ratio - 1) <= thresholds.max_perplexity_change:
        reasons.append(f"perplexity ratio {ratio:.5f}, expected 1 ± {thresholds.max_perplexity_change:g}")
    return FormReport(
        wire=wire,
        bytes_per_row=bytes_per_row(wire, spec),
        n_positions=statistics.n_positions,
        identical=statistics.identical,
        argmax_agreement=statistics.argmax_agreement,
        clear_agreement=statistics.clear_agreement,
        min_cosine=statistics.min_cosine,
        mean_cosine=statistics.mean_cosine,
        perplexity_ratio=ratio,
        perplexity_error=statistics.perplexity_error,
        reasons=tuple(reasons),
    )


def require_at_least(what: str, value: float | None, least: float) -> list[str]:
    """Return the reason why a figure is not enough, or none."""
    if value is None:
        return [f"{what} was not measured"]
    return [] if value >= least else [f"{what} {value:.6f}, expected at least {least:g}"]  # a NaN fails too


def read_figure(plain: Mapping[str, Any], key: str) -> float | None:
    """Return a stored figure; raises ValueError for anything but a finite number or null."""
    value = plain[key]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"bad {key}: got {value!r}")
    return float(value)
