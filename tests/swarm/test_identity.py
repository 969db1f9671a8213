"""A node is its key: the same file gives the same node, and only that node's signatures count."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.identity import Identity, is_valid_signature
from swarm.ids import NodeId

# RFC 8032, section 7.1, test 2.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_the_node_id_is_the_raw_ed25519_public_key() -> None:
    identity = Identity.from_seed(SEED)
    assert identity.node_id == NodeId(PUBLIC)
    assert identity.sign(b"\x72") == SIGNATURE


def test_only_the_nodes_own_signature_of_this_message_is_valid() -> None:
    node = NodeId(PUBLIC)
    assert is_valid_signature(node, SIGNATURE, b"\x72")
    assert not is_valid_signature(node, SIGNATURE, b"\x73")
    assert not is_valid_signature(Identity.generate().node_id, SIGNATURE, b"\x72")
    for position in range(0, 8 * 64, 17):
        flipped = bytearray(SIGNATURE)
        flipped[position // 8] ^= 1 << position % 8
        assert not is_valid_signature(node, bytes(flipped), b"\x72")


@pytest.mark.parametrize("raw", [bytes(32), b"\xff" * 32, b"\x02" + bytes(31)])
@pytest.mark.parametrize("signature", [b"", bytes(64), bytes(65), b"\xff" * 64])
def test_no_bytes_make_the_check_raise(raw: bytes, signature: bytes) -> None:
    assert is_valid_signature(NodeId(raw), signature, b"message") in (True, False)


def test_generated_identities_differ() -> None:
    assert Identity.generate().node_id != Identity.generate().node_id


def test_a_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "peer.key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 32
    assert Identity.load_or_create(path).node_id == first.node_id


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_damaged_key_file_is_refused_and_kept(tmp_path: Path, size: int) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(UserError, match=f"{size} bytes"):
        Identity.load_or_create(path)
    assert len(path.read_bytes()) == size


def test_a_key_belongs_to_one_process_at_a_time_and_the_next_takes_the_next(tmp_path: Path) -> None:
    def claim() -> subprocess.Popen[str]:
        program = (
            "import sys; from pathlib import Path; from swarm.identity import Identity;"
            "print(Identity.claim(Path(sys.argv[1]), 'join').node_id, flush=True); sys.stdin.read()"
        )
        arguments = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def name(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    with claim() as first, claim() as second:
        names = {name(first), name(second)}
        assert len(names) == 2
        first.kill()  # a claim ends with its process, however that ends
        first.wait()
        with claim() as third:
            assert name(third) in names, "its key is used again, and no third one made"
            third.kill()
        second.kill()
    assert sorted(path.name for path in tmp_path.glob("*.key")) == ["join-2.key", "join.key"]


def test_a_folder_that_cannot_be_written_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="SWARM_HOME"):
        Identity.claim(Path("/proc/nope"), "join")
