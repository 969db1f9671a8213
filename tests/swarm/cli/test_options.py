"""What options turn their text into."""

from __future__ import annotations

import pytest

from swarm.cli.options import settle_advertise, settle_device, settle_nodes
from swarm.errors import UserError
from swarm.ids import NodeId


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("192.0.2.1:4000", "192.0.2.1:4000"),
        ("[2001:db8::1]:4000", "[2001:db8::1]:4000"),
        ("localhost:4000", "127.0.0.1:4000"),
    ],
)
def test_an_advertised_address_takes_the_form_that_records_carry(text: str | None, expected: str | None) -> None:
    assert settle_advertise(text) == expected


@pytest.mark.parametrize("text", ["", "192.0.2.1", "192.0.2.1:0", "192.0.2.1:x"])
def test_an_address_that_cannot_be_announced_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        settle_advertise(text)


def test_exact_kernels_are_the_cpus() -> None:
    assert settle_device("CUDA", exact_kernels=False) == "cuda"
    assert settle_device("cpu", exact_kernels=True) == "cpu"
    with pytest.raises(UserError, match="exact kernels are the CPU's: got --device auto"):
        settle_device("auto", exact_kernels=True)


def test_nodes_are_a_comma_list_of_whole_ids() -> None:
    a, b = (NodeId(bytes([n]) * 32) for n in (1, 2))
    assert settle_nodes(None) == frozenset()
    assert settle_nodes(f"{a}, {b}") == {a, b}
    with pytest.raises(UserError, match="not a node id"):
        settle_nodes(a.short)
