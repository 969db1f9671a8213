"""When the emulator may wake."""

from __future__ import annotations

import itertools

from swarm.emulation.moderation import BURST, GAP_NS, Moderation

START = 5_000_000_000


def woken(moderation: Moderation, now_ns: int, n: int, each_ns: int) -> list[int]:
    """Return when each of `n` wake-ups comes, if there is work again `each_ns` after the last."""
    times = []
    for _ in range(n):
        now_ns += moderation.pause_ns(now_ns)
        times.append(now_ns)
        now_ns += each_ns
    return times


def test_a_burst_is_not_put_off() -> None:
    moderation = Moderation(START)
    assert [moderation.pause_ns(START) for _ in range(BURST)] == [0] * BURST
    assert moderation.pause_ns(START) == GAP_NS


def test_in_a_flood_wake_ups_keep_their_distance_however_long_each_takes() -> None:
    for each_ns in (0, 1000, GAP_NS // 2):
        times = woken(Moderation(START), START, 200, each_ns)[-50:]
        assert {later - earlier for earlier, later in itertools.pairwise(times)} == {GAP_NS}


def test_who_is_slower_than_the_distance_is_never_put_off() -> None:
    times = woken(Moderation(START), START, 200, GAP_NS)
    assert times == [START + i * GAP_NS for i in range(200)]


def test_silence_allows_another_burst_and_no_more() -> None:
    moderation = Moderation(START)
    now_ns = woken(moderation, START, 100, 0)[-1] + 1000 * BURST * GAP_NS
    assert woken(moderation, now_ns, BURST, 0) == [now_ns] * BURST
    assert moderation.pause_ns(now_ns) == GAP_NS
