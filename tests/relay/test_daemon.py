"""The relay's daemon carries a registry, sweeps it, and says how others reach it. Its endpoint is a stand-in."""

from __future__ import annotations

import asyncio
import json
import socket
from types import TracebackType
from typing import Any, Self

import pytest

import relay.daemon
from relay.daemon import (
    ANNOUNCE_BURST,
    ANNOUNCE_PER_S,
    EXPIRE_S,
    READ_BURST,
    READ_PER_S,
    RelayConfig,
    RelayDaemon,
    RelayReady,
    Store,
)
from swarm import __version__
from swarm.errors import ConnectionLost, IdentityMismatch, Overloaded, Refused, UserError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.client import RegistryAddress, parse_registry
from swarm.registry.records import SignedRecord, sign, verify
from swarm.wire import messages as m
from tests import virtual_time
from tests.sample_records import sample_announcement, sample_offer
from tests.virtual_time import now

R, A, B = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
MODEL = ModelId(b"m" * 32)


def announcement(identity: Identity, *, ttl_s: int = 60) -> SignedRecord:
    record = sample_announcement(identity.node_id, ttl_s=ttl_s, model=MODEL, addresses=("127.0.0.1:1",))
    return sign(record, identity)


def offer(identity: Identity) -> SignedRecord:
    record = sample_offer(identity.node_id, model=MODEL, addresses=("192.0.2.1:2",))
    return sign(record, identity)


class BoundEndpoint:
    """An endpoint that binds whatever it is told to, and remembers what it was made with."""

    made: list[BoundEndpoint]
    error: Exception | None = None

    def __init__(self, identity: Identity, **options: Any) -> None:
        self.identity, self.options = identity, options
        self.is_open = False
        self.bytes_sent = self.bytes_received = 0
        self.on_other: Any = None
        self.made.append(self)

    def add_handler(self, serves: object, handler: object) -> None:
        """Nobody connects."""

    def send_raw(self, datagrams: object, address: object) -> None:
        raise AssertionError("nobody has sent anything")

    async def __aenter__(self) -> Self:
        if self.error is not None:
            raise self.error
        self.is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False

    async def dial(self, address: object, **options: object) -> None:
        raise ConnectionLost("nobody is there")

    @property
    def port(self) -> int:
        assert self.is_open
        return int(self.options["port"] or 50_123)


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> list[BoundEndpoint]:
    made: list[BoundEndpoint] = []
    monkeypatch.setattr(BoundEndpoint, "made", made, raising=False)
    monkeypatch.setattr(relay.daemon, "Endpoint", BoundEndpoint)
    monkeypatch.setattr(relay.daemon, "outward_host", {socket.AF_INET: "10.1.2.3", socket.AF_INET6: None}.get)
    return made


def ready_line(config: RelayConfig) -> RelayReady:
    """Return what a relay says once it is bound."""

    async def main() -> RelayReady:
        ready: asyncio.Future[RelayReady] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(RelayDaemon(config, R).run(ready.set_result))
        found = await ready
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return found

    return virtual_time.run(main())


@pytest.mark.parametrize(
    ("host", "port", "shown"),
    [
        ("0.0.0.0", 7440, "127.0.0.1:7440"),
        ("127.0.0.1", 0, "127.0.0.1:50123"),
        ("192.0.2.1", 9, "192.0.2.1:9"),
        ("::", 7440, "[::1]:7440"),
        ("2001:db8::1", 7440, "[2001:db8::1]:7440"),
    ],
)
def test_once_bound_it_says_how_this_machine_reaches_it(
    endpoints: list[BoundEndpoint], host: str, port: int, shown: str
) -> None:
    ready = ready_line(RelayConfig(host=host, port=port))
    assert (ready.node, ready.address) == (str(R.node_id), shown)
    (found,) = parse_registry(ready.registry)
    assert found.node == R.node_id
    assert str(found) == ready.registry == f"swarm://{R.node_id}@{shown}"
    (endpoint,) = endpoints
    assert (endpoint.options["host"], endpoint.options["port"]) == (host, port)
    assert endpoint.identity is R
    assert not endpoint.is_open, "cancelled, it leaves nothing open"


