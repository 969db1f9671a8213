"""How each peer stands after its audits: passed, suspected, caught; and for how long.

Pure; `now` is given, in seconds since 1970, because what is caught stays caught over a restart. Knows nothing of numbers.

A finding convicts by itself, or leaves *disputes*: of two peers one is wrong. Who is in dispute with two others, that agree with
each other or have nothing to compare, is the one: else both of them would have to be wrong in the same way. Two in one network
count as one. Until then both sides are suspected. A suspicion ends when its last dispute does, by a conviction or by time.

One that was caught stays out until it announces itself anew, and for CAUGHT_S at least, doubled each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swarm.dispatch.audit import NEW_PASSES
from swarm.dispatch.audit_opinions import Finding
from swarm.ids import NodeId

FORMAT = 1
CAUGHT_S, LONGEST_S = 24 * 3600.0, 30 * 24 * 3600.0  # guessed; a failure costs 300 s at most (`quarantine`)
SUSPECT_S = 600.0  # since the last dispute; guessed
MAX_PEERS = 4096  # remembered; who was caught longest; guessed: 1 MB on disk
MAX_REASON = 300  # characters


class Verdict(StrEnum):
    """What audits say of a peer."""

    NEW = "new"  # too few audits yet
    HONEST = "honest"
    SUSPECTED = "suspected"
    CAUGHT = "caught"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """A peer that was found wrong.

    Attributes:
        seq: of its announcement then; at, until: seconds since 1970.
        n_times: how often so far.
    """

    seq: int
    at: float
    until: float
    n_times: int
    reason: str


@dataclass(slots=True)
class PeerRecord:
    """One peer.

    Attributes:
        n_passed, n_disagreed: audits of its answers, and audits in which it was on one of two sides.
        at: of the last of both.
    """

    n_passed: int = 0
    n_disagreed: int = 0
    at: float = 0.0
    caught: Catch | None = None


@dataclass(slots=True)
class _Doubt:
    """Why a peer is suspected."""

    opponents: dict[NodeId, float] = field(default_factory=dict)  # -> of the last dispute
    at: float = 0.0


class Standing:
    """Every peer's record. Mutable, one owner."""

    def __init__(self) -> None:
        self.peers: dict[NodeId, PeerRecord] = {}
        self._doubts: dict[NodeId, _Doubt] = {}
        self._agreed: dict[frozenset[NodeId], float] = {}  # pairs -> when last

    @property
    def suspects(self) -> frozenset[NodeId]:
        """Who is suspected now."""
        return frozenset(self._doubts)

    def is_suspected(self, node: NodeId) -> bool:
        """Return whether a peer is suspected now."""
        return node in self._doubts

    def is_new(self, node: NodeId) -> bool:
        """Return whether a peer has passed too few audits to be trusted as others are."""
        record = self.peers.get(node)
        return record is None or record.n_passed < NEW_PASSES

    def is_barred(self, node: NodeId, seq: int, now: float) -> bool:
        """Return whether a peer that announces `seq` is out, because it was caught."""
        record = self.peers.get(node)
        caught = record.caught if record is not None else None
        return caught is not None and (now < caught.until or seq <= caught.seq)

    def verdict(self, node: NodeId, seq: int, now: float) -> Verdict:
        """Return how a peer stands."""
        if self.is_barred(node, seq, now):
            return Verdict.CAUGHT
        if node in self._doubts:
            return Verdict.SUSPECTED
        return Verdict.NEW if self.is_new(node) else Verdict.HONEST

    def passed(self, node: NodeId, finding: Finding, now: float) -> None:
        """An answer of a peer was found right."""
        record = self._record(node, now)
        record.n_passed += 1
        self._agree(finding, now)

    def failed(
        self,
        finding: Finding,
        now: float,
        *,
        can_compare: Callable[[NodeId, NodeId], bool],
        network_of: Callable[[NodeId], str | None],
    ) -> dict[NodeId, str]:
        """Take in a finding of a case in which answers differed; return who is guilty now, and why.

        Args:
            can_compare: whether two peers hold an expert that both could be asked for.
            network_of: of a peer; None: unknown, and like nobody else's.
        """
        involved = {*finding.guilty, *finding.suspects, *(node for pair in finding.disputes for node in pair)}
        for node in involved:
            self._record(node, now).n_disagreed += 1
        self._agree(finding, now)
        for a, b in finding.disputes:
            for node, opponent in ((a, b), (b, a)):
                doubt = self._doubts.setdefault(node, _Doubt())
                doubt.at = doubt.opponents[opponent] = now
        for node in finding.suspects:
            self._doubts.setdefault(node, _Doubt()).at = now
        guilty = dict(finding.guilty)
        for node in guilty:
            self._clear(node)
        while (found := self._outvoted(can_compare, network_of)) is not None:
            guilty[found] = "it disagrees with two others that do not disagree with each other"
            self._clear(found)
        return guilty

    def catch(self, node: NodeId, seq: int, reason: str, now: float) -> Catch:
        """A peer is guilty: it is out from here on."""
        record = self._record(node, now)
        n_times = 1 if record.caught is None else record.caught.n_times + 1
        lasts_s = min(LONGEST_S, CAUGHT_S * 2.0 ** min(n_times - 1, 30))
        record.caught = Catch(seq=seq, at=now, until=now + lasts_s, n_times=n_times, reason=reason[:MAX_REASON])
        record.n_passed = 0  # a new peer, should it ever come back
        self._clear(node)
        return record.caught

    def expire(self, now: float) -> None:
        """Forget suspicions and agreements that are old, or of a time to come: the clock was set back."""
        for node in list(self._doubts):
            doubt = self._doubts[node]
            if not 0 <= now - doubt.at < SUSPECT_S:
                del self._doubts[node]
        self._agreed = {pair: at for pair, at in self._agreed.items() if 0 <= now - at < SUSPECT_S}

    def _record(self, node: NodeId, now: float) -> PeerRecord:
        record = self.peers.get(node)
        if record is None:
            if len(self.peers) >= MAX_PEERS:
                oldest = min(self.peers, key=lambda each: (self.peers[each].caught is not None, self.peers[each].at))
                del self.peers[oldest]
            record = self.peers[node] = PeerRecord()
        record.at = now
        return record

    def _agree(self, finding: Finding, now: float) -> None:
        for pair in finding.agreements:
            self._agreed[frozenset(pair)] = now

    def _clear(self, node: NodeId) -> None:
        """A peer is out: its disputes are decided, and those against whom it stood alone are suspected no more."""
        doubt = self._doubts.pop(node, None)
        for opponent in doubt.opponents if doubt is not None else ():
            other = self._doubts.get(opponent)
            if other is not None:
                other.opponents.pop(node, None)
                if not other.opponents:
                    del self._doubts[opponent]

    def _outvoted(
        self, can_compare: Callable[[NodeId, NodeId], bool], network_of: Callable[[NodeId], str | None]
    ) -> NodeId | None:
        """Return who has the most opponents that stand by each other, if one alone has the most."""

        def backs(a: NodeId, b: NodeId) -> bool:
            network = network_of(a)
            if network is not None and network == network_of(b):
                return False
            doubt = self._doubts.get(a)
            if doubt is not None and b in doubt.opponents:
                return False
            return frozenset((a, b)) in self._agreed or not can_compare(a, b)

        votes: dict[NodeId, int] = {}
        for node, doubt in self._doubts.items():
            opponents = list(doubt.opponents)
            votes[node] = sum(backs(a, b) for index, a in enumerate(opponents) for b in opponents[:index])
        best = max(votes.values(), default=0)
        found = [node for node, n_votes in votes.items() if n_votes == best]
        return found[0] if best and len(found) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return a plain object: what has to last."""
        return {
            "format": FORMAT,
            "peers": {
                str(node): {
                    "n_passed": record.n_passed,
                    "n_disagreed": record.n_disagreed,
                    "at": record.at,
                    "caught": None
                    if (caught := record.caught) is None
                    else {
                        "seq": caught.seq,
                        "at": caught.at,
                        "until": caught.until,
                        "n_times": caught.n_times,
                        "reason": caught.reason,
                    },
                }
                for node, record in self.peers.items()
            },
        }

    @classmethod
    def from_json(cls, plain: Any, now: float) -> Standing:
        """Return what `to_json` gave; raises ValueError, TypeError, KeyError or UserError for anything else."""
        if plain["format"] != FORMAT:
            raise ValueError(f"unknown format: got {plain['format']!r}, expected {FORMAT}")
        standing = cls()
        for name, each in list(plain["peers"].items())[:MAX_PEERS]:
            standing.peers[NodeId.parse(name)] = PeerRecord(
                n_passed=_count(each, "n_passed"),
                n_disagreed=_count(each, "n_disagreed"),
                at=_time(each, "at"),
                caught=None if each["caught"] is None else _catch(each["caught"], now),
            )
        return standing


def _catch(plain: Mapping[str, Any], now: float) -> Catch:
    at, until = _time(plain, "at"), _time(plain, "until")
    late_s = max(0.0, at - now)  # the clock was set back since: it lasts as long from now on, not for years
    if not isinstance(plain["reason"], str):
        raise ValueError(f"bad reason: got {plain['reason']!r}")
    return Catch(
        seq=_count(plain, "seq"),
        at=at - late_s,
        until=min(until - late_s, at - late_s + LONGEST_S),
        n_times=_count(plain, "n_times"),
        reason=plain["reason"][:MAX_REASON],
    )


def _count(plain: Mapping[str, Any], key: str) -> int:
    value = plain[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"bad {key}: got {value!r}")
    return value


def _time(plain: Mapping[str, Any], key: str) -> float:
    value = plain[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"bad {key}: got {value!r}")
    return float(value)
