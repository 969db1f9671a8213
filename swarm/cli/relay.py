"""`swarm relay`: the registry, and (later) the relay for peers behind NAT."""

from __future__ import annotations

from swarm.cli.options import HostOption, JsonOption, PortOption, UntilEofOption
from swarm.cli.runtime import out, print_json, run_daemon
from swarm.files import Folders
from swarm.identity import Identity


def relay(
    host: HostOption = "0.0.0.0",
    port: PortOption = 7440,
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
) -> None:
    """Run a relay: the place where peers and backbones find each other."""
    from relay.daemon import RelayConfig, RelayDaemon, RelayReady

    identity = Identity.claim(Folders.from_environment().config, "relay")

    def on_ready(ready: RelayReady) -> None:
        if as_json:
            print_json({"event": "ready", "node": ready.node, "address": ready.address, "registry": ready.registry})
        else:
            out.print(f"Registry ready. Others reach it with:\n  --registry {ready.registry}", highlight=False)
            out.print("Ctrl-C stops it.")

    daemon = RelayDaemon(RelayConfig(host=host, port=port), identity)
    run_daemon(daemon.run(on_ready), until_eof=until_eof)