@pytest.mark.parametrize(
    ("host", "advertise", "public", "is_local"),
    [
        ("0.0.0.0", None, "10.1.2.3:7440", False),
        ("::", None, None, False),
        ("127.0.0.1", None, None, True),
        ("localhost", None, None, True),
        ("192.0.2.1", None, "192.0.2.1:7440", False),
        ("0.0.0.0", "relay.example.org:9", "relay.example.org:9", False),
        ("127.0.0.1", "192.0.2.7:7440", "192.0.2.7:7440", True),
    ],
)
def test_others_are_told_an_address_that_they_can_use(
    endpoints: list[BoundEndpoint], host: str, advertise: str | None, public: str | None, is_local: bool
) -> None:
    ready = ready_line(RelayConfig(host=host, advertise=advertise))
    assert ready.public == (None if public is None else f"swarm://{R.node_id}@{public}")
    assert ready.is_local is is_local
    assert public is None or ready.public is not None
    if ready.public is not None:
        (found,) = parse_registry(ready.public)
        assert found.node == R.node_id


def test_it_serves_the_registry_calls_and_its_status_and_nothing_else(endpoints: list[BoundEndpoint]) -> None:
    ready_line(RelayConfig())
    registry = {m.Announce, m.Lookup, m.Find, m.GetMembers, m.Watch, m.Gossip, m.Sync, m.Push}
    assert set(endpoints[0].options["serves"]) == registry | {m.GetStatus, m.Reserve, m.Connect, m.Release}


WORLD, SITE, MACHINE = (
    RegistryAddress(address=(host, 7440), node=B.node_id) for host in ("198.51.100.1", "10.9.9.9", "127.0.0.1")
)


@pytest.mark.parametrize(
    ("config", "address"),
    [
        (RelayConfig(), "10.1.2.3:7440"),
        (RelayConfig(host="127.0.0.1"), "127.0.0.1:7440"),
        (RelayConfig(host="localhost"), None),
        (RelayConfig(store=Store.NEVER), None),
        (RelayConfig(ring=(SITE,)), "10.1.2.3:7440"),
        (RelayConfig(ring=(WORLD,)), None),
        (RelayConfig(ring=(WORLD,), store=Store.ALWAYS), "10.1.2.3:7440"),
        (RelayConfig(ring=(WORLD, SITE), advertise="203.0.113.5:1"), "203.0.113.5:1"),
        (RelayConfig(ring=(WORLD,), advertise="relay.example:1"), None),
        (RelayConfig(host="198.51.100.2", ring=(WORLD,)), "198.51.100.2:7440"),
        (RelayConfig(host="127.0.0.1", ring=(MACHINE,)), "127.0.0.1:7440"),
        (RelayConfig(host="127.0.0.1", ring=(SITE,)), None),
    ],
)
def test_it_is_a_member_of_a_ring_if_the_others_can_reach_it(
    endpoints: list[BoundEndpoint], config: RelayConfig, address: str | None
) -> None:
    async def main() -> None:
        daemon = RelayDaemon(config, R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0.001)
        answer = daemon.answer(A.node_id, m.GetMembers(known=()))
        assert isinstance(answer, m.Members)
        own = [verify(SignedRecord.from_bytes(data)) for _, data in answer.records]
        assert [record.addresses for record in own] == ([] if address is None else [(address,)])
        request = m.Announce(record=announcement(A).to_bytes())
        if address is None and (config.ring or config.store is Store.NEVER):
            with pytest.raises(LookupError, match="stores no records"):
                daemon.answer(A.node_id, request)
        else:
            assert daemon.answer(A.node_id, request).is_new, "alone it stores whatever its address"
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


def test_who_asks_in_a_tight_loop_is_put_off(endpoints: list[BoundEndpoint]) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0)
        handler = endpoints[0].options["handler"]
        flood, honest = From(A, "192.0.2.7"), From(B, "192.0.2.8")
        for _ in range(int(READ_BURST)):
            await handler(flood, m.Find(places=()))
        with pytest.raises(Overloaded, match="too many requests"):
            await handler(flood, m.GetMembers(known=()))
        await handler(honest, m.Lookup(model_id=MODEL))
        await handler(flood, m.Announce(record=offer(A).to_bytes()))
        await asyncio.sleep(1 / READ_PER_S + 0.001)
        await handler(flood, m.Lookup(model_id=MODEL))
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


def test_it_takes_only_the_models_of_publishers_that_its_operator_allows() -> None:
    daemon = RelayDaemon(RelayConfig(publishers=frozenset({B.node_id})), R)
    for identity, is_taken in ((A, False), (B, True)):
        request = m.Announce(record=offer(identity).to_bytes())
        if is_taken:
            assert daemon.answer(identity.node_id, request).is_new
        else:
            with pytest.raises(Refused, match="publisher"):
                daemon.answer(identity.node_id, request)


