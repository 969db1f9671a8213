"""`swarm relay`: the registry, and (later) the relay for peers behind NAT."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.options import HostOption, JsonOption, PortOption, UntilEofOption
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import out, print_json, run_daemon
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import format_address, parse_address


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
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Run a relay: the place where peers and backbones find each other."""
    from relay.daemon import RelayConfig, RelayDaemon, RelayReady, Store

    if store not in list(Store):
        raise UserError(f"cannot read --store: got {store!r}, expected one of {', '.join(Store)}")
    folders = Folders.from_environment()
    advertised = None if advertise is None else format_address(parse_address(advertise))
    allowed = None if publishers is None else frozenset(NodeId.parse(each.strip()) for each in publishers.split(","))
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
                }
            )
        else:
            for line in _how_to_reach(ready.node, ready.address, ready.public, is_local=ready.is_local):
                out.print(line, highlight=False, markup=False, soft_wrap=True)

    async def main() -> None:
        config = RelayConfig(
            host=host,
            port=port,
            advertise=advertised,
            ring=() if ring is None else await settle_registries(ring, folders),
            store=Store(store),
            publishers=allowed,
            state=folders.state,
        )
        await RelayDaemon(config, identity).run(on_ready)

    run_daemon(main(), until_eof=until_eof)


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
