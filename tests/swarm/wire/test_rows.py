"""Row codecs: golden bytes, round trips, sizes found before memory is taken, and the `--wire` texts."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import RemoteProtocolError, UserError
from swarm.wire.rows import (
    ENCODED_AT_ONCE_BYTES,
    RowCodec,
    Wire,
    WireForm,
    back_codec,
    decode_rows,
    encode_rows,
    out_codec,
    parse_wire,
    row_bytes,
)

Rows = npt.NDArray[np.float32]

CODECS = list(RowCodec)
F32_CODECS = [RowCodec.EXACT, RowCodec.F32]
BLOCK = {RowCodec.Q8_0: 32, RowCodec.Q8_K: 256, RowCodec.INT8: 64, RowCodec.FP8: 128}
RAGGED = [codec for codec in CODECS if codec not in (RowCodec.Q8_0, RowCodec.Q8_K)]


def row(*values: float, width: int = 0) -> Rows:
    """Return one row [1, D] of these values, then zeros up to `width`."""
    x = np.zeros((1, max(width, len(values))), np.float32)
    x[0, : len(values)] = values
    return x


# Written by hand from the layouts in swarm/wire/rows.py. They never change: a new layout takes a new code.
GOLDEN: dict[str, tuple[RowCodec, Rows, str]] = {
    "exact": (RowCodec.EXACT, np.array([[1, -2.5], [0, 3.4028235e38]], np.float32), "0000803f000020c000000000ffff7f7f"),
    "f32": (RowCodec.F32, np.array([[1, -2.5], [0, 3.4028235e38]], np.float32), "0000803f000020c000000000ffff7f7f"),
    "bf16": (RowCodec.BF16, row(1, -2.5, 1 + 2**-8, 1 + 3 * 2**-8), "803f 20c0 803f 823f"),
    "f16": (RowCodec.F16, row(1, -2.5, 1e6, 2**-24), "003c 00c1 ff7b 0100"),
    "q8_0": (RowCodec.Q8_0, row(127, -1, 0.5, 1.5, width=32), "003c 7f ff 00 02" + "00" * 28),
    "q8_0 of two blocks": (
        RowCodec.Q8_0,
        np.concatenate((row(127, width=32), row(-254, 4, width=32)), axis=1),
        "003c 0040 7f" + "00" * 31 + "81 02" + "00" * 30,
    ),
    "q8_k": (RowCodec.Q8_K, row(127, -1, 0.5, 1.5, width=256), "000080bf 81 01 00 fe" + "00" * 252),
    "int8": (
        RowCodec.INT8,
        np.concatenate((row(127, -1, 0.5, 1.5, width=64), row(254, -2)), axis=1),
        "803f 0040 7f ff 00 02" + "00" * 60 + "7f ff",
    ),
    "int8 of two rows": (RowCodec.INT8, np.array([[127, 1], [0, 0]], np.float32), "803f 7f 01 0000 00 00"),
    "fp8": (
        RowCodec.FP8,
        np.concatenate((row(448, -1, 2**-9, 2**-10, 1.0625, 1.1875, width=128), row(896, 0)), axis=1),
        "803f 0040 7e b8 01 00 38 3a" + "00" * 122 + "7e 00",
    ),
}


def test_there_are_golden_bytes_for_every_codec() -> None:
    assert {codec for codec, _, _ in GOLDEN.values()} == set(RowCodec)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_never_change(name: str) -> None:
    codec, x, golden = GOLDEN[name]
    assert encode_rows(x, codec).hex() == golden.replace(" ", "")


def test_codes_never_change() -> None:
    assert {codec.name: int(codec) for codec in RowCodec} == {
        "EXACT": 0,
        "F32": 1,
        "BF16": 2,
        "F16": 3,
        "Q8_0": 4,
        "Q8_K": 5,
        "INT8": 6,
        "FP8": 7,
    }
    assert [RowCodec.from_code(code) for code in range(8)] == CODECS


@pytest.mark.parametrize("code", [8, 255, -1])
def test_an_unknown_code_is_refused(code: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"got code {code}"):
        RowCodec.from_code(code)


@pytest.mark.parametrize(
    ("codec", "n_bytes"),
    list(zip(CODECS, [12288, 12288, 6144, 6144, 3264, 3120, 3168, 3120], strict=True)),
)
def test_a_row_of_3072_values_takes_these_bytes(codec: RowCodec, n_bytes: int) -> None:
    assert row_bytes(3072, codec) == n_bytes
    assert len(encode_rows(np.ones((3, 3072), np.float32), codec)) == 3 * n_bytes


# Round trips


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    hnp.arrays(np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9)),
    st.sampled_from(F32_CODECS),
)
def test_f32_rows_read_back_bit_for_bit_nan_payloads_included(bits: np.ndarray, codec: RowCodec) -> None:
    x = bits.view(np.float32)
    data = encode_rows(x, codec)
    assert len(data) == len(x) * row_bytes(x.shape[1], codec)
    back = decode_rows(memoryview(data), *x.shape, codec)
    assert back.dtype == np.float32
    assert back.shape == x.shape
    assert (back.view(np.uint32) == bits).all()


def largest_error(x: Rows, codec: RowCodec) -> npt.NDArray[np.float64]:
    """Return how far each value may move: half a step of its number format, and what its scale's rounding adds."""
    wide = np.abs(x.astype(np.float64))
    slack = 1 + 1e-5  # the products are rounded to f32
    if codec in F32_CODECS:
        return np.zeros_like(wide)
    if codec is RowCodec.BF16:
        return np.maximum(wide * 2.0**-8, 2.0**-134)
    if codec is RowCodec.F16:
        return np.maximum(np.maximum(wide * 2.0**-11, 2.0**-25), wide - 65504)
    block = BLOCK[codec]
    n_blocks = -(-x.shape[1] // block)
    padded = np.zeros((len(x), n_blocks * block))
    padded[:, : x.shape[1]] = wide
    peak = padded.reshape(len(x), n_blocks, block).max(axis=2).repeat(block, axis=1)[:, : x.shape[1]]
    tiny = np.where(peak < 4e-36, peak, 0)  # where the scale's inverse, or the scale, is no normal f32
    step = peak / 127
    if codec is RowCodec.Q8_0:
        return slack * (step / 2 + 127 * np.maximum(step * 2.0**-11, 2.0**-25)) + tiny
    if codec is RowCodec.Q8_K:
        return slack * step / 2 + tiny
    if codec is RowCodec.INT8:
        return slack * step * (1 + 2.0**-7) / 2 + tiny
    step = peak / 448 * (1 + 2.0**-7)
    return slack * np.maximum(wide * 2.0**-4, step * 2.0**-10) + tiny


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(CODECS),
    st.integers(1, 4),
    st.integers(1, 700),
    st.tuples(st.integers(-149, 22), st.integers(0, 12)),
    st.floats(0, 0.9),
    st.integers(0, 2**32 - 1),
)
def test_no_value_moves_further_than_its_format_makes_it(
    codec: RowCodec, n_rows: int, n_embd: int, magnitude: tuple[int, int], zeros: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    if codec not in RAGGED:
        n_embd = -(-n_embd // BLOCK[codec]) * BLOCK[codec]
    exponents = magnitude[0] - rng.integers(0, magnitude[1] + 1, (n_rows, n_embd))
    x = (rng.uniform(-1, 1, (n_rows, n_embd)) * np.exp2(exponents.astype(float))).astype(np.float32)
    x[rng.random(x.shape) < zeros] = 0
    data = encode_rows(x, codec)
    assert len(data) == n_rows * row_bytes(n_embd, codec)
    back = decode_rows(data, n_rows, n_embd, codec, require_finite=True)
    assert (back.shape, back.dtype) == (x.shape, np.float32)
    assert (np.abs(back.astype(np.float64) - x) <= largest_error(x, codec)).all()
    assert (back[x == 0] == 0).all()


@pytest.mark.parametrize("codec", RowCodec)
def test_many_rows_are_the_bytes_of_each_whether_they_lie_in_order_or_not(codec: RowCodec) -> None:
    n_rows = 2 * ENCODED_AT_ONCE_BYTES // (4 * 512) + 3
    rows = np.random.default_rng(3).standard_normal((n_rows, 1024)).astype(np.float32)[:, ::2]
    assert encode_rows(rows, codec) == b"".join(encode_rows(row[None], codec) for row in rows)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_do_not_touch_each_other(codec: RowCodec) -> None:
    x = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32) * np.exp2(np.arange(5.0))[:, None]
    x = x.astype(np.float32)
    assert encode_rows(x, codec) == b"".join(encode_rows(x[i : i + 1], codec) for i in range(5))
    data = encode_rows(x, codec)
    size = row_bytes(512, codec)
    alone = [decode_rows(data[i * size : (i + 1) * size], 1, 512, codec) for i in range(5)]
    assert decode_rows(data, 5, 512, codec).tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize("codec", RAGGED)
@pytest.mark.parametrize("n_embd", [1, 2, 63, 64, 65, 127, 129, 200])
def test_any_width_travels(codec: RowCodec, n_embd: int) -> None:
    """A short last block is a block of its own: as if the row were two."""
    block = BLOCK.get(codec, 64)
    x = np.random.default_rng(n_embd).standard_normal((3, n_embd)).astype(np.float32)
    back = decode_rows(encode_rows(x, codec), 3, n_embd, codec)
    full = n_embd // block * block
    for part in (slice(0, full), slice(full, n_embd)):
        if x[:, part].size:
            alone = x[:, part]
            assert (back[:, part] == decode_rows(encode_rows(alone, codec), *alone.shape, codec)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_stay_zeros_and_cost_no_division(codec: RowCodec) -> None:
    x = np.zeros((2, 512), np.float32)
    x[1, 256:] = 1
    back = decode_rows(encode_rows(x, codec), 2, 512, codec, require_finite=True)
    assert (back[0] == 0).all()
    assert (back[1, :256] == 0).all()
    assert np.allclose(back[1, 256:], 1, atol=0.01)


@pytest.mark.parametrize("codec", [RowCodec.BF16, RowCodec.F16, RowCodec.Q8_0])
def test_rows_that_were_rounded_once_are_not_rounded_again(codec: RowCodec) -> None:
    x = np.random.default_rng(4).standard_normal((20, 512)).astype(np.float32)
    once = encode_rows(x, codec)
    assert encode_rows(decode_rows(once, 20, 512, codec), codec) == once


@pytest.mark.parametrize("codec", CODECS)
def test_strided_rows_are_written_by_value(codec: RowCodec) -> None:
    x = np.random.default_rng(5).standard_normal((512, 512)).astype(np.float32)
    for view in (x[:, ::2], x.T, x[::-1]):
        assert encode_rows(view, codec) == encode_rows(np.ascontiguousarray(view), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_no_rows_are_no_bytes(codec: RowCodec) -> None:
    assert encode_rows(np.empty((0, 256), np.float32), codec) == b""
    assert decode_rows(b"", 0, 256, codec).shape == (0, 256)


@pytest.mark.parametrize("codec", CODECS)
def test_decoded_rows_are_a_copy_that_may_be_written_even_from_an_odd_offset(codec: RowCodec) -> None:
    x = np.random.default_rng(6).standard_normal((2, 256)).astype(np.float32)
    data = encode_rows(x, codec)
    buffer = bytearray(b"\0" + data)
    back = decode_rows(memoryview(buffer)[1:], 2, 256, codec)
    assert back.flags.writeable
    assert back.flags.aligned
    assert back.flags.c_contiguous
    buffer[:] = b"\xff" * len(buffer)
    assert (back == decode_rows(data, 2, 256, codec)).all()


# What is not finite


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001])
def test_a_value_that_is_not_finite_never_arrives_as_a_number(codec: RowCodec, bits: int) -> None:
    """It takes its block along, in the codecs that have blocks, and nothing else."""
    x = np.ones((3, 512), np.float32)
    x.view(np.uint32)[1, 300] = bits
    back = decode_rows(encode_rows(x, codec), 3, 512, codec)
    block = BLOCK.get(codec, 1)
    start = 300 // block * block
    is_bad = np.zeros(x.shape, bool)
    is_bad[1, start : start + block] = True
    if block > 1:
        assert np.isnan(back[is_bad]).all()
    else:
        assert np.isnan(back[1, 300]) == np.isnan(x[1, 300]) or codec in F32_CODECS
        assert not np.isfinite(back[1, 300])
    assert np.allclose(back[~is_bad], 1, atol=0.01)
    with pytest.raises(RemoteProtocolError, match="row 1 of 3"):
        decode_rows(encode_rows(x, codec), 3, 512, codec, require_finite=True)


@pytest.mark.parametrize(
    ("codec", "x", "is_finite"),
    [
        (RowCodec.BF16, 3.38e38, True),
        (RowCodec.BF16, 3.4e38, False),
        (RowCodec.F16, 3.4e38, True),
        (RowCodec.Q8_0, 8.3e6, True),
        (RowCodec.Q8_0, 8.4e6, False),  # as ggml itself would compute
        (RowCodec.Q8_K, 3.4e38, True),
        (RowCodec.INT8, 3.3e38, True),
        (RowCodec.FP8, 3.3e38, True),
    ],
)
def test_large_values_stay_finite_up_to_here(codec: RowCodec, x: float, is_finite: bool) -> None:
    back = decode_rows(encode_rows(row(x, -x, width=256), codec), 1, 256, codec)
    assert np.isfinite(back).all() == is_finite


@pytest.mark.parametrize(
    ("codec", "scale"),
    [(RowCodec.Q8_0, "007c"), (RowCodec.Q8_0, "007e"), (RowCodec.Q8_K, "0000807f"), (RowCodec.Q8_K, "0000c07f")]
    + [(codec, scale) for codec in (RowCodec.INT8, RowCodec.FP8) for scale in ("807f", "c07f", "80ff")],
)
def test_a_scale_that_is_not_finite_is_legal_but_found_on_request(codec: RowCodec, scale: str) -> None:
    block = BLOCK[codec]
    data = bytes.fromhex(scale) + b"\x01" * block
    assert decode_rows(data, 1, block, codec).shape == (1, block)
    with pytest.raises(RemoteProtocolError, match="row 0 of 1"):
        decode_rows(data, 1, block, codec, require_finite=True)


def test_a_nan_among_fp8_values_is_found_on_request() -> None:
    for code in (0x7F, 0xFF):
        with pytest.raises(RemoteProtocolError, match="not finite"):
            decode_rows(b"\x80\x3f" + bytes([0x38, code]), 1, 2, RowCodec.FP8, require_finite=True)


def test_an_f16_infinity_is_found_on_request() -> None:
    with pytest.raises(RemoteProtocolError, match="not finite"):
        decode_rows(b"\x00\x7c", 1, 1, RowCodec.F16, require_finite=True)


# Damage


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("n_rows", "n_embd"), [(2, 256), (2**31, 2**31 * 256), (-1, 256), (-2, -256), (3, 0), (0, 256)]
)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_size_that_does_not_fit_is_refused_before_memory_is_taken(
    codec: RowCodec, n_rows: int, n_embd: int, change: int
) -> None:
    data = bytes(2 * row_bytes(256, codec) + change)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="wrong size"):
            decode_rows(memoryview(data), n_rows, n_embd, codec)
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("codec", "n_embd"), [(RowCodec.Q8_0, 33), (RowCodec.Q8_0, 1), (RowCodec.Q8_K, 288)])
def test_a_width_that_the_codec_cannot_carry_is_refused(codec: RowCodec, n_embd: int) -> None:
    with pytest.raises(RemoteProtocolError, match="wrong width"):
        decode_rows(bytes(row_bytes(n_embd, codec)), 1, n_embd, codec)
    with pytest.raises(AssertionError):
        encode_rows(np.ones((1, n_embd), np.float32), codec)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(CODECS), st.integers(1, 3), st.sampled_from([1, 2, 32, 256]), st.data())
