"""`swarm bench links`: both kinds of link and the policy's choice on one emulated path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.emulation import namespaces
from tests.e2e.test_commands import run

pytestmark = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))


async def test_a_path_is_measured_with_both_kinds_and_the_policy(tmp_path: Path) -> None:
    arguments = ["--rtt", "20ms", "--loss", "0", "--dispatches", "20", "--warm-up", "5", "--json"]
    code, out, err = await run("-m", "swarm", "bench", "links", *arguments, home=tmp_path)
    assert code == 0, err
    (path,) = json.loads(out)["paths"]
    assert (path["path_rtt_s"], path["loss"]) == (0.02, 0.0)
    for kind in ("quic", "tls", "auto"):
        assert 0.02 <= path[f"{kind}_p50_s"] <= path[f"{kind}_p99_s"]
    assert path["auto_share_tls"] == 0.0, "too long a path"
