"""Emulated hosts, as root: network namespaces, each with an address of its own, whose every packet crosses a path.

Programs run inside unchanged, with any protocol over IPv4 and, where a host has such an address, IPv6. Nothing outside these
namespaces is touched, and they reach nothing outside. For paths without privileges see `hub`.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict, dataclass
from typing import Self

from swarm.emulation import namespaces
from swarm.emulation.hub import EmulatorStats, PumpProcess
from swarm.emulation.link import LinkSpec
from swarm.emulation.path import PathSpec
from swarm.errors import LocalProtocolError

MAX_HOSTS = 250  # of the addresses 198.18.0.1 and up: RFC 2544's network for measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One emulated host.

    Attributes:
        address: its IPv4 address, alone on its network.
        address6: its IPv6 address, if it has one.
    """

    name: str
    address: str
    namespace: str
    address6: str | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of its addresses."""
        return (self.address,) if self.address6 is None else (self.address, self.address6)

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command line that runs a program inside."""
        return ("ip", "netns", "exec", self.namespace, *arguments)


class EmulatedHosts:
    """Use as `async with EmulatedHosts() as hosts`; leaving ends the programs inside and removes the namespaces."""

    def __init__(self) -> None:
        self._pump = PumpProcess()
        self._hosts: dict[str, Host] = {}
        self._pairs: dict[frozenset[str], str] = {}

    async def __aenter__(self) -> Self:
        """Also remove what killed processes left behind. Raises UserError without root, Linux or `ip`."""
        namespaces.require()
        await asyncio.to_thread(namespaces.remove_stale)
        await self._pump.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        namespaces.remove_all([host.namespace for host in self._hosts.values()])  # blocks, so that nothing cancels it
        await self._pump.stop()

    async def add(
        self,
        name: str,
        *,
        up: LinkSpec | None = None,
        down: LinkSpec | None = None,
        address: str | None = None,
        address6: str | None = None,
    ) -> Host:
        """Make a host. `up` is its access link towards the network, `down` (default: the same) from it; None: no limit."""
        if name in self._hosts:
            raise LocalProtocolError(f"the name is taken: got {name!r}")
        if len(self._hosts) >= MAX_HOSTS:
            raise LocalProtocolError(f"too many hosts: expected at most {MAX_HOSTS}")
        host = Host(
            name=name,
            address=address or f"198.18.0.{len(self._hosts) + 1}",
            namespace=new_namespace(),
            address6=address6,
        )
        self._hosts[name] = host  # from here on it is removed, whatever happens
        await asyncio.to_thread(namespaces.create, host.namespace)
        await self._pump.access(name, up or LinkSpec(), down)
        await self._pump.ask("host", namespace=host.namespace, addresses=host.addresses)
        await asyncio.to_thread(namespaces.configure, host.namespace, *host.addresses)
        return host

    async def connect(self, a: str, b: str, spec: PathSpec, back: PathSpec | None = None) -> None:
        """Lay a path between two hosts, named `a-b` in `stats`; `back` (b to a) defaults to the same."""
        if a == b or _pair(a, b) in self._pairs:
            raise LocalProtocolError(f"no new pair of hosts: got {a!r} and {b!r}")
        await self._pump.ask(
            "connect",
            name=f"{a}-{b}",
            client=a,
            server=b,
            addresses=[
                (mine, other)
                for mine in self._hosts[a].addresses
                for other in self._hosts[b].addresses
                if (":" in mine) is (":" in other)
            ],
            spec=asdict(spec),
            back=asdict(spec if back is None else back),
        )
        self._pairs[_pair(a, b)] = f"{a}-{b}"

    async def connect_all(self, spec: PathSpec) -> None:
        """Lay the same path between all pairs that have none yet; each draws its own loss and jitter."""
        for a, b in itertools.combinations(self._hosts, 2):
            if _pair(a, b) not in self._pairs:
                await self.connect(a, b, spec)

    async def change(self, a: str, b: str, spec: PathSpec, back: PathSpec | None = None) -> None:
        """Change the path that `connect(a, b)` laid, from now on; `loss=1` cuts it."""
        await self._pump.change(self._pairs[_pair(a, b)], spec, back)

    async def stats(self) -> EmulatorStats:
        """Return what each path did so far, and how punctual the emulator was."""
        return await self._pump.stats()


def new_namespace() -> str:
    """Return a name for a namespace that this process has not used yet."""
    return namespaces.name(next(_indices))


def _pair(a: str, b: str) -> frozenset[str]:
    return frozenset((a, b))


_indices = itertools.count()  # of this process's namespaces
