"""The canary: silent on the pinned library, and of another one it says what changed and where to look."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import EngineUnavailable
from swarm.native import canary, ggml
from swarm.native.layouts import LAYOUTS, StructLayouts
from swarm.native.library import load_library


def test_the_pinned_library_is_as_this_program_expects() -> None:
    assert canary.survey() == [], "an upgrade? see docs/engine.md"


def test_every_function_that_is_named_anywhere_is_looked_for() -> None:
    names = canary.named_functions()
    assert {"llama_decode", "ggml_mul_mat_id", "ggml_reglu_split", "ggml_sqr", "gguf_init_from_file"} <= names
    assert len(names) > 90
    sentences = canary.missing_symbols(lambda name: name != "llama_decode")
    assert len(sentences) == 1
    assert "does not export llama_decode: look in its llama.h" in sentences[0]


def test_another_layout_is_named_with_the_field_that_tells() -> None:
    function = load_library().function
    fitting, sentences = canary.fitting_layouts(function)
    assert fitting
    assert not sentences

    class Shifted(ctypes.Structure):
        _fields_ = [("new", ctypes.c_uint64), *load_library().layouts.context_params._fields_]

    def shifted(name: str, restype: Any, *argtypes: Any, **more: Any) -> Any:
        if name != "llama_context_default_params":
            return function(name, restype, *argtypes, **more)
        inner = function(name, load_library().layouts.context_params)

        def call() -> ctypes.Structure:
            raw = bytes(8) + bytes(inner()) + bytes(512)
            return restype.from_buffer_copy(raw[: ctypes.sizeof(restype)])

        return call

    fitting, sentences = canary.fitting_layouts(shifted)
    assert not fitting
    assert len(sentences) == len(LAYOUTS)
    assert "llama_context_params.n_ctx is 0, expected 512" in sentences[0]
    assert "swarm/native/layouts.py" in sentences[0]
    assert StructLayouts
    assert Shifted


def test_a_type_of_another_size_and_an_operation_that_is_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> int:
        raise EngineUnavailable(f"the llama.cpp library has no operation {name}")

    monkeypatch.setattr(ggml, "op_code", gone)
    monkeypatch.setattr(ggml, "type_layout", lambda ggml_type: (1, 1))
    sentences = canary.survey_ggml()
    assert any("no operation MUL_MAT_ID" in sentence for sentence in sentences)
    assert any("type Q4_K has blocks of (1, 1) (values, bytes), gguf-py says (256, 144)" in s for s in sentences)


def test_nodes_of_another_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name_of = ggml.tensor_name
    monkeypatch.setattr(ggml, "tensor_name", lambda tensor: name_of(tensor).replace("ffn_moe_out", "ffn_experts"))
    assert [sentence.split(" in ")[0] for sentence in canary.survey_graph()] == ["no node ffn_moe_out-0"]


def test_a_folder_without_a_library_is_an_error_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineUnavailable, match="expected the folder xllamacpp or llama_cpp of a wheel"):
        canary.survey_folder(tmp_path)
    assert canary.main([str(tmp_path)]) == 1
    assert "1 things to look at" in capsys.readouterr().out
    assert canary.main([]) == 0
