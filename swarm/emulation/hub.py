"""Emulated paths on loopback, without privileges: who dials `hub.front(to=...)` reaches that server over the given path.

    client 127.0.0.1:a -> front 127.0.0.1:f ~~ the path ~~> back 127.0.0.1:b -> server 127.0.0.1:s, and the same way back

A server that others should reach over a path announces its front's address (`--advertise`), not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from swarm.emulation.link import NS_PER_S, LinkSpec
from swarm.emulation.path import PathSpec
from swarm.errors import LocalProtocolError, SwarmError

SocketAddress = tuple[str, int]

STOP_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0  # guessed; an answer with a million records takes a fraction of a second
LINE_LIMIT_BYTES = 16 << 20


class EmulatorFailed(SwarmError):
    """The process that carries the packets ended, or refused a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayStats:
    """What one direction of a path did.

    Attributes:
        name: the front's or pair's name, with `/forth` (client to server) or `/back`.
        bytes_offered, bytes_delivered: whole IP packets.
        drops: how many by cause (`path.Drop`).
        records: [n, 4] int64: entered_ns, due_ns, left_ns (time.monotonic_ns() of this machine) and size_bytes of each
            delivered packet, in the order of leaving; at most pump.MAX_RECORDS.
    """

    name: str
    n_offered: int
    bytes_offered: int
    n_delivered: int
    bytes_delivered: int
    drops: Mapping[str, int]
    records: npt.NDArray[np.int64] = field(repr=False)

    @property
    def delays_s(self) -> npt.NDArray[np.float64]:
        """The one-way delays that were really delivered, [n]."""
        return (self.records[:, 2] - self.records[:, 0]) / NS_PER_S

    @property
    def lateness_s(self) -> npt.NDArray[np.float64]:
        """How much later than due each packet was sent, [n]."""
        return (self.records[:, 2] - self.records[:, 1]) / NS_PER_S

    def slowest_s(self, from_ns: int, to_ns: int) -> float:
        """Return the longest delivered delay of the packets that entered in this time; 0 if there were none."""
        entered = self.records[:, 0]
        chosen = self.records[(entered >= from_ns) & (entered < to_ns)]
        return float((chosen[:, 2] - chosen[:, 0]).max()) / NS_PER_S if len(chosen) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorStats:
    """What the emulator did since it started.

    Attributes:
        ways: by name, two for each path.
        cpu_s, wall_s: what its process used and how long it ran.
        is_real_time: whether it runs before ordinary processes; if not, expect it to be late on a busy machine.
        n_missed: packets for which there was no path.
        n_socket_overflow: packets the kernel dropped before the emulator read them: should be 0.
    """

    ways: Mapping[str, WayStats]
    cpu_s: float
    wall_s: float
    is_real_time: bool
    n_missed: int
    n_socket_overflow: int

    @property
    def lateness_s(self) -> npt.NDArray[np.float64]:
        """Of all packets of all paths, [n]."""
        return np.concatenate([np.zeros(0), *(way.lateness_s for way in self.ways.values())])

    def summary(self) -> dict[str, float]:
        """Return the emulator's own quality, for a run record."""
        late = self.lateness_s
        p50, p99, most = (float(each) for each in np.percentile(late, (50, 99, 100))) if len(late) else (0.0, 0.0, 0.0)
        return {
            "n_delivered": sum(way.n_delivered for way in self.ways.values()),
            "lateness_p50_s": p50,
            "lateness_p99_s": p99,
            "lateness_max_s": most,
            "cpu_share": self.cpu_s / self.wall_s if self.wall_s else 0.0,
            "is_real_time": self.is_real_time,
            "n_socket_overflow": self.n_socket_overflow,
        }


