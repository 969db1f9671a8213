"""Rounding of rows, judged by ggml's own functions, by its experts, and by plain references of the number formats."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.native.library import half_kernels as half_kernels_of
from swarm.native.library import load_library
from swarm.wire import quantise
from swarm.wire.rows import RowCodec, WireForm, decode_rows, encode_rows, out_codec

Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Q8_0, Q8_1, Q8_K = 8, 9, 15  # enum ggml_type
BLOCKS = {Q8_0: (32, 34), Q8_1: (32, 36), Q8_K: (256, 292)}  # values, bytes as ggml stores them
F32, F16, BF16 = 0, 1, 30
QUANTISE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class CpuTraits(ctypes.Structure):
    """struct ggml_type_traits_cpu, equal in both pinned libraries."""

    _fields_ = (
        ("from_float", QUANTISE),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


@functools.cache
def traits(ggml_type: int) -> CpuTraits:
    library = load_library()
    library.function("ggml_cpu_init", None)()
    return library.function("ggml_get_type_traits_cpu", ctypes.POINTER(CpuTraits), ctypes.c_int)(ggml_type).contents


def by_ggml(x: Rows, ggml_type: int) -> Bytes:
    """Return x as ggml's CPU kernels quantise activations, [blocks, bytes]; of Q8_K without its sums."""
    n_values, n_bytes = BLOCKS[ggml_type]
    x = np.ascontiguousarray(x)
    out = np.full((x.size // n_values, n_bytes), 0xEE, np.uint8)
    traits(ggml_type).from_float(x.ctypes.data, out.ctypes.data, x.size)
    return out[:, :260] if ggml_type == Q8_K else out


def as_blocks(x: Rows, codec: RowCodec) -> Bytes:
    """Return x in our bytes, put together as ggml stores blocks."""
    raw = np.frombuffer(encode_rows(x, codec), np.uint8).reshape(len(x), -1)
    block, scale_bytes = {RowCodec.Q8_0: (32, 2), RowCodec.Q8_K: (256, 4)}[codec]
    n_scales = x.shape[1] // block
    scales = raw[:, : scale_bytes * n_scales].reshape(-1, scale_bytes)
    return np.concatenate((scales, raw[:, scale_bytes * n_scales :].reshape(-1, block)), axis=1)


def carried(x: Rows, codec: RowCodec) -> Rows:
    return decode_rows(encode_rows(x, codec), len(x), x.shape[1], codec)


def peaks(x: Rows, block: int) -> Rows:
    found: Rows = np.abs(x).reshape(-1, block).max(axis=1)
    return found


def samples(kind: str) -> Rows:
    """Return rows [N, 512] of one kind."""
    rng = np.random.default_rng(17)
    normal = rng.standard_normal((200, 512)).astype(np.float32)
    x = {
        "random": lambda: normal,
        "wide": lambda: normal * np.exp(rng.standard_normal(normal.shape)),
        "small": lambda: normal * np.exp2(rng.integers(-30, -8, (200, 1))),  # f16 scales below f16's normal range
        "tiny": lambda: normal * np.exp2(rng.integers(-149, -100, (200, 1))),  # down to f32's denormals
        "large": lambda: normal * np.exp2(rng.integers(10, 20, (200, 1))),
        "extreme": lambda: normal / 5 * 3.4e38,
        "ties": lambda: rng.integers(-254, 255, normal.shape) / 2,  # halves, with a scale near 1
        "whole scale": lambda: np.where(rng.random(normal.shape) < 0.1, 127, rng.integers(-254, 255, normal.shape) / 2),
        "equal peaks": lambda: rng.choice([-3.0, 3.0, 1.5, 0.0], normal.shape),
        "zeros": lambda: np.where(rng.random((200, 16, 1)) < 0.5, 0, normal.reshape(200, 16, 32)).reshape(200, 512),
        "signed zeros": lambda: normal * 0,
    }[kind]()
    return x.astype(np.float32)


KINDS = [
    "random",
    "wide",
    "small",
    "tiny",
    "large",
    "extreme",
    "ties",
    "whole scale",
    "equal peaks",
    "zeros",
    "signed zeros",
]


# Against ggml


@pytest.mark.parametrize("kind", KINDS)
def test_q8_0_is_what_ggmls_kernel_writes(kind: str) -> None:
    x = samples(kind)
    ours, theirs = as_blocks(x, RowCodec.Q8_0), by_ggml(x, Q8_0)
    is_told = peaks(x, 32) >= 3.8e-37  # below, 127/max overflows: junk codes beside a zero scale
    if IS_X86:
        assert (ours[is_told] == theirs[is_told]).all()
    else:  # other kernels multiply by 1/scale: a code may fall to the other side
        assert (ours[:, :2] == theirs[:, :2]).all()
        difference = ours[is_told, 2:].view(np.int8).astype(int) - theirs[is_told, 2:].view(np.int8)
        assert np.abs(difference).max(initial=0) <= 1
    assert not ours[~is_told].any()
    assert not theirs[~is_told, :2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_q8_k_is_what_ggmls_kernel_writes(kind: str) -> None:
    x = samples(kind)
    ours, theirs = as_blocks(x, RowCodec.Q8_K), by_ggml(x, Q8_K)
    is_told = (peaks(x, 256) >= 3.8e-37) | (peaks(x, 256) == 0)
    assert (ours[is_told] == theirs[is_told]).all()
    assert not ours[~is_told].any()
    assert not theirs[~is_told, :4].view("<f4").any()  # a zero, maybe with a sign


def test_q8_0_is_what_ggml_writes_into_files() -> None:
    """`ggml_quantize_chunk` takes the portable code: 1/scale, ties away from zero. Equal but for codes at a tie."""
    x = samples("wide")
    chunk = load_library().function(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_void_p,
    )
    theirs = np.empty((x.size // 32, 34), np.uint8)
    assert chunk(Q8_0, x.ctypes.data, theirs.ctypes.data, 0, len(x), x.shape[1], None) == theirs.size
    ours = as_blocks(x, RowCodec.Q8_0)
    assert (ours[:, :2] == theirs[:, :2]).all()
    difference = ours[:, 2:].view(np.int8).astype(int) - theirs[:, 2:].view(np.int8)
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() < 1e-4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("large", "extreme")])
def test_q8_0_rows_quantise_to_the_same_bytes_again(kind: str) -> None:
    x = samples(kind)
    y = carried(x, RowCodec.Q8_0)
    direct, again = by_ggml(x, Q8_0), by_ggml(y, Q8_0)
    is_scaled = direct[:, :2].view("<f2")[:, 0] != 0
    assert (direct[is_scaled] == again[is_scaled]).all()
    assert not again[~is_scaled, :2].any()
    assert peaks(x, 32)[~is_scaled].max(initial=0) < 3.8e-6


@pytest.mark.parametrize("kind", KINDS)
def test_q8_k_rows_quantise_to_the_same_codes_again(kind: str) -> None:
    x = samples(kind)
    direct, again = by_ggml(x, Q8_K), by_ggml(carried(x, RowCodec.Q8_K), Q8_K)
    codes, codes_again = direct[:, 4:].view(np.int8), again[:, 4:].view(np.int8)
    scales, scales_again = (b[:, :4].copy().view("<f4").astype(np.float64) for b in (direct, again))
    is_told = peaks(x, 256) >= 3.8e-37
    sign = np.where(
        (codes == codes_again).all(axis=1, keepdims=True), 1, -1
    )  # two equal peaks: the first gives the sign
    assert (codes == sign * codes_again)[is_told].all()
    assert (np.abs(scales - sign * scales_again) <= 1.2e-7 * np.abs(scales))[is_told].all()
    assert not scales_again[~is_told].any()


def test_q8_1_differs_from_q8_0_only_by_its_sums() -> None:
    x = samples("random")
    direct, again = by_ggml(x, Q8_1), by_ggml(carried(x, RowCodec.Q8_0), Q8_1)
    assert (np.delete(direct, [2, 3], axis=1) == np.delete(again, [2, 3], axis=1)).all()
    sums, sums_again = (b[:, 2:4].copy().view("<f2").astype(np.float64) for b in (direct, again))
    assert np.allclose(sums, sums_again, rtol=1e-3, atol=0)
    assert not (sums == sums_again).all()


def test_the_table_of_weight_types_is_ggmls() -> None:
    names = {int(t): t.name for t in gguf.GGMLQuantizationType}
    wanted_of = {Q8_0: RowCodec.Q8_0, Q8_1: RowCodec.Q8_0, Q8_K: RowCodec.Q8_K}
    n_checked = 0
    for ggml_type in range(43):  # above, the older of the two libraries reads past its table
        if not traits(ggml_type).vec_dot:
            continue  # no weights: integers, forms of activations, numbers that ggml no longer uses
        wanted = wanted_of.get(traits(ggml_type).vec_dot_type, RowCodec.INT8)
        assert out_codec(WireForm.Q8, 512, [ggml_type]) is wanted, names.get(ggml_type, ggml_type)
        n_checked += 1
    assert n_checked >= 28
    assert {traits(t).vec_dot_type for t in (F32, F16, BF16)} == {F32, F16, BF16}, "float weights take floats"


# Through the experts


@functools.cache
def experts_of(name: str) -> ExpertFfn:
    path = Path(__file__).parents[3] / "examples" / "tiny_moe" / f"model-{name}.gguf"
    with GgufFile(path) as file:
        spec = read_spec(file)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    ffn = ExpertFfn(spec, ExpertSet.of(spec.moe_layers, range(spec.n_expert)))
    for layer, expert in ffn.experts:
        ffn.load(layer, expert, b"".join(tensors[t.name][expert].tobytes() for t in spec.expert_tensors(layer)))
    return ffn


def through_the_experts(name: str, choose: Callable[[list[int], int], RowCodec]) -> tuple[Rows, Rows]:
    """Return each row's expert output from x as it is, and from x as it arrives, [rows, D] each."""
    ffn = experts_of(name)
    rng = np.random.default_rng(23)
    direct, sent = [], []
    for layer, experts in ffn.experts.by_layer.items():
        types = [t.ggml_type for t in ffn._spec.expert_tensors(layer) if t.kind != "down"]
        x = rng.standard_normal((192, 256)).astype(np.float32)
        x[:, rng.integers(0, 256, 3)] *= 8
        y = carried(x, choose(types, 256))
        ids = np.arange(192) % len(experts)  # six rows for each expert: below the kernels that group by eight
        direct.append(ffn.compute(layer, x, np.arange(192), ids))
        sent.append(ffn.compute(layer, y, np.arange(192), ids))
    return np.concatenate(direct), np.concatenate(sent)


def test_experts_of_q8_0_weights_answer_with_the_same_bits() -> None:
    direct, sent = through_the_experts("Q8_0", lambda types, n: out_codec(WireForm.Q8, n, types))
    assert direct.tobytes() == sent.tobytes()


def test_experts_of_k_quant_weights_answer_with_the_same_bits_but_for_a_rare_rounding() -> None:
    direct, sent = through_the_experts("Q4_K_M", lambda types, n: out_codec(WireForm.Q8, n, types))
    differences = np.abs(direct - sent).max(axis=1) / np.abs(direct).max(axis=1)
    assert (differences == 0).mean() > 0.99
    assert differences.max() < 0.01  # one code of the hidden row: a 127th of its largest value


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M"])
def test_the_comparison_sees_a_codec_that_rounds(name: str) -> None:
    direct, sent = through_the_experts(name, lambda *_: RowCodec.INT8)
    assert (direct == sent).all(axis=1).mean() < 0.01


# The number formats


def e4m3(code: int) -> Fraction | None:
    """Return the value of a code as OCP's 8-bit formats define e4m3, None for NaN."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 64)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def test_e4m3_codes_mean_what_the_standard_says() -> None:
    for code in range(256):
        value = e4m3(code)
        found = quantise.E4M3[code]
        assert np.isnan(found) if value is None else Fraction(float(found)) == value


def test_e4m3_rounds_to_the_nearest_ties_to_even() -> None:
    """Around each midpoint of two neighbours, by one step of an f32."""
    values = [e4m3(code) for code in range(127)]
    v, expected = [], []
    for code in range(126):
        low, high = values[code], values[code + 1]
        assert low is not None
        assert high is not None
        middle = np.float32(float((low + high) / 2))
        for value, wanted in (
            (np.nextafter(middle, np.float32(0)), code),
            (middle, code + code % 2),
            (np.nextafter(middle, np.float32(1e9)), code + 1),
            (np.float32(float(low)), code),
        ):
            v += [value, -value]
            expected += [wanted, wanted | 128]
    x = np.full((len(v), 128), 448, np.float32)  # the first value of each block makes its scale 1
    x[:, 1] = v
    raw = np.frombuffer(encode_rows(x, RowCodec.FP8), np.uint8).reshape(len(v), -1)
    assert (raw[:, :2] == np.frombuffer(b"\x80\x3f", np.uint8)).all()
    assert raw[:, 3].tolist() == expected


def test_bf16_rounds_to_the_nearest_ties_to_even() -> None:
    rng = np.random.default_rng(3)
    upper = rng.integers(0, 0x7F7F, 2000, dtype=np.uint32)  # finite, and the next one too
    lower = rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 2000)
    goes_up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    x = (upper << np.uint32(16) | lower).view(np.float32).reshape(1, -1)
    for sign, bit in ((1, 0), (-1, 0x8000)):
        codes = np.frombuffer(encode_rows(sign * x, RowCodec.BF16), "<u2")
        assert (codes == (upper + goes_up) + bit).all()


@pytest.fixture(params=["numpy", "ggml"])
def half_kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Converts between f32 and f16 with the one or the other."""
    found = half_kernels_of(load_library())
    quantise.use_half_kernels(found if request.param == "ggml" else None)
    yield request.param
    quantise.use_half_kernels(found)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2047), (3, 64), (33, 100)])
