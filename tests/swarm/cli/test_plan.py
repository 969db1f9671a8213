"""`swarm plan` prints the planner's figures, in a table and as JSON, and refuses what it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import swarm.plan.planner as planner
from swarm.cli.plan import plan
from swarm.errors import UserError
from swarm.plan.shape import parse_shape
from tests.synthetic_moe import write_synthetic_moe

app = typer.Typer()
app.command()(plan)
EXAMPLE = "d=4096,E=8,k=2,ff=14336,b=2"


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def run_json(*args: object) -> dict[str, Any]:
    found = json.loads(run(*args, "--json"))
    assert isinstance(found, dict)
    return found


def test_the_worked_example_stands_in_the_table() -> None:
    text = run(EXAMPLE, "--tokens", 4096, "--devices", 8, "--rate", "100GB/s", "--rtt", "20us")
    for figure in ("8192 a layer, 1024 rows per expert", "64 MiB", "87.5%", "56 MiB", "112 MiB", "14 MiB, 147 us"):
        assert figure in text
    assert re.search(r"Worth the swarm\? (yes|no): ", text)
    assert "does skipping save more?" in text


def test_the_rtt_is_named_as_what_is_left() -> None:
    text = run("d=3072,E=256,k=8,ff=1536,b=4,layers=62", "--peers", 1, "--rate", "200Gbit", "--wire", "exact")
    assert "110.6 KB) take 4.42 us" in text
    assert "what is left is the RTT, 30 ms a layer" in text


def test_json_has_the_keys_that_the_planner_documents() -> None:
    found = run_json(EXAMPLE, "--tokens", 32, "--devices", 8)
    assert found["traffic"]["n_assignments"] == 64
    assert found["traffic"]["rows_per_expert"] == 8
    doc = planner.__doc__ or ""
    for key, value in found.items():
        assert re.search(rf"^    {key} ", doc, re.MULTILINE), key
        for each in value if isinstance(value, list) else [value]:
            assert all(re.search(rf"\b{inner}\b", doc) for inner in each or ())
    documented = set(re.findall(r"^    (\w+) ", doc, re.MULTILINE))
    assert documented == set(found)


def test_flags_reach_the_plan() -> None:
    found = run_json(
        *(
            EXAMPLE,
            "--peers",
            4,
            "--rtt",
            "10ms,20ms,30ms,40ms",
            "--rate",
            "1Gbit",
            "--local",
            0.25,
            "--wire",
            "q8/f16",
        ),
        *("--experts-per-peer", 4, "--draft", 7, "--draft-cost", "5ms", "--software", "2ms", "--flops", "2TFLOP"),
        *("--memory-rate", "100GB", "--here-memory", "8GiB", "--ssd-rate", "1GB"),
    )["inputs"]
    assert found == {
        "n_tokens": 1,
        "n_peers": 4,
        "n_devices": None,
        "experts_per_peer": 4,
        "rtts_s": [0.01, 0.02, 0.03, 0.04],
        "rate_bit_s": 1e9,
        "wire": "q8/f16",
        "local_share": 0.25,
        "n_draft": 7,
        "draft_s": 0.005,
        "software_s": 0.002,
        "device": {"flops_per_s": 2e12, "memory_bytes_per_s": 1e11},
        "here_memory_bytes": 8 * 2**30,
        "ssd_bytes_per_s": 1e9,
    }


def test_defaults_of_the_command_are_those_of_the_planner() -> None:
    shown = run_json(EXAMPLE)["inputs"]
    assert shown == planner.PlanInputs(shape=parse_shape(EXAMPLE)).to_json()


def test_a_gguf_file_is_planned_by_its_own_sizes(tmp_path: Path) -> None:
    path = write_synthetic_moe(tmp_path / "m.gguf", n_embd=64, n_layers=3, n_expert=8, n_expert_used=2, n_ff_exp=32)
    found = run_json(path, "--peers", 2)
    assert found["model"]["name"] == "m.gguf"
    assert found["model"]["n_layers"] == 3
    assert found["memory"]["slice_bytes"] == 3 * 4 * 3 * 64 * 32 * 34 // 32
    total = found["memory"]["model_bytes"]
    assert total < path.stat().st_size < total + 64 * 512 * 4 + 100_000  # all but the token table, and the header


def test_a_calibration_file_gives_the_step(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    points = [{"rtt_s": rtt, "step_s": 0.04 + 16 * rtt, "layers": 16} for rtt in (0.001, 0.005, 0.02, 0.05, 0.1)]
    path.write_text(json.dumps({"points": points, "rate_bit_s": 100e6}))
    args = ("d=1024,E=64,k=8,ff=256,b=4,layers=16", "--rtt", "20ms", "--calibrate", path)
    found = run_json(*args)
    assert found["step"]["source"] == "calibration"
    assert found["step"]["step_s"] == pytest.approx(0.04 + 16 * 0.02)
    assert found["calibration"]["max_error_share"] < 1e-6
    assert "Calibration: step = 40 ms + 1 x RTT x 16 layers; 5 points" in run(*args)


@pytest.mark.parametrize(
    "args",
    [
        ("nowhere.gguf",),
        ("d=4096",),
        (EXAMPLE, "--rtt", "30"),
        (EXAMPLE, "--rate", "100"),
        (EXAMPLE, "--rate", "0GB/s"),
        (EXAMPLE, "--flops", "9"),
        (EXAMPLE, "--flops", "0TFLOP"),
        (EXAMPLE, "--wire", "q3"),
        (EXAMPLE, "--local", "2"),
        (EXAMPLE, "--calibrate", "nowhere.json"),
        (EXAMPLE, "--rtt", "1ms,2ms"),
    ],
)
def test_a_mistake_is_the_users(args: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        run(*args)
