"""Which replica computes what: decode by latency and fewest destinations, prefill by throughput, sticky, never another expert."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from swarm.dispatch.origin import Origin
from swarm.dispatch.placement import NOBODY, Placement
from swarm.dispatch.plan import Batch, plan_dispatch
from swarm.dispatch.replicas import DECODE_ROWS, REFRESH_S, Replicas
from swarm.dispatch.service_time import ServiceTimes
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.records import ExpertAnnouncement
from tests.sample_records import sample_announcement

MODEL = ModelId(b"m" * 32)
A, B, C, D = (NodeId(bytes([n]) * 32) for n in (10, 20, 30, 40))
LAYERS = (2, 3)
E, K = 12, 4


def announce(node: NodeId, experts: Iterable[int] | ExpertSet) -> ExpertAnnouncement:
    return sample_announcement(
        node,
        model=MODEL,
        experts=experts if isinstance(experts, ExpertSet) else ExpertSet.of(LAYERS, experts),
        addresses=("127.0.0.1:1",),
    )


class World:
    """A placement of given slices, and what was measured of each peer."""

    def __init__(self, held: dict[NodeId, Iterable[int]], *, home: bytes = b"") -> None:
        self.now = 1000.0
        self.placement = Placement(MODEL, LAYERS, E, require_exact=False)
        self.place(held)
        self.times = ServiceTimes()
        self.replicas = Replicas(self.placement, self.times, home=home)

    def place(self, held: dict[NodeId, Iterable[int]]) -> None:
        self.placement.update(announce(node, experts) for node, experts in held.items())

    def measure(self, *, n: int = 60, n_pairs: int = 4, **elapsed_s: float) -> None:
        """Let peers answer, all at the same time: `measure(a=0.002)`."""
        began = self.now
        for name, each_s in elapsed_s.items():
            times, now = self.times.of({"a": A, "b": B, "c": C, "d": D}[name]), began
            for key in range(n):
                times.sent(key, now)
                now += each_s
                times.answered(key, n_pairs, now)
            self.now = max(self.now, now)
        self.now += REFRESH_S

    def choose(
        self,
        ids: list[list[int]] | np.ndarray,
        layer: int = 2,
        *,
        origin: Origin | None = None,
        is_kept: np.ndarray | None = None,
    ) -> list[list[NodeId | None]]:
        """Return who computes each pair."""
        topk_ids = np.array(ids, np.int32)
        owners = self.replicas.owners(layer, topk_ids, self.now, origin=origin, is_kept=is_kept)
        found = owners[topk_ids] if owners.ndim == 1 else owners
        return [
            [None if index == NOBODY else self.placement.destinations[index] for index in row] for row in found.tolist()
        ]


def random_ids(n_rows: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:K] for _ in range(n_rows)]).astype(np.int32)


@pytest.mark.parametrize(
    "held", [{A: range(7), B: range(7, 12)}, {A: range(12), B: range(5), C: range(3, 12)}], ids=str
)
def test_one_row_is_computed_by_whom_many_would_be(held: dict[NodeId, Iterable[int]]) -> None:
    single, many = World(held), World(held)
    for row in random_ids(20):
        owners = many.choose([row.tolist()])[0]
        of_row = single.replicas.owners_of_row(2, row.tolist(), single.now)
        assert of_row is not None
        assert [single.placement.destinations[index] for index in of_row] == owners
    assert single.replicas.sequence_stickiness == many.replicas.sequence_stickiness


def test_of_one_row_nobody_is_told_where_an_expert_has_no_holder_or_is_none() -> None:
    world = World({A: range(7), B: range(5, 11)})  # nobody has 11
    replicas = world.replicas
    assert replicas.owners_of_row(2, [0, 10], world.now) == [0, 1]
    for ids in ([0, 11], [0, 12], [-1, 0]):
        assert replicas.owners_of_row(2, ids, world.now) is None
    world.place({A: range(12)})
    assert replicas.owners_of_row(2, [0, 11], world.now) == [0, 0], "a change of the placement is seen"


def test_without_replicas_the_placements_owners_are_returned_as_they_are() -> None:
    world = World({A: range(6), B: range(6, E)})
    assert world.replicas.owners(2, random_ids(1), 0.0) is world.placement.owner_of(2)
    assert not world.replicas.has_choice(2)
    assert world.replicas.sequence_stickiness == 1.0


def test_layers_are_judged_apart() -> None:
    world = World({})
    world.placement.update(
        [
            announce(A, ExpertSet({2: frozenset(range(E)), 3: frozenset(range(E))})),
            announce(B, ExpertSet({3: frozenset({5})})),
        ]
    )
    assert not world.replicas.has_choice(2)
    assert world.replicas.has_choice(3)


def test_decode_takes_the_faster_replica() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.030, b=0.010)
    assert world.choose([[0, 3, 7, 11]]) == [[B] * 4]
    world.measure(a=0.001, b=0.010, n=100)
    assert world.choose([[0, 3, 7, 11]]) == [[A] * 4]


def test_a_slow_disk_two_ms_away_loses_to_memory_eight_ms_away() -> None:
    world = World({A: range(E), B: range(E)})
    world.times.of(A).rtt_s, world.times.of(B).rtt_s = 0.002, 0.008
    world.now += REFRESH_S
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4], "at first the ping is all there is to go by"
    world.measure(a=0.002 + 0.050, n=1)
    world.measure(b=0.008 + 0.001, n=1)
    for _ in range(20):
        assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]
        world.now += 0.01


def test_a_replica_no_slower_than_what_must_be_waited_for_saves_a_destination() -> None:
    """Expert 0 is C's alone, 30 ms away: asking C for the others as well costs nothing, though A is nearer."""
    world = World({A: range(1, E), C: range(E)})
    world.measure(a=0.010, c=0.030)
    assert world.choose([[0, 1, 2, 3]]) == [[C] * 4]
    assert world.choose([[1, 2, 3, 4]]) == [[A] * 4], "without expert 0, C would be waited for in vain"


