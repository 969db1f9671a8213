"""The receipts that this peer was given: kept in a file, fetched from the backbones that it computes for, presented to who asks.

A file of lines in the text form of `swarm.wire.receipts`. Each is checked when it is read: what is damaged is left out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import RemoteProtocolError, SwarmError
from swarm.ids import NodeId
from swarm.latest_file import LatestFile, until_written
from swarm.net.connection import Connection
from swarm.registry.gatherer import MAX_STATUS_BYTES, receipts_of
from swarm.registry.leaderboard import MAX_PRESENTED
from swarm.wire import messages as m
from swarm.wire.receipts import (
    RECEIPT_CHARACTERS,
    Key,
    Receipt,
    Totals,
    day_of,
    peek_receipt,
    read_receipt,
    receipt_bytes,
    require_signed,
    total,
)

logger = logging.getLogger(__name__)

MAX_RECEIPTS = 2048  # kept: five years of one backbone that runs on; guessed. 450 KB
MAX_GIVEN = 8  # that one backbone gives at a time: today's and yesterday's, and room for later versions
MAX_BACKBONES = 256  # remembered as computed for; who asked longest ago is forgotten first
LOOK_S = 1.0  # between two looks whom to ask
QUIET_S = 2.0  # a backbone is asked so long after its last dispatch,
ASK_S = 30.0  # under load so often; guessed: what is lost at most when it is killed
LEAST_ASK_S = 5.0  # and never sooner after the last question, or the first dispatch
TIMEOUT_S = 3.0
MAX_ASKED = 16  # at one look, those not asked for longest first: each may answer with a megabyte
LEAVE_TIMEOUT_S = 1.0  # for the last ones, when this peer leaves
SAVE_TIMEOUT_S = 3.0  # and then for the disk; guessed: a disk under load syncs a small file in a fraction of that


class ReceiptBook:
    """A peer's receipts. Mutable, one owner."""

    def __init__(self, path: Path | None, peer: NodeId) -> None:
        """`path` None keeps nothing over a restart."""
        self._file = None if path is None else LatestFile(path, on_failure=self._not_saved)
        self._peer = peer
        self._kept: dict[Key, Receipt] = {}
        self._order: list[str] | None = None  # in which they are presented; None: something has changed
        self._is_saved = True
        self._writing: Future[None] | None = None
        for receipt in read_receipts(path) if path is not None else ():
            if receipt.peer == peer:
                self._keep(receipt)
        self._is_saved = True

    def take(self, backbone: NodeId, texts: object) -> int:
        """Take what an authenticated backbone gives, untrusted JSON; return how many receipts were new or higher.

        Raises:
            RemoteProtocolError: at the first one that is forged, of another backbone or for another peer, or none.
        """
        if not isinstance(texts, list) or len(texts) > MAX_GIVEN:
            raise RemoteProtocolError(f"receipts are no list of at most {MAX_GIVEN}")
        n_new = 0
        for text in texts:
            receipt = peek_receipt(receipt_bytes(text))
            if receipt.backbone != backbone or receipt.peer != self._peer:
                raise RemoteProtocolError(
                    f"receipt of backbone {receipt.backbone.short} for peer {receipt.peer.short}, "
                    f"expected {backbone.short} for {self._peer.short}"
                )
            known = self._kept.get(receipt.key)
            if known is None or receipt.rank > known.rank:
                self._keep(require_signed(receipt))
                n_new += 1
        return n_new

    def presented(self) -> list[str]:
        """Return what to show to who asks: of every backbone the latest days'; of more than fit, half are drawn each time.

        So whoever dispatches once with each of many keys, and signs, hides nobody else's receipts for long.
        """
        if self._order is None:
            self._order = self._in_order()
        n_first = MAX_PRESENTED // 2
        first, rest = self._order[:n_first], self._order[n_first:]
        return first + (rest if len(self._order) <= MAX_PRESENTED else random.sample(rest, MAX_PRESENTED - n_first))

    def _in_order(self) -> list[str]:
        latest = sorted(self._kept.values(), key=lambda receipt: (receipt.day, receipt.rank), reverse=True)
        n_before: Counter[NodeId] = Counter()
        turns = []  # each backbone's latest first, so that one that gives many hides nobody else's
        for receipt in latest:
            turns.append((n_before[receipt.backbone], receipt))
            n_before[receipt.backbone] += 1
        turns.sort(key=lambda each: each[0])
        return [receipt.text for _, receipt in turns]

    def totals(self, day: int | None = None) -> Totals:
        """Return what the receipts of one day, or all, add up to."""
        return total(receipt for receipt in self._kept.values() if day is None or receipt.day == day)

    def save(self) -> Future[None] | None:
        """Have the file written, if something has changed; return the latest writing. A full disk is logged, no more."""
        if self._file is not None and not self._is_saved:
            self._is_saved = True
            text = "".join(f"{receipt.text}\n" for receipt in self._kept.values())
            self._writing = self._file.write(text.encode())
        return self._writing

    def _not_saved(self, error: Exception) -> None:
        """The file could not be written: it is tried again at the next look. From the thread that writes."""
        self._is_saved = False
        path = None if self._file is None else self._file.path
        logger.warning("cannot keep receipts in %s: %s", path, getattr(error, "strerror", None) or error)

    def _keep(self, receipt: Receipt) -> None:
        self._is_saved, self._order = False, None
        self._kept[receipt.key] = receipt
        if len(self._kept) > MAX_RECEIPTS:
            # Of the backbone with the most receipts the oldest: strangers who give many push out their own first.
            n_of = Counter(key[0] for key in self._kept)
            most = max(n_of.values())
            del self._kept[min((key for key in self._kept if n_of[key[0]] == most), key=lambda key: key[2])]


