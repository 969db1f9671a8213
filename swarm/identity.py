"""A node is its ed25519 key. Makes, keeps and uses that key; knows nothing of certificates or the wire.

One key belongs to one process at a time: two with the same key would replace each other's announcements for ever. So a
process claims its key file with a lock, and the next process of that role on this machine takes the next key.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.ids import NodeId

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MAX_CLAIMS = 64  # processes of one role on one machine; guessed


class Identity:
    """One node's private key and the node id that follows from it."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.node_id = node_id_of(private_key.public_key())

    @classmethod
    def generate(cls) -> Identity:
        """Return a fresh identity that is kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Return the identity of a 32-byte private seed."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity kept in `path` (32 raw bytes, mode 0600), made at the first call.

        Raises:
            UserError: the file is not a key, others can read it, or it cannot be read or written.
        """
        try:
            if path.exists():
                if os.name == "posix" and path.stat().st_mode & 0o077:
                    raise UserError(f"key file is readable by others: {path}; run chmod 600 on it, or delete it")
                seed = path.read_bytes()
                if len(seed) != 32:
                    raise UserError(
                        f"key file is damaged: {path} has {len(seed)} bytes, expected 32; delete it to start anew"
                    )
                return cls.from_seed(seed)
            identity = cls.generate()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, identity.private_key.private_bytes_raw(), mode=0o600)
            return identity
        except OSError as error:
            raise UserError(
                f"cannot keep a key in {path}: {error.strerror}; set SWARM_HOME to another folder"
            ) from error

    @classmethod
    def claim(cls, folder: Path, role: str) -> Identity:
        """Return this process's own identity for `role`: of `role.key`, or of `role-2.key` if that is in use, and so on.

        The claim lasts as long as the process.

        Raises:
            UserError: as `load_or_create`; or all MAX_CLAIMS keys are in use.
        """
        for number in range(1, MAX_CLAIMS + 1):
            name = role if number == 1 else f"{role}-{number}"
            if _lock(folder / f"{name}.lock"):
                return cls.load_or_create(folder / f"{name}.key")
        raise UserError(f"all {MAX_CLAIMS} keys of {role} in {folder} are in use; set SWARM_HOME to another folder")

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return self.private_key.sign(message)


def is_claimed(folder: Path, name: str) -> bool:
    """Return whether a process holds the key `name` in this folder now."""
    path = folder / f"{name}.lock"
    if not path.exists():
        return False
    if not _lock(path):
        return True
    _locks.pop().close()
    return False


_locks: list[IO[bytes]] = []  # open for the life of the process; closing one would give up its claim


def _lock(path: Path) -> bool:
    """Return whether the file is now locked by this process; False if another one, or this one, holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115  # kept open on purpose
    except OSError as error:
        raise UserError(f"cannot use {path}: {error.strerror}; set SWARM_HOME to another folder") from error
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _locks.append(file)
    return True


def node_id_of(public_key: Ed25519PublicKey) -> NodeId:
    """Return the node id of a public key."""
    return NodeId(public_key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def is_valid_signature(node_id: NodeId, signature: bytes, message: bytes) -> bool:
    """Return whether `signature` over `message` was made by that node's key."""
    try:
        Ed25519PublicKey.from_public_bytes(node_id.raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
