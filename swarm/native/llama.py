"""llama.cpp's model, context and sampler as small objects that close, and never crash on a wrong argument.

llama.cpp aborts the process on many wrong arguments: whatever would make it do so is checked here first and raises
EngineError. A context is used by one thread at a time; `decode` gives up the GIL, and the eval callback takes it back.
This module knows nothing of experts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from swarm.backbone.requests import SamplingParams
from swarm.errors import EngineError
from swarm.native.bindings import llama, log_router, set_log_handler
from swarm.native.checkpoints import Checkpoints
from swarm.native.devices import Device
from swarm.native.layouts import EvalCallback

DEFAULT_SEED = 0xFFFF_FFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws a seed of its own for it
LOAD_MODE_NONE, LOAD_MODE_MMAP = 0, 1  # of enum llama_load_mode, the same in both builds
TOKEN_ATTR_USER_DEFINED = 1 << 4  # of enum llama_token_attr, the same in both builds
GREEDY_BELOW = 1e-6  # logits of some tens, divided by less, leave float32
PENALTY_WINDOW = 65_536  # latest tokens of the answer that penalties count; a guess: longer than any answer
DECODE_FAILURES = {
    1: "no room for the batch in the context",
    2: "aborted",
    -1: "invalid batch",
}

__all__ = ["KV_TYPES", "BatchPart", "LlamaContext", "LlamaModel", "LogitsChoice", "Sampler", "set_log_handler"]

LogitsChoice = Literal["all", "last", "none"]
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_0": 6, "q4_0": 2}
"""Name of a type that K and V may have -> enum ggml_type. A quantised V needs flash attention, which the CPU has."""
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ of both builds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """What one sequence adds to a batch: tokens at consecutive positions.

    Attributes:
        logits: which of the tokens get a row of logits.
    """

    tokens: Sequence[int]
    first_position: int
    sequence: int = 0
    logits: LogitsChoice = "last"


class LlamaModel:
    """A GGUF file's weights and vocabulary.

    Raises:
        EngineError: llama.cpp cannot load the file; the message carries its own reason.
    """

    def __init__(
        self, path: Path, *, exact_kernels: bool = False, device: Device | None = None, is_mapped: bool = True
    ) -> None:
        """Load the file.

        Args:
            exact_kernels: leave the weights as they are stored: repacked ones sum in another order.
            device: where all layers live; None is the CPU, and every other device is kept out of it.
            is_mapped: map the file instead of reading it: for models that may not fit into memory. Of a mapped file, weights
                that are repacked stay resident twice.
        """
        set_log_handler()
        params = llama().model_defaults()
        is_cpu = device is None or device.is_cpu
        params.n_gpu_layers = 0 if is_cpu else -1  # -1: all
        params.use_extra_bufts = not exact_kernels
        params.load_mode = LOAD_MODE_MMAP if is_mapped else LOAD_MODE_NONE
        # Ends with a null, for the CPU at once; llama.cpp keeps its address.
        self._devices = (ctypes.c_void_p * 2)(None if is_cpu or device is None else device.handle, None)
        params.devices = ctypes.addressof(self._devices)
        log_router().first_error = ""
        self._vocab_lock = threading.Lock()  # a long text is tokenised on another thread than the one that closes
        self._handle: int | None = llama().load_model(os.fsencode(path), params)
        if not self._handle:
            raise EngineError(f"llama.cpp cannot load {path}: {log_router().first_error or 'no reason given'}")
        self._vocab: int = llama().vocab(self._handle)
        self._contexts: weakref.WeakSet[LlamaContext] = weakref.WeakSet()
        self.n_vocab: int = llama().n_vocab(self._vocab)
        self.n_ctx_train: int = llama().n_ctx_train(self._handle)
        # One state for all tokens of a sequence, in some layers at least: the last ones cannot simply be removed.
        self.has_recurrent_state = bool(llama().is_recurrent(self._handle) or llama().is_hybrid(self._handle))
        self.bos_token: int | None = _token_or_none(llama().bos(self._vocab))
        self.eos_token: int | None = _token_or_none(llama().eos(self._vocab))

    @property
    def handle(self) -> int:
        """The address of the llama_model. Raises EngineError after `close`."""
        if not self._handle:
            raise EngineError("the model is closed")
        return self._handle

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the text's token ids.

        Args:
            add_special: add BOS and EOS where the model is configured to have them.
            parse_special: read the texts of control tokens as those tokens.
        """
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        with self._vocab_lock:
            self._check_open()
            for _ in range(2):
                tokens = (ctypes.c_int32 * room)()
                count: int = llama().tokenize(self._vocab, raw, len(raw), tokens, room, add_special, parse_special)
                if count >= 0:
                    return list(tokens[:count])
                room = -count
                if room > 2**31 - 1:
                    break
        raise EngineError(f"llama.cpp cannot tokenise a text of {len(raw)} bytes")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the token's bytes, perhaps a part of a character; control tokens are empty unless `special`."""
        self._check_token(token)
        room = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count: int = llama().piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise EngineError(f"llama.cpp cannot write token {token}")

    def is_end_of_generation(self, token: int) -> bool:
        """Return whether the token ends an answer."""
        self._check_token(token)
        return bool(llama().is_eog(self._vocab, token))

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        return tuple(token for token in range(self.n_vocab) if self.is_end_of_generation(token))

    def is_control(self, token: int) -> bool:
        """Return whether the token is a mark for the machine and no text."""
        self._check_token(token)
        return bool(llama().is_control(self._vocab, token))

    def is_user_defined(self, token: int) -> bool:
        """Return whether the token was added to the vocabulary by name."""
        self._check_token(token)
        return bool(llama().token_attr(self._vocab, token) & TOKEN_ATTR_USER_DEFINED)

    def metadata(self, key: str) -> str | None:
        """Return a GGUF value as text, or None; arrays are not seen."""
        room = 256
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count: int = llama().metadata(self.handle, key.encode(), buffer, room)
            if count < 0:
                return None
            if count < room:
                return buffer.raw[:count].decode("utf-8", "replace")
            room = count + 1
        return None

    @property
    def chat_template(self) -> str | None:
        """The GGUF's Jinja2 chat template, or None."""
        template: bytes | None = llama().chat_template(self.handle, None)
        return None if template is None else template.decode("utf-8", "replace")

    def _check_open(self) -> None:
        _ = self.handle

    def _check_token(self, token: int) -> None:
        self._check_open()
        if not 0 <= token < self.n_vocab:
            raise EngineError(f"no such token: got {token}, expected 0 to {self.n_vocab - 1}")

    def close(self) -> None:
        """Close the contexts over this model and free it; a second call does nothing."""
        with self._vocab_lock:
            if self._handle:
                for context in list(self._contexts):
                    context.close()
                llama().model_free(self._handle)
                self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _token_or_none(token: int) -> int | None:
    return token if token >= 0 else None


