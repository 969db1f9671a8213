"""What a client last heard from the registry, on disk: registry nodes to try, and records to go on with while none answers.

Only signed records are kept, so a changed file can withhold and not forge; and nobody counts before a handshake. A file that is
damaged or too large counts as none.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from swarm.errors import SwarmError
from swarm.files import write_atomically
from swarm.registry.records import SignedRecord

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 << 20  # guessed: 20,000 announcements
SAVE_S = 60.0  # between two writes; guessed: an outage finds it at most that old
_LISTS = ("members", "records")


class RegistryCache:
    """One file of signed records."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[list[SignedRecord], list[SignedRecord]]:
        """Return (registry nodes, records), not verified; nothing when there is no good file."""
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError("too large")
            found = json.loads(self._path.read_bytes())
            members, records = ([_unpack(text) for text in found[name]] for name in _LISTS)
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SwarmError) as error:
            logger.warning("cannot use %s, going on without: %s", self._path, error)
            return [], []
        return members, records

    def save(self, members: Iterable[SignedRecord], records: Iterable[SignedRecord]) -> None:
        """Write the file anew; a full disk is logged, no more."""
        content = dict(zip(_LISTS, (list(map(_pack, members)), list(map(_pack, records))), strict=True))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content).encode())
        except OSError as error:
            logger.warning("cannot write %s: %s", self._path, error.strerror)


def _pack(signed: SignedRecord) -> str:
    return base64.b64encode(signed.to_bytes()).decode()


def _unpack(text: str) -> SignedRecord:
    try:
        return SignedRecord.from_bytes(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(str(error)) from error
