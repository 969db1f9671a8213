"""A peer's experts from a file on its own disk: a whole model, or an expert slice that `swarm split` wrote.

A whole model is hashed for its manifest. A slice file says which model it is of: the manifest is the `manifest.json`
beside it, or comes from whoever serves that model. Either way blocks are judged by the manifest, not by the file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from peer.fetch import fetch_manifest
from swarm.errors import NetworkError, UserError
from swarm.ids import ExpertSet, ModelId, format_index_set
from swarm.interruptible import checked, run_interruptibly
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, manifest_beside, manifest_of
from swarm.model.source import BlockSource, GgufSource
from swarm.model.spec import FILE_KEY, ModelSpec
from swarm.net.pool import Pool
from swarm.registry.client import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """Where blocks come from, and what they must be.

    Attributes:
        held: the experts of a slice file; None: whatever the model has.
    """

    manifest: Manifest
    name: str
    source: BlockSource
    held: ExpertSet | None


@contextlib.asynccontextmanager
async def open_model_file(
    path: Path, cache_dir: Path, registry: Registry, pool: Pool, hashing: Callable[[int, int], None]
) -> AsyncIterator[OpenModel]:
    """Yield a model file or slice file; it is closed at the end. `hashing` is told (bytes done, bytes in all).

    Raises:
        UserError: the file cannot be used.
        NetworkError: nobody gives the manifest of a slice file's model.
    """
    with GgufFile(path) as file:
        if file.text(FILE_KEY) == "slice":
            source = GgufSource(file)
            assert source.model_id is not None  # a slice file that does not say was refused
            manifest, name = await _manifest_of_slice(path, source.model_id, registry, pool)
            yield OpenModel(
                manifest=manifest,
                name=name or file.text("general.name") or path.stem,
                source=source,
                held=source.experts,
            )
            return

        manifest = await run_interruptibly(lambda check: manifest_of(path, cache_dir, checked(check, hashing)))
        yield OpenModel(manifest=manifest, name=path.stem, source=GgufSource(file), held=None)


async def _manifest_of_slice(path: Path, model: ModelId, registry: Registry, pool: Pool) -> tuple[Manifest, str | None]:
    """Return the model's manifest, and its name where the registry knows one."""
    offers = await registry.offers(model)
    name = offers[0].model_name if offers else None
    try:
        manifest = manifest_beside(path)
    except UserError as error:
        reason = str(error)
    else:
        if manifest.model_id == model:
            return manifest, name
        reason = f"the manifest beside it is model {manifest.model_id.short}'s"
    if not offers:
        raise NetworkError(
            f"no manifest for {path}, a slice of model {model.short}: {reason}, and nobody serves that model; "
            "put the manifest.json of `swarm split` beside the slice, or start a backbone"
        )
    logger.info("the manifest is fetched: %s", reason)
    return await fetch_manifest(pool, model, offers), name


def choose_experts(
    spec: ModelSpec, experts: frozenset[int] | ExpertSet | None, layers: frozenset[int] | None, held: ExpertSet | None
) -> ExpertSet:
    """Return which experts a peer is to hold.

    Args:
        experts: of each of `layers`; an ExpertSet has layers of its own; None: all that a slice file holds.
        layers: None: all of the slice file's, or else all that have experts.
        held: what a slice file holds; None: there is none, so whatever the model has.

    Raises:
        UserError: nothing is chosen, or something that the model or the slice file does not have.
    """
    if isinstance(experts, ExpertSet):
        chosen = experts
    elif experts is not None:
        every = spec.moe_layers if held is None else held.by_layer
        chosen = ExpertSet.of(every if layers is None else layers, experts)
    elif held is not None:
        wanted = frozenset(held.by_layer) if layers is None else layers
        if absent := wanted - held.by_layer.keys():
            raise UserError(f"the slice file has nothing of layers {format_index_set(absent)}: it holds {held}")
        chosen = ExpertSet({layer: held.by_layer[layer] for layer in wanted})
    else:
        raise UserError("which experts? give --experts SET: only a slice file says by itself what to hold")
    spec.require_experts(chosen)
    if held is not None:
        missing = {layer: ids - held.by_layer.get(layer, frozenset()) for layer, ids in chosen.by_layer.items()}
        missing = {layer: ids for layer, ids in missing.items() if ids}
        if missing:
            raise UserError(
                f"the slice file does not hold {ExpertSet(missing)}: it holds {held}; "
                "without --experts and --layers a peer takes all of it"
            )
    return chosen
