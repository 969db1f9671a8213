"""Choosing, finding and loading the engine's library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import swarm
from swarm.errors import EngineUnavailable, LocalProtocolError
from swarm.native import library

PINNED = {"xllamacpp": "2026.10.11549", "llama-cpp-python": "0.3.36"}


def test_xllamacpp_comes_first_when_both_fit() -> None:
    assert library.choose_engine(None, PINNED, "linux") == "xllamacpp"


def test_the_variable_forces_the_other_one() -> None:
    assert library.choose_engine("llama-cpp-python", PINNED, "linux") == "llama-cpp-python"


def test_a_wrong_version_of_the_first_leaves_the_second() -> None:
    assert library.choose_engine(None, {**PINNED, "xllamacpp": "2025.1.1"}, "linux") == "llama-cpp-python"


def test_windows_never_takes_xllamacpp_by_itself() -> None:
    assert library.choose_engine(None, PINNED, "win32") == "llama-cpp-python"
    with pytest.raises(EngineUnavailable, match=r"pip install llama-cpp-python==0\.3\.36"):
        library.choose_engine(None, {"xllamacpp": PINNED["xllamacpp"]}, "win32")


def test_a_wrong_version_is_named_with_the_expected_one_and_the_command() -> None:
    with pytest.raises(EngineUnavailable) as caught:
        library.choose_engine(None, {"xllamacpp": "2025.1.1"}, "linux")
    message = str(caught.value)
    assert "got xllamacpp 2025.1.1, expected 2026.10.11549" in message
    assert "pip install xllamacpp==2026.10.11549" in message


def test_a_forced_engine_of_a_wrong_version_does_not_fall_back() -> None:
    with pytest.raises(EngineUnavailable, match=r"got llama-cpp-python 0\.3\.1, expected 0\.3\.36"):
        library.choose_engine("llama-cpp-python", {**PINNED, "llama-cpp-python": "0.3.1"}, "linux")


def test_nothing_installed_says_what_to_install() -> None:
    with pytest.raises(EngineUnavailable, match=r"no llama\.cpp library is installed: run `pip install xllamacpp=="):
        library.choose_engine(None, {}, "linux", "x86_64")


@pytest.mark.parametrize(
    ("platform", "machine", "expected"),
    [
        ("linux", "aarch64", "xllamacpp"),
        ("darwin", "arm64", "xllamacpp"),
        ("darwin", "x86_64", "llama-cpp-python"),
        ("linux", "riscv64", "llama-cpp-python"),
        ("win32", "AMD64", "llama-cpp-python"),
    ],
)
def test_nothing_installed_names_the_package_that_this_machine_can_have(
    platform: str, machine: str, expected: str
) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        library.choose_engine(None, {}, platform, machine)
    message = str(caught.value)
    assert f"pip install {expected}==" in message
    assert ("C++ compiler" in message) is (expected == "llama-cpp-python")
    assert message.endswith("docs/volunteer.md has notes for each kind of machine")


def test_an_unknown_engine_is_refused_with_the_names() -> None:
    with pytest.raises(EngineUnavailable, match="got 'ollama', expected xllamacpp or llama-cpp-python"):
        library.choose_engine("ollama", PINNED, "linux")


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("linux", ["libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so"]),
        ("darwin", ["libggml-base.dylib", "libggml-cpu.dylib", "libggml.dylib", "libllama.dylib"]),
        ("win32", ["ggml-base.dll", "ggml-cpu.dll", "ggml.dll", "llama.dll"]),
    ],
)
def test_files_have_the_platforms_names_in_load_order(tmp_path: Path, platform: str, names: list[str]) -> None:
    (tmp_path / "lib").mkdir()
    for name in names:
        (tmp_path / "lib" / name).touch()
    assert [file.name for file in library.library_files("llama-cpp-python", tmp_path, platform)] == names
    (tmp_path / "lib" / names[1]).unlink()
    assert library.library_files("llama-cpp-python", tmp_path, platform) == []


def test_the_extension_module_is_found_under_any_abi_tag(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.abi3.so").touch()
    (tmp_path / "xllamacpp.cp311-win_amd64.pyd").touch()
    assert [f.name for f in library.library_files("xllamacpp", tmp_path, "linux")] == ["xllamacpp.abi3.so"]
    assert [f.name for f in library.library_files("xllamacpp", tmp_path, "win32")] == ["xllamacpp.cp311-win_amd64.pyd"]


@pytest.mark.parametrize(
    ("reason", "package"),
    [
        ("libgomp.so.1: cannot open shared object file: No such file or directory", "apt install libgomp1"),
        ("libstdc++.so.6: cannot open shared object file: No such file or directory", "apt install libstdc++6"),
    ],
)
def test_a_missing_system_library_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, package: str
) -> None:
    def refuse(_path: str) -> None:
        raise OSError(reason)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(EngineUnavailable) as caught:
        library._open(tmp_path / "x.so", "xllamacpp")
    assert package in str(caught.value)
    assert "dnf install" in str(caught.value)


def test_another_load_failure_is_passed_on() -> None:
    assert "invalid ELF header" in library.explain_load_failure("x.so: invalid ELF header", "xllamacpp")


def test_a_process_has_one_library_and_its_functions_are_typed() -> None:
    loaded = library.load_library()
    assert library.load_library() is loaded
    assert PINNED[loaded.name] == loaded.version
    for keeps_gil in (False, True):
        type_name = loaded.function("ggml_type_name", ctypes.c_char_p, ctypes.c_int, keeps_gil=keeps_gil)
        assert type_name(8) == b"q8_0"


def test_a_function_that_is_not_exported_is_named() -> None:
    with pytest.raises(EngineUnavailable, match="does not export llama_no_such_thing"):
        library.load_library().function("llama_no_such_thing", None)


def test_exact_kernels_cannot_be_asked_for_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", object())
    monkeypatch.setattr(library, "_loaded_with_exact_kernels", False)
    with pytest.raises(LocalProtocolError, match="too late"):
        library.use_exact_kernels()


def test_exact_kernels_are_switched_on_before_loading_and_no_package_is_imported() -> None:
    program = (
        "import os, sys\n"
        "from swarm.native import library\n"
        "library.use_exact_kernels()\n"
        "assert os.environ['GGML_CPU_TILED_MM'] == '0' and not library.has_exact_kernels()\n"
        "library.load_library()\n"
        "library.use_exact_kernels()\n"
        "assert library.has_exact_kernels()\n"
        "assert not {'xllamacpp', 'llama_cpp'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(swarm.__file__).parents[1])}
    environment.pop("GGML_CPU_TILED_MM", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
