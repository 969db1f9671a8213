"""What the bytes benchmark is asked to measure."""

from __future__ import annotations

import pytest

from swarm.bench.wire_bytes import WireBytesOptions
from swarm.errors import UserError
from swarm.wire.rows import parse_wire

Q8 = parse_wire("q8")


def test_exact_is_always_measured_and_each_form_once() -> None:
    options = WireBytesOptions(wires=(Q8, parse_wire("exact"), parse_wire("q8/q8")))
    assert [str(wire) for wire in options.all_wires] == ["exact", "q8"]


def test_one_peer_is_measured_once_whatever_the_slices() -> None:
    assert WireBytesOptions(wires=(Q8,), n_peers=(1, 4)).layouts == [
        (1, "contiguous"),
        (4, "contiguous"),
        (4, "clustered"),
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"slices": ("random",)}, "unknown kind of slices: got random"),
        ({"slices": ()}, "unknown kind of slices: got none"),
        ({"n_peers": (4, 129)}, "number of peers out of range: got 129, expected 1 to 128"),
        ({"n_peers": (0,)}, "number of peers out of range: got 0"),
    ],
)
def test_what_cannot_be_measured_is_the_users_mistake(bad: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        WireBytesOptions(wires=(Q8,), **bad)  # type: ignore[arg-type]
