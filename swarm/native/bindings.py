"""llama.cpp's functions with their C types, looked up once, and the way of its log into `logging`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading

from swarm.native.layouts import LogCallback
from swarm.native.library import load_library

logger = logging.getLogger(__name__)

LOG_LEVEL_ERROR = 4  # enum ggml_log_level
LOG_LEVEL_CONT = 5  # the text goes on with the level before


class LlamaFunctions:
    """The functions used here, looked up once. Those of microseconds keep the GIL."""

    def __init__(self) -> None:
        library = load_library()
        layouts = library.layouts
        find, quick = library.function, functools.partial(library.function, keeps_gil=True)
        p, i32, u32, f32, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_size_t
        text, yes = ctypes.c_char_p, ctypes.c_bool
        self.log_set = quick("llama_log_set", None, p, p)
        self.model_defaults = quick("llama_model_default_params", layouts.model_params)
        self.load_model = find("llama_model_load_from_file", p, text, layouts.model_params)
        self.model_free = find("llama_model_free", None, p)
        self.vocab = quick("llama_model_get_vocab", p, p)
        self.n_vocab = quick("llama_vocab_n_tokens", i32, p)
        self.n_ctx_train = quick("llama_model_n_ctx_train", i32, p)
        self.tokenize = find("llama_tokenize", i32, p, text, i32, ctypes.POINTER(i32), i32, yes, yes)
        self.piece = quick("llama_token_to_piece", i32, p, i32, p, i32, i32, yes)
        self.is_eog = quick("llama_vocab_is_eog", yes, p, i32)
        self.is_control = quick("llama_vocab_is_control", yes, p, i32)
        self.token_attr = quick("llama_vocab_get_attr", i32, p, i32)
        self.bos = quick("llama_vocab_bos", i32, p)
        self.eos = quick("llama_vocab_eos", i32, p)
        self.metadata = quick("llama_model_meta_val_str", i32, p, text, p, size)
        self.chat_template = quick("llama_model_chat_template", text, p, text)
        self.context_defaults = quick("llama_context_default_params", layouts.context_params)
        self.new_context = find("llama_init_from_model", p, p, layouts.context_params)
        self.context_free = find("llama_free", None, p)
        self.n_ctx = quick("llama_n_ctx", u32, p)
        self.n_batch = quick("llama_n_batch", u32, p)
        self.batch_init = quick("llama_batch_init", layouts.batch, i32, i32, i32)
        self.batch_free = quick("llama_batch_free", None, layouts.batch)
        self.decode = find("llama_decode", i32, p, layouts.batch)
        self.logits = find("llama_get_logits", p, p)
        self.logits_ith = find("llama_get_logits_ith", p, p, i32)
        self.memory = quick("llama_get_memory", p, p)
        self.memory_clear = find("llama_memory_clear", None, p, yes)
        self.memory_remove = quick("llama_memory_seq_rm", yes, p, i32, i32, i32)
        self.memory_copy = quick("llama_memory_seq_cp", None, p, i32, i32, i32, i32)
        self.state_size = find("llama_state_seq_get_size", size, p, i32)
        self.state_get = find("llama_state_seq_get_data", size, p, p, size, i32)
        self.state_set = find("llama_state_seq_set_data", size, p, p, size, i32)
        self.partial_size = find("llama_state_seq_get_size_ext", size, p, i32, u32)
        self.partial_get = find("llama_state_seq_get_data_ext", size, p, p, size, i32, u32)
        self.partial_set = find("llama_state_seq_set_data_ext", size, p, p, size, i32, u32)
        self.is_recurrent = quick("llama_model_is_recurrent", yes, p)
        self.is_hybrid = quick("llama_model_is_hybrid", yes, p)
        self.chain_defaults = quick("llama_sampler_chain_default_params", layouts.sampler_chain_params)
        self.chain_init = quick("llama_sampler_chain_init", p, layouts.sampler_chain_params)
        self.chain_add = quick("llama_sampler_chain_add", None, p, p)
        self.sampler_clone = quick("llama_sampler_clone", p, p)
        self.sampler_free = quick("llama_sampler_free", None, p)
        self.penalties = quick("llama_sampler_init_penalties", p, i32, i32, f32, f32, f32)
        self.top_k = quick("llama_sampler_init_top_k", p, i32)
        self.top_p = quick("llama_sampler_init_top_p", p, f32, size)
        self.min_p = quick("llama_sampler_init_min_p", p, f32, size)
        self.temp = quick("llama_sampler_init_temp", p, f32)
        self.dist = quick("llama_sampler_init_dist", p, u32)
        self.greedy = quick("llama_sampler_init_greedy", p)
        self.sample = find("llama_sampler_sample", i32, p, p, i32)
        find("llama_backend_init", None)()


@functools.cache
def llama() -> LlamaFunctions:
    """Return the table; the first call loads and checks the library."""
    return LlamaFunctions()


class LogRouter:
    """Puts llama.cpp's log lines, which come in pieces, into `logging`.

    Attributes:
        first_error: of llama.cpp's error lines since it was last emptied: the cause, where later ones are its effects.
    """

    def __init__(self) -> None:
        self.callback = LogCallback(self._write)
        self.first_error = ""
        self._lock = threading.Lock()
        self._level = 0
        self._partial = ""

    def _write(self, level: int, text: bytes | None, _user_data: object) -> None:
        try:
            with self._lock:
                if level != LOG_LEVEL_CONT:
                    self._level = level
                *lines, self._partial = (self._partial + (text or b"").decode("utf-8", "replace")).split("\n")
                level = self._level
            for line in filter(str.strip, lines):
                if level == LOG_LEVEL_ERROR:
                    self.first_error = self.first_error or line.strip()
                logger.log(logging.WARNING if level == LOG_LEVEL_ERROR else logging.DEBUG, "%s", line.strip())
        except Exception:  # must not reach C
            logger.debug("lost a line of llama.cpp's log", exc_info=True)


@functools.cache
def log_router() -> LogRouter:
    """Return the process's router; the first call installs it."""
    router = LogRouter()
    llama().log_set(ctypes.cast(router.callback, ctypes.c_void_p), None)
    atexit.register(llama().log_set, None, None)  # no call into Python once it is gone
    return router


def set_log_handler() -> None:
    """Send llama.cpp's log to `logging`: its errors as warnings, the rest at DEBUG. Loading a model does it too."""
    log_router()
