"""Which path carries one connection's packets: direct ones and relay channels, what their probes say, and the choice. Pure.

QUIC sees one address per peer that never changes; what really carries the datagrams is decided here, and may change under a
live connection. `now` is monotonic seconds from the caller; what is to be done is fetched by `take_actions`.

    the side that dialled leads                      the other side follows
      PROBE on every path, from time to time     ->  PONG, and a PROBE of its own where it has none answered yet
      chooses by the answers; says so in a PROBE ->  sends on that path too, once its own PROBE was answered there

Only answered probes count: a path is proved both ways, from and to that very address, by who holds the connection's key. The
rules of the choice:
- direct before relayed; within a kind another path must be MIN_GAIN_S faster;
- a path whose probe has no answer within max(3 srtt, srtt + 200 ms) is down. It comes back after some time of answers, which
  doubles each time it fails soon after;
- relayed paths stay in use beside a direct one: kept warm by probes, so that they are there when it fails;
- with one path there is nothing to choose, and nothing is probed.
Knows nothing of sockets, keys or bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from swarm.net.addresses import format_address

# A datagram of a relay channel: this type and the channel's id before the datagram itself (`relay_packets`).
RELAY_TYPE = 0x21
CHANNEL_BYTES = 8

MIN_GAIN_S = 0.005  # another path of the same kind must be this much faster; DESIGN section 4
FAILOVER_FACTOR, FAILOVER_MARGIN_S = 3.0, 0.2  # max(3 srtt, srtt + 200 ms); DESIGN section 4
UNKNOWN_RTT_S = 0.3  # of a path without an answer yet; guessed: across the world
# While requests wait and no answer comes, the path in use is probed this often, and at the latest after MOST_PROBE_S even if
# answers come. A stall by a path that dies is so at most 50 ms + the failover above + a round trip.
BUSY_PROBE_S, MOST_PROBE_S = 0.05, 0.25
# The other paths meanwhile, and all paths of a quiet connection: a NAT forgets a mapping after 30 s and more (RFC 4787: 120 s).
SPARE_PROBE_S, QUIET_PROBE_S = 1.0, 5.0
# A probe without an answer is repeated once it is late, and then this often: one lost packet is no failure. Guessed.
REPEAT_S = 0.05
# A new or failed path is probed this often for NEW_FOR_S (a hole is being punched), then as spares of a quiet connection.
NEW_PROBE_S, NEW_FOR_S = 0.1, 3.0
# After a failure a path must answer for this long before it is used again; doubles up to the longest with each failure within
# STEADY_S of coming back. Guessed.
RETURN_S, LONGEST_RETURN_S, STEADY_S = 0.5, 30.0, 60.0
# A timer that comes later than this after its time says that this process was busy: answers may wait in the socket, so nothing is
# judged before they were read. GRACE_S until then. Guessed.
LATE_S, GRACE_S = 0.02, 0.02
MAX_PATHS = 12  # of one connection; the longest silent direct one makes room. Guessed: candidates of a host with a few interfaces
MAX_OUTSTANDING = 32  # probes of one path whose answers still count
_GAIN = 0.125  # RFC 6298
_SLACK_S = 1e-6  # floats: `sent + delay == now` and `sent <= now - delay` can disagree


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Where datagrams go: an address, or a channel of the relay there.

    Attributes:
        address: of the other side or of the relay, in the form of the socket's family.
        channel: 8 bytes; empty: direct.
    """

    address: tuple[str, int] | tuple[str, int, int, int]
    channel: bytes = b""

    @property
    def is_relayed(self) -> bool:
        """Whether it goes through a relay."""
        return bool(self.channel)

    @property
    def head(self) -> bytes:
        """What stands before each datagram."""
        return bytes((RELAY_TYPE,)) + self.channel if self.channel else b""

    def __str__(self) -> str:
        where = format_address(self.address)
        return f"relay {where}" if self.channel else where


