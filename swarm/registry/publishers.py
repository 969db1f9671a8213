"""Whose models a volunteer takes part in: a model's publisher is the key that signs its offer.

A forged demand costs its sender nothing and a volunteer a full disk, so an unknown publisher is confirmed by a person once,
like a registry node (`swarm.cli.registries`). Where the registry is on this machine, nobody is asked about models that are, too:
it takes such addresses from this machine alone. Another machine's registry may hand out anybody's offer with a loopback address.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from swarm.errors import UserError
from swarm.files import read_lines, write_atomically
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.registry.networks import Scope, host_of, scope_of
from swarm.registry.records import ModelOffer

NOBODY_ASKED = "publisher {node} of {name} is not known; to trust it: --publisher {node}"


class Publishers:
    """The publishers that an operator trusts: own ones, given ones, and a file of `NODEID` lines, confirmed before."""

    def __init__(
        self,
        path: Path,
        *,
        given: Collection[NodeId] = (),
        confirm: Callable[[str], bool] = lambda question: False,
        is_registry_here: bool = False,
    ) -> None:
        """`confirm` asks the person a question; `is_registry_here`: every registry node that was named is on this machine.

        Raises:
            UserError: the file is damaged.
        """
        self._path = path
        self._confirm = confirm
        self._remembered: set[NodeId] = set()
        self._given = frozenset(given)
        self._is_registry_here = is_registry_here
        for number, line in enumerate(read_lines(path), 1):
            try:
                self._remembered.add(NodeId.parse(line.strip()))
            except UserError as error:
                raise UserError(f"{path}, line {number}: got {line[:80]!r}, expected a node id") from error

    def knows(self, offer: ModelOffer) -> bool:
        """Return whether nobody has to be asked about an offer."""
        is_here = self._is_registry_here and all(
            scope_of(host_of(address)) is Scope.MACHINE for address in offer.addresses
        )
        return is_here or offer.node in self._given or offer.node in self._remembered

    def require(self, offer: ModelOffer) -> None:
        """Ask about an offer's publisher if it is not known, and remember a yes. Raises UserError for a no."""
        if self.knows(offer):
            return
        name = f"{offer.model_name}@{offer.model.short}"
        if not self._confirm(f"{name} is published by node {offer.node}.\nTrust its models from now on?"):
            raise UserError(NOBODY_ASKED.format(node=offer.node, name=name))
        self._remembered.add(offer.node)
        text = "".join(f"{node}\n" for node in sorted(self._remembered))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, text.encode())
        except OSError as error:
            raise UserError(f"cannot remember the publisher in {self._path}: {error.strerror}") from error


def own_publishers(folder: Path) -> set[NodeId]:
    """Return the node ids of this operator's backbones: of the `serve` keys kept in `folder`."""
    own = set()
    for path in sorted(folder.glob("serve*.key")):
        try:
            own.add(Identity.load_or_create(path).node_id)
        except UserError:
            continue  # `swarm serve` itself says what is wrong with it
    return own
