"""A small model, a registry that is a list, and connections that call a function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.backbone.share import ModelShare
from swarm.errors import NetworkError, RemoteRefused
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.model.source import GgufSource
from swarm.net.addresses import parse_address
from swarm.registry.records import ExpertAnnouncement, ModelOffer
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec
from tests.synthetic_moe import write_synthetic_moe

N_LAYERS, N_EXPERT, N_EMBD = 2, 6, 64


def node(number: int) -> NodeId:
    return Identity.from_seed(bytes([number]) * 32).node_id


def offer(manifest_or_id: Manifest | ModelId, number: int = 1, **fields: Any) -> ModelOffer:
    model = manifest_or_id.model_id if isinstance(manifest_or_id, Manifest) else manifest_or_id
    values: dict[str, Any] = {
        "node": node(number),
        "seq": 1,
        "ttl_s": 60,
        "model": model,
        "model_name": "small",
        "n_expert": N_EXPERT,
        "n_expert_used": 2,
        "moe_layers": "0-1",
        "n_embd": N_EMBD,
        "size_bytes": 1000,
        "addresses": (f"192.0.2.{number}:7000",),
        "offers_blocks": True,
    }
    return ModelOffer(**values | fields)


def announcement(manifest: Manifest, number: int, experts: ExpertSet, **fields: Any) -> ExpertAnnouncement:
    values: dict[str, Any] = {
        "node": node(number),
        "seq": 1,
        "ttl_s": 60,
        "model": manifest.model_id,
        "model_name": "small",
        "experts": experts,
        "addresses": (f"192.0.2.{number}:7000",),
        "exact_kernels": False,
        "wire_versions": (1,),
    }
    return ExpertAnnouncement(**values | fields)


def dispatch(layer: int = 0, *, experts: tuple[int, ...] = (1, 2, 3), **fields: Any) -> m.Dispatch:
    """Return a dispatch of two rows: the first for one expert fewer than are named, the second for the last."""
    rows = np.random.default_rng(layer).standard_normal((2, N_EMBD), dtype=np.float32)
    values: dict[str, Any] = {
        "model_tag": bytes(8),
        "layer": layer,
        "rows_codec": RowCodec.F32,
        "result_codec": RowCodec.F32,
        "row_counts": np.array([len(experts) - 1, 1], np.uint8),
        "expert_ids": np.array(experts, np.uint16),
        "weights": np.full(len(experts), 0.5, np.float32),
        "rows": rows,
    }
    return m.Dispatch(**values | fields)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds, which other threads may bring about."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@dataclass
class SmallModel:
    path: Path
    manifest: Manifest
    source: GgufSource

    def share(self) -> ModelShare:
        return ModelShare(self.manifest, self.source)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallModel]:
    path = write_synthetic_moe(
        tmp_path_factory.mktemp("small") / "small.gguf",
        n_layers=N_LAYERS,
        n_expert=N_EXPERT,
        n_expert_used=2,
        n_embd=N_EMBD,
        n_ff_exp=32,
        n_ff_shared=32,
    )
    with GgufFile(path) as file:
        yield SmallModel(path, build_manifest(file), GgufSource(file))


Answer = Callable[[m.Request], Awaitable[m.Response]]


@dataclass
class FakeNetwork:
    """Stands in for a pool and for a registry. Nodes answer by a function, as an endpoint's handler would.

    Attributes:
        nodes: who can be reached.
        requests: (node, request) in the order they came.
        listed: the offers that the registry knows; None: it cannot be asked.
        peers: the announcements that it knows.
    """

    nodes: dict[NodeId, Answer] = field(default_factory=dict)
    listed: list[ModelOffer] | None = field(default_factory=list)
    peers: list[ExpertAnnouncement] = field(default_factory=list)
    requests: list[tuple[NodeId, m.Request]] = field(default_factory=list)
    n_lookups: int = 0

    def add(self, model: SmallModel, number: int, answer: Answer | None = None) -> ModelOffer:
        """List an offer of a node that answers honestly, or by `answer`."""
        listed = offer(model.manifest, number)
        assert self.listed is not None
        self.listed.append(listed)
        self.nodes[listed.node] = answer or model.share().answer
        return listed

    def add_peer(self, model: SmallModel, number: int, experts: ExpertSet, answer: Answer | None = None) -> NodeId:
        """Announce a peer with these experts, which gives their blocks away, or answers by `answer`."""
        known = announcement(model.manifest, number, experts)
        self.peers.append(known)
        self.nodes[known.node] = answer or model.share().answer
        return known.node

    def blocks_asked(self, number: int | None = None) -> list[tuple[int, int]]:
        """Return the (layer, expert) of every block request, of all nodes or of one."""
        return [
            (request.layer, request.expert)
            for to, request in self.requests
            if isinstance(request, m.GetBlock) and (number is None or to == node(number))
        ]

    # As a Registry

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        self.n_lookups += 1
        if self.listed is None:
            raise NetworkError("no registry answers")
        return [each for each in self.listed if model in (None, each.model)]

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        """Return the peers of that model."""
        return [each for each in self.peers if each.model == model]

    # As a Pool

    async def connect(self, to: NodeId, addresses: Sequence[tuple[str, int]], **_: object) -> FakeConnection:
        if to not in self.nodes:
            raise NetworkError(f"node {to.short} cannot be reached")
        known = {each.node: each.addresses for each in [*(self.listed or []), *self.peers]}
        assert list(addresses) == [parse_address(text) for text in known.get(to, ())] or not known
        return FakeConnection(self, to)

    async def reach(self, who: ModelOffer | ExpertAnnouncement, **_: object) -> FakeConnection:
        return await self.connect(who.node, [parse_address(text) for text in who.addresses])


@dataclass
class FakeConnection:
    network: FakeNetwork
    to: NodeId

    async def request(self, request: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        """Return the node's answer; what its handler raises arrives as a refusal, as through a real endpoint."""
        assert timeout_s > 0
        self.network.requests.append((self.to, request))
        try:
            return await self.network.nodes[self.to](request)
        except LookupError as error:
            raise RemoteRefused(str(error), remote_code=m.ErrorCode.NOT_FOUND) from error


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()
