"""Processes on the virtual internet: relays, and the members of `member.py`, each on a host of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from swarm.emulation.hosts import Host
from swarm.emulation.internet import Router, VirtualInternet
from swarm.emulation.nat import NatKind
from swarm.emulation.path import PathSpec

MEMBER = Path(__file__).with_name("member.py")
READY_S = 60.0  # on a busy machine
ANSWER_S = 60.0


class Program:
    """A process that prints lines of JSON and may be asked more."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, host: Host, *arguments: str, home: Path) -> Program:
        """Start Python with these arguments on a host."""
        home.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
        log = home / "log"
        environment = os.environ | {"SWARM_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *host.command(sys.executable, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=environment,
            )
        return cls(process, log)

    async def event(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """Return the next line of JSON; a peer's plan and status are passed over."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):
                        said: dict[str, Any] = json.loads(line)
                        if said.get("event") not in ("plan", "status"):
                            return said
        except TimeoutError:
            pass
        raise AssertionError(f"nothing said: {self._log.read_text()[-2000:]}")

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.event(ANSWER_S)

    def log(self) -> str:
        """Return what it has written to its standard error."""
        return self._log.read_text()

    async def kill(self) -> None:
        """End it as `kill -9` does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class World:
    """A virtual internet with two relays.

    Attributes:
        registry: how members reach the relays.
    """

    def __init__(self, internet: VirtualInternet, folder: Path) -> None:
        self.internet = internet
        self.registry = ""
        self.relays: list[Program] = []
        self._folder = folder
        self._programs: list[Program] = []

    async def start_relays(self, n: int = 2) -> None:
        """Start relays, each on a host with both kinds of IP."""
        found = []
        for i in range(n):
            host = await self.internet.public(f"relay{i}", has_v6=True)
            program = await self.start(host, "-m", "relay", "--host", "::", "--json", "--until-eof", home=f"relay{i}")
            ready = await program.event()
            found.append((host, ready["node"]))
            self.relays.append(program)
        self.registry = ",".join(f"swarm://{node}@{host.address}:7440" for host, node in found)
        self.registry6 = ",".join(f"swarm://{node}@[{host.address6}]:7440" for host, node in found)

    async def start(self, host: Host, *arguments: str, home: str) -> Program:
        """Start Python with these arguments on a host."""
        program = await Program.start(host, *arguments, home=self._folder / home)
        self._programs.append(program)
        return program

    async def member(
        self, role: str, host: Host, *options: str, home: str, is_v6: bool = False
    ) -> tuple[Program, dict[str, Any]]:
        """Start a member, and return it with its `ready`."""
        where = self.registry6 if is_v6 else self.registry
        program = await self.start(host, str(MEMBER), role, "::", where, *options, home=home)
        return program, await program.event()

    async def behind(self, name: str, kind: NatKind, *, hairpin: bool = False) -> tuple[Host, Router]:
        """Make a host behind a router of its own."""
        router = await self.internet.router(f"{name}-router", kind, hairpin=hairpin)
        return await self.internet.inside(name, router), router

    async def end(self) -> None:
        """End every program."""
        await asyncio.gather(*(program.kill() for program in self._programs))


@contextlib.asynccontextmanager
async def world(folder: Path, *, delay_s: float = 0.01, n_relays: int = 2) -> AsyncIterator[World]:
    """Yield a virtual internet with relays."""
    async with VirtualInternet(PathSpec(delay_s=delay_s)) as internet:
        made = World(internet, folder)
        try:
            await made.start_relays(n_relays)
            yield made
        finally:
            await made.end()
