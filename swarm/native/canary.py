"""What another version of a llama.cpp library has changed, of all that this program relies on, in sentences a person can act on.

    symbols    every exported function that swarm's sources name
    structs    the by-value structs: sizes and defaults against each layout that is known
    ggml       operations by name, and the types' blocks
    graph      the nodes that the hook waits for, in a small model that is computed

`python -m swarm.native.canary` looks at the installed package, `python -m swarm.native.canary FOLDER` at an unpacked one of
any version (the folder `xllamacpp` or `llama_cpp` of its wheel), and exits with 1 when something would not work. docs/engine.md
says what to do then.
"""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import EngineUnavailable, SwarmError
from swarm.native import library as library_module
from swarm.native.layouts import LAYOUTS, StructLayouts, verify_layouts
from swarm.native.library import MODULES, Library, library_files, load_library

NAMED_FUNCTION = re.compile(r'"((?:llama|ggml|gguf)_[a-z0-9_]+)"')
NOT_EXPORTED = frozenset(  # names in quotes that are no functions of the library's
    {"ggml_type", "llama_cpp", "llama_context", "llama_model", "ggml_backend_dev_get_extra_bufts"}
)
PARTS = {  # made of parts in `swarm.native.ggml`
    *(f"ggml_{name}_split" for name in ("swiglu", "geglu", "reglu")),
    *(f"ggml_{name}" for name in ("silu", "gelu", "relu", "sqr", "tanh", "sigmoid")),
    "llama_model_default_params",
    "llama_context_default_params",
}
OPERATIONS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "MUL_MAT_ID", "ADD", "MUL")
NODES = ("ffn_moe_topk", "ffn_moe_weights", "ffn_moe_gate", "ffn_moe_up", "ffn_moe_down", "ffn_moe_out")


def named_functions() -> set[str]:
    """Return every function of the library that swarm's sources name."""
    names = set(PARTS)
    for path in Path(__file__).parents[1].rglob("*.py"):
        names.update(NAMED_FUNCTION.findall(path.read_text(encoding="utf-8")))
    return names - NOT_EXPORTED


def missing_symbols(has: Callable[[str], bool]) -> list[str]:
    """Return a sentence for each function that the library does not export."""
    return [
        f"the library does not export {name}: look in its llama.h or ggml.h for what took its place, "
        "and change the line that names it"
        for name in sorted(named_functions())
        if not has(name)
    ]


def fitting_layouts(function: Callable[..., Any]) -> tuple[list[StructLayouts], list[str]]:
    """Return the known layouts that fit the library, and where none does, a sentence for each that says why not."""
    fitting, sentences = [], []
    for (package, version), layouts in LAYOUTS.items():
        try:
            verify_layouts(layouts, function, "this version")
            fitting.append(layouts)
        except EngineUnavailable as error:
            reason = str(error).rsplit(": ", 1)[-1]
            sentences.append(
                f"structs are not laid out as in {package} {version}: {reason}. Compare that struct with its header and "
                "write another class and a line of LAYOUTS in swarm/native/layouts.py"
            )
    return fitting, [] if fitting else sentences


