"""Gives a model away: its manifest, and its experts' blocks one at a time, to whoever asks.

What goes wrong here is told to strangers in fixed words: errors of files name paths of this machine.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.errors import ExpertUnavailable, Refused, RemoteProtocolError, SwarmError
from swarm.model.manifest import Manifest
from swarm.model.source import BlockSource
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

SERVES: tuple[type[m.Request], ...] = (m.GetManifest, m.GetBlock)
MAX_READS = 4  # blocks in memory at a time; the others wait, bounded by the endpoint's own limit on requests


class ModelShare:
    """Answers GET_MANIFEST and GET_BLOCK."""

    def __init__(self, manifest: Manifest, source: BlockSource | None) -> None:
        """`source` None: the manifest alone is on offer."""
        self._manifest = manifest
        self._manifest_bytes = manifest.to_bytes()
        self._source = source
        self._reads = asyncio.Semaphore(MAX_READS)
        self._has_failed = False

    @property
    def n_manifest_bytes(self) -> int:
        """What the manifest takes on the wire."""
        return len(self._manifest_bytes)

    async def answer(self, request: m.Request) -> m.Response:
        """Return the answer.

        Raises:
            LookupError: another model, or a block that is not here.
            Refused: a block that cannot be read.
        """
        if not isinstance(request, m.GetManifest | m.GetBlock):
            raise RemoteProtocolError(f"not for a model's share: got {type(request).__name__}")
        if request.model_id != self._manifest.model_id:
            raise LookupError(f"this node offers model {self._manifest.model_id.short}")
        if isinstance(request, m.GetManifest):
            return m.ManifestBytes(data=self._manifest_bytes)
        if self._source is None:
            raise LookupError("this node offers no blocks")
        async with self._reads:
            try:
                data = await asyncio.to_thread(self._source.read_block, request.layer, request.expert)
            except ExpertUnavailable:
                raise LookupError(f"this node does not have layer {request.layer}, expert {request.expert}") from None
            except (SwarmError, OSError) as error:
                level = logging.DEBUG if self._has_failed else logging.WARNING  # once: askers come again and again
                logger.log(level, "cannot read layer %d, expert %d: %s", request.layer, request.expert, error)
                self._has_failed = True
                raise Refused(
                    f"this node cannot read layer {request.layer}, expert {request.expert} at the moment"
                ) from None
        return m.BlockBytes(data=data)
