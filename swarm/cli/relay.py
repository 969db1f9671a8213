"""`swarm relay`: the registry, and the relay for peers that cannot be reached directly."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from swarm.cli.options import HostOption, JsonOption, PortOption, ReceiptsFromOption, UntilEofOption, settle_nodes
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import log_as_json, out, print_json, run_daemon
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import format_address, parse_address, resolve
from swarm.units import parse_duration_s, parse_rate_bit_s

logger = logging.getLogger(__name__)


def relay(
    host: HostOption = "0.0.0.0",
    port: PortOption = 7440,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            metavar="HOST:PORT",
            help="Where others reach this relay, if not at this machine's own address; shown to you, for them.",
        ),
    ] = None,
    ring: Annotated[
        str | None,
        typer.Option(
            "--ring",
            metavar="NODES",
            help="Other registry nodes to share the records with: swarm://NODEID@host:port or host:port, comma list.",
            show_default="none",
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            "--store",
            metavar="auto|always|never",
            help="Whether to store records as a member of the ring; auto: if its address reaches as far as the others'.",
        ),
    ] = "auto",
    publishers: Annotated[
        str | None,
        typer.Option(
            "--publishers",
            metavar="NODEID[,NODEID...]",
            help="Node ids of the backbones whose models may be offered here.",
            show_default="anybody's",
        ),
    ] = None,
    receipts_from: ReceiptsFromOption = None,
    http: Annotated[
        str,
        typer.Option(
            "--http",
            envvar="SWARM_RELAY_HTTP",
            metavar="PORT|off",
            help="TCP port for the map, metrics and nodes whose UDP is blocked; `same`: the number of --port.",
        ),
    ] = "same",
    channel_rate: Annotated[
        str,
        typer.Option(
            "--channel-rate",
            envvar="SWARM_RELAY_CHANNEL_RATE",
            metavar="RATE",
            help="What one channel between two nodes may carry, each way.",
        ),
    ] = "50Mbit",
    node_rate: Annotated[
        str,
        typer.Option(
            "--node-rate",
            envvar="SWARM_RELAY_NODE_RATE",
            metavar="RATE",
            help="What one node may send through all its channels.",
        ),
    ] = "100Mbit",
    total_rate: Annotated[
        str,
        typer.Option(
            "--total-rate", envvar="SWARM_RELAY_TOTAL_RATE", metavar="RATE", help="What the relay passes on in all."
        ),
    ] = "1Gbit",
    channels_per_node: Annotated[
        int,
        typer.Option(
            "--channels-per-node",
            envvar="SWARM_RELAY_CHANNELS_PER_NODE",
            min=1,
            max=65_535,
            help="Channels that one node may have at a time.",
        ),
    ] = 64,
    reservations: Annotated[
        int,
        typer.Option(
            "--reservations",
            envvar="SWARM_RELAY_RESERVATIONS",
            min=0,
            max=1_000_000,
            help="Nodes that can be called through this relay at a time.",
        ),
    ] = 4096,
    idle: Annotated[
        str,
        typer.Option(
            "--idle",
            envvar="SWARM_RELAY_IDLE",
            metavar="DURATION",
            help="A channel is forgotten after as long without a packet.",
        ),
    ] = "60s",
    drain: Annotated[
        str,
        typer.Option(
            "--drain",
            envvar="SWARM_RELAY_DRAIN",
            metavar="DURATION",
            help="Once told to end: the longest that open channels are still served, while their nodes go elsewhere.",
        ),
    ] = "5s",
    as_json: JsonOption = False,
    json_logs: Annotated[
        bool,
        typer.Option("--json-logs", envvar="SWARM_JSON_LOGS", help="Log lines are JSON objects, from INFO on."),
    ] = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Run a relay: the place where peers and backbones find each other, and meet where they have no direct way."""
    from relay.daemon import RelayConfig, RelayDaemon, RelayReady, Store
    from relay.quotas import Limits

    if store not in list(Store):
        raise UserError(f"cannot read --store: got {store!r}, expected one of {', '.join(Store)}")
    folders = Folders.from_environment()
    advertised = None if advertise is None else format_address(parse_address(advertise))
    allowed = None if publishers is None else frozenset(NodeId.parse(each.strip()) for each in publishers.split(","))
    counted = settle_nodes(receipts_from) or allowed or frozenset()  # who may publish is trusted to count, too
    limits = Limits(
        channel_bit_s=parse_rate_bit_s(channel_rate, "--channel-rate"),
        node_bit_s=parse_rate_bit_s(node_rate, "--node-rate"),
        total_bit_s=parse_rate_bit_s(total_rate, "--total-rate"),
        n_channels_per_node=channels_per_node,
        n_reservations=reservations,
        idle_s=parse_duration_s(idle, "--idle"),
    )
    drain_s = parse_duration_s(drain, "--drain")
    http_port = _http_port(http, port)
    if json_logs:
        log_as_json()
    identity = Identity.claim(folders.config, "relay")

    def on_ready(ready: RelayReady) -> None:
        if as_json:
            print_json(
                {
                    "event": "ready",
                    "node": ready.node,
                    "address": ready.address,
                    "registry": ready.registry,
                    "public": ready.public,
                    "http": ready.http,
                }
            )
        else:
            for line in _how_to_reach(ready.node, ready.address, ready.public, is_local=ready.is_local):
                out.print(line, highlight=False, markup=False, soft_wrap=True)
            if ready.http is not None:
                out.print(f"Who is there: {ready.http}/map", highlight=False, markup=False, soft_wrap=True)

    async def main() -> None:
        config = RelayConfig(
            host=host,
            port=port,
            advertise=advertised,
            ring=() if ring is None else await settle_registries(ring, folders),
            store=Store(store),
            publishers=allowed,
            receipts_from=counted,
            state=folders.state,
            limits=limits,
            drain_s=drain_s,
            http_port=http_port,
            addresses=() if advertised is None else _literals(advertised),
        )
        await RelayDaemon(config, identity).run(on_ready)

    run_daemon(main(), until_eof=until_eof)


def _literals(address: str) -> tuple[str, ...]:
    """Return an address with an IP literal, as vouchers carry it; none if it is a name that nobody knows now."""
    try:
        return (format_address(resolve(parse_address(address))),)
    except UserError as error:
        logger.warning("peers behind NAT cannot be called through this relay: %s", error)
        return ()


def _http_port(text: str, port: int) -> int | None:
    """Return the TCP port that `--http` names; 0: any; None: no HTTP."""
    if text == "off":
        return None
    if text == "same":
        return port
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65_536):
        raise UserError(f"cannot read --http: got {text[:40]!r}, expected a port, `same` or `off`")
    return int(text)


def _how_to_reach(node: str, address: str, public: str | None, *, is_local: bool) -> list[str]:
    """Return what to tell the operator: what others give as `--registry`, and what works on this machine alone."""
    here = f"swarm://{node}@{address}"
    if public is None and is_local:
        return [
            "Registry ready, for this machine only; --host 0.0.0.0 opens it to others. Reach it with:",
            f"  --registry {here}",
            "Ctrl-C stops it.",
        ]
    public = public or f"swarm://{node}@<this machine's address>:{parse_address(address)[1]}"
    lines = ["Registry ready. Others reach it with:", f"  --registry {public}"]
    if here != public:
        lines += [
            f"On this machine {address} does too, but who joins that way is announced at an address that only this",
            "machine reaches: let what others must reach join as they do, or give it --advertise HOST:PORT.",
        ]
    return [*lines, "Ctrl-C stops it."]