def survey_ggml() -> list[str]:
    """Return sentences about operations and types of the loaded library."""
    import gguf

    from swarm.native.ggml import op_code, type_layout

    sentences = []
    for name in OPERATIONS:
        try:
            op_code(name)
        except EngineUnavailable as error:
            sentences.append(f"{error}: stub experts would be computed, or not found; see swarm/backbone/stub_nodes.py")
    for kind, (block, size_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name in ("Q8_1", "Q8_K"):
            continue  # of activations, never in a file
        found = type_layout(int(kind))
        if found != (block, size_bytes) and found != (0, 0):
            sentences.append(
                f"type {kind.name} has blocks of {found} (values, bytes), gguf-py says {(block, size_bytes)}: "
                "experts of that type are refused until both agree"
            )
    return sentences


def survey_graph() -> list[str]:
    """Return sentences about nodes that are not as the hook expects, in a small model that the loaded library computes."""
    from swarm.architectures.generator import Variant, write_model
    from swarm.architectures.recipes import RECIPES
    from swarm.native.ggml import op_code, tensor_name, tensor_op, tensor_source
    from swarm.native.llama import LlamaContext, LlamaModel

    seen: dict[str, int] = {}
    weights: set[str] = set()

    def watch(tensor: int, ask: bool) -> bool:
        if ask:
            seen[tensor_name(tensor)] = tensor_op(tensor)
            source = tensor_source(tensor, 0)
            if tensor_op(tensor) == op_code("MUL_MAT_ID") and source is not None:
                weights.add(tensor_name(source))
        return False

    with tempfile.TemporaryDirectory(prefix="swarm-canary-") as folder:
        path = Path(folder) / "model.gguf"
        write_model(
            path, next(recipe for recipe in RECIPES if recipe.architecture == "qwen3moe"), Variant(name="canary")
        )
        with (
            LlamaModel(path) as model,
            LlamaContext(model, n_ctx=32, n_batch=8, n_ubatch=8, n_threads=1, eval_callback=watch) as context,
        ):
            context.decode([1, 2, 3], first_position=0, logits="all")
    sentences = [
        f"no node {name}-0 in the graph of a small qwen3moe: find its name in llama.cpp's build_moe_ffn, and change "
        "swarm/backbone/moe_hook.py"
        for name in NODES
        if f"{name}-0" not in seen
    ]
    if seen.get("ffn_moe_up-0") not in (None, op_code("MUL_MAT_ID")):
        sentences.append("ffn_moe_up-0 is no MUL_MAT_ID any more: the hook would not take x and the ids from it")
    if "blk.0.ffn_up_exps.weight" not in weights:
        sentences.append(
            "an expert product's first source is not called as in the file: see swarm/backbone/stub_nodes.py"
        )
    return sentences


def survey() -> list[str]:
    """Return what is wrong with the installed library; empty where nothing is."""
    library = load_library()

    def has(name: str) -> bool:
        try:
            library.function(name, None)
        except EngineUnavailable:
            return False
        return True

    return missing_symbols(has) + survey_ggml() + survey_graph()


def survey_folder(folder: Path) -> list[str]:
    """Return what is wrong with the library in an unpacked package of any version. Loads it into this process for good.

    Raises:
        EngineUnavailable: there is no library in the folder, or it cannot be loaded.
    """
    name = next((name for name in MODULES if library_files(name, folder)), None)
    if name is None:
        raise EngineUnavailable(
            f"no llama.cpp library in {folder}: expected the folder {' or '.join(MODULES.values())} of a wheel"
        )
    handles = [ctypes.CDLL(str(file)) for file in library_files(name, folder)]

    def find(symbol: str) -> Any:
        return next((handle[symbol] for handle in handles if hasattr(handle, symbol)), None)

    def function(symbol: str, restype: Any, *argtypes: Any) -> Any:
        found = find(symbol)
        if found is None:
            raise EngineUnavailable(f"the library does not export {symbol}")
        found.restype, found.argtypes = restype, list(argtypes)
        return found

    sentences = missing_symbols(lambda symbol: find(symbol) is not None)
    fitting, misfits = fitting_layouts(function)
    sentences += misfits
    if not fitting or sentences:
        return [*sentences, "not tried, since it could crash: the graph of a small model"]
    library_module._loaded = Library(name, "unpinned", handles, fitting[0])
    return survey_ggml() + survey_graph()


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, a sentence a line; return the exit code."""
    try:
        sentences = survey_folder(Path(arguments[0])) if arguments else survey()
    except SwarmError as error:
        sentences = [str(error)]
    for sentence in sentences:
        print(f"- {sentence}")
    print("nothing that swarm relies on has changed" if not sentences else f"{len(sentences)} things to look at")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
