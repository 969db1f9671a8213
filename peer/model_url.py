"""A peer's experts from a file on the web that the volunteer named: which model that is.

The whole file would have to be read to say so. So the manifest comes from who serves the model: by the record that names this
file as a source, else by one of a file as long whose tensors are the same; where nobody does, from the manifest.json beside the
file, which `swarm split` writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from peer.fetch import fetch_manifest
from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, SwarmError, UserError
from swarm.ids import ModelId
from swarm.model.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from swarm.net.pool import Pool
from swarm.registry.records import ModelOffer
from swarm.sources.locations import Location
from swarm.sources.web import Web
from swarm.sources.web_file import WebFile
from swarm.sources.web_model import WebModel

logger = logging.getLogger(__name__)

Choose = Callable[[Sequence[ModelOffer]], list[ModelOffer]]
"""Returns one model's offers, of those that a volunteer trusts; raises UserError where there is no such model, or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """What a file on the web is.

    Attributes:
        offers: of who serves the model; none: only the file's own manifest is known.
    """

    manifest: Manifest
    name: str
    offers: list[ModelOffer]


async def identify(
    model: WebModel, location: Location, web: Web, pool: Pool, offers: Sequence[ModelOffer], choose: Choose
) -> NamedModel:
    """Return which model a file on the web is of; `offers`: all that the registry knows.

    Raises:
        UserError: nobody serves that model, nobody who does is trusted, or several fit.
        NetworkError: who serves it does not answer.
    """
    fitting = [each for each in offers if _may_be(each, model, location)]
    named = [each for each in fitting if location.name in each.sources]
    if fitting:
        chosen = choose(named or fitting)
        manifest = await fetch_manifest(pool, chosen[0].model, chosen)
        if not model.is_part_of(manifest):
            raise UserError(f"{location.name} is not {chosen[0].model_name}@{manifest.model_id.short}: other tensors")
        return NamedModel(manifest=manifest, name=chosen[0].model_name, offers=chosen)
    manifest = await _manifest_beside(model, location, web)
    stem = location.file_name.removesuffix(".gguf")
    return NamedModel(manifest=manifest, name=stem if model.source.model_id is None else model.name or stem, offers=[])


def _may_be(offer: ModelOffer, model: WebModel, location: Location) -> bool:
    if model.source.model_id is not None:
        return offer.model == model.source.model_id
    return location.name in offer.sources or offer.size_bytes == model.size_bytes


async def _manifest_beside(model: WebModel, location: Location, web: Web) -> Manifest:
    file = WebFile(web, location.sibling(MANIFEST_NAME))
    data = bytearray()
    try:
        async with aclosing(file.chunks(0, MAX_MANIFEST_BYTES)) as chunks:
            async for chunk in chunks:
                data += chunk
        manifest = Manifest.from_bytes(bytes(data))
    except (NetworkError, RemoteProtocolError, Overloaded) as error:
        raise _unknown(location, model.source.model_id, error) from error
    if not model.is_part_of(manifest):
        raise UserError(f"the {MANIFEST_NAME} beside {location.name} is another model's")
    return manifest


def _unknown(location: Location, model: ModelId | None, error: SwarmError) -> UserError:
    what = "this file" if model is None else f"model {model.short}"
    return UserError(
        f"cannot tell what {location.name} is: nobody in the registry serves {what}, and there is no {MANIFEST_NAME} beside it "
        f"({error}); start swarm serve with it, or wait for who does"
    )
