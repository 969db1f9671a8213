"""`swarm relay`: the registry, and (later) the relay for peers behind NAT."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.options import HostOption, JsonOption, PortOption, UntilEofOption
from swarm.cli.runtime import out, print_json, run_daemon
from swarm.files import Folders
from swarm.identity import Identity
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
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Run a relay: the place where peers and backbones find each other."""
    from relay.daemon import RelayConfig, RelayDaemon, RelayReady

    advertised = None if advertise is None else format_address(parse_address(advertise))
    identity = Identity.claim(Folders.from_environment().config, "relay")

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

    daemon = RelayDaemon(RelayConfig(host=host, port=port, advertise=advertised), identity)
    run_daemon(daemon.run(on_ready), until_eof=until_eof)


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
