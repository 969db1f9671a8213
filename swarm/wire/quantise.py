"""Rounds float32 rows to fewer bytes and back, in vectorised numpy. Knows the layouts, and nothing of who sends what.

A row of D values stands by itself: first its scales, one for each block of values, then its values.

    layout  block  a row's bytes                              bytes a value, large D
    Q8_0    32     D/32 x f16 scale, D x i8                   1.0625
    Q8_K    256    D/256 x f32 scale, D x i8                  1.0156
    INT8    64     ceil(D/64) x bf16 scale, D x i8            1.0313
    FP8     128    ceil(D/128) x bf16 scale, D x e4m3         1.0156
    BF16    -      D x bf16, nearest even                     2
    F16     -      D x f16, nearest even                      2

All little-endian; a value is its scale times its code. Q8_0 and Q8_K divide D; of INT8 and FP8 the last block may be short.

**Q8_0 and Q8_K** are ggml's own: before a dot product with quantised weights ggml rounds the row to one of them, by the
weight type's `vec_dot_type`. Scales and codes are, bit for bit, those of ggml's x86 kernels (Q8_0 multiplies by 127/max and
rounds ties to even; its portable code multiplies by 1/scale and rounds ties away from zero) and of
`quantize_row_q8_K_ref`. A peer rounds what we sent once more. Against rounding x there (tests/swarm/wire/test_quantise.py):

    weights want       the second rounding                          an expert's output, embedded models, 1,800 rows
    Q8_0               the same bytes                               Q8_0 file: all bit-identical
    Q8_K               the same codes, or scale and codes both      Q4_K_M file: 1,799 bit-identical, since the FFN rounds
                       negated (equal products); in 8 % of the      again before its down product; in one that rounding
                       blocks the scale, rounded twice, is off by   fell to the other side: 3e-4 of its largest value
                       its last bit: 1.2e-7 at most                 (random rows: 1 of 1,152, 2e-3)
    Q8_1 (Q4_1, Q5_1)  as Q8_0, but a block's sum, an f16, is off by what its scale lost in f16: 1e-3 at most

The two exceptions mean the same numbers: Q8_0 blocks with a largest value below 3.8e-6 (the f16 scale is 0, the codes do not
matter), and blocks with one below 3.8e-37, where 127/max overflows: ggml writes junk codes beside a zero scale, we write zeros.

**INT8 and FP8** serve partial sums, and rows out where ggml has no form of its own. Their scale is max/127 or max/448 as
bf16 rounded up: f32's range (an f16 scale loses precision below a largest value of 0.008, where partial sums of small
models live) and no code that needs clipping. Relative error (rms) measured on partial sums of the embedded models (1,800 rows)
and on normal values with 12 of 3,072 columns fifty times larger:

    block                    32       64       128      256         f16 2.1e-4, bf16 1.7e-3
    INT8   partial sums      0.0058   0.0066   0.0072   0.0082
           outliers          0.0124   0.0175   0.0237   0.0316
    FP8    partial sums      0.0237   0.0248   0.0255   0.0260
           outliers          0.0081   0.0084   0.0105   0.0130

INT8 takes 64: 0.0008 more than 32 for half the scales, a third of what 256 would add. FP8 takes 128: block size hardly matters.

**Not finite.** A NaN or an infinity makes its whole block NaN, in every block layout; BF16 and F16 keep it where it is. Finite
values stay finite, except beyond 8.3e6 in Q8_0 (its f16 scale overflows, as ggml's own does), beyond 3.3e38 in INT8 and FP8,
and where BF16 rounds to infinity (3.39e38). F16 clamps finite values to +-65504, so that one outlier does not end a request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Q8_0_BLOCK = 32  # QK8_0 of ggml
Q8_K_BLOCK = 256  # QK_K of ggml
INT8_BLOCK = 64  # measured, above
FP8_BLOCK = 128  # measured, above
FP8_MAX = 448.0  # largest e4m3 value (OCP e4m3fn: no infinity, 0x7f and 0xff are NaN)
F16_MAX = 65504.0
F16_OVERFLOW = 65520.0  # from here on f32 rounds to an f16 infinity

# Added to |v| < 2^22 it leaves v rounded to the nearest integer, ties to even, in the low bits: ggml's nearest_int. A
# NaN or an infinity leaves a zero (or a NaN's own low byte, beside a scale that is NaN too).
_ROUND = np.float32(12582912.0)
_QUIET_NAN = np.uint32(0x7FC00000)
_LOW = np.uint32(0xFFFF)
_HALF = np.uint32(16)
_MOST = np.float32(127.0)  # of an i8, in both directions
_LEAST_PEAK = 1e-36  # 127 over it is a float32
_Q8_0_MOST = 8e6  # over 127 an f16
_ORDINARY = 1e35  # times the largest code, 448, a float32 stays finite
_I1, _U2, _F2, _F4 = np.dtype("i1"), np.dtype("<u2"), np.dtype("<f2"), np.dtype("<f4")


class HalfKernels(NamedTuple):
    """Conversions between f32 and f16 in the processor's own instructions, which numpy does not use.

    Both take (input, output), arrays of as many values in C order, f16 ones of two bytes or as bytes, and round as numpy does:
    to nearest even, values from 65,520 on to infinity.
    """

    encode: Callable[[F32, npt.NDArray[np.float16]], None]
    decode: Callable[[Bytes, F32], None]


# Fewer values are numpy's: a call of ggml's takes more code, which is cold between two tokens. Encoding a row of 2,048 / 7,168
# takes 3.5 / 22 us with numpy and 1.2 / 2.7 with ggml, decoding 2.8 / 15 and 1.9 / 3.6; but after 6 MB were read numpy encodes
# 2,048 in 8 us and decodes them in 6, ggml in 7 and 12 (measured).
LEAST_TO_ENCODE, LEAST_TO_DECODE = 1 << 12, 1 << 13

_half: HalfKernels | None = None


def use_half_kernels(kernels: HalfKernels | None) -> None:
    """Convert many rows with these from now on; None: with numpy. The bits are the same (512 rows of 2,048: 0.05 for 1.6 ms)."""
    global _half
    _half = kernels


# Blocks: scales [N, B], codes [N, D]


def encode_q8_0(x: F32) -> Bytes:
    """Return rows [N, D], D a multiple of 32, as [N, 34/32 D] bytes."""
    peaks = _peaks(x, Q8_0_BLOCK)  # [N, B]
    # A row takes 19 us instead of 29 so, after 32 MB were read: `errstate` is much code for what is hardly ever needed.
    if np.minimum.reduce(peaks, axis=None) > _LEAST_PEAK and np.maximum.reduce(peaks, axis=None) < _Q8_0_MOST:
        return _q8_0(x, peaks)
    with np.errstate(all="ignore"):  # a block of zeros, or of what is no number, or too large for the scale
        return _q8_0(x, peaks)


def _q8_0(x: F32, peaks: F32) -> Bytes:
    codes = _integers(x, _MOST / peaks, Q8_0_BLOCK)
    return _join((peaks / _MOST).astype(_F2), codes)


def decode_q8_0(raw: Bytes, n_embd: int) -> F32:
    """Return [N, D] of what `encode_q8_0` wrote."""
    scales_end = 2 * (n_embd // Q8_0_BLOCK)
    return _times_untrusted(raw[:, scales_end:].view(_I1), decode_f16(raw[:, :scales_end]), Q8_0_BLOCK)


def encode_q8_k(x: F32) -> Bytes:
    """Return rows [N, D], D a multiple of 256, as [N, 260/256 D] bytes."""
    blocks = x.reshape(-1, Q8_K_BLOCK)  # [N*B, 256]
    first = np.abs(blocks).argmax(axis=1)  # of equal magnitudes ggml, too, takes the first, with its sign
    peaks = blocks[np.arange(len(blocks)), first].reshape(len(x), -1)  # [N, B]
    with np.errstate(all="ignore"):
        inverse = -_MOST / peaks
        scales = np.float32(1.0) / inverse + np.float32(0.0)  # a block of zeros has scale +0
        return _join(scales.astype(_F4, copy=False), _integers(x, inverse, Q8_K_BLOCK))


def decode_q8_k(raw: Bytes, n_embd: int) -> F32:
    """Return [N, D] of what `encode_q8_k` wrote."""
    n_scales = n_embd // Q8_K_BLOCK
    scales = raw[:, : 4 * n_scales].view(_F4).astype(np.float32)
    return _times_untrusted(raw[:, 4 * n_scales :].view(np.int8), scales, Q8_K_BLOCK)


def encode_int8(x: F32) -> Bytes:
    """Return rows [N, D] as [N, D + 2 ceil(D/64)] bytes."""
    with np.errstate(all="ignore"):
        scales, inverse = _bf16_scales(_peaks(x, INT8_BLOCK), _MOST)
        return _join(scales, _integers(x, inverse, INT8_BLOCK))


def decode_int8(raw: Bytes, n_embd: int) -> F32:
    """Return [N, D] of what `encode_int8` wrote."""
    n_scales = -(-n_embd // INT8_BLOCK)
    return _times_untrusted(raw[:, 2 * n_scales :].view(np.int8), decode_bf16(raw[:, : 2 * n_scales]), INT8_BLOCK)


def encode_fp8(x: F32) -> Bytes:
    """Return rows [N, D] as [N, D + 2 ceil(D/128)] bytes."""
    with np.errstate(all="ignore"):
        scales, inverse = _bf16_scales(_peaks(x, FP8_BLOCK), np.float32(FP8_MAX))
        bits = _times(x, inverse, FP8_BLOCK).view(np.uint32)
    # The upper half of an f32, its last bit set if anything below it is, rounds to e4m3 as the whole does.
    bits |= (bits & _LOW) + _LOW
    bits >>= _HALF
    return _join(scales, _E4M3_OF.take(bits))


def decode_fp8(raw: Bytes, n_embd: int) -> F32:
    """Return [N, D] of what `encode_fp8` wrote."""
    n_scales = -(-n_embd // FP8_BLOCK)
    return _times_untrusted(E4M3.take(raw[:, 2 * n_scales :]), decode_bf16(raw[:, : 2 * n_scales]), FP8_BLOCK)


def _peaks(x: F32, block: int) -> F32:
    """Return the largest magnitude of each block, [N, B]; NaN for a block with a NaN."""
    n_rows, n_embd = x.shape
    size = np.abs(x).ravel()
    starts = _starts(n_embd, block)
    if n_rows > 1:  # a third of what reducing an axis of 32 takes (512 rows of 2,048: 0.6 ms)
        starts = (np.arange(0, size.size, n_embd)[:, np.newaxis] + starts).ravel()
    peaks: F32 = np.maximum.reduceat(size, starts)
    return peaks.reshape(n_rows, -1)


@functools.lru_cache(maxsize=64)  # bounded, since others' sizes are asked for too
def _starts(n_embd: int, block: int) -> npt.NDArray[np.int64]:
    """Return where the blocks of a row begin; not to be written."""
    return np.arange(0, n_embd, block)


def _bf16_scales(peaks: F32, largest_code: np.float32) -> tuple[npt.NDArray[np.uint16], F32]:
    """Return peaks / largest_code rounded up to bf16, and the inverse of what was rounded."""
    bits = np.minimum((peaks / largest_code).view(np.uint32), _QUIET_NAN)  # no NaN that the addition would overflow
    upper = (bits + _LOW) >> _HALF
    return upper.astype(_U2), np.float32(1.0) / (upper << _HALF).view(np.float32)


def _integers(x: F32, factors: F32, block: int) -> Bytes:
    """Return x times its block's factor, rounded to integers (ties to even), as the bytes of int8, [N, D]."""
    scaled = _times(x, factors, block)
    scaled += _ROUND
    return scaled.view(np.uint32).astype(np.uint8)


