"""A whole swarm on this machine, in processes of its own: a relay with the registry, peers, a backbone.

For the demo, `verify`, examples and tests. Children leave when their parent does: they watch their standard input, which
closes with the parent however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from swarm.errors import SwarmError
from swarm.ids import format_index_set

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0  # start of Python, loading of a slice; guessed for a busy machine
STOP_TIMEOUT_S = 5.0
LINE_LIMIT_BYTES = 1 << 20
PROGRAM = ("swarm",)


class ProcessFailed(SwarmError):
    """A child process ended, or did not get ready; the message ends with what it printed last."""


@dataclass(slots=True)
class Child:
    """One child process that said it is ready.

    Attributes:
        ready: the object of its `ready` line.
        arguments, program: how it was started, for starting it again.
    """

    arguments: tuple[str, ...]
    home: Path
    process: asyncio.subprocess.Process
    ready: dict[str, Any]
    watcher: asyncio.Task[None]
    last_lines: list[str] = field(default_factory=list)
    program: tuple[str, ...] = PROGRAM

    @property
    def pid(self) -> int:
        """The operating system's process id."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    async def kill(self) -> None:
        """End it as `kill -9` does, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.watcher

    def strike(self) -> None:
        """End it as `kill -9` does, without waiting: for somebody who watches a clock. `kill` still has to be awaited."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def suspend(self) -> None:
        """Stop it in its tracks (SIGSTOP): it hangs, its sockets stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def resume(self) -> None:
        """Let a suspended process go on (SIGCONT)."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """Ask it to leave (SIGTERM), without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    async def stop(self) -> None:
        """Let it leave gracefully, by closing its input; end it hard if it does not within a few seconds."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            await self.kill()
        await self.watcher


class LocalSwarm:
    """Use as `async with LocalSwarm(folder) as swarm`; leaving ends every child."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds a home (keys, cache) for each child, so that they share no identity."""
        self._folder = folder
        self.relay: Child | None = None
        self.backbone: Child | None = None
        self.peers: list[Child] = []
        self._children: list[Child] = []  # every one that got ready, from that moment: leaving ends them
        self._n_relays = 0  # started beside the first
        self._n_named = 0  # homes given to peers; one that failed to start keeps its own

    async def __aenter__(self) -> Self:
        self.relay = await self._start("relay", ("relay", "--host", "127.0.0.1", "--port", "0"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        relays = [child for child in self._children if child.arguments[0] == "relay"]
        others = [child for child in self._children if child.arguments[0] != "relay"]
        try:  # who leaves says so to a relay, and waits seconds for one that has gone
            await asyncio.gather(*(child.stop() for child in others))
        finally:
            await asyncio.gather(*(child.stop() for child in relays))

    @property
    def registry(self) -> str:
        """`swarm://NODEID@host:port` of the relay."""
        if self.relay is None:
            raise ProcessFailed("the relay is not running")
        return str(self.relay.ready["registry"])

    async def add_peer(
        self, experts: Sequence[int] | Path | Literal["auto"], *options: str, program: Sequence[str] = PROGRAM
    ) -> Child:
        """Start a peer that holds these experts of every MoE layer, or a slice file's, and wait until it is announced.

        Args:
            program: module and arguments that stand for `swarm`.
        """
        peer = await self._start(self._name_peer(), self._join(experts, options), program)
        self.peers.append(peer)
        return peer

    async def add_relay(self, *options: str) -> Child:
        """Start a further registry node, in a ring with the first, with a key of its own, and wait until it listens."""
        self._n_relays += 1
        arguments = ("relay", "--host", "127.0.0.1", "--port", "0", "--ring", self.registry, *options)
        return await self._start(f"relay{self._n_relays}", arguments)

    def _name_peer(self) -> str:
        """Return a home of its own, taken before the start so that two starts at once do not share an identity."""
        self._n_named += 1
        return f"peer{self._n_named - 1}"

    def _join(self, experts: Sequence[int] | Path | Literal["auto"], options: Sequence[str]) -> tuple[str, ...]:
        if isinstance(experts, Path):
            held = ("--slice", str(experts))
        else:
            held = ("--experts", experts if isinstance(experts, str) else format_index_set(experts))
        return ("join", *held, "--host", "127.0.0.1", "--registry", self.registry, *options)

    async def add_peers(self, n_peers: int, n_expert: int, *options: str, faulty: Sequence[str] = ()) -> None:
        """Start peers that hold equal contiguous shares of the experts, all at once.

        Args:
            faulty: further options for the first of them.
        """
        starts = []
        for i, share in enumerate(contiguous_shares(n_expert, n_peers)):
            extra = (*options, *(faulty if i == 0 else ()))
            starts.append(self._start(self._name_peer(), self._join(share, extra)))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        self.peers += [outcome for outcome in outcomes if isinstance(outcome, Child)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def start_backbone(self, model_file: Path, *options: str) -> Child:
        """Start a backbone with its gateway on a free port; its `ready` has the `url` of the API.

        It is ready before its peers are: `/health` tells when every expert has one.
        """
        arguments = ("serve", "--model", str(model_file), "--host", "127.0.0.1", "--gateway", "127.0.0.1:0")
        self.backbone = await self._start("backbone", (*arguments, "--registry", self.registry, *options))
        return self.backbone

    async def restart(self, peer: Child) -> Child:
        """Start a peer again as it was, with the same identity; return the new child."""
        index = self.peers.index(peer)
        self.peers[index] = await self._start(peer.home.name, peer.arguments, peer.program)
        return self.peers[index]

    async def _start(self, name: str, arguments: tuple[str, ...], program: Sequence[str] = PROGRAM) -> Child:
        home = self._folder / name
        # One OpenMP thread each (no spinning): several processes share this machine's cores (ARCHITECTURE.md).
        environment = os.environ | {"SWARM_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *program,
            *arguments,
            "--json",
            "--until-eof",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            limit=LINE_LIMIT_BYTES,
        )
        lines: list[str] = []
        ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        watcher = asyncio.create_task(_watch(process, name, lines, ready), name=f"watch {name}")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                waits: list[asyncio.Future[Any]] = [ready, watcher]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        except BaseException:  # cancelled: nobody else knows this child yet
            await _end(process, watcher)
            raise
        if not ready.done():
            await _end(process, watcher)
            raise ProcessFailed(f"{name} did not get ready: {' / '.join(lines[-5:]) or 'it printed nothing'}")
        child = Child(arguments, home, process, ready.result(), watcher, lines, tuple(program))
        self._children.append(child)  # here, for whoever awaits this may be cancelled in this very tick
        return child


def contiguous_shares(n_expert: int, n_peers: int) -> list[range]:
    """Return `n_peers` ranges that cover experts 0 to n_expert - 1 in order, their sizes differing by at most one."""
    if not 1 <= n_peers <= n_expert:
        raise ValueError(f"number of peers out of range: got {n_peers}, expected 1 to {n_expert}")
    cuts = [n_expert * i // n_peers for i in range(n_peers + 1)]
    return [range(low, high) for low, high in itertools.pairwise(cuts)]


async def _end(process: asyncio.subprocess.Process, watcher: asyncio.Task[None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await watcher


async def _watch(
    process: asyncio.subprocess.Process, name: str, lines: list[str], ready: asyncio.Future[dict[str, Any]]
) -> None:
    """Read a child's output to its end: the `ready` line, and the last few others for error messages."""
    assert process.stdout is not None
    async for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip()
        if line.startswith("{") and not ready.done():
            try:
                event = json.loads(line)
            except ValueError:
                event = {}
            if event.get("event") == "ready":
                ready.set_result(event)
                continue
        logger.debug("%s: %s", name, line)
        lines.append(line)
        del lines[:-20]
    await process.wait()
