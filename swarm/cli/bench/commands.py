"""`swarm bench`: speed, measured. Figures are medians of interleaved repetitions; compare ratios within one run."""

from __future__ import annotations

import typer

from swarm.cli.commands import lazy_group

# In the order of `swarm bench --help`; a module of its own for each, imported when it is asked for.
COMMANDS = {
    "decode": ("swarm.cli.bench.decode", "decode"),
    "prefill": ("swarm.cli.bench.prefill", "prefill"),
    "dispatch": ("swarm.cli.bench.dispatch", "dispatch"),
    "bytes": ("swarm.cli.bench.wire_bytes", "wire_bytes"),
    "transport": ("swarm.cli.bench.transport", "transport"),
    "links": ("swarm.cli.bench.links", "links"),
    "overhead": ("swarm.cli.bench.overhead", "overhead"),
    "sweep": ("swarm.cli.bench.sweep", "sweep"),
    "experts": ("swarm.cli.bench.experts", "experts"),
    "gateway": ("swarm.cli.bench.gateway", "gateway"),
    "fanout": ("swarm.cli.bench.fanout", "fanout"),
    "speculation": ("swarm.cli.bench.speculation", "speculation"),
    "ablation": ("swarm.cli.bench.ablation", "ablation"),
    "popularity": ("swarm.cli.bench.popularity", "popularity"),
    "failover": ("swarm.cli.bench.failover", "failover"),
    "soak": ("swarm.cli.bench.soak", "soak"),
    "audit": ("swarm.cli.bench.audit", "audit"),
    "federation": ("swarm.cli.bench.federation", "federation"),
    "registry": ("swarm.cli.bench.registry", "registry"),
    "relay": ("swarm.cli.bench.relay", "relay"),
}

app = typer.Typer(
    name="bench",
    cls=lazy_group(COMMANDS),
    add_completion=False,
    no_args_is_help=True,
    help="Measure speed over emulated paths, on random models.",
)


@app.callback()
def bench() -> None:
    """Set nothing up: it makes the commands subcommands."""
