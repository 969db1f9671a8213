"""Gives the system back the memory of tensors whose numbers nobody will read again. Where it cannot, it does nothing.

The addresses stay as they are: a page that is touched later begins as zeros. Linux alone promises that. Only ggml's plain memory
is given back: a mapped file is the system's anyway, and what is pinned for a device (CUDA_Host) must stay where it is.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from swarm.native.ggml import memory_name
from swarm.native.layouts import GgmlTensor

PLAIN = "CPU"  # ggml's name of memory that malloc gave it


def give_back(tensor: int) -> tuple[int, int]:
    """Give back a tensor's memory; return the address and the size of the whole pages in it, (0, 0) if that cannot be.

    The tensor must be dense, and nothing else may be kept where it lies.
    """
    if not sys.platform.startswith("linux") or memory_name(tensor) != PLAIN:
        return 0, 0
    struct = GgmlTensor.from_address(tensor)
    start = -(-struct.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (struct.data + struct.ne[3] * struct.nb[3]) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return 0, 0
    give_back_pages(start, end - start)
    return start, end - start


def give_back_pages(address: int, size_bytes: int) -> None:
    """Give back whole pages, as `give_back` returned them."""
    _madvise()(address, size_bytes, mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # where it refuses, all stays as it was


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
