"""Every architecture is tried in every type, and in the forms that its row of the table allows."""

from __future__ import annotations

from swarm.architectures.recipes import RECIPES
from swarm.architectures.variants import TYPES, variants_of
from swarm.model.expert_kinds import EXPERT_KINDS


def test_all_types_and_the_forms_of_the_row_are_tried() -> None:
    for recipe in RECIPES:
        variants = variants_of(recipe)
        assert len({variant.name for variant in variants}) == len(variants)
        assert [variant.expert_type for variant in variants[: len(TYPES)]] == list(TYPES)
        kind = EXPERT_KINDS.get(recipe.architecture)
        if kind is not None:
            assert any(variant.has_scales for variant in variants) == kind.has_scales
            assert any(variant.splits_gate_up and not variant.has_scales for variant in variants) == kind.is_merged
