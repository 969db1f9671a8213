"""Whose models are trusted: own, given, of this machine, and confirmed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.publishers import Publishers, own_publishers
from swarm.registry.records import ModelOffer
from tests.sample_records import sample_offer

A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def offer(identity: Identity, *addresses: str) -> ModelOffer:
    return sample_offer(identity.node_id, model=ModelId(b"m" * 32), addresses=addresses or ("192.0.2.1:2",))


def test_an_unknown_publisher_is_confirmed_once_and_remembered(tmp_path: Path) -> None:
    asked: list[str] = []

    def yes(question: str) -> bool:
        asked.append(question)
        return True

    path = tmp_path / "config" / "known_publishers"
    publishers = Publishers(path, confirm=yes)
    assert not publishers.knows(offer(A))
    publishers.require(offer(A))
    publishers.require(offer(A))
    assert len(asked) == 1
    assert str(A.node_id) in asked[0]
    again = Publishers(path)
    assert again.knows(offer(A))
    assert not again.knows(offer(B))


def test_a_no_names_the_way_to_trust_it_and_is_not_remembered(tmp_path: Path) -> None:
    publishers = Publishers(tmp_path / "known_publishers")
    with pytest.raises(UserError, match=f"--publisher {A.node_id}"):
        publishers.require(offer(A))
    assert not (tmp_path / "known_publishers").exists()


@pytest.mark.parametrize(
    ("addresses", "is_known"),
    [(("127.0.0.1:1",), True), (("[::1]:1", "127.0.0.1:1"), True), (("127.0.0.1:1", "192.0.2.1:1"), False)],
)
def test_nobody_is_asked_about_this_machine_where_its_own_registry_says_so(
    tmp_path: Path, addresses: tuple[str, ...], is_known: bool
) -> None:
    assert Publishers(tmp_path / "none", is_registry_here=True).knows(offer(A, *addresses)) is is_known
    assert not Publishers(tmp_path / "none").knows(offer(A, *addresses)), "another machine's registry says so"


def test_those_given_and_ones_own_are_known(tmp_path: Path) -> None:
    own = Identity.load_or_create(tmp_path / "serve-2.key")
    Identity.load_or_create(tmp_path / "join.key")
    (tmp_path / "serve.key").write_bytes(b"damaged")
    assert own_publishers(tmp_path) == {own.node_id}
    publishers = Publishers(tmp_path / "none", given={A.node_id, *own_publishers(tmp_path)})
    assert publishers.knows(offer(A))
    assert publishers.knows(offer(own))
    assert not publishers.knows(offer(B))


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "known_publishers").write_text(f"{A.node_id}\nnonsense\n")
    with pytest.raises(UserError, match="line 2"):
        Publishers(tmp_path / "known_publishers")
