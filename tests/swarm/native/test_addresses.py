"""Where arrays lie."""

from __future__ import annotations

import ctypes

import numpy as np

from swarm.native.addresses import address_of


def test_the_address_is_that_of_the_first_element() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    for part in (array, array[2:], array[3:, :]):
        assert ctypes.c_int32.from_address(address_of(part)).value == part[0, 0]


def test_what_is_read_only_has_an_address_too() -> None:
    data = b"0123456789"
    part = np.frombuffer(memoryview(data)[3:], np.uint8)
    assert not part.flags.writeable
    assert ctypes.string_at(address_of(part), 4) == b"3456"


def test_an_array_can_be_resized_after_its_address_was_asked_for() -> None:
    array = np.zeros(4, np.float32)
    address_of(array)
    array.resize(8, refcheck=False)  # fails while somebody holds its buffer
    assert array.shape == (8,)
