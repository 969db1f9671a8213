"""`swarm bench bytes`."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.bench.wire_bytes import SLICES, WireBytesOptions, measure_wire_bytes
from swarm.cli.bench.options import (
    RecordOption,
    synthetic_file,
)
from swarm.cli.options import JsonOption
from swarm.cli.run_record import finish
from swarm.cli.runtime import ProgressBars, run_async
from swarm.ids import parse_index_set
from swarm.wire.rows import parse_wire

BYTES_COLUMNS = {
    "n_peers": "peers",
    "slices": "slices",
    "wire": "form",
    "destinations_per_token": "met",
    "bytes_out_per_token_layer": "out",
    "bytes_back_per_token_layer": "back",
    "bytes_all_destinations": "all peers",
    "over_payload_share": "overhead",
    "reduction_per_destination": "1 / exact",
    "reduction_all_destinations": "all",
}


def wire_bytes(
    peers: Annotated[str, typer.Option("--peers", metavar="N[,N...]", help="Numbers of peers.")] = "1,4,16",
    slices: Annotated[
        str, typer.Option("--slices", metavar="KIND[,KIND]", help="Which experts live together: " + ", ".join(SLICES))
    ] = ",".join(SLICES),
    wires: Annotated[
        str, typer.Option("--wire", metavar="OUT/BACK[,...]", help="Forms to measure beside `exact`.")
    ] = "q8/q8,q8/f16",
    d_model: Annotated[int, typer.Option("--d-model", min=64, help="Values of a row; a multiple of 64.")] = 3072,
    n_experts: Annotated[int, typer.Option("--n-experts", min=1, help="Experts of the layer.")] = 128,
    experts_used: Annotated[int, typer.Option("--experts-used", min=1, help="Experts of each row.")] = 8,
    ff: Annotated[int, typer.Option("--ff", min=32, help="Width of an expert; changes no bytes.")] = 32,
    dispatches: Annotated[int, typer.Option("--dispatches", min=1, help="One-token dispatches of each form.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Of the router and its tokens.")] = 0,
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes of one token and MoE layer, form by form, beside raw f32 rows: over several peers, slices of both kinds."""
    options = WireBytesOptions(
        wires=tuple(parse_wire(each) for each in wires.split(",")),
        d_model=d_model,
        n_expert=n_experts,
        n_expert_used=experts_used,
        n_ff_exp=ff,
        n_peers=tuple(sorted(parse_index_set(peers, "numbers of peers"))),
        slices=tuple(dict.fromkeys(slices.split(","))),
        n_dispatches=dispatches,
        seed=seed,
    )
    model = synthetic_file(options.model)
    with ProgressBars() as bars:
        figures = run_async(measure_wire_bytes(options, model, lambda *each: bars.update("swarms", *each)))
    finish(figures, as_json, record, tables={"rows": BYTES_COLUMNS})