def test_any_bytes_of_the_right_size_are_rows_or_refused(
    codec: RowCodec, n_rows: int, n_embd: int, data: st.DataObject
) -> None:
    if codec not in RAGGED:
        n_embd = 256
    raw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).bytes(n_rows * row_bytes(n_embd, codec))
    assert decode_rows(raw, n_rows, n_embd, codec).shape == (n_rows, n_embd)
    try:
        assert np.isfinite(decode_rows(raw, n_rows, n_embd, codec, require_finite=True)).all()
    except RemoteProtocolError:
        assert not np.isfinite(decode_rows(raw, n_rows, n_embd, codec)).all()


# Which codec


Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, F32, F16 = 2, 3, 8, 12, 14, 0, 1  # enum ggml_type


@pytest.mark.parametrize(
    ("n_embd", "ggml_types", "codec"),
    [
        (256, [Q8_0, Q8_0], RowCodec.Q8_0),
        (96, [Q4_0], RowCodec.Q8_0),
        (256, [Q4_1], RowCodec.Q8_0),
        (256, [Q4_K, Q6_K], RowCodec.Q8_K),
        (256, [Q4_K, Q8_0], RowCodec.Q8_0),
        (256, [F16], RowCodec.INT8),
        (256, [F32, Q8_0], RowCodec.INT8),
        (256, [999], RowCodec.INT8),
        (256, [], RowCodec.INT8),
        (48, [Q8_0], RowCodec.INT8),
        (96, [Q4_K], RowCodec.Q8_0),
    ],
)
def test_q8_out_is_what_ggml_would_quantise_to(n_embd: int, ggml_types: list[int], codec: RowCodec) -> None:
    assert out_codec(WireForm.Q8, n_embd, ggml_types) is codec


