"""Mixture-of-Experts GGUF files with random weights, of any size, which llama.cpp loads and runs.

Speed and bytes do not depend on what the weights say, so benchmarks make their own models. Quantised weights are drawn as
quants, not quantised from floats: a model of gigabytes takes seconds. Memory is bounded to one tensor.

Random routers choose evenly. With `router_skew` z they choose by Zipf's law: every token's embedding has the same large value in
channel 0, which the layers hardly change, and there router row e has log(rank^-z); the rest of the row is noise. Each layer has
its own order of experts. So the router itself is skewed: whoever places experts, it chooses the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as GgmlType

from swarm.errors import UserError
from swarm.files import replacing

N_BYTES = 256  # the vocabulary begins with one token for each byte
MAX_CONTEXT = 8192

# A Q4_K block of 256 weights is d, dmin (f16), 12 bytes of 6-bit scales and mins, 128 bytes of 4-bit quants;
# w = d * scale * q - dmin * min. These bytes say scale 32 and min 30 for each of its eight parts.
_Q4_K_SCALES = np.array([160] * 4 + [94] * 4 + [224] * 4, np.uint8)
_Q4_K_STD = 32 * 4.61  # of scale * q for q uniform in 0..15
_Q4_K_DMIN = 8.0  # dmin / d, so that dmin * 30 = d * 32 * 7.5: the weights have mean 0
_Q8_0_STD = 73.6  # of an integer uniform in -127..127

# With a skew. The constant channel's value, others having a standard deviation of 1; a guess: the other channels keep nearly all
# of the norm (D=1024: 98 %), so that a token's experts are its own.
_CONSTANT = 4.0
# Of a router's noise. Measured, 64 experts, 8 used, z = 0.5, 1, 1.5: so the hottest eighth and half of a layer's experts get what
# draws by the law itself would give them (z = 1: 47 and 81 %) within 3 points. Gumbel noise has 1.28, but heavier tails.
_NOISE_STD = 1.54
_OUTPUT_GAIN = 0.25  # of what layers add to the hidden states: else their growth drowns the constant channel


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticModel:
    """The shape of a random model: `qwen2moe` with a shared expert, or `qwen3moe`, which has none.

    Attributes:
        n_embd_head: values of one attention head; None: n_embd / n_head.
        weight_type: of attention and experts: F32, F16, Q8_0 or Q4_K.
        router_skew: exponent of Zipf's law over a layer's experts; 0: nearly even.
    """

    n_layers: int
    n_embd: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shared: int = 0
    n_head: int = 8
    n_head_kv: int = 2
    n_embd_head: int | None = None
    n_vocab: int = 512
    weight_type: GgmlType = GgmlType.Q8_0
    seed: int = 0
    name: str = "synthetic"
    router_skew: float = 0.0

    def __post_init__(self) -> None:
        block = {GgmlType.Q8_0: 32, GgmlType.Q4_K: 256, GgmlType.F16: 1, GgmlType.F32: 1}.get(self.weight_type)
        if block is None:
            raise UserError(f"cannot draw weights of type {self.weight_type.name}: expected F32, F16, Q8_0 or Q4_K")
        for what in ("n_embd", "n_ff_exp", "n_ff_shared"):
            if getattr(self, what) % block:
                raise UserError(
                    f"{what} does not fit {self.weight_type.name}: got {getattr(self, what)}, not n x {block}"
                )
        if (
            (self.n_embd_head is None and self.n_embd % self.n_head)
            or self.n_head % self.n_head_kv
            or (self.n_head * self.head_dim) % block
            or not 1 <= self.n_expert_used <= self.n_expert
        ):
            raise UserError("the model's shape does not fit together: heads must divide n_embd, K is at most E")
        if self.n_vocab <= N_BYTES:
            raise UserError(f"n_vocab is too small: got {self.n_vocab}, expected more than {N_BYTES}")

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return "qwen2moe" if self.n_ff_shared else "qwen3moe"

    @property
    def head_dim(self) -> int:
        """Values of one attention head."""
        return self.n_embd_head or self.n_embd // self.n_head


SYNTH16 = SyntheticModel(
    n_layers=16, n_embd=1024, n_expert=64, n_expert_used=8, n_ff_exp=256, n_ff_shared=512, name="synth16"
)
"""The standard one of all benchmarks: 16 layers, D=1024, E=64, K=8, ff=256, Q8_0, shared expert 512; a file of 0.94 GB."""

QWEN3_30B_4L = SyntheticModel(
    n_layers=4,
    n_embd=2048,
    n_expert=128,
    n_expert_used=8,
    n_ff_exp=768,
    n_head=32,
    n_head_kv=4,
    n_embd_head=128,
    weight_type=GgmlType.Q4_K,
    name="qwen3-30b-4l",
)
"""Four layers shaped as Qwen3-30B-A3B's, all of Q4_K; a file of 1.4 GB. The vocabulary is small (512 instead of 151,936), so
that its experts weigh more than in the whole model: what they cost beyond stock llama.cpp shows more."""

SYNTH16_4L = replace(SYNTH16, n_layers=4, name="synth16-4l")
"""Four of those layers, for figures of one layer; a file of 0.24 GB."""

NAMED_MODELS = {model.name: model for model in (SYNTH16, SYNTH16_4L, QWEN3_30B_4L)}
"""What a benchmark's `--model` takes besides a file."""


