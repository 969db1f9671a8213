"""Row codecs: a [N, D] float32 array as the bytes of a dispatch or of its answer.

Knows nothing of frames, experts or which rows these are; says only how the numbers of a row are written. A *form* is what a
person chooses with `--wire OUT/BACK`; a *codec* is what travels, and has a code in the frames. Codes are never reused.

    form   codec out                      codec back
    exact  EXACT                          EXACT: one raw row per (token, expert) pair, combined in llama.cpp's order
    f32    F32                            F32, and all below: one weighted partial sum per token
    bf16   BF16                           BF16
    f16    F16                            F16
    q8     Q8_0 or Q8_K, as ggml itself   INT8
           would quantise x for these
           weights; INT8 where it would not
    fp8    FP8                            FP8

    code  codec   a row of D values                           bytes a value
    0     EXACT   f32                                         4
    1     F32     f32                                         4
    2     BF16    bf16                                        2
    3     F16     f16                                         2
    4     Q8_0    f16 scales of 32 values, then i8 values     1.0625
    5     Q8_K    f32 scales of 256 values, then i8 values    1.0156
    6     INT8    bf16 scales of 64 values, then i8 values    1.0313
    7     FP8     bf16 scales of 128 values, then e4m3 values 1.0156

All numbers are little-endian. How each is rounded, why, and with what error is `swarm.wire.quantise`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from swarm.errors import RemoteProtocolError, UserError
from swarm.wire import quantise


class WireForm(StrEnum):
    """How a person asks for rows to travel."""

    EXACT = "exact"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    Q8 = "q8"
    FP8 = "fp8"


class RowCodec(IntEnum):
    """How rows are written on the wire; the value is the u8 that stands for it in a frame."""

    EXACT = 0
    F32 = 1
    BF16 = 2
    F16 = 3
    Q8_0 = 4
    Q8_K = 5
    INT8 = 6
    FP8 = 7

    @classmethod
    def from_code(cls, code: int) -> Self:
        """Return the codec of an untrusted code; raises RemoteProtocolError."""
        codec = _CODECS.get(code)  # a tenth of what the enum's own look-up takes
        if codec is None:
            raise RemoteProtocolError(f"unknown row codec: got code {code}, expected 0 to {max(cls).value}")
        return codec


_CODECS = {int(codec): codec for codec in RowCodec}

# Rows of so many bytes of float32 are encoded at a time: what an encoder makes on its way then stays in the cache, instead of on
# fresh pages. Measured, 512 rows of D=2048 after 40 MB were read, on a busy machine: F16 10.1 ms whole, 4.2 by 32 to 256 KB,
# Q8_K 6.3 and 1.9 to 4.3. Decoding makes little on its way: no gain.
ENCODED_AT_ONCE_BYTES = 128 << 10


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


_CODEC_OF = {
    WireForm.EXACT: RowCodec.EXACT,
    WireForm.F32: RowCodec.F32,
    WireForm.BF16: RowCodec.BF16,
    WireForm.F16: RowCodec.F16,
    WireForm.Q8: RowCodec.INT8,
    WireForm.FP8: RowCodec.FP8,
}
# ggml's weight types by the form that their dot product wants x in: `vec_dot_type` of ggml's CPU traits, equal in both
# pinned libraries (a test asks the library). Float weights, whose x stays a float, are in neither.
_WANTS_Q8_0 = frozenset(
    {
        *(2, 6, 8),  # Q4_0, Q5_0, Q8_0
        *(3, 7),  # Q4_1, Q5_1: want Q8_1, which is Q8_0 with the sum of each block beside it
        *(20, 39, 40, 41, 42),  # IQ4_NL, MXFP4, NVFP4, Q1_0, Q2_0
    }
)
_WANTS_Q8_K = frozenset(
    {
        *(10, 11, 12, 13, 14),  # Q2_K to Q6_K
        *(16, 17, 18, 19, 21, 22, 23, 29),  # IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ3_S, IQ2_S, IQ4_XS, IQ1_M
        *(34, 35),  # TQ1_0, TQ2_0
    }
)


def out_codec(form: WireForm, n_embd: int, ggml_types: Iterable[int]) -> RowCodec:
    """Return the codec of rows that go out to weights of these ggml types: those that x itself is multiplied with.

    `q8` becomes what ggml would quantise x to. Where the weights disagree (gate in one type, up in another) Q8_0, the finer of
    the two, and INT8 where any of them takes x as floats, or D is not a multiple of the block.
    """
    if form is not WireForm.Q8:
        return _CODEC_OF[form]
    types = frozenset(ggml_types)
    if types and types <= _WANTS_Q8_K and n_embd % quantise.Q8_K_BLOCK == 0:
        return RowCodec.Q8_K
    if types and types <= _WANTS_Q8_0 | _WANTS_Q8_K and n_embd % quantise.Q8_0_BLOCK == 0:
        return RowCodec.Q8_0
    return RowCodec.INT8


def back_codec(form: WireForm) -> RowCodec:
    """Return the codec of rows that come back."""
    return _CODEC_OF[form]


class _Layout(NamedTuple):
    """How one codec writes rows: [N, D] to [N, bytes] and back, both freshly allocated."""

    value_bytes: int
    block: int  # values that share a scale; 0: there are none
    scale_bytes: int
    may_be_ragged: bool  # whether D need not be a multiple of the block
    encode: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
    decode: Callable[[npt.NDArray[np.uint8], int], npt.NDArray[np.float32]]


_F4 = np.dtype("<f4")
_F32 = _Layout(
    4,
    0,
    0,
    True,
    lambda x: x.astype(_F4, copy=False).view(np.uint8),
    lambda raw, _: raw.view(_F4).astype(np.float32),
)
_LAYOUTS = {
    RowCodec.EXACT: _F32,
    RowCodec.F32: _F32,
    RowCodec.BF16: _Layout(2, 0, 0, True, quantise.encode_bf16, lambda raw, _: quantise.decode_bf16(raw)),
    RowCodec.F16: _Layout(2, 0, 0, True, quantise.encode_f16, lambda raw, _: quantise.decode_f16(raw)),
    RowCodec.Q8_0: _Layout(1, quantise.Q8_0_BLOCK, 2, False, quantise.encode_q8_0, quantise.decode_q8_0),
    RowCodec.Q8_K: _Layout(1, quantise.Q8_K_BLOCK, 4, False, quantise.encode_q8_k, quantise.decode_q8_k),
    RowCodec.INT8: _Layout(1, quantise.INT8_BLOCK, 2, True, quantise.encode_int8, quantise.decode_int8),
    RowCodec.FP8: _Layout(1, quantise.FP8_BLOCK, 2, True, quantise.encode_fp8, quantise.decode_fp8),
}


@functools.lru_cache(maxsize=256)  # asked for a dozen times per layer; bounded, since others' sizes are asked for too
def row_bytes(n_embd: int, codec: RowCodec) -> int:
    """Return the size of one row of `n_embd` values, in bytes."""
    layout = _LAYOUTS[codec]
    n_scales = -(-n_embd // layout.block) if layout.block else 0
    return layout.value_bytes * n_embd + layout.scale_bytes * n_scales


def encode_rows(x: npt.NDArray[np.float32], codec: RowCodec) -> bytes:
    """Return the rows of `x`, shape [N, D], float32, any strides; `N * row_bytes(D, codec)` bytes.

    D must be a multiple of the block for Q8_0 and Q8_K (`out_codec` sees to it). Values that are not finite stay so, and
    make their whole block so; see `swarm.wire.quantise`.
    """
    assert x.dtype == np.float32, f"rows have a wrong type: got {x.dtype}, expected float32"
    n_rows, n_embd = x.shape
    layout = _LAYOUTS[codec]
    assert layout.may_be_ragged or n_embd % layout.block == 0, f"{codec.name} cannot carry rows of {n_embd}"
    if n_rows == 1 and n_embd:
        return layout.encode(np.ascontiguousarray(x)).tobytes()
    if not x.size:
        return b""
    step = max(1, ENCODED_AT_ONCE_BYTES // (4 * n_embd))
    cuts = range(0, n_rows, step)
    data = b"".join([layout.encode(np.ascontiguousarray(x[at : at + step])).tobytes() for at in cuts])
    assert len(data) == n_rows * row_bytes(n_embd, codec)
    return data


def decode_rows(
    data: bytes | memoryview, n_rows: int, n_embd: int, codec: RowCodec, *, require_finite: bool = False
) -> npt.NDArray[np.float32]:
    """Return untrusted rows, bytes, as shape [N, D], float32, freshly allocated (writable, aligned, free of `data`).

    Raises:
        RemoteProtocolError: another size than `n_rows` rows have, or a D that the codec cannot carry (both found before
            memory is taken); with `require_finite`, a NaN or an infinity, in a value or in a scale.
    """
    layout = _LAYOUTS[codec]
    expected = n_rows * row_bytes(n_embd, codec)
    if n_rows < 0 or n_embd < 1 or len(data) != expected:
        raise RemoteProtocolError(
            f"rows have a wrong size: got {len(data)} bytes, expected {expected} for {n_rows} rows of {n_embd} values"
        )
    if not layout.may_be_ragged and n_embd % layout.block:
        raise RemoteProtocolError(
            f"rows have a wrong width: got {n_embd} values in {codec.name}, expected a multiple of {layout.block}"
        )
    if not n_rows:
        return np.empty((0, n_embd), np.float32)
    raw = np.frombuffer(data, np.uint8).reshape(n_rows, -1)  # [N, bytes of a row]
    x = layout.decode(raw, n_embd)  # [N, D]
    if require_finite and not np.isfinite(x).all():
        bad_row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise RemoteProtocolError(f"rows are not finite: got a NaN or an infinity in row {bad_row} of {n_rows}")
    return x
