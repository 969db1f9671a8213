"""`swarm plan`: what a model would cost over a swarm, and whether that is worth it. Computes, measures nothing."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from swarm.cli.options import JsonOption
from swarm.cli.runtime import out, print_json
from swarm.errors import UserError
from swarm.plan.calibration import Calibration, parse_calibration
from swarm.plan.planner import LINK_SOFTWARE_S, Plan, PlanInputs, make_plan, usual_link
from swarm.plan.roofline import Device
from swarm.plan.shape import ModelShape, parse_shape, shape_of_file
from swarm.plan.verdict import Skipping
from swarm.units import parse_duration_s, parse_rate_bit_s, parse_size_bytes

MAX_CALIBRATION_BYTES = 64 << 20
_FLOPS = re.compile(r"(\d{1,15}(?:\.\d{1,12})?)(M|G|T|P)FLOPS?")
_FLOP_UNITS = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


class LinkKind(StrEnum):
    """What carries dispatches."""

    AUTO = "auto"
    QUIC = "quic"
    TLS = "tls"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF file, or dimensions: d=4096,E=8,k=2,ff=14336,b=2[,bw=..,layers=..,shared=..,vocab=..].",
        ),
    ],
    peers: Annotated[
        int | None, typer.Option("--peers", min=1, help="Peers that share the experts; --devices, else 3.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="Also plan symmetric expert parallelism over so many devices."),
    ] = None,
    rtt: Annotated[
        str, typer.Option("--rtt", metavar="TIME[,TIME...]", help="Round trip to the peers: one, or one each.")
    ] = "30ms",
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="Every access link, each direction: 100Mbit or 100GB/s.")
    ] = "100Mbit",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per step.")] = 1,
    wire: Annotated[str, typer.Option("--wire", metavar="OUT/BACK", help="Wire form, such as q8/f16.")] = "f32",
    local: Annotated[
        float, typer.Option("--local", metavar="SHARE", help="Gate mass of experts that the backbone holds, 0 to 1.")
    ] = 0.0,
    experts_per_peer: Annotated[
        int | None, typer.Option("--experts-per-peer", min=1, help="Experts of each layer at a peer; all, evenly.")
    ] = None,
    draft: Annotated[int, typer.Option("--draft", min=1, help="Drafted tokens for the break-even.")] = 4,
    draft_cost: Annotated[str, typer.Option("--draft-cost", metavar="TIME", help="Cost of drafting them.")] = "0ms",
    link: Annotated[
        LinkKind,
        typer.Option("--link", help="What carries dispatches; auto: tls where every round trip is at most 15 ms."),
    ] = LinkKind.AUTO,
    software: Annotated[
        str | None,
        typer.Option(
            "--software",
            metavar="TIME",
            help="Software cost of one layer's dispatch and combine; by --link: 1.4ms, 0.65ms.",
        ),
    ] = None,
    flops: Annotated[
        str, typer.Option("--flops", metavar="RATE", help="What each machine computes: 400GFLOP, 900TFLOP a second.")
    ] = "400GFLOP",
    memory_rate: Annotated[
        str, typer.Option("--memory-rate", metavar="SIZE", help="What each machine reads from memory a second.")
    ] = "30GB",
    here_memory: Annotated[
        str, typer.Option("--here-memory", metavar="SIZE", help="Memory of this machine, for running the model here.")
    ] = "16GB",
    ssd_rate: Annotated[
        str, typer.Option("--ssd-rate", metavar="SIZE", help="What this machine reads from its SSD a second.")
    ] = "2GB",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="Measured steps: what `swarm bench sweep --record` wrote, or JSON [{rtt_s, step_s, layers}, ...].",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a model costs over a swarm: bytes, round trips, tokens per second, memory, and whether it pays.

    The keys of --json are listed in the docstring of swarm.plan.planner; formulas and examples are in docs/planner.md.
    """
    rtts_s = tuple(parse_duration_s(each, "--rtt") for each in rtt.split(","))
    kind = usual_link(rtts_s) if link is LinkKind.AUTO else link.value
    inputs = PlanInputs(
        shape=_shape(model),
        n_tokens=tokens,
        n_peers=peers or devices or 3,
        n_devices=devices,
        experts_per_peer=experts_per_peer,
        rtts_s=rtts_s,
        rate_bit_s=_parse_rate(rate),
        wire=wire,
        local_share=local,
        n_draft=draft,
        draft_s=parse_duration_s(draft_cost, "--draft-cost"),
        software_s=LINK_SOFTWARE_S[kind] if software is None else parse_duration_s(software, "--software"),
        device=_device(flops, memory_rate),
        here_memory_bytes=parse_size_bytes(here_memory, "--here-memory"),
        ssd_bytes_per_s=_per_second(ssd_rate, "--ssd-rate"),
    )
    made = make_plan(inputs, None if calibrate is None else _calibration(calibrate))
    if as_json:
        print_json(made.to_json())
    else:
        _print(made)


