"""The network that `swarm bench registry` plays: hosts on a plane, a virtual clock, and the real sans-IO parts at each host.

A host's messages take half a round trip by distance; what is lost is sent again as QUIC does. Events are kept in one heap;
renewals, by far the most frequent, are told to all replicas in one event.
"""

from __future__ import annotations

import heapq
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from swarm.bench.registry_hosts import Client, Host, LookupOutcome, RegistryOptions, SimNode, SimPeer
from swarm.errors import Overloaded, SwarmError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.announcer import RENEW_S, TTL_S
from swarm.registry.contacts import SUSPECT_S
from swarm.registry.digests import member_tag
from swarm.registry.lookup import Reading, newest, writers
from swarm.registry.membership import MEMBER_TTL_S
from swarm.registry.node import CALL_TIMEOUT_S
from swarm.registry.records import (
    ExpertAnnouncement,
    Record,
    RecordKind,
    RegistryNodeRecord,
    SignedRecord,
    Withdrawal,
    sign,
    verify,
)
from swarm.registry.replica import Call, Replica
from swarm.registry.ring import EXPERTS_PER_BUCKET, Place, Ring, places_of
from swarm.registry.view import MEMBERS_S
from swarm.wire import messages as m
from swarm.wire.frames import encode

OVERHEAD_BYTES = 110  # of a message and its acknowledgement: IP, UDP, QUIC headers and tags; estimated from RFC 9000
MIN_RTT_S, MAX_RTT_S = 0.01, 0.2  # by distance on a plane
N_LAYERS, N_EXPERT = 48, 128  # of every model
SLICES = (8, 16, 16, 32)  # experts that a peer may hold
STALE_SHARE, STALE_FACTOR = 0.1, 5  # so many clients ask for the members so much more rarely


