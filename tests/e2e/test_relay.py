"""A relay in its own process, and the registry over real sockets: it ends cleanly, and is found again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relay.daemon import RelayConfig, RelayDaemon, RelayReady
from swarm.errors import NetworkError, RemoteRefused
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.announcer import Announcer, SequenceNumbers
from swarm.registry.client import RegistryClient, parse_registry
from swarm.registry.records import ExpertAnnouncement, Record, sign
from swarm.wire import messages as m
from tests.e2e.test_commands import run
from tests.sample_records import sample_announcement, sample_offer

MODEL = ModelId(b"m" * 32)
A, B, BACKBONE, US = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))
NOBODY = "127.0.0.1:1"


def announcement(identity: Identity, address: str, experts: range, *, seq: int = 1) -> ExpertAnnouncement:
    return sample_announcement(
        identity.node_id, seq=seq, model=MODEL, experts=ExpertSet.of([1, 2], experts), addresses=(address,)
    )


async def publish(registry: str, identity: Identity, record: Record) -> None:
    async with Endpoint(identity, host="127.0.0.1") as endpoint:
        await RegistryClient(endpoint, parse_registry(registry)).publish(sign(record, identity))


@contextlib.asynccontextmanager
async def relay_here(identity: Identity, port: int = 0) -> AsyncIterator[RelayReady]:
    """Run a relay in this process."""
    ready: asyncio.Future[RelayReady] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(RelayDaemon(RelayConfig(host="127.0.0.1", port=port), identity).run(ready.set_result))
    task.add_done_callback(lambda _: ready.cancel())  # it could not start
    try:
        yield await ready
    finally:
        task.cancel()
        await asyncio.wait([task])


async def start_relay(home: Path, *options: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "swarm", "relay", "--host", "127.0.0.1", "--port", "0", "--json", *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return process, json.loads(await process.stdout.readline())


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "the end of its input"])
async def test_a_relay_ends_cleanly(tmp_path: Path, end: str) -> None:
    process, ready = await start_relay(tmp_path, "--until-eof")
    try:
        assert ready["event"] == "ready"
        assert ready["registry"] == f"swarm://{ready['node']}@{ready['address']}"
        # Its socket is bound when it says so, and a client connected to it does not keep it alive.
        async with Endpoint(US, host="127.0.0.1") as endpoint:
            client = RegistryClient(endpoint, parse_registry(ready["registry"]))
            assert await client.records() == []
            if end.startswith("SIG"):
                process.send_signal(signal.Signals[end])
            else:
                assert process.stdin is not None
                process.stdin.close()
            async with asyncio.timeout(10):
                _, stderr = await process.communicate()
        assert (process.returncode, stderr) == (0, b"")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_relay_keeps_its_identity_and_a_second_one_on_its_port_is_one_line(tmp_path: Path) -> None:
    async with relay_here(Identity.generate()) as taken:
        port = taken.address.rpartition(":")[2]
        code, out, err = await run("-m", "relay", "--host", "127.0.0.1", "--port", port, home=tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"cannot use UDP 127.0.0.1:{port}" in err
    assert "--port" in err
    assert (tmp_path / "config" / "relay.key").stat().st_mode & 0o777 == 0o600


async def test_peers_lists_what_was_announced_who_answers_and_what_is_missing(tmp_path: Path) -> None:
    async def status(connection: Connection, request: m.Request) -> m.Response:
        return m.Status(data=json.dumps({"n_assignments": 12, "version": "9.9", "uptime_s": 3.5}).encode())

    async with (
        relay_here(Identity.generate()) as relay,
        Endpoint(A, host="127.0.0.1", handler=status, serves=(m.GetStatus,)) as live,
    ):
        where = f"127.0.0.1:{live.port}"
        await publish(relay.registry, A, announcement(A, where, range(4)))
        await publish(relay.registry, B, announcement(B, NOBODY, range(2, 8)))
        offer = sample_offer(BACKBONE.node_id, model=MODEL, moe_layers="1-3", addresses=(NOBODY,))
        await publish(relay.registry, BACKBONE, offer)
        (code, out, err), (code_of_table, table, _) = await asyncio.gather(
            run("-m", "swarm", "peers", "--json", "--registry", relay.registry, home=tmp_path),
            run("-m", "swarm", "peers", "--registry", relay.address, home=tmp_path),
        )
    assert (code, code_of_table, err) == (0, 0, "")
    (model,) = json.loads(out)["models"]
    assert model["name"] == f"tiny@{MODEL.short}"
    assert model["backbones"] == [str(BACKBONE.node_id)]
    assert model["missing"] == {"1": "4-7", "2": "4-7", "3": "0-7"}, "only what a peer that answers holds is there"
    shown = {peer["node"]: peer for peer in model["peers"]}
    assert shown.keys() == {str(A.node_id), str(B.node_id)}
    up, down = shown[str(A.node_id)], shown[str(B.node_id)]
    assert (up["up"], up["addresses"], up["experts"]) == (True, [where], [["1-2", "0-3"]])
    assert (up["n_assignments"], up["version"], up["uptime_s"]) == (12, "9.9", 3.5)
    assert down["up"] is False
    assert NOBODY in down["error"]
    assert A.node_id.short in table
    assert "Missing experts" in table


async def test_a_node_that_announces_in_a_tight_loop_is_put_off_and_others_are_not() -> None:
    async with (
        relay_here(Identity.generate()) as relay,
        Endpoint(A, host="127.0.0.1") as endpoint,
        Endpoint(B, host="127.0.0.1") as other,
    ):
        client = RegistryClient(endpoint, parse_registry(relay.registry))
        refusal: RemoteRefused | None = None
        for seq in range(1, 60):
            try:
                await client.publish(sign(announcement(A, NOBODY, range(4), seq=seq), A))
            except RemoteRefused as error:
                refusal = error
                break
        assert refusal is not None
        assert refusal.remote_code == m.ErrorCode.BUSY
        await client.records()
        beside = RegistryClient(other, parse_registry(relay.registry))
        await beside.publish(sign(announcement(B, NOBODY, range(4)), B))


async def test_a_server_knows_the_address_that_a_client_comes_from() -> None:
    seen: list[str | None] = []

    async def status(connection: Connection, request: m.Request) -> m.Response:
        seen.append(connection.remote_address)
        return m.Status(data=b"{}")

    async with (
        Endpoint(A, host="127.0.0.1", handler=status, serves=(m.GetStatus,)) as server,
        Endpoint(US, host="127.0.0.5") as client,
    ):
        connection = await client.dial(("127.0.0.1", server.port), expected=A.node_id)
        await connection.request(m.GetStatus(), timeout_s=5.0)
        assert connection.remote_address is None
    assert seen == ["127.0.0.5"]


async def test_another_registry_than_the_one_expected_is_refused(tmp_path: Path) -> None:
    async with relay_here(Identity.generate()) as relay, Endpoint(US, host="127.0.0.1") as endpoint:
        client = RegistryClient(endpoint, parse_registry(f"swarm://{A.node_id}@{relay.address}"))
        with pytest.raises(NetworkError, match="another node answered"):
            await client.records()


async def test_a_restarted_registry_is_found_again_by_announcer_and_client() -> None:
    identity = Identity.generate()
    async with Endpoint(A, host="127.0.0.1") as endpoint, Endpoint(US, host="127.0.0.1") as asker:
        async with relay_here(identity) as relay:
            registry = RegistryClient(endpoint, parse_registry(relay.registry))
            announcer = Announcer(
                registry,
                A,
                SequenceNumbers(None),
                lambda seq, address: announcement(A, address, range(4), seq=seq),
            )
            await announcer.announce()
            client = RegistryClient(asker, parse_registry(relay.registry))
            (first,) = await client.holders(MODEL)
            assert first.addresses == (f"127.0.0.1:{endpoint.port}",), "where the registry saw it"
        port = int(relay.address.rpartition(":")[2])
        async with relay_here(identity, port):
            await announcer.announce()
            (second,) = await client.holders(MODEL)
            assert second.seq > first.seq
