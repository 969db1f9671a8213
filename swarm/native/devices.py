"""Which devices the loaded llama.cpp library can compute on, by ggml's own registry, and the choice of one by name."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from swarm.errors import UserError
from swarm.native.library import load_library

AUTO, CPU = "auto", "cpu"
KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accelerator"}  # enum ggml_backend_dev_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: ggml's, such as `CUDA0`.
        backend: the kind of library behind it: `CPU`, `CUDA`, `Metal`, `Vulkan`.
        kind: `cpu`, `gpu`, `igpu` (shares the system's memory) or `accelerator`.
        handle: its ggml_backend_dev_t.
    """

    name: str
    backend: str
    description: str
    kind: str
    handle: int

    @property
    def is_cpu(self) -> bool:
        """Whether it is the processor itself."""
        return self.kind == "cpu"


def devices() -> tuple[Device, ...]:
    """Return all devices, in ggml's order."""
    find, p, text = load_library().function, ctypes.c_void_p, ctypes.c_char_p
    find("llama_backend_init", None)()
    count = find("ggml_backend_dev_count", ctypes.c_size_t)
    get = find("ggml_backend_dev_get", p, ctypes.c_size_t)
    name_of, description_of = find("ggml_backend_dev_name", text, p), find("ggml_backend_dev_description", text, p)
    kind_of = find("ggml_backend_dev_type", ctypes.c_int, p)
    registry_of, registry_name = find("ggml_backend_dev_backend_reg", p, p), find("ggml_backend_reg_name", text, p)
    return tuple(
        Device(
            name=name_of(handle).decode("utf-8", "replace"),
            backend=registry_name(registry_of(handle)).decode("utf-8", "replace"),
            description=description_of(handle).decode("utf-8", "replace"),
            kind=KINDS.get(kind_of(handle), "other"),
            handle=handle,
        )
        for handle in map(get, range(count()))
    )


def choose_device(wanted: str, available: tuple[Device, ...] | None = None) -> Device:
    """Return the device that `--device` names: auto, cpu, a backend such as cuda, or a device's own name such as CUDA1.

    `auto` takes the first GPU, or the CPU where there is none.

    Raises:
        UserError: there is no such device; the message lists what there is.
    """
    available = devices() if available is None else available
    name = wanted.lower()
    gpus = [device for device in available if device.kind in ("gpu", "igpu")]
    cpus = [device for device in available if device.is_cpu]
    if name == AUTO:
        found = [*gpus, *cpus]
    elif name == CPU:
        found = cpus
    else:
        found = [device for device in available if device.name.lower() == name]
        found += [device for device in available if device.backend.lower() == name]
    if found:
        return found[0]
    offered = ", ".join(f"{device.name} ({device.description})" for device in available) or "none"
    raise UserError(
        f"no device {wanted}: this llama.cpp library offers {offered}; docs/engine.md says how to build it for others"
    )
