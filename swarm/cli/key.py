"""`swarm key`: the keys that are this machine's names in the swarm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from swarm.cli.options import JsonOption
from swarm.cli.runtime import out, print_json
from swarm.errors import UserError
from swarm.files import Folders, write_atomically
from swarm.identity import Identity, is_claimed

app = typer.Typer(
    name="key", no_args_is_help=True, add_completion=False, help="The keys that are this machine's names in the swarm."
)

ROLES = ("join", "serve", "relay")
KEY_BYTES = 32  # an ed25519 seed

RoleArgument = Annotated[str, typer.Argument(help=f"Whose key: {', '.join(ROLES)}, or the second of a role: join-2.")]


@app.callback()
def key() -> None:
    """Set nothing up: it makes the commands subcommands."""


@app.command("ls")
def list_keys(as_json: JsonOption = False) -> None:
    """List the keys and the node ids that they stand for."""
    folder = Folders.from_environment().config
    found = [
        {
            "role": path.stem,
            "node": str(Identity.from_seed(_read(path)).node_id),
            "in_use": is_claimed(folder, path.stem),
        }
        for path in sorted(folder.glob("*.key"))
    ]
    if as_json:
        print_json({"keys": found})
        return
    table = Table(box=None)
    for heading in ("role", "node", "in use"):
        table.add_column(heading)
    for each in found:
        table.add_row(str(each["role"]), str(each["node"]), "yes" if each["in_use"] else "")
    out.print(table)


@app.command()
def backup(
    role: RoleArgument,
    file: Annotated[Path, typer.Argument(help="Where to; it must not exist yet.")],
) -> None:
    """Copy a key. Who has the copy can be this node: keep it where nobody reads it."""
    seed = _read(_path(role))
    if file.exists():
        raise UserError(f"{file} exists already")
    try:
        write_atomically(file, seed, mode=0o600)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    out.print(f"wrote the key of {Identity.from_seed(seed).node_id.short} to {file}", highlight=False, markup=False)


@app.command()
def restore(
    role: RoleArgument,
    file: Annotated[Path, typer.Argument(help="What `swarm key backup` wrote.")],
) -> None:
    """Take a copied key into use. The key that was here before is kept beside it."""
    seed = _read(file)
    path = _path(role)
    _require_free(role)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _set_aside(path)
    write_atomically(path, seed, mode=0o600)
    _tell(role, seed, kept)


@app.command()
def rotate(role: RoleArgument) -> None:
    """Make a new key: a new node, that nobody knows yet and that has contributed nothing. The old key is kept beside it."""
    path = _path(role)
    _read(path)
    _require_free(role)
    kept = _set_aside(path)
    seed = Identity.generate().private_key.private_bytes_raw()
    write_atomically(path, seed, mode=0o600)
    _tell(role, seed, kept)


def _tell(role: str, seed: bytes, kept: Path | None) -> None:
    words = f"{role} is {Identity.from_seed(seed).node_id} now"
    out.print(words + (f"; the former key is {kept.name}" if kept is not None else ""), highlight=False, markup=False)


def _path(role: str) -> Path:
    name, dash, number = role.partition("-")
    if name not in ROLES or (dash and not number.isdigit()):
        raise UserError(f"no such role: got {role!r}, expected {', '.join(ROLES)}, or join-2 and so on")
    return Folders.from_environment().config / f"{role}.key"


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            seed = file.read(KEY_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"there is no key {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(seed) != KEY_BYTES:
        raise UserError(f"{path} is no key: got {len(seed)} bytes or more, expected {KEY_BYTES}")
    return seed


def _require_free(role: str) -> None:
    if is_claimed(Folders.from_environment().config, role):
        raise UserError(f"a process uses the key of {role} now: end it first")


def _set_aside(path: Path) -> Path | None:
    if not path.exists():
        return None
    now = time.strftime("%Y%m%d-%H%M%S")
    kept = path.with_suffix(f".old-{now}")
    number = 1
    while kept.exists():  # one was set aside in this second already, and must not be lost
        number += 1
        kept = path.with_suffix(f".old-{now}-{number}")
    path.rename(kept)
    return kept
