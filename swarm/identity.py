"""A node is its ed25519 key. Makes, keeps and uses that key; knows nothing of certificates or the wire."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from swarm.errors import UserError
from swarm.files import write_atomically
from swarm.ids import NodeId


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
            UserError: the file is not a key, or others can read it.
        """
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

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return self.private_key.sign(message)


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
