"""A slice in memory: every block checked against the manifest, with what computes it and the line before that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from peer.compute import Compute
from peer.disk_bound import DiskBoundExecutor
from peer.model_file import OpenModel
from swarm.errors import UserError
from swarm.experts.device_ffn import DeviceFfn, reserve_slice
from swarm.experts.executor import ExpertExecutor
from swarm.experts.expert_ffn import ExpertFfn
from swarm.ids import ExpertSet
from swarm.interruptible import Check, run_interruptibly
from swarm.model.manifest import verify_block

logger = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks whether a line is empty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """Experts that are loaded."""

    experts: ExpertSet
    ffn: ExpertFfn | DeviceFfn
    executor: ExpertExecutor
    compute: Compute

    def close(self) -> None:
        self.compute.close()
        self.ffn.close()

    async def wait_closed(self) -> None:
        """Close, and leave the loop free meanwhile; what waits in line is cancelled."""
        await self.compute.wait_closed()
        self.ffn.close()

    async def answered(self, timeout_s: float) -> None:
        """Return once nothing is in line, or after `timeout_s`: what is left then is given up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.compute.n_in_line:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)


async def load_slice(
    model: OpenModel,
    experts: ExpertSet,
    *,
    n_threads: int,
    device: str,
    fault: tuple[int, int] | None,
    disk_bytes_per_s: float | None,
    on_loaded: Callable[[int, int], None],
) -> Slice:
    """Return a slice whose every block was checked against the manifest; the arguments are `PeerConfig`'s.

    Raises:
        IntegrityError: a block is not what the manifest says.
        UserError: the fault to plant is not in this slice, or the device cannot be used.
    """

    def load(check: Check) -> ExpertFfn | DeviceFfn:
        ffn = reserve_slice(model.manifest.spec, experts, device=device, n_threads=n_threads)
        try:
            for n_done, (layer, expert) in enumerate(experts, 1):
                check()
                block = model.source.read_block(layer, expert)
                verify_block(model.manifest, layer, expert, block)
                ffn.load(layer, expert, block)
                on_loaded(n_done, len(experts))
            if fault is not None:
                _plant(fault, ffn, model, experts)
        except BaseException:
            ffn.close()
            raise
        return ffn

    ffn = await run_interruptibly(load)
    spec = model.manifest.spec
    if disk_bytes_per_s is None:
        executor = ExpertExecutor(ffn, spec)
    else:
        executor = DiskBoundExecutor(ffn, spec, bytes_per_s=disk_bytes_per_s)
    return Slice(experts=experts, ffn=ffn, executor=executor, compute=Compute(executor))


def _plant(fault: tuple[int, int], ffn: ExpertFfn | DeviceFfn, model: OpenModel, experts: ExpertSet) -> None:
    layer, expert = fault
    if fault not in experts:
        raise UserError(f"cannot plant a fault: layer {layer}, expert {expert} is not in this slice")
    # In the middle of the first plane, which is the down projection's: no requantisation comes after it that could hide
    # the change.
    ffn.flip_byte(layer, expert, model.manifest.spec.expert_tensors(layer)[0].expert_size_bytes // 2)
    logger.warning("one byte of layer %d, expert %d was changed on purpose", layer, expert)