def test_a_port_that_is_taken_is_said_before_it_is_ready(
    endpoints: list[BoundEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundEndpoint, "error", UserError("cannot use UDP 0.0.0.0:7440"))

    async def main() -> None:
        with pytest.raises(UserError, match="cannot use UDP"):
            await RelayDaemon(RelayConfig(), R).run(lambda ready: pytest.fail("it is not ready"))

    virtual_time.run(main())


def test_leases_end_and_are_swept_without_a_request(endpoints: list[BoundEndpoint]) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        daemon.answer(A.node_id, m.Announce(record=announcement(A, ttl_s=12).to_bytes()))
        await asyncio.sleep(11)
        assert status_of(daemon)["n_records"] == 1
        await asyncio.sleep(1 + EXPIRE_S)
        assert status_of(daemon)["n_records"] == 0
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


def status_of(daemon: RelayDaemon) -> dict[str, Any]:
    answer = daemon.answer(B.node_id, m.GetStatus())
    assert isinstance(answer, m.Status)
    status = json.loads(answer.data)
    assert isinstance(status, dict)
    return status


def test_the_handler_asks_in_the_name_of_the_node_that_the_connection_proved(endpoints: list[BoundEndpoint]) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0)
        handler = endpoints[0].options["handler"]

        request = m.Announce(record=announcement(A).to_bytes())
        with pytest.raises(IdentityMismatch):
            await handler(From(B), request)
        assert await handler(From(A), request) == m.Accepted(is_new=True, highest_seq=1)
        answer = await handler(From(B), m.Lookup(model_id=MODEL))
        assert answer.records == ((60_000, announcement(A).to_bytes()),)
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


class From:
    """What the daemon looks at of a client's connection."""

    def __init__(self, identity: Identity, address: str = "127.0.0.1") -> None:
        self.remote = identity.node_id
        self.remote_address = address


def test_a_connection_that_announces_too_often_is_put_off_before_its_record_is_read(
    endpoints: list[BoundEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0)
        handler = endpoints[0].options["handler"]
        request = m.Announce(record=announcement(A).to_bytes())
        flood, honest = From(A), From(A)
        for _ in range(int(ANNOUNCE_BURST)):
            await handler(flood, request)
        garbage = m.Announce(record=b"x" * 100)
        with pytest.raises(Overloaded, match="too many announcements") as refusal:
            await handler(flood, garbage)
        assert refusal.value.retry_after_s == pytest.approx(1 / ANNOUNCE_PER_S)
        await handler(flood, m.Lookup(model_id=MODEL))
        await handler(honest, request)  # another connection is not held up
        await asyncio.sleep(1 / ANNOUNCE_PER_S + 0.001)
        await handler(flood, request)
        with pytest.raises(Overloaded):
            await handler(flood, request)
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


def test_another_machine_cannot_announce_a_loopback_address(endpoints: list[BoundEndpoint]) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0)
        handler = endpoints[0].options["handler"]
        request = m.Announce(record=announcement(A).to_bytes())
        with pytest.raises(Refused, match=r"127\.0\.0\.1:1: got it from 192\.0\.2\.7; give --advertise"):
            await handler(From(A, "192.0.2.7"), request)
        assert (await handler(From(A, "::ffff:127.0.0.1"), request)).is_new
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())


def test_its_status_counts_records_and_seconds() -> None:
    seconds = 100.0
    daemon = RelayDaemon(RelayConfig(), R, now=lambda: seconds)
    signed = announcement(A)
    daemon.answer(A.node_id, m.Announce(record=signed.to_bytes()))
    seconds = 142.5
    assert status_of(daemon) == {
        "role": "relay",
        "version": __version__,
        "uptime_s": 42.5,
        "n_records": 1,
        "record_bytes": signed.size_bytes,
        "n_members": 0,
        "is_member": False,
        "n_reservations": 0,
        "n_channels": 0,
        "n_passed": 0,
        "bytes_passed": 0,
        "bytes_sent": 0,
        "bytes_received": 0,
    }


def test_what_a_stranger_passes_on_counts_as_announced(endpoints: list[BoundEndpoint]) -> None:
    async def main() -> None:
        daemon = RelayDaemon(RelayConfig(), R, now=now)
        task = asyncio.create_task(daemon.run(lambda ready: None))
        await asyncio.sleep(0)
        handler = endpoints[0].options["handler"]
        stranger = From(A, "192.0.2.7")
        for _ in range(int(ANNOUNCE_BURST)):
            await handler(stranger, m.Push(records=(), wanted=()))
        with pytest.raises(Overloaded, match="too many announcements"):
            await handler(stranger, m.Push(records=(), wanted=()))
        await handler(stranger, m.Gossip(summary=()))
        task.cancel()
        await asyncio.wait([task])

    virtual_time.run(main())