def read_receipts(path: Path) -> list[Receipt]:
    """Return the good receipts of a peer's own file, each checked; what is damaged is left out, and said."""
    try:
        if path.stat().st_size > 2 * MAX_RECEIPTS * (RECEIPT_CHARACTERS + 1):
            logger.warning("cannot use %s: it is too large", path)
            return []
        lines = path.read_text(encoding="ascii", errors="replace").split()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error.strerror)
        return []
    found, errors = [], []
    for line in lines:
        try:
            found.append(read_receipt(receipt_bytes(line)))
        except RemoteProtocolError as error:
            errors.append(error)
    if errors:
        logger.warning("%s: left out %d of %d receipts: %s", path, len(errors), len(lines), errors[0])
    return found


@dataclass(slots=True)
class _Backbone:
    """Somebody that this peer computes for: times by the collector's clock."""

    asked_at: float
    used_at: float
    has_news: bool = True

    def is_due(self, now: float) -> bool:
        since_s = now - self.asked_at
        return since_s >= ASK_S or (since_s >= LEAST_ASK_S and now - self.used_at >= QUIET_S)


class Collector:
    """Fetches receipts from the backbones that this peer computes for. `run` is a task; `note` is called at each dispatch."""

    def __init__(
        self,
        book: ReceiptBook,
        connections: Callable[[], Iterable[Connection]],
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`connections`: those that are open now."""
        self.book = book
        self._connections = connections
        self._now, self._wall = now, wall
        self._backbones: OrderedDict[NodeId, _Backbone] = OrderedDict()

    def note(self, backbone: NodeId) -> None:
        """A dispatch of this backbone is computed."""
        now = self._now()
        known = self._backbones.get(backbone)
        if known is not None:
            known.used_at, known.has_news = now, True
            return
        self._backbones[backbone] = _Backbone(asked_at=now + LEAST_ASK_S - ASK_S, used_at=now)
        if len(self._backbones) > MAX_BACKBONES:
            del self._backbones[min(self._backbones, key=lambda node: self._backbones[node].used_at)]

    def today(self) -> Totals:
        """Return what this peer has receipts of for today, UTC."""
        return self.book.totals(day_of(self._wall()))

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self, *, is_last: bool = False) -> None:
        """Ask those who may owe a receipt. `is_last`: whoever may, now, and for a short time."""
        now = self._now()
        due = [node for node, each in self._backbones.items() if each.has_news and (is_last or each.is_due(now))]
        due.sort(key=lambda node: self._backbones[node].asked_at)
        due = due if is_last else due[:MAX_ASKED]
        if not due and not is_last:
            return
        asked = {connection.remote: connection for connection in self._connections() if connection.remote in due}
        for node in due:
            self._backbones[node].has_news = node not in asked  # who is away now is asked when it is back
            self._backbones[node].asked_at = now
        timeout_s = LEAVE_TIMEOUT_S if is_last else TIMEOUT_S
        await asyncio.gather(*(self._ask(node, connection, timeout_s) for node, connection in asked.items()))
        writing = self.book.save()
        if is_last and writing is not None:
            await until_written(writing, SAVE_TIMEOUT_S)

    async def _ask(self, node: NodeId, connection: Connection, timeout_s: float) -> None:
        try:
            answer = await connection.request(m.GetStatus(), timeout_s=timeout_s, max_answer_bytes=MAX_STATUS_BYTES)
            assert isinstance(answer, m.Status)  # the session checks an answer's type
            receipts = receipts_of(answer.data)
            if receipts is not None:  # an older backbone gives none
                self.book.take(node, receipts)
        except RemoteProtocolError as error:
            logger.info("backbone %s gives bad receipts: %s", node.short, error)
        except SwarmError as error:
            logger.debug("no receipt of backbone %s: %s", node.short, error)
            if (known := self._backbones.get(node)) is not None:
                known.has_news = True
