"""Emulated hosts with real namespaces and processes, as root."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarm.emulation import namespaces
from swarm.emulation.hosts import EmulatedHosts, Host
from swarm.emulation.link import LinkSpec
from swarm.emulation.path import Drop, PathSpec
from swarm.errors import LocalProtocolError

pytestmark = [
    pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing())),
    pytest.mark.alone,  # `nothing_is_left` looks at the whole machine
]

LIMIT_S = 20.0
ECHO = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    data, source = udp.recvfrom(65535)
    udp.sendto(data, source)
"""
PING = """
import socket, sys, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.connect((sys.argv[1], 5000))
udp.settimeout(float(sys.argv[4]))
for i in range(int(sys.argv[2])):
    started = time.monotonic()
    udp.send(bytes(int(sys.argv[3])))
    try:
        udp.recv(65535)
        print(time.monotonic() - started)
    except (TimeoutError, OSError) as error:
        print(type(error).__name__)
"""
TCP_SERVER = """
import socket
with socket.create_server(("0.0.0.0", 5001)) as server:
    print("ready", flush=True)
    link, (host, port) = server.accept()
    n = 0
    while data := link.recv(65536):
        n += len(data)
    print(host, n, flush=True)
"""
TCP_CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as link:
    link.sendall(bytes(300_000))
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    """After each test: the machine has the namespaces and interfaces it had before."""

    def state() -> tuple[list[str], str]:
        links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
        return namespaces.existing(), links

    before = state()
    yield
    assert state() == before


