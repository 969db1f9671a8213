"""A question to the person at the terminal: a line is the answer, the loop goes on meanwhile, and Ctrl-C is obeyed."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import threading
from collections.abc import Iterator

import pytest
import typer

from swarm.cli import question
from swarm.cli.question import ask, confirm, is_person_there

pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
LIMIT_S = 20.0


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The person's end and the program's end of a terminal."""
    person, program = pty.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def answer_of(terminal: tuple[int, int], *lines: bytes, default: bool = True) -> bool:
    person, program = terminal

    async def main() -> bool:
        asked = asyncio.create_task(ask("Join?", default=default, fd=program))
        for line in lines:
            await asyncio.sleep(0)
            os.write(person, line)
        async with asyncio.timeout(LIMIT_S):
            return await asked

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("line", "expected"),
    [(b"y\n", True), (b"YES\n", True), (b"\n", True), (b"n\n", False), (b" no \n", False), (b"\x04", False)],
)
def test_a_line_is_the_answer_and_the_end_of_input_a_no(terminal: tuple[int, int], line: bytes, expected: bool) -> None:
    assert answer_of(terminal, line) is expected


def test_an_empty_line_is_the_default(terminal: tuple[int, int]) -> None:
    assert answer_of(terminal, b"\n", default=False) is False


def test_what_is_no_answer_is_asked_again(terminal: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> bool:
        asked = asyncio.create_task(ask("Join?", fd=terminal[1]))
        os.write(terminal[0], b"perhaps\n")
        async with asyncio.timeout(LIMIT_S):
            while "please answer" not in capsys.readouterr().err:  # noqa: ASYNC110
                await asyncio.sleep(0)
            os.write(terminal[0], b"n\n")
            return await asked

    assert asyncio.run(main()) is False


def test_everything_else_goes_on_and_who_is_cancelled_waits_no_more(terminal: tuple[int, int]) -> None:
    async def main() -> int:
        n_ticks = 0
        asked = asyncio.create_task(ask("Join?", fd=terminal[1]))
        for _ in range(100):
            await asyncio.sleep(0)
            n_ticks += 1
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        return n_ticks

    assert asyncio.run(main()) == 100


def test_nobody_is_there_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    assert not is_person_there()
    assert confirm("trust it?") is False


def test_ctrl_c_ends_a_question_that_holds_the_loop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asyncio's own handler only notes the signal for a loop that waits for the answer."""
    monkeypatch.setattr(question.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    before = signal.getsignal(signal.SIGINT)

    def wait_for_an_answer(text: str, *, err: bool) -> bool:
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        threading.Timer(0.05, signal.pthread_kill, [main_thread, signal.SIGINT]).start()
        threading.Event().wait(LIMIT_S)
        raise AssertionError("Ctrl-C was not obeyed")

    monkeypatch.setattr(typer, "confirm", wait_for_an_answer)

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):
            confirm("trust it?")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is before


class Typed:
    """A terminal at which the person does one thing."""

    def __init__(self, does: str | type[BaseException]) -> None:
        self._does = does

    def isatty(self) -> bool:
        return True

    def readline(self, *_: int) -> str:
        if isinstance(self._does, str):
            return self._does
        raise self._does

    def fileno(self) -> int:
        raise OSError


@pytest.mark.parametrize(("typed", "expected"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_question_that_holds_the_loop_up_takes_the_end_of_input_for_a_no(
    monkeypatch: pytest.MonkeyPatch, typed: str, expected: bool
) -> None:
    monkeypatch.setattr("sys.stdin", Typed(typed))
    assert confirm("trust it?") is expected


def test_ctrl_c_at_a_question_in_a_task_group_is_no_failure_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Typed(KeyboardInterrupt))

    async def main() -> None:
        async with asyncio.TaskGroup():
            confirm("trust it?")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
