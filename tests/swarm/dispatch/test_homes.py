"""Which equal replicas a sequence meets: few, the same ones, spread over sequences and backbones, and always real holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from swarm.dispatch.homes import MAX_SEQUENCES, MAX_TABLES, N_HOMES, Homes
from swarm.dispatch.placement import NOBODY
from swarm.ids import NodeId

LAYER = 3
E, K = 12, 4
ALL = -1  # every peer is a candidate


def homes_of(*held: Iterable[int], name: bytes = b"") -> Homes:
    """Return the homes over peers 0, 1, ... that hold these experts of LAYER."""
    homes = Homes(name)
    slices = [set(experts) for experts in held]
    masks = [sum((expert in each) << peer for peer, each in enumerate(slices)) for expert in range(E)]
    homes.follow([NodeId(bytes([peer + 1]) * 32) for peer in range(len(slices))], {LAYER: masks})
    return homes


def choose(homes: Homes, asked: Mapping[int, list[int]], candidates: int = ALL) -> dict[int, int]:
    n_peers = len(homes.ranks)
    return homes.choose(LAYER, asked, candidates & ((1 << n_peers) - 1))


def draw(seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).permutation(E)[:K].tolist()
    return found


RING = (range(8), range(4, E), [*range(4), *range(8, E)])  # every expert at two of three


def test_a_sequence_stays_on_its_own_replica_and_several_spread_over_all() -> None:
    homes = homes_of(range(E), range(E), range(E))
    met: dict[int, set[int]] = {}
    for step in range(30):
        for sequence in range(12):
            met.setdefault(sequence, set()).update(choose(homes, {sequence: draw(100 * step + sequence)}).values())
    assert all(len(peers) == 1 for peers in met.values())
    assert set.union(*met.values()) == {0, 1, 2}
    assert homes.n_kept == homes.n_choices == 30 * 12 * K


def test_backbones_with_other_names_prefer_other_replicas() -> None:
    found = {choose(homes_of(range(E), range(E), name=bytes([n])), {0: [5]})[5] for n in range(8)}
    assert found == {0, 1}


def test_sequences_of_one_step_share_the_eldests_home_and_stay_when_it_ends() -> None:
    homes = homes_of(range(E), range(E), range(E))
    alone = {sequence: choose(homes, {sequence: [0]})[0] for sequence in range(N_HOMES)}
    other = next(sequence for sequence in alone if alone[sequence] != alone[0])
    assert set(choose(homes, {0: draw(1), other: draw(2)}).values()) == {alone[0]}, "one more is one more to wait for"
    for step in range(10):
        assert set(choose(homes, {other: draw(step), 100 + step: draw(step + 50)}).values()) == {alone[0]}
        assert set(choose(homes, {other: draw(step)}).values()) == {alone[0]}


def test_one_peer_is_met_where_one_holds_all_that_is_asked_for() -> None:
    homes = homes_of(*RING)
    for sequence in range(2 * N_HOMES):
        assert set(choose(homes, {sequence: [4, 5, 6, 7]}).values()) <= {0, 1}
        assert len(set(choose(homes, {sequence: [4, 5, 6, 7]}).values())) == 1
        assert len(set(choose(homes, {sequence: [0, 5, 9]}).values())) == 2, "no one of them holds these"


def test_a_step_meets_no_more_peers_than_if_it_were_chosen_for_by_itself() -> None:
    """Against plain greedy cover, which knows no homes."""
    rng = np.random.default_rng(4)
    for _ in range(100):
        slices = [set(rng.permutation(E)[: rng.integers(3, 9)].tolist()) for _ in range(6)]
        homes = homes_of(*slices)
        experts = [expert for expert in draw(int(rng.integers(1000))) if any(expert in each for each in slices)]
        if not experts:
            continue
        owner_of = choose(homes, {1: experts})
        assert all(expert in slices[owner] for expert, owner in owner_of.items())
        left, n_greedy = set(experts), 0
        while left:
            left -= max(slices, key=lambda each: len(each & left))
            n_greedy += 1
        assert len(set(owner_of.values())) <= n_greedy + 1
        if n_greedy == 1:
            assert len(set(owner_of.values())) == 1


def test_a_home_is_even_and_an_expert_goes_where_it_went_before() -> None:
    homes = homes_of(*RING)
    n_pairs: Counter[int] = Counter()
    for step in range(400):
        n_pairs.update(choose(homes, {3: draw(step)}).values())
    (_, first), (_, second), *rest = n_pairs.most_common()
    assert sum(n for _, n in rest) < 0.25 * (first + second), "two hold everything"
    assert first / (first + second) < 0.6
    assert 0.6 < homes.n_kept / homes.n_choices < 1.0, "but where one peer less will do"


def test_a_peer_that_was_taken_for_many_but_is_of_no_use_is_met_by_nobody() -> None:
    """The middle one holds most, but the two at the ends hold everything."""
    homes = homes_of(range(6), range(3, 10), range(6, E))
    for sequence in range(N_HOMES):
        met = {owner for expert in range(E) for owner in choose(homes, {sequence: [0, expert, E - 1]}).values()}
        assert met == {0, 2}


def test_only_candidates_are_met() -> None:
    homes = homes_of(range(E), range(E), range(4))
    assert set(choose(homes, {0: [0, 1, 8]}, candidates=0b010).values()) == {1}
    assert choose(homes, {0: [0, 8]}, candidates=0b100) == {0: 2, 8: NOBODY}


def test_what_nobody_holds_belongs_to_nobody_and_spoils_no_other_choice() -> None:
    homes = homes_of(range(4), range(2, 6))
    owner_of = choose(homes, {0: [3, 5, 11]})
    assert owner_of[11] == NOBODY
    assert owner_of[5] == 1
    assert owner_of[3] in (0, 1)


def test_other_holders_begin_a_new_count_under_the_same_home() -> None:
    homes = homes_of(range(E), range(E))
    choose(homes, {0: [1]})
    homes.follow([NodeId(bytes([9]) * 32), NodeId(bytes([8]) * 32)], {LAYER: [0b11] * E})
    choose(homes, {0: [1]})
    assert (homes.n_choices, homes.n_kept) == (2, 2), "peers under other numbers are not compared"


def test_memory_is_bounded() -> None:
    homes = homes_of(*(range(E) for _ in range(10)))
    for sequence in range(3 * MAX_SEQUENCES):
        choose(homes, {sequence: [0]}, candidates=1 + sequence % 1000)
    assert len(homes._sequences) == MAX_SEQUENCES
    assert len(homes._layers[LAYER].owners) <= MAX_TABLES
