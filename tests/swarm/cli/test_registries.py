"""Trust in a registry: by id, on this machine, or confirmed once and remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.cli import registries
from swarm.cli.registries import KnownRegistries, confirm, settle_registries
from swarm.errors import DeadlineExceeded, SwarmError, UserError, VersionRefused
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress
from swarm.registry.client import RegistryAddress

A, B = (Identity.from_seed(bytes([n]) * 32).node_id for n in (1, 2))
WHERE = "192.0.2.1:7440"


class Person:
    """Who is asked, and the network that is asked for ids."""

    def __init__(self, folder: Path, *, agrees: bool = True) -> None:
        self.folders = Folders.below(folder)
        self.agrees = agrees
        self.questions: list[str] = []
        self.asked: list[SocketAddress] = []
        self.there: NodeId | SwarmError = A

    def settle(self, text: str) -> tuple[RegistryAddress, ...]:
        return asyncio.run(settle_registries(text, self.folders, confirm=self.confirm, ask_id=self.ask_id))

    def confirm(self, question: str) -> bool:
        self.questions.append(question)
        return self.agrees

    async def ask_id(self, address: SocketAddress) -> NodeId:
        self.asked.append(address)
        if isinstance(self.there, SwarmError):
            raise self.there
        return self.there

    @property
    def is_left_alone(self) -> bool:
        return not self.questions and not self.asked

    @property
    def known(self) -> Path:
        return self.folders.config / "known_registries"


@pytest.mark.parametrize("text", ["127.0.0.1:7440", "127.9.9.9:1", "[::1]:7440", "localhost:7440"])
def test_this_machine_needs_no_id_and_asks_nobody(tmp_path: Path, text: str) -> None:
    person = Person(tmp_path)
    (found,) = person.settle(text)
    assert found.node is None
    assert person.is_left_alone
    assert not person.known.exists()


def test_a_name_is_resolved() -> None:
    (found,) = asyncio.run(settle_registries("localhost:7440", Folders(Path("c"), Path("s"), Path("x"))))
    assert found.address == ("127.0.0.1", 7440)


def test_a_node_given_by_id_is_trusted_without_a_question_and_not_remembered(tmp_path: Path) -> None:
    person = Person(tmp_path)
    assert person.settle(f"swarm://{A}@{WHERE}") == (RegistryAddress(address=("192.0.2.1", 7440), node=A),)
    assert person.is_left_alone
    assert not person.known.exists()


def test_an_id_counts_on_this_machine_too(tmp_path: Path) -> None:
    (found,) = Person(tmp_path).settle(f"swarm://{A}@127.0.0.1:7440")
    assert found.node == A


def test_an_unknown_node_is_confirmed_once_and_remembered(tmp_path: Path) -> None:
    person = Person(tmp_path)
    assert person.settle(WHERE) == (RegistryAddress(address=("192.0.2.1", 7440), node=A),)
    (question,) = person.questions
    assert str(A) in question
    assert WHERE in question
    assert person.known.read_text() == f"{WHERE} {A}\n"
    for _ in range(2):
        again = Person(tmp_path)
        assert again.settle(WHERE) == (RegistryAddress(address=("192.0.2.1", 7440), node=A),)
        assert again.is_left_alone


def test_a_changed_key_is_not_what_is_expected(tmp_path: Path) -> None:
    """The node remembered is the one demanded: whoever else is there now fails the handshake."""
    Person(tmp_path).settle(WHERE)
    later = Person(tmp_path)
    later.there = B
    (found,) = later.settle(WHERE)
    assert found.node == A
    assert later.is_left_alone


def test_a_node_that_nobody_confirms_is_refused_with_the_way_to_trust_it(tmp_path: Path) -> None:
    person = Person(tmp_path, agrees=False)
    with pytest.raises(UserError, match=f"give it as swarm://{A}@192.0.2.1:7440 to trust it"):
        person.settle(WHERE)
    assert not person.known.exists()


def test_without_a_terminal_nobody_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    assert confirm("trust it?") is False


@pytest.mark.parametrize("error", [DeadlineExceeded("no answer within 4 s"), VersionRefused("wire versions")])
def test_a_node_that_cannot_be_asked_is_the_users_to_mend(tmp_path: Path, error: SwarmError) -> None:
    person = Person(tmp_path)
    person.there = error
    with pytest.raises(UserError, match=f"no registry answers at {WHERE}: {error}"):
        person.settle(WHERE)
    assert person.questions == []


def test_each_of_a_list_is_settled_by_itself(tmp_path: Path) -> None:
    person = Person(tmp_path)
    found = person.settle(f"127.0.0.1:7440, swarm://{B}@192.0.2.2:1, {WHERE}")
    assert [each.node for each in found] == [None, B, A]
    assert person.asked == [("192.0.2.1", 7440)]


def test_many_are_remembered_side_by_side(tmp_path: Path) -> None:
    person = Person(tmp_path)
    person.settle(WHERE)
    person.there = B
    person.settle("192.0.2.2:7440")
    known = KnownRegistries(person.known)
    assert (known.get(WHERE), known.get("192.0.2.2:7440"), known.get("192.0.2.3:7440")) == (A, B, None)


@pytest.mark.parametrize("line", ["one", "a b c", f"{WHERE} notanid", f"{WHERE} \udcff", ""])
def test_a_damaged_file_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "known_registries"
    path.write_bytes(f"{WHERE} {A}\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(UserError, match="known_registries, line 2"):
        KnownRegistries(path)


def test_a_file_that_cannot_be_read_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        KnownRegistries(tmp_path)


# A folder that cannot be used


def test_a_folder_that_cannot_be_written_is_one_line_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a file in the way")
    with pytest.raises(UserError, match=r"known_registries: Not a directory"):
        Person(tmp_path).settle(WHERE)


def test_a_full_disk_is_one_line_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registries, "write_atomically", full)
    with pytest.raises(UserError, match=f"cannot remember .*: No space left on device; give it as swarm://{A}@{WHERE}"):
        Person(tmp_path).settle(WHERE)


def test_a_folder_that_may_not_be_looked_into_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UserError, match=r"cannot read .*known_registries: Permission denied"):
        KnownRegistries(tmp_path / "known_registries")