@pytest.mark.parametrize("form", [form for form in WireForm if form is not WireForm.Q8])
def test_other_forms_are_the_same_both_ways_whatever_the_weights(form: WireForm) -> None:
    assert {out_codec(form, 256, types) for types in ([], [Q8_0], [Q4_K])} == {back_codec(form)}
    assert back_codec(form).name == form.name


def test_q8_back_is_int8() -> None:
    assert back_codec(WireForm.Q8) is RowCodec.INT8


# Texts


def test_one_name_means_both_ways() -> None:
    assert parse_wire("f32") == parse_wire("f32/f32") == Wire(WireForm.F32, WireForm.F32)
    assert parse_wire("exact") == (WireForm.EXACT, WireForm.EXACT)
    assert parse_wire("q8/f16") == (WireForm.Q8, WireForm.F16)
    assert parse_wire("fp8/bf16") == (WireForm.FP8, WireForm.BF16)
    assert [str(parse_wire(text)) for text in ("exact", "f32/f32", "q8/f16")] == ["exact", "f32", "q8/f16"]


@pytest.mark.parametrize("form", WireForm)
def test_every_form_has_a_text(form: WireForm) -> None:
    assert parse_wire(form.value) == (form, form)


@pytest.mark.parametrize(
    "text",
    ["", "/", "f32/", "/f32", "F32", "q9", "q8_0", "int8", "f32/f32/f32"]
    + [f"exact/{form}" for form in WireForm if form != "exact"]
    + [f"{form}/exact" for form in WireForm if form != "exact"],
)
def test_a_wire_that_does_not_exist_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_wire(text)
