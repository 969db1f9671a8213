"""Row codecs: golden bytes, round trips, sizes found before memory is taken, and the `--wire` texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import RemoteProtocolError, UserError
from swarm.wire.rows import Wire, WireForm, decode_rows, encode_rows, parse_wire, row_bytes

FORMS = list(WireForm)


@pytest.mark.parametrize("form", FORMS)
def test_golden_bytes_never_change(form: WireForm) -> None:
    x = np.array([[1.0, -2.5], [0.0, 3.4028235e38]], dtype=np.float32)
    assert encode_rows(x, form).hex() == "0000803f000020c000000000ffff7f7f"


def test_codes_never_change() -> None:
    assert {form: form.code for form in WireForm} == {WireForm.EXACT: 0, WireForm.F32: 1}
    assert [WireForm.from_code(code) for code in (0, 1)] == [WireForm.EXACT, WireForm.F32]


@pytest.mark.parametrize("code", [2, 255, -1])
def test_an_unknown_code_is_refused(code: int) -> None:
    with pytest.raises(RemoteProtocolError):
        WireForm.from_code(code)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(hnp.arrays(np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9)), st.sampled_from(FORMS))
def test_rows_read_back_bit_for_bit_nan_payloads_included(bits: np.ndarray, form: WireForm) -> None:
    x = bits.view(np.float32)
    data = encode_rows(x, form)
    assert len(data) == len(x) * row_bytes(x.shape[1], form)
    back = decode_rows(memoryview(data), *x.shape, form)
    assert back.dtype == np.float32
    assert back.shape == x.shape
    assert (back.view(np.uint32) == bits).all()


@pytest.mark.parametrize("form", FORMS)
def test_strided_rows_are_written_by_value(form: WireForm) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x[:, ::2], x.T, x[::-1]):
        assert (decode_rows(encode_rows(view, form), *view.shape, form) == view).all()


def test_no_rows_are_no_bytes() -> None:
    assert encode_rows(np.empty((0, 8), np.float32), WireForm.F32) == b""
    assert decode_rows(b"", 0, 8, WireForm.F32).shape == (0, 8)


def test_decoded_rows_are_a_copy_that_may_be_written_even_from_an_odd_offset() -> None:
    buffer = bytearray(1 + 8)
    x = decode_rows(memoryview(buffer)[1:], 1, 2, WireForm.F32)
    assert x.flags.writeable
    assert x.flags.aligned
    buffer[:] = b"\xff" * 9
    assert (x == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("n_bytes", "n_rows", "n_embd"),
    [(15, 2, 2), (17, 2, 2), (0, 2, 2), (16, 2**31, 2**31), (0, -1, 2), (16, -2, -2), (0, 3, 0), (16, 0, 2)],
)
def test_a_size_that_does_not_fit_is_refused(form: WireForm, n_bytes: int, n_rows: int, n_embd: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_rows(memoryview(bytes(n_bytes)), n_rows, n_embd, form)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_on_request(bad: float) -> None:
    x = np.zeros((3, 4), dtype=np.float32)
    x[1, 2] = bad
    data = encode_rows(x, WireForm.F32)
    with pytest.raises(RemoteProtocolError, match="row 1 of 3"):
        decode_rows(data, 3, 4, WireForm.F32, require_finite=True)
    assert decode_rows(data, 3, 4, WireForm.F32).shape == (3, 4)
    assert (decode_rows(bytes(48), 3, 4, WireForm.F32, require_finite=True) == 0).all()


def test_one_name_means_both_ways() -> None:
    assert parse_wire("f32") == parse_wire("f32/f32") == Wire(WireForm.F32, WireForm.F32)
    assert parse_wire("exact") == (WireForm.EXACT, WireForm.EXACT)
    assert [str(parse_wire(text)) for text in ("exact", "f32/f32")] == ["exact", "f32"]


@pytest.mark.parametrize("text", ["", "/", "f32/", "/f32", "F32", "q9", "f32/f32/f32", "exact/f32", "f32/exact"])
def test_a_wire_that_does_not_exist_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UserError):
        parse_wire(text)
