"""The peer map as a backbone sees it: who holds what, what is covered, what can be served.

It says what this backbone would do with a request that came now, by what it requires of a request itself. Peers are shown by
their ids; addresses of volunteers are shown to nobody.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swarm.backbone.assembly import RunningBackbone
from swarm.dispatch.peer_states import PeerState, PeerView
from swarm.ids import NodeId, format_index_set
from swarm.net.addresses import is_loopback
from swarm.registry.client import RegistryAddress
from swarm.registry.leaderboard import Leaderboard
from swarm.registry.names import shown_name
from swarm.web.registry_map import digits
from swarm.wire.receipts import Key, Totals, day_of

USED = (PeerState.IN_USE, PeerState.ON_TRIAL)

KEPT_S = 0.5  # a map is made anew so often, or when who holds what has changed
RATE_WINDOW_S, RATE_STEP_S = 10.0, 0.5  # of tokens per second: over how long, and how finely it is remembered

Json = dict[str, Any]


class BackboneMap:
    """Makes the map of a running backbone; whether it can serve is found out at each call, the rest at most each KEPT_S."""

    def __init__(
        self,
        running: RunningBackbone,
        registry: Sequence[RegistryAddress],
        place: tuple[int, int] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`registry`: where volunteers find this swarm, for the command that the map shows them."""
        self._running = running
        self._now, self._wall = now, wall
        nodes = ",".join(str(each) for each in registry if not is_loopback(each.address[0]))
        # A relay on this machine is known here as 127.0.0.1, which is of no use elsewhere: its own map tells more.
        self._join = f"SWARM_REGISTRY={nodes} swarm join --experts auto" if nodes else "swarm join --experts auto"
        self._place = place
        self._written: deque[tuple[float, int]] = deque()  # (when, tokens so far)
        self._leaderboard = None if running.ledger is None else Leaderboard(running.ledger)
        self._made_at = float("-inf")
        self._made_of: object = None
        self._map: Json = {}

    def __call__(self) -> Json:
        """Return the map; it is the same object until it is made anew."""
        holders = self._running.holders
        peers = holders.peers()  # first: what died since the last look is found out here
        missing, now = holders.missing(), self._now()
        made_of = (missing, holders.placement.version, [(view.record.node, view.state) for view in peers])
        if now >= self._made_at + KEPT_S or made_of != self._made_of:
            self._made_at, self._made_of = now, made_of
            self._map = self._make(peers, missing, now)
        return self._map

    def _make(self, peers: Sequence[PeerView], missing: dict[int, tuple[int, ...]], now: float) -> Json:
        running = self._running
        holders = running.holders
        return build_map(
            model_name=running.backbone.model_name,
            model_id=str(running.manifest.model_id),
            layers=holders.placement.layers,
            n_holders=holders.placement.holders.sum(axis=0),
            missing=missing,
            peers=peers,
            rtt_s=holders.rtt_s,
            now=holders.now(),
            wall_now=self._wall(),
            path_of=self._path_of,
            tokens_per_s=self._tokens_per_s(now),
            place=self._place,
            join=self._join,
            leaderboard=self._contributed(peers, now),
        )

    def _contributed(self, peers: Sequence[PeerView], now: float) -> Json | None:
        if self._leaderboard is None:
            return None
        audits = self._running.dispatcher.audits
        return self._leaderboard(
            {view.record.node: view.record.name for view in peers},
            now=now,
            today=day_of(self._wall()),
            own=self._own_counts,
            is_barred=(lambda node: False) if audits is None else audits.is_caught,
        )

    def _own_counts(self) -> dict[Key, Totals]:
        """Return what this backbone has counted and perhaps not signed yet."""
        contributions, backbone = self._running.contributions, self._running.endpoint.identity.node_id
        if contributions is None:
            return {}
        return {
            (backbone, peer, day, period): totals
            for (day, period), counts in contributions.by_period().items()
            for peer, totals in counts.items()
        }

    def _path_of(self, node: NodeId) -> str | None:
        report = self._running.pool.report(node)
        return None if report is None else "relay" if report.is_relayed else "direct"

    def _tokens_per_s(self, now: float) -> float:
        """Return the rate since the oldest look of the last RATE_WINDOW_S."""
        written = self._running.backbone.stats.n_completion_tokens
        while len(self._written) > 1 and self._written[1][0] <= now - RATE_WINDOW_S:
            self._written.popleft()
        if not self._written or now - self._written[-1][0] >= RATE_STEP_S:  # however often the map is asked for
            self._written.append((now, written))
        then, before = self._written[0]
        return round((written - before) / (now - then), 1) if now > then else 0.0


def build_map(
    *,
    model_name: str,
    model_id: str,
    layers: Sequence[int],
    n_holders: np.ndarray[Any, np.dtype[np.int64]],
    missing: dict[int, tuple[int, ...]],
    peers: Sequence[PeerView],
    rtt_s: Callable[[NodeId], float | None],
    now: float,
    wall_now: float,
    path_of: Callable[[NodeId], str | None] = lambda _: "direct",
    tokens_per_s: float | None = None,
    place: Sequence[int] | None = None,
    join: str = "",
    leaderboard: Json | None = None,
) -> Json:
    """Return the map as JSON values.

    Args:
        n_holders: of each expert, [L, E], L in the order of `layers`.
        missing: layer -> experts that nobody can compute.
        path_of: "direct" or "relay".
        tokens_per_s: written now, by all requests together.
        place: of the backbone, if its operator tells it: whole degrees of latitude and longitude.
        join: the command that a volunteer types.
        leaderboard: see `swarm.registry.leaderboard`; None: nobody's receipts count here.
        now, wall_now: the same moment, by the clock of `peers` and in seconds since 1970.
    """

    def wall(at: float) -> int:
        return round(wall_now - (now - at))

    model = {
        "model": model_name,
        "model_id": model_id,
        "servable": not missing,
        "missing": {str(layer): format_index_set(experts) for layer, experts in missing.items()},
        "replicas": {str(layer): digits(row) for layer, row in zip(layers, n_holders, strict=True)},
    }
    return {
        "at": round(wall_now),
        "source": "backbone",
        "servable": not missing,
        "models": [model],
        "n_used": sum(view.state in USED for view in peers),
        "tokens_per_s": tokens_per_s,
        "place": place,
        "join": join,
        "leaderboard": leaderboard,
        "peers": [
            {
                "id": str(view.record.node),
                "short": view.record.node.short,
                "name": shown_name(view.record.name),
                "place": list(view.record.place) if view.record.place is not None else None,
                "models": [model_id],
                "state": view.state.value,
                "state_since": wall(view.state_since),
                "seen_since": wall(view.seen_since),
                "experts": [list(group) for group in view.record.experts.grouped()],
                "n_blocks": len(view.record.experts),
                "exact": view.record.exact_kernels,
                "path": path_of(view.record.node) if view.state in USED else None,
                "rtt_ms": None if (rtt := rtt_s(view.record.node)) is None else round(rtt * 1000, 2),
            }
            for view in peers
        ],
    }
