"""A systemd user unit for `swarm join`: a peer that comes back by itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import UserError
from swarm.files import write_atomically

UNIT = """[Unit]
Description=Swarm peer: computes experts of a language model for others
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
WorkingDirectory={here}
{environment}Restart=on-failure
RestartSec=30
# 2 is a mistake in the options: trying again would not help.
RestartPreventExitStatus=2
# The first SIGTERM lets it finish what it has.
TimeoutStopSec=60
Nice=10
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={folders}
PrivateTmp=true

[Install]
WantedBy=default.target
"""
KEPT_VARIABLES = (
    "SWARM_REGISTRY",
    "SWARM_HOME",
    "SWARM_HOST",
    "SWARM_CONFIG",
    "SWARM_ENGINE",
    "SWARM_QUIC",
    "SWARM_READINESS",
    "HF_ENDPOINT",
)
NAME = "swarm-join.service"


def join_unit(arguments: Sequence[str], folders: Sequence[Path], *, common: Sequence[str] = ()) -> str:
    """Return the unit that runs `swarm join` with these arguments, in this Python and this folder.

    Args:
        folders: that the peer writes.
        common: options that stand before the command.
    """
    command = [sys.executable, "-m", "swarm", *common, "join", *arguments]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return UNIT.format(
        command=" ".join(_quoted(each.replace("$", "$$")) for each in command),  # there alone variables are expanded
        here=os.getcwd().replace("%", "%%"),  # paths among the arguments may be relative; no quotes are taken here
        environment="".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in kept.items()),
        folders=" ".join(_quoted(str(each.absolute())) for each in folders),
    )


def install_unit(unit: str, folders: Sequence[Path]) -> Path:
    """Write the unit where systemd looks for a user's; the caller says how to start it. Raises UserError.

    Args:
        folders: as `join_unit`'s; made now: systemd starts no service of which one is missing.
    """
    root = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    path = root / "systemd" / "user" / NAME
    try:
        for each in (path.parent, *folders):
            each.mkdir(parents=True, exist_ok=True)
        write_atomically(path, unit.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path


def _quoted(text: str) -> str:
    """Return a word as systemd reads it: its own `%` doubled, and quotes where there is need."""
    text = text.replace("%", "%%")
    return text if shlex.quote(text) == text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
