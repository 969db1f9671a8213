"""Who serves a model from the web tells where it is, and volunteers fetch their experts there."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.emulation.processes import LocalSwarm
from tests.e2e.conftest import wait_healthy
from tests.e2e.sources.file_server import FileServer, serving

PATH = "/owner/repo/resolve/main/model-Q4_K_M.gguf"


async def test_a_model_is_served_from_the_web_and_its_experts_are_fetched_there(
    tmp_path: Path, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (tiny_moe / "model-Q4_K_M.gguf").read_bytes()
    async with serving(FileServer({PATH: whole})) as server, LocalSwarm(tmp_path) as swarm:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        backbone = await swarm.start_backbone("hf://owner/repo/model-Q4_K_M.gguf")  # type: ignore[arg-type]
        assert server.n_sent == len(whole) + 1
        await swarm.add_peers(2, 32)
        await wait_healthy(backbone.ready["url"])
        n_experts = sum(span.end - span.start for span in server.asked) - len(whole) - 1
        assert 0.5 * len(whole) < n_experts < 1.2 * len(whole), "both halves came from there"
