"""What was asked of `swarm verify`, and what its comparisons say together. Pure: it runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.files import Folders
from swarm.gate.stored import GateResult, Method, choose_wire, engine_name
from swarm.gate.verdict import DEFAULT_THRESHOLDS, FormReport, Thresholds
from swarm.gate.verify import VerifyReport
from swarm.wire.rows import Wire, WireForm

EXACT = Wire(WireForm.EXACT, WireForm.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """What a person asked for.

    Attributes:
        wires: at least one form, each once.
        required: of them, those without which the run fails.
        n_tokens: decoded over the real swarm after each prompt.
        text: file with held-out text; needed unless the only form is `exact`.
        n_text_tokens: None takes MIN_TEXT_TOKENS, or DEFAULT_TOKENS layer by layer.
        device: where the forms' experts are computed, by name; None: as peers with exact kernels do. Stock stays on the CPU.
        layers: sample these layers; None: only if the model is too large, and then some; empty: some in any case.
    """

    path: Path
    folders: Folders
    wires: tuple[Wire, ...]
    required: frozenset[Wire]
    n_peers: int = 3
    n_tokens: int = 200
    control: bool = False
    text: Path | None = None
    n_text_tokens: int | None = None
    device: str | None = None
    layers: frozenset[int] | None = None
    thresholds: Thresholds = DEFAULT_THRESHOLDS

    @property
    def needs_table(self) -> bool:
        """Whether any form must be measured on a text."""
        return not self.control and self.wires != (EXACT,)


@dataclass(slots=True)
class Outcome:
    """What a run found.

    Attributes:
        prompts: the real swarm against stock; None layer by layer.
        forms: in the order asked for.
        n_shortcut_differences: for each form, rows that differ between real and simulated peers; None: not carried.
        gate: what can be stored; None where no text was used.
    """

    config: VerifyConfig
    method: Method = "logits"
    prompts: VerifyReport | None = None
    forms: tuple[FormReport, ...] = ()
    n_shortcut_differences: Mapping[Wire, int | None] = field(default_factory=dict)
    n_text_tokens: int = 0
    gate: GateResult | None = None

    @property
    def identical(self) -> bool | None:
        """Whether every logit of the first form, over the real swarm and in the table, is stock's bit for bit."""
        if self.prompts is None:
            return None
        return self.prompts.identical and bool(self.forms) and self.forms[0].identical is True

    @property
    def is_shortcut_honest(self) -> bool:
        """Whether simulated and real peers agreed wherever both were asked."""
        return not any(self.n_shortcut_differences.values())

    @property
    def passed(self) -> bool:
        """Whether all that was required holds."""
        forms = all(form.passed for form in self.forms if form.wire in self.config.required)
        prompts = self.prompts is None or (
            self.prompts.assignments_add_up and (self.prompts.identical or self.config.wires[0] != EXACT)
        )
        return forms and prompts and self.is_shortcut_honest

    @property
    def fault_found(self) -> bool:
        """Whether a planted fault was noticed."""
        return self.config.control and self.identical is False

    def to_json(self) -> dict[str, Any]:
        """Return a plain object with the keys that scripts rely on."""
        config, prompts = self.config, self.prompts
        plain: dict[str, Any] = {
            "model": config.path.name,
            "engine": engine_name(),
            "wire": ",".join(map(str, config.wires)),
            "method": self.method,
            "device": config.device,
            "identical": self.identical,
            "passed": self.passed,
            "control": config.control,
            "fault_found": self.fault_found,
            "thresholds": config.thresholds.to_json(),
            "n_text_tokens": self.n_text_tokens,
            "wires": [
                form.to_json() | {"n_shortcut_differences": self.n_shortcut_differences.get(form.wire)}
                for form in self.forms
            ],
        }
        if self.gate is not None:
            wire, reason = choose_wire(self.gate, self.gate.engine)
            plain |= {"chosen": str(wire), "chosen_because": reason}
        if prompts is not None:
            n_positions = sum(prompt.n_positions for prompt in prompts.prompts)
            plain |= {
                "n_assignments": prompts.n_assignments,
                "n_assignments_expected": prompts.n_assignments_expected,
                "assignments_add_up": prompts.assignments_add_up,
                "assignments_by_peer": prompts.assignments_by_peer,
                "argmax_agreement": sum(prompt.n_same_argmax for prompt in prompts.prompts) / n_positions,
                "prompts": [
                    {
                        "n_prompt": prompt.n_prompt,
                        "n_positions": prompt.n_positions,
                        "n_different": prompt.n_different,
                        "first_difference": prompt.first_difference,
                        "max_difference": prompt.max_difference,
                    }
                    for prompt in prompts.prompts
                ],
            }
        return plain
