"""A registry node's shell: a `Replica` between a clock, an endpoint and other registry nodes. Carried by the relay daemon.

A node that announces a loopback address from another machine is refused: it would send the others to themselves. One that
announces it from this machine is taken, since a swarm on one machine is a swarm; others do not reach it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.identity import Identity
from swarm.ids import ModelId, NodeId
from swarm.net.addresses import SocketAddress, parse_address
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.announcer import SequenceNumbers
from swarm.registry.answers import AnswerReader
from swarm.registry.contacts import MAX_DIALLED
from swarm.registry.membership import MEMBER_TTL_S
from swarm.registry.networks import prefix_of as prefix_of
from swarm.registry.records import (
    NO_MODEL,
    SIGNATURE_BYTES,
    RecordKind,
    RegistryNodeRecord,
    SignedRecord,
    Withdrawal,
    sign,
    speaks_of_a_member,
)
from swarm.registry.replica import MAX_NEWS, MAX_PUSHED, Call, Replica
from swarm.registry.table import RegistryTable
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")

SERVES: tuple[type[m.Request], ...] = (
    m.Announce,
    m.Lookup,
    m.Find,
    m.GetMembers,
    m.Watch,
    m.Gossip,
    m.Sync,
    m.Push,
)
CALL_TIMEOUT_S = 4.0  # to dial another registry node, and again for its answer
MAX_CALLS = 32  # at a time; a poll's further ones are left out: they come again
WATCH_S = 25.0  # a WATCH is answered after this long even if nothing happened; below NATs' shortest timeouts of 30 s
MAX_WATCHES = 512  # all together; half of what an endpoint serves at a time, more are told BUSY
MAX_WATCHES_PER_MODEL = 4  # of one asker; guessed: a backbone that starts again, twice
MAX_WATCHES_PER_PREFIX = 32  # from one network; guessed: a rack of backbones with a few models each
# Other registry nodes' records that are remembered as verified between reading and taking them in: four PUSHes, and layers and
# experts that they name. Guessed: some 10 MB, and at most 60 ms of computing for one PUSH, in slices.
MAX_VERIFIED, MAX_WEIGHT = 512, 524_288
LEAVE_TIMEOUT_S = 1.0
MAX_SLEEP_S = 5.0


class RegistryNode:
    """Serves one table. `now` is monotonic seconds: leases must not follow the wall clock's jumps."""

    def __init__(
        self,
        table: RegistryTable | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        own: NodeId = NodeId(bytes(32)),  # noqa: B008  # a value; for a ring of one, whose id nobody asks for
        stores: bool = True,
        publishers: Collection[NodeId] | None = None,
        pick: Callable[[int], int] = random.randrange,
    ) -> None:
        self._reader = AnswerReader(max_verified=MAX_VERIFIED, max_weight=MAX_WEIGHT)
        self.replica = Replica(
            own,
            table=table,
            pick=pick,
            stores=stores,
            publishers=publishers,
            verify_record=self._reader.verify,
        )
        self.replica.on_news = self._wake
        self._now = now
        self._watching: dict[ModelId, set[asyncio.Event]] = {}
        self._n_watches = 0
        self._n_watches_of: Counter[tuple[NodeId, ModelId]] = Counter()
        self._n_watches_from: Counter[str] = Counter()

    @property
    def table(self) -> RegistryTable:
        """The records."""
        return self.replica.table

    def answer(self, asker: NodeId, request: m.Request, *, host: str | None = None) -> m.Response:
        """Return the answer at once; see `Replica.answer`."""
        return self.replica.answer(asker, request, now=self._now(), host=host)

    async def serve(self, asker: NodeId, request: m.Request, *, host: str | None = None) -> m.Response:
        """Return the answer; that to WATCH as soon as something has changed, or after WATCH_S."""
        if isinstance(request, m.Push) and self.replica.is_member(asker):
            records = await self.read(request.records[:MAX_PUSHED])
            return self.answer(asker, m.Push(records=records, wanted=request.wanted), host=host)
        if not isinstance(request, m.Watch):
            return self.answer(asker, request, host=host)
        prefix = None if host is None else prefix_of(host)
        of, source = (asker, request.model_id), prefix or "this machine"
        if (
            self._n_watches >= MAX_WATCHES
            or self._n_watches_of[of] >= MAX_WATCHES_PER_MODEL
            or (prefix is not None and self._n_watches_from[source] >= MAX_WATCHES_PER_PREFIX)
        ):
            raise Overloaded("too many watch this registry node", retry_after_s=WATCH_S)
        event = asyncio.Event()
        self._n_watches += 1
        self._n_watches_of[of] += 1
        self._n_watches_from[source] += 1
        waiting = self._watching.setdefault(request.model_id, set())
        waiting.add(event)
        try:
            async with asyncio.timeout(WATCH_S):
                while (changes := self.replica.changes(request, self._now())) is None:
                    event.clear()
                    await event.wait()
                return changes
        except TimeoutError:
            return self.answer(asker, request, host=host)
        finally:
            self._n_watches -= 1
            _count_down(self._n_watches_of, of)
            _count_down(self._n_watches_from, source)
            waiting.discard(event)
            if not waiting and self._watching.get(request.model_id) is waiting:
                del self._watching[request.model_id]

    async def read(self, told: Sequence[m.Told]) -> tuple[m.Told, ...]:
        """Return those of another registry node's records that are good; dispatches get their turn meanwhile.

        The replica then verifies them at once: it remembers them.
        """
        good = {signed.signature for _, signed in await self._reader.read(told)}
        return tuple((left_ms, data) for left_ms, data in told if data[:SIGNATURE_BYTES] in good)

    def _wake(self, model: ModelId) -> None:
        for event in self._watching.get(model, ()):
            event.set()


