"""Files that are either whole or not there: a temporary name, fsync, rename. And the folders that swarm keeps."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from swarm.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed over `path`, else removed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # the rename itself lasts only once the folder is synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a crash leaves the old content or the new, never half."""
    with replacing(path, mode=mode) as temporary:
        temporary.write_bytes(data)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a small text file of ours, none if it is not there.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Folders:
    """Where this machine's swarm keeps things. `SWARM_HOME` puts all three below one folder."""

    config: Path
    state: Path
    cache: Path

    @classmethod
    def below(cls, root: Path) -> Folders:
        """Return the three below one folder."""
        return cls(root / "config", root / "state", root / "cache")

    @classmethod
    def from_environment(cls) -> Folders:
        """Return the folders for this user; they need not exist yet."""
        home = os.environ.get("SWARM_HOME")
        if home:
            return cls.below(Path(home).expanduser())
        dirs = platformdirs.PlatformDirs("swarm", appauthor=False)
        return cls(Path(dirs.user_config_dir), Path(dirs.user_state_dir), Path(dirs.user_cache_dir))
