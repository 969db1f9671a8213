"""Memory that goes back to the system: whole pages of ggml's plain memory alone, which then read as zeros."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from swarm.native import ggml
from swarm.native.layouts import GGML_TYPE_F32
from swarm.native.pages import give_back, give_back_freed, give_back_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone promises zeros")
N_VALUES = 4 * mmap.PAGESIZE


@pytest.fixture
def placed() -> Iterator[tuple[int, np.ndarray]]:
    """A tensor of sixteen pages that does not begin at a page, all ones, and the whole buffer as values."""
    with ggml.CpuBackend() as backend:
        buffer = backend.allocate(8 * N_VALUES)
        context = ggml.TensorContext(4)
        values = buffer.data.view(np.float32)
        values[:] = 1
        tensor = context.new_tensor(GGML_TYPE_F32, N_VALUES)
        offset = -values.ctypes.data % mmap.PAGESIZE + 64
        buffer.place(tensor, offset)
        yield tensor, values
        del values
        context.close()
        buffer.close()


def test_whole_pages_of_a_tensor_go_back_and_nothing_beside_them(placed: tuple[int, np.ndarray]) -> None:
    tensor, values = placed
    address, size_bytes = give_back(tensor)
    assert size_bytes == 15 * mmap.PAGESIZE
    assert address % mmap.PAGESIZE == 0
    first = (address - values.ctypes.data) // 4
    given = slice(first, first + size_bytes // 4)
    assert not values[given].any()
    values[given] = 1
    assert values.all()
    give_back_pages(address, size_bytes)
    assert np.count_nonzero(values == 0) == size_bytes // 4


def test_what_lies_elsewhere_stays(placed: tuple[int, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, values = placed
    for name in ("CUDA_Host", "CPU_Mapped", ""):
        monkeypatch.setattr("swarm.native.pages.memory_name", lambda tensor, name=name: name)
        assert give_back(tensor) == (0, 0)
    assert values.all()


def test_a_tensor_without_memory_has_none_to_give() -> None:
    context = ggml.TensorContext(4)
    assert ggml.memory_name(context.new_tensor(GGML_TYPE_F32, 4)) == ""
    assert give_back(context.new_tensor(GGML_TYPE_F32, 4)) == (0, 0)
    context.close()


def test_freed_memory_can_go_back_at_any_time() -> None:
    give_back_freed()