class RegistrySimulation:
    """Nodes, peers and readers on one virtual clock."""

    def __init__(self, options: RegistryOptions) -> None:
        self.options = options
        self.rng = random.Random(options.seed)
        self.now = 1000.0
        self.nodes: dict[NodeId, SimNode] = {}
        self.peers: dict[NodeId, SimPeer] = {}
        self.peers_at: dict[Place, set[NodeId]] = {}
        self.models = [ModelId(self.rng.randbytes(32)) for _ in range(options.n_models)]
        self.lookups: list[LookupOutcome] = []
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._n_events = 0
        self._rings: dict[frozenset[NodeId], tuple[Ring, tuple[bytes, ...]]] = {}
        self._records: dict[bytes, Record] = {}
        self._sets = {n: ExpertSet.of(range(N_LAYERS), range(*n)) for n in _slices()}

    # The clock

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        """Let `action` happen then."""
        self._n_events += 1
        heapq.heappush(self._events, (max(when, self.now), self._n_events, action, arguments))

    def run_until(self, end: float) -> None:
        """Let everything happen that is due before `end`."""
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(events)
            action(*arguments)
        self.now = end

    # The network

    def rtt_s(self, a: Host, b: Host) -> float:
        """Return the round trip between two hosts."""
        return MIN_RTT_S + (MAX_RTT_S - MIN_RTT_S) * math.dist(a.where, b.where) / math.sqrt(2)

    def one_way_s(self, a: Host, b: Host) -> float:
        """Return how long a message takes, its packets sent again when lost: after 1.5 round trips, then twice that."""
        rtt_s = self.rtt_s(a, b)
        delay_s, wait_s = rtt_s / 2, 1.5 * rtt_s
        while self.rng.random() < self.options.loss:
            delay_s += wait_s
            wait_s *= 2
        return delay_s

    def reaches(self, a: Host, b: Host) -> bool:
        """Return whether a packet gets from one to the other now."""
        return a.is_up and b.is_up and a.side == b.side

    def request(
        self, asker: Host, node: NodeId, request: m.Request, done: Callable[[m.Response | SwarmError | None], None]
    ) -> None:
        """Ask a registry node; `done` gets the answer, a refusal, or None when there is none in time."""
        server = self.nodes.get(node)
        if server is None or not self.reaches(asker, server):
            self.at(self.now + CALL_TIMEOUT_S, done, None)
            return
        self.at(self.now + self.one_way_s(asker, server), self._arrive, asker, server, request, done)

    def _arrive(
        self,
        asker: Host,
        server: SimNode,
        request: m.Request,
        done: Callable[[m.Response | SwarmError | None], None],
    ) -> None:
        if not self.reaches(asker, server):
            self.at(self.now + CALL_TIMEOUT_S, done, None)
            return
        answer: m.Response | SwarmError
        try:
            answer = server.replica.answer(asker.node, request, now=self.now, host=asker.ip)
        except (SwarmError, LookupError) as error:
            answer = error if isinstance(error, SwarmError) else Overloaded(str(error))
        if server.withholds:
            answer = _withheld(answer)
        size = size_of(request) + (size_of(answer) if isinstance(answer, m.Response) else 100)
        self.count(type(request).__name__, size, asker, server)
        self.at(self.now + self.one_way_s(server, asker), done, answer)

    def count(self, what: str, size: int, *ends: Host) -> None:
        """Note the bytes of a request with its answer at the registry nodes among its two ends."""
        for end in ends:
            if isinstance(end, SimNode):
                end.n_bytes[what] += size + 2 * OVERHEAD_BYTES

    # Registry nodes

    def add_node(self, *, address: str | None = None, identity: Identity | None = None, joins: bool = True) -> SimNode:
        """Start a registry node; with `joins` it knows one other, else it has to be told of the others."""
        identity = identity or Identity.from_seed(self.rng.randbytes(32))
        address = address or self._address(7440)
        replica = Replica(identity.node_id, pick=self.rng.randrange, verify_record=self.verify)
        node = SimNode(identity.node_id, address, self._where(), identity=identity, replica=replica, up_since=self.now)
        replica.store_as(lambda: self._node_record(node))
        if joins:
            up = [other.node for other in self.nodes.values() if other.is_up and not other.withholds]
            replica.trust_seeds([self.rng.choice(up)])
        self.nodes[node.node] = node
        self._wake(node, self.now)
        return node

    def introduce_all(self) -> None:
        """Let every node know every other, as after a long quiet time."""
        records = {node.node: self._node_record(node) for node in self.nodes.values()}
        for node in self.nodes.values():
            for other, (record, signed) in records.items():
                if other != node.node:
                    left_s = MEMBER_TTL_S * (0.4 + 0.6 * self.rng.random())
                    node.replica.membership.learn(record, signed, self.now, left_s=left_s, is_proved=True)

    def crash(self, host: Host) -> None:
        """Let a host be gone without a word."""
        host.is_up = False

    def retire(self, node: SimNode) -> None:
        """Let a registry node take its leave."""
        record = Withdrawal(node=node.node, seq=self._seq(), model=ModelId(bytes(32)), withdraws=RecordKind.REGISTRY)
        for call in node.replica.leave(record, sign(record, node.identity), self.now):
            self._call(node, call)
        self.at(self.now + 1.0, self.crash, node)

    def _wake(self, node: SimNode, when: float) -> None:
        if when < node.wakes_at:
            node.wakes_at = when
            self.at(when, self._poll, node)

    def _poll(self, node: SimNode) -> None:
        node.wakes_at = math.inf
        if not node.is_up:
            return
        for call in node.replica.poll(self.now):
            if not (node.withholds and isinstance(call.request, m.Sync)):
                self._call(node, call)
        self._wake(node, max(node.replica.next_deadline(), self.now + 1e-3))

    def _call(self, node: SimNode, call: Call) -> None:
        def done(answer: m.Response | SwarmError | None) -> None:
            if not node.is_up:
                return
            if answer is None:
                node.replica.failed(call)
            elif isinstance(answer, SwarmError):
                node.replica.refused(call)
            else:
                for following in node.replica.answered(call, answer, self.now):
                    self._call(node, following)
            self._wake(node, max(node.replica.next_deadline(), self.now + 1e-3))

        self.at(self.now, self._dial, node, call, done)

    def _dial(self, node: SimNode, call: Call, done: Callable[[m.Response | SwarmError | None], None]) -> None:
        """A call reaches a node only at the address that the caller knows of it."""
        server = self.nodes.get(call.node)
        known = node.replica.membership.addresses(call.node)
        if server is not None and known and server.address not in known:
            self.at(self.now + CALL_TIMEOUT_S, done, None)
            return
        self.request(node, call.node, call.request, done)

    def _node_record(self, node: SimNode) -> tuple[RegistryNodeRecord, SignedRecord]:
        record = RegistryNodeRecord(node=node.node, seq=self._seq(), ttl_s=MEMBER_TTL_S, addresses=(node.address,))
        signed = sign(record, node.identity)
        self._records[signed.payload] = record
        return record, signed

    # Clients

    def add_client(self, host: Host) -> Client:
        """Return a client that has just asked for the members."""
        ring, tags = self._ring_of(self._some_node(host).replica)
        is_stale = self.rng.random() < STALE_SHARE
        client = Client(host, ring, tags, MEMBERS_S * (STALE_FACTOR if is_stale else 1))
        self.at(self.now + client.refresh_s * self.rng.random(), self._refresh, client)
        return client

    def _refresh(self, client: Client) -> None:
        if not client.host.is_up:
            return
        node = self._any_of(client)

        def done(answer: m.Response | SwarmError | None) -> None:
            server = self.nodes.get(node)
            if answer is None or server is None:
                client.avoid[node] = self.now + SUSPECT_S
                self.at(self.now + 1.0, self._refresh, client)
                return
            if isinstance(answer, m.Members) and (answer.gone or answer.records):
                client.ring, client.tags = self._ring_of(server.replica)  # what it comes to, computed once for all
            self.at(self.now + client.refresh_s * (0.75 + self.rng.random() / 2), self._refresh, client)

        self.request(client.host, node, m.GetMembers(known=client.tags), done)

    def _ring_of(self, replica: Replica) -> tuple[Ring, tuple[bytes, ...]]:
        ring = replica.membership.ring
        names = frozenset(ring.members)
        if names not in self._rings:
            view = replica.membership.view()
            self._rings[names] = ring, tuple(member_tag(node, addresses) for node, addresses in view.items())
        return self._rings[names]

    def _some_node(self, host: Host) -> SimNode:
        up = [
            node
            for node in self.nodes.values()
            if node.is_up and node.side == host.side and self.now >= node.up_since + 60
        ]
        return self.rng.choice(up or [node for node in self.nodes.values() if node.is_up])

    def _any_of(self, client: Client) -> NodeId:
        nodes = [node for node in client.ring.members if node not in client.avoid] or list(client.ring.members)
        return self.rng.choice(nodes)

    # Peers

    def add_peer(self, *, host: Host | None = None) -> SimPeer:
        """Start a peer that announces itself at once and from then on."""
        if host is None:
            identity = Identity.from_seed(self.rng.randbytes(32))
            host = Host(identity.node_id, self._address(4000), self._where())
        first, last = self.rng.choice(list(self._sets))
        record = ExpertAnnouncement(
            node=host.node,
            seq=0,
            ttl_s=TTL_S,
            model=self.rng.choice(self.models),
            model_name="simulated",
            experts=self._sets[first, last],
            addresses=(host.address,),
            exact_kernels=False,
            wire_versions=(1,),
        )
        signer = Identity.from_seed(host.node.raw)  # any key: only the payload is used
        payload = sign(_with(record, node=signer.node_id), signer).payload
        head, tail = payload.replace(str(signer.node_id).encode(), str(host.node).encode()).split(b'"seq":0', 1)
        peer = SimPeer(self.add_client(host), record, head + b'"seq":', tail, places_of(record))
        self.peers[host.node] = peer
        for place in peer.places:
            self.peers_at.setdefault(place, set()).add(host.node)
        self.at(self.now + RENEW_S * self.rng.random(), self._announce_first, peer)
        return peer

    def withdraw(self, peer: SimPeer) -> None:
        """Let a peer take its leave."""
        record = Withdrawal(
            node=peer.record.node, seq=self._seq(), model=peer.record.model, withdraws=RecordKind.EXPERTS
        )
        payload = b"withdrawal" + peer.record.node.raw + record.seq.to_bytes(8, "little")
        self._records[payload] = record
        signed = SignedRecord(payload=payload, signature=_seal(payload))
        peer.ended_at = self.now + self._tell_all(peer, record, signed)
        self.at(peer.ended_at, self.crash, peer.client.host)

    def kill(self, peer: SimPeer) -> None:
        """Let a peer be gone without a word."""
        self.crash(peer.client.host)
        peer.ended_at = self.now + TTL_S + MAX_RTT_S

    def _announce_first(self, peer: SimPeer) -> None:
        if not peer.client.host.is_up:
            return
        peer.first_seq = self._seq()
        record, signed = self._next_record(peer)
        peer.targets = sorted(writers(peer.client.ring, peer.places, peer.client.avoided(self.now)))
        peer.published_at = self.now + self._tell_all(peer, record, signed)
        self.at(self.now + RENEW_S * (0.9 + 0.2 * self.rng.random()), self._renew, peer)

    def _renew(self, peer: SimPeer) -> None:
        """Renew a lease at all replicas. Their delays do not matter here, so all are told in one event."""
        host, client = peer.client.host, peer.client
        if not host.is_up or peer.ended_at < math.inf:  # it leaves: its withdrawal is on its way
            return
        record, signed = self._next_record(peer)
        peer.targets = sorted(writers(client.ring, peer.places, client.avoided(self.now)))
        for node in peer.targets:
            server = self.nodes.get(node)
            if server is None or not self.reaches(host, server):
                client.avoid[node] = self.now + SUSPECT_S
            else:
                self._tell(peer, server, record, signed)
        self.at(self.now + RENEW_S * (0.9 + 0.2 * self.rng.random()), self._renew, peer)

    def _tell_all(self, peer: SimPeer, record: Record, signed: SignedRecord) -> float:
        """Tell all replicas that can be reached; return when the last one will have heard, in seconds from now."""
        delays = [0.0]
        for node in peer.targets:
            server = self.nodes.get(node)
            if server is not None and self.reaches(peer.client.host, server):
                delays.append(self.one_way_s(peer.client.host, server))
                self.at(self.now + delays[-1], self._tell, peer, server, record, signed)
        return max(delays)

    def _tell(self, peer: SimPeer, server: SimNode, record: Record, signed: SignedRecord) -> None:
        if not server.is_up:
            return
        server.n_bytes["Announce"] += signed.size_bytes + 20 + 2 * OVERHEAD_BYTES
        if server.withholds:
            return
        try:
            server.replica.announce(peer.record.node, record, signed, now=self.now, host=peer.client.host.ip)
        except LookupError:  # our view is out of date
            self.at(self.now + 0.1, self._refresh, peer.client)

    def _next_record(self, peer: SimPeer) -> tuple[ExpertAnnouncement, SignedRecord]:
        seq = self._seq()
        payload = peer.head + str(seq).encode() + peer.tail
        signed = SignedRecord(payload=payload, signature=_seal(payload))
        peer.last = _with(peer.record, seq=seq), signed
        return peer.last

    def verify(self, signed: SignedRecord) -> Record:
        """Stand in for `records.verify`: the same outcome for what this simulation has signed, an error for all else."""
        found = self._records.get(signed.payload)
        if found is not None:
            return found
        match = _SEQ_AND_NODE.search(signed.payload)
        if match is None or signed.signature != _seal(signed.payload):
            return verify(signed)
        peer = self.peers[NodeId.parse(match[1].decode())]
        if peer.last is not None and peer.last[1].payload == signed.payload:
            return peer.last[0]
        return _with(peer.record, seq=int(match[2]))

    # Readers

    def look_up(self, client: Client, place: Place) -> LookupOutcome:
        """Begin a look-up; its outcome fills in as time goes on."""
        outcome = LookupOutcome(self.now, place)
        outcome.must_have = {
            node: self.peers[node].first_seq
            for node in self.peers_at.get(place, ())
            if self.peers[node].published_at <= self.now and self.peers[node].client.host.is_up
            if self.peers[node].ended_at == math.inf
        }
        outcome.must_not_have = {node for node in self.peers_at.get(place, ()) if self.peers[node].ended_at <= self.now}
        avoid = client.avoided(self.now)
        reading = Reading(
            client.ring,
            [place],
            now=self.now,
            rtt_s=lambda node: self.rtt_s(client.host, self.nodes[node]) if node in self.nodes else None,
            avoid=avoid,
        )
        found: list[Record] = []
        rtts: list[float] = []

        def settle() -> None:
            if outcome.ended_at == math.inf and reading.is_done(self.now):
                outcome.ended_at = self.now
                outcome.n_rounds = reading.n_rounds
                outcome.rtt_s = statistics.median(rtts) if rtts else MAX_RTT_S
                outcome.judge(newest(found))

        def ask(node: NodeId, places: tuple[Place, ...]) -> None:
            def done(answer: m.Response | SwarmError | None) -> None:
                if outcome.ended_at < math.inf:
                    if answer is None:
                        client.avoid[node] = self.now + SUSPECT_S
                    return
                if isinstance(answer, m.Records):
                    rtts.append(self.rtt_s(client.host, self.nodes[node]))
                    found.extend(self.verify(SignedRecord.from_bytes(data)) for _, data in answer.records)
                    reading.answered(node)
                else:
                    client.avoid[node] = self.now + SUSPECT_S
                    for instead, those in reading.failed(node).items():
                        ask(instead, those)
                settle()

            self.request(client.host, node, m.Find(places=places), done)

        for node, places in reading.first.items():
            ask(node, places)
        self.at(reading.next_deadline(self.now) + 1e-6, settle)
        self.at(self.now + 5.1, settle)
        self.lookups.append(outcome)
        return outcome

    # Inside

    def _seq(self) -> int:
        return round(self.now * 1e6)

    def _where(self) -> tuple[float, float]:
        return self.rng.random(), self.rng.random()

    def _address(self, port: int) -> str:
        a, b, c = self.rng.randrange(11, 100), self.rng.randrange(256), self.rng.randrange(256)
        return f"{a}.{b}.{c}.{self.rng.randrange(1, 255)}:{port}"


