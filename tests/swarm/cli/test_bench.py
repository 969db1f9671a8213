"""`swarm bench`: options become what is measured, figures become JSON, a table and files. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from swarm.bench.decode import DecodeOptions
from swarm.bench.dispatch import DispatchOptions
from swarm.bench.experts import ExpertsOptions
from swarm.bench.fanout import Fanout, FanoutOptions
from swarm.bench.in_process import InProcessOptions
from swarm.bench.latency import LatencyOptions, LatencyReport, Tail
from swarm.bench.sweep import SweepOptions
from swarm.bench.testbed import PathOptions
from swarm.bench.wire_bytes import WireBytesOptions
from swarm.cli.bench.commands import app
from swarm.cli.bench.experts import EXPERTS_COLUMNS, SKEW_COLUMNS
from swarm.cli.bench.sweep import RATE_COLUMNS, SWEEP_COLUMNS
from swarm.cli.bench.wire_bytes import BYTES_COLUMNS
from swarm.cli.slice_file import read_slice_file
from swarm.errors import UserError
from swarm.ids import ExpertSet
from swarm.wire.rows import parse_wire

SHARES = [ExpertSet({0: frozenset({0, 3}), 1: frozenset({1})}), ExpertSet({0: frozenset({1}), 1: frozenset({0, 3})})]
FIGURES = {
    "model": "m.gguf",
    "n_expert_used": 4,
    "n_tokens_learned": 512,
    "n_tokens_judged": 1024,
    "destinations_per_token": [
        {
            "n_peers": 2,
            "uniform": 2.82,
            "contiguous": 2.75,
            "clustered": 2.31,
            "contiguous_imbalance": 1.18,
            "clustered_imbalance": 1.25,
        }
    ],
}

TAIL = Tail(n=40, n_failed=0, rtt_s=0.08, p50_s=0.08, p95_s=0.1, p99_s=0.16, max_s=0.2, repair_share=0.5)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Return the names of a model and of a text."""
    for name in ("m.gguf", "t.txt"):
        (tmp_path / name).write_bytes(b"x")
    return str(tmp_path / "m.gguf"), str(tmp_path / "t.txt")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of each measurement, in the order they were asked for."""
    options: list[Any] = []

    def fanout(asked: FanoutOptions, progress: Any) -> Fanout:
        options.append(asked)
        progress(1, 1)
        return Fanout(figures=FIGURES, shares={2: SHARES})

    async def decode(asked: DecodeOptions, progress: Any) -> dict[str, Any]:
        options.append(asked)
        return {"tokens_per_s": 3.0}

    monkeypatch.setattr("swarm.cli.bench.fanout.measure_fanout", fanout)

    async def dispatch(asked: DispatchOptions, model: Path, progress: Any) -> dict[str, Any]:
        options.append(asked)
        return {"p50_s": 0.1}

    async def wire_bytes(asked: WireBytesOptions, model: Path, progress: Any) -> dict[str, Any]:
        options.append(asked)
        return {"rows": [dict.fromkeys(BYTES_COLUMNS, 1.0) | {"wire": "q8/f16", "bytes_all_destinations": 9827.0}]}

    async def sweep(asked: SweepOptions, progress: Any) -> dict[str, Any]:
        options.append(asked)
        return {
            "points": [dict.fromkeys(SWEEP_COLUMNS, 0.125)],
            "rates": [dict.fromkeys(RATE_COLUMNS, 0.5)],
        }

    async def latency(asked: LatencyOptions, progress: Any) -> LatencyReport:
        options.append(asked)
        return LatencyReport(
            size_bytes=asked.size_bytes,
            loss=asked.loss,
            silence_s=asked.silence_s,
            n_fresh=asked.n_fresh,
            n_connections=asked.n_connections,
            rtt_s=0.08,
            first_s=0.082,
            after_silence_s=0.084,
            lossy=TAIL if asked.n_lossy else None,
            control=TAIL if asked.n_lossy else None,
        )

    monkeypatch.setattr("swarm.cli.bench.dispatch.measure_dispatch", dispatch)
    monkeypatch.setattr("swarm.cli.bench.wire_bytes.measure_wire_bytes", wire_bytes)
    monkeypatch.setattr("swarm.cli.bench.sweep.measure_sweep", sweep)
    monkeypatch.setattr("swarm.cli.bench.transport.measure_latency", latency)
    monkeypatch.setattr("swarm.cli.bench.dispatch.synthetic_file", lambda model: Path("synthetic.gguf"))
    monkeypatch.setattr("swarm.cli.bench.wire_bytes.synthetic_file", lambda model: Path("synthetic.gguf"))
    monkeypatch.setattr("swarm.cli.bench.decode.measure_decode", decode)
    monkeypatch.setattr("swarm.cli.bench.fanout.tame_openmp", lambda: None)
    return options


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_fanout_reads_four_and_sixteen_peers_by_default(asked: list[Any], files: tuple[str, str]) -> None:
    model, text = files
    assert run("fanout", "--model", model, "--text", text).exit_code == 0
    assert run("fanout", "--model", model, "--text", text, "--peers", "8,2", "--tokens", "2000").exit_code == 0
    assert asked[0] == FanoutOptions(model=Path(model), text=Path(text), n_peers=(4, 16), n_tokens=20_480)
    assert (asked[1].n_peers, asked[1].n_tokens) == ((2, 8), 2000)


def test_fanout_prints_json_or_a_table(asked: list[Any], files: tuple[str, str]) -> None:
    arguments = ("fanout", "--model", files[0], "--text", files[1])
    assert json.loads(run(*arguments, "--json").stdout) == FIGURES
    table = run(*arguments).stdout
    for cell in ("2.82", "2.75", "2.31", "1.18", "1.25", "512", "1024"):
        assert cell in table


def test_saved_slices_are_what_join_reads(asked: list[Any], files: tuple[str, str], tmp_path: Path) -> None:
    result = run("fanout", "--model", files[0], "--text", files[1], "--save", str(tmp_path / "s"), "--json")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "s" / "2-peers"
    assert [read_slice_file(folder / f"slice-{i}.json") for i in range(2)] == SHARES
    assert len(list(folder.iterdir())) == 2


def test_decode_drafts_only_when_asked(asked: list[Any], files: tuple[str, str]) -> None:
    model, text = files
    assert run("decode", "--model", model, "--json").exit_code == 0
    assert run("decode", "--model", model, "--draft", "8", "--text", text, "--prompt-tokens", "99").exit_code == 0
    assert (asked[0].n_draft, asked[0].text, asked[0].n_prompt) == (0, None, 16)
    assert (asked[1].n_draft, asked[1].text, asked[1].n_prompt) == (8, Path(text), 99)


def test_comparisons_are_measured_only_when_asked(asked: list[Any], files: tuple[str, str]) -> None:
    assert run("decode", "--model", files[0]).exit_code == 0
    assert run("decode", "--model", files[0], "--compare-overlap").exit_code == 0
    assert run("dispatch").exit_code == 0
    assert run("dispatch", "--serial", "--peers", "4", "--rtt", "20ms,80ms").exit_code == 0
    assert [each.compares_overlap for each in asked[:2]] == [False, True]
    assert [each.compares_serial for each in asked[2:]] == [False, True]
    assert asked[3].paths.rtts_s == (0.02, 0.08)


def test_bytes_are_measured_of_both_kinds_of_slices_by_default(asked: list[Any]) -> None:
    result = run("bytes")
    assert result.exit_code == 0, result.output
    assert asked[0] == WireBytesOptions(wires=(parse_wire("q8"), parse_wire("q8/f16")))
    assert "9827" in result.stdout
    assert run("bytes", "--peers", "8,2", "--slices", "clustered", "--wire", "f16", "--d-model", "256").exit_code == 0
    assert (asked[1].n_peers, asked[1].slices, asked[1].d_model) == ((2, 8), ("clustered",), 256)
    assert [str(wire) for wire in asked[1].all_wires] == ["exact", "f16"]


def test_a_sweep_takes_round_trips_and_rates_fastest_first(asked: list[Any], files: tuple[str, str]) -> None:
    result = run("sweep", "--model", files[0])
    assert result.exit_code == 0, result.output
    assert (asked[0].rtts_s, asked[0].rates_bit_s) == ((0.001, 0.005, 0.02, 0.05, 0.1), (1e9, 1e8, 1e7))
    assert asked[0].paths == PathOptions(rtts_s=(0.03,))
    assert "0.125" in result.stdout
    run("sweep", "--model", files[0], "--rtts", "2ms", "--rates", "5Mbit,1Gbit", "--rtt", "9ms", "--peers", "1")
    assert (asked[1].rtts_s, asked[1].rates_bit_s) == ((0.002,), (1e9, 5e6))
    assert (asked[1].paths.rtts_s, asked[1].n_peers) == ((0.009,), 1)


def test_transport_measures_each_size_and_shows_round_trips(asked: list[Any]) -> None:
    result = run("transport", "--members", "0", "--dispatches", "40")
    assert result.exit_code == 0, result.output
    assert asked == [LatencyOptions(size_bytes=size, loss=0.01, n_lossy=40) for size in (12_000, 49_000)]
    for text in ("after silence", "1.025", "1.05", "lossy", "control", "2"):
        assert text in result.stdout
    result = run("transport", "--members", "0", "--dispatches", "0", "--size", "1KB", "--json")
    assert json.loads(result.stdout)["latency"][0]["lossy"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("bytes", "--slices", "random"),
        ("bytes", "--peers", "4,500"),
        ("dispatch", "--serial", "--peers", "9"),
        ("sweep", "--rtts", "fast"),
        ("sweep", "--rates", "10"),
        ("transport", "--size", "big"),
        ("decode", "--model", "none.gguf"),
        ("decode", "--model", "{model}", "--text", "none.txt"),
        ("fanout", "--model", "none.gguf", "--text", "{text}"),
        ("fanout", "--model", "{model}", "--text", "none.txt"),
        ("fanout", "--model", "{model}", "--text", "{text}", "--peers", "four"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_said_before_anything_is_measured(
    asked: list[Any], files: tuple[str, str], arguments: tuple[str, ...]
) -> None:
    model, text = files
    result = run(*(argument.format(model=model, text=text) for argument in arguments))
    assert isinstance(result.exception, UserError)
    assert asked == []


def test_no_peers_measures_in_this_process_with_as_many_threads_as_asked(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[Any] = []

    def measure(asked: InProcessOptions, progress: Any, check: Any) -> dict[str, Any]:
        options.append(asked)
        check()
        progress(1, 1)
        return {"share_of_stock": 0.95}

    monkeypatch.setattr("swarm.cli.bench.decode.measure_decode_in_process", measure)
    monkeypatch.setattr("swarm.cli.bench.prefill.measure_prefill_in_process", measure)
    model = files[0]
    decode = run("decode", "--model", model, "--peers", "0", "--threads", "3", "--prompt-tokens", "99", "--json")
    assert json.loads(decode.stdout) == {"share_of_stock": 0.95}
    assert run("prefill", "--model", model, "--peers", "0", "--tokens", "64").exit_code == 0
    assert (options[0].n_threads, options[0].n_prompt, options[0].n_tokens) == (3, 99, 32)
    assert options[1].n_tokens == 64
    assert options[1].n_threads >= 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "--threads", "2"),
        ("prefill", "--threads", "2"),
        ("decode", "--peers", "0", "--draft", "4"),
        ("decode", "--peers", "0", "--compare-overlap"),
    ],
    ids=" ".join,
)
def test_options_that_mean_nothing_here_are_refused(
    asked: list[Any], files: tuple[str, str], arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, "--model", files[0])
    assert isinstance(result.exception, UserError)
    assert asked == []


def test_experts_prints_both_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options: list[ExpertsOptions] = []

    def measure(asked: ExpertsOptions, model: Path, progress: Any, check: Any) -> dict[str, Any]:
        options.append(asked)
        return {
            "knee_flop_per_byte": 4.125,
            "rows_per_expert": [dict.fromkeys(EXPERTS_COLUMNS, 0.0625)],
            "skew": [dict.fromkeys(SKEW_COLUMNS, 13.75)],
        }

    monkeypatch.setattr("swarm.cli.bench.experts.measure_experts", measure)
    monkeypatch.setattr("swarm.cli.bench.experts.synthetic_file", lambda model: tmp_path / model.name)
    result = run("experts", "--rows", "8,1", "--skews", "0,1.5", "--plain", "--threads", "2")
    assert result.exit_code == 0, result.output
    assert (options[0].n_rows, options[0].skews, options[0].repacks, options[0].n_threads) == (
        (1, 8),
        (0, 1.5),
        False,
        2,
    )
    for cell in ("4.125", "0.0625", "13.75"):
        assert cell in result.stdout
    assert isinstance(run("experts", "--skews", "steep").exception, UserError)
