"""Asks the volunteer, before anything large is fetched or loaded, whether what joining takes is wanted."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable

from peer.auto import OVERHEAD_BYTES
from peer.config import PeerConfig
from peer.opening import Opened
from swarm.errors import NotAgreed, SwarmError
from swarm.ids import ExpertSet, NodeId
from swarm.memory import free_memory_bytes
from swarm.model.block_store import BlockStore
from swarm.plan.prospect import Prospect, make_prospect
from swarm.registry.client import RegistryClient

logger = logging.getLogger(__name__)

Agree = Callable[[Prospect], Awaitable[bool]]
"""Shows the volunteer what joining takes; returns whether it is wanted."""


async def require_agreed(
    agree: Agree,
    opened: Opened,
    experts: ExpertSet,
    registry: RegistryClient,
    *,
    node: NodeId,
    model_name: str,
    config: PeerConfig,
) -> None:
    """Return if the volunteer wants to hold these experts. Raises NotAgreed."""
    model = opened.model
    try:
        told = await registry.histograms(model.manifest.model_id)
        offers = await registry.offers(model.manifest.model_id)
    except SwarmError as error:
        logger.info("cannot ask how much the model is used: %s", error)
        histograms = []
    else:  # of those alone whose models are trusted: a stranger may say anything
        known = config.publishers
        trusted = {offer.node for offer in offers if known is None or known.knows(offer)}
        histograms = [each for each in told if each.node in trusted]
    store = model.source if isinstance(model.source, BlockStore) else None
    prospect = make_prospect(
        node=str(node),
        manifest=model.manifest,
        name=model_name,
        offer=opened.offer,
        experts=experts,
        missing=[] if store is None else [pair for pair in experts if not store.has(*pair)],
        overhead_bytes=OVERHEAD_BYTES,
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=None if store is None else shutil.disk_usage(store.folder).free,
        histograms=histograms,
        max_upload_bytes_s=config.max_upload_bytes_s,
        max_download_bytes_s=config.max_download_bytes_s,
    )
    if not await agree(prospect):
        raise NotAgreed("nothing was fetched or joined, as you said; fewer --experts or --layers take less")
