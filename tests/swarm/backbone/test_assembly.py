"""A backbone's parts put together without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from swarm.backbone import assembly
from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.prepared import PreparedModel, prepare_model
from swarm.backbone.requests import GenerationRequest
from swarm.backbone.row_budget import most_rows
from swarm.dispatch.auditor import Auditor
from swarm.errors import EngineError, ExpertUnavailable, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.model.manifest import Manifest
from swarm.net.addresses import parse_address
from swarm.registry.client import RegistryAddress
from swarm.registry.records import ExpertAnnouncement, ModelOffer, SignedRecord, Withdrawal, verify
from swarm.wire import messages as m
from swarm.wire.receipts import read_receipt, receipt_bytes
from tests.swarm.backbone.local_experts import SplitModel

IDENTITY = Identity.from_seed(bytes(range(32)))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders.below(tmp_path)


class FakeEndpoint:
    """An endpoint that nobody can reach."""

    def __init__(self, identity: Identity, **options: Any) -> None:
        self.identity = identity
        self.handler = options["handler"]
        self.serves = options["serves"]
        self.on_other: object = None
        self.port = 1
        self.families = frozenset((4,))

    def add_handler(self, serves: Any, handler: Any) -> None:
        pass

    def open_connections(self) -> list[Any]:
        return []

    def sightings(self) -> list[Any]:
        return []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class FakeRegistry:
    """Keeps what is published; knows no holders."""

    published: list[Any]

    def __init__(self, *_: object, **_options: object) -> None:
        type(self).published = []

    async def publish(self, signed: SignedRecord) -> int:
        record = verify(signed)
        self.published.append(record)
        return record.seq

    async def holders(self, _model: object) -> list[ExpertAnnouncement]:
        return []

    def members_known(self) -> list[Any]:
        return []

    async def observed_address(self) -> str:
        return "192.0.2.7:4000"

    async def watch(self, _model: object, _on_change: object) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


@pytest.fixture
def config(tiny: SplitModel, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> BackboneConfig:
    monkeypatch.setattr(assembly, "Endpoint", FakeEndpoint)
    monkeypatch.setattr(assembly, "RegistryClient", FakeRegistry)
    return BackboneConfig(
        registry=(RegistryAddress(address=parse_address("127.0.0.1:7440"), node=None),),
        folders=folders,
        model_file=tiny.file,
        engine=EngineConfig(n_ctx=64, n_batch=32, n_ubatch=32),
    )


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_running_backbone_is_announced_and_withdrawn_at_its_end(
    config: BackboneConfig, tiny: SplitModel
) -> None:
    async with open_backbone(config, IDENTITY) as running:
        await wait_until(lambda: bool(FakeRegistry.published))
        (offer,) = FakeRegistry.published
        assert isinstance(offer, ModelOffer)
        assert (offer.node, offer.model) == (IDENTITY.node_id, tiny.manifest.model_id)
        assert (offer.moe_layers, offer.n_expert, offer.n_expert_used, offer.n_embd) == ("0-5", 32, 4, 256)
        assert (offer.addresses, offer.offers_blocks) == (("192.0.2.7:4000",), True)
        assert running.backbone.model_name == f"model-Q8_0@{tiny.manifest.model_id.short}"
        endpoint: Any = running.endpoint
        answer = await endpoint.handler(None, m.GetManifest(model_id=tiny.manifest.model_id))
        assert Manifest.from_bytes(answer.data) == tiny.manifest
    assert isinstance(FakeRegistry.published[-1], Withdrawal)
    with pytest.raises(EngineError):
        _ = running.engine.context


async def test_without_peers_a_request_ends_by_name(config: BackboneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.backbone.generate.COVER_WAIT_S", 0.01)
    async with open_backbone(config, IDENTITY) as running:
        with pytest.raises(ExpertUnavailable) as caught:
            await anext(running.backbone.generate(GenerationRequest(prompt="x")))
    assert (caught.value.layer, caught.value.experts) == (0, tuple(range(32)))


@pytest.mark.parametrize("error", [UserError("port taken"), ExpertUnavailable(1, (2,), "gone"), KeyError("bug")])
async def test_an_error_inside_comes_out_as_it_is(config: BackboneConfig, error: Exception) -> None:
    """Not wrapped in a group: the command line shows a UserError as one line, and a group as a traceback."""
    with pytest.raises(type(error)) as caught:
        async with open_backbone(config, IDENTITY):
            raise error
    assert caught.value is error


async def test_an_engine_that_does_not_start_is_its_own_error(
    config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Engine) -> None:
        raise EngineError("no memory left")

    monkeypatch.setattr(Engine, "start", fail)
    with pytest.raises(EngineError, match="no memory left"):
        async with open_backbone(config, IDENTITY):
            pytest.fail("it must not open")


async def test_a_model_that_was_prepared_is_not_prepared_again_and_stays_its_owners(
    config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare_model(config.model_file, config.folders)
    monkeypatch.setattr(assembly, "prepare_model", lambda *_: pytest.fail("prepared again"))
    with prepared:
        async with open_backbone(config, IDENTITY, prepared=prepared) as running:
            assert running.manifest is prepared.manifest
        assert prepared.file is not None
        name = next(iter(prepared.file.tensors))
        assert prepared.file.read(name, 0, 1)
    with pytest.raises(ValueError, match="closed file"):
        prepared.file.read(name, 0, 1)


async def test_what_a_backbone_prepared_itself_is_closed_at_its_end(
    config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PreparedModel] = []

    def prepare(*arguments: Any) -> PreparedModel:
        made.append(prepare_model(*arguments))
        return made[-1]

    monkeypatch.setattr(assembly, "prepare_model", prepare)
    async with open_backbone(config, IDENTITY):
        (prepared,) = made
        assert prepared.file is not None
        assert prepared.file.read(next(iter(prepared.file.tensors)), 0, 1)
    with pytest.raises(ValueError, match="closed file"):
        prepared.file.read(next(iter(prepared.file.tensors)), 0, 1)


async def test_lanes_share_a_budget_of_rows_by_the_form_in_which_they_travel(config: BackboneConfig) -> None:
    config = replace(config, n_lanes=2, n_slots=2, engine=EngineConfig(n_ctx=64, n_batch=64, n_ubatch=64))
    async with open_backbone(config, IDENTITY) as running:
        first, second = running.backbone.lanes
        first.budget.began(0, 16, wants_more=False)
        assert second.budget.room(1) == most_rows(config.wire, config.engine.n_batch) - 16


async def test_a_cancelled_start_does_not_hash_on(config: BackboneConfig) -> None:
    """Cancelled from the first piece hashed: far fewer pieces follow than the file has."""
    hashed: list[int] = []
    loop = asyncio.get_running_loop()

    async def start() -> None:
        async with open_backbone(config, IDENTITY, progress):
            pytest.fail("it must not open")

    def progress(n_done: int, n_total: int) -> None:
        hashed.append(n_done)
        if len(hashed) == 1:
            asyncio.run_coroutine_threadsafe(cancel(), loop).result()
        assert n_done < n_total, "hashed to the end"

    async def cancel() -> None:
        task.cancel()
        await asyncio.sleep(0)  # now the task has seen it

    task = asyncio.create_task(start())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert len(hashed) == 1


async def test_a_cancelled_backbone_stays_cancelled(config: BackboneConfig) -> None:
    is_open = asyncio.Event()

    async def serve() -> None:
        async with open_backbone(config, IDENTITY):
            is_open.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.wait_for(is_open.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_a_peer_that_asks_gets_its_receipts_and_nobody_elses(config: BackboneConfig) -> None:
    peer, other = (NodeId(bytes([n]) * 32) for n in (1, 2))
    async with open_backbone(config, IDENTITY) as running:
        endpoint: Any = running.endpoint

        async def ask(asker: NodeId) -> dict[str, Any]:
            answer = await endpoint.handler(SimpleNamespace(remote=asker), m.GetStatus())
            status: dict[str, Any] = json.loads(answer.data)
            return status

        assert "receipts" not in await ask(peer), "it has computed nothing yet"
        assert running.contributions is not None
        assert running.contributions is running.dispatcher.contributions
        running.contributions.count(peer, 1, 1, np.array([3, 4], np.uint16))
        (text,) = (await ask(peer))["receipts"]
        receipt = read_receipt(receipt_bytes(text))
        assert (receipt.backbone, receipt.peer, receipt.totals.n_pairs) == (IDENTITY.node_id, peer, 2)
        assert "audits" not in await ask(peer), "asked each minute by each peer, it is to be small"
        assert (await ask(other)).keys() == {"role", "version", "model", "audits"}
        assert running.ledger is not None
        assert running.ledger.trusted == {IDENTITY.node_id}


async def test_a_caught_peer_gets_no_receipts(config: BackboneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auditor, "is_caught", lambda self, node: True)
    async with open_backbone(replace(config, audit_share=0.02), IDENTITY) as running:
        assert running.contributions is not None
        running.contributions.count(IDENTITY.node_id, 1, 1, np.array([3], np.uint16))
        endpoint: Any = running.endpoint
        answer = await endpoint.handler(SimpleNamespace(remote=IDENTITY.node_id), m.GetStatus())
        assert "receipts" not in json.loads(answer.data)