class LlamaContext:
    """A KV cache and compute buffers over a model.

    The eval callback gets (tensor address, ask) for every node of the graph. With ask it answers whether it wants the
    node; without, the node is computed. An exception in it is kept, the callback is not called again, and the graph runs
    to its end with whatever the nodes hold: the results are void. Take it with `take_callback_error`; until then
    `decode` and everything that reads results raise EngineError.

    Attributes:
        n_ctx: tokens that fit, by llama.cpp's own figure.
        n_batch: most tokens of one `decode`, by llama.cpp's own figure.
        n_outputs: rows of logits that the last `decode` made.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        eval_callback: Callable[[int, bool], bool] | None = None,
        n_seq_max: int = 1,
        kv_types: tuple[str, str] = ("f16", "f16"),
    ) -> None:
        """Make a context; the model must stay open as long.

        Args:
            n_ctx: tokens of all sequences together: they share one KV cache, so that a batch of several is one graph.
            kv_types: of K and of V; see `KV_TYPES`.

        Raises:
            EngineError: llama.cpp refuses, for example for want of memory.
        """
        for name, value in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_threads", n_threads)):
            if value < 1:
                raise EngineError(f"{name} is too small: got {value}, expected at least 1")
        params = llama().context_defaults()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        if not 1 <= n_seq_max <= MAX_SEQUENCES:
            raise EngineError(f"number of sequences out of range: got {n_seq_max}, expected 1 to {MAX_SEQUENCES}")
        params.n_seq_max = n_seq_max
        # Apart, a batch of parts of unequal length would be cut into several graphs: more round trips.
        params.kv_unified = n_seq_max > 1
        params.type_k, params.type_v = (KV_TYPES[name] for name in kv_types)
        self._callback_error: BaseException | None = None
        self._trampoline = EvalCallback(self._guarded(eval_callback)) if eval_callback else None
        if self._trampoline is not None:
            params.cb_eval = self._trampoline
        self.model = model
        self._handle: int | None = llama().new_context(model.handle, params)
        if not self._handle:
            raise EngineError(f"llama.cpp cannot make a context: {log_router().first_error or 'no reason given'}")
        self._memory: int | None = llama().memory(self._handle)
        self._checkpoints = Checkpoints() if model.has_recurrent_state else None
        self.n_ctx: int = llama().n_ctx(self._handle)
        self.n_batch: int = llama().n_batch(self._handle)
        self.n_outputs = 0
        self._n_seq_max = n_seq_max
        self._batch: Any = llama().batch_init(self.n_batch, 0, 1)
        size = self.n_batch
        self._tokens = np.ctypeslib.as_array(self._batch.token, (size,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, (size,))
        self._wants_logits = np.ctypeslib.as_array(self._batch.logits, (size,))
        np.ctypeslib.as_array(self._batch.n_seq_id, (size,))[:] = 1
        self._row_sequences = np.full(size, -1, np.int32)  # what each row's seq_id holds: writing it is slow
        model._contexts.add(self)

    def _guarded(self, callback: Callable[[int, bool], bool]) -> Callable[[int, bool, object], bool]:
        # Of an object, its method: Python calls that faster than the object.
        is_plain = isinstance(callback, types.FunctionType | types.MethodType)
        call: Callable[[int, bool], bool] = callback if is_plain else callback.__call__  # type: ignore[operator]

        def guarded(tensor: int, ask: bool, _user_data: object) -> bool:
            if self._callback_error is None:
                try:
                    return call(tensor, ask)
                except BaseException as error:  # even KeyboardInterrupt must not unwind through C
                    self._callback_error = error
            return not ask  # no more nodes, and go on

        return guarded

    @property
    def handle(self) -> int:
        """The address of the llama_context. Raises EngineError after `close`."""
        if not self._handle:
            raise EngineError("the context is closed")
        return self._handle

    def take_callback_error(self) -> BaseException | None:
        """Return what the eval callback raised since the last call, and forget it."""
        error, self._callback_error = self._callback_error, None
        return error

    def _check_callback(self) -> None:
        if self._callback_error is not None:
            raise EngineError(
                f"the eval callback failed and its error was not taken: {self._callback_error!r}"
            ) from self._callback_error

    def decode(
        self,
        tokens: Sequence[int],
        *,
        first_position: int,
        sequence: int = 0,
        logits: LogitsChoice,
    ) -> None:
        """Compute the tokens at consecutive positions and keep them in the KV cache; as `decode_parts` with one part."""
        part = BatchPart(tokens=tokens, first_position=first_position, sequence=sequence, logits=logits)
        self.decode_parts((part,))

    def decode_parts(self, parts: Sequence[BatchPart]) -> None:
        """Compute tokens of several sequences in one batch and keep them in the KV cache; rows are in the parts' order.

        Raises:
            EngineError: too many tokens for a batch or the context, a token or sequence out of range, or llama.cpp
                failed. After a failure in mid-batch a part may be in the KV cache: `remove` it.
        """
        handle = self.handle
        self._check_callback()
        n = sum(len(part.tokens) for part in parts)
        if not 1 <= n <= self.n_batch:
            raise EngineError(f"batch has a wrong size: got {n} tokens, expected 1 to {self.n_batch}")
        at, n_outputs = 0, 0
        for part in parts:
            end = at + len(part.tokens)
            self._place(part, at, end)
            n_outputs += {"all": end - at, "last": 1, "none": 0}[part.logits]
            at = end
        self._batch.n_tokens = n
        self.n_outputs = 0
        if self._checkpoints is not None:
            for part in parts:
                self._checkpoints.take(handle, part.sequence, part.first_position)
        log_router().first_error = ""
        status: int = llama().decode(handle, self._batch)
        if status != 0:
            reason = log_router().first_error or DECODE_FAILURES.get(status, "fatal error")
            raise EngineError(f"llama.cpp could not decode {n} tokens: status {status}, {reason}")
        self.n_outputs = n_outputs

    def _place(self, part: BatchPart, at: int, end: int) -> None:
        """Write a part into the batch's rows `at` to `end`."""
        n, first = end - at, part.first_position
        if n < 1:
            raise EngineError("a part of the batch has no tokens")
        if first < 0 or first + n > self.n_ctx:
            raise EngineError(
                f"batch does not fit the context: got positions {first} to {first + n - 1}, "
                f"expected 0 to {self.n_ctx - 1}"
            )
        self._check_sequence(part.sequence)
        rows = slice(at, end)
        self._tokens[rows] = part.tokens
        if self._tokens[rows].min() < 0 or self._tokens[rows].max() >= self.model.n_vocab:
            raise EngineError(f"token out of range, expected 0 to {self.model.n_vocab - 1}")
        self._positions[rows] = np.arange(first, first + n)
        self._wants_logits[rows] = part.logits == "all"
        if part.logits == "last":
            self._wants_logits[end - 1] = True
        for index in (self._row_sequences[rows] != part.sequence).nonzero()[0] + at:
            self._batch.seq_id[index][0] = part.sequence
        self._row_sequences[rows] = part.sequence

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self._n_seq_max:
            raise EngineError(f"no such sequence: got {sequence}, expected 0 to {self._n_seq_max - 1}")

    def logits(self, i: int) -> npt.NDArray[np.float32]:
        """Return a copy of one row of logits, [V], float32.

        Args:
            i: index of the token in the last batch, or from the end when negative: -1 is the last row.

        Raises:
            EngineError: that token has no logits.
        """
        return self.logits_in_place(i).copy()

    def logits_in_place(self, i: int) -> npt.NDArray[np.float32]:
        """Return one row of logits, [V], float32, in llama.cpp's own memory: what is written there is what is drawn from.

        Until the next `decode`; `i` and errors as `logits`.
        """
        address = self._logits_address(i)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (self.model.n_vocab,))

    def _logits_address(self, i: int) -> int:
        handle = self.handle
        self._check_callback()
        n = self._batch.n_tokens
        has_row = -self.n_outputs <= i < 0 or (self.n_outputs and 0 <= i < n and self._wants_logits[i])
        address: int | None = llama().logits_ith(handle, i) if has_row else None
        if not address:
            raise EngineError(f"no logits at index {i}: the last batch made {self.n_outputs} rows")
        return address

    def all_logits(self) -> npt.NDArray[np.float32]:
        """Return a copy of the last batch's logits in batch order, [n_outputs, V], float32."""
        handle = self.handle
        self._check_callback()
        shape = (self.n_outputs, self.model.n_vocab)
        if self.n_outputs == 0:
            return np.empty(shape, np.float32)
        address = llama().logits(handle)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape).copy()

    def remove(self, sequence: int, from_position: int) -> bool:
        """Forget the sequence's tokens from this position on; return False if this kind of memory cannot.

        A recurrent memory can forget all, or its latest step as a whole (`swarm.native.checkpoints`).
        """
        handle = self.handle
        self._check_sequence(sequence)
        position = max(from_position, 0)
        is_done = bool(llama().memory_remove(self._memory, sequence, position, -1))
        if self._checkpoints is not None:
            if not is_done and self._checkpoints.restore(handle, sequence, position):
                is_done = bool(llama().memory_remove(self._memory, sequence, position, -1))
            if is_done:
                self._checkpoints.forget(sequence)
        return is_done

    def copy(self, sequence: int, to: int, n_tokens: int) -> None:
        """Let sequence `to`, which must be empty, begin with the first tokens of another: they share its cells."""
        _ = self.handle
        self._check_sequence(sequence)
        self._check_sequence(to)
        llama().memory_copy(self._memory, sequence, to, 0, n_tokens)

    def save(self, sequence: int) -> npt.NDArray[np.uint8]:
        """Return a copy of all that the memory holds of a sequence, for `restore` in any context of this model and types."""
        handle = self.handle
        self._check_sequence(sequence)
        state = np.empty(llama().state_size(handle, sequence), np.uint8)
        n: int = llama().state_get(handle, state.ctypes.data, len(state), sequence)
        if not n:
            raise EngineError(f"llama.cpp cannot copy sequence {sequence} out of its memory")
        return state[:n]

    def restore(self, sequence: int, state: npt.NDArray[np.uint8]) -> bool:
        """Fill a sequence with what `save` returned; return False, and leave it empty, where there is no room.

        `state` must be what `save` of this program returned: llama.cpp trusts it.
        """
        handle = self.handle
        self._check_sequence(sequence)
        is_done = bool(llama().state_set(handle, state.ctypes.data, len(state), sequence))
        if not is_done:
            llama().memory_remove(self._memory, sequence, -1, -1)
        return is_done

    def clear(self) -> None:
        """Forget every token of every sequence."""
        _ = self.handle
        if self._checkpoints is not None:
            self._checkpoints.forget()
        llama().memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        if self._handle:
            llama().context_free(self._handle)
            self._handle = None
            llama().batch_free(self._batch)
            empty = np.empty(0, np.int32)
            self._tokens = self._positions = empty
            self._wants_logits = empty.astype(np.int8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sampler:
    """llama.cpp's sampler chain: penalties, top_k, top_p, min_p, temperature, then a draw; greedy at temperature 0.

    Penalties count the tokens that this sampler drew, never the prompt's.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        """Build the chain; the same seed and logits draw the same tokens."""
        engine = llama()
        self.seed = secrets.randbelow(DEFAULT_SEED) if params.seed is None else params.seed % DEFAULT_SEED
        self._handle: int | None = engine.chain_init(engine.chain_defaults())
        if not self._handle:
            raise EngineError("llama.cpp cannot make a sampler")
        if params.presence_penalty or params.frequency_penalty or params.repeat_penalty != 1:
            penalties = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
            self._add(engine.penalties(n_vocab, PENALTY_WINDOW, *penalties))
        if params.temperature < GREEDY_BELOW:
            self._add(engine.greedy())
            return
        if params.top_k > 0:
            self._add(engine.top_k(min(params.top_k, n_vocab)))
        if params.top_p < 1:
            self._add(engine.top_p(params.top_p, 1))
        if params.min_p > 0:
            self._add(engine.min_p(params.min_p, 1))
        self._add(engine.temp(params.temperature))
        self._add(engine.dist(self.seed))

    def _add(self, link: int | None) -> None:
        if not link:
            raise EngineError("llama.cpp cannot make a link of the sampler")
        llama().chain_add(self._handle, link)

    def sample(self, context: LlamaContext, index: int = -1) -> int:
        """Draw a token from a row of logits (index as in `LlamaContext.logits`) and count it for the penalties.

        Raises:
            EngineError: that row does not exist, or the sampler is closed.
        """
        if not self._handle:
            raise EngineError("the sampler is closed")
        context._logits_address(index)  # llama.cpp would abort the process
        token: int = llama().sample(self._handle, context.handle, index)
        return token

    def copy(self) -> Sampler:
        """Return a sampler in the same state: the same logits draw the same tokens from here on."""
        if not self._handle:
            raise EngineError("the sampler is closed")
        copy = object.__new__(type(self))
        copy.seed = self.seed
        copy._handle = llama().sampler_clone(self._handle)
        if not copy._handle:
            raise EngineError("llama.cpp cannot copy a sampler")
        return copy

    def close(self) -> None:
        """Free the chain; a second call does nothing."""
        if self._handle:
            llama().sampler_free(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
