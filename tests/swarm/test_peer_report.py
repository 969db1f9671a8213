"""How scarce a peer's experts are is counted over what all others announce."""

from __future__ import annotations

from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.peer_report import Scarcity, scarcity_of
from swarm.registry.records import ExpertAnnouncement
from tests.sample_records import sample_announcement

ME, A, B = (Identity.from_seed(bytes([n]) * 32).node_id for n in (1, 2, 3))


def held(node: NodeId, experts: ExpertSet) -> ExpertAnnouncement:
    return sample_announcement(node, model=ModelId(bytes(32)), addresses=("192.0.2.1:7000",), experts=experts)


def test_blocks_that_nobody_else_holds_are_counted_and_our_own_word_is_not() -> None:
    mine = ExpertSet.of([0, 1], [1, 2])
    listed = [held(ME, mine), held(A, ExpertSet.of([0], [1, 7])), held(B, ExpertSet.of([0, 1], [1]))]
    assert scarcity_of(mine, listed, ME) == Scarcity(n_blocks=4, n_alone=2, n_others_least=0, n_others_most=2)


def test_without_others_everything_is_alone() -> None:
    mine = ExpertSet.of([0], [1])
    assert scarcity_of(mine, [], ME) == Scarcity(n_blocks=1, n_alone=1, n_others_least=0, n_others_most=0)


def test_without_experts_nothing_is_known() -> None:
    assert scarcity_of(ExpertSet({}), [held(A, ExpertSet.of([0], [1]))], ME) is None
