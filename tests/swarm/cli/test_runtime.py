"""Signals and the end of standard input end a daemon cleanly; errors pass through; progress is quiet off a terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.cli import runtime
from swarm.cli.runtime import ProgressBars, print_json, run_async, run_daemon, set_up_logging, tame_openmp
from swarm.errors import UserError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


class Daemon:
    """Runs until it is cancelled, and tells whether it could clean up."""

    def __init__(self, when_running: Callable[[], None] = lambda: None) -> None:
        self._when_running = when_running
        self.is_clean = False

    async def run(self) -> None:
        try:
            self._when_running()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a cleanup that awaits, as a withdrawal does
            self.is_clean = True


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end_of_a_daemon(number: signal.Signals) -> None:
    daemon = Daemon(send(number))
    run_daemon(daemon.run(), until_eof=False)
    assert daemon.is_clean


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, asyncio.CancelledError), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_before_a_daemon_is_ready_is_no_clean_end(
    number: signal.Signals, expected: type[BaseException]
) -> None:
    daemon = Daemon(send(number))
    with pytest.raises(expected):
        run_daemon(daemon.run(), until_eof=False, is_ready=lambda: False)
    assert daemon.is_clean


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, asyncio.CancelledError), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_before_a_busy_task_group_is_ready_is_no_clean_end(
    number: signal.Signals, expected: type[BaseException]
) -> None:
    daemon = Daemon(send(number))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(daemon.run())
            await asyncio.Event().wait()

    with pytest.raises(expected):
        run_daemon(main(), until_eof=False, is_ready=lambda: False)
    assert daemon.is_clean


def test_the_end_of_standard_input_before_a_daemon_is_ready_is_no_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_on_eof", lambda loop, action: loop.call_soon(action))
    with pytest.raises(asyncio.CancelledError):
        run_daemon(Daemon().run(), until_eof=True, is_ready=lambda: False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_a_daemon_got_ready_is_a_clean_end(number: signal.Signals) -> None:
    ready = threading.Event()

    def get_ready() -> None:
        ready.set()
        send(number)()

    daemon = Daemon(get_ready)
    run_daemon(daemon.run(), until_eof=False, is_ready=ready.is_set)
    assert daemon.is_clean


def test_a_signal_ends_a_daemon_whose_task_group_is_busy() -> None:
    daemon = Daemon(send(signal.SIGTERM))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(daemon.run())
            await asyncio.Event().wait()

    run_daemon(main(), until_eof=False)
    assert daemon.is_clean


def test_sigterm_cancels_a_command_that_is_no_daemon_and_is_not_hidden() -> None:
    daemon = Daemon(send(signal.SIGTERM))
    with pytest.raises(asyncio.CancelledError):
        run_async(daemon.run())
    assert daemon.is_clean


def test_ctrl_c_of_a_command_that_is_no_daemon_is_not_hidden() -> None:
    daemon = Daemon(send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_async(daemon.run())
    assert daemon.is_clean


def test_a_result_is_returned() -> None:
    async def main() -> int:
        return 7

    assert run_async(main()) == 7


@pytest.mark.parametrize("until_eof", [False, True])
def test_an_error_of_a_daemon_passes_through_as_it_is(until_eof: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_on_eof", lambda loop, action: None)
    error = UserError("the port is taken")

    async def main() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        run_daemon(main(), until_eof=until_eof)
    assert caught.value is error


def test_the_end_of_standard_input_is_a_clean_end_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def at_once(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
        asked.append(1)
        loop.call_soon(action)

    monkeypatch.setattr(runtime, "_on_eof", at_once)
    daemon = Daemon()
    run_daemon(daemon.run(), until_eof=True)
    assert daemon.is_clean
    run_daemon(Daemon(send(signal.SIGTERM)).run(), until_eof=False)
    assert asked == [1]


def test_what_is_written_to_standard_input_is_not_its_end() -> None:
    async def main() -> None:
        read_end, write_end = os.pipe()
        ended = asyncio.Event()
        runtime._on_eof(asyncio.get_running_loop(), ended.set, read_end)
        (watcher,) = [thread for thread in threading.enumerate() if thread.name == "stdin"]
        os.write(write_end, b"a line\n")
        assert watcher.is_alive()
        assert not ended.is_set()
        os.close(write_end)
        await ended.wait()
        os.close(read_end)

    asyncio.run(main())


def test_a_standard_input_that_is_not_open_counts_as_ended() -> None:
    async def main() -> None:
        read_end, write_end = os.pipe()
        os.close(write_end)
        os.close(read_end)
        ended = asyncio.Event()
        runtime._on_eof(asyncio.get_running_loop(), ended.set, read_end)
        await ended.wait()

    asyncio.run(main())


# Output


def test_json_is_one_line_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "two\nlines", "n": 1})
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "two\nlines", "n": 1}


def test_off_a_terminal_progress_is_a_line_for_each_quarter_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        for n in range(1001):
            bars.update("hashing", n, 1000, is_bytes=True)
        bars.update("hashing", 1000, 1000)
        bars.update("nothing", 0, 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"hashing: {share}%" for share in (25, 50, 75, 100)]


def test_work_of_one_step_says_only_that_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        bars.update("loading", 1, 1)
    assert capsys.readouterr().err == "loading: 100%\n"


# Settings


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """Give the root logger's handlers and level back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    noisy = {name: logging.getLogger(name).level for name in ("quic", "asyncio", "aiohttp.access")}
    root.handlers[:] = []
    yield
    root.handlers[:], root.level = handlers, level
    for name, former in noisy.items():
        logging.getLogger(name).setLevel(former)


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(
    ("verbosity", "expected"), [(0, ["warning"]), (1, ["info", "warning"]), (2, ["debug", "info", "warning"])]
)
def test_logs_go_to_stderr_by_verbosity(
    verbosity: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(verbosity)
    set_up_logging(verbosity)  # twice makes no double lines
    logger = logging.getLogger("swarm.test")
    for name in ("debug", "info", "warning"):
        getattr(logger, name)("%s line", name)
    logging.getLogger("quic").warning("noise of a library")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[-2] for line in err.splitlines()] == expected


def test_a_spin_count_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    tame_openmp()
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    tame_openmp()
    assert os.environ["GOMP_SPINCOUNT"] == runtime.SPIN_COUNT


def test_freed_arrays_go_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """if True:
        import ctypes
        from swarm.cli.runtime import give_memory_back
        give_memory_back()
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
        libc.free(libc.malloc(30 << 20))  # from here on glibc would keep blocks of up to 30 MB
        block = libc.malloc(8 << 20)
        where = [line for line in open("/proc/self/maps") if "[heap]" in line]
        start, end = (int(part, 16) for part in where[0].split()[0].split("-"))
        print(start <= block < end)
    """
    if not Path("/proc/self/maps").exists() or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc, and Linux's /proc")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
