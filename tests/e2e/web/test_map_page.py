"""The peer map's page in a real browser: what it shows, how soon, how smoothly, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from swarm.emulation.processes import LocalSwarm
from swarm.web.map_server import add_map
from swarm.web.registry_map import digits
from tests.e2e.conftest import N_EXPERT, wait_healthy
from tests.swarm.gateway.test_app import ScriptedGenerator
from tests.swarm.gateway.test_app import serving as serving_gateway

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-quic", "--disable-background-networking"]
SCREENSHOTS = {"desktop": (1280, 900, "light"), "phone": (390, 844, "light"), "dark": (1280, 900, "dark")}
CITIES = [(52, 13), (48, 2), (40, -74), (37, -122), (35, 139), (-34, 151), (-23, -46), (19, 72), (1, 103), (30, 31)]


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def serving(make_map: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    app = web.Application()
    add_map(app, make_map)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class MadeUpMap:
    """A swarm of a model of 48 layers with 128 experts, whose round trips are never the same twice."""

    def __init__(self, n_peers: int) -> None:
        self.random = random.Random(7)
        now = int(time.time())
        self.peers = [
            {
                "id": f"{number:052d}",
                "short": f"{self.random.getrandbits(32):08x}",
                "name": f"peer {number}" if number % 3 == 0 else "",
                "place": [lat + self.random.randint(-3, 3), lon + self.random.randint(-4, 4)] if number % 4 else None,
                "models": ["a" * 64],
                "state": self.random.choices(["in use", "quarantined", "gone"], [90, 5, 5])[0],
                "state_since": now - self.random.randrange(9000),
                "seen_since": now - self.random.randrange(90_000),
                "experts": [["0-47", f"{number % 16 * 8}-{number % 16 * 8 + 7}"]],
                "n_blocks": 384,
                "exact": False,
                "path": self.random.choices(["direct", "relay"], [7, 3])[0],
                "rtt_ms": round(self.random.uniform(5, 180), 1),
            }
            for number in range(n_peers)
            for lat, lon in [self.random.choice(CITIES)]
        ]

        # Two names that try to leave their place: markup, and one written from right to left.
        names = [
            "Ann",
            "GPU shed 4",
            "<img src=x onerror=alert(1)>",
            "\u05e9\u05dc\u05d5\u05dd (7)",
            "Zoë",
            "rack 12",
            "Bob",
        ]
        self.board: dict[str, Any] | None = {
            "days": 7,
            "counted_by": ["ru5bqtdn" + "a" * 44, "k3x7mzpw" + "a" * 44],
            "rows": [
                {
                    "id": f"{number:052d}",
                    "short": f"{self.random.getrandbits(32):08x}",
                    "name": name,
                    "points": 91_234_567 >> 2 * number,
                    "rows": 31_234_567 >> 2 * number,
                    "pairs": 99_234_567 >> 2 * number,
                }
                for number, name in enumerate(names)
            ],
        }

    def __call__(self) -> dict[str, Any]:
        for peer in self.peers:
            peer["rtt_ms"] = round(self.random.uniform(5, 180), 1)
        n_used = sum(peer["state"] == "in use" for peer in self.peers)
        row = digits([n_used // 16] * 120 + [1] * 8)
        model = {
            "model": "qwen3-30b-a3b@1a2b3c4d",
            "model_id": "a" * 64,
            "servable": True,
            "missing": {},
            "replicas": {str(layer): row for layer in range(48)},
        }
        return {
            "at": round(time.time()),
            "source": "backbone",
            "servable": True,
            "models": [model],
            "n_used": n_used,
            "tokens_per_s": 23.4,
            "place": [50, 8],
            "join": "SWARM_REGISTRY=swarm://abcdefgh@198.51.100.1:7440 swarm join --experts auto",
            "leaderboard": self.board,
            "peers": self.peers,
        }


async def opened(page: Page, url: str) -> list[str]:
    """Open the map; return a list that fills with what goes wrong, and with requests to elsewhere."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else wrong.append(request.url))
    await page.goto(f"{url}/map")
    await page.wait_for_selector("#rows tr", timeout=10_000)
    return wrong


async def test_it_looks_right_and_reads_right_on_every_screen(tmp_path: Path) -> None:
    """With SWARM_KEEP_SCREENSHOTS=DIR the pictures are kept there: docs/map/ is made that way."""
    folder = Path(os.environ.get("SWARM_KEEP_SCREENSHOTS", tmp_path))
    async with serving(MadeUpMap(60)) as url, browser() as chromium:
        for name, (width, height, scheme) in SCREENSHOTS.items():
            context = await chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page = await context.new_page()
            wrong = await opened(page, url)
            await page.wait_for_timeout(300)
            await page.screenshot(path=folder / f"{name}.png")
            if name == "desktop":
                await page.locator("#board").screenshot(path=folder / "leaderboard.png")
            overflow = await page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert overflow <= 0, f"{name} scrolls sideways"
            found = await Axe().run(page)
            serious = [
                (each["id"], each["nodes"][0]["html"])
                for each in found.response["violations"]
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], name
            assert wrong == [], name
            await context.close()


async def test_it_can_be_used_by_keyboard_alone() -> None:
    async with serving(MadeUpMap(30)) as url, browser() as chromium:
        page = await chromium.new_page()
        await opened(page, url)
        reached = set()
        for _ in range(40):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"join", "copy", "filter", "state", "round trip"} <= reached
        await page.focus("#filter")
        await page.keyboard.type("peer 27")
        await page.wait_for_selector("#rows tr:only-child")
        await page.fill("#filter", "")
        await page.focus("th button:has-text('round trip')")
        await page.keyboard.press("Enter")
        assert await page.get_attribute("th:has-text('round trip')", "aria-sort") == "ascending"


