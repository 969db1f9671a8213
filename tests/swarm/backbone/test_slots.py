"""Where a prompt goes, over hand-made slots and texts."""

from __future__ import annotations

from swarm.backbone.prefix_cache import PrefixCache, Tokens, as_tokens
from swarm.backbone.slots import Seat, Slot, choose_seat

SYSTEM = list(range(1000, 1200))


def slot(lane: int, sequence: int, tokens: list[int], *, is_busy: bool = False, used_at: float = 0.0) -> Slot:
    origin = lane * 10 + sequence + 1
    kept = as_tokens([] if is_busy else tokens)
    return Slot(lane=lane, sequence=sequence, tokens=kept, origin=origin, is_busy=is_busy, used_at=used_at)


def choose(
    lanes: list[list[Slot]],
    prompt: list[int],
    cache: PrefixCache | None = None,
    texts: dict[int, Tokens] | None = None,
) -> Seat:
    seat = choose_seat(lanes, cache or PrefixCache(0), as_tokens(prompt), texts or {})
    assert seat is not None
    return seat


def test_an_empty_slot_is_taken_first_and_then_the_one_unused_longest() -> None:
    old, new, empty = slot(0, 0, [1] * 50, used_at=1), slot(0, 1, [2] * 50, used_at=2), slot(0, 2, [])
    seat = choose([[new, old, empty]], [5, 6, 7])
    assert (seat.slot, seat.n_kept, seat.source, seat.is_saved) == (empty, 0, None, False)
    seat = choose([[new, old]], [5, 6, 7])
    assert (seat.slot, seat.is_saved) == (old, True), "what it held is offered to the cache"


def test_a_conversation_goes_on_where_it_was() -> None:
    mine = slot(0, 1, [*SYSTEM, 1, 2, 3, 4])
    seat = choose([[slot(0, 0, []), mine]], [*SYSTEM, 1, 2, 3, 9, 9])
    assert (seat.slot, seat.source, seat.n_kept, seat.is_saved) == (mine, mine, 203, False)


def test_another_conversation_copies_the_system_prompt_and_leaves_the_first_alone() -> None:
    first, empty = slot(0, 0, [*SYSTEM, *range(300)]), slot(0, 1, [])
    seat = choose([[first, empty]], [*SYSTEM, 900, 901])
    assert (seat.slot, seat.source, seat.n_kept) == (empty, first, 200)


def test_with_no_other_place_the_first_gives_way_and_is_saved() -> None:
    first = slot(0, 0, [*SYSTEM, *range(300)])
    seat = choose([[first]], [*SYSTEM, 900, 901])
    assert (seat.slot, seat.source, seat.n_kept, seat.is_saved) == (first, first, 200, True)


def test_a_text_at_work_lends_its_beginning_within_its_lane() -> None:
    busy, free, elsewhere = slot(0, 0, [], is_busy=True), slot(0, 1, []), slot(1, 0, [])
    texts = {busy.origin: as_tokens([*SYSTEM, 1])}
    seat = choose([[busy, free], [elsewhere]], [*SYSTEM, 2], texts=texts)
    assert (seat.slot, seat.source, seat.n_kept) == (free, busy, 200)
    seat = choose([[busy], [elsewhere]], [*SYSTEM, 2], texts=texts)
    assert (seat.slot, seat.source, seat.n_kept) == (elsewhere, None, 0)


def test_the_cache_serves_every_lane_and_the_emptier_one_is_taken() -> None:
    cache = PrefixCache(10_000)
    cache.add(as_tokens([*SYSTEM, 5]), 77, "state", 100)
    lanes = [[slot(0, 0, [], is_busy=True), slot(0, 1, [])], [slot(1, 0, []), slot(1, 1, [])]]
    seat = choose(lanes, [*SYSTEM, 5, 6], cache)
    assert seat.slot is lanes[1][0]
    assert seat.source is cache.longest(as_tokens(SYSTEM))[0]
    assert seat.n_kept == 201


def test_a_slot_is_preferred_to_the_cache_when_both_have_as_much() -> None:
    cache = PrefixCache(10_000)
    cache.add(as_tokens(SYSTEM), 77, "state", 100)
    mine = slot(0, 0, SYSTEM)
    assert choose([[mine]], [*SYSTEM, 5], cache).source is mine


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    mine = slot(0, 0, SYSTEM)
    assert choose([[mine]], SYSTEM).n_kept == len(SYSTEM) - 1
    cache = PrefixCache(10_000)
    cache.add(as_tokens(SYSTEM), 77, "state", 100)
    assert choose([[slot(0, 0, [])]], SYSTEM, cache).n_kept == len(SYSTEM) - 1


def test_a_little_more_of_the_prompt_does_not_outweigh_an_emptier_lane() -> None:
    crowded = [slot(0, index, [], is_busy=True) for index in range(3)] + [slot(0, 3, [7, 8, 9])]
    empty = [slot(1, index, []) for index in range(4)]
    assert choose([crowded, empty], [7, 8, 9, 10]).slot is empty[0]
    crowded[3].tokens = as_tokens(SYSTEM)
    assert choose([crowded, empty], [*SYSTEM, 10]).slot is crowded[3]


def test_nothing_is_free() -> None:
    assert choose_seat([[slot(0, 0, [], is_busy=True)]], PrefixCache(0), as_tokens([1, 2]), {}) is None
