"""Who stores records, as a client sees it: asked of the nodes that a person named, and how each is reached.

A client's view is at most MEMBERS_S old, less where writers are told that a record belongs elsewhere. A named node that knows of
no ring counts as one by itself: so a few independent ones are each told and asked everything, as with a ring of so many.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from swarm.errors import NetworkError, Overloaded, RemoteProtocolError, RemoteRefused, SwarmError
from swarm.ids import NodeId
from swarm.net.addresses import SocketAddress, format_address, is_loopback, parse_address
from swarm.registry.answers import AnswerReader
from swarm.registry.contacts import MAX_DIALLED, Contact, Dialler
from swarm.registry.digests import member_tag
from swarm.registry.membership import MAX_MEMBERS, MAX_PER_PREFIX
from swarm.registry.networks import Scope, host_of, is_one_network, prefix_of, rival_prefix, scope_of
from swarm.registry.records import Record, RegistryNodeRecord, RoutingHistogram, SignedRecord, Withdrawal, verify
from swarm.registry.ring import N_REPLICAS, Ring
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
MEMBERS_S = (
    120.0  # between two questions who stores records; a replica that is gone is noticed by itself before; guessed
)
MEMBERS_RETRY_S = 10.0  # as long as a node that a person named has not answered
MEMBERS_PATIENCE_S = 1.0  # for the slower ones, once somebody has answered
RETIRED_S = MEMBERS_S  # a contact that is not in the view any more stays open so long: a watch may hold it
N_WITNESSES = 2  # who must name a member, where so many were asked: a single liar's names enter no view


class RingView:
    """The ring and its members' contacts, kept up to date by whoever uses it."""

    def __init__(self, endpoint: Dialler, seeds: Sequence[tuple[SocketAddress, NodeId | None]]) -> None:
        """`seeds`: the nodes that a person named, and which each must be; None: whoever is there."""
        self._endpoint = endpoint
        self._seeds = [Contact(endpoint, [address], node) for address, node in seeds]
        self._contacts: dict[NodeId, Contact] = {}
        self._n_of_network: Counter[str | None] = Counter()
        self._retired: dict[NodeId, tuple[float, Contact]] = {}  # until when, for look-ups by an older ring
        self._reader = AnswerReader()
        self._least_scope = min((_scope_of_seed(address) for address, _ in seeds), default=Scope.WORLD)
        self._members: dict[bytes, tuple[NodeId, RegistryNodeRecord, SignedRecord]] = {}  # by tag
        self._ring = Ring({})
        self._refresh_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._has_answered = False
        self._arrange({})

    async def close(self) -> None:
        """End every connection; the endpoint's end does as much."""
        retired = [contact for _, contact in self._retired.values()]
        await asyncio.gather(*(contact.close() for contact in {*self._contacts.values(), *retired, *self._seeds}))

    async def ring(self) -> Ring:
        """Return the ring, asked for anew now and then. Raises NetworkError when nobody was ever there to ask."""
        if asyncio.get_running_loop().time() >= self._refresh_at:
            async with self._refreshing:
                if asyncio.get_running_loop().time() >= self._refresh_at:
                    await self._refresh()
        return self._ring

    def forget(self) -> None:
        """Ask anew at the next use."""
        self._refresh_at = float("-inf")

    def learn(self, members: Iterable[SignedRecord]) -> None:
        """Take in members that were known before; they are tried where those that a person named do not answer."""
        for signed in members:
            try:
                self._take_member(verify(signed), signed)
            except RemoteProtocolError as error:
                logger.info("the file holds a bad record: %s", error)
        self._arrange({})

    def member_records(self) -> list[SignedRecord]:
        """Return the members' own records."""
        return [signed for _, _, signed in self._members.values()]

    def members_known(self) -> list[RegistryNodeRecord]:
        """Return what the members say of themselves, as far as it is known now; asks nobody."""
        return [record for _, record, _ in self._members.values()]

    def contact(self, key: NodeId) -> Contact:
        """Return how a member is reached, also one of an older ring. Raises NetworkError for one that is long gone."""
        contact = self._contacts.get(key)
        if contact is None:
            if key not in self._retired:
                raise NetworkError(f"registry node {key.short} is no member any more")
            _, contact = self._retired[key]
        return contact

    def missed(self, key: NodeId) -> None:
        """A look-up has waited for a member in vain; see `Contact.missed`."""
        if key in self._contacts:
            self._contacts[key].missed()

    def is_misplaced(self, key: NodeId, record: Record) -> bool:
        """Return whether a record claims to be of this machine, where the named nodes are, and came from another one."""
        if self._least_scope is not Scope.MACHINE or isinstance(record, Withdrawal | RoutingHistogram):
            return False
        if all(is_loopback(host) for host, _ in self.contact(key).addresses):
            return False
        return any(is_loopback(host_of(address)) for address in record.addresses)

    def avoided(self) -> set[NodeId]:
        """Return the members that did not answer lately."""
        now = asyncio.get_running_loop().time()
        return {key for key, contact in self._contacts.items() if contact.avoid_until > now}

    def rtt_s(self, key: NodeId) -> float | None:
        """Return the smoothed round trip to a member, None if there is no connection yet."""
        contact = self._contacts.get(key)
        return None if contact is None or contact.connection is None else contact.rtt_s

    def unreachable(self, error: SwarmError | None) -> NetworkError:
        """Return what to raise when nobody answers; `error` is what one of them failed with."""
        where = ", ".join(format_address(seed.addresses[0]) for seed in self._seeds)
        return NetworkError(f"no registry answers at {where}: {error}")

    async def observed_address(self) -> str:
        """Return `host:port` of our endpoint as the first registry node that answers sees it. Raises NetworkError."""
        error: SwarmError = NetworkError("it does not say where it sees us")
        for contact in self._seeds:
            try:
                connection = await contact.connect()
            except (NetworkError, RemoteProtocolError) as failure:
                error = failure
                continue
            if connection.observed_address:
                return connection.observed_address
        for contact in self._contacts.values():
            if contact.connection is not None and contact.connection.observed_address:
                return contact.connection.observed_address
        raise self.unreachable(error)

    async def _refresh(self) -> None:
        asked = list(self._seeds)
        others = [contact for contact in self._contacts.values() if contact not in asked]
        now = asyncio.get_running_loop().time()
        others = [contact for contact in others if contact.avoid_until <= now] or others
        asked += random.sample(others, min(len(others), 1 if self._has_answered else N_REPLICAS))
        answers, error = await self._ask(asked, m.GetMembers(known=tuple(self._members)[:MAX_MEMBERS]))
        if not answers and len(self._contacts) <= len(asked):
            raise self.unreachable(error)  # there is nobody else to try
        self._has_answered |= bool(answers)
        said = {contact: answer for contact, answer in answers.items() if isinstance(answer, m.Members)}
        if said:
            for tag in set.intersection(*(set(answer.gone) for answer in said.values())):
                if (gone := self._members.pop(tag, None)) is not None:
                    self._n_of_network[self._network_of(gone[1])] -= 1
            await self._take_members(said)
        before = self._contacts
        self._arrange({contact: answer for contact, answer in answers.items() if contact in self._seeds})
        await self._retire(before)
        is_settled = all(seed in answers for seed in self._seeds)
        self._refresh_at = asyncio.get_running_loop().time() + (MEMBERS_S if is_settled else MEMBERS_RETRY_S)

    async def _ask(
        self, asked: Sequence[Contact], request: m.GetMembers
    ) -> tuple[dict[Contact, m.Response | None], SwarmError | None]:
        """Return what those said that answered in time; None for a refusal: it knows of no ring."""
        tasks = {
            asyncio.create_task(contact.request(request, timeout_s=REQUEST_TIMEOUT_S)): contact for contact in asked
        }
        answers: dict[Contact, m.Response | None] = {}
        error: SwarmError | None = None
        deadline = asyncio.get_running_loop().time() + MEMBERS_PATIENCE_S
        waiting = set(tasks)
        try:
            while waiting:
                left_s = deadline - asyncio.get_running_loop().time()
                if answers and left_s <= 0:
                    break
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s if answers else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    failure = task.exception()
                    if failure is None:
                        answers[tasks[task]] = task.result()
                    elif isinstance(failure, RemoteRefused | Overloaded):
                        answers[tasks[task]] = None
                    elif isinstance(failure, SwarmError):
                        error = failure
                    else:
                        raise failure
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return answers, error

    async def _take_members(self, said: Mapping[Contact, m.Members]) -> None:
        """Take in whom N_WITNESSES name, or who names itself: it answered at its address."""
        n_named: Counter[bytes] = Counter()
        found: dict[bytes, tuple[Record, SignedRecord]] = {}
        for contact, answer in said.items():
            node = contact.node or (contact.connection.remote if contact.connection is not None else None)
            named = set()
            for record, signed in await self._reader.read(answer.records[:MAX_MEMBERS]):
                if isinstance(record, RegistryNodeRecord):
                    tag = member_tag(record.node, record.addresses)
                    found.setdefault(tag, (record, signed))
                    named.add(tag)
                    n_named[tag] += N_WITNESSES - 1 if record.node == node else 0
            n_named.update(named)
        for tag, (record, signed) in found.items():
            if n_named[tag] >= min(N_WITNESSES, len(said)):
                self._take_member(record, signed)

    def _take_member(self, record: Record, signed: SignedRecord) -> None:
        """Take a verified record in, as far as its network and all together have room."""
        if not isinstance(record, RegistryNodeRecord) or not is_one_network(record.addresses):
            return
        tag = member_tag(record.node, record.addresses)
        if tag not in self._members:
            network = self._network_of(record)
            is_full = network is not None and self._n_of_network[network] >= MAX_PER_PREFIX
            if is_full or len(self._members) >= MAX_MEMBERS:
                return
            self._n_of_network[network] += 1
        self._members[tag] = record.node, record, signed

    def _network_of(self, record: RegistryNodeRecord) -> str | None:
        """Return what a member is counted under; None where that would say nothing: a private ring of a private seed."""
        host = host_of(record.addresses[0])
        scope = scope_of(host)
        if scope is not Scope.WORLD and scope >= self._least_scope:
            return None
        return prefix_of(host) or "this machine"

    async def _retire(self, before: Mapping[NodeId, Contact]) -> None:
        """Keep for a while the contacts that have gone out of the view, and close those whose time is over."""
        now = asyncio.get_running_loop().time()
        over = [key for key, (until, _) in self._retired.items() if until <= now]
        closing = [self._retired.pop(key)[1] for key in over]
        for key, contact in before.items():
            if self._contacts.get(key) is not contact:
                if key in self._retired:  # twice in that time
                    closing.append(self._retired.pop(key)[1])
                self._retired[key] = now + RETIRED_S, contact
        used = {*self._contacts.values(), *self._seeds, *(contact for _, contact in self._retired.values())}
        await asyncio.gather(*(contact.close() for contact in closing if contact not in used))

    def _arrange(self, seeds: Mapping[Contact, m.Response | None]) -> None:
        """Work out the ring and who is reached where; `seeds`: what those that a person named have answered."""
        members: dict[NodeId, str | None] = {}
        contacts: dict[NodeId, Contact] = {}
        seed_of: dict[NodeId, Contact] = {}
        for seed in self._seeds:
            connection = seed.connection
            node = seed.node or (connection.remote if connection is not None else None)
            if node is not None:
                seed_of[node] = seed
        for node, record, _ in self._members.values():
            addresses = [parse_address(text) for text in record.addresses[:MAX_DIALLED]]
            known = seed_of.get(node) or self._contacts.get(node)
            if known is None or (known not in self._seeds and known.addresses != addresses):
                known = Contact(self._endpoint, addresses, node)
            contacts[node] = known
            members[node] = rival_prefix(record.addresses[0])
        for seed in self._seeds:
            if seed in contacts.values():
                continue
            stands_alone = seed in seeds and not self._members  # it knows of no ring, not even itself
            if stands_alone or len(members) < N_REPLICAS:
                contacts[seed.key] = seed
                members[seed.key] = None
        self._contacts = contacts
        if members != self._ring.members:
            self._ring = Ring(members)


def _scope_of_seed(address: SocketAddress) -> Scope:
    try:
        return Scope.MACHINE if is_loopback(address[0]) else scope_of(address[0])
    except ValueError:  # a name, which is not looked up for this
        return Scope.WORLD
