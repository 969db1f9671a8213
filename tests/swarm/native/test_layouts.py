"""The struct layouts, and that a library which does not fit them is refused by the field that differs."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping

import pytest

from swarm.errors import EngineUnavailable
from swarm.native import layouts, library
from swarm.native.layouts import LAYOUTS, StructLayouts, verify_layouts


def test_sizes_are_those_of_the_64_bit_headers() -> None:
    for table in LAYOUTS.values():
        assert ctypes.sizeof(table.context_params) == 160
        assert ctypes.sizeof(table.model_params) == 80
        assert ctypes.sizeof(table.sampler_chain_params) == 1
        assert ctypes.sizeof(table.batch) == 56
        assert ctypes.sizeof(table.tensor) == 336
        assert ctypes.sizeof(table.init_params) == 24


def test_the_two_versions_differ_where_the_headers_do() -> None:
    new = LAYOUTS["xllamacpp", "2026.10.11549"].context_params
    old = LAYOUTS["llama-cpp-python", "0.3.36"].context_params
    places = {
        name: (getattr(new, name).offset, getattr(old, name).offset)
        for name in ("abort_callback_data", "ctx_other", "embeddings", "kv_unified", "samplers", "n_samplers")
    }
    assert places == {
        "abort_callback_data": (120, 120),
        "ctx_other": (128, 152),
        "embeddings": (136, 128),
        "kv_unified": (141, 133),
        "samplers": (144, 136),
        "n_samplers": (152, 144),
    }


def test_every_field_that_is_checked_exists_in_every_version() -> None:
    for table in LAYOUTS.values():
        for defaults, struct in (
            (layouts.CONTEXT_DEFAULTS, table.context_params),
            (layouts.MODEL_DEFAULTS, table.model_params),
        ):
            assert set(defaults) <= {field[0] for field in struct._fields_}


def test_the_loaded_library_fits_its_layouts() -> None:
    loaded = library.load_library()
    verify_layouts(loaded.layouts, loaded.function, "it")


def _refusal(table: StructLayouts) -> str:
    with pytest.raises(EngineUnavailable) as caught:
        verify_layouts(table, library.load_library().function, "label 1.0")
    assert "label 1.0" in str(caught.value)
    return str(caught.value)


def test_the_other_versions_context_layout_is_refused() -> None:
    loaded = library.load_library()
    other = next(table for (name, _), table in LAYOUTS.items() if name != loaded.name)
    message = _refusal(dataclasses.replace(loaded.layouts, context_params=other.context_params))
    assert "llama_context_params." in message


def test_a_shifted_model_layout_is_refused() -> None:
    class Shifted(ctypes.Structure):
        _fields_ = [("extra", ctypes.c_int64), *layouts.LlamaModelParams._fields_]

    table = dataclasses.replace(library.load_library().layouts, model_params=Shifted)
    assert "llama_model_params." in _refusal(table)


def test_a_longer_tensor_is_refused() -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*layouts.GgmlTensor._fields_, ("more", ctypes.c_int64)]

    message = _refusal(dataclasses.replace(library.load_library().layouts, tensor=Longer))
    assert "sizeof ggml_tensor is 336, expected 344" in message


def test_a_tensor_with_swapped_fields_is_refused() -> None:
    fields = list(layouts.GgmlTensor._fields_)
    fields[2], fields[3] = fields[3], fields[2]

    class Swapped(ctypes.Structure):
        _fields_ = fields

    assert "ggml_tensor.ne" in _refusal(dataclasses.replace(library.load_library().layouts, tensor=Swapped))


@pytest.mark.parametrize(
    ("table", "field"),
    [("MODEL_DEFAULTS", "n_gpu_layers"), ("MODEL_DEFAULTS", "use_extra_bufts"), ("CONTEXT_DEFAULTS", "op_offload")],
)
def test_another_default_value_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, table: str, field: str) -> None:
    defaults: Mapping[str, object] = getattr(layouts, table)
    monkeypatch.setattr(layouts, table, {**defaults, field: 77})
    assert f".{field} is " in _refusal(library.load_library().layouts)


def test_a_process_with_a_wrong_table_does_not_get_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load_library()
    key = (loaded.name, loaded.version)
    wrong = next(table for (name, _), table in LAYOUTS.items() if name != loaded.name)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setitem(LAYOUTS, key, wrong)
    with pytest.raises(EngineUnavailable):
        library.load_library()
    assert library._loaded is None
