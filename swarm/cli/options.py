"""Options that several commands share, so that they are named and described once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import UserError
from swarm.ids import NodeId
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
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="What computes: auto (a GPU if there is one), cpu, a backend like cuda, or one device like CUDA1; "
        "the llama.cpp library must be built for it.",
    ),
]
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
        help="Most tokens that a step drafts, where that pays, all verified in one round trip a layer; 0: no drafts.",
    ),
]
NameOption = Annotated[
    str, typer.Option("--name", metavar="TEXT", help="Show this name on the map, for all to see.", show_default="none")
]
LocationOption = Annotated[
    str | None,
    typer.Option(
        "--location",
        metavar="LAT,LON",
        help="Show this place on the map, for all to see, in whole degrees: 48,-3. Of what you give the fraction is dropped.",
        show_default="none is shown",
    ),
]
ReceiptsFromOption = Annotated[
    str | None,
    typer.Option(
        "--receipts-from",
        metavar="NODEID[,NODEID...]",
        help="Backbones whose receipts count for the leaderboard: whoever runs one can sign for its own peers what it likes.",
        show_default=False,
    ),
]
UntilEofOption = Annotated[bool, typer.Option("--until-eof", hidden=True, help="Leave when standard input closes.")]
ModelFileArgument = Annotated[Path, typer.Option("--model", metavar="FILE", help="GGUF file of the model.")]


def settle_nodes(text: str | None) -> frozenset[NodeId]:
    """Return the nodes of a comma list of node ids; none of None. Raises UserError."""
    return frozenset() if text is None else frozenset(NodeId.parse(each.strip()) for each in text.split(","))


def settle_place(text: str | None) -> tuple[int, int] | None:
    """Return a place to announce: whole degrees of latitude and longitude, so coarse that no house is meant."""
    if text is None:
        return None
    try:
        latitude, longitude = (math.floor(float(each)) for each in text.split(","))
    except (ValueError, OverflowError):
        raise UserError(f"bad location: got {text!r}, expected latitude and longitude such as 48,-3") from None
    if not (-90 <= latitude <= 90 and -180 <= longitude <= 180):
        raise UserError(f"bad location: got {text!r}, expected -90 to 90 degrees and -180 to 180")
    return latitude, longitude


def settle_device(device: str, *, exact_kernels: bool) -> str:
    """Return the device's name. Raises UserError where another device than the CPU is to have exact kernels."""
    if exact_kernels and device.lower() != "cpu":
        raise UserError(f"exact kernels are the CPU's: got --device {device}, expected cpu with --exact-kernels")
    return device.lower()


def settle_advertise(text: str | None) -> str | None:
    """Return the address to announce in the form that records carry: an IP literal and a port. Raises UserError."""
    return None if text is None else format_address(resolve(parse_address(text)))