def size_of(message: m.Message) -> int:
    """Return the size of a message's frame; the common ones are counted, not written."""
    if isinstance(message, m.Gossip):
        return 7 + 16 * len(message.summary)
    if isinstance(message, m.Sync):
        return 7 + 42 * len(message.digests)
    if isinstance(message, m.Records):
        return 7 + sum(8 + len(data) for _, data in message.records)
    if isinstance(message, m.GetMembers):
        return 7 + 8 * len(message.known)
    return len(encode(message))


def _withheld(answer: m.Response | SwarmError) -> m.Response | SwarmError:
    if isinstance(answer, m.Records):
        return m.Records(records=())
    return m.Differences(places=()) if isinstance(answer, m.Differences) else answer


def _slices() -> list[tuple[int, int]]:
    return [(first, first + n) for n in SLICES for first in range(0, N_EXPERT - n + 1, EXPERTS_PER_BUCKET // 2)]


def _seal(payload: bytes) -> bytes:
    """Return what stands for a signature here."""
    return blake2b(payload).digest()


_FIELDS = [each.name for each in fields(ExpertAnnouncement)]
_SEQ_AND_NODE = re.compile(rb'"node":"([a-z2-7]+)","seq":([0-9]+)')


def _with(record: ExpertAnnouncement, **changed: Any) -> ExpertAnnouncement:
    """Return a copy with other fields, unchecked: checking the same addresses again would take most of a simulation's time."""
    copy = object.__new__(ExpertAnnouncement)
    for name in _FIELDS:
        object.__setattr__(copy, name, changed.get(name, getattr(record, name)))
    return copy
