"""What options turn their text into."""

from __future__ import annotations

import pytest

from swarm.cli.options import settle_advertise, settle_device
from swarm.errors import UserError


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
