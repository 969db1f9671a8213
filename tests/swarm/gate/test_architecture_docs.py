"""The table in docs/models.md says what the sweep said, and nothing around it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.architectures.recipes import RECIPES
from swarm.errors import UserError
from swarm.gate.architecture_check import ArchitectureReport
from swarm.gate.architecture_docs import BEGIN, END, replace_table
from swarm.gate.architecture_sweep import SweepReport

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
REPORT = SweepReport(
    architectures=(
        ArchitectureReport(
            name="olmoe",
            source="olmoe",
            status="identical",
            min_cosine=1.0,
            variants=("F32", "scales"),
            activations=("swiglu",),
        ),
        ArchitectureReport(name="dflash", source="dflash", status="failed", reason="a draft model"),
    )
)


def test_the_table_is_replaced_and_the_rest_stays() -> None:
    text = replace_table(f"# Models\n\n{BEGIN}\nold\n{END}\n\nMore.\n", REPORT)
    assert text.startswith(f"# Models\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nMore.\n")
    assert "old" not in text
    assert "| `olmoe` | OLMoE 1B-7B | swiglu | scales | width 1 | yes |" in text
    assert "- `dflash`: a draft model." in text
    assert replace_table(text, REPORT) == text


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}"])
def test_a_document_without_a_place_for_it_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError, match="no place for the table"):
        replace_table(text, REPORT)


def test_our_document_lists_every_architecture() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for recipe in RECIPES:
        assert f"| `{recipe.architecture}` |" in text
