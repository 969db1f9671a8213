"""Records of a tiny model, for tests that care about few of their fields."""

from __future__ import annotations

from typing import Any

from swarm.ids import ExpertSet, NodeId
from swarm.registry.records import ExpertAnnouncement, ModelOffer


def sample_announcement(node: NodeId, **fields: Any) -> ExpertAnnouncement:
    """Return an announcement of four experts in layer 0; `model` and `addresses` must be given."""
    given: dict[str, Any] = {
        "seq": 1,
        "ttl_s": 60,
        "model_name": "tiny",
        "experts": ExpertSet.of([0], range(4)),
        "exact_kernels": True,
        "wire_versions": (1,),
        **fields,
    }
    return ExpertAnnouncement(node=node, **given)


def sample_offer(node: NodeId, **fields: Any) -> ModelOffer:
    """Return an offer of a model of four layers; `model` and `addresses` must be given."""
    given: dict[str, Any] = {
        "seq": 1,
        "ttl_s": 60,
        "model_name": "tiny",
        "n_expert": 8,
        "n_expert_used": 2,
        "moe_layers": "0-3",
        "n_embd": 64,
        "size_bytes": 1000,
        "offers_blocks": True,
        **fields,
    }
    return ModelOffer(node=node, **given)