def _shape(model: str) -> ModelShape:
    if "=" in model and not Path(model).exists():
        return parse_shape(model)
    return shape_of_file(Path(model))


def _calibration(path: Path) -> Calibration:
    try:
        if path.stat().st_size > MAX_CALIBRATION_BYTES:
            raise UserError(f"{path} is too large for a calibration: expected at most {MAX_CALIBRATION_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return parse_calibration(text)


def _parse_rate(text: str) -> float:
    """Return bits per second of `200Gbit`, or of `100GB/s`."""
    plain = text.strip().removesuffix("/s")
    return 8.0 * _per_second(plain, "--rate") if plain.endswith("B") else float(parse_rate_bit_s(text, "--rate"))


def _per_second(text: str, what: str) -> float:
    size = parse_size_bytes(text.strip().removesuffix("/s"), what)
    if size < 1:
        raise UserError(f"{what} must be above 0: got {text!r}")
    return float(size)


def _device(flops: str, memory_rate: str) -> Device:
    found = _FLOPS.fullmatch(flops.strip().removesuffix("/s"))
    if found is None or float(found[1]) == 0:
        raise UserError(f"cannot read --flops: got {flops!r}, expected a number above 0 and a unit like 400GFLOP")
    return Device(
        flops_per_s=float(found[1]) * _FLOP_UNITS[found[2]],
        memory_bytes_per_s=_per_second(memory_rate, "--memory-rate"),
    )


# What people read


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def _bytes(size: float) -> str:
    for unit, each in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= each:
            return f"{size / each:.4g} {unit}"
    return f"{size:.0f} B"


def _mib(size: float) -> str:
    return f"{size / 2**20:.4g} MiB" if size >= 2**20 else _bytes(size)


def _rate(rate_bit_s: float) -> str:
    for unit, each in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate_bit_s >= each:
            return f"{rate_bit_s / each:.4g} {unit}"
    return f"{rate_bit_s:.4g} bit/s"


def _section(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print()


def _print(made: Plan) -> None:
    inputs, spread, memory, step, verdict = made.inputs, made.spread, made.memory, made.step, made.verdict
    shape, line, moved = inputs.shape, made.roofline, made.traffic
    _section(
        f"{shape.name}, {inputs.n_tokens} tokens per step",
        [
            ("assignments A = T k", f"{moved.n_assignments} a layer, {moved.rows_per_expert:.4g} rows per expert"),
            ("payload M = T k d b", f"{_mib(moved.payload_bytes)} a layer, each way"),
            ("remote share (1 - local gate mass)", f"{moved.remote_share:.1%}"),
            ("remote, there and back", f"{_mib(moved.remote_bytes_both_ways)}"),
            (
                "arithmetic intensity 2 n_e / b_w",
                f"{line.intensity:.4g} FLOP/byte at {line.rows_per_expert:.4g} rows of an expert that is read; "
                f"{line.bound} binds (knee {line.balance:.4g}, {line.rows_at_knee:.4g} rows)",
            ),
            (
                "imbalance (uniform router)",
                f"experts {spread.rows_imbalance:.3g}x the mean, peers {spread.peer_imbalance:.3g}x",
            ),
        ],
    )
    if made.expert_parallel is not None:
        each = made.expert_parallel
        _section(
            f"Symmetric expert parallelism over {inputs.n_devices} devices",
            [
                ("remote share 1 - 1/N", f"{each.traffic.remote_share:.1%}"),
                ("remote, each way", _mib(each.traffic.remote_bytes_each_way)),
                ("remote, together", _mib(each.traffic.remote_bytes_both_ways)),
                (
                    "per device and layer",
                    f"{_mib(each.bytes_per_device)}, {_time(each.transfer_s_per_device)} at {_rate(inputs.rate_bit_s)}",
                ),
                *_skipping_rows(each.skipping),
            ],
        )
    _section(
        f"Backbone and {inputs.n_peers} peers",
        [
            ("memory per peer", f"{_bytes(memory.slice_bytes)} ({memory.experts_per_peer} experts of each layer)"),
            ("backbone's weights", _bytes(memory.backbone_bytes)),
            ("fan-out", f"{spread.fan_out:.3g} distinct peers per row, {spread.peers_asked:.3g} per layer and step"),
            ("replicas of an expert", f"{spread.replicas:.3g}"),
            ("round trips per step", f"{step.round_trips:.4g}"),
            ("floor: layers x RTT", _time(step.floor_s)),
            (
                "one layer",
                f"RTT {_time(step.layer.rtt_s)}, transfer {_time(step.layer.transfer_s)}, "
                f"compute {_time(step.layer.compute_s)}, software {_time(step.layer.software_s)}",
            ),
            ("everything else", _time(step.local_s)),
            ("step", f"{_time(step.step_s)} ({step.source}); largest term: {step.largest_term}"),
            ("tokens per second", f"{step.tokens_per_s:.4g}"),
            (
                f"drafts of {made.drafts.n_draft}",
                f"pay from an accept length of {made.drafts.break_even_accept_length:.3g} on"
                + ("" if made.drafts.pays_at_all else ": never"),
            ),
        ],
    )
    _print_wires(made)
    out.print(
        "By kind of link: "
        + ", ".join(
            f"{each.link} {_time(each.step_s)} (software {_time(each.software_s)} a layer)" for each in made.by_link
        )
        + "."
    )
    first = made.by_rate[0]
    for at in made.by_rate:
        change = (
            f", {_time(at.lengthens_by_s)} longer than at {_rate(first.rate_bit_s)}" if at.lengthens_by_s > 0 else ""
        )
        out.print(f"At {_rate(at.rate_bit_s)}: step {_time(at.step_s)}{change}.")
    left = made.left
    out.print(
        f"At {_rate(inputs.rate_bit_s)} a token's rows of one layer ({_bytes(left.payload_bytes)}) take "
        f"{_time(left.payload_s)}, a peer's slice ({_bytes(left.slice_bytes)}) {_time(left.slice_s)}: "
        f"what is left is the {left.name}" + (f", {_time(left.rtt_s)} a layer." if left.name == "RTT" else ".")
    )
    if made.calibration is not None:
        fitted = made.calibration
        out.print(
            f"Calibration: step = {_time(fitted.a_s)} + {fitted.trips_per_layer:.3g} x RTT x {fitted.layers:.4g} layers; "
            f"{len(fitted.points)} points, the worst {fitted.max_error_share:.1%} off."
        )
    out.print()
    _section(
        f"{round(1 / (shape.n_expert_used / shape.n_expert), 2):g}-fold sparsity, "
        f"{shape.n_expert_used} of {shape.n_expert} experts: why is it not as many times faster?",
        [
            *_skipping_rows(verdict.skipping),
            ("here, in memory", _time(verdict.here_memory_step_s)),
            ("here, paged from SSD", _time(verdict.here_paged_step_s)),
            ("over the swarm", _time(verdict.swarm_step_s)),
        ],
    )
    out.print(f"Worth the swarm? {verdict.answer}: {verdict.reason}.")


def _skipping_rows(skipping: Skipping) -> list[tuple[str, str]]:
    verdict = "yes" if skipping.pays else "no"
    return [
        ("all experts for every token", _time(skipping.dense_s)),
        ("skipping saves", f"{_time(skipping.saved_s)} (ideally {skipping.ideal_speedup:.3g}x)"),
        ("token movement costs", _time(skipping.movement_s)),
        ("small expert batches cost", _time(skipping.small_batches_s)),
        ("imbalance costs", _time(skipping.imbalance_s)),
        ("does skipping save more?", f"{verdict}: {skipping.speedup:.3g}x all experts' speed"),
    ]


def _print_wires(made: Plan) -> None:
    table = Table(title="Wire forms, all overhead", title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for column in ("form", "out", "back", "all peers", "per token", "trips per token"):
        table.add_column(column, justify="left" if column == "form" else "right")
    for cost in made.wires:
        table.add_row(
            cost.wire,
            _bytes(cost.bytes_out_per_token_layer),
            _bytes(cost.bytes_back_per_token_layer),
            _bytes(cost.bytes_all_destinations),
            _bytes(cost.bytes_per_token),
            f"{cost.round_trips_per_token:.4g}",
        )
    out.print(table)
    out.print("out, back: of one token, layer and peer; all peers: both ways; per token: all layers.")
    out.print()
