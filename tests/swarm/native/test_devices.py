"""Devices are listed by ggml's registry and chosen by name; what there is not is said with what there is."""

from __future__ import annotations

import pytest

from swarm.errors import UserError
from swarm.native.devices import Device, choose_device, devices

MANY = tuple(
    Device(name=name, backend=backend, description=f"{backend} thing", kind=kind, handle=number)
    for number, (name, backend, kind) in enumerate(
        [("CUDA0", "CUDA", "gpu"), ("CUDA1", "CUDA", "gpu"), ("Vulkan0", "Vulkan", "igpu"), ("CPU", "CPU", "cpu")], 1
    )
)


def test_the_cpu_is_always_there() -> None:
    found = devices()
    assert [device.kind for device in found].count("cpu") == 1
    assert all(device.handle and device.name and device.backend for device in found)
    assert choose_device("cpu").is_cpu


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("auto", "CUDA0"), ("cuda", "CUDA0"), ("CUDA1", "CUDA1"), ("vulkan", "Vulkan0"), ("cpu", "CPU"), ("CPU", "CPU")],
)
def test_a_device_is_chosen_by_its_own_name_or_its_backends(wanted: str, name: str) -> None:
    assert choose_device(wanted, MANY).name == name


def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto", MANY[3:]).is_cpu


def test_a_device_that_there_is_not_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"no device metal: .* offers CPU \(CPU thing\); docs/engine\.md"):
        choose_device("metal", MANY[3:])
    with pytest.raises(UserError, match="offers none"):
        choose_device("auto", ())
