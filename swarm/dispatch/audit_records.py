"""The file in which a backbone keeps how peers stand after its audits, over a restart."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from swarm.dispatch.audit_standing import Standing
from swarm.errors import UserError
from swarm.files import write_atomically

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 4 << 20  # one takes up to 700 bytes


def load_standing(path: Path | None, now: float) -> Standing:
    """Return what was kept; nothing, with a warning, where it is damaged. `now`: seconds since 1970."""
    if path is None:
        return Standing()
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise ValueError(f"too large: expected at most {MAX_RECORD_BYTES} bytes")
        return Standing.from_json(json.loads(path.read_bytes()), now)
    except FileNotFoundError:
        return Standing()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as error:
        logger.warning("the records of audits %s cannot be used: %s; who was caught before is forgotten", path, error)
        return Standing()


def save_standing(path: Path, plain: dict[str, Any]) -> None:
    """Write `Standing.to_json`, atomically; where that fails, warn and go on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plain, allow_nan=False).encode(), mode=0o600)
    except OSError as error:
        logger.warning("cannot keep the records of audits in %s: %s", path, error.strerror)
