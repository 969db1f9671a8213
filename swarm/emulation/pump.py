"""The process that carries packets: sockets and devices on one side, `path.Network` on the other. `python -m` starts it.

Its parent writes one JSON object a line to its standard input and reads answers from its standard output: one JSON line,
then as many bytes of packet records as its `n_blob_bytes` says. It ends when its input closes, however its parent ended.

A process of its own, because a thread waits for the GIL. Measured on 2 cores, timers at 300 a second: a thread beside one
that computes is late by 5.1 ms (p50; switch interval 5 ms) or 0.7 ms (0.5 ms). This process, with two others that compute
without end: p50 0.002 ms, p99 0.01 to 0.04 ms with SCHED_FIFO (as root); without it p99 1 to 100 ms, as the load is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import selectors
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.emulation import namespaces
from swarm.emulation.fronts import MAX_BATCH, Front, Send
from swarm.emulation.link import Link, LinkSpec
from swarm.emulation.moderation import Moderation
from swarm.emulation.path import Drop, Network, OneWay, PathSpec

SPIN_NS = 60_000  # before a packet is due, unless there are so many that waking is moderated
MAX_RECORDS = 1 << 20  # packets of one direction whose times are kept, 32 bytes each; later ones are only counted

_REAL_TIME_PRIORITY = 1  # the lowest: before all ordinary processes


class RecordedWay(OneWay):
    """One direction, with the times of its packets."""

    def __init__(self, name: str, spec: PathSpec, up: Link | None, down: Link | None) -> None:
        super().__init__(spec, random.Random(f"{spec.seed}/{name}").random, up=up, down=down)
        self.name = name
        self.times = array("q")  # entered, due, left, size; four a packet


class Host:
    """A namespace whose device gives and takes whole IP packets."""

    def __init__(self, namespace: str, device: int) -> None:
        self.namespace = namespace
        self.device = device
        self.ways: dict[bytes, RecordedWay] = {}  # by the receiver's address

    def send(self, data: bytes) -> None:
        """Give the host a packet."""
        os.write(self.device, data)


class Pump:
    """All sockets, devices and paths, and the loop that serves them."""

    def __init__(self, *, is_real_time: bool) -> None:
        self._network: Network[tuple[Send, bytes]] = Network()
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, tuple[Link | None, Link | None]] = {}
        self._ways: dict[str, tuple[RecordedWay, RecordedWay]] = {}
        self._fronts: dict[str, Front] = {}
        self._hosts: dict[bytes, Host] = {}  # by address
        self._n_missed = 0
        self._spin_ns = SPIN_NS
        self._input = b""
        self._is_running = True
        self._is_real_time = is_real_time
        self._started_ns = time.monotonic_ns()

    # The loop

    def run(self) -> None:
        """Serve until the input closes."""
        self._register(sys.stdin.fileno(), self._on_input)
        network, clock = self._network, time.monotonic_ns
        selector_file = self._selector.fileno()  # of epoll or kqueue
        moderation = Moderation(clock())
        while self._is_running:
            pause_ns = moderation.pause_ns(clock())
            self._spin_ns = 0 if pause_ns else SPIN_NS
            if pause_ns:  # not after the wait below: two wake-ups cost twice as much as one
                time.sleep(pause_ns * 1e-9)
            due_ns = network.next_due_ns()
            wait_ns = None if due_ns is None else due_ns - clock() - self._spin_ns
            if wait_ns is None or wait_ns > 0:
                # Not the selector's own timeout: epoll's counts whole milliseconds.
                select.select([selector_file], [], [], None if wait_ns is None else wait_ns * 1e-9)
            self._send_due()
            for key, _ in self._selector.select(0):
                key.data()
                self._send_due()

    def _send_due(self) -> None:
        """Send what is due now or within `_spin_ns`. Reading goes on in between, so that a flood cannot stop it."""
        network, clock = self._network, time.monotonic_ns
        for _ in range(MAX_BATCH):
            due_ns = network.next_due_ns()
            now_ns = clock()
            if due_ns is None or due_ns - now_ns > self._spin_ns:
                return
            while now_ns < due_ns:
                now_ns = clock()
            packet = network.pop_due(now_ns)
            if packet is None:  # it reached another link, or was dropped there
                continue
            way = packet.way
            assert isinstance(way, RecordedWay)
            send, data = packet.payload
            left_ns = clock()
            try:
                send(data)
            except OSError:  # the receiver's buffer is full, or an ICMP error of an earlier packet
                way.drop(Drop.SEND)
                continue
            way.arrive(packet.size_bytes)
            if len(way.times) < 4 * MAX_RECORDS:
                way.times.extend((packet.entered_ns, packet.due_ns, left_ns, packet.size_bytes))

    def _offer(self, way: OneWay, send: Send, data: bytes, size_bytes: int, now_ns: int) -> None:
        self._network.offer(way, (send, data), size_bytes, now_ns)

    def _register(self, file: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _on_device(self, host: Host) -> None:
        for _ in range(MAX_BATCH):
            try:
                data = os.read(host.device, 2048)  # more than the MTU
            except BlockingIOError:
                return
            except OSError:  # the namespace is gone
                self._selector.unregister(host.device)
                return
            # The destination: RFC 791, RFC 8200 section 3. IPv6 asks groups (ff..) for routers.
            address = data[16:20] if data[0] >> 4 == 4 else data[24:40]
            if address[0] == 0xFF:
                continue
            way = host.ways.get(address)
            if way is None:
                self._n_missed += 1
            else:
                self._offer(way, self._hosts[address].send, data, len(data), time.monotonic_ns())

    # Commands

    def _on_input(self) -> None:
        data = os.read(sys.stdin.fileno(), 65_536)
        if not data:
            self._is_running = False
            for host in self._hosts.values():  # those that the parent has not removed, because it was killed
                namespaces.remove(host.namespace)
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            op, blob = command.pop("op"), b""
            try:
                answer, blob = self._obey(op, command)
            except (OSError, LookupError, ValueError) as error:
                answer = {"error": f"{op}: {error!r}"}
            answer["n_blob_bytes"] = len(blob)
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + blob)
            sys.stdout.buffer.flush()

    def _obey(self, op: str, command: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        match op:
            case "access":
                specs = [LinkSpec(**command[side]) for side in ("up", "down")]
                former = self._links.get(command["host"])
                if former is None:
                    up, down = (None if spec.rate_bit_s is None else Link(spec) for spec in specs)
                    self._links[command["host"]] = up, down
                else:
                    for link, spec in zip(former, specs, strict=True):
                        if link is None:
                            raise ValueError("a host without a limit gets none later")
                        link.spec = spec
            case "front":
                forth, back = self._add_ways(**command)
                front = Front(forth, back, offer=self._offer, register=self._register)
                self._fronts[command["name"]] = front
                return {"address": front.address}, b""
            case "client":
                self._fronts[command.pop("front")].give_path(command.pop("port"), *self._add_ways(**command))
            case "aim":
                self._fronts[command["name"]].server = tuple(command["to"])
            case "host":
                host = Host(command["namespace"], namespaces.open_tun(command["namespace"]))
                for address in command["addresses"]:
                    self._hosts[_packed(address)] = host
                self._register(host.device, lambda: self._on_device(host))
            case "connect":
                pairs = [(_packed(a), _packed(b)) for a, b in command.pop("addresses")]
                forth, back = self._add_ways(**command)
                for a, b in pairs:
                    self._hosts[a].ways[b], self._hosts[b].ways[a] = forth, back
            case "change":
                for way, spec in zip(self._ways[command["name"]], (command["spec"], command["back"]), strict=True):
                    way.spec = PathSpec(**spec)
            case "stats":
                return self._stats()
            case _:
                raise ValueError("unknown command")
        return {}, b""

    def _add_ways(
        self, name: str, client: str | None, server: str | None, spec: dict[str, Any], back: dict[str, Any]
    ) -> tuple[RecordedWay, RecordedWay]:
        client_up, client_down = self._links[client] if client else (None, None)
        server_up, server_down = self._links[server] if server else (None, None)
        ways = (
            RecordedWay(f"{name}/forth", PathSpec(**spec), client_up, server_down),
            RecordedWay(f"{name}/back", PathSpec(**back), server_up, client_down),
        )
        self._ways[name] = ways
        return ways

    def _stats(self) -> tuple[dict[str, Any], bytes]:
        ways = [way for pair in self._ways.values() for way in pair]
        told = [
            {
                "name": way.name,
                "n_offered": way.n_offered,
                "bytes_offered": way.bytes_offered,
                "n_delivered": way.n_delivered,
                "bytes_delivered": way.bytes_delivered,
                "drops": way.drops,
                "n_records": len(way.times) // 4,
            }
            for way in ways
        ]
        own = {
            "cpu_s": time.process_time(),
            "wall_s": (time.monotonic_ns() - self._started_ns) * 1e-9,
            "is_real_time": self._is_real_time,
            "n_missed": self._n_missed + sum(front.n_missed for front in self._fronts.values()),
            "n_socket_overflow": sum(front.n_overflow() for front in self._fronts.values()),
        }
        return {"ways": told, "own": own}, b"".join(way.times.tobytes() for way in ways)


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def be_punctual() -> bool:
    """Ask for exact timers, and to run before all ordinary processes; return whether the latter was granted."""
    gc.freeze()
    gc.disable()  # nothing here makes cycles; a full collection with many packets under way takes milliseconds
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")  # default 50 us
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_REAL_TIME_PRIORITY))
    except (OSError, AttributeError):
        return False
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; our parent tells us when
    Pump(is_real_time=be_punctual()).run()
