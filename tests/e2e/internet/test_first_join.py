"""A new volunteer on a fresh host behind NAT, from nothing to serving; it fills the recording in docs/volunteer.md."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from swarm.emulation.internet import VirtualInternet
from swarm.emulation.nat import NatKind
from swarm.emulation.path import PathSpec
from tests.e2e.internet.test_generation import generate
from tests.e2e.internet.world import World
from tests.terminal import Terminal

RATE_BIT_S = 4e6  # of each path: the slice's 3 MB take about 6 s
COMMAND = "swarm join --experts 12-19"
DOCUMENT = Path(__file__).parents[3] / "docs" / "volunteer.md"
START, END = "<!-- recording: written by tests/e2e/internet/test_first_join.py -->", "<!-- end of recording -->"


def blocks(home: Path) -> dict[str, int]:
    """Return the fetched blocks with the times of their last change."""
    return {path.name: path.stat().st_mtime_ns for path in home.glob("cache/blocks/*/blk.*")}


def recording(registry: str, first: str, second: str, third: str) -> str:
    """Return what a person would have seen, with the commands typed."""
    return "\n".join(
        (
            f"$ export SWARM_REGISTRY={registry}",
            f"$ {COMMAND}",
            first,
            "Killed                                            # kill -9, in the middle of the download",
            f"$ {COMMAND}",
            second,
            "^C",
            third,
            "$",
        )
    )


async def test_from_nothing_to_serving_with_the_command_that_the_map_shows(tmp_path: Path, tiny_moe: Path) -> None:
    home, model = tmp_path / "volunteer", tiny_moe / "model-Q4_K_M.gguf"
    async with VirtualInternet(PathSpec(delay_s=0.01, rate_bit_s=RATE_BIT_S)) as internet:
        made = World(internet, tmp_path)
        try:
            await made.start_relays(1)
            outer = await internet.public("outer")
            inner, _ = await made.behind("home", NatKind.PORT_RESTRICTED)
            common = ("--model", str(model), "--registry", made.registry, "--json", "--until-eof", "--host", "::")
            backbone = await made.start(
                outer, "-m", "swarm", "serve", *common, "--gateway", "127.0.0.1:8080", home="backbone"
            )
            url = (await backbone.event())["url"]
            peer = await made.start(outer, "-m", "swarm", "join", *common, "--experts", "0-11,20-31", home="peer")
            await peer.event()

            command = inner.command(sys.executable, "-m", *COMMAND.split())
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "SWARM_HOME": str(home),
                "SWARM_REGISTRY": made.registry,
                "OMP_NUM_THREADS": "1",
            }
            async with Terminal.running(command, environment) as terminal:
                await terminal.until("from now on? [y/N]")
                terminal.type("y")
                await terminal.until("Join? [Y/n]")
                assert blocks(home) == {}, "nothing is fetched before it is agreed to"
                terminal.type("")
                while len(blocks(home)) < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await terminal.kill()
                first = terminal.text
            fetched = blocks(home)
            assert 8 <= len(fetched) < 48, "in the middle of the download"

            async with Terminal.running(command, environment) as terminal:
                await terminal.until("serving")
                assert {name: blocks(home)[name] for name in fetched} == fetched, (
                    "what was checked is not fetched again"
                )
                assert len(blocks(home)) == 48
                assert "Join?" not in terminal.text, "nobody is asked twice"
                text, _ = await generate(made, outer, url, None, "asker")
                assert text
                await terminal.until("1 backbone")
                await asyncio.sleep(2.5)  # for a redraw with all that was counted
                second = terminal.text
                terminal.interrupt()
                await terminal.until("Leaving: what is under way is finished")
                assert await asyncio.wait_for(terminal.process.wait(), 30) == 0
                third = next(line for line in terminal.lines if line.startswith("Leaving"))
        finally:
            await made.end()
    assert "serving" in second
    assert " rows (" in second
    shown = recording(made.registry, first, second, third)
    print(shown)
    document = DOCUMENT.read_text()
    if os.environ.get("SWARM_WRITE_DOCS"):
        before, _, rest = document.partition(START)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{START}\n\n```console\n{shown}\n```\n\n{END}{after}")
    else:
        for each in ("Join? [Y/n]", COMMAND, "This is what joining takes:"):
            if each not in document.partition(START)[2].partition(END)[0]:
                pytest.fail(f"docs/volunteer.md has no such recording: {each}; set SWARM_WRITE_DOCS=1 to write it")