def test_decode_meets_the_fewest_of_equal_replicas() -> None:
    world = World({A: range(4), B: range(4, 8), C: range(8), D: range(6, E)})
    assert world.choose([[0, 3, 4, 7]]) == [[C] * 4]
    chosen = world.choose([[0, 5, 8, 11], [1, 4, 9, 10]])
    assert chosen == [[C, C, D, D], [C, C, D, D]]


def test_a_row_never_goes_to_who_does_not_hold_its_expert() -> None:
    rng = np.random.default_rng(3)
    for seed in range(30):
        held = {node: set(rng.permutation(E)[: rng.integers(3, E)].tolist()) for node in (A, B, C)}
        world = World({node: sorted(experts) for node, experts in held.items()})
        world.measure(a=0.01, b=0.02, c=0.03, n=3)
        for n_rows in (1, DECODE_ROWS, DECODE_ROWS + 1, 40):
            ids = random_ids(n_rows, seed)
            for row, chosen in zip(ids.tolist(), world.choose(ids), strict=True):
                for expert, node in zip(row, chosen, strict=True):
                    holders = {each for each, experts in held.items() if expert in experts}
                    assert node in holders if holders else node is None


def test_equal_replicas_are_kept_and_noise_moves_nothing() -> None:
    world = World({A: range(E), B: range(E)})
    rng = np.random.default_rng(8)
    world.measure(a=0.010, b=0.010)
    first = world.choose([[0, 1, 2, 3]])
    for step in range(50):
        world.measure(a=float(rng.uniform(0.009, 0.011)), b=float(rng.uniform(0.009, 0.011)), n=1)
        assert world.choose(random_ids(1, step)) == [[first[0][0]] * K]
    assert world.replicas.sequence_stickiness == 1.0


