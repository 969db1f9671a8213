"""Keeps a backbone's local experts the popular ones: chooses, fetches, loads, and looks again as popularity moves.

    popularity (the router's choices, kept over restarts) -> local_choice -> blocks: from the file, or fetched -> local_experts

Before anything is known, experts are taken evenly where that costs only a look into a file; from others nothing is fetched
before FIRST_TOKENS have been routed. The old set serves while the new one is fetched and loaded, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from swarm.backbone.local_experts import LocalExperts
from swarm.dispatch.local_choice import choose_local, is_change_worthwhile
from swarm.dispatch.popularity import Popularity
from swarm.errors import SwarmError, UserError
from swarm.ids import ExpertSet
from swarm.interruptible import Check, run_interruptibly
from swarm.latest_file import LatestFile, until_written
from swarm.memory import free_memory_bytes
from swarm.model.manifest import Manifest, verify_block
from swarm.model.source import BlockSource
from swarm.model.spec import ModelSpec

logger = logging.getLogger(__name__)

LOOK_S = 30.0  # between two looks at the popularity, and between two writes of it; guessed
FIRST_LOOK_S = 1.0  # while nothing was chosen by popularity yet
FIRST_TOKENS = 64  # a choice by fewer is noise; guessed: then 128 experts of which 8 are used have four pairs each
AUTO_SHARE = 0.5  # of the memory that is free once the engine has loaded; guessed, as a peer's `--experts auto`
SAVE_TIMEOUT_S = 3.0  # at the end, for the disk; guessed, as a peer's for its receipts
MAX_STATE_BYTES = 64 << 20  # of a kept popularity: 1,024 layers of 4,096 experts with 16 characters each

Fetch = Callable[[ExpertSet], Awaitable[None]]
"""Brings blocks into the source; raises SwarmError."""


@dataclass(frozen=True, slots=True)
class LocalBudget:
    """How much memory local experts may take; None: a half of what is free."""

    size_bytes: int | None = None

    def settle(self, spec: ModelSpec) -> int:
        """Return it in bytes, as of now.

        Raises:
            UserError: the system does not tell what is free, or not one expert fits.
        """
        budget = self.size_bytes
        if budget is None:
            free = free_memory_bytes()
            if free is None:
                raise UserError("cannot tell how much memory is free: give --local-experts SIZE, for example 2GB")
            budget = int(free * AUTO_SHARE)
        least = min(spec.block_size_bytes(layer) for layer in spec.moe_layers)
        if budget < least:
            raise UserError(
                f"--local-experts is too small: got {budget} bytes, expected at least {least} for one expert"
            )
        return budget


class LocalKeeper:
    """The one owner of a backbone's `LocalExperts`.

    Attributes:
        is_held: change nothing any more: for measurements.
        n_changes: how often the kept set has changed.
    """

    def __init__(
        self,
        local: LocalExperts,
        popularity: Popularity,
        manifest: Manifest,
        source: BlockSource,
        *,
        budget_bytes: int,
        state: Path,
        now: Callable[[], float],
        fetch: Fetch | None = None,
    ) -> None:
        """Prepare, and read the popularity that was kept.

        Args:
            source: of the blocks; each is checked against the manifest.
            state: folder in which the popularity is kept.
            now: the clock that `popularity` was made with.
            fetch: what to await before blocks are read; None: they are all there.
        """
        self._local = local
        self._popularity = popularity
        self._manifest = manifest
        self._source = source
        self._budget_bytes = budget_bytes
        self._file = LatestFile(state / f"popularity-{manifest.model_id}.json", on_failure=_tell_failure)
        self._now = now
        self._fetch = fetch
        self.is_held = False
        self.n_changes = 0
        self._is_chosen = False  # by popularity
        self._has_failed = False
        self._restore()

    async def run(self) -> None:
        """Look for ever. Whatever fails is tried again at the next look, and what is kept goes on serving."""
        while True:
            try:
                await self.look()
                self._has_failed = False
            except (SwarmError, OSError, MemoryError) as error:
                level = logging.DEBUG if self._has_failed else logging.WARNING
                logger.log(level, "cannot change the local experts: %s", error)
                self._has_failed = True
            await asyncio.sleep(LOOK_S if self._is_chosen or self._has_failed else FIRST_LOOK_S)
            if self._is_chosen:
                self.save()

    async def look(self) -> bool:
        """Choose anew, and load the better set if there is one; return whether anything changed.

        Raises:
            SwarmError: blocks cannot be had, or memory is short.
        """
        if self.is_held:
            return False
        self._popularity.fade(self._now())
        is_known = self._popularity.n_tokens >= FIRST_TOKENS
        if not is_known and (self._fetch is not None or self._local.experts.by_layer):
            return False
        # By what experts add to the output, not only by how often: more drafted tokens are accepted (docs/speculation.md).
        mass, layers, kept = self._popularity.mass, self._popularity.layers, self._local.experts
        spec = self._manifest.spec
        better = choose_local(
            mass if is_known else mass * 0.0,
            layers,
            [spec.block_size_bytes(layer) for layer in layers],
            self._budget_bytes,
            spec.n_expert_used,
            kept=kept,
        )
        is_first, self._is_chosen = is_known and not self._is_chosen, is_known
        if better == kept or not (is_first or not kept.by_layer or is_change_worthwhile(mass, layers, kept, better)):
            return False
        if self._fetch is not None:
            await self._fetch(better)

        def load(check: Check) -> None:
            self._local.change(better, self._read, check)

        await run_interruptibly(load)
        self.n_changes += 1
        logger.info(
            "%d experts of %d are computed here, %.0f MB", len(better), len(spec.all_experts), self._local.n_bytes / 1e6
        )
        return True

    def save(self) -> Future[None]:
        """Have the popularity kept for the next start; return what is done then. What cannot be written is only told."""
        return self._file.write(self._popularity.to_bytes())

    async def close(self) -> None:
        """Keep the popularity for the next start; return when it is written, or after SAVE_TIMEOUT_S."""
        await until_written(self.save(), SAVE_TIMEOUT_S)

    def _read(self, layer: int, expert: int) -> bytes:
        block = self._source.read_block(layer, expert)
        verify_block(self._manifest, layer, expert, block)
        return block

    def _restore(self) -> None:
        try:
            if self._file.path.stat().st_size > MAX_STATE_BYTES:
                return
            data = self._file.path.read_bytes()
        except OSError:
            return
        if not self._popularity.restore(data):
            logger.info("the kept popularity of experts is of no use: %s", self._file.path.name)


def _tell_failure(error: Exception) -> None:
    logger.info("cannot keep the popularity of experts: %s", error)
