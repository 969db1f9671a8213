"""Finds and loads the one llama.cpp library of this process, from whichever pinned package is installed.

The packages are found by their metadata and never imported: importing them starts things that are not ours.

    xllamacpp         one extension module that exports llama_*, ggml_* and gguf_* (not in the Windows wheel)
    llama-cpp-python  llama_cpp/lib/ with libggml-base, libggml-cpu, libggml and libllama

`SWARM_ENGINE` forces one of the two by its package name. This module knows no function of llama.cpp by itself:
callers name what they need, with types, and get a callable.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform as this_machine
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import EngineUnavailable, LocalProtocolError
from swarm.native.addresses import address_of
from swarm.native.layouts import LAYOUTS, StructLayouts, verify_layouts
from swarm.wire.quantise import HalfKernels, use_half_kernels

ENGINE_VARIABLE = "SWARM_ENGINE"
TILED_VARIABLE = "GGML_CPU_TILED_MM"  # read by ggml with getenv at its first matrix product
XLLAMACPP = "xllamacpp"
LLAMA_CPP_PYTHON = "llama-cpp-python"
MODULES = {XLLAMACPP: "xllamacpp", LLAMA_CPP_PYTHON: "llama_cpp"}
EXPECTED_VERSIONS = dict(LAYOUTS.keys())
# Where xllamacpp has wheels (its files at the package registry, 2026-11): elsewhere it would have to be compiled by hand.
PREBUILT = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")}
# What the dynamic linker says is missing -> what installs it: Debian and Ubuntu, Fedora, Alpine.
SYSTEM_PACKAGES = {
    "libgomp": ("libgomp1", "libgomp", "libgomp"),
    "libstdc++": ("libstdc++6", "libstdc++", "libstdc++"),
}


class Library:
    """A loaded llama.cpp.

    Attributes:
        name: the package it came from: "xllamacpp" or "llama-cpp-python".
        version: that package's version.
        layouts: its by-value structs, already checked against the library.
    """

    def __init__(self, name: str, version: str, handles: Sequence[ctypes.CDLL], layouts: StructLayouts) -> None:
        self.name = name
        self.version = version
        self.layouts = layouts
        self._handles = tuple(handles)
        # The same handles, called without giving up the GIL.
        self._quick_handles = tuple(ctypes.PyDLL(str(h._name), handle=h._handle) for h in handles)

    def function(self, name: str, restype: Any, *argtypes: Any, keeps_gil: bool = False) -> Callable[..., Any]:
        """Return the exported function as a callable with these ctypes types; a new object at each call.

        With `keeps_gil` the call holds Python's lock. For calls of microseconds that is the better choice: whoever
        gives the lock up can wait a whole switch interval to get it back.

        Raises:
            EngineUnavailable: the library does not export it.
        """
        for handle in self._quick_handles if keeps_gil else self._handles:
            try:
                found = handle[name]  # unlike getattr, not shared between callers that want other types
            except AttributeError:
                continue
            found.restype = restype
            found.argtypes = list(argtypes)
            return found
        raise EngineUnavailable(
            f"the llama.cpp library of {self.name} does not export {name}: {_advice(LLAMA_CPP_PYTHON)}"
        )


_lock = threading.Lock()
_loaded: Library | None = None
_loaded_with_exact_kernels = False


def load_library() -> Library:
    """Return this process's llama.cpp, loading and checking it at the first call.

    Raises:
        EngineUnavailable: none is installed, its version is not the pinned one, a system library is missing, or its
            structs are not as expected. The message says what to install.
    """
    global _loaded, _loaded_with_exact_kernels
    with _lock:
        if _loaded is None:
            with_exact_kernels = os.environ.get(TILED_VARIABLE) == "0"
            name = choose_engine(os.environ.get(ENGINE_VARIABLE), installed_versions())
            version = EXPECTED_VERSIONS[name]
            library = Library(name, version, _open_files(name), LAYOUTS[name, version])
            verify_layouts(library.layouts, library.function, f"{name} {version}")
            _loaded, _loaded_with_exact_kernels = library, with_exact_kernels
            use_half_kernels(half_kernels(library))  # rows on the wire take a thirtieth of numpy's time
        return _loaded


def half_kernels(library: Library) -> HalfKernels:
    """Return ggml's conversions between f32 and f16: F16C, AVX-512 or NEON where the processor has them."""
    library.function("ggml_cpu_init", None)()  # the table for what has no instruction
    encode, decode = (
        library.function(name, None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, keeps_gil=True)
        for name in ("ggml_cpu_fp32_to_fp16", "ggml_cpu_fp16_to_fp32")
    )
    return HalfKernels(
        lambda x, halves: encode(address_of(x), address_of(halves), x.size),
        lambda halves, x: decode(address_of(halves), address_of(x), x.size),
    )


