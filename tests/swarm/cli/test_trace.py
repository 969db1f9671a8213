"""`swarm trace`: a waterfall for people, JSON for scripts."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.backbone.tracing import STAGES
from swarm.cli import trace
from swarm.errors import UserError
from tests.swarm.gateway.test_app import CHAT, ScriptedGenerator, serving

LAYER = {
    "layer": 3,
    "at_s": 0.1,
    "pack_s": 0.001,
    "wait_s": 0.03,
    "combine_s": 0.001,
    "peers": [{"peer": "abcdefgh", "n_rows": 1, "s": 0.03, "queue_s": 0.002, "compute_s": 0.0005}],
}
TRACE: dict[str, Any] = {
    "total_s": 2.0,
    "stages": {**dict.fromkeys(STAGES, 0.25), "network": 0.5},
    "n_passes": 5,
    "passes": [{"at_s": 0.1, "n_rows": 1, "n_sequences": 2, "layers": [LAYER]}],
}


async def test_a_header_asks_and_the_last_chunk_tells() -> None:
    generator = ScriptedGenerator("a")
    generator.trace = TRACE
    async with serving(generator) as client:
        answer = await trace._ask(client.base_url, "", "hi", 4)
        assert answer == {"text": "a", "n_completion_tokens": 1, **TRACE}
        async with client.post("/v1/chat/completions", json=CHAT, headers={"X-Swarm-Trace": "1"}) as response:
            assert (await response.json())["swarm_trace"] == TRACE
        generator.trace = None
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert "swarm_trace" not in await response.json()
        with pytest.raises(UserError, match="no trace"):
            await trace._ask(client.base_url, "", "hi", 4)
    assert [request.is_traced for request in generator.requests] == [True, True, False, True]


def test_people_see_stages_and_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    trace.show({"text": "hello", **TRACE}, -1)
    shown = capsys.readouterr().out
    assert "on the way, there and back" in shown
    assert "25%" in shown
    assert "beside 1 other request" in shown
    assert "abcdefgh" in shown
    with pytest.raises(UserError, match="there are 1"):
        trace.show({"text": "hello", **TRACE}, 3)
    trace.show({"text": "hello", **TRACE, "passes": []}, -1)
    capsys.readouterr()
    trace.show({"text": "a\x1b[2Jb", **TRACE}, -1)
    assert "\x1b" not in capsys.readouterr().out, "it could command the terminal"
