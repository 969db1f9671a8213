"""People for a soak: they ask over HTTP, with random questions and patience; some leave in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_WORDS = 40  # of a question; 8 tokens each in the embedded model
MAX_TOKENS = 120
STREAMED_SHARE = 0.6
LEAVING_SHARE = 0.2
MAX_LINES = 30  # of a stream, after which who leaves has left
MAX_PATIENCE_S = 1.0  # of who leaves and reads no stream


class SoakClients:
    """So many people, each asking one question after another.

    Attributes:
        failures: what should not have happened, as text; n_answered, n_left, n_tokens: how many did, and what was written.
        latencies_s: of whole answers.
    """

    def __init__(self, url: str, n_clients: int, *, think_s: float, seed: int) -> None:
        """`url`: of the API, with its `/v1`; `think_s`: mean time between an answer and the next question."""
        self.failures: list[str] = []
        self.latencies_s: list[float] = []
        self.n_answered = self.n_left = self.n_tokens = 0
        self._url = url
        self._think_s = think_s
        self._rngs = [random.Random(f"{seed}/{i}") for i in range(n_clients)]

    async def run(self, until: float) -> None:
        """Ask until `time.monotonic()` is there; return when the last answer has come."""
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as group,
        ):
            for rng in self._rngs:
                group.create_task(self._one(session, rng, until))

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random, until: float) -> None:
        while time.monotonic() < until:
            body = question(rng)
            leaves = rng.random() < LEAVING_SHARE
            try:
                if leaves and not body["stream"]:
                    await self._ask_and_leave(session, body, rng.uniform(0, MAX_PATIENCE_S))
                else:
                    await self._ask(session, body, rng.randrange(1, MAX_LINES) if leaves else None)
            except (aiohttp.ClientError, TimeoutError) as error:  # aiohttp's own time for an answer is no ClientError
                self.failures.append(repr(error))
            await asyncio.sleep(rng.expovariate(1 / self._think_s) if self._think_s else 0)

    async def _ask_and_leave(self, session: aiohttp.ClientSession, body: Mapping[str, Any], patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self._ask(session, body, None)
        except TimeoutError:
            self.n_left += 1

    async def _ask(self, session: aiohttp.ClientSession, body: Mapping[str, Any], leaves_after: int | None) -> None:
        asked_at = time.monotonic()
        n_lines = 0
        async with session.post(f"{self._url}/completions", json=body) as answer:
            if answer.status != 200:
                self.failures.append(f"{answer.status}: {await answer.text()}")
                return
            async for line in answer.content:
                n_lines += 1
                if is_error(line):
                    self.failures.append(line.decode(errors="replace"))
                if leaves_after is not None and n_lines > leaves_after:
                    answer.close()
                    self.n_left += 1
                    return
        self.n_answered += 1
        self.latencies_s.append(time.monotonic() - asked_at)


def question(rng: random.Random) -> dict[str, Any]:
    """Return the body of a request: a length, an answer's length and a temperature by chance."""
    return {
        "prompt": " ".join(f"json.dump{rng.randrange(1000)}()" for _ in range(rng.randrange(1, MAX_WORDS))),
        "max_tokens": rng.randrange(1, MAX_TOKENS),
        "stream": rng.random() < STREAMED_SHARE,
        "temperature": rng.choice([0, 1]),
    }


def is_error(line: bytes) -> bool:
    """Return whether a line of a stream of server-sent events reports an error; the text written may well say "error"."""
    name, _, data = line.partition(b":")
    if name != b"data" or data.strip() in (b"", b"[DONE]"):
        return name == b"event" and data.strip() == b"error"
    return "error" in json.loads(data)
