"""Hand-overs are counted only while they shall be, and only those that were waited for tell how long a thread takes to wake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest

from swarm.backbone.bridge import HandOver
from swarm.backbone.engine import Engine
from swarm.bench.hand_overs import HandOverWatch, n_wakeups


class FakeEngine:
    def __init__(self) -> None:
        self.tell: Callable[[HandOver], None] = lambda hand_over: None

    def watch_hand_overs(self, watcher: Callable[[HandOver], None]) -> None:
        self.tell = watcher


def hand_over(*, to_loop_s: float, back_s: float, is_waited: bool = True) -> HandOver:
    done_s = 10.0
    return HandOver(
        asked_s=0.0,
        began_s=to_loop_s,
        awaited_s=done_s - 1 if is_waited else done_s + 1,
        done_s=done_s,
        taken_s=done_s + back_s,
    )


def test_medians_are_of_what_was_counted_and_of_what_was_waited_for() -> None:
    engine = FakeEngine()
    watch = HandOverWatch(cast(Engine, engine))
    engine.tell(hand_over(to_loop_s=9, back_s=9))
    with watch.counting():
        for to_loop_s, back_s in ((1, 4), (2, 5), (3, 6)):
            engine.tell(hand_over(to_loop_s=to_loop_s, back_s=back_s))
        engine.tell(hand_over(to_loop_s=2, back_s=100, is_waited=False))
    engine.tell(hand_over(to_loop_s=9, back_s=9))
    figures = watch.figures()
    assert figures["to_loop_s"] == 2
    assert figures["back_s"] == 5
    assert figures["waited_share"] == 0.75


def test_nothing_counted_is_no_figure() -> None:
    figures = HandOverWatch(cast(Engine, FakeEngine())).figures()
    assert set(figures.values()) == {None}


def test_a_thread_that_sleeps_is_counted_and_one_that_is_not_there_is_not_known() -> None:
    me = threading.get_native_id()
    before = n_wakeups(me)
    if before is None:
        pytest.skip("this system does not tell how often a thread slept")
    for _ in range(3):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    after = n_wakeups(me)
    assert after is not None
    assert after >= before
    assert n_wakeups(2**31 - 1) is None
