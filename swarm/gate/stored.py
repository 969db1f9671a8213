"""The gate's result of a model, kept in the cache folder by model id, and the wire form that follows from it.

`<cache>/gate/<model id>.json`. It belongs to the model, not to a file or a name, and stays outside the manifest, whose hash
is the model's id. A result that cannot be read counts as none: the form is then f32.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from swarm.dispatch.audit import DEFAULT_TOLERANCE
from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.gate.verdict import FormReport, Thresholds, read_figure
from swarm.ids import ModelId
from swarm.native.library import ENGINE_VARIABLE, EXPECTED_VERSIONS, choose_engine, installed_versions
from swarm.wire.rows import Wire, WireForm, parse_wire

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_RESULT_BYTES = 1 << 20  # a form takes 400 bytes
# Forms whose bytes differ by less count as equally cheap, and the more accurate one is chosen. Chosen: at D=3072 q8 costs
# 0.8 % more than fp8, which no path notices, and fp8 flips 4 and 15 times as many clear tokens (docs/gate.md).
EQUAL_COST_SHARE = 0.05
# An audit's tolerance is AUDIT_MARGIN times the largest difference that was measured between honest answers; guessed. At least
# twice what devices differ by that round activations otherwise (1.5 %, docs/audit.md). At most: noise of 5 % must be seen.
AUDIT_MARGIN, LEAST_TOLERANCE, MOST_TOLERANCE = 3.0, 0.03, 0.04
FALLBACK = Wire(WireForm.F32, WireForm.F32)

Method = Literal["logits", "layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What `swarm verify --save` found.

    Attributes:
        engine: library and version; with another one the result does not count.
        version: swarm's own.
        date: when, ISO 8601, UTC.
        method: `logits` against stock llama.cpp, or `layers` against f32 (`layer_samples`).
        text_sha256: of the text's UTF-8 bytes.
        n_peers: simulated peers, in contiguous slices.
    """

    model: ModelId
    model_name: str
    engine: str
    version: str
    date: str
    method: Method
    text_sha256: str
    n_text_tokens: int
    n_peers: int
    thresholds: Thresholds
    forms: tuple[FormReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a plain object."""
        return {
            "format": FORMAT,
            "model": str(self.model),
            "model_name": self.model_name,
            "engine": self.engine,
            "version": self.version,
            "date": self.date,
            "method": self.method,
            "text_sha256": self.text_sha256,
            "n_text_tokens": self.n_text_tokens,
            "n_peers": self.n_peers,
            "thresholds": self.thresholds.to_json(),
            "wires": [form.to_json() for form in self.forms],
        }


def engine_name() -> str:
    """Return library and version of this process's engine, without loading it; raises EngineUnavailable."""
    name = choose_engine(os.environ.get(ENGINE_VARIABLE), installed_versions())
    return f"{name} {EXPECTED_VERSIONS[name]}"


class WireChoice(NamedTuple):
    """A form, and why it was chosen, for people."""

    wire: Wire
    reason: str


def choose_wire(result: GateResult | None, engine: str) -> WireChoice:
    """Return the cheapest form that passed; f32 where nothing is known or nothing passed.

    Of forms that cost nearly the same (EQUAL_COST_SHARE) it is the one with the higher mean cosine. The form `exact` is
    never chosen: it needs exact kernels everywhere, which only a person can ask for.
    """
    if result is None:
        return WireChoice(
            FALLBACK, "this model has no stored gate result; `swarm verify --model FILE --wire all --save` makes one"
        )
    if result.engine != engine:
        return WireChoice(
            FALLBACK, f"the stored gate result is of {result.engine}, and this is {engine}: verify it again"
        )
    by_cost = sorted(
        (form for form in result.forms if form.wire.back is not WireForm.EXACT), key=lambda form: form.bytes_per_row
    )
    passed = [form for form in by_cost if form.passed]
    if not passed:
        return WireChoice(FALLBACK, f"no form passed the gate of {result.date[:10]}; look at `swarm verify --wire all`")
    limit = passed[0].bytes_per_row * (1 + EQUAL_COST_SHARE)
    chosen = max((form for form in passed if form.bytes_per_row <= limit), key=lambda form: form.mean_cosine or 0.0)
    reasons = [f"the cheapest that passed the gate of {result.date[:10]} ({describe(chosen)})"]
    for form in by_cost[: by_cost.index(chosen)]:
        if form.passed:
            reasons.append(f"{form.wire} costs nearly as much ({form.bytes_per_row} bytes) and is less accurate")
        else:
            reasons.append(f"{form.wire} failed: {form.reasons[0]}")
    return WireChoice(chosen.wire, "; ".join(reasons))


def asked_wire(wire: Wire, result: GateResult | None) -> WireChoice:
    """Return the form that a person asked for; the reason warns when it is known to have failed."""
    form = next((form for form in result.forms if form.wire == wire), None) if result is not None else None
    if form is None or form.passed:
        return WireChoice(wire, "as --wire asks")
    return WireChoice(wire, f"as --wire asks, although it failed the gate: {form.reasons[0]}")


def audit_tolerance(result: GateResult | None, wire: Wire) -> float:
    """Return from which relative difference of a row on two answers in this form are not the same."""
    form = next((form for form in result.forms if form.wire == wire), None) if result is not None else None
    if form is None or form.audit_error is None:
        return DEFAULT_TOLERANCE
    return min(max(AUDIT_MARGIN * form.audit_error, LEAST_TOLERANCE), MOST_TOLERANCE)


def describe(form: FormReport) -> str:
    """Return a form's figures in a few words."""
    parts = [f"{form.bytes_per_row} bytes a row"]
    if form.clear_agreement is not None:
        parts.append(f"clear agreement {form.clear_agreement:.2%}")
    if form.mean_cosine is not None:
        parts.append(f"mean cosine {form.mean_cosine:.5f}")
    if form.perplexity_ratio is not None:
        parts.append(f"perplexity x{form.perplexity_ratio:.4f}")
    return ", ".join(parts)


def result_path(cache_dir: Path, model: ModelId) -> Path:
    """Return where the model's result lies."""
    return cache_dir / "gate" / f"{model}.json"


def save_result(cache_dir: Path, result: GateResult) -> Path:
    """Write the result in place of an older one, atomically; return where. Raises UserError where that fails."""
    path = result_path(cache_dir, result.model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result.to_json(), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise UserError(f"cannot keep the gate's result in {path}: {error.strerror}") from error
    return path


def load_result(cache_dir: Path, model: ModelId) -> GateResult | None:
    """Return the model's result; None when there is none that can be read, with a warning if it is damaged."""
    path = result_path(cache_dir, model)
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise ValueError(f"too large: expected at most {MAX_RESULT_BYTES} bytes")
        result = _parse(json.loads(path.read_bytes()))
        if result.model != model:
            raise ValueError(f"of another model: got {result.model.short}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
        logger.warning("the gate's result %s cannot be used: %s; run `swarm verify --save` again", path, error)
        return None
    return result


def _parse(plain: Any) -> GateResult:
    if plain["format"] != FORMAT:
        raise ValueError(f"unknown format: got {plain['format']!r}, expected {FORMAT}")
    method = plain["method"]
    if method not in ("logits", "layers"):
        raise ValueError(f"bad method: got {method!r}")
    texts = {key: _text(plain, key) for key in ("model_name", "engine", "version", "date", "text_sha256")}
    thresholds = {}
    for key in Thresholds().to_json():
        value = read_figure(plain["thresholds"], key)
        if value is None:
            raise ValueError(f"bad {key}: got null")
        thresholds[key] = value
    return GateResult(
        model=ModelId.parse(_text(plain, "model")),
        method=method,
        n_text_tokens=_count(plain, "n_text_tokens"),
        n_peers=_count(plain, "n_peers"),
        thresholds=Thresholds(**thresholds),
        forms=tuple(_parse_form(form) for form in plain["wires"]),
        **texts,
    )


def _parse_form(plain: Mapping[str, Any]) -> FormReport:
    reasons = tuple(plain["reasons"])
    plain = {"audit_error": None} | dict(plain)  # a result of before it was measured
    identical = plain["identical"]
    if not all(isinstance(reason, str) for reason in reasons) or plain["passed"] is not (not reasons):
        raise ValueError("a form's verdict contradicts its reasons")
    if identical is not None and not isinstance(identical, bool):
        raise ValueError(f"bad identical: got {identical!r}")
    figures = (
        "argmax_agreement",
        "clear_agreement",
        "min_cosine",
        "mean_cosine",
        "perplexity_ratio",
        "perplexity_error",
        "audit_error",
    )
    return FormReport(
        wire=parse_wire(_text(plain, "wire")),
        bytes_per_row=_count(plain, "bytes_per_row"),
        n_positions=_count(plain, "n_positions"),
        identical=identical,
        reasons=reasons,
        **{key: read_figure(plain, key) for key in figures},
    )


def _text(plain: Mapping[str, Any], key: str) -> str:
    value = plain[key]
    if not isinstance(value, str):
        raise ValueError(f"bad {key}: got {value!r}")
    return value


def _count(plain: Mapping[str, Any], key: str) -> int:
    value = plain[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"bad {key}: got {value!r}")
    return value
