"""Child processes: they start, fail with their own words, come back as themselves, and never outlive their parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation import processes
from swarm.emulation.processes import Child, LocalSwarm, ProcessFailed

GONE_WITHIN_S = 10.0

PARENT = """
import asyncio, json, sys
from pathlib import Path
from swarm.emulation.processes import LocalSwarm

async def main():
    async with LocalSwarm(Path(sys.argv[1])) as swarm:
        await swarm.add_peer(range(2), "--model", sys.argv[2], "--layers", "0")
        print(json.dumps([swarm.relay.pid, swarm.peers[0].pid]), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Return whether the process exists and has not ended; an orphan may stay as a zombie where nobody reaps."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a child outlived its parent"
        await asyncio.sleep(0.02)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """Every process that was started, also those that nobody returned."""
    found: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def remember(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*arguments, **options)
        found.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remember)
    return found


async def test_children_end_when_their_parent_is_killed(tmp_path: Path, tiny_moe: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        str(tmp_path),
        str(tiny_moe / "model-Q8_0.gguf"),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        pids = json.loads(await parent.stdout.readline())
    assert all(map(is_running, pids))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await wait_gone(*pids)


async def test_a_peer_comes_back_as_itself_and_leaving_ends_every_child(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Child] = []
    stop = Child.stop

    async def noted(child: Child) -> None:
        await stop(child)
        ended.append(child)

    monkeypatch.setattr(Child, "stop", noted)
    options = ("--model", str(tiny_moe / "model-Q8_0.gguf"), "--layers", "0-1")
    async with LocalSwarm(tmp_path) as swarm:
        await swarm.add_peers(2, 4, *options)
        first, second = swarm.peers
        assert [peer.ready["experts"] for peer in swarm.peers] == [
            "experts 0-1 of layers 0-1",
            "experts 2-3 of layers 0-1",
        ]
        assert first.ready["node"] != second.ready["node"]
        await first.kill()
        assert not first.is_running
        again = await swarm.restart(first)
        assert again.ready["node"] == first.ready["node"]
        assert again.ready["experts"] == first.ready["experts"]
        assert again.pid != first.pid
        assert swarm.peers == [again, second]
        assert swarm.relay is not None
        children = [again, second, swarm.relay]
    assert [child.process.returncode for child in children] == [0, 0, 0], "each left by itself"
    assert ended[-1] is swarm.relay, "the others say goodbye to it"


async def test_a_child_that_fails_says_why_and_the_others_stay(tmp_path: Path, tiny_moe: Path) -> None:
    options = ("--model", str(tiny_moe / "model-Q8_0.gguf"), "--layers", "0")
    async with LocalSwarm(tmp_path) as swarm:
        with pytest.raises(ProcessFailed, match=r"peer0 did not get ready: .*no such experts: got 40"):
            await swarm.add_peer([40], *options)
        assert swarm.peers == []
        with pytest.raises(ProcessFailed, match=r"did not get ready: .*cannot plant a fault"):
            await swarm.add_peers(2, 4, *options, faulty=("--plant-fault", "0:3"))
        (left,) = swarm.peers
        assert left.is_running, "it is known, so leaving ends it"
    assert left.process.returncode == 0


async def test_children_that_got_ready_before_a_start_was_given_up_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[asyncio.subprocess.Process]
) -> None:
    """`add_peers` waits for all: what is ready already must have an owner when it is cancelled."""
    _script(monkeypatch, READY_UNLESS_FIRST)
    async with LocalSwarm(tmp_path) as swarm:
        task = asyncio.create_task(swarm.add_peers(3, 3))
        async with asyncio.timeout(30):
            while len(swarm._children) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not task.done(), "the first peer never gets ready"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(started) == 4
    assert all(process.returncode is not None for process in started), "a child was lost"
    assert sorted(process.returncode or 0 for process in started) == [-signal.SIGKILL, 0, 0, 0]


async def test_peers_that_start_at_once_share_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _script(monkeypatch, READY)
    async with LocalSwarm(tmp_path) as swarm:
        await asyncio.gather(swarm.add_peer([0]), swarm.add_peer([1]), swarm.add_peers(2, 2))
        assert len({peer.home for peer in swarm.peers}) == 4


async def test_a_child_that_was_replaced_while_it_ran_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[asyncio.subprocess.Process]
) -> None:
    _script(monkeypatch, READY)
    async with LocalSwarm(tmp_path) as swarm:
        first = await swarm.add_peer([0])
        second = await swarm.restart(first)
        assert swarm.peers == [second]
    assert [process.returncode for process in started] == [0, 0, 0]


# A child that is quick to start: ready at once, and gone when its input closes.
READY = """
import json, sys
print(json.dumps({"event": "ready", "registry": "127.0.0.1:1"}), flush=True)
sys.stdin.read()
"""
READY_UNLESS_FIRST = (
    """
import os, time
if os.environ["SWARM_HOME"].endswith("peer0"):
    time.sleep(60)
"""
    + READY
)


def _script(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let every child run `program` instead of a command."""
    start = asyncio.create_subprocess_exec

    async def play(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", program, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", play)


async def test_a_child_that_is_late_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[asyncio.subprocess.Process]
) -> None:
    monkeypatch.setattr(processes, "READY_TIMEOUT_S", 0.01)
    with pytest.raises(ProcessFailed, match="relay did not get ready: it printed nothing"):
        async with LocalSwarm(tmp_path):
            pytest.fail("it must not get ready")
    (process,) = started
    assert process.returncode == -signal.SIGKILL


async def test_giving_up_a_start_ends_the_child(tmp_path: Path, started: list[asyncio.subprocess.Process]) -> None:
    task = asyncio.create_task(LocalSwarm(tmp_path).__aenter__())
    while not started:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (process,) = started
    assert process.returncode == -signal.SIGKILL


async def test_a_peer_can_be_made_to_hang_go_on_leave_and_die(tmp_path: Path, tiny_moe: Path) -> None:
    async with LocalSwarm(tmp_path) as swarm:
        options = ("--model", str(tiny_moe / "model-Q8_0.gguf"), "--layers", "0")
        hangs, leaves = await swarm.add_peer(range(2), *options), await swarm.add_peer(range(2), *options)
        hangs.suspend()
        while _state(hangs.pid) != "T":
            pass
        hangs.resume()
        while _state(hangs.pid) == "T":
            pass
        assert hangs.is_running
        leaves.leave()
        assert await leaves.process.wait() == 0, "it left as it should"
        hangs.strike()
        assert await hangs.process.wait() == -signal.SIGKILL


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
