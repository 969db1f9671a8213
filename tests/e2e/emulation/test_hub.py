"""The loopback emulator with real sockets. Run with -s, it prints how punctual it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from swarm.emulation.fronts import HEADERS_BYTES
from swarm.emulation.hub import EmulatedPaths, EmulatorFailed
from swarm.emulation.link import NS_PER_S, LinkSpec
from swarm.emulation.path import Drop, PathSpec
from swarm.errors import DeadlineExceeded, LocalProtocolError
from swarm.identity import Identity
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.wire import messages as m
from swarm.wire import session as s

MS = NS_PER_S // 1000
pytestmark = pytest.mark.alone  # many judge how punctual it is

SETTLE_S = 0.3  # after the last packet, before what arrived is counted; the paths here hold at most 0.1 s
LIMIT_S = 10.0


@pytest_asyncio.fixture
async def hub() -> AsyncIterator[EmulatedPaths]:
    async with EmulatedPaths() as hub:
        yield hub


class Receiver:
    """A UDP server in a thread: keeps what it gets, and sends it back if it is told to echo."""

    def __init__(self, *, echoes: bool) -> None:
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.udp.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.udp.getsockname()
        self.got: list[bytes] = []
        self.sources: list[tuple[str, int]] = []
        self._echoes = echoes
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            data, source = self.udp.recvfrom(65_535)
            if data == b"the end":
                return
            self.got.append(data)
            self.sources.append(source)
            if self._echoes:
                self.udp.sendto(data, source)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"the end", self.address)
        self._thread.join()
        self.udp.close()


@pytest.fixture
def sink() -> Iterator[Receiver]:
    receiver = Receiver(echoes=False)
    yield receiver
    receiver.close()


@pytest.fixture
def echo() -> Iterator[Receiver]:
    receiver = Receiver(echoes=True)
    yield receiver
    receiver.close()


@contextlib.contextmanager
def client(front: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(front)
        udp.settimeout(LIMIT_S)
        yield udp


def ping(udp: socket.socket, n_pings: int, size: int = 1200) -> list[float]:
    """Return the round trips of `n_pings` datagrams, one after the other, in seconds."""
    rtts = []
    for i in range(n_pings):
        sent = time.monotonic()
        data = i.to_bytes(4, "big").ljust(size, b"x")
        udp.send(data)
        assert udp.recv(65_535) == data
        rtts.append(time.monotonic() - sent)
    return rtts


def send_numbered(udp: socket.socket, n_packets: int, size: int, *, gap_s: float = 0.0) -> None:
    for i in range(n_packets):
        udp.send(i.to_bytes(4, "big").ljust(size, b"x"))
        if gap_s:
            time.sleep(gap_s)


def numbers(got: list[bytes]) -> list[int]:
    return [int.from_bytes(data[:4], "big") for data in got]


# What a path does


async def test_a_round_trip_takes_twice_the_delay(hub: EmulatedPaths, echo: Receiver) -> None:
    front = await hub.front(to=echo.address, spec=PathSpec(delay_s=0.02))
    with client(front) as udp:
        rtts = await asyncio.to_thread(ping, udp, 40)
    stats = await hub.stats()
    print(f"\nmedian RTT {statistics.median(rtts) * 1e3:.3f} ms; {stats.summary()}")
    assert min(rtts) >= 0.040
    # A busy machine lets client and server wait for a processor: the median is what the emulator stamped, the best is theirs.
    assert min(rtts) <= 0.0415
    if stats.is_real_time:
        delivered = stats.ways["front0/forth"].delays_s + stats.ways["front0/back"].delays_s
        assert 0.040 <= statistics.median(delivered) <= 0.0415
    for way in stats.ways.values():
        assert (way.n_offered, way.n_delivered, dict(way.drops)) == (40, 40, {})
        assert way.bytes_delivered == 40 * (1200 + HEADERS_BYTES)
        assert (way.lateness_s >= 0).all()
        assert (way.records[:, 1] - way.records[:, 0] == 20 * MS).all()
        assert (way.delays_s >= 0.020).all()
    assert list(stats.ways) == ["front0/forth", "front0/back"]
    assert (stats.n_missed, stats.n_socket_overflow) == (0, 0)


async def test_it_is_punctual_at_some_hundreds_of_packets_a_second(hub: EmulatedPaths, sink: Receiver) -> None:
    front = await hub.front(to=sink.address, spec=PathSpec(delay_s=0.02))
    with client(front) as udp:
        await asyncio.to_thread(lambda: send_numbered(udp, 400, 1200, gap_s=0.0025))
    await asyncio.sleep(SETTLE_S)
    stats = await hub.stats()
    summary = stats.summary()
    print(f"\n{summary}")
    assert summary["n_delivered"] == 400
    if stats.is_real_time:  # measured 0.00001 to 0.00004, with both cores busy too; target 0.0003
        assert summary["lateness_p99_s"] < 0.0015


async def test_loss_is_the_share_asked_for_and_the_same_again(hub: EmulatedPaths, sink: Receiver) -> None:
    lost = []
    for seed in (1, 1, 2):
        async with EmulatedPaths() as again:
            front = await again.front(to=sink.address, spec=PathSpec(delay_s=0.01, loss=0.1, seed=seed))
            sink.got.clear()
            with client(front) as udp:
                await asyncio.to_thread(lambda udp=udp: send_numbered(udp, 2000, 100, gap_s=0.00005))
            await asyncio.sleep(SETTLE_S)
            stats = await again.stats()
        way = stats.ways["front0/forth"]
        assert stats.n_socket_overflow == 0
        assert way.n_delivered == len(sink.got)
        assert way.drops == {Drop.LOSS: 2000 - len(sink.got)}
        lost.append(set(range(2000)) - set(numbers(sink.got)))
    assert 146 < len(lost[0]) < 254  # 200 +- 4 standard deviations of 13.4
    assert lost[0] == lost[1]
    assert lost[0] != lost[2]


async def test_jitter_keeps_the_order(hub: EmulatedPaths, sink: Receiver) -> None:
    front = await hub.front(to=sink.address, spec=PathSpec(delay_s=0.02, jitter_s=0.005))
    with client(front) as udp:
        await asyncio.to_thread(lambda: send_numbered(udp, 300, 100, gap_s=0.001))
    await asyncio.sleep(SETTLE_S)
    assert numbers(sink.got) == list(range(300))
    records = (await hub.stats()).ways["front0/forth"].records
    due_after = records[:, 1] - records[:, 0]
    assert due_after.min() >= 15 * MS
    assert due_after.max() - due_after.min() > 5 * MS


async def test_the_rate_is_kept(hub: EmulatedPaths, sink: Receiver) -> None:
    spec = PathSpec(delay_s=0.01, rate_bit_s=10_000_000, queue_s=1)
    front = await hub.front(to=sink.address, spec=spec)
    with client(front) as udp:
        await asyncio.to_thread(send_numbered, udp, 500, 1250 - HEADERS_BYTES)
    await asyncio.sleep(0.5 + SETTLE_S)
    assert numbers(sink.got) == list(range(500))
    left = (await hub.stats()).ways["front0/forth"].records[:, 2]
    rate_bit_s = 499 * 1250 * 8 / ((left[-1] - left[0]) / NS_PER_S)
    print(f"\nrate {rate_bit_s / 1e6:.3f} Mbit/s")
    assert abs(rate_bit_s / 10e6 - 1) < 0.03


async def test_a_queue_of_64_kb_drops_what_does_not_fit(hub: EmulatedPaths, sink: Receiver) -> None:
    spec = PathSpec(delay_s=0.01, rate_bit_s=1_000_000, queue_bytes=64_000)
    front = await hub.front(to=sink.address, spec=spec)
    with client(front) as udp:
        await asyncio.to_thread(send_numbered, udp, 200, 1000 - HEADERS_BYTES)
    await asyncio.sleep(0.6 + SETTLE_S)  # 65 packets of 8 ms
    way = (await hub.stats()).ways["front0/forth"]
    assert 65 <= way.n_delivered <= 80  # a few leave while the rest are sent
    assert way.drops == {Drop.QUEUE: 200 - way.n_delivered}
    assert numbers(sink.got)[:65] == list(range(65))


async def test_paths_of_one_host_share_its_access_link(hub: EmulatedPaths, sink: Receiver) -> None:
    await hub.access("backbone", LinkSpec(rate_bit_s=10_000_000, queue_s=1))
    fronts = [
        await hub.front(to=sink.address, client="backbone", spec=PathSpec(delay_s=delay_s)) for delay_s in (0.01, 0.05)
    ]
    with client(fronts[0]) as first, client(fronts[1]) as second:
        for i in range(200):
            (first, second)[i % 2].send(i.to_bytes(4, "big").ljust(1250 - HEADERS_BYTES, b"x"))
    await asyncio.sleep(0.2 + SETTLE_S)
    ways = (await hub.stats()).ways
    on_link = []
    for i, delay_ms in enumerate((10, 50)):
        due = ways[f"front{i}/forth"].records[:, 1]
        assert len(due) == 100
        # Half of the link each, or a little more or less at the ends: the emulator reads one socket before the other.
        assert 1.5 < (due[-1] - due[0]) / 99 / MS < 2.1
        assert ways[f"front{i}/forth"].delays_s.min() > delay_ms / 1000
        on_link.append(due - delay_ms * MS)
    left_link = np.sort(np.concatenate(on_link))
    assert abs((left_link[-1] - left_link[0]) / 199 / MS - 1) < 0.03  # together they have the link's 1 ms a packet


async def test_a_client_may_have_a_path_and_an_access_link_of_its_own(hub: EmulatedPaths, sink: Receiver) -> None:
    await hub.access("slow", LinkSpec(rate_bit_s=10_000_000, queue_s=1))
    front = await hub.front(to=sink.address, spec=PathSpec(delay_s=0.001))
    with client(front) as slow, client(front) as fast:
        port = slow.getsockname()[1]
        await hub.client(front, port, spec=PathSpec(delay_s=0.03), client="slow", name="slow path")
        for _ in range(50):
            for udp in (slow, fast):
                udp.send(bytes(1250 - HEADERS_BYTES))
    await asyncio.sleep(0.1 + SETTLE_S)
    ways = (await hub.stats()).ways
    assert ways["front0/forth"].n_delivered == ways["slow path/forth"].n_delivered == 50
    assert ways["front0/forth"].delays_s.max() < 0.02
    due = ways["slow path/forth"].records[:, 1]
    assert ways["slow path/forth"].delays_s.min() > 0.03
    assert abs((due[-1] - due[0]) / 49 / MS - 1) < 0.03


async def test_a_large_datagram_and_an_empty_one_cross_whole(hub: EmulatedPaths, echo: Receiver) -> None:
    front = await hub.front(to=echo.address, spec=PathSpec(delay_s=0.001))
    large = os.urandom(65_000)
    with client(front) as udp:
        for data in (large, b""):
            udp.send(data)
            assert await asyncio.to_thread(udp.recv, 65_535) == data


async def test_each_client_has_a_face_of_its_own(hub: EmulatedPaths, echo: Receiver) -> None:
    front = await hub.front(to=echo.address, spec=PathSpec(delay_s=0.001))
    with client(front) as first, client(front) as second:
        for udp in (first, second, first):
            await asyncio.to_thread(ping, udp, 1)
        own = {first.getsockname(), second.getsockname()}
    assert echo.sources[0] == echo.sources[2] != echo.sources[1]
    assert own.isdisjoint(echo.sources)


# Steering


async def test_a_front_can_be_aimed_later_and_again(hub: EmulatedPaths, echo: Receiver, sink: Receiver) -> None:
    front = await hub.front(spec=PathSpec(delay_s=0.001))
    with client(front) as udp:
        udp.send(b"nobody there yet")
        async with asyncio.timeout(LIMIT_S):
            while (await hub.stats()).n_missed != 1:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.01)
        await hub.aim(front, echo.address)
        await asyncio.to_thread(ping, udp, 1)
        await hub.aim(front, sink.address)
        udp.send(b"restarted elsewhere")
        async with asyncio.timeout(LIMIT_S):
            while sink.got != [b"restarted elsewhere"]:  # noqa: ASYNC110 - in another thread
                await asyncio.sleep(0.01)
    assert len(echo.got) == 1


async def test_a_path_can_be_cut_and_mended(hub: EmulatedPaths, echo: Receiver) -> None:
    front = await hub.front(to=echo.address, spec=PathSpec(delay_s=0.001))
    with client(front) as udp:
        await asyncio.to_thread(ping, udp, 1)
        await hub.change(front, PathSpec(loss=1))
        udp.send(b"lost")
        udp.settimeout(0.1)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(udp.recv, 100)
        udp.settimeout(LIMIT_S)
        await hub.change(front, PathSpec(delay_s=0.03))
        assert min(await asyncio.to_thread(ping, udp, 5)) >= 0.06
    assert (await hub.stats()).ways["front0/forth"].drops == {Drop.LOSS: 1}


async def test_a_server_that_is_not_there_harms_nobody(hub: EmulatedPaths, echo: Receiver) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        nowhere = gone.getsockname()
    dead = await hub.front(to=nowhere, spec=PathSpec(delay_s=0.001))
    alive = await hub.front(to=echo.address, spec=PathSpec(delay_s=0.001))
    with client(dead) as first, client(alive) as second:
        for _ in range(20):
            first.send(b"hello?")
            await asyncio.to_thread(ping, second, 1)
    assert (await hub.stats()).ways["front1/back"].n_delivered == 20


async def test_wrong_uses_are_refused(hub: EmulatedPaths) -> None:
    with pytest.raises(LocalProtocolError, match="loopback"):
        await hub.front(to=("192.0.2.1", 9), spec=PathSpec())
    with pytest.raises(EmulatorFailed, match="nobody"):
        await hub.front(client="nobody", spec=PathSpec())
    await hub.front(name="a", spec=PathSpec())
    with pytest.raises(LocalProtocolError, match="taken"):
        await hub.front(name="a", spec=PathSpec())


# Under QUIC


async def test_an_endpoint_dials_through_the_hub_and_measures_its_round_trip(
    hub: EmulatedPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s, "PING_AFTER_S", 0.05)
    server_identity, client_identity = (Identity.from_seed(name.ljust(32).encode()) for name in ("server", "client"))

    async def answer(_connection: Connection, request: m.Request) -> m.Response:
        if isinstance(request, m.GetStatus):
            return m.Status(data=b"here")
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with (
        Endpoint(server_identity, host="127.0.0.1", handler=answer, serves=(m.GetStatus, m.Lookup)) as server,
        Endpoint(client_identity, host="127.0.0.1") as dialler,
    ):
        front = await hub.front(to=("127.0.0.1", server.port), spec=PathSpec(delay_s=0.02))
        connection = await dialler.dial(front, expected=server_identity.node_id, timeout_s=LIMIT_S)
        started = time.monotonic()
        assert await connection.request(m.GetStatus(), timeout_s=LIMIT_S) == m.Status(data=b"here")
        assert time.monotonic() - started >= 0.040
        with pytest.raises(DeadlineExceeded):  # pings while it waits
            await connection.request(m.Lookup(model_id=None), timeout_s=0.5)
        assert connection.rtt_s is not None
        print(f"\nrtt {connection.rtt_s * 1e3:.2f} ms")
        assert 0.040 <= connection.rtt_s < 0.080  # measured 0.0425; both ends may wait for a processor


# Its end


async def test_leaving_ends_the_process() -> None:
    async with EmulatedPaths() as hub:
        await hub.stats()
        process = hub._pump._process
        assert process is not None
    assert process.returncode == 0
    with pytest.raises(LocalProtocolError):
        await hub.stats()


async def test_a_killed_emulator_is_an_error_and_not_a_hang() -> None:
    async with EmulatedPaths() as hub:
        assert hub._pump._process is not None
        hub._pump._process.kill()
        with pytest.raises(EmulatorFailed):
            await hub.stats()


async def test_an_interrupted_command_does_not_give_its_answer_to_the_next() -> None:
    async with EmulatedPaths() as hub:
        asking = asyncio.ensure_future(hub.stats())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        with pytest.raises(EmulatorFailed):
            await hub.front(spec=PathSpec())


def test_it_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import asyncio\nfrom swarm.emulation.hub import EmulatedPaths\n"
        "async def main():\n async with EmulatedPaths() as hub:\n  await hub.stats()\n"
        "  print(hub._pump._process.pid, flush=True)\n  await asyncio.sleep(60)\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