class Standing(Enum):
    """What is known of a path."""

    NEW = "not answered yet"
    UP = "up"
    RETURNING = "answers again"
    DOWN = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProbe:
    """Send a PROBE on a path; `is_nominating`: the leader tells that it uses this path."""

    path: Path
    number: int
    is_nominating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Send on `path` from now on, and ping at once: its acknowledgement shows QUIC what was lost on the former."""

    path: Path
    former: Path
    reason: str
    rtt_s: float | None


Action = SendProbe | Switch


@dataclass(slots=True, kw_only=True)
class _State:
    """One path's."""

    path: Path
    added: float
    standing: Standing = Standing.NEW
    srtt_s: float | None = None
    rttvar_s: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)  # probe -> when; those whose answer still counts
    unanswered_since: float | None = None  # the oldest probe after the last answer
    probed: float = -math.inf  # when the last was sent
    probe_at: float = 0.0  # when the next is due
    answered: float = -math.inf
    up_since: float = -math.inf  # or answering again since
    failed: float = -math.inf
    return_s: float = RETURN_S

    @property
    def failover_s(self) -> float:
        srtt_s = UNKNOWN_RTT_S if self.srtt_s is None else self.srtt_s
        return max(FAILOVER_FACTOR * srtt_s, srtt_s + FAILOVER_MARGIN_S)

    @property
    def late_s(self) -> float:
        srtt_s = UNKNOWN_RTT_S if self.srtt_s is None else self.srtt_s
        return srtt_s + max(REPEAT_S, 4 * self.rttvar_s)

    def is_late(self, now: float) -> bool:
        return self.unanswered_since is not None and now >= self.unanswered_since + self.late_s

    @property
    def fails_at(self) -> float:
        is_judged = self.unanswered_since is not None and self.standing in (Standing.UP, Standing.RETURNING)
        return self.unanswered_since + self.failover_s if is_judged and self.unanswered_since is not None else math.inf

    def measured(self, rtt_s: float) -> None:
        if self.srtt_s is None:
            self.srtt_s, self.rttvar_s = rtt_s, rtt_s / 2
        else:
            self.rttvar_s += 2 * _GAIN * (abs(rtt_s - self.srtt_s) - self.rttvar_s)
            self.srtt_s += _GAIN * (rtt_s - self.srtt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathView:
    """A path for people: status, metrics, logs."""

    path: Path
    standing: Standing
    rtt_s: float | None
    is_active: bool


class PathPolicy:
    """The paths of one connection.

    Attributes:
        active: the path to send on.
        is_busy: whether requests wait for an answer; set it by `set_busy`.
    """

    def __init__(self, active: Path, *, leads: bool, now: float) -> None:
        """`active`: the path on which the connection was made, which has proved it; `leads`: whether this side dialled."""
        self.active = active
        self.is_busy = False
        self._leads = leads
        self._now = now
        self._states: dict[Path, _State] = {}
        self._actions: list[Action] = []
        self._next_number = 1
        self._nominated = 0  # the highest number of a nominating probe seen
        self._wanted: Path | None = None  # as the follower: what the leader uses, not proved here yet
        first = self._new_state(active, now)
        first.standing, first.up_since = Standing.UP, now

    # What is known

    @property
    def n_paths(self) -> int:
        """How many paths there are; with one, nothing is probed."""
        return len(self._states)

    def views(self) -> list[PathView]:
        """Return every path, the active one first."""
        states = sorted(self._states.values(), key=lambda state: (state.path != self.active, state.added))
        return [
            PathView(
                path=state.path,
                standing=state.standing,
                rtt_s=state.srtt_s,
                is_active=state.path == self.active,
            )
            for state in states
        ]

    def knows(self, path: Path) -> bool:
        """Return whether a path is one of these."""
        return path in self._states

    def is_up(self, path: Path) -> bool:
        """Return whether a path works now, as far as is known."""
        state = self._states.get(path)
        return state is not None and state.standing is Standing.UP

    # What happens

    def add(self, path: Path, now: float) -> None:
        """Learn of a path that may work; it is probed at once, again and again. Known ones are tried anew."""
        self._now = now
        state = self._states.get(path)
        if state is None:
            self._make_room()
            state = self._new_state(path, now)
        state.probe_at = now
        if state.standing in (Standing.NEW, Standing.DOWN):
            state.added = now
        for other in self._states.values():  # those probed by nobody as long as they were alone
            other.probe_at = min(other.probe_at, now)
        self._act(now)

    def remove(self, path: Path, now: float, *, reason: str) -> None:
        """Forget a path that is gone: a relay said so. The last one stays."""
        if path not in self._states or len(self._states) == 1:
            return
        state = self._states.pop(path)
        if self._wanted == path:
            self._wanted = None
        if path == self.active:
            rest = [other for other in self._states.values() if other.standing is Standing.UP]
            best = min(rest or self._states.values(), key=_rank)
            self._switch(state, best, now, reason)
        self._act(now)

    def set_busy(self, is_busy: bool, now: float) -> None:
        """Say whether requests wait for an answer."""
        if is_busy and not self.is_busy and len(self._states) > 1:
            state = self._states[self.active]
            # Not at once: of most requests the answer comes before, and is worth more than a probe's.
            state.probe_at = min(state.probe_at, now + BUSY_PROBE_S)
        self.is_busy = is_busy

    def answered(self, now: float) -> None:
        """A request was answered: the path in use works, and a probe can wait."""
        state = self._states[self.active]
        if state.unanswered_since is None:
            state.probe_at = max(state.probe_at, min(now + BUSY_PROBE_S, state.probed + MOST_PROBE_S))

    def heard(self, path: Path, now: float) -> None:
        """Learn of a path on which something of this connection came: proved by nothing yet.

        The other side's NAT may have given it another address in mid-flight, so the follower sends there as soon as that is
        proved. Of a path that is known already this says nothing: packets overtake each other.
        """
        if path in self._states:
            return
        if not self._leads:
            self._wanted = path
        self.add(path, now)

    def on_probe(self, path: Path, number: int, *, is_nominating: bool, now: float) -> bool:
        """Take in an authentic PROBE that came on `path`; return whether this side sends on that path too (for the PONG)."""
        self._now = now
        state = self._states.get(path)
        if state is None:  # the other side is seen at an address that it does not know of itself
            self._make_room()
            state = self._new_state(path, now)
            state.probe_at = now
        elif state.standing in (Standing.NEW, Standing.DOWN):
            state.added = now  # it comes through: answer in kind, at once and often
            state.probe_at = min(state.probe_at, now)
        if is_nominating and not self._leads and number > self._nominated:
            self._nominated = number
            self._wanted = path
            self._follow(now)
        self._act(now)
        return path == self.active

    def on_pong(self, path: Path, number: int, now: float) -> bool:
        """Take in an authentic PONG that came on `path`; return whether it answers a probe of ours on that path."""
        self._now = now
        state = self._states.get(path)
        sent = state.sent.pop(number, None) if state is not None else None
        if state is None or sent is None:
            was_ours = any(number in other.sent for other in self._states.values())
            if was_ours and state is None:  # answered from elsewhere: a NAT on the way has another mapping for us
                self.add(path, now)
            return False
        state.measured(now - sent)
        state.answered = now
        for other in [other for other, at in state.sent.items() if at <= sent]:
            del state.sent[other]
        state.unanswered_since = min(state.sent.values(), default=None)
        if state.standing is Standing.NEW:
            state.standing, state.up_since = Standing.UP, now
        elif state.standing is Standing.DOWN:
            state.standing, state.up_since = Standing.RETURNING, now
        if state.standing is Standing.RETURNING and now >= state.up_since + state.return_s - _SLACK_S:
            state.standing = Standing.UP
        self._schedule(state, now)
        self._follow(now)
        self._choose(now)
        self._act(now)
        return True

    # Time

    def next_deadline(self) -> float | None:
        """Return when `handle_timeout` must be called next; None: nothing is due."""
        if len(self._states) == 1:
            return None
        return min(min(state.probe_at, state.fails_at) for state in self._states.values())

    def handle_timeout(self, now: float) -> None:
        """Act on what is due by `now`."""
        if len(self._states) == 1:
            return
        due = self.next_deadline()
        is_late = due is not None and now > due + LATE_S
        self._now = now
        for state in self._states.values():
            if now + _SLACK_S < state.fails_at:
                continue
            if is_late and state.unanswered_since is not None:
                # Judged in a moment, as if the probe had gone out that much later.
                state.unanswered_since = now + GRACE_S - state.failover_s
                continue
            self._fail(state, now)
        self._choose(now)
        self._act(now)

    def take_actions(self) -> list[Action]:
        """Return what is to be done now, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    # Inside

    def _new_state(self, path: Path, now: float) -> _State:
        state = _State(path=path, added=now, probe_at=now)
        self._states[path] = state
        return state

    def _make_room(self) -> None:
        if len(self._states) >= MAX_PATHS:
            idle = [state for state in self._states.values() if state.path not in (self.active, self._wanted)]
            oldest = min(idle, key=lambda state: (state.standing is Standing.UP, state.path.is_relayed, state.answered))
            del self._states[oldest.path]

    def _fail(self, state: _State, now: float) -> None:
        was_up_s = now - state.up_since
        if state.standing is Standing.UP and state.failed > -math.inf and was_up_s < STEADY_S:
            state.return_s = min(2 * state.return_s, LONGEST_RETURN_S)
        elif state.standing is Standing.UP:
            state.return_s = RETURN_S
        state.standing, state.failed, state.added = Standing.DOWN, now, now
        state.unanswered_since = None
        state.sent.clear()
        state.probe_at = now + NEW_PROBE_S

    def _choose(self, now: float) -> None:
        """As the leader: change the active path if the rules say so."""
        if not self._leads:
            return
        active = self._states[self.active]
        up = [state for state in self._states.values() if state.standing is Standing.UP]
        if not up and active.standing is not Standing.RETURNING:  # what answers at all is better than what does not
            up = [state for state in self._states.values() if state.standing is Standing.RETURNING]
        if not up:
            return
        # Not to one that seems to fail at the same moment: all may share a way.
        best = min(up, key=lambda state: (state.is_late(now), *_rank(state)))
        if best is active:
            return
        if active.standing is not Standing.UP:
            reason = f"{active.path} does not answer"
        elif active.path.is_relayed and not best.path.is_relayed:
            reason = "a direct path works"
        elif active.path.is_relayed == best.path.is_relayed:
            gain_s = _rtt_s(active) - _rtt_s(best)
            if active.srtt_s is None or best.srtt_s is None or gain_s < MIN_GAIN_S:
                return
            reason = f"{gain_s * 1e3:.0f} ms faster"
        else:
            return
        self._switch(active, best, now, reason)

    def _follow(self, now: float) -> None:
        """As the follower: send where the leader sends, once that is proved from here."""
        state = self._states.get(self._wanted) if self._wanted is not None else None
        if state is None or state.standing in (Standing.NEW, Standing.DOWN):
            return
        if state.path != self.active:
            former = self._states.get(self.active) or state
            self._switch(former, state, now, "the other side uses it")
        self._wanted = None

    def _switch(self, former: _State, to: _State, now: float, reason: str) -> None:
        self.active = to.path
        self._actions.append(Switch(path=to.path, former=former.path, reason=reason, rtt_s=to.srtt_s))
        to.probe_at = now  # tells the follower

    def _act(self, now: float) -> None:
        """Send the probes that are due."""
        if len(self._states) == 1:
            return
        if self.is_busy and self._states[self.active].is_late(now):  # so that, if it fails, it is known where to go
            for state in self._states.values():
                if state.unanswered_since is None:
                    state.probe_at = now
        for state in self._states.values():
            if now + _SLACK_S >= state.probe_at:
                self._probe(state, now)

    def _probe(self, state: _State, now: float) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        state.sent[number] = state.probed = now
        while len(state.sent) > MAX_OUTSTANDING:
            del state.sent[next(iter(state.sent))]
        if state.unanswered_since is None:
            state.unanswered_since = now
        is_nominating = self._leads and state.path == self.active
        self._actions.append(SendProbe(path=state.path, number=number, is_nominating=is_nominating))
        self._schedule(state, now)

    def _schedule(self, state: _State, now: float) -> None:
        """Settle when a path is probed next: so long after the last time, whether that is answered yet or not."""
        if state.standing in (Standing.NEW, Standing.DOWN):
            is_young = now < state.added + NEW_FOR_S
            wait_s = NEW_PROBE_S if is_young else SPARE_PROBE_S if self.is_busy else QUIET_PROBE_S
        elif state.unanswered_since is not None:
            wait_s = max(state.unanswered_since + state.late_s - state.probed, REPEAT_S)
        elif state.standing is Standing.RETURNING:
            wait_s = NEW_PROBE_S
        elif not self._leads:
            wait_s = QUIET_PROBE_S  # the leader judges; these keep mappings open on this side
        elif self.is_busy:
            wait_s = BUSY_PROBE_S if state.path == self.active else SPARE_PROBE_S
        else:
            wait_s = QUIET_PROBE_S
        state.probe_at = max(now, state.probed + wait_s)


def _rtt_s(state: _State) -> float:
    return UNKNOWN_RTT_S if state.srtt_s is None else state.srtt_s


def _rank(state: _State) -> tuple[bool, float]:
    return (state.path.is_relayed, _rtt_s(state))
