"""Whose machines have done how much, by the receipts that peers present and the backbones that the viewer trusts. Pure.

Anybody can run a backbone and sign for its own peers whatever it likes: a receipt proves who says so, not that it is true. So
only receipts of the backbones that a viewer names count, and only if the peer that they are for presents them itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from swarm.errors import RemoteProtocolError
from swarm.ids import NodeId
from swarm.registry.names import shown_name
from swarm.wire.receipts import Key, Receipt, Totals, peek_receipt, receipt_bytes, require_signed

WINDOW_DAYS = 7  # of the leaderboard: who came last week has a chance; guessed
AHEAD_DAYS = 1  # a backbone's clock may be so far ahead of ours
MAX_PRESENTED = 64  # receipts that a peer presents at a time; guessed: a week of four backbones, each started twice
MAX_KEPT = 4 * MAX_PRESENTED  # of one peer
MAX_PEERS = 4096  # who was asked longest ago is forgotten first; guessed
MAX_RANKED = 20
BOARD_S = 5.0  # between two leaderboards; while peers compute, each differs from the last and takes 2 KB to tell

Json = dict[str, Any]


class Ledger:
    """The receipts of trusted backbones, by the peer that presented them."""

    def __init__(self, trusted: Collection[NodeId]) -> None:
        """`trusted`: the backbones whose receipts count."""
        self.trusted = frozenset(trusted)
        self._of: OrderedDict[NodeId, dict[Key, Receipt]] = OrderedDict()

    def present(self, peer: NodeId, texts: object, today: int) -> int:
        """Take in what an authenticated peer presents, untrusted JSON; return how many receipts were new or higher.

        Receipts of backbones that are not trusted, and of days outside the window, are passed over unread.

        Raises:
            RemoteProtocolError: at the first one that is forged, another peer's, or none. Those before it count.
        """
        if not isinstance(texts, list) or len(texts) > MAX_PRESENTED:
            raise RemoteProtocolError(f"receipts are no list of at most {MAX_PRESENTED}")
        mine = self._of.get(peer) or {}
        n_new = 0
        try:
            for text in texts:
                receipt = peek_receipt(receipt_bytes(text))
                if receipt.backbone not in self.trusted or not is_recent(receipt.day, today):
                    continue
                if receipt.peer != peer:
                    raise RemoteProtocolError(
                        f"receipt of another peer: got {receipt.peer.short}, expected {peer.short}"
                    )
                known = mine.get(receipt.key)
                if known is not None and known.rank >= receipt.rank:
                    continue  # an old one, or the same: not worth a look at its signature
                mine[receipt.key] = require_signed(receipt)
                n_new += 1
        finally:
            for key in [key for key in mine if not is_recent(key[2], today)]:
                del mine[key]
            while len(mine) > MAX_KEPT:
                del mine[min(mine, key=lambda key: key[2])]
            self._of.pop(peer, None)
            if mine:  # who presents nothing pushes nobody out
                self._of[peer] = mine
                if len(self._of) > MAX_PEERS:
                    self._of.popitem(last=False)
        return n_new

    def totals(self, today: int, own: Mapping[Key, Totals] | None = None) -> dict[NodeId, Totals]:
        """Return peer -> what it did within the window.

        Args:
            own: what a backbone has counted itself and signed no receipt of yet, perhaps; it trusts itself.
        """
        best = {key: receipt.totals for mine in self._of.values() for key, receipt in mine.items()}
        for key, counted in (own or {}).items():
            if key not in best or counted.n_pairs > best[key].n_pairs:
                best[key] = counted
        totals: dict[NodeId, Totals] = {}
        for (_, peer, day, _), counted in best.items():
            if is_recent(day, today):
                totals[peer] = totals.get(peer, Totals()) + counted
        return totals


def is_recent(day: int, today: int) -> bool:
    """Return whether a receipt's day is within the window, by the viewer's clock."""
    return today - WINDOW_DAYS < day <= today + AHEAD_DAYS


def ranked(totals: Mapping[NodeId, Totals], names: Mapping[NodeId, str]) -> list[Json]:
    """Return the leaderboard: those who show a name, most points first, at most MAX_RANKED; equal ones by node id.

    Args:
        names: as announced; who has none, or none that can be shown, did not ask to be listed.
    """
    shown = ((node, name) for node in totals if (name := shown_name(names.get(node, ""))))
    best = sorted(shown, key=lambda each: (-totals[each[0]].weight, each[0]))[:MAX_RANKED]
    return [
        {
            "id": str(node),
            "short": node.short,
            "name": name,
            "points": totals[node].points,
            "rows": totals[node].n_rows,
            "pairs": totals[node].n_pairs,
        }
        for node, name in best
    ]


class Leaderboard:
    """What a map says of contributions: see docs/map.md. Mutable, one owner.

    It remembers who showed which name, so that who is away for a night keeps the place.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._names: OrderedDict[NodeId, str] = OrderedDict()
        self._made_at = float("-inf")
        self._shown: Json = {}

    def __call__(
        self,
        names: Mapping[NodeId, str],
        *,
        now: float,
        today: int,
        own: Callable[[], Mapping[Key, Totals]] = dict,
        is_barred: Callable[[NodeId], bool] = lambda node: False,
    ) -> Json | None:
        """Return it as JSON, made anew at most each BOARD_S; None where nobody is trusted.

        Args:
            names: of the peers that are known now; empty for who wants none.
            now: seconds of any clock that only rises; today: as in a receipt.
            own: see `Ledger.totals`.
            is_barred: who is not to be listed.
        """
        if not self._ledger.trusted:
            return None
        if now < self._made_at + BOARD_S:
            return self._shown
        self._made_at = now
        totals = self._ledger.totals(today, own())
        for node, name in names.items():
            self._names.pop(node, None)
            if name and node in totals:  # names cost nothing: a crowd of them must push out nobody who did something
                self._names[node] = name
        while len(self._names) > MAX_PEERS:
            self._names.popitem(last=False)
        listed = {node: counted for node, counted in totals.items() if not is_barred(node)}
        self._shown = {
            "days": WINDOW_DAYS,
            "counted_by": sorted(map(str, self._ledger.trusted))[:MAX_RANKED],
            "rows": ranked(listed, self._names),
        }
        return self._shown
