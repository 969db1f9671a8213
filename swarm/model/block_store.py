"""A folder of blocks fetched from others, each checked against the manifest when it comes and when it is read.

`<cache>/blocks/<model id>/blk.N.E` holds the block of layer N, expert E. A block is whole or not there,
so a download that was cut goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from swarm.errors import ExpertUnavailable, IntegrityError, UserError
from swarm.files import write_atomically
from swarm.ids import ExpertSet
from swarm.model.manifest import Manifest, verify_block

TORN_S = 3600.0  # a block that is being written for so long never will be: its process was killed; guessed
NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})", re.ASCII)


class BlockStore:
    """The fetched blocks of one model; a `BlockSource`."""

    def __init__(self, cache_dir: Path, manifest: Manifest) -> None:
        """Open, or make, the model's folder below `cache_dir`; raises UserError where that fails."""
        self.manifest = manifest
        self.folder = cache_dir / "blocks" / str(manifest.model_id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.folder}: {error.strerror}") from error

    def _path(self, layer: int, expert: int) -> Path:
        return self.folder / f"blk.{layer}.{expert}"

    def has(self, layer: int, expert: int) -> bool:
        """Return whether the block is there, at its full length; its hash is checked when it is read."""
        try:
            size = self._path(layer, expert).stat().st_size
        except OSError:
            return False
        hashes = self.manifest.block_hashes.get(layer, ())
        return 0 <= expert < len(hashes) and size == self.manifest.spec.block_size_bytes(layer)

    @property
    def experts(self) -> ExpertSet:
        """Which blocks are there now; raises UserError where the folder cannot be read."""
        found: dict[int, set[int]] = {}
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise UserError(f"cannot read {self.folder}: {error.strerror}") from error
        for name in names:
            match = NAME.fullmatch(name)
            if match and self.has(int(match[1]), int(match[2])):
                found.setdefault(int(match[1]), set()).add(int(match[2]))
        return ExpertSet({layer: frozenset(experts) for layer, experts in found.items()})

    def add(self, layer: int, expert: int, block: bytes) -> None:
        """Keep a block.

        Raises:
            IntegrityError: it is not that expert's; nothing is written.
            UserError: the disk is full, or the folder cannot be written.
        """
        verify_block(self.manifest, layer, expert, block)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # `swarm cache prune` may have taken it
            write_atomically(self._path(layer, expert), block)
        except OSError as error:
            raise UserError(f"cannot keep blocks in {self.folder}: {error.strerror}") from error

    def remove(self, layer: int, expert: int) -> None:
        """Delete a block, if it is there. Raises UserError where that fails."""
        try:
            self._path(layer, expert).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot delete blocks in {self.folder}: {error.strerror}") from error

    def remove_torn(self, wall_s: float) -> None:
        """Delete what processes that were killed in the midst of writing have left; `wall_s`: now, seconds since 1970."""
        for path in self.folder.glob(".blk.*.part"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < wall_s - TORN_S:
                    path.unlink(missing_ok=True)

    def read_block(self, layer: int, expert: int) -> bytes:
        """Return one block's bytes, verified.

        Raises:
            ExpertUnavailable: the block is not there.
            IntegrityError: the file was damaged; it is deleted, so that it will be fetched again.
            UserError: the file cannot be read.
        """
        path = self._path(layer, expert)
        if not self.has(layer, expert):
            raise ExpertUnavailable(layer, (expert,), "not in the block store")
        try:
            block = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        try:
            verify_block(self.manifest, layer, expert, block)
        except IntegrityError:
            path.unlink(missing_ok=True)
            raise
        return block
