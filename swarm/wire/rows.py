"""Row codecs: a [N, D] float32 array as the bytes of a dispatch or of its answer.

Knows nothing of frames, experts or which rows these are; says only how the numbers of a row are written.

    code  form   rows out                 rows back
    0     exact  f32, little-endian       f32, one raw row per (token, expert) pair, combined in llama.cpp's order
    1     f32    f32, little-endian       f32, one weighted partial sum per token

Both forms write a value in the same four bytes; they differ in what the rows that come back are.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from swarm.errors import RemoteProtocolError, UserError


class WireForm(StrEnum):
    """How rows are written on the wire. Codes are never reused."""

    EXACT = "exact"
    F32 = "f32"

    @property
    def code(self) -> int:
        """The u8 that stands for this form in a frame."""
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> Self:
        """Return the form of an untrusted code; raises RemoteProtocolError."""
        for form, known in _CODES.items():
            if known == code:
                return cls(form)
        raise RemoteProtocolError(f"unknown wire form: got code {code}, expected one of {sorted(_CODES.values())}")


_CODES = {WireForm.EXACT: 0, WireForm.F32: 1}


class Wire(NamedTuple):
    """The two forms of a dispatch: of the rows that go out and of those that come back."""

    out: WireForm
    back: WireForm

    def __str__(self) -> str:
        return self.out.value if self.out is self.back else f"{self.out.value}/{self.back.value}"


def parse_wire(text: str) -> Wire:
    """Return the forms that `--wire OUT/BACK` names; one name means both. Raises UserError."""
    names = text.split("/")
    known = [form.value for form in WireForm]
    if len(names) > 2 or any(name not in known for name in names):
        raise UserError(f"unknown wire form: got {text!r}, expected one of {', '.join(known)}, or OUT/BACK")
    wire = Wire(WireForm(names[0]), WireForm(names[-1]))
    if (wire.out is WireForm.EXACT) is not (wire.back is WireForm.EXACT):
        raise UserError(f"wire forms do not go together: got {text!r}, expected exact for both ways or for neither")
    return wire


def row_bytes(n_embd: int, form: WireForm) -> int:
    """Return the size of one row of `n_embd` values, in bytes."""
    if form in (WireForm.EXACT, WireForm.F32):
        return 4 * n_embd
    raise NotImplementedError(form)  # a form that was added above but not here


def encode_rows(x: npt.NDArray[np.float32], form: WireForm) -> bytes:
    """Return the rows of `x`, shape [N, D], float32, any strides; `N * row_bytes(D, form)` bytes."""
    assert x.ndim == 2, f"rows have a wrong shape: got {x.shape}, expected [N, D]"
    assert x.dtype == np.float32, f"rows have a wrong type: got {x.dtype}, expected float32"
    data = x.astype("<f4", copy=False).tobytes()
    assert len(data) == len(x) * row_bytes(x.shape[1], form)
    return data


def decode_rows(
    data: bytes | memoryview, n_rows: int, n_embd: int, form: WireForm, *, require_finite: bool = False
) -> npt.NDArray[np.float32]:
    """Return untrusted rows as shape [N, D], float32, freshly allocated (writable, aligned, free of `data`).

    Raises:
        RemoteProtocolError: another size than `n_rows` rows have (found before memory is taken); with
            `require_finite`, a NaN or an infinity.
    """
    expected = n_rows * row_bytes(n_embd, form)
    n_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if n_rows < 0 or n_embd < 1 or n_bytes != expected:
        raise RemoteProtocolError(
            f"rows have a wrong size: got {n_bytes} bytes, expected {expected} for {n_rows} rows of {n_embd} values"
        )
    x = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=True).reshape(n_rows, n_embd)  # [N, D]
    if require_finite and not np.isfinite(x).all():
        bad_row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise RemoteProtocolError(f"rows are not finite: got a NaN or an infinity in row {bad_row} of {n_rows}")
    return x
