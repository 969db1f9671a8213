"""Asking and telling the registry. `Registry` is what the rest of swarm knows; a DHT can later stand behind it.

`RegistryClient` is its first form: every record goes to each of a few registry nodes, and answers are merged by seq.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import ConnectionLost, NetworkError, RemoteProtocolError, RemoteRefused, SwarmError, UserError
from swarm.ids import ModelId, NodeId
from swarm.net.addresses import SocketAddress, format_address, parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.registry.records import ExpertAnnouncement, ModelOffer, Record, SignedRecord, verify
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
# A hostile registry node may answer with 16 MB of records that each cost up to 44 ms and 6 MB to read (measured: 65,536
# layers in 350 bytes). Both bounds are guessed: far above the first swarms, and at most a few hundred MB.
MAX_RECORDS_READ = 4096  # of one answer; the rest is left out
MAX_WEIGHT_READ = 2_000_000  # layers and experts named by all records of one answer together, as they lie in memory
READ_SLICE_S = 0.005  # then other callbacks get their turn: dispatches share this loop
DEFAULT_REGISTRY = "127.0.0.1:7440"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAddress:
    """Where a registry node listens, and which node it must be; None: whoever is there."""

    address: SocketAddress
    node: NodeId | None

    def __str__(self) -> str:
        where = format_address(self.address)
        return where if self.node is None else f"swarm://{self.node}@{where}"


def parse_registry(text: str) -> tuple[RegistryAddress, ...]:
    """Return the registry nodes of a comma list of `swarm://NODEID@host:port` or `host:port`. Raises UserError."""
    nodes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"swarm://(?:([a-z2-7]+)@)?([^@/]+)/?", part)
        if match is None and ("/" in part or "@" in part):
            raise UserError(f"not a registry: got {part!r}, expected swarm://NODEID@host:port or host:port")
        node_text, where = match.groups() if match else (None, part)
        nodes.append(RegistryAddress(address=parse_address(where), node=NodeId.parse(node_text) if node_text else None))
    if not nodes:
        raise UserError(f"no registry given: got {text!r}, expected swarm://NODEID@host:port or host:port")
    return tuple(nodes)


class Registry(Protocol):
    """What peers and backbones need of a registry."""

    async def publish(self, signed: SignedRecord) -> int:
        """Hand over a record; return the highest seq known of it. Raises NetworkError when no registry node took it."""
        ...

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        """Return the live announcements of a model, the highest seq of each node, ordered by node id."""
        ...

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        """Return the live offers of one model, or of all."""
        ...

    async def observed_address(self) -> str:
        """Return `host:port` of our endpoint as the registry sees it."""
        ...


class RegistryClient:
    """A `Registry` over an endpoint and a few known registry nodes, dialled again whenever a connection was lost."""

    def __init__(self, endpoint: Endpoint, nodes: Sequence[RegistryAddress]) -> None:
        self._endpoint = endpoint
        self._nodes = tuple(nodes)
        self._connections: dict[RegistryAddress, Connection] = {}
        self._locks = {node: asyncio.Lock() for node in self._nodes}

    async def publish(self, signed: SignedRecord) -> int:
        """Hand the record to every registry node; return the highest seq that one of them knows.

        Raises:
            NetworkError: none answered.
            RemoteRefused: those that answered refused it.
        """
        answers = await self._ask_all(m.Announce(record=signed.to_bytes()))
        return max(answer.highest_seq for answer in answers if isinstance(answer, m.Accepted))

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        """Return the live announcements of a model, the highest seq of each node, ordered by node id."""
        records = await self._lookup(model)
        return [record for record in records if isinstance(record, ExpertAnnouncement)]

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        """Return the live offers of one model, or of all, ordered by node id."""
        records = await self._lookup(model)
        return [record for record in records if isinstance(record, ModelOffer)]

    async def records(self) -> list[Record]:
        """Return every live record, ordered by node id."""
        return await self._lookup(None)

    async def observed_address(self) -> str:
        """Return `host:port` of our endpoint as the first registry node that answers sees it."""
        error: SwarmError = NetworkError("it does not say where it sees us")
        for node in self._nodes:
            try:
                connection = await self._connection(node)
            except (NetworkError, RemoteProtocolError) as failure:
                error = failure
                continue
            if connection.observed_address:
                return connection.observed_address
        raise self._unreachable(error)

    async def _lookup(self, model: ModelId | None) -> list[Record]:
        best: dict[tuple[NodeId, str, ModelId], Record] = {}
        for answer in await self._ask_all(m.Lookup(model_id=model)):
            assert isinstance(answer, m.Records)  # the session checks an answer's type
            for record in await _read_records(answer):
                if model is not None and record.model != model:
                    continue
                key = (record.node, record.kind, record.model)
                if key not in best or record.seq > best[key].seq:
                    best[key] = record
        return sorted(best.values(), key=lambda record: (record.node, record.kind, record.model))

    async def _ask_all(self, request: m.Request) -> list[m.Response]:
        """Return the answers of those that answered; raises NetworkError when none did."""
        outcomes = await asyncio.gather(*(self._ask(node, request) for node in self._nodes), return_exceptions=True)
        answers: list[m.Response] = []
        error: SwarmError | None = None
        for outcome in outcomes:
            if isinstance(outcome, SwarmError):
                if not isinstance(error, RemoteRefused):  # a refusal says more than a dead node's silence
                    error = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers.append(outcome)
        if answers:
            return answers
        if isinstance(error, RemoteRefused):
            raise error
        raise self._unreachable(error)

    async def _ask(self, node: RegistryAddress, request: m.Request) -> m.Response:
        known = self._connections.get(node)
        connection = await self._connection(node)
        try:
            return await connection.request(request, timeout_s=REQUEST_TIMEOUT_S)
        except ConnectionLost:
            if connection is not known:
                raise
        # A registry that was restarted shows only now. Asking and telling may be repeated: the same record changes nothing.
        connection = await self._connection(node)
        return await connection.request(request, timeout_s=REQUEST_TIMEOUT_S)

    async def _connection(self, node: RegistryAddress) -> Connection:
        async with self._locks[node]:
            connection = self._connections.get(node)
            if connection is None or not connection.is_open:
                connection = await self._endpoint.dial(node.address, expected=node.node)
                self._connections[node] = connection
            return connection

    def _unreachable(self, error: SwarmError | None) -> NetworkError:
        where = ", ".join(format_address(node.address) for node in self._nodes)
        return NetworkError(f"no registry answers at {where}: {error}")


async def _read_records(answer: m.Records) -> list[Record]:
    """Return the good records of an untrusted answer, in its order, up to the bounds above."""
    records: list[Record] = []
    weight = 0
    slice_ends = time.monotonic() + READ_SLICE_S
    for _, data in answer.records[:MAX_RECORDS_READ]:
        if time.monotonic() >= slice_ends:
            await asyncio.sleep(0)
            slice_ends = time.monotonic() + READ_SLICE_S
        try:
            record = verify(SignedRecord.from_bytes(data))
        except RemoteProtocolError as error:
            logger.info("the registry passed on a bad record: %s", error)
            continue
        weight += _weight(record)
        if weight > MAX_WEIGHT_READ:
            logger.warning("the registry's answer is too large, using its first %d records", len(records))
            break
        records.append(record)
    return records


def _weight(record: Record) -> int:
    """Return how many layers and experts a record holds in memory; layers mostly share one set."""
    if not isinstance(record, ExpertAnnouncement):
        return 1
    by_layer = record.experts.by_layer
    sets = {id(experts): len(experts) for experts in by_layer.values()}
    return 1 + len(by_layer) + sum(sets.values())