class RingMember:
    """Lets a RegistryNode take part in a ring: performs its calls until cancelled, then takes its leave."""

    def __init__(
        self,
        node: RegistryNode,
        endpoint: Endpoint,
        identity: Identity,
        numbers: SequenceNumbers,
        *,
        address: str | None,
        seeds: Sequence[tuple[SocketAddress, NodeId | None]] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            address: `host:port` where the other registry nodes reach this one; None: it does not store.
            seeds: registry nodes to ask for the others first, and the node each must be; None: whoever is there.
        """
        self._node = node
        self._replica = node.replica
        self._endpoint = endpoint
        self._identity = identity
        self._numbers = numbers
        self._address = address
        self._seeds = list(seeds)
        self._address_of_seed = {node: where for where, node in seeds if node is not None}
        self._now = now
        self._pool = Pool(endpoint)
        self._busy: set[NodeId] = set()
        if address is not None:
            self._replica.store_as(self._renew_own)
        elif seeds:
            self._replica.stop_storing()
        self._replica.trust_seeds(self._address_of_seed)

    async def run(self) -> None:
        """Take part for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for where, node in self._seeds:
                    if node is None:
                        tasks.create_task(self._find_out(where))
                while True:
                    for call in self._replica.poll(self._now()):
                        if len(self._busy) < MAX_CALLS and call.node not in self._busy:
                            self._busy.add(call.node)
                            tasks.create_task(self._perform(call))
                    wait_s = self._replica.next_deadline() - self._now()
                    await asyncio.sleep(min(max(wait_s, 0.01), MAX_SLEEP_S))
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._leave()
            await self._pool.close()

    async def _perform(self, call: Call) -> None:
        """Send a call and those that follow from its answer."""
        calls = [call]
        try:
            while calls:
                call = calls.pop(0)
                connection = await self._connect(call.node)
                try:
                    answer = await connection.request(call.request, timeout_s=CALL_TIMEOUT_S)
                except RemoteRefused as error:
                    logger.debug("registry node %s refused: %s", call.node.short, error)
                    self._replica.refused(call)
                    continue
                if isinstance(answer, m.News):
                    of_members = [told for told in answer.records[:MAX_NEWS] if speaks_of_a_member(told[1])]
                    answer = m.News(wanted=answer.wanted, records=await self._node.read(of_members))
                elif isinstance(answer, m.Records):
                    answer = m.Records(records=await self._node.read(answer.records[:MAX_PUSHED]))
                calls += self._replica.answered(call, answer, self._now())
        except (NetworkError, RemoteProtocolError, Overloaded) as error:
            logger.debug("no answer from registry node %s: %s", call.node.short, error)
            self._replica.failed(call)
        finally:
            self._busy.discard(call.node)

    async def _connect(self, node: NodeId) -> Connection:
        n_dialled = MAX_DIALLED if self._replica.is_member(node) else 1  # nobody lets us dial for long by a mere name
        addresses = [parse_address(text) for text in self._replica.membership.addresses(node)[:n_dialled]]
        seed = self._address_of_seed.get(node)
        if seed is not None and seed not in addresses:
            addresses.append(seed)
        return await self._pool.connect(node, addresses, timeout_s=CALL_TIMEOUT_S)

    async def _find_out(self, where: SocketAddress) -> None:
        """Learn which node a seed is that was given without its id."""
        while True:
            try:
                connection = await self._endpoint.dial(where, expected=None)
            except (NetworkError, RemoteProtocolError) as error:
                logger.debug("no registry node answers yet: %s", error)
                await asyncio.sleep(MAX_SLEEP_S)
                continue
            self._address_of_seed[connection.remote] = where
            self._replica.trust_seeds([connection.remote])
            connection.close()
            return

    def _renew_own(self) -> tuple[RegistryNodeRecord, SignedRecord]:
        assert self._address is not None
        record = RegistryNodeRecord(
            node=self._identity.node_id,
            seq=self._numbers.next(),
            ttl_s=MEMBER_TTL_S,
            addresses=(self._address,),
        )
        return record, sign(record, self._identity)

    async def _leave(self) -> None:
        if self._address is None:
            return
        record = Withdrawal(
            node=self._identity.node_id, seq=self._numbers.next(), model=NO_MODEL, withdraws=RecordKind.REGISTRY
        )
        calls = self._replica.leave(record, sign(record, self._identity), self._now())
        await asyncio.gather(*(self._tell(call) for call in calls))

    async def _tell(self, call: Call) -> None:
        connection = self._pool.connection(call.node)
        if connection is None:
            return  # no time to dial
        try:
            await connection.request(call.request, timeout_s=LEAVE_TIMEOUT_S)
        except SwarmError as error:
            logger.debug("left without telling registry node %s: %s", call.node.short, error)


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    """Take one away, and the key with the last."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
