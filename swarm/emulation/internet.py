"""A virtual internet, as root: public hosts, NAT routers of every kind, and hosts behind them, on emulated paths.

    public host -- wan0 ~~ the hub's paths ~~ wan0 -- router -- lan0 (bridge) -- eth0 -- host behind it
                                                             `- eth0 -- wan of a second router (CGNAT) -- ...

Programs run inside unchanged. Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Self

from swarm.emulation import namespaces
from swarm.emulation.hosts import EmulatedHosts, Host, new_namespace
from swarm.emulation.nat import LAN, NatKind, ruleset
from swarm.emulation.path import PathSpec
from swarm.errors import LocalProtocolError, UserError

FIRST_MOVED_PORT = 40_001  # outside ports of rebound mappings


def missing() -> str | None:
    """Return why there can be no virtual internet here; None: there can."""
    reason = namespaces.missing()
    if reason is not None:
        return reason
    for command, package in (("nft", "nftables"), ("conntrack", "conntrack")):
        if shutil.which(command) is None:
            return f"the command `{command}` is not installed (package {package})"
    return None


@dataclass(eq=False, kw_only=True)
class Router:
    """A NAT router.

    Attributes:
        address: its outside address.
        wan: its device to the outside.
    """

    name: str
    kind: NatKind
    namespace: str
    address: str
    wan: str
    network: str  # of the inside, its first three bytes
    hairpin: bool
    n_inside: int = 0
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def inside_address(self) -> str:
        """Its address towards the inside."""
        return f"{self.network}.1"


class VirtualInternet:
    """Use as `async with VirtualInternet(PathSpec(delay_s=0.01)) as internet`; leaving ends the programs inside."""

    def __init__(self, spec: PathSpec) -> None:
        """`spec`: of the path between any two public addresses, in each direction."""
        self._spec = spec
        self._hosts = EmulatedHosts()
        self._public: list[str] = []
        self._inside: list[str] = []  # namespaces
        self._n_routers = 0

    async def __aenter__(self) -> Self:
        """Raises UserError without root, Linux, `ip` or `nft`."""
        reason = missing()
        if reason is not None:
            raise UserError(f"cannot make a virtual internet: {reason}")
        await self._hosts.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        namespaces.remove_all(self._inside)
        await self._hosts.__aexit__(*exception)

    async def public(self, name: str, *, has_v4: bool = True, has_v6: bool = False) -> Host:
        """Make a host with a public address, or one of each kind."""
        n = len(self._public) + 1
        host = await self._hosts.add(name, address=f"198.18.0.{n}", address6=f"2001:db8::{n:x}" if has_v6 else None)
        for other in self._public:
            await self._hosts.connect(name, other, self._spec)
        self._public.append(name)
        if not has_v4:
            await _ip("-n", host.namespace, "route", "delete", "default")
        return host

    async def router(self, name: str, kind: NatKind, *, behind: Router | None = None, hairpin: bool = False) -> Router:
        """Make a NAT router, on the internet or, as a household's behind its provider's NAT, behind another."""
        self._n_routers += 1
        network = f"10.{self._n_routers}.0"
        if behind is None:
            host = await self.public(name)
            namespace, address, wan = host.namespace, host.address, namespaces.DEVICE
        else:
            inner = await self.inside(name, behind)
            namespace, address, wan = inner.namespace, inner.address, "eth0"
        router = Router(
            name=name, kind=kind, namespace=namespace, address=address, wan=wan, network=network, hairpin=hairpin
        )
        await _run("ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        await _ip("-n", namespace, "link", "add", LAN, "type", "bridge")
        await _ip("-n", namespace, "address", "add", f"{router.inside_address}/24", "dev", LAN)
        await _ip("-n", namespace, "link", "set", LAN, "up")
        await self._apply(router)
        return router

    async def inside(self, name: str, router: Router) -> Host:
        """Make a host behind a router."""
        router.n_inside += 1
        namespace = new_namespace()
        self._inside.append(namespace)
        host = Host(name=name, address=f"{router.network}.{router.n_inside + 1}", namespace=namespace)
        await asyncio.to_thread(namespaces.create, namespace)
        port = f"port{router.n_inside}"
        await _ip(
            *("-n", router.namespace, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", namespace),
        )
        await _ip("-n", router.namespace, "link", "set", port, "master", LAN, "up")
        await _ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        await _ip("-n", namespace, "link", "set", "eth0", "up")
        await _ip("-n", namespace, "route", "add", "default", "via", router.inside_address)
        return host

    async def rebind(self, router: Router, host: Host) -> None:
        """Let the router forget its mappings and give the host's UDP another outside port."""
        if router.kind in (NatKind.SYMMETRIC, NatKind.UDP_BLOCKED):
            raise LocalProtocolError(f"nothing to rebind at a router that is {router.kind}")
        router.moved[host.address] = router.moved.get(host.address, FIRST_MOVED_PORT - 1) + 1
        await self._apply(router)
        await _run("ip", "netns", "exec", router.namespace, "conntrack", "-F")

    async def cut(self, a: str, b: str, *, is_cut: bool = True) -> None:
        """Lose every packet between two public addresses, by the names of their host or router, or let them pass again."""
        spec = PathSpec(delay_s=self._spec.delay_s, loss=1.0) if is_cut else self._spec
        first, second = sorted((a, b), key=self._public.index, reverse=True)
        await self._hosts.change(first, second, spec)

    async def _apply(self, router: Router) -> None:
        rules = ruleset(
            router.kind, wan=router.wan, address=router.address, hairpin=router.hairpin, moved=dict(router.moved)
        )
        await _run("ip", "netns", "exec", router.namespace, "nft", "-f", "-", text=rules)


async def _ip(*arguments: str) -> None:
    await asyncio.to_thread(namespaces.ip, *arguments)


async def _run(*command: str, text: str | None = None) -> None:
    def run() -> None:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise namespaces.NamespaceError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    await asyncio.to_thread(run)
