"""The commands as a user types them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import N_EXPERT, RunningSwarm, wait_healthy

TIMEOUT_S = 90.0
CLONE_NEWNET = 0x40000000  # linux/sched.h
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


async def run(*arguments: str, home: Path, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a Python program."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"SWARM_HOME": str(home)},
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_demo_reports_what_it_did(tmp_path: Path) -> None:
    code, out, err = await run("-m", "swarm", "demo", "--once", "--json", "--tokens", "40", home=tmp_path)
    assert code == 0, err
    report = json.loads(out)
    assert report["n_tokens"] >= 2
    assert report["text"]
    assert report["round_trips_per_token"] == 6  # one for each MoE layer, and no draft
    assert report["tokens_per_s"] > 0
    assert report["stock_tokens_per_s"] > 0
    # Each of the 4 experts' rows is at least 1 KB (D=256, f32) on the 1 to 3 peers that hold them.
    assert report["bytes_out_per_token_layer"] > 1024
    assert report["bytes_back_per_token_layer"] > 1024
    # 4 experts of each layer for each token; the last token is sampled and never fed back, and of the prompt only the last
    # token passes the last layer, since no other's logits are asked for.
    n_token_layers = 5 * report["n_prompt_tokens"] + 1 + 6 * (report["n_tokens"] - 1)
    assert sum(peer["assignments"] for peer in report["peers"]) == 4 * n_token_layers
    assert len(report["peers"]) == 3


async def test_the_demo_streams_a_text_and_prints_a_table(tmp_path: Path) -> None:
    arguments = [
        "-m",
        "swarm",
        "demo",
        "--once",
        "--tokens",
        "20",
        "--peers",
        "2",
        "--prompt",
        "To create a new thread",
    ]
    code, out, err = await run(*arguments, home=tmp_path)
    assert code == 0, err
    assert out.startswith("To create a new thread")
    assert "tokens/s" in out
    assert "round trips per token" in out


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Move this thread, and what it starts, into a network of its own with nothing but loopback; as it is without root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") if sys.platform == "linux" else contextlib.nullcontext() as here:
        if here is None or shutil.which("ip") is None or libc.unshare(CLONE_NEWNET) != 0:
            yield
            return
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            if libc.setns(here.fileno(), CLONE_NEWNET) != 0:
                pytest.exit("cannot go back into the machine's network")


@pytest.fixture
def free_port_7440() -> Iterator[None]:
    """The relay's own port is free: in a network of its own always, else if nobody on this machine has it."""
    with own_network():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("127.0.0.1", 7440))
            except OSError:
                pytest.skip("UDP port 7440, the relay's own, is in use")
        yield


