"""Programs of neighbouring wire versions work together; one too far away is told who has to upgrade, and how. Real processes.

A child's versions are what the environment says: `sitecustomize`, which Python imports before anything else, sets them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from swarm.emulation.processes import LocalSwarm, ProcessFailed
from tests.e2e.conftest import wait_healthy

SITECUSTOMIZE = """
import os

if (_versions := os.environ.get("TEST_WIRE_VERSIONS")) is not None:
    import swarm.wire.versions

    swarm.wire.versions.WIRE_VERSIONS = tuple(map(int, _versions.split(",")))
"""
BODY = {"prompt": "The :mod:`json` module provides", "max_tokens": 12, "temperature": 0}


@contextlib.contextmanager
def speaking(folder: Path, *versions: int) -> Iterator[None]:
    """Let the children that are started within speak these versions."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("TEST_WIRE_VERSIONS", ",".join(map(str, versions)))
        yield


async def test_peers_one_version_older_and_one_newer_serve_together(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q4_K_M.gguf"
    with speaking(tmp_path, 1, 2):
        async with LocalSwarm(tmp_path / "children") as swarm, aiohttp.ClientSession() as client:
            backbone = await swarm.start_backbone(model)
            with speaking(tmp_path, 1):
                older = await swarm.add_peer(range(16))
            with speaking(tmp_path, 2, 3):
                newer = await swarm.add_peer(range(16, 32))
            url = backbone.ready["url"]
            await wait_healthy(url)
            async with client.post(f"{url}/completions", json=BODY) as answer:
                assert answer.status == 200
            async with client.get(url.removesuffix("/v1") + "/map.json") as answer:
                states = {peer["id"]: peer["state"] for peer in (await answer.json())["peers"]}
            assert states == {older.ready["node"]: "in use", newer.ready["node"]: "in use"}


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ((1, 2), "this program is too old: it speaks wire version 1, 2, the other side 3, 4; upgrade it by `git pull"),
        ((5, 6), "the other side's program is too old: it speaks wire version 3, 4, this one 5, 6; whoever runs it"),
    ],
    ids=["older", "newer"],
)
async def test_two_versions_apart_a_volunteer_is_told_who_has_to_upgrade_and_how(
    tmp_path: Path, versions: tuple[int, int], told: str
) -> None:
    with speaking(tmp_path, 3, 4):
        async with LocalSwarm(tmp_path / "children") as swarm:
            with speaking(tmp_path, *versions), pytest.raises(ProcessFailed) as caught:
                await swarm.add_peer(range(4))
            assert told in str(caught.value)
            assert "pip install --upgrade" in str(caught.value)
            assert swarm.relay is not None
            assert any("cannot talk to a node" in line and "too old" in line for line in swarm.relay.last_lines)