@contextlib.asynccontextmanager
async def running(host: Host, program: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program inside, after its line `ready`."""
    process = await asyncio.create_subprocess_exec(
        *host.command(sys.executable, "-c", program, *arguments), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await process.stdout.readline() == b"ready\n"
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def output(host: Host, program: str, *arguments: str) -> list[str]:
    """The lines that a program inside prints."""
    async with asyncio.timeout(LIMIT_S):
        process = await asyncio.create_subprocess_exec(
            *host.command(sys.executable, "-c", program, *arguments), stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode().split("\n")[:-1]


async def ping(host: Host, to: str, n_pings: int, *, size: int = 1000, timeout_s: float = LIMIT_S) -> list[str]:
    return await output(host, PING, to, str(n_pings), str(size), str(timeout_s))


async def test_hosts_reach_each_other_over_their_paths() -> None:
    async with EmulatedHosts() as hosts:
        backbone, near, far = [await hosts.add(name) for name in ("backbone", "near", "far")]
        await hosts.connect("backbone", "near", PathSpec(delay_s=0.01))
        await hosts.connect("backbone", "far", PathSpec(delay_s=0.04))
        async with running(near, ECHO), running(far, ECHO):
            for peer, rtt_s in ((near, 0.02), (far, 0.08)):
                rtts = [float(each) for each in await ping(backbone, peer.address, 20)]
                assert rtt_s <= min(rtts) < rtt_s + 0.0075
            assert await ping(near, far.address, 1, timeout_s=0.2) == ["TimeoutError"]  # no path between them
        stats = await hosts.stats()
    print(f"\n{stats.summary()}")
    assert stats.n_missed == 1
    assert stats.ways["backbone-far/forth"].n_delivered == 20
    assert stats.ways["backbone-far/back"].delays_s.min() >= 0.04


async def test_every_protocol_crosses_and_large_packets_in_fragments() -> None:
    async with EmulatedHosts() as hosts:
        a, b = [await hosts.add(name) for name in "ab"]
        await hosts.connect_all(PathSpec(delay_s=0.005, jitter_s=0.001, loss=0.02, seed=10))
        async with running(b, TCP_SERVER) as server:
            await output(a, TCP_CLIENT, b.address)
            assert server.stdout is not None
            assert await server.stdout.readline() == f"{a.address} 300000\n".encode()
        await hosts.change("a", "b", PathSpec(delay_s=0.005))
        async with running(b, ECHO):
            assert float((await ping(a, b.address, 1, size=20_000))[0]) >= 0.01
        ways = (await hosts.stats()).ways
    assert ways["a-b/forth"].drops[Drop.LOSS] >= 5  # with this seed, of the first 200 packets
    assert ways["a-b/forth"].records[:, 3].max() <= namespaces.MTU


async def test_a_hosts_access_link_is_shared_by_its_paths() -> None:
    async with EmulatedHosts() as hosts:
        backbone = await hosts.add("backbone", up=LinkSpec(rate_bit_s=2_000_000, queue_s=2))
        peers = [await hosts.add(f"peer{i}") for i in range(2)]
        await hosts.connect_all(PathSpec(delay_s=0.005))
        async with running(peers[0], ECHO), running(peers[1], ECHO):
            await asyncio.gather(*(ping(backbone, peer.address, 1, size=30_000) for peer in peers))
        ways = (await hosts.stats()).ways
    forth = [ways[f"backbone-peer{i}/forth"] for i in range(2)]
    n_bytes = sum(way.bytes_delivered for way in forth)
    assert n_bytes > 60_000
    first = min(int(way.records[0, 0]) for way in forth)
    last = max(int(way.records[-1, 1]) for way in forth)
    assert (last - first) / 1e9 >= n_bytes * 8 / 2_000_000  # all of it passed one link


async def test_a_cut_path_lets_nothing_through_until_it_is_mended() -> None:
    async with EmulatedHosts() as hosts:
        a, b = [await hosts.add(name) for name in "ab"]
        await hosts.connect("a", "b", PathSpec(delay_s=0.001))
        async with running(b, ECHO):
            await hosts.change("a", "b", PathSpec(loss=1))
            assert await ping(a, b.address, 2, timeout_s=0.1) == ["TimeoutError"] * 2
            await hosts.change("a", "b", PathSpec(delay_s=0.001))
            assert float((await ping(a, b.address, 1))[0]) < 1


async def test_hosts_reach_nothing_of_this_machine() -> None:
    async with EmulatedHosts() as hosts:
        a = await hosts.add("a")
        listing = await output(a, "import socket\nprint(*sorted(name for _, name in socket.if_nameindex()))")
        assert set(listing[0].split()) - {"lo", namespaces.DEVICE} <= {"sit0", "tunl0", "ip6tnl0", "gre0", "gretap0"}
        assert await ping(a, "192.0.2.1", 1, timeout_s=0.1) == ["TimeoutError"]


async def test_names_and_pairs_are_unique() -> None:
    async with EmulatedHosts() as hosts:
        await hosts.add("a")
        await hosts.add("b")
        await hosts.connect("a", "b", PathSpec())
        with pytest.raises(LocalProtocolError):
            await hosts.add("a")
        for pair in (("b", "a"), ("a", "a")):
            with pytest.raises(LocalProtocolError):
                await hosts.connect(*pair, PathSpec())


async def test_leaving_ends_the_programs_inside() -> None:
    processes = []

    async def fail_inside() -> None:
        async with EmulatedHosts() as hosts:
            a = await hosts.add("a")
            sleeper = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
            process = await asyncio.create_subprocess_exec(
                *a.command(sys.executable, "-c", sleeper), stdout=asyncio.subprocess.PIPE
            )
            processes.append(process)
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    async with asyncio.timeout(LIMIT_S):
        assert await processes[0].wait() == -signal.SIGKILL


# A crash

CRASHING = """
import asyncio
from swarm.emulation.hosts import EmulatedHosts
async def main():
    async with EmulatedHosts() as hosts:
        host = await hosts.add("a")
        sleeper = await asyncio.create_subprocess_exec(*host.command("sleep", "60"))
        print(host.namespace, hosts._pump._process.pid, sleeper.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def crash(*, with_emulator: bool) -> tuple[str, int]:
    """Kill a process that emulates a host; return the namespace and the pid of a program inside."""
    with subprocess.Popen([sys.executable, "-c", CRASHING], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        namespace, pump, sleeper = parent.stdout.readline().split()
        assert namespace in namespaces.existing()
        if with_emulator:
            os.kill(parent.pid, signal.SIGSTOP)  # so that it sees nothing of the death of its child
            os.kill(int(pump), signal.SIGKILL)
        os.kill(parent.pid, signal.SIGKILL)
    return namespace, int(sleeper)


def wait_gone(namespace: str, pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while namespace in namespaces.existing() or Path(f"/proc/{pid}/cmdline").exists():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                pid = -1  # ended; nobody has collected it
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_emulator_cleans_up_after_a_killed_parent() -> None:
    wait_gone(*crash(with_emulator=False))


def test_the_next_one_cleans_up_after_all_were_killed() -> None:
    namespace, pid = crash(with_emulator=True)
    time.sleep(0.2)
    assert namespace in namespaces.existing()

    async def start() -> None:
        async with EmulatedHosts():
            pass

    asyncio.run(start())
    wait_gone(namespace, pid)
