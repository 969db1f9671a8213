"""Who the registry nodes are, as one of them sees it: gossip without I/O. Explicit `now`; chance comes from `pick`.

Every GOSSIP_S a node tells one other which (member, seq) it knows; the answer brings what it lacks and names what the other
lacks. News travels faster: for a few rounds after it, a node gossips every NEWS_S.

A member's life, as one node sees it:

    unknown -> heard     its signed record came, from anybody: tried, neither used nor passed on; forgotten when its lease ends
    heard   -> proved    it answered at its announced address with its own key (or it called us, or a trusted seed names it)
    proved  -> silent    N_FAILURES calls in a row failed: our own finding, told to nobody
    silent  -> proved    it answered, or called
    proved  -> lost      its lease ended: its address is tried now and then for a day, so that the halves of a network that
                         was cut find each other again
    any     -> left      its withdrawal came

Only proved members are in `ring`, and only they are passed on and remembered: each node finds out for itself. So nobody can fill
the ring with names at which nobody listens, let others dial them, nor talk a member to death.
Of one network at most MAX_PER_PREFIX members are taken, oldest first; a name that was tried in vain makes room, and any unproved
one for one that is proved. An address that reaches less far than our own is refused, and so are addresses in several networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swarm.ids import NodeId
from swarm.registry.networks import host_of, is_one_network, rival_prefix, scope_of
from swarm.registry.records import MAX_TTL_S, RecordKind, RegistryNodeRecord, SignedRecord, Withdrawal
from swarm.registry.ring import Ring, position_of

MEMBER_TTL_S = 180  # a crashed node is in others' rings for at most this long; guessed
MEMBER_RENEW_S = MEMBER_TTL_S / 3  # news takes some 30 s to reach 200 nodes (measured in the simulation)
GOSSIP_S = 5.0  # guessed: 200 members make 3 KB a round
NEWS_S = 1.0
N_NEWS_ROUNDS = 4  # each about doubles who knows
PROBE_S = 10.0  # between two tries of a member that was only heard of, or is silent
N_PROBES = 8  # at a time
N_FAILURES = 2
LOST_EVERY = 8  # a gossip in so many goes to a lost member; guessed: 200 nodes find a lost half within a second or two
REMEMBER_S = 24 * 3600.0
MAX_MEMBERS = 4096  # guessed; above that one hop is no longer cheap
MAX_PER_PREFIX = 8  # guessed: an operator with a rack
MAX_LOST = 1024
TAG_BYTES = 8  # the first of a node id: what members are told apart by in gossip

Tag = bytes
Told = tuple[SignedRecord, float]  # a record, and the seconds it has left


@dataclass(slots=True)
class Member:
    """What is known of one other node. `record` None: it left, and `signed` is its withdrawal."""

    seq: int
    record: RegistryNodeRecord | None
    signed: SignedRecord
    until: float
    prefix: str | None
    is_proved: bool = False
    n_failures: int = 0
    probed_at: float = float("-inf")

    @property
    def is_silent(self) -> bool:
        return self.n_failures >= N_FAILURES

    @property
    def is_usable(self) -> bool:
        return self.record is not None and self.is_proved and not self.is_silent

    @property
    def is_told(self) -> bool:
        """Whether others are told of it: proved, or a withdrawal (of a member that was known here)."""
        return self.is_proved or self.record is None


@dataclass(slots=True)
class _Lost:
    seq: int
    addresses: tuple[str, ...]
    until: float


class Membership:
    """One node's view of the others. `own` is in its ring once `set_own` was called: a node that does not store never does."""

    def __init__(self, own: NodeId, *, pick: Callable[[int], int]) -> None:
        """`pick(n)` returns one of 0 to n - 1 by chance."""
        self.own = own
        self._pick = pick
        self._own: Member | None = None
        self._members: dict[NodeId, Member] = {}
        self._lost: dict[NodeId, _Lost] = {}
        self._nodes: dict[Tag, NodeId] = {}
        self._n_of_prefix: dict[str, int] = {}
        self._positions: dict[NodeId, int] = {own: position_of(own)}
        self._ring: Ring | None = None
        self._to_probe: dict[NodeId, None] = {}  # heard or silent, in order
        self._n_news_rounds = 0
        self._n_rounds = 0
        self._gossip_at = 0.0

    # What is known

    @property
    def ring(self) -> Ring:
        """The usable members, and this node if it stores."""
        if self._ring is None:
            members = {node: member.prefix for node, member in self._members.items() if member.is_usable}
            if self._own is not None and self._own.record is not None:
                members[self.own] = self._own.prefix
            self._ring = Ring(members, self._positions)
        return self._ring

    @property
    def is_storing(self) -> bool:
        """Whether this node is a member itself."""
        return self._own is not None and self._own.record is not None

    def addresses(self, node: NodeId) -> tuple[str, ...]:
        """Return where a node can be dialled, as its record, or its last one, says; nothing for an unknown one."""
        member = self._members.get(node)
        if member is not None and member.record is not None:
            return member.record.addresses
        lost = self._lost.get(node)
        return () if lost is None else lost.addresses

    def told(self, nodes: Iterable[NodeId], now: float) -> list[Told]:
        """Return the live records of `nodes`, as they may be passed on."""
        members = (self._own if node == self.own else self._members.get(node) for node in nodes)
        return [
            (each.signed, each.until - now)
            for each in members
            if each is not None and each.is_told and each.until > now
        ]

    def summary(self) -> tuple[tuple[Tag, int], ...]:
        """Return what to tell another node: (tag, seq) of all that it may be told."""
        known = [(node.raw[:TAG_BYTES], member.seq) for node, member in self._members.items() if member.is_told]
        if self._own is not None:
            known.append((self.own.raw[:TAG_BYTES], self._own.seq))
        return tuple(known)

    def compare(self, theirs: Iterable[tuple[Tag, int]], now: float) -> tuple[list[Told], list[Tag]]:
        """Return what another node lacks, by its summary, and the tags of what we lack."""
        wanted: list[Tag] = []
        lacking = {node: member for node, member in self._members.items() if member.is_told}
        for tag, seq in theirs:
            node = self._nodes.get(tag)
            member = None if node is None else self._members.get(node)
            if node is None or member is None:
                if tag != self.own.raw[:TAG_BYTES] and self._may_want(node, seq):
                    wanted.append(tag)
                continue
            if member.seq < seq:
                wanted.append(tag)
            if member.seq <= seq:
                lacking.pop(node, None)
        records = [(each.signed, each.until - now) for each in lacking.values() if each.until > now]
        own = self._own
        if own is not None and dict(theirs).get(self.own.raw[:TAG_BYTES], -1) < own.seq:
            records.append((own.signed, own.until - now))
        return records, wanted

    def take(self, tags: Iterable[Tag], now: float) -> list[Told]:
        """Return the live records with these tags."""
        nodes = [self.own if tag == self.own.raw[:TAG_BYTES] else self._nodes.get(tag) for tag in tags]
        return self.told((node for node in nodes if node is not None), now)

    # What changes it

    def set_own(self, record: RegistryNodeRecord, signed: SignedRecord, now: float) -> None:
        """Let this node be a member, by its own newest record."""
        is_new = self._own is None or self._own.record is None
        self._own = Member(record.seq, record, signed, now + record.ttl_s, rival_prefix(record.addresses[0]), True)
        self._ring = None
        if is_new:
            self._make_haste(now)

    def leave(self, withdrawal: Withdrawal, signed: SignedRecord, now: float) -> None:
        """Let this node be a member no more; the withdrawal still has to be told."""
        self._own = Member(withdrawal.seq, None, signed, now + MAX_TTL_S, None)

    def learn(
        self,
        record: RegistryNodeRecord | Withdrawal,
        signed: SignedRecord,
        now: float,
        *,
        left_s: float | None = None,
        is_proved: bool = False,
    ) -> bool:
        """Take a verified record in; return whether it was news.

        Args:
            left_s: what it had left with whoever passed it on; None: it comes from its own node.
            is_proved: its own node calls, or a trusted seed names it.
        """
        node = record.node
        if node == self.own or (isinstance(record, Withdrawal) and record.withdraws is not RecordKind.REGISTRY):
            return False
        old = self._members.get(node)
        lost = self._lost.get(node)
        if record.seq <= max(old.seq if old is not None else -1, lost.seq if lost is not None else -1):
            if old is not None and old.seq == record.seq and is_proved:
                self.heard_from(node)
            return False
        ttl_s = MAX_TTL_S if isinstance(record, Withdrawal) else record.ttl_s
        until = now + (ttl_s if left_s is None else min(left_s, ttl_s))
        if until <= now:
            return False
        if isinstance(record, Withdrawal):
            return self._take_leave(node, old, Member(record.seq, None, signed, until, None), now)
        return self._take_in(node, old, record, Member(record.seq, record, signed, until, None, is_proved), now)

    def heard_from(self, node: NodeId) -> None:
        """A node answered at its address, or called: it is there, and it is who it says."""
        member = self._members.get(node)
        if member is None or member.record is None:
            return
        if not member.is_usable:
            self._ring = None
            self._to_probe.pop(node, None)
        member.is_proved, member.n_failures = True, 0

    def failed(self, node: NodeId) -> None:
        """A call to a node failed."""
        member = self._members.get(node)
        if member is None:
            return
        was_usable = member.is_usable
        member.n_failures += 1
        if was_usable and not member.is_usable:
            self._ring = None
        if not member.is_usable and member.record is not None:
            self._to_probe[node] = None

    def expire(self, now: float) -> None:
        """Lose the members whose leases are over."""
        ended = [node for node, member in self._members.items() if member.until <= now]
        for node in ended:
            member = self._members[node]
            self._drop(node)
            if not member.is_told:
                continue
            addresses = () if member.record is None else member.record.addresses
            self._lost[node] = _Lost(member.seq, addresses, now + REMEMBER_S)
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
        while self._lost:
            node, lost = next(iter(self._lost.items()))
            if lost.until > now:
                break
            del self._lost[node]

    # Whom to talk to

    def next_gossip(self) -> float:
        """Return when `targets` next names somebody."""
        return self._gossip_at

    def targets(self, now: float, seeds: Iterable[NodeId] = ()) -> list[NodeId]:
        """Return whom to tell our summary now: one to gossip with, and those that must prove themselves."""
        if now < self._gossip_at:
            return []
        self._n_rounds += 1
        self._n_news_rounds = max(0, self._n_news_rounds - 1)
        chosen = self._probes(now)
        is_hasty = self._n_news_rounds > 0 or len(chosen) == N_PROBES
        self._gossip_at = now + (NEWS_S if is_hasty else GOSSIP_S) * (0.75 + self._pick(1000) / 2000)
        usable = [node for node, member in self._members.items() if member.is_usable]
        lost = [node for node, each in self._lost.items() if each.addresses]
        lost += [node for node in seeds if node != self.own and node not in self._members and node not in self._lost]
        if lost and (not usable or self._n_rounds % LOST_EVERY == 0):
            chosen.append(lost[self._pick(len(lost))])
        elif usable:
            chosen.append(usable[self._pick(len(usable))])
        return list(dict.fromkeys(chosen))

    def _probes(self, now: float) -> list[NodeId]:
        due: list[NodeId] = []
        for node in list(self._to_probe):
            member = self._members.get(node)
            if member is None or member.record is None or member.is_usable:
                del self._to_probe[node]
            elif now >= member.probed_at + PROBE_S * (1 + member.n_failures):
                member.probed_at = now
                due.append(node)
                if len(due) == N_PROBES:
                    break
        return due

    def _make_haste(self, now: float) -> None:
        if self._n_news_rounds == 0:
            self._gossip_at = min(self._gossip_at, now + NEWS_S * self._pick(1000) / 1000)
        self._n_news_rounds = N_NEWS_ROUNDS

    def _may_want(self, node: NodeId | None, seq: int) -> bool:
        lost = None if node is None else self._lost.get(node)
        return lost is None or lost.seq < seq

    def _take_leave(self, node: NodeId, old: Member | None, member: Member, now: float) -> bool:
        if old is None:  # as in the table: what was never here needs no remembering
            return False
        self._drop(node)
        if not old.is_told:  # nor is a mere name: else anybody could have names passed on, as withdrawals
            return False
        self._members[node] = member
        self._nodes[node.raw[:TAG_BYTES]] = node
        self._make_haste(now)
        return True

    def _take_in(self, node: NodeId, old: Member | None, record: RegistryNodeRecord, new: Member, now: float) -> bool:
        if self._own is not None and self._own.record is not None:
            scope = min(scope_of(host_of(address)) for address in record.addresses)
            if scope < min(scope_of(host_of(address)) for address in self._own.record.addresses):
                return False
        if not is_one_network(record.addresses):
            return False
        new.prefix = rival_prefix(record.addresses[0])
        if old is not None and old.record is not None and old.record.addresses == record.addresses:
            new.is_proved |= old.is_proved
            new.n_failures, new.probed_at = (
                (0 if new.is_proved and not old.is_proved else old.n_failures),
                old.probed_at,
            )
            was_usable = old.is_usable
            self._members[node] = new
            if new.is_usable is not was_usable:
                self._ring = None
            return True
        if old is not None:
            self._drop(node)
        if not self._has_room(new.prefix, new.is_proved):
            return False
        self._lost.pop(node, None)
        self._members[node] = new
        self._nodes[node.raw[:TAG_BYTES]] = node
        self._positions[node] = position_of(node)
        if new.prefix is not None:
            self._n_of_prefix[new.prefix] = self._n_of_prefix.get(new.prefix, 0) + 1
        if new.is_proved:
            self._ring = None
        else:
            self._to_probe[node] = None
        self._make_haste(now)
        return True

    def _has_room(self, prefix: str | None, is_proved: bool) -> bool:
        """Return whether one more member is taken in; an unproved one that was tried in vain gives way, any to a proved one."""
        if prefix is not None and self._n_of_prefix.get(prefix, 0) >= MAX_PER_PREFIX:
            return self._give_up_one(prefix, is_proved)
        return len(self._members) < MAX_MEMBERS or self._give_up_one(None, is_proved)

    def _give_up_one(self, prefix: str | None, is_for_a_proved_one: bool) -> bool:
        unproved = [
            (member.n_failures == 0, n, node)
            for n, (node, member) in enumerate(self._members.items())
            if not member.is_told and prefix in (None, member.prefix)
        ]
        was_never_tried, _, node = min(unproved, default=(True, 0, None))
        if node is None or (was_never_tried and not is_for_a_proved_one):
            return False
        self._drop(node)
        return True

    def _drop(self, node: NodeId) -> None:
        member = self._members.pop(node)
        self._nodes.pop(node.raw[:TAG_BYTES], None)
        self._positions.pop(node, None)
        self._to_probe.pop(node, None)
        if member.prefix is not None:
            self._n_of_prefix[member.prefix] -= 1
            if not self._n_of_prefix[member.prefix]:
                del self._n_of_prefix[member.prefix]
        if member.is_usable:
            self._ring = None

    def view(self) -> Mapping[NodeId, tuple[str, ...]]:
        """Return the ring's members with their addresses: what clients are told."""
        members = {
            node: each.record.addresses for node, each in self._members.items() if each.record and each.is_usable
        }
        if self._own is not None and self._own.record is not None:
            members[self.own] = self._own.record.addresses
        return members