def write_synthetic(path: Path, model: SyntheticModel) -> Path:
    """Write a model to `path`, whole or not at all, and return it. The same shape and seed give the same bytes."""
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, model.architecture)
        _add_metadata(writer, model)
        tensors = _tensors(model)
        for name, shape, ggml_type, _ in tensors:
            n_bytes = gguf.quant_shape_to_byte_shape(shape, ggml_type) if ggml_type in _DRAWN else shape
            dtype = np.dtype(np.uint8) if ggml_type in _DRAWN else np.dtype(_FLOATS[ggml_type])
            size = int(np.prod(n_bytes)) * dtype.itemsize
            writer.add_tensor_info(name, n_bytes if ggml_type in _DRAWN else shape, dtype, size, raw_dtype=ggml_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(model.seed)
        for name, shape, ggml_type, scale in tensors:
            values = _draw(rng, shape, ggml_type, scale)
            if model.router_skew:
                _skew(np.random.default_rng((model.seed, int(rng.integers(2**32)))), name, values, model.router_skew)
            writer.write_tensor_data(values)
        writer.close()
    return path


_FLOATS = {GgmlType.F32: np.float32, GgmlType.F16: np.float16}
_DRAWN = (GgmlType.Q8_0, GgmlType.Q4_K)

Tensor = tuple[str, tuple[int, ...], GgmlType, float | None]  # name, shape (slowest first), type, scale; None: constant


def _tensors(model: SyntheticModel) -> list[Tensor]:
    m, d = model, model.n_embd
    has_shared = m.n_ff_shared > 0
    tensors: list[Tensor] = []
    gain = _OUTPUT_GAIN if m.router_skew else 1.0
    noise = _NOISE_STD if m.router_skew else 1.0

    def weight(name: str, *shape: int, type_: GgmlType = m.weight_type, scale: float | None = None) -> None:
        tensors.append((name, shape, type_, shape[-1] ** -0.5 if scale is None else scale))

    def constant(name: str, size: int, value: float) -> None:
        tensors.append((name, (size,), GgmlType.F32, None if value else 0.0))

    weight("token_embd.weight", m.n_vocab, d, type_=GgmlType.F32, scale=1.0)
    constant("output_norm.weight", d, 1)
    weight("output.weight", m.n_vocab, d, type_=GgmlType.F32)
    heads = m.n_head * m.head_dim
    for layer in range(m.n_layers):
        block = f"blk.{layer}."
        constant(block + "attn_norm.weight", d, 1)
        constant(block + "ffn_norm.weight", d, 1)
        for letter, size in (
            ("q", heads),
            ("k", m.n_head_kv * m.head_dim),
            ("v", m.n_head_kv * m.head_dim),
        ):
            weight(block + f"attn_{letter}.weight", size, d)
            if has_shared:
                constant(block + f"attn_{letter}.bias", size, 0)
            elif letter != "v":
                constant(block + f"attn_{letter}_norm.weight", m.head_dim, 1)
        weight(block + "attn_output.weight", d, heads, scale=gain * heads**-0.5)
        weight(block + "ffn_gate_inp.weight", m.n_expert, d, type_=GgmlType.F32, scale=noise * d**-0.5)
        weight(block + "ffn_gate_exps.weight", m.n_expert, m.n_ff_exp, d)
        weight(block + "ffn_up_exps.weight", m.n_expert, m.n_ff_exp, d)
        weight(block + "ffn_down_exps.weight", m.n_expert, d, m.n_ff_exp, scale=gain * m.n_ff_exp**-0.5)
        if has_shared:
            weight(block + "ffn_gate_inp_shexp.weight", d, type_=GgmlType.F32)
            weight(block + "ffn_gate_shexp.weight", m.n_ff_shared, d)
            weight(block + "ffn_up_shexp.weight", m.n_ff_shared, d)
            weight(block + "ffn_down_shexp.weight", d, m.n_ff_shared, scale=gain * m.n_ff_shared**-0.5)
    return tensors


def _draw(
    rng: np.random.Generator, shape: tuple[int, ...], ggml_type: GgmlType, scale: float | None
) -> npt.NDArray[np.generic]:
    """Return a tensor's values with mean 0 and standard deviation `scale` (None: ones), as the file holds them."""
    if scale is None:
        return np.ones(shape, np.float32)
    if ggml_type in _FLOATS:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return values.astype(_FLOATS[ggml_type])
    if ggml_type is GgmlType.Q8_0:
        n_blocks = int(np.prod(shape)) // 32
        blocks = np.empty((n_blocks, 34), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(scale / _Q8_0_STD).tobytes(), np.uint8)
        blocks[:, 2:] = rng.integers(-127, 128, (n_blocks, 32), dtype=np.int8).view(np.uint8)
    else:
        n_blocks = int(np.prod(shape)) // 256
        blocks = np.empty((n_blocks, 144), np.uint8)
        d = scale / _Q4_K_STD
        blocks[:, :4] = np.frombuffer(np.array([d, _Q4_K_DMIN * d], np.float16).tobytes(), np.uint8)
        blocks[:, 4:16] = _Q4_K_SCALES
        blocks[:, 16:] = rng.integers(0, 256, (n_blocks, 128), dtype=np.uint8)
    return blocks.reshape(gguf.quant_shape_to_byte_shape(shape, ggml_type))


def _skew(rng: np.random.Generator, name: str, values: npt.NDArray[np.generic], skew: float) -> None:
    """Make embeddings carry the constant channel, and a router favour experts by Zipf's law, in an order drawn at random."""
    if name == "token_embd.weight":
        values[:, 0] = _CONSTANT
    elif name.endswith("ffn_gate_inp.weight"):
        values[:, 0] = -skew * np.log(1.0 + rng.permutation(len(values))) / _CONSTANT


def _add_metadata(writer: gguf.GGUFWriter, model: SyntheticModel) -> None:
    writer.add_name(model.name)
    writer.add_context_length(MAX_CONTEXT)
    writer.add_embedding_length(model.n_embd)
    writer.add_block_count(model.n_layers)
    writer.add_feed_forward_length(model.n_ff_exp * model.n_expert_used)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_expert_count(model.n_expert)
    writer.add_expert_used_count(model.n_expert_used)
    writer.add_expert_feed_forward_length(model.n_ff_exp)
    if model.n_ff_shared:
        writer.add_expert_shared_feed_forward_length(model.n_ff_shared)
    else:
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    n_special = model.n_vocab - N_BYTES
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_alphabet(), "<|eos|>", *(f"<|x{i}|>" for i in range(n_special - 1))])
    writer.add_token_types([1] * N_BYTES + [3] * n_special)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(N_BYTES)
    writer.add_eos_token_id(N_BYTES)


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-ins for the 256 byte values, by byte value."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(N_BYTES)]