def _times(values: F32, factors: F32, block: int) -> F32:
    """Return values [N, D] times their block's factor, [N, B], freshly allocated, [N, D]."""
    n_rows, n_embd = values.shape
    if n_embd % block:
        return values * np.repeat(factors, block, axis=1)[:, :n_embd]
    return (values.reshape(n_rows, -1, block) * factors[:, :, np.newaxis]).reshape(n_rows, n_embd)


def _times_untrusted(values: F32 | npt.NDArray[np.int8], factors: F32, block: int) -> F32:
    """Return the same, without a warning of numpy's where a stranger's factor is no number; floats may be changed in place.

    `errstate` costs as much as the product of one row, so it is set only where it may be needed.
    """
    x = values.astype(np.float32, order="C", copy=False)  # [N, D]; a product of two types takes longer, and more code
    if x.shape[1] % block == 0 and np.maximum.reduce(np.abs(factors), axis=None) < _ORDINARY:  # not so with a NaN
        blocks = x.reshape(len(x), -1, block)
        blocks *= factors[:, :, np.newaxis]
        return x
    with np.errstate(all="ignore"):
        return _times(x, factors, block)


def _join(scales: npt.NDArray[np.generic], codes: Bytes) -> Bytes:
    return np.concatenate((scales.view(np.uint8), codes), axis=1)