async def test_the_leaderboard_shows_names_as_text_and_is_kept_up_to_date() -> None:
    shown = MadeUpMap(3)
    board = shown.board
    assert board is not None
    async with serving(shown) as url, browser() as chromium:
        page = await chromium.new_page()
        wrong = await opened(page, url)
        await page.wait_for_selector("#board-rows tr:nth-child(7)")
        names = await page.eval_on_selector_all("#board-rows .name", "cells => cells.map(cell => cell.textContent)")
        assert names == [row["name"] for row in board["rows"]]
        assert await page.locator("#board img").count() == 0
        assert (
            await page.inner_text("#board-rows tr:first-child") == f"1\tAnn\t91.2M\t31.2M\t{board['rows'][0]['short']}"
        )
        assert "ru5bqtdn, k3x7mzpw" in await page.inner_text("#board-about")
        shown.board = board | {"rows": [board["rows"][6] | {"points": 10**9}, *board["rows"][:2]]}
        await page.wait_for_selector("#board-rows tr:nth-child(3):last-child", timeout=10_000)
        assert await page.inner_text("#board-rows tr:first-child .name") == "Bob"
        shown.board = board | {"rows": []}
        await page.wait_for_selector("#board-about:has-text('join with --name')", timeout=10_000)
        shown.board = None
        await page.wait_for_selector("#board", state="hidden", timeout=10_000)
        assert wrong == []


@pytest.mark.alone
async def test_two_thousand_peers_stay_smooth_and_cheap() -> None:
    async with serving(MadeUpMap(2000)) as url, browser() as chromium:
        page = await chromium.new_page()
        session = await page.context.new_cdp_session(page)
        await session.send("Network.enable")
        n_bytes = 0

        def count(event: dict[str, Any]) -> None:
            nonlocal n_bytes
            n_bytes += event["dataLength"]

        await opened(page, url)
        await page.wait_for_timeout(4000)  # the burst that was saved up
        session.on("Network.dataReceived", count)
        times: list[float] = await page.evaluate(
            """new Promise(done => {
                const times = []; let last = performance.now();
                const tick = now => { times.push(now - last); last = now;
                    times.length < 400 && times.reduce((a, b) => a + b, 0) < 10000 ? requestAnimationFrame(tick) : done(times); };
                requestAnimationFrame(tick);
            })"""
        )
        seconds = sum(times) / 1000
    p95 = sorted(times)[int(len(times) * 0.95)]
    assert p95 <= 50 * 2, f"{p95:.0f} ms"  # 50 ms is the aim (measured: see docs/map.md); this machine is shared
    assert n_bytes / seconds <= 5_000, f"{n_bytes / seconds:.0f} bytes/s"


async def test_a_chat_begun_anew_in_mid_answer_knows_nothing_of_the_former() -> None:
    generator = ScriptedGenerator("one", asyncio.Event())
    async with serving_gateway(generator, peer_map=MadeUpMap(1)) as client, browser() as chromium:
        page = await chromium.new_page()
        await page.goto(f"{client.base_url.removesuffix('/v1')}/chat")
        await page.fill("#text", "first question")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#turns li.assistant:has-text('one')")
        await page.click("#new")
        await page.wait_for_selector("#send:enabled")
        await page.fill("#text", "second question")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#turns li.assistant:has-text('one')")
    asked = str(generator.requests[1].prompt)
    assert "second question" in asked
    assert "one" not in asked.replace("second question", "")


@pytest.mark.alone
async def test_who_joins_and_leaves_is_seen_within_two_seconds_and_the_chat_works(
    tmp_path: Path, tiny_moe: Path
) -> None:
    async with LocalSwarm(tmp_path) as processes, browser() as chromium:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf")
        url = backbone.ready["url"].removesuffix("/v1")
        page = await chromium.new_page()
        await page.goto(f"{url}/map")
        await page.wait_for_selector("#live.on")
        assert "cannot be served" in await page.inner_text("#verdict")
        await processes.add_peers(2, N_EXPERT)
        await wait_healthy(backbone.ready["url"])
        started = time.monotonic()
        await page.wait_for_selector("#rows tr:nth-child(2)", timeout=10_000)
        await page.wait_for_selector("#verdict.yes", timeout=10_000)
        seen_s = time.monotonic() - started
        assert seen_s <= 2.0, "after the backbone itself knew of them"

        chat = await chromium.new_page()
        await chat.goto(f"{url}/chat")
        await chat.wait_for_selector("#model:has-text('model-Q4_K_M@')")
        await chat.fill("#text", "What does the json module do?")
        await chat.keyboard.press("Enter")
        await chat.wait_for_selector("#stop")
        await chat.wait_for_selector("#turns li.assistant:not(:has-text('…'))", timeout=20_000)
        await chat.click("#stop")
        await chat.wait_for_selector("#send:enabled")
        assert await chat.locator("#turns li").count() == 2
        serious = [each["id"] for each in (await Axe().run(chat)).response["violations"] if each["impact"] != "minor"]
        assert serious == []

        await processes.peers[0].stop()
        started = time.monotonic()
        await page.wait_for_selector("#verdict.no", timeout=10_000)
        assert time.monotonic() - started <= 2.0
