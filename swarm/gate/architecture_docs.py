"""The table of architectures in docs/models.md, written from a sweep; the text around it stays."""

from __future__ import annotations

from swarm.architectures.families import FAMILIES
from swarm.architectures.recipes import RECIPES
from swarm.architectures.variants import TYPES
from swarm.errors import UserError
from swarm.gate.architecture_check import ArchitectureReport
from swarm.gate.architecture_sweep import SweepReport
from swarm.model.expert_kinds import EXPERT_KINDS, Stub

BEGIN = "<!-- sweep: written by `swarm verify --arch all --docs`, edits are lost -->"
END = "<!-- end of sweep -->"


def table_of(report: SweepReport) -> str:
    """Return the sweep as Markdown: a line of figures, a table, and reasons."""
    sources = {recipe.source for recipe in RECIPES}
    others = {each.source for each in report.architectures if not each.identical}
    n_identical = len({each.source for each in report.architectures} - others)
    lines = [
        f"{n_identical} of llama.cpp's {len(sources)} callers of `build_moe_ffn`, {report.n_identical} architectures, are "
        f"bit-identical ({report.to_json()['engine']}), in {len(TYPES)} types each: {', '.join(TYPES)}.",
        "",
        "| architecture | models | experts | also | stub | identical |",
        "|---|---|---|---|---|---|",
        *(_row(each) for each in report.architectures),
    ]
    reasons = [f"- `{each.name}`: {each.reason}." for each in report.architectures if not each.identical]
    return "\n".join([*lines, *(["", "Not served, or not proven:", "", *reasons] if reasons else [])])


def _row(report: ArchitectureReport) -> str:
    kind = EXPERT_KINDS.get(report.name)
    activations = ", ".join(dict.fromkeys(text.split(" ")[0] for text in report.activations)) or "-"
    more = [name for name in report.variants if name not in TYPES and not name.startswith("Q4_K,")]
    stub = "-" if kind is None else "full width" if kind.stub is Stub.SPARSE else "width 1"
    verdict = "yes" if report.identical else f"no ({report.status})"
    return f"| `{report.name}` | {FAMILIES.get(report.name, '')} | {activations} | {'; '.join(more)} | {stub} | {verdict} |"


def replace_table(text: str, report: SweepReport) -> str:
    """Return the document with its table replaced. Raises UserError where it has no place for one."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"the document has no place for the table: expected one line {BEGIN} and one line {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table_of(report)}\n\n{END}{rest.split(END)[1]}"