def test_ggml_converts_halves_as_numpy_does(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    kernels = half_kernels_of(load_library())
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
    bits[:, ::3] = rng.integers(
        0x38000000, 0x477FF000, bits[:, ::3].shape
    )  # those with a half between 2^-15 and 65,504
    x = bits.view(np.float32)
    halves = np.full(shape, 0x5555, np.uint16)
    kernels.encode(x, halves.view(np.float16))
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    is_nan = np.isnan(x)
    assert (halves == expected.view(np.uint16))[~is_nan].all()
    assert np.isnan(halves.view(np.float16)[is_nan]).all()
    codes = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    back = np.full(shape, 7, np.float32)
    kernels.decode(codes.view(np.uint8), back)
    assert np.array_equal(back, codes.view(np.float16).astype(np.float32), equal_nan=True)


def test_the_engine_brings_its_kernels_for_halves() -> None:
    load_library()
    assert quantise._half is not None


@pytest.mark.parametrize("n_rows", [1, quantise.LEAST_TO_DECODE])
@pytest.mark.usefixtures("half_kernels")
def test_f16_is_numpys_but_clamps(n_rows: int) -> None:
    x = np.array([[1.0, 65504, 65519.99, 65520, 1e38, -1e38, 2.0**-24, 2.0**-26, -0.0]], np.float32)
    expected = np.array([1.0, 65504, 65504, 65504, 65504, -65504, 2.0**-24, 0, -0.0], np.float32)
    x = np.tile(x, (n_rows, 1))
    assert carried(x, RowCodec.F16).tobytes() == n_rows * expected.tobytes()
    x[0, 0] = np.nan
    x[0, 1] = -np.inf
    back = carried(x, RowCodec.F16)[0]
    assert np.isnan(back[0])
    assert back[1] == -np.inf
    assert back[4] == 65504
