"""The recipes cover what the table of expert kinds promises, and nothing twice."""

from __future__ import annotations

from swarm.architectures.families import FAMILIES
from swarm.architectures.recipes import RECIPES, metadata
from swarm.model.expert_kinds import EXPERT_KINDS


def test_every_caller_of_llama_cpps_moe_has_a_recipe_and_no_architecture_two() -> None:
    assert len({recipe.source for recipe in RECIPES}) == 58
    assert len({recipe.architecture for recipe in RECIPES}) == len(RECIPES) == 62


def test_a_row_of_the_table_has_a_recipe_to_prove_it_and_the_other_way_round() -> None:
    provable = {recipe.architecture for recipe in RECIPES if not recipe.why_not}
    assert provable == set(EXPERT_KINDS)


def test_every_architecture_has_a_name_that_people_know() -> None:
    assert set(FAMILIES) == {recipe.architecture for recipe in RECIPES}


def test_keys_carry_the_architectures_prefix_and_what_is_left_out_is_not_there() -> None:
    for recipe in RECIPES:
        keys = metadata(recipe)
        own = [key for key in keys if not key.startswith(("general.", "tokenizer."))]
        assert all(key.startswith(f"{recipe.architecture}.") for key in own)
        assert not any(f"{recipe.architecture}.{key}" in keys for key in recipe.left_out)
    replaced = metadata(RECIPES[0], expert_count=64)
    assert replaced[f"{RECIPES[0].architecture}.expert_count"] == 64