def test_a_cost_at_the_edge_of_being_equal_does_not_flap() -> None:
    """B comes first among equals, and its mean wanders about 1.25 times A's."""
    for home in range(8):
        world = World({A: range(E), B: range(E)}, home=bytes([home]))
        world.measure(a=0.010, b=0.0110)
        if world.choose([[0, 1, 2, 3]])[0][0] == B:
            break
    for step in range(20):
        world.measure(b=0.0122 if step % 2 else 0.0128, n=40)
        world.measure(a=0.010, n=1)
        assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]


def test_backbones_spread_over_equal_replicas() -> None:
    chosen = set()
    for home in range(8):
        world = World({A: range(E), B: range(E)}, home=bytes([home]))
        world.measure(a=0.010, b=0.010)
        chosen.add(world.choose([[0, 1, 2, 3]])[0][0])
    assert chosen == {A, B}


def test_a_hang_moves_the_next_layer_without_waiting_for_the_next_look() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.002, b=0.004)
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4]
    world.times.of(A).sent("hangs", world.now)
    world.now += REFRESH_S / 2
    world.replicas.refresh_soon()
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]


def test_the_nearest_grows_80_ms_slower_and_traffic_moves_within_3_s() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.002, b=0.008)
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4]
    slow_since = world.now
    while world.choose([[0, 1, 2, 3]]) == [[A] * 4]:
        world.times.of(A).sent("next", world.now)
        world.now += 0.082
        world.times.of(A).answered("next", 4, world.now)
    assert world.now - slow_since < 3.0
    world.measure(b=0.008, n=20)
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]


def test_a_slow_peer_is_tried_again_some_time() -> None:
    world = World({A: range(E), B: range(E)})
    world.times.of(A).rtt_s = world.times.of(B).rtt_s = 0.001
    world.measure(a=0.002, b=0.004)
    world.measure(a=0.080, n=30)
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]
    began = world.now
    while world.choose([[0, 1, 2, 3]]) == [[B] * 4]:
        world.measure(b=0.004, n=1)
        assert world.now - began < 300
    assert world.now - began > 10


def test_prefill_spreads_rows_over_full_replicas_and_sends_each_row_once() -> None:
    world = World({A: range(E), B: range(E), C: range(E)})
    world.measure(a=0.05, b=0.05, c=0.05, n_pairs=512, n=3)
    chosen = world.choose(random_ids(256))
    assert all(len(set(row)) == 1 for row in chosen), "a row travels once"
    loads = [sum(row.count(node) for row in chosen) for node in (A, B, C)]
    assert max(loads) / (sum(loads) / 3) < 1.3


def test_prefill_gives_a_replica_twice_as_fast_about_twice_as_much() -> None:
    world = World({A: range(E), B: range(E)})
    world.times.of(A).rtt_s = world.times.of(B).rtt_s = 0.001
    world.measure(a=0.051, b=0.101, n_pairs=512, n=3)
    chosen = world.choose(random_ids(512))
    ratio = sum(row.count(A) for row in chosen) / sum(row.count(B) for row in chosen)
    assert 1.5 < ratio < 2.7