def use_exact_kernels() -> None:
    """Turn off the kernels whose sums depend on how many rows share a call; call it before anything is loaded.

    Raises:
        LocalProtocolError: the library is loaded already, with those kernels on.
    """
    with _lock:
        if _loaded is not None and not _loaded_with_exact_kernels:
            raise LocalProtocolError(
                f"exact kernels asked for too late: the engine is loaded, expected {TILED_VARIABLE}=0 before"
            )
        os.environ[TILED_VARIABLE] = "0"  # os.environ calls putenv, which C's getenv sees


def has_exact_kernels() -> bool:
    """Return whether the loaded library computes with exact kernels (False when none is loaded)."""
    return _loaded is not None and _loaded_with_exact_kernels


def installed_versions() -> dict[str, str]:
    """Return package name -> version of the engine packages that are installed."""
    found = {}
    for name, module in MODULES.items():
        try:
            if importlib.util.find_spec(module) is not None:
                found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def choose_engine(
    forced: str | None,
    installed: dict[str, str],
    platform: str = sys.platform,
    machine: str = this_machine.machine(),
) -> str:
    """Return the package to load: `forced`, else xllamacpp at its pinned version, else llama-cpp-python.

    Raises:
        EngineUnavailable: nothing fits.
    """
    if forced and forced not in MODULES:
        raise EngineUnavailable(f"unknown engine in {ENGINE_VARIABLE}: got {forced!r}, expected {' or '.join(MODULES)}")
    # xllamacpp's Windows wheel does not export the C API.
    candidates = [forced] if forced else [name for name in MODULES if name != XLLAMACPP or platform != "win32"]
    for name in candidates:
        if installed.get(name) == EXPECTED_VERSIONS[name]:
            return name
    wrong = [
        f"got {name} {installed[name]}, expected {EXPECTED_VERSIONS[name]}" for name in candidates if name in installed
    ]
    default = XLLAMACPP if (platform, machine) in PREBUILT else LLAMA_CPP_PYTHON
    wanted = next(
        (name for name in candidates if name in installed), default if default in candidates else candidates[0]
    )
    found = "the engine has another version: " + "; ".join(wrong) if wrong else "no llama.cpp library is installed"
    raise EngineUnavailable(f"{found}: {_advice(wanted)}; docs/volunteer.md has notes for each kind of machine")


def _advice(name: str) -> str:
    needs = " (it is compiled on the spot, with a C++ compiler and cmake)" if name == LLAMA_CPP_PYTHON else ""
    return f"run `pip install {name}=={EXPECTED_VERSIONS[name]}`{needs}"


def _open_files(name: str) -> list[ctypes.CDLL]:
    spec = importlib.util.find_spec(MODULES[name])
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for folder in folders:
        files = library_files(name, folder)
        if files:
            return [_open(file, name) for file in files]
    raise EngineUnavailable(f"{name} is installed without its llama.cpp library: {_advice(name)} --force-reinstall")


def library_files(name: str, folder: Path, platform: str = sys.platform) -> list[Path]:
    """Return the library's files below the package's folder, in the order to load them; empty if one is missing."""
    if name == XLLAMACPP:
        pattern = "xllamacpp*.pyd" if platform == "win32" else "xllamacpp*.so"
        return sorted(folder.glob(pattern))[:1]
    prefix, suffix = {"win32": ("", ".dll"), "darwin": ("lib", ".dylib")}.get(platform, ("lib", ".so"))
    files = [folder / "lib" / f"{prefix}{stem}{suffix}" for stem in ("ggml-base", "ggml-cpu", "ggml", "llama")]
    return files if all(file.is_file() for file in files) else []


def _open(file: Path, name: str) -> ctypes.CDLL:
    if sys.platform == "win32":
        os.add_dll_directory(str(file.parent))
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise EngineUnavailable(explain_load_failure(str(error), name)) from error


def explain_load_failure(reason: str, name: str) -> str:
    """Return the message for a library that the dynamic linker refused, naming the system package if it says which."""
    for missing, (debian, fedora, alpine) in SYSTEM_PACKAGES.items():
        if missing in reason:
            return (
                f"the llama.cpp library of {name} needs the system library {missing}: run `apt install {debian}` "
                f"(Debian, Ubuntu), `dnf install {fedora}` (Fedora) or `apk add {alpine}` (Alpine)"
            )
    return f"cannot load the llama.cpp library of {name}: {reason}"
