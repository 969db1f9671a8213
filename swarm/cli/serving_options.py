"""Options of how a backbone shares itself among requests, and what they make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from swarm.backbone.generate import MAX_LINE, ServingConfig
from swarm.errors import UserError
from swarm.native.llama import KV_TYPES, MAX_SEQUENCES
from swarm.units import parse_duration_s, parse_size_bytes

SlotsOption = Annotated[
    int, typer.Option("--slots", min=1, help="Requests that run at once; each has --ctx tokens of its own.")
]
LanesOption = Annotated[
    int | None,
    typer.Option(
        "--lanes",
        min=1,
        help="Contexts that share the slots, each with a thread: one computes while others wait.",
        show_default="2, or 1 for one slot",
    ),
]
CtxOption = Annotated[
    int, typer.Option("--ctx", min=0, help="Tokens of context of each slot; 0 takes the model's own, up to 4096.")
]
KvTypeOption = Annotated[
    str, typer.Option("--kv-type", metavar="K[/V]", help=f"Of the KV cache: {', '.join(KV_TYPES)}, or two of them.")
]
PrefixCacheOption = Annotated[
    str,
    typer.Option("--prefix-cache", metavar="SIZE", help="Memory for texts that gave up their slot; 0B keeps none."),
]
QueueOption = Annotated[
    int, typer.Option("--queue", min=0, help="Requests that may wait for a slot; more are refused with 429.")
]
FillWaitOption = Annotated[
    str, typer.Option("--fill-wait", metavar="TIME", help="How long a step waits for more requests to join it.")
]
RequestTimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--request-timeout",
        metavar="TIME",
        help="After which a request that has its slot ends with an error.",
        show_default="never",
    ),
]
DrainOption = Annotated[
    str, typer.Option("--drain", metavar="TIME", help="How long answers under way may take after SIGTERM or Ctrl-C.")
]
ReproducibleOption = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="Answers depend on their own text alone, bit by bit, not on who else is served: exact kernels here and at the "
        "peers, the wire form exact, a lane for each slot. Slower, above all for long prompts.",
    ),
]

DEFAULT_SLOTS = 4  # as llama-server has it
DEFAULT_LANES = (
    2  # measured with 8 streams (docs/gateway.md): a first token comes in 0.84 of the time that it takes with one
)
DEFAULT_PREFIX_CACHE = "512MiB"
DEFAULT_QUEUE = MAX_LINE
DEFAULT_DRAIN = "10s"  # guessed: a service manager kills after 90 s, an impatient person sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """What was asked for; see `BackboneConfig`."""

    n_slots: int
    n_lanes: int
    kv_types: tuple[str, str]
    config: ServingConfig
    drain_s: float


def settle_serving(
    *,
    slots: int,
    lanes: int | None,
    kv_type: str,
    prefix_cache: str,
    queue: int,
    fill_wait: str,
    request_timeout: str | None,
    drain: str,
    reproducible: bool = False,
) -> ServingSettings:
    """Return what the options say. Raises UserError."""
    if reproducible and lanes not in (None, slots):
        raise UserError(
            f"--reproducible needs a lane for each slot: got {lanes} lanes for {slots} slots; leave --lanes out"
        )
    if lanes is None:
        lanes = slots if reproducible else min(DEFAULT_LANES, slots)
    if lanes > slots:
        raise UserError(f"more lanes than slots: got {lanes}, expected at most {slots}; give more --slots")
    if -(-slots // lanes) > MAX_SEQUENCES:
        raise UserError(f"too many slots: got {slots}, expected at most {MAX_SEQUENCES} for each lane")
    return ServingSettings(
        n_slots=slots,
        n_lanes=lanes,
        kv_types=parse_kv_types(kv_type),
        config=ServingConfig(
            fill_wait_s=parse_duration_s(fill_wait, "--fill-wait"),
            cache_bytes=parse_size_bytes(prefix_cache, "--prefix-cache"),
            max_line=queue,
            request_timeout_s=parse_duration_s(request_timeout, "--request-timeout") if request_timeout else None,
            is_reproducible=reproducible,
        ),
        drain_s=parse_duration_s(drain, "--drain"),
    )


def parse_kv_types(text: str) -> tuple[str, str]:
    """Return the types of K and of V. Raises UserError."""
    names = text.split("/")
    if not 1 <= len(names) <= 2 or any(name not in KV_TYPES for name in names):
        raise UserError(
            f"no such type of KV cache: got {text!r}, expected {', '.join(KV_TYPES)}, or two such as q8_0/q4_0"
        )
    return names[0], names[-1]
