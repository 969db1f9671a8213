"""Options that several commands share, so that they are named and described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.net.addresses import format_address, parse_address, resolve

RegistryOption = Annotated[
    str,
    typer.Option(
        "--registry",
        envvar="SWARM_REGISTRY",
        metavar="NODES",
        help="Registry nodes: swarm://NODEID@host:port or host:port, comma list.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
HostOption = Annotated[str, typer.Option("--host", envvar="SWARM_HOST", help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="UDP port to listen on; 0 lets the system choose.")
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option("--advertise", metavar="HOST:PORT", help="Address to announce, if not the one the registry sees."),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=1024, help="Threads that compute.")]
ExactKernelsOption = Annotated[
    bool,
    typer.Option(
        "--exact-kernels",
        help="Use only kernels that sum in the same order everywhere; the wire form `exact` needs it on both sides.",
    ),
]
DraftOption = Annotated[
    int,
    typer.Option(
        "--draft",
        min=0,
        max=64,
        help="Most tokens that a step drafts by prompt lookup, all verified in one round trip a layer; 0: no drafts.",
    ),
]
UntilEofOption = Annotated[bool, typer.Option("--until-eof", hidden=True, help="Leave when standard input closes.")]
ModelFileArgument = Annotated[Path, typer.Option("--model", metavar="FILE", help="GGUF file of the model.")]


def settle_advertise(text: str | None) -> str | None:
    """Return the address to announce in the form that records carry: an IP literal and a port. Raises UserError."""
    return None if text is None else format_address(resolve(parse_address(text)))
