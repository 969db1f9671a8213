"""How `--wire` is read; the command as a whole is tests/e2e/test_verify.py."""

from __future__ import annotations

import pytest

from swarm.cli.verify import parse_wires
from swarm.errors import UserError
from swarm.gate.form_table import all_wires
from swarm.gate.outcome import EXACT
from swarm.wire.rows import parse_wire

F32, Q8 = parse_wire("f32"), parse_wire("q8")


def test_all_names_every_form_and_requires_exact_and_f32() -> None:
    assert parse_wires("all") == (all_wires(), frozenset({EXACT, F32}))


def test_a_list_takes_each_form_once_exact_first_and_requires_them_all() -> None:
    wires, required = parse_wires("q8, f32,exact,q8")
    assert wires == (EXACT, Q8, F32)
    assert required == frozenset(wires)


@pytest.mark.parametrize("text", ["", "q9", "q8,", "exact/f32", "all,q8"])
def test_an_unknown_form_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_wires(text)
