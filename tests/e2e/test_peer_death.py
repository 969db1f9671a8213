"""A peer that dies ends the requests that need it, quickly and by name; everything else lives on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import aiohttp

from tests.e2e.conftest import RunningSwarm

BODY: dict[str, Any] = {"prompt": "The :mod:`json` module provides", "max_tokens": 600, "temperature": 0}
DEADLINE_S = 5.0  # the promise to users


async def read_events(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    events = []
    async for line in answer.content:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            events.append(json.loads(line.removeprefix(b"data: ")))
    return events


async def test_a_killed_peer_ends_the_stream_by_name_and_the_swarm_recovers(running_swarm: RunningSwarm) -> None:
    swarm = running_swarm
    victim = swarm.processes.peers[1]
    # A stream that fails ends with its connection, so none is used twice.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as client:
        url = f"{swarm.url}/completions"
        short = BODY | {"max_tokens": 30}
        async with client.post(url, json=short) as answer:
            assert answer.status == 200
            before = (await answer.json())["choices"][0]["text"]

        # Killed in the middle of a stream: an error within 5 s that names layer and experts.
        async with client.post(url, json=BODY | {"stream": True}) as answer:
            assert answer.status == 200
            n_lines = 0
            async for line in answer.content:
                n_lines += line.startswith(b"data: ")
                if n_lines == 10:
                    break
            await victim.kill()
            killed_at = time.monotonic()
            events = await read_events(answer)
            assert time.monotonic() - killed_at < DEADLINE_S
        error = events[-1]["error"]
        assert error["code"] == "expert_unavailable"
        assert re.search(r"layer [0-5], experts [\d, ]+", error["message"]), error
        named = [int(expert) for expert in error["experts"]]
        assert error["layer"] in range(6)
        assert named
        assert set(named) <= set(range(10, 21)), "the dead peer held experts 10 to 20"

        # While it is away, a request fails as quickly, before any header, and says when to come back.
        asked_at = time.monotonic()
        async with client.post(url, json=short) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            error = (await answer.json())["error"]
            assert error["code"] == "expert_unavailable"
            assert error["experts"]
        assert time.monotonic() - asked_at < DEADLINE_S

        # Back with the same identity: the next request is answered as before.
        await swarm.processes.restart(victim)
        await swarm.wait_healthy()
        async with client.post(url, json=short) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["text"] == before


async def test_an_idle_peers_death_is_noticed_without_a_request(running_swarm: RunningSwarm) -> None:
    swarm = running_swarm
    await swarm.processes.peers[0].kill()
    killed_at = time.monotonic()
    async with aiohttp.ClientSession() as client:
        status = 200
        while status == 200 and time.monotonic() - killed_at < 40:
            async with client.get(swarm.url.removesuffix("/v1") + "/health") as answer:
                status, health = answer.status, await answer.json()
            await asyncio.sleep(0.05)
    assert status == 503, health
    assert any("experts 0-9" in reason for reason in health["reasons"])


async def test_a_peer_that_leaves_gracefully_is_missed_at_once(running_swarm: RunningSwarm) -> None:
    swarm = running_swarm
    await swarm.processes.peers[2].stop()
    left_at = time.monotonic()
    async with aiohttp.ClientSession() as client:
        status = 200
        while status == 200 and time.monotonic() - left_at < 20:
            async with client.get(swarm.url.removesuffix("/v1") + "/health") as answer:
                status = answer.status
            await asyncio.sleep(0.05)
    assert status == 503
    assert time.monotonic() - left_at < 10, "a withdrawal is seen at the next look at the registry (2 s)"
