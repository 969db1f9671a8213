"""Which model a volunteer fetches: a forged demand draws nobody and hides nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.trust import choose_trusted
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.publishers import Publishers
from swarm.registry.records import ModelOffer
from tests.sample_records import sample_offer

FRIEND, STRANGER, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
GOOD, FORGED = ModelId(b"g" * 32), ModelId(b"f" * 32)


def offer(identity: Identity, model: ModelId, name: str = "tiny") -> ModelOffer:
    return sample_offer(identity.node_id, model=model, model_name=name, addresses=("192.0.2.1:2",))


def publishers(tmp_path: Path, *, answer: bool = False, given: tuple[Identity, ...] = (FRIEND,)) -> Publishers:
    return Publishers(
        tmp_path / "known", given=[identity.node_id for identity in given], confirm=lambda question: answer
    )


@pytest.mark.parametrize("wanted", [None, "tiny"])
def test_a_strangers_offers_do_not_stand_in_a_known_ones_way(tmp_path: Path, wanted: str | None) -> None:
    good = offer(FRIEND, GOOD)
    forged = [offer(STRANGER, FORGED), offer(OTHER, ModelId(b"h" * 32)), offer(STRANGER, GOOD)]
    assert choose_trusted([*forged, good], wanted, publishers(tmp_path)) == (GOOD, [good])


def test_a_strangers_model_is_fetched_only_after_a_yes(tmp_path: Path) -> None:
    offers = [offer(STRANGER, FORGED)]
    with pytest.raises(UserError, match="--publisher"):
        choose_trusted(offers, None, publishers(tmp_path))
    assert choose_trusted(offers, None, publishers(tmp_path, answer=True)) == (FORGED, offers)
    assert choose_trusted(offers, None, publishers(tmp_path)) == (FORGED, offers), "remembered"


def test_a_yes_to_one_is_no_yes_to_others_that_offer_the_same(tmp_path: Path) -> None:
    first, second = offer(STRANGER, FORGED), offer(OTHER, FORGED)
    assert choose_trusted([first, second], "tiny", publishers(tmp_path, answer=True)) == (FORGED, [first])


def test_a_model_that_only_a_stranger_has_can_be_asked_for_by_name(tmp_path: Path) -> None:
    known, unknown = offer(FRIEND, GOOD), offer(STRANGER, FORGED, "special")
    with pytest.raises(UserError, match="special"):
        choose_trusted([known, unknown], "special", publishers(tmp_path))
    assert choose_trusted([known, unknown], "special", publishers(tmp_path, answer=True)) == (FORGED, [unknown])


def test_what_nobody_offers_is_said_as_ever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="offers no model"):
        choose_trusted([offer(FRIEND, GOOD)], "missing", publishers(tmp_path))
    with pytest.raises(UserError, match="no model yet"):
        choose_trusted([], None, publishers(tmp_path))
