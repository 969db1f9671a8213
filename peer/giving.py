"""A peer gives its blocks to those who join: while it has nothing to compute, and within its cap on traffic.

Who asks is told to come again as soon as somebody wants something computed: a block takes the line for seconds, and a token
does not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from peer.traffic import Traffic
from swarm.backbone.share import ModelShare
from swarm.errors import Overloaded
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, verify_block
from swarm.model.source import GgufSource
from swarm.wire import messages as m

GIVES: tuple[type[m.Request], ...] = (m.GetManifest, m.GetBlock)
IDLE_S = 2.0  # since the last dispatch; guessed: longer than a slow token's layer takes to come round again
MAX_GIVEN = 2  # at a time; guessed: one is read from the disk while another is sent
BLOCK_OVERHEAD = 1.05  # what headers and acknowledgements add to a block's bytes


class FileOnDemand:
    """A model file that is opened when a block of it is first asked for; a `BlockSource`. Close it."""

    def __init__(self, path: Path, manifest: Manifest, experts: ExpertSet) -> None:
        """`experts`: what the file holds."""
        self.experts = experts
        self._path = path
        self._manifest = manifest
        self._lock = threading.Lock()
        self._file: GgufFile | None = None
        self._source: GgufSource | None = None

    def read_block(self, layer: int, expert: int) -> bytes:
        """Return one block, checked: the file may be another one by now.

        Raises:
            ExpertUnavailable, UserError, IntegrityError: it is not there, or not any more.
        """
        with self._lock:
            if self._source is None:
                self._file = GgufFile(self._path)
                self._source = GgufSource(self._file)
                self._file.forget_metadata()
        block = self._source.read_block(layer, expert)
        verify_block(self._manifest, layer, expert, block)
        return block

    def close(self) -> None:
        """Close the file, if it is open."""
        with self._lock:
            if self._file is not None:
                self._file.close()


class Giving:
    """Answers GET_MANIFEST and GET_BLOCK beside a peer's own work."""

    def __init__(
        self,
        share: ModelShare,
        traffic: Traffic,
        block_bytes: Callable[[int], int],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_bytes`: the size of a layer's block."""
        self._share = share
        self._traffic = traffic
        self._block_bytes = block_bytes
        self._now = now
        self._n_given = 0
        self.n_blocks = 0
        """That were given since the start."""

    async def answer(self, request: m.Request, *, last_asked: float, is_computing: bool) -> m.Response:
        """Return a block, or the manifest.

        Args:
            last_asked: when a dispatch came last; is_computing: one is in line now.

        Raises:
            Overloaded: not now.
            LookupError, Refused: as `ModelShare.answer`.
        """
        if not isinstance(request, m.GetBlock):
            self._traffic.admit_bytes(self._share.n_manifest_bytes)  # a megabyte, of a large model
            return await self._share.answer(request)
        wait_s = IDLE_S if is_computing else last_asked + IDLE_S - self._now()
        if wait_s > 0:
            raise Overloaded("this peer computes, and gives blocks when it does not", retry_after_s=wait_s)
        if self._n_given >= MAX_GIVEN:
            raise Overloaded("this peer gives blocks to others", retry_after_s=IDLE_S)
        n_bytes = round(BLOCK_OVERHEAD * self._block_bytes(request.layer))
        self._traffic.admit_bytes(n_bytes)
        self._n_given += 1
        self._traffic.promise(n_bytes)
        try:
            answer = await self._share.answer(request)
        except BaseException:
            self._traffic.settle(n_bytes)  # nothing goes: who asks for what is not here must not use up the line
            raise
        finally:
            self._n_given -= 1
        self._traffic.settle_late(n_bytes)
        self.n_blocks += 1
        return answer