class PumpProcess:
    """The parent's end of `pump`."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()  # one command at a time

    async def start(self) -> None:
        """Start the process; ready for commands when this returns."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "swarm.emulation.pump",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            limit=LINE_LIMIT_BYTES,
        )

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def ask(self, op: str, **arguments: object) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a command, and the bytes that follow it. Raises EmulatorFailed."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise LocalProtocolError("the emulator is not running")
        async with self._lock:
            is_whole = False
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                    await process.stdin.drain()
                    answer = json.loads(await process.stdout.readline())
                    blob = await process.stdout.readexactly(answer["n_blob_bytes"])
                is_whole = True
            except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
                raise EmulatorFailed(f"no answer from the emulator to {op!r}: {error!r}") from error
            finally:
                if not is_whole and process.returncode is None:  # or cancelled: the next answer would be this one's
                    process.kill()
        if "error" in answer:
            raise EmulatorFailed(f"the emulator refused: {answer['error']}")
        return answer, blob

    async def access(self, host: str, up: LinkSpec, down: LinkSpec | None) -> None:
        """Declare a host's access link. Before the paths that use it."""
        await self.ask("access", host=host, up=asdict(up), down=asdict(up if down is None else down))

    async def change(self, name: str, spec: PathSpec, back: PathSpec | None) -> None:
        """Change a path under way."""
        await self.ask("change", name=name, spec=asdict(spec), back=asdict(spec if back is None else back))

    async def stats(self) -> EmulatorStats:
        """Return what was done so far."""
        answer, blob = await self.ask("stats")
        records = np.frombuffer(blob, np.int64).reshape(-1, 4)
        ways: dict[str, WayStats] = {}
        for told in answer["ways"]:
            n = told.pop("n_records")
            ways[told["name"]] = WayStats(**told, records=records[:n])
            records = records[n:]
        return EmulatorStats(ways=ways, **answer["own"])


class EmulatedPaths:
    """Use as `async with EmulatedPaths() as hub`; leaving closes every front."""

    def __init__(self) -> None:
        self._pump = PumpProcess()
        self._names: dict[SocketAddress, str] = {}

    async def __aenter__(self) -> Self:
        await self._pump.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._pump.stop()

    async def access(self, host: str, up: LinkSpec, down: LinkSpec | None = None) -> None:
        """Give a host an access link that all its paths share; `down` defaults to the same as `up`.

        Call it before the fronts that name the host. A second call changes the rate of a link that has one.
        """
        await self._pump.access(host, up, down)

    async def front(
        self,
        *,
        spec: PathSpec,
        to: SocketAddress | None = None,
        back: PathSpec | None = None,
        client: str | None = None,
        server: str | None = None,
        name: str | None = None,
    ) -> SocketAddress:
        """Return a new address where clients reach the server `to` over a path.

        All clients of one front share its path: give each host that dials a front of its own.

        Args:
            spec: from client to server; `back` the other direction, the same by default.
            to: an address of 127.0.0.0/8; None: not known yet, packets are dropped until `aim`.
            client, server: hosts declared by `access`, whose access links the path crosses; None: none.
            name: of the path in `stats`, and of its random sequence; default `front0`, `front1`, ...
        """
        name = name or f"front{len(self._names)}"
        if name in self._names.values():
            raise LocalProtocolError(f"the name is taken: got {name!r}")
        answer, _ = await self._pump.ask(
            "front",
            name=name,
            client=client,
            server=server,
            spec=asdict(spec),
            back=asdict(spec if back is None else back),
        )
        host, port = answer["address"]
        self._names[host, port] = name
        if to is not None:
            await self.aim((host, port), to)
        return host, port

    async def client(
        self,
        front: SocketAddress,
        port: int,
        *,
        spec: PathSpec,
        client: str | None = None,
        server: str | None = None,
        name: str,
    ) -> None:
        """Give who dials a front from this UDP port of loopback a path of its own, before its first datagram.

        For servers that announce one address to several hosts; arguments as of `front`. `change` does not reach this path.
        """
        if name in self._names.values():
            raise LocalProtocolError(f"the name is taken: got {name!r}")
        told = asdict(spec)
        await self._pump.ask(
            "client", front=self._names[front], port=port, name=name, client=client, server=server, spec=told, back=told
        )

    async def aim(self, front: SocketAddress, to: SocketAddress) -> None:
        """Let a front stand for another server: one that got its port later, or started again on another."""
        if not ipaddress.ip_address(to[0]).is_loopback:
            raise LocalProtocolError(f"a front stands for a server on loopback: got {to[0]}")
        await self._pump.ask("aim", name=self._names[front], to=to)

    async def change(self, front: SocketAddress, spec: PathSpec, back: PathSpec | None = None) -> None:
        """Change what a front's path does from now on; `loss=1` cuts it."""
        await self._pump.change(self._names[front], spec, back)

    async def stats(self) -> EmulatorStats:
        """Return what each path did so far, and how punctual the emulator was.

        Not while something is measured: packets wait meanwhile, 1 ms for every 10,000 records.
        """
        return await self._pump.stats()