# Single values


def encode_bf16(x: F32) -> Bytes:
    """Return rows [N, D] as [N, 2 D] bytes."""
    bits = x.view(np.uint32)
    upper = ((bits + (((bits >> _HALF) & np.uint32(1)) + np.uint32(0x7FFF))) >> _HALF).astype(_U2)
    is_nan = np.isnan(x)
    if is_nan.any():
        upper[is_nan] = _QUIET_NAN >> _HALF  # rounding may have made it an infinity or a zero
    return upper.view(np.uint8)


def decode_bf16(raw: Bytes) -> F32:
    """Return [N, D] of [N, 2 D] bytes."""
    bits = raw.view(_U2).astype(np.uint32)
    bits <<= _HALF
    return bits.view(np.float32)


def encode_f16(x: F32) -> Bytes:
    """Return rows [N, D] as [N, 2 D] bytes."""
    if np.maximum.reduce(np.abs(x), axis=None) < F16_OVERFLOW:
        kernels = _half
        if kernels is None or x.size < LEAST_TO_ENCODE:
            return x.astype(_F2).view(np.uint8)
        halves = np.empty(x.shape, _F2)
        kernels.encode(x, halves)
        return halves.view(np.uint8)
    with np.errstate(all="ignore"):  # something rounds to an infinity, or there is a NaN
        halves = x.astype(_F2)
    is_over = np.isfinite(x) & (np.abs(x) >= F16_OVERFLOW)
    halves[is_over] = np.copysign(F16_MAX, x[is_over])
    return halves.view(np.uint8)


