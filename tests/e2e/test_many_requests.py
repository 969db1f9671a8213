"""Many clients of one gateway, some of them rude: who leaves frees everything, who misbehaves is told, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from swarm.emulation.processes import LocalSwarm
from tests.e2e.conftest import N_EXPERT, RunningSwarm

# Alone: one of them holds a promise of 2 s.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]
FREE_WITHIN_S = 2.0  # scenario 9's promise
PROMPT = "The :mod:`json` module provides"
LONG = "import json\n" * 180  # 900 tokens, of the 1,024 that the model has room for
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}


@contextlib.asynccontextmanager
async def running(folder: Path, tiny_moe: Path) -> AsyncIterator[RunningSwarm]:
    async with LocalSwarm(folder) as processes:
        options = ("--slots", "4", "--lanes", "2", "--queue", "2")
        backbone = await processes.start_backbone(tiny_moe / "model-Q8_0.gguf", *options)
        await processes.add_peers(2, N_EXPERT)
        made = RunningSwarm(processes, backbone)
        await made.wait_healthy()
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> AsyncIterator[RunningSwarm]:
    """One for all: each test leaves it as idle as it was."""
    async with running(tmp_path_factory.mktemp("swarm"), tiny_moe) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def metric(client: aiohttp.ClientSession, swarm: RunningSwarm, name: str) -> float:
    async with client.get(swarm.url.removesuffix("/v1") + "/metrics") as answer:
        found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", await answer.text(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def becomes(
    client: aiohttp.ClientSession, swarm: RunningSwarm, name: str, value: float, within_s: float
) -> float:
    """Return how long it took until a metric had a value; fail when it takes too long."""
    began_at = time.monotonic()
    while (got := await metric(client, swarm, name)) != value:
        assert time.monotonic() - began_at < within_s, f"{name}: got {got}, expected {value} within {within_s} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - began_at


async def text_of(client: aiohttp.ClientSession, swarm: RunningSwarm, **fields: Any) -> str:
    async with client.post(f"{swarm.url}/completions", json=BODY | fields) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["text"])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_frees_slot_and_peers_within_two_seconds(
    swarm: RunningSwarm, client: aiohttp.ClientSession, phase: str
) -> None:
    """Scenario 9: generation went on after the client had left."""
    before = await text_of(client, swarm)
    n_cancelled = await metric(client, swarm, "swarm_requests_cancelled_total")
    n_first = await metric(client, swarm, "swarm_ttft_seconds_count")
    fields = {"prompt": LONG, "max_tokens": 8} if phase == "prefill" else {"max_tokens": 2000}
    task = asyncio.create_task(text_of(client, swarm, **fields))
    await becomes(client, swarm, "swarm_requests_running", 1, FREE_WITHIN_S)
    if phase == "decode":
        await becomes(client, swarm, "swarm_ttft_seconds_count", n_first + 1, FREE_WITHIN_S)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await becomes(client, swarm, "swarm_requests_running", 0, FREE_WITHIN_S)
    assert await metric(client, swarm, "swarm_requests_cancelled_total") == n_cancelled + 1
    assert await metric(client, swarm, "swarm_ttft_seconds_count") == n_first + (phase == "decode")
    n_trips = await metric(client, swarm, "swarm_round_trips_total")
    await asyncio.sleep(0.3)
    assert await metric(client, swarm, "swarm_round_trips_total") == n_trips, "peers are still asked for its layers"
    assert await text_of(client, swarm) == before


async def test_who_finds_the_line_full_is_told_when_to_come_back_and_nobody_else_notices(
    swarm: RunningSwarm, client: aiohttp.ClientSession
) -> None:
    alone = await text_of(client, swarm)

    async def ask() -> tuple[int, str | None, Any]:
        async with client.post(f"{swarm.url}/completions", json=BODY) as answer:
            return answer.status, answer.headers.get("Retry-After"), await answer.json()

    outcomes = await asyncio.gather(*(ask() for _ in range(12)))
    refused = [outcome for outcome in outcomes if outcome[0] == 429]
    answered = [outcome for outcome in outcomes if outcome[0] == 200]
    assert len(refused) + len(answered) == 12
    assert len(answered) >= 6
    assert refused, "twelve requests found room for six"
    for _, retry_after, body in refused:
        assert int(retry_after or 0) >= 1
        assert body["error"]["code"] == "overloaded"
    assert {body["choices"][0]["text"] for _, _, body in answered} == {alone}


async def test_a_sigterm_lets_streams_end_and_refuses_new_requests(
    tmp_path: Path, tiny_moe: Path, client: aiohttp.ClientSession
) -> None:
    fields = BODY | {"max_tokens": 200, "stream": True}
    async with running(tmp_path, tiny_moe) as swarm:
        async with client.post(f"{swarm.url}/completions", json=fields) as answer:
            await answer.content.readline()
            swarm.backbone.leave()
            async with client.post(f"{swarm.url}/completions", json=BODY) as other:
                assert other.status == 429
                assert "shutting down" in (await other.json())["error"]["message"]
            lines = [line async for line in answer.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(swarm.backbone.process.wait(), 10) == 0


async def test_rude_clients_get_clear_errors_and_the_others_their_answers(
    swarm: RunningSwarm, client: aiohttp.ClientSession
) -> None:
    """Malformed JSON, invalid UTF-8, a huge body, a body that never ends (slow loris), while others stream."""
    alone = await text_of(client, swarm)
    url = f"{swarm.url}/completions"
    host, port = re.search(r"//([\d.]+):(\d+)/", url).groups()  # type: ignore[union-attr]
    json_type = {"Content-Type": "application/json"}
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    for _, writer in slow:
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n".encode())
        await writer.drain()
    polite = [asyncio.create_task(text_of(client, swarm)) for _ in range(3)]
    refusals: list[tuple[bytes, int]] = [(b'{"prompt": ', 400), (b'{"prompt": "\xff\xfe"}', 400), (b"[]", 400)]
    for body, status in refusals:
        async with client.post(url, data=body, headers=json_type) as answer:
            assert answer.status == status, body
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
    async with client.post(url, data=b" " * (9 << 20), headers=json_type) as answer:
        assert answer.status == 413
        assert "too large" in (await answer.json())["error"]["message"]
    for _, writer in slow:  # one byte more, as they do
        writer.write(b"X")
    assert await asyncio.gather(*polite) == [alone] * 3
    for _, writer in slow:
        writer.close()
    assert await metric(client, swarm, "swarm_requests_running") == 0


async def test_reproducible_answers_are_the_same_alone_and_among_others(
    tmp_path: Path, tiny_moe: Path, client: aiohttp.ClientSession
) -> None:
    """Bit by bit, so that texts at a high temperature are the same too: a seed draws from the same logits."""
    prompts = ["The :mod:`json` module provides " + "an interface to " * n for n in range(0, 40, 5)]
    fields = [{"prompt": prompt, "temperature": 1.5, "seed": 3, "max_tokens": 24} for prompt in prompts]
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf", "--reproducible", "--ctx", "512")
        assert backbone.ready["wire"] == "exact"
        await processes.add_peers(2, N_EXPERT, "--exact-kernels")
        swarm = RunningSwarm(processes, backbone)
        await swarm.wait_healthy()
        together = await asyncio.gather(*(text_of(client, swarm, **each) for each in fields))
        for each, text in zip(fields, together, strict=True):
            assert await text_of(client, swarm, **each) == text
