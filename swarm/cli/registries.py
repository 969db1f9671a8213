"""Which registry nodes to trust: given by id, on this machine, or confirmed once and remembered."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path

from swarm.cli.question import confirm as confirm
from swarm.errors import NetworkError, RemoteProtocolError, UserError
from swarm.files import Folders, read_lines, write_atomically
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address, resolve
from swarm.net.endpoint import Endpoint
from swarm.registry.client import RegistryAddress, parse_registry


class KnownRegistries:
    """A file of `host:port NODEID` lines, like ssh's known_hosts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes: dict[str, NodeId] = {}
        for number, line in enumerate(read_lines(path), 1):
            words = line.split()
            try:
                where, node = words
                self._nodes[where] = NodeId.parse(node)
            except (ValueError, UserError) as error:
                raise UserError(f"{path}, line {number}: got {line!r}, expected host:port NODEID") from error

    def get(self, where: str) -> NodeId | None:
        """Return the node remembered for `host:port`."""
        return self._nodes.get(where)

    def add(self, where: str, node: NodeId) -> None:
        """Remember a node; raises UserError where that cannot be written."""
        self._nodes[where] = node
        text = "".join(f"{each} {known}\n" for each, known in sorted(self._nodes.items()))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, text.encode())
        except OSError as error:
            raise UserError(
                f"cannot remember the registry in {self._path}: {error.strerror}; give it as swarm://{node}@{where}"
            ) from error


async def _ask_id(address: SocketAddress) -> NodeId:
    """Return which node listens there; raises NetworkError or RemoteProtocolError."""
    async with Endpoint(Identity.generate()) as endpoint:
        connection = await endpoint.dial(address, expected=None)
        return connection.remote


async def settle_registries(
    text: str,
    folders: Folders,
    *,
    confirm: Callable[[str], bool] = confirm,
    ask_id: Callable[[SocketAddress], Awaitable[NodeId]] = _ask_id,
) -> tuple[RegistryAddress, ...]:
    """Return the registry nodes that `text` names, each with the node it must be.

    A node on this machine needs no id: whoever listens there can do as much already. Any other without an id is asked
    for it once, the person confirms, and it is remembered.

    Raises:
        UserError: an unknown node that nobody confirms, or that does not answer.
    """
    known = KnownRegistries(folders.config / "known_registries")
    settled = []
    for entry in parse_registry(text):
        address = resolve(entry.address)
        node = entry.node
        if node is None and not ipaddress.ip_address(address[0]).is_loopback:
            where = format_address(entry.address)
            node = known.get(where)
            if node is None:
                try:
                    node = await ask_id(address)
                except (NetworkError, RemoteProtocolError) as error:
                    raise UserError(f"no registry answers at {where}: {error}") from error
                if not confirm(f"The registry at {where} is node {node}. Trust it from now on?"):
                    raise UserError(f"registry at {where} is not known; give it as swarm://{node}@{where} to trust it")
                known.add(where, node)
        settled.append(RegistryAddress(address=address, node=node))
    return tuple(settled)