def decode_f16(raw: Bytes) -> F32:
    """Return [N, D] of [N, 2 D] bytes."""
    kernels = _half
    if raw.size < 2 * LEAST_TO_DECODE or kernels is None or not raw.flags.c_contiguous:
        return raw.view(_F2).astype(np.float32)
    x = np.empty((len(raw), raw.shape[1] // 2), np.float32)
    kernels.decode(raw, x)
    return x


def _e4m3_values() -> F32:
    """Return the value of each e4m3 code, [256]: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * np.exp2(exponents.astype(np.float64) - 10))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


def _e4m3_codes() -> Bytes:
    """Return the code nearest to the f32 whose upper half is the index, [65536], ties to even.

    Above 448 and for infinities: 448. For NaNs: 0, since only a block whose scale is NaN, or zero, has them.
    """
    values = (np.arange(1 << 15, dtype=np.uint32) << _HALF).view(np.float32)  # not negative
    midpoints = ((E4M3[:126] + E4M3[1:127]) / 2).astype(np.float32)  # exact: one bit more than e4m3
    codes = np.searchsorted(midpoints, values, side="left").astype(np.uint8)  # a midpoint goes down
    is_tie = midpoints[np.minimum(codes, 125)] == values
    codes += (is_tie & (codes % 2 == 1)).astype(np.uint8)  # unless up is even
    codes[np.isnan(values)] = 0
    return np.concatenate((codes, codes | np.uint8(128)))


E4M3 = _e4m3_values()
_E4M3_OF = _e4m3_codes()
