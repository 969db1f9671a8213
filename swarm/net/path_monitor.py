"""One connection's paths at work: probes out and in, the timer, and the change of path below QUIC. The rules are in `paths`.

Made once a connection has a second path, so one that never has costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swarm.net.path_probes import PathKey, Probe
from swarm.net.paths import Path, PathPolicy, PathView, SendProbe, Standing

logger = logging.getLogger(__name__)


# Between two new paths that were only heard of: who sees packets on their way can forge where they come from, and each such path
# is probed. Guessed: an address that is real is heard of again.
HEARD_REST_S = 0.05


class PathMonitor:
    """The paths of one connection, and what is done about them."""

    def __init__(
        self,
        policy: PathPolicy,
        key: PathKey,
        *,
        clock: Callable[[], float],
        name: str,
        send: Callable[[Path, bytes], None],
        use: Callable[[Path, float | None], None],
        n_requests: Callable[[], tuple[int, int]],
    ) -> None:
        """Prepare.

        Args:
            send: sends a datagram on a path.
            use: sends all further packets of the connection on a path, and pings; told its round trip, where that is known.
            n_requests: how many requests wait for an answer, and how many have been answered since the start.
        """
        self._policy = policy
        self._key = key
        self._clock = clock
        self._name = name
        self._send = send
        self._use = use
        self._n_requests = n_requests
        self._n_answered = 0
        self._heard = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_closed = False
        self.n_switches = 0

    @property
    def views(self) -> list[PathView]:
        """Every path, the active one first."""
        return self._policy.views()

    def knows(self, path: Path) -> bool:
        """Return whether a path is one of these: something authentic of the connection came on it, or it was added."""
        return self._policy.knows(path)

    def add(self, path: Path) -> None:
        """Try a path, from now on."""
        now = self._clock()
        self._look(now)
        self._policy.add(path, now)
        self._act(now)

    def remove(self, path: Path, *, reason: str) -> None:
        """Forget a path that is gone."""
        now = self._clock()
        self._policy.remove(path, now, reason=reason)
        self._act(now)

    def forget_unanswered(self) -> None:
        """Stop trying the paths that have never answered."""
        now = self._clock()
        for view in self._policy.views():
            if view.standing is Standing.NEW:
                self._policy.remove(view.path, now, reason="")
        self._act(now)

    def heard(self, path: Path) -> None:
        """Something of this connection came on another path than the one in use; forged, perhaps."""
        now = self._clock()
        if not self._policy.knows(path) and now >= self._heard + HEARD_REST_S:
            self._heard = now
            self._policy.heard(path, now)
            self._act(now)

    def receive(self, probe: Probe, path: Path) -> None:
        """Take in an authentic probe that came on `path`."""
        if self._is_closed:
            return
        now = self._clock()
        if probe.is_pong:
            self._policy.on_pong(path, probe.number, now)
        else:
            is_used = self._policy.on_probe(path, probe.number, is_nominating=probe.flag, now=now)
            self._send(path, self._key.encode(is_pong=True, number=probe.number, flag=is_used))
        self._act(now)

    def wake(self) -> None:
        """A request was sent: the path in use is watched closely until its answer comes."""
        if not self._policy.is_busy:
            now = self._clock()
            self._policy.set_busy(True, now)
            self._set_timer(now)

    def close(self) -> None:
        """Stop; nothing is sent any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _act(self, now: float) -> None:
        for action in self._policy.take_actions():
            if self._is_closed:
                return
            if isinstance(action, SendProbe):
                self._send(
                    action.path, self._key.encode(is_pong=False, number=action.number, flag=action.is_nominating)
                )
            else:
                self.n_switches += 1
                logger.info("%s: from %s to %s: %s", self._name, action.former, action.path, action.reason)
                self._use(action.path, action.rtt_s)
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        at = None if self._is_closed else self._policy.next_deadline()
        if at is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or at < self._timer_at:
            # One that is set for earlier stays: to fire in vain once is cheaper than a new timer for each probe.
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, at - now), self._on_timer)
            self._timer_at = at

    def _on_timer(self) -> None:
        self._timer = None
        now = self._clock()
        self._look(now)
        self._policy.handle_timeout(now)
        self._act(now)

    def _look(self, now: float) -> None:
        n_waiting, n_answered = self._n_requests()
        self._policy.set_busy(n_waiting > 0, now)
        if n_answered != self._n_answered:
            self._n_answered = n_answered
            self._policy.answered(now)
