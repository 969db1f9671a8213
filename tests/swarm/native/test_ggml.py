"""Tensors to numpy and back by strides, and graphs on the CPU backend, judged by numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from swarm.errors import EngineError, EngineUnavailable
from swarm.native import ggml
from swarm.native.layouts import GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_I32

GGML_TYPE_Q8_0 = 8


@pytest.fixture
def backend() -> Iterator[ggml.CpuBackend]:
    with ggml.CpuBackend() as backend:
        yield backend


@pytest.fixture
def buffer(backend: ggml.CpuBackend) -> Iterator[ggml.HostBuffer]:
    buffer = backend.allocate(1 << 16)
    yield buffer
    buffer.close()


@pytest.fixture
def context() -> Iterator[ggml.TensorContext]:
    context = ggml.TensorContext(8, with_graph=True)
    yield context
    context.close()


@pytest.mark.parametrize(
    ("ggml_type", "dtype"), [(GGML_TYPE_F32, np.float32), (GGML_TYPE_F16, np.float16), (GGML_TYPE_I32, np.int32)]
)
def test_a_tensor_comes_back_with_its_axes_reversed(
    buffer: ggml.HostBuffer, context: ggml.TensorContext, ggml_type: int, dtype: type[np.generic]
) -> None:
    tensor = context.new_tensor(ggml_type, 5, 3, 2)
    buffer.place(tensor, 0)
    values = np.arange(30).astype(dtype).reshape(1, 2, 3, 5)
    ggml.write_tensor(tensor, values)
    back = ggml.read_tensor(tensor)
    assert back.dtype == dtype
    assert back.flags.c_contiguous
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(buffer.data[: values.nbytes].view(dtype), values.ravel())


def test_a_read_is_a_copy(buffer: ggml.HostBuffer, context: ggml.TensorContext) -> None:
    tensor = context.new_tensor(GGML_TYPE_I32, 4)
    buffer.place(tensor, 64)
    ggml.write_tensor(tensor, [1, 2, 3, 4])
    back = ggml.read_tensor(tensor)
    ggml.write_tensor(tensor, [9, 9, 9, 9])
    assert back.ravel().tolist() == [1, 2, 3, 4]


def test_a_strided_view_is_read_and_written_by_its_strides(
    buffer: ggml.HostBuffer, context: ggml.TensorContext
) -> None:
    whole = context.new_tensor(GGML_TYPE_F32, 6, 2, 3)
    buffer.place(whole, 0)
    values = np.arange(36, dtype=np.float32).reshape(1, 3, 2, 6)
    ggml.write_tensor(whole, values)
    first, second = context.halves(whole)
    for view in (first, second):
        context.bind_view(view)
    np.testing.assert_array_equal(ggml.read_tensor(first), values[..., :3])
    np.testing.assert_array_equal(ggml.read_tensor(second), values[..., 3:])
    assert ggml.read_tensor(second).flags.c_contiguous

    ggml.write_tensor(second, -np.ones((1, 3, 2, 3)))
    values[..., 3:] = -1
    np.testing.assert_array_equal(ggml.read_tensor(whole), values)


def test_an_empty_tensor_reads_as_empty(buffer: ggml.HostBuffer, context: ggml.TensorContext) -> None:
    tensor = context.new_tensor(GGML_TYPE_F32, 4, 0)
    buffer.place(tensor, 0)
    assert ggml.read_tensor(tensor).shape == (1, 1, 0, 4)
    ggml.write_tensor(tensor, np.empty(0))


def test_a_wrong_count_a_quantised_type_and_missing_memory_are_errors(
    buffer: ggml.HostBuffer, context: ggml.TensorContext
) -> None:
    tensor = context.new_tensor(GGML_TYPE_F32, 4)
    with pytest.raises(EngineError, match="has no memory"):
        ggml.read_tensor(tensor)
    buffer.place(tensor, 0)
    with pytest.raises(EngineError, match="does not fit"):
        ggml.write_tensor(tensor, [1, 2, 3])
    quantised = context.new_tensor(GGML_TYPE_Q8_0, 32)
    buffer.place(quantised, 64)
    with pytest.raises(EngineError, match="got ggml type 8"):
        ggml.read_tensor(quantised)


def test_a_tensor_outside_its_buffer_is_refused(buffer: ggml.HostBuffer, context: ggml.TensorContext) -> None:
    tensor = context.new_tensor(GGML_TYPE_F32, 1024)
    for offset in (buffer.data.size - 4092, 1):
        with pytest.raises(EngineError, match="does not fit its buffer"):
            buffer.place(tensor, offset)


def test_operations_are_found_by_name(context: ggml.TensorContext) -> None:
    whole = context.new_tensor(GGML_TYPE_F32, 6, 2, 3)
    view, _ = context.halves(whole)
    assert ggml.tensor_op(whole) == ggml.op_code("NONE")
    assert ggml.tensor_op(view) == ggml.op_code("VIEW") != ggml.op_code("MUL_MAT_ID")
    assert ggml.tensor_source(view, 0) == whole
    assert ggml.tensor_source(view, 1) is None
    assert "view" in ggml.tensor_name(view)
    assert list(ggml.tensor_at(view).ne) == [3, 2, 3, 1]
    with pytest.raises(EngineUnavailable, match="NO_SUCH_OP"):
        ggml.op_code("NO_SUCH_OP")


def test_a_full_context_raises_instead_of_aborting() -> None:
    context = ggml.TensorContext(1)
    context.new_tensor(GGML_TYPE_F32, 4)
    with pytest.raises(EngineError, match="no room"):
        context.new_tensor(GGML_TYPE_F32, 4)
    context.close()
    context.close()


def test_grouped_products_and_swiglu_are_numpys(
    backend: ggml.CpuBackend, buffer: ggml.HostBuffer, context: ggml.TensorContext
) -> None:
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((3, 8, 16)).astype(np.float32)  # [E, F, D]
    x = rng.standard_normal((5, 16)).astype(np.float32)
    experts = np.array([2, 0, 2, 1, 0], np.int32)
    w = context.new_tensor(GGML_TYPE_F32, 16, 8, 3)
    rows = context.new_tensor(GGML_TYPE_F32, 16, 1, 5)
    ids = context.new_tensor(GGML_TYPE_I32, 1, 5)
    product = context.mul_mat_id(w, rows, ids)
    output = context.glu("swiglu", product, product)
    for index, tensor in enumerate((w, rows, ids, product, output)):
        buffer.place(tensor, index * 4096)
    ggml.write_tensor(w, weights)
    ggml.write_tensor(rows, x)
    ggml.write_tensor(ids, experts)
    assert backend.supports(product)
    backend.compute(context.graph(output))
    h = np.einsum("pfd,pd->pf", weights[experts], x)
    np.testing.assert_allclose(ggml.read_tensor(output).reshape(5, 8), h / (1 + np.exp(-h)) * h, rtol=1e-4, atol=1e-5)


def test_weighted_sums_over_slots_are_numpys_also_in_place(
    backend: ggml.CpuBackend, buffer: ggml.HostBuffer, context: ggml.TensorContext
) -> None:
    rng = np.random.default_rng(8)
    values = rng.standard_normal((4, 2, 6)).astype(np.float32)  # [T, K, D]
    factors = rng.random((4, 2, 1)).astype(np.float32)
    y = context.new_tensor(GGML_TYPE_F32, 6, 2, 4)
    weights = context.new_tensor(GGML_TYPE_F32, 1, 2, 4)
    product = context.mul(y, weights, in_place=True)
    slots = [context.slot(product, index) for index in range(2)]
    output = context.add(slots[0], slots[1])
    for index, tensor in enumerate((y, weights)):
        buffer.place(tensor, index * 4096)
    for view in (product, *slots):
        context.bind_view(view)
    ggml.write_tensor(y, values)
    ggml.write_tensor(weights, factors)
    out = np.full((4, 6), np.nan, np.float32)
    ggml.point_at(output, out)  # memory of ours, not a buffer's
    backend.compute(context.graph(output))
    weighted = values * factors
    np.testing.assert_array_equal(out, weighted[:, 0] + weighted[:, 1])
    np.testing.assert_array_equal(ggml.read_tensor(y).reshape(values.shape), weighted)


def test_a_view_is_the_tensor_itself(buffer: ggml.HostBuffer, context: ggml.TensorContext) -> None:
    tensor = context.new_tensor(GGML_TYPE_F32, 6, 2)
    with pytest.raises(EngineError, match="has no memory"):
        ggml.view_tensor(tensor)
    buffer.place(tensor, 0)
    ggml.write_tensor(tensor, np.arange(12))
    view = ggml.view_tensor(tensor)
    np.testing.assert_array_equal(view.ravel(), np.arange(12))
    view[0, 0, 1, 2] = -1
    assert ggml.read_tensor(tensor)[0, 0, 1, 2] == -1
    half = context.halves(tensor)[1]
    context.bind_view(half)
    np.testing.assert_array_equal(ggml.view_tensor(half), ggml.read_tensor(half))
    elsewhere = context.new_tensor(GGML_TYPE_F32, 3)
    ggml.point_at(elsewhere, np.zeros(3, np.float32))
    with pytest.raises(EngineError, match="not in this process's memory"):
        ggml.view_tensor(elsewhere)


def test_bytes_fill_a_whole_tensor_of_any_type_or_nothing(buffer: ggml.HostBuffer, context: ggml.TensorContext) -> None:
    tensor = context.new_tensor(GGML_TYPE_Q8_0, 32, 2)
    data = np.arange(68, dtype=np.uint8)
    with pytest.raises(EngineError, match="got 68, expected 68"):
        ggml.write_bytes(tensor, data)  # no memory yet
    memory = buffer.place(tensor, 0)
    ggml.write_bytes(tensor, data)
    np.testing.assert_array_equal(memory, data)
    assert not ggml.is_repacked(tensor)
    for wrong in (data[:-1], np.arange(136, dtype=np.uint8)[::2]):
        with pytest.raises(EngineError, match="do not fit"):
            ggml.write_bytes(tensor, wrong)


def test_an_operation_can_be_turned_off(
    backend: ggml.CpuBackend, buffer: ggml.HostBuffer, context: ggml.TensorContext
) -> None:
    tensor = context.new_tensor(GGML_TYPE_F32, 4)
    total = context.add(tensor, tensor)
    buffer.place(tensor, 0)
    buffer.place(total, 64)
    ggml.write_tensor(tensor, np.ones(4))
    ggml.write_tensor(total, np.full(4, 7))
    graph = context.graph(total)
    ggml.set_tensor_op(total, ggml.op_code("NONE"))
    backend.compute(graph)
    assert ggml.read_tensor(total).ravel().tolist() == [7, 7, 7, 7]


def test_a_closed_backend_raises() -> None:
    backend = ggml.CpuBackend()
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        backend.allocate(64)