def test_prefill_relieves_the_one_that_holds_everything() -> None:
    world = World({A: range(E), B: range(E // 2), C: range(E // 2, E)})
    world.measure(a=0.05, b=0.05, c=0.05, n_pairs=512, n=3)
    chosen = world.choose(random_ids(256))
    loads = [sum(row.count(node) for row in chosen) for node in (A, B, C)]
    assert max(loads) / (sum(loads) / 3) < 1.5, loads


def test_a_hanging_replica_gets_no_part_of_a_prefill() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.02, b=0.02, n_pairs=512, n=3)
    world.times.of(A).sent("hangs", world.now)
    world.now += 2.0
    chosen = world.choose(random_ids(64))
    assert sum(row.count(A) for row in chosen) <= 64 * K // 8


def test_a_plan_of_spread_rows_holds_every_pair_once() -> None:
    world = World({A: range(E), B: range(0, E, 2), C: range(1, E, 2)})
    ids = random_ids(100)
    owners = world.replicas.owners(3, ids, world.now)
    assert owners.shape == ids.shape
    plan = plan_dispatch(ids, np.ones(ids.shape, np.float32), owners, world.placement.destinations)
    assert isinstance(plan, list)
    pairs = sorted((int(r), int(s)) for batch in plan for r, s in zip(batch.pair_rows, batch.slots, strict=True))
    assert pairs == [(row, slot) for row in range(100) for slot in range(K)]


# Others


def batch_of(ids: list[list[int]], destination: NodeId = A) -> Batch:
    topk_ids = np.array(ids, np.int32)
    plan = plan_dispatch(topk_ids, np.ones(topk_ids.shape, np.float32), np.zeros(E, int), [destination])
    assert isinstance(plan, list)
    return plan[0]


def test_another_holder_gets_the_whole_batch() -> None:
    world = World({A: range(E), B: range(E), C: range(E)})
    world.measure(b=0.05, c=0.01)
    batch = batch_of([[0, 1], [1, 5]])
    assert world.replicas.others(2, batch, {A}, world.now) == [(C, batch)]
    assert world.replicas.others(2, batch, {A, C}, world.now) == [(B, batch)]
    assert world.replicas.others(2, batch, {A, B, C}, world.now) is None


def test_where_no_one_peer_holds_it_all_the_batch_is_cut_by_experts() -> None:
    world = World({A: range(E), B: range(6), C: range(6, E)})
    batch = batch_of([[0, 7, 1], [8, 9, 10], [2, 3, 4]])
    found = world.replicas.others(2, batch, {A}, world.now)
    assert found is not None
    parts = dict(found)
    assert parts[B].expert_ids.tolist() == [0, 1, 2, 3, 4]
    assert parts[B].rows.tolist() == [0, 2]
    assert parts[B].row_counts.tolist() == [2, 3]
    assert parts[B].slots.tolist() == [0, 2, 0, 1, 2]
    assert parts[C].expert_ids.tolist() == [7, 8, 9, 10]
    assert parts[C].rows.tolist() == [0, 1]
    assert {part.destination for part in parts.values()} == {A}, "its place in the order of sums stays"


def test_a_holder_that_is_the_last_by_now_is_found() -> None:
    world = World({A: range(E), B: range(E)})
    batch = batch_of([[0, 1]])
    world.place({B: range(E)})
    assert world.replicas.others(2, batch, {A}, world.now) == [(B, batch)]


def test_an_expert_that_nobody_else_holds_leaves_nobody_to_ask() -> None:
    world = World({A: range(E), B: range(6)})
    assert world.replicas.others(2, batch_of([[0, 7]]), {A}, world.now) is None
    assert World({A: range(E)}).replicas.others(2, batch_of([[0]]), {A}, 0.0) is None


def test_a_change_of_holders_is_followed_and_who_left_is_forgotten() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.001, b=0.010)
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4]
    world.place({B: range(E), C: range(E)})
    assert world.choose([[0, 1, 2, 3]]) == [[C] * 4], "nothing speaks against it yet"
    assert world.times.of(A).pair_s(1) is None
    world.place({B: range(E)})
    assert not world.replicas.has_choice(2)


@pytest.mark.parametrize("ids", [[[0, E]], [[-1, 0]]])
def test_a_bad_choice_is_left_to_the_plan_to_name(ids: list[list[int]]) -> None:
    world = World({A: range(E), B: range(E)})
    assert world.replicas.owners(2, np.array(ids, np.int32), 0.0) is world.placement.owner_of(2)


# Trials


def test_who_is_on_trial_is_asked_for_one_batch_at_a_time() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.001, b=0.010)
    world.replicas.on_trial = lambda now: [A]
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4], "the trial"
    world.times.of(A).sent("trial", world.now)
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]
    assert {node for row in world.choose(random_ids(64)) for node in row} == {B}
    world.times.of(A).answered("trial", 4, world.now + 0.001)
    assert world.choose([[0, 1, 2, 3]]) == [[A] * 4], "the next"