@pytest.mark.usefixtures("free_port_7440")
async def test_join_needs_no_flag_beside_a_relay_on_this_machine(tmp_path: Path, tiny_moe: Path) -> None:
    children = []

    async def start(*arguments: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        environment = os.environ | {"SWARM_HOME": str(tmp_path / arguments[0])}
        environment.pop("SWARM_REGISTRY", None)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "swarm",
            *arguments,
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        children.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(30):
            return process, json.loads(await process.stdout.readline())

    try:
        relay, _ = await start("relay")
        _, backbone = await start("serve", "--model", str(tiny_moe / "model-Q8_0.gguf"), "--gateway", "127.0.0.1:0")
        peer, joined = await start("join", "--experts", f"0-{N_EXPERT - 1}")
        assert joined["model"] == backbone["model"]
        await wait_healthy(backbone["url"])

        code, out, err = await run("-m", "swarm", "peers", "--json", home=tmp_path / "asker")
        assert code == 0, err
        (model,) = json.loads(out)["models"]
        assert model["name"] == backbone["model"]
        assert model["missing"] == {}
        assert [each["node"] for each in model["peers"]] == [joined["node"]]
        assert model["peers"][0]["up"] is True

        # SIGTERM ends both cleanly; the peer withdraws, so the registry forgets it at once.
        peer.terminate()
        assert await asyncio.wait_for(peer.wait(), 10) == 0
        code, out, err = await run("-m", "swarm", "peers", "--json", home=tmp_path / "asker")
        assert code == 0, err
        assert json.loads(out)["models"][0]["peers"] == []
        relay.terminate()
        assert await asyncio.wait_for(relay.wait(), 10) == 0
    finally:
        for process in children:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_peer_can_take_its_experts_from_a_file(tmp_path: Path, tiny_moe: Path) -> None:
    from swarm.emulation.processes import LocalSwarm

    file = tiny_moe / "model-Q8_0.gguf"
    async with LocalSwarm(tmp_path) as processes:
        peer = await processes.add_peer(range(N_EXPERT), "--model", str(file), "--layers", "0-2")
        assert peer.ready["experts"] == "experts 0-31 of layers 0-2"
        assert not (peer.home / "cache" / "blocks").exists(), "nothing was fetched"
        backbone = await processes.start_backbone(file)
        await processes.add_peer(range(N_EXPERT), "--layers", "3-5")
        assert backbone.ready["model"] == peer.ready["model"], "the model id does not depend on who computed it"
        await wait_healthy(backbone.ready["url"])


async def test_the_official_openai_client_streams_a_chat(running_swarm: RunningSwarm, tmp_path: Path) -> None:
    code, out, err = await run(str(EXAMPLES / "openai_client.py"), running_swarm.url, home=tmp_path)
    assert code == 0, err
    assert "+ 64 tokens of model-Q4_K_M@" in out
    assert len(out) > 100


async def test_the_local_swarm_example_runs(tmp_path: Path) -> None:
    code, out, err = await run(str(EXAMPLES / "local_swarm.py"), "To create a new thread", home=tmp_path)
    assert code == 0, err
    assert out.startswith("To create a new thread")
    assert len(out) > 100
    pairs = [int(line.split()[3]) for line in err.splitlines() if line.startswith("peer ")]
    assert len(pairs) == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["join", "--experts", "nine"], "cannot read experts"),
        (["join", "--experts", "0-3", "--registry", "127.0.0.1:1"], "no registry answers"),
        (["serve", "--model", "no/such/file.gguf"], "no/such/file.gguf"),
        (["serve", "--model", __file__], "as a GGUF file"),
        (["demo", "--once", "--wire", "f7"], "unknown wire form"),
        (["verify", "--model", __file__], "as a GGUF file"),
    ],
)
async def test_a_users_mistake_is_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    code, out, err = await run("-m", "swarm", *arguments, home=tmp_path)
    assert code in (1, 2)
    assert "Traceback" not in err
    assert expected in err
    assert out == ""


async def test_what_split_writes_is_served_and_joined_with(tmp_path: Path, tiny_moe: Path) -> None:
    from swarm.emulation.processes import LocalSwarm

    folder = tmp_path / "split"
    model = str(tiny_moe / "model-Q8_0.gguf")
    code, out, err = await run(
        "-m", "swarm", "split", model, "--out", str(folder), "--parts", "2", "--json", home=tmp_path
    )
    assert code == 0, err
    slices = [file["path"] for file in json.loads(out)["files"] if file["kind"] == "slice"]
    # One slice beside its manifest, one without: that peer gets the manifest from the backbone.
    alone = tmp_path / "alone.gguf"
    os.rename(slices[1], alone)
    async with LocalSwarm(tmp_path) as processes:
        backbone = await processes.start_backbone(folder / "backbone.gguf")
        first = await processes.add_peer(range(16), "--model", slices[0])
        await processes.add_peer(range(16, N_EXPERT), "--model", str(alone))
        assert first.ready["model"] == backbone.ready["model"]
        await wait_healthy(backbone.ready["url"])
        kept = [path.name for path in (first.home / "cache").glob("*") if not path.name.startswith("registry-")]
        assert not kept, "nothing was hashed or fetched"
