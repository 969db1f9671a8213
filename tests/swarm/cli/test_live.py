"""A daemon's state is redrawn on a terminal when it changes, told elsewhere now and then, and waits for no reader."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from swarm.cli import live
from swarm.cli.live import LiveLines, Shown, can_write
from tests import virtual_time

AT_THE_END = 1  # rich draws once more before it wipes the lines away


def shown_for(shown: LiveLines, seconds: float, *events: tuple[float, Callable[[], None]]) -> None:
    """Run it for so long, in virtual time; events happen at their seconds."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for after_s, event in events:
            loop.call_later(after_s, event)
        task = asyncio.create_task(shown.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()

    virtual_time.run(main())


class Source:
    """What is to be shown, and how often it was asked for."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state
        self.n_rows = 0
        self.n_looks = 0

    def __call__(self) -> Shown:
        self.n_looks += 1
        lines = [f"{self.state} rows {self.n_rows}", "second line"]
        return Shown(lines=lines, state=self.state, figures={"n_rows": self.n_rows})

    def set(self, **state: Any) -> Callable[[], None]:
        return lambda: self.state.update(state)

    def count(self) -> None:
        self.n_rows += 1


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=60), text


def test_json_has_a_line_for_each_change_of_state_and_one_a_minute_for_figures() -> None:
    source, out = Source(path="direct"), io.StringIO()
    rows = [(float(second), source.count) for second in range(2, 100)]
    shown_for(LiveLines(source, as_json=True, stream=out), 125.0, (10.0, source.set(path="relay")), *rows)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [each["event"] for each in told] == ["status"] * len(told)
    assert [each["path"] for each in told] == ["direct", "relay", "relay"]
    assert [each["n_rows"] for each in told] == [0, pytest.approx(9, abs=1), pytest.approx(69, abs=2)]


def test_json_says_nothing_while_nothing_changes() -> None:
    source, out = Source(path="direct"), io.StringIO()
    shown_for(LiveLines(source, as_json=True, stream=out), 3600.0)
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_is_redrawn_only_when_the_lines_have_changed() -> None:
    source = Source(path="direct")
    console, text = terminal()
    shown_for(LiveLines(source, console=console), 100.0, (50.0, source.count))
    assert text.getvalue().count("second line") == 2 + AT_THE_END
    assert "rows 0" in text.getvalue()
    assert "rows 1" in text.getvalue()


def test_a_terminal_is_redrawn_at_most_four_times_a_second_however_often_it_is_asked_for() -> None:
    source = Source(path="direct")
    console, text = terminal()
    shown = LiveLines(source, console=console)

    def change() -> None:
        source.count()
        shown.soon()

    shown_for(shown, 10.0, *[(i / 100, change) for i in range(1, 1000)])
    assert 30 <= text.getvalue().count("second line") <= 10 * 4 + 1 + AT_THE_END


def test_what_has_changed_is_shown_soon_when_it_is_asked_for() -> None:
    source, out = Source(path="direct"), io.StringIO()
    shown = LiveLines(source, as_json=True, stream=out)
    shown_for(shown, 5.9, (5.3, source.set(path="relay")), (5.3, shown.soon))
    assert len(out.getvalue().splitlines()) == 2


def test_a_line_that_is_too_long_for_the_terminal_is_cut() -> None:
    console, text = terminal()
    shown_for(LiveLines(lambda: Shown(lines=["x" * 500, "end"]), console=console), 1.0)
    assert 50 <= text.getvalue().count("x") / (1 + AT_THE_END) < 60


def test_where_nobody_looks_one_line_a_minute_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    source, text = Source(path="direct"), io.StringIO()
    with caplog.at_level(logging.WARNING, live.__name__):
        shown_for(LiveLines(source, console=Console(file=text)), 185.0, (61.0, source.count))
    assert [record.getMessage()[-6:] for record in caplog.records] == ["rows 0", "rows 1", "rows 1"]
    assert text.getvalue() == ""


def test_quiet_says_nothing_and_looks_at_nothing(caplog: pytest.LogCaptureFixture) -> None:
    source = Source(path="direct")
    console, text = terminal()
    shown_for(LiveLines(source, is_quiet=True, console=console), 500.0, (499.0, lambda: None))
    assert (source.n_looks, text.getvalue(), caplog.records) == (0, "", [])


@pytest.mark.skipif(os.name != "posix", reason="elsewhere only sockets can be asked")
def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    try:
        with open(writing, "w", encoding="utf-8") as stream:
            assert can_write(stream)
            os.set_blocking(writing, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writing, bytes(1024))
            os.set_blocking(writing, True)
            assert not can_write(stream)
            source = Source(path="direct")
            shown_for(LiveLines(source, as_json=True, stream=stream), 10.0)  # it would never come back
            assert source.n_looks > 5
            os.read(reading, 1 << 20)
            assert can_write(stream)
            shown_for(LiveLines(source, as_json=True, stream=stream), 10.0)
            assert json.loads(os.read(reading, 1 << 16).strip(b"\0"))["path"] == "direct"
    finally:
        os.close(reading)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere only sockets can be asked")
def test_a_long_line_is_written_only_where_all_of_it_fits() -> None:
    reading, writing = os.pipe()
    state: dict[str, Any] = {"backbones": ["b" * 100] * 100, "n": 0}  # 10 KB: a pipe is ready with room for less

    def look() -> Shown:
        state["n"] += 1  # news at each look
        return Shown(lines=["x"], state=state)

    try:
        with open(writing, "w", encoding="utf-8") as stream:
            # The test's own end, should it be wrong: a writer that waits gets what it waits for.
            rescue = threading.Timer(10.0, lambda: os.read(reading, 1 << 20))
            rescue.start()
            shown_for(LiveLines(look, as_json=True, stream=stream), 60.0)
            rescue.cancel()
            rescue.join()
            assert state["n"] > 50
            assert json.loads(os.read(reading, 1 << 20))["n"] == 1
            assert can_write(stream, 60_000 if sys.platform == "linux" else 10_000)
            assert not can_write(stream, 1 << 21)
    finally:
        os.close(reading)


def test_a_reader_that_has_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w", encoding="utf-8")  # noqa: SIM115
    shown_for(LiveLines(Source(path="direct"), as_json=True, stream=stream), 10.0)
    with contextlib.suppress(BrokenPipeError):  # what it could not write
        stream.close()


def test_what_has_no_file_descriptor_can_be_written() -> None:
    assert can_write(io.StringIO())