def test_who_is_on_trial_is_asked_where_nobody_else_can_be() -> None:
    world = World({A: range(E), B: range(6)})
    world.replicas.on_trial = lambda now: [A]
    world.times.of(A).sent("trial", world.now)
    assert world.choose([[0, 1, 6, 7]])[0][2:] == [A, A]
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]
    spread = world.choose(np.tile(np.array([[0, 1, 6, 7]], np.int32), (64, 1)))
    assert spread == [[B, B, A, A]] * 64
    found = world.replicas.others(2, batch_of([[0, 7]], B), {B}, world.now)
    assert found is not None
    assert [node for node, _ in found] == [A]


def test_a_replica_that_is_on_trial_gets_no_copies_beside_its_trial() -> None:
    world = World({A: range(E), B: range(E), C: range(E)})
    world.measure(a=0.001, b=0.010, c=0.020)
    world.replicas.on_trial = lambda now: [A]
    batch = batch_of([[0, 1]], B)
    assert world.replicas.others(2, batch, {B}, world.now) == [(A, batch)]
    world.times.of(A).sent("trial", world.now)
    assert world.replicas.others(2, batch, {B}, world.now) == [(C, batch)]


# Sequences


def origin_of(*sequences: int) -> Origin:
    """Return the origin of a step's rows, one for each sequence named."""
    return Origin(sequences=np.array(sequences, np.int64), positions=np.arange(len(sequences)))


def test_a_sequence_stays_on_its_own_replica_and_several_spread_over_all() -> None:
    world = World({A: range(E), B: range(E), C: range(E)})
    world.measure(a=0.010, b=0.010, c=0.010)
    homes: dict[int, set[NodeId | None]] = {}
    for step in range(30):
        for sequence in range(12):
            [row] = world.choose(random_ids(1, 100 * step + sequence), origin=origin_of(sequence))
            homes.setdefault(sequence, set()).update(row)
    assert all(len(home) == 1 for home in homes.values())
    assert set.union(*homes.values()) == {A, B, C}
    assert world.replicas.sequence_stickiness == 1.0


def test_the_rows_of_one_sequence_are_one_choice() -> None:
    """Drafts: rows of a sequence share their destinations."""
    world = World({A: range(4), B: range(4, 8), C: range(8), D: range(6, E)})
    ids = np.array([[0, 5, 8, 11], [1, 4, 9, 10]], np.int32)
    assert world.choose(ids, origin=origin_of(7, 7)) == [[C, C, D, D], [C, C, D, D]]


def test_what_moves_for_a_slow_peer_is_not_kept() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.001, b=0.010)
    world.choose([[0, 1, 2, 3]])
    world.measure(a=0.100, n=100)
    assert world.choose([[0, 1, 2, 3]]) == [[B] * 4]
    assert world.replicas.sequence_stickiness == 0.5


def test_pairs_that_are_kept_here_decide_nothing() -> None:
    """Expert 0 is the far C's alone, but computed here: the near A is asked for the rest."""
    world = World({A: range(1, E), C: range(E)})
    world.measure(a=0.010, c=0.030)
    is_kept = np.array([[True, False, False, False]])
    [row] = world.choose([[0, 1, 2, 3]], is_kept=is_kept)
    assert row[1:] == [A] * 3


def test_others_go_before_a_disfavoured_peer_unless_they_are_much_slower() -> None:
    world = World({A: range(E), B: range(E)})
    world.measure(a=0.010, b=0.015)
    assert world.choose([[0, 3, 7, 11]]) == [[A] * 4]
    world.replicas.disfavoured = frozenset({A})
    world.replicas.refresh_soon()
    assert world.choose([[0, 3, 7, 11]]) == [[B] * 4]
    of_a = sum(row.count(A) for row in world.choose(random_ids(200)))
    assert 0 < of_a < 200 * K / 3, "of a prefill it gets less"
    world.measure(a=0.010, b=0.100, n=100)
    assert world.choose([[0, 3, 7, 11]]) == [[A] * 4]
    world.replicas.disfavoured = frozenset()
