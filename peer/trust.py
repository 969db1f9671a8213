"""Which model a volunteer fetches, among those whose publishers are trusted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from peer.fetch import choose_model
from swarm.errors import UserError
from swarm.ids import ModelId
from swarm.registry.publishers import Publishers
from swarm.registry.records import ModelOffer


def choose_trusted(
    offers: Sequence[ModelOffer], wanted: str | None, publishers: Publishers, *, held: Collection[ModelId] = ()
) -> tuple[ModelId, list[ModelOffer]]:
    """Return the model that `wanted` names and its trusted offers; see `choose_model`.

    An unknown publisher's offer never stands in the way of a known one's; where there is no known one, a person is asked.

    Raises:
        UserError: no such model, several, or its publisher is not trusted.
    """
    known = [offer for offer in offers if publishers.knows(offer)]
    try:
        return choose_model(known, wanted, held=held)
    except UserError:
        if len(known) == len(offers):
            raise
    model, found = choose_model(offers, wanted, held=held)
    publishers.require(found[0])
    return model, [offer for offer in found if publishers.knows(offer)]
