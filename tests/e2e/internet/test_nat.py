"""The emulated NAT routers do what their kind says, seen by plain UDP sockets inside and outside."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from swarm.emulation.hosts import Host
from swarm.emulation.internet import VirtualInternet
from swarm.emulation.nat import NatKind
from swarm.emulation.path import PathSpec

# A UDP socket that obeys lines of JSON: send to an address, or wait for what comes.
PROGRAM = """
import json, socket, sys
udp = socket.socket(socket.AF_INET6 if sys.argv[1] == "6" else socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("::" if sys.argv[1] == "6" else "0.0.0.0", 5000))
print("bound", flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if "to" in command:
        udp.sendto(command["text"].encode(), tuple(command["to"]))
        print("null", flush=True)
    else:
        udp.settimeout(command["wait_s"])
        try:
            data, address = udp.recvfrom(100)
            print(json.dumps([data.decode(), list(address[:2])]), flush=True)
        except OSError:
            print("null", flush=True)
"""
PATH = PathSpec(delay_s=0.002)


class Socket:
    """PROGRAM on a host."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def open(cls, host: Host, version: int = 4) -> Socket:
        command = host.command(sys.executable, "-c", PROGRAM, str(version))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        await process.stdout.readline()
        return cls(process)

    async def send(self, address: str, port: int, text: str = "hello") -> None:
        await self._ask({"to": [address, port], "text": text})

    async def receive(self, wait_s: float = 0.5) -> tuple[str, str, int] | None:
        got = await self._ask({"wait_s": wait_s})
        return None if got is None else (got[0], got[1][0], got[1][1])

    async def _ask(self, command: dict[str, object]) -> list[object] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        answer: list[object] | None = json.loads(await self._process.stdout.readline())
        return answer


@pytest.mark.parametrize(
    ("kind", "stranger_passes", "other_port_passes", "keeps_port"),
    [
        (NatKind.FULL_CONE, True, True, True),
        (NatKind.ADDRESS_RESTRICTED, False, True, True),
        (NatKind.PORT_RESTRICTED, False, False, True),
        (NatKind.SYMMETRIC, False, False, False),
    ],
)
async def test_each_kind_maps_and_lets_in_as_its_name_says(
    kind: NatKind, stranger_passes: bool, other_port_passes: bool, keeps_port: bool
) -> None:
    async with VirtualInternet(PATH) as internet:
        server, stranger = await internet.public("server"), await internet.public("stranger")
        router = await internet.router("router", kind)
        inner = await Socket.open(await internet.inside("inner", router))
        outer, third = await Socket.open(server), await Socket.open(stranger)
        await inner.send(server.address, 5000)
        seen = await outer.receive()
        assert seen is not None
        assert seen[:2] == ("hello", router.address)
        await outer.send(router.address, seen[2], "answer")
        assert (await inner.receive() or ("",))[0] == "answer"
        await third.send(router.address, seen[2], "unasked")
        assert (await inner.receive() is not None) is stranger_passes
        # Another port of the host that was sent to, which a second socket there has.
        fourth = await asyncio.create_subprocess_exec(
            *server.command(
                sys.executable,
                "-c",
                f"import socket; socket.socket(2, 2).sendto(b'other', ({router.address!r}, {seen[2]}))",
            )
        )
        await fourth.wait()
        assert (await inner.receive() is not None) is other_port_passes
        await inner.send(stranger.address, 5000)
        seen_there = await third.receive()
        assert seen_there is not None
        assert (seen_there[2] == seen[2]) is keeps_port


async def test_a_blocked_router_passes_no_udp() -> None:
    async with VirtualInternet(PATH) as internet:
        server = await internet.public("server")
        router = await internet.router("router", NatKind.UDP_BLOCKED)
        inner, outer = await Socket.open(await internet.inside("inner", router)), await Socket.open(server)
        await inner.send(server.address, 5000)
        assert await outer.receive() is None


async def test_two_layers_map_twice_and_hosts_behind_one_router_reach_each_other() -> None:
    async with VirtualInternet(PATH) as internet:
        server = await internet.public("server")
        provider = await internet.router("provider", NatKind.PORT_RESTRICTED)
        home = await internet.router("home", NatKind.PORT_RESTRICTED, behind=provider)
        a_host, b_host = await internet.inside("a", home), await internet.inside("b", home)
        a, b, outer = await Socket.open(a_host), await Socket.open(b_host), await Socket.open(server)
        await a.send(server.address, 5000)
        seen = await outer.receive()
        assert seen is not None
        assert seen[1] == provider.address
        await outer.send(seen[1], seen[2], "answer")
        assert (await a.receive() or ("",))[0] == "answer"
        await a.send(b_host.address, 5000)
        assert await b.receive() == ("hello", a_host.address, 5000)


async def test_hairpin_leads_back_inside() -> None:
    async with VirtualInternet(PATH) as internet:
        server = await internet.public("server")
        router = await internet.router("router", NatKind.FULL_CONE, hairpin=True)
        a_host, b_host = await internet.inside("a", router), await internet.inside("b", router)
        a, b, outer = await Socket.open(a_host), await Socket.open(b_host), await Socket.open(server)
        await b.send(server.address, 5000)
        seen = await outer.receive()
        assert seen is not None
        await a.send(router.address, seen[2])
        got = await b.receive()
        assert got is not None
        assert got[1] == router.address


async def test_a_rebound_mapping_has_another_port_and_the_old_one_is_closed() -> None:
    async with VirtualInternet(PATH) as internet:
        server = await internet.public("server")
        router = await internet.router("router", NatKind.PORT_RESTRICTED)
        host = await internet.inside("inner", router)
        inner, outer = await Socket.open(host), await Socket.open(server)
        await inner.send(server.address, 5000)
        before = await outer.receive()
        await internet.rebind(router, host)
        assert before is not None
        await outer.send(before[1], before[2], "late")
        assert await inner.receive() is None
        await inner.send(server.address, 5000)
        after = await outer.receive()
        assert after is not None
        assert after[2] != before[2]
        await outer.send(after[1], after[2], "answer")
        assert (await inner.receive() or ("",))[0] == "answer"


async def test_ipv6_and_cuts() -> None:
    async with VirtualInternet(PATH) as internet:
        a_host, b_host = await internet.public("a", has_v6=True), await internet.public("b", has_v4=False, has_v6=True)
        a, b = await Socket.open(a_host, 6), await Socket.open(b_host, 6)
        assert b_host.address6 is not None
        await a.send(b_host.address6, 5000)
        assert await b.receive() == ("hello", a_host.address6, 5000)
        await internet.cut("a", "b")
        await a.send(b_host.address6, 5000)
        assert await b.receive() is None
        await internet.cut("a", "b", is_cut=False)
        await a.send(b_host.address6, 5000)
        assert await b.receive() is not None
