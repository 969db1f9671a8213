"""Who is asked for a second opinion, and for a third."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np

from swarm.dispatch.audit_opinions import Finding, Part, Question
from swarm.dispatch.audit_panel import Panel
from swarm.dispatch.audit_standing import Standing
from swarm.dispatch.holders import Holders
from swarm.dispatch.placement import Placement
from swarm.dispatch.plan import HERE, Batch
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.wire.rows import RowCodec
from tests.sample_records import sample_announcement

MODEL = ModelId(b"m" * 32)
LAYERS, E = (1, 2), 8
A, B, C, T = (NodeId(bytes([n]) * 32) for n in (10, 20, 30, 40))


def panel(
    slices: Mapping[NodeId, Collection[int]],
    *,
    networks: Mapping[NodeId, int] | None = None,
    own: Collection[int] | None = None,
    standing: Standing | None = None,
    seed: int = 1,
) -> Panel:
    placement = Placement(MODEL, LAYERS, E, require_exact=False)
    placement.update(
        sample_announcement(
            node,
            model=MODEL,
            experts=ExpertSet.of(LAYERS, experts),
            addresses=(f"203.0.{(networks or {}).get(node, node.raw[0])}.1:1",),
        )
        for node, experts in slices.items()
    )
    mine = SimpleNamespace(holds=lambda layer, experts: set(experts) <= set(own or ()))
    holders = SimpleNamespace(placement=placement, own=mine if own is not None else None)
    return Panel(cast(Holders, holders), standing or Standing(), random.Random(seed))


def question(*experts: int) -> Question:
    n = len(experts)
    batch = Batch(
        destination=A,
        rows=np.arange(1),
        row_counts=np.array([n], np.uint8),
        expert_ids=np.array(experts, np.uint16),
        slots=np.arange(n, dtype=np.uint8),
        weights=np.ones(n, np.float32),
    )
    rows = np.zeros((1, 4), np.float32)
    return Question(layer=2, node=A, batch=batch, x=rows, answer=rows, codec=RowCodec.F32)


def asked(parts: list[Part] | None) -> dict[NodeId, list[int]] | None:
    return None if parts is None else {part.node: part.batch.expert_ids.tolist() for part in parts}


def test_one_that_holds_all_is_asked_alone_and_never_the_peer_itself() -> None:
    made = panel({A: range(E), B: range(E), C: [0, 1]})
    for _ in range(20):
        assert asked(made.second(question(0, 1, 5))) == {B: [0, 1, 5]}


def test_where_nobody_else_holds_all_each_answers_a_part() -> None:
    made = panel({A: range(E), B: [0, 1, 2], C: [5, 6]})
    parts = made.second(question(0, 5, 1, 6))
    assert asked(parts) == {B: [0, 1], C: [5, 6]}
    assert parts is not None
    assert np.sum([part.is_in for part in parts], axis=0).tolist() == [1, 1, 1, 1]


def test_what_no_other_peer_holds_is_asked_of_this_process_if_it_can() -> None:
    assert asked(panel({A: range(E), B: [0]}).second(question(0, 5))) is None
    assert asked(panel({A: range(E), B: [0]}, own=[4]).second(question(0, 5))) is None
    assert asked(panel({A: range(E), B: [0]}, own=[5]).second(question(0, 5))) == {B: [0], HERE: [5]}
    assert asked(panel({A: range(E)}, own=range(E)).second(question(0, 5))) == {HERE: [0, 5]}


def test_chance_decides_among_equals_another_network_before_it_and_a_suspect_first() -> None:
    everybody = dict.fromkeys((A, B, C, T), range(E))
    seen = {node for seed in range(30) for node in asked(panel(everybody, seed=seed).second(question(0))) or {}}
    assert seen == {B, C, T}
    networks = {A: 1, B: 1, C: 1, T: 2}
    made = panel(everybody, networks=networks)
    assert {node for _ in range(30) for node in asked(made.second(question(0))) or {}} == {T}
    standing = Standing()
    standing.failed(Finding(suspects=frozenset({C})), 1e9, can_compare=lambda a, b: True, network_of=lambda node: None)
    made = panel(everybody, networks=networks, standing=standing)
    assert {node for _ in range(30) for node in asked(made.second(question(0))) or {}} == {C}


def test_the_third_is_this_process_or_somebody_who_holds_the_whole_part() -> None:
    def third(made: Panel, *experts: int) -> NodeId | None:
        asked = question(*experts)
        return made.third(asked, Part(is_in=np.ones(len(experts), np.bool_), batch=asked.batch, node=B))

    slices = {A: range(E), B: range(E), C: [0, 1], T: [2]}
    assert third(panel(slices), 0, 1) == C
    assert third(panel(slices), 2) == T
    assert third(panel(slices), 0, 2) is None
    assert third(panel(slices, own=range(E)), 0, 2) == HERE
    twice = {A: range(E), B: range(E), C: range(E), T: range(E)}
    assert {third(panel(twice, networks={A: 1, B: 2, C: 1, T: 3}, seed=seed), 0) for seed in range(20)} == {T}


def test_two_can_be_compared_by_what_both_hold_and_of_the_absent_nobody_says_no() -> None:
    made = panel({A: [0, 1], B: [1, 2], C: [3]})
    assert made.can_compare(A, B)
    assert not made.can_compare(A, C)
    assert made.can_compare(A, T)
