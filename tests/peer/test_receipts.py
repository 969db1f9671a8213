"""A peer's receipts: what is taken from whom, what is kept over a restart and a full disk, and whom it asks when."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from peer import receipts as module
from peer.receipts import (
    ASK_S,
    LEAST_ASK_S,
    MAX_BACKBONES,
    MAX_GIVEN,
    QUIET_S,
    Collector,
    ReceiptBook,
    read_receipts,
)
from swarm import latest_file
from swarm.errors import ConnectionLost, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.connection import Connection
from swarm.registry.leaderboard import MAX_PRESENTED
from swarm.wire import messages as m
from swarm.wire.receipts import DAY_S, Receipt, Totals, read_receipt, receipt_bytes, sign_receipt
from tests import virtual_time

US, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
ME, NOT_ME = (NodeId(bytes([n]) * 32) for n in (10, 11))
TODAY = 20_000


def receipt(
    n_pairs: int = 30,
    *,
    by: Identity = US,
    peer: NodeId = ME,
    day: int = TODAY,
    period: bytes = b"period 1",
) -> Receipt:
    totals = Totals(n_rows=n_pairs, n_pairs=n_pairs, weight=1000 * n_pairs)
    return sign_receipt(by, peer=peer, period=period, day=day, totals=totals)


WAIT_S = 60.0  # for the thread that writes, on any machine


def wait_saved(book: ReceiptBook) -> None:
    """Save what has changed, and return when it is written."""
    writing = book.save()
    assert writing is not None
    writing.result(WAIT_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "me.receipts"


def test_what_was_taken_is_there_after_a_restart(path: Path) -> None:
    book = ReceiptBook(path, ME)
    assert book.take(US.node_id, [receipt(5).text, receipt(7, day=TODAY - 1).text]) == 2
    assert book.take(OTHER.node_id, [receipt(11, by=OTHER).text]) == 1
    wait_saved(book)
    again = ReceiptBook(path, ME)
    assert again.totals() == Totals(n_rows=23, n_pairs=23, weight=23_000)
    assert again.totals(TODAY).n_pairs == 16
    assert again.presented() == book.presented()


def test_the_highest_is_kept_and_an_old_one_changes_nothing() -> None:
    book = ReceiptBook(None, ME)
    assert [book.take(US.node_id, [receipt(n).text]) for n in (5, 9, 5, 9)] == [1, 1, 0, 0]
    assert book.totals().n_pairs == 9


def test_only_a_backbones_own_receipts_for_this_peer_are_taken() -> None:
    book = ReceiptBook(None, ME)
    data = bytearray(receipt(5).data)
    data[150] ^= 1
    inflated = Receipt(
        backbone=US.node_id, peer=ME, period=b"period 1", day=TODAY, totals=Totals(), data=bytes(data)
    ).text
    for texts in (
        [receipt(by=OTHER).text],
        [receipt(peer=NOT_ME).text],
        [inflated],
        ["nonsense"],
        [None],
        [receipt().text] * (MAX_GIVEN + 1),
        "text",
        None,
    ):
        with pytest.raises(RemoteProtocolError):
            book.take(US.node_id, texts)
    assert book.totals() == Totals()


def test_a_damaged_file_loses_no_more_than_what_is_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    good, bad = receipt(5).text, receipt(7, day=1).text
    path.write_text(f"{good}\n{bad[:50]}AAAAA{bad[55:]}\nhalf-a-li", encoding="ascii")
    assert ReceiptBook(path, ME).totals().n_pairs == 5
    assert "left out 2 of 3 receipts" in caplog.text
    path.write_bytes(b"\xff\xfe" * 50)
    assert ReceiptBook(path, ME).totals() == Totals()
    path.write_text(f"{good}\n" * 5000, encoding="ascii")
    assert read_receipts(path) == [], "too large"


def test_another_keys_receipts_in_the_file_do_not_count(path: Path) -> None:
    """`swarm key rotate` makes another node, which has done nothing yet."""
    path.parent.mkdir()
    path.write_text(receipt(5, peer=NOT_ME).text + "\n", encoding="ascii")
    assert ReceiptBook(path, ME).totals() == Totals()
    assert ReceiptBook(path, NOT_ME).totals().n_pairs == 5


def test_a_full_disk_is_no_reason_to_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    book = ReceiptBook(path, ME)
    book.take(US.node_id, [receipt(5).text])
    with monkeypatch.context() as patch:
        patch.setattr(latest_file, "write_atomically", full)
        writing = book.save()
        assert writing is not None
        assert isinstance(writing.exception(WAIT_S), OSError)
    assert "No space left" in caplog.text
    wait_saved(book)
    assert ReceiptBook(path, ME).totals().n_pairs == 5, "it is tried again"


def test_who_gives_many_pushes_out_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECEIPTS", 6)
    book = ReceiptBook(None, ME)
    book.take(US.node_id, [receipt(5, day=3).text, receipt(5, day=4).text])
    for day in range(100, 110):
        book.take(OTHER.node_id, [receipt(1, by=OTHER, day=day).text])
    kept = [read_receipt(receipt_bytes(text)) for text in book.presented()]
    assert sorted(each.day for each in kept) == [3, 4, 106, 107, 108, 109]


def test_what_is_presented_is_bounded_and_of_every_backbone() -> None:
    book = ReceiptBook(None, ME)
    for day in range(3 * MAX_PRESENTED):
        book.take(OTHER.node_id, [receipt(1, by=OTHER, day=TODAY + day).text])  # from a clock far ahead
    book.take(US.node_id, [receipt(5).text])
    shown = [read_receipt(receipt_bytes(text)) for text in book.presented()]
    assert len(shown) == MAX_PRESENTED
    book.take(US.node_id, [receipt(9).text])
    assert receipt(9).text in book.presented(), "what came since is presented, too"
    assert [each.backbone for each in shown[:3]] == [OTHER.node_id, US.node_id, OTHER.node_id]


def test_many_keys_hide_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes keys by the dozen, dispatches once with each and signs much of a day ahead fills half, not all."""
    monkeypatch.setattr(module, "random", random.Random(1))
    book = ReceiptBook(None, ME)
    book.take(US.node_id, [receipt(5).text])
    for number in range(100, 100 + 2 * MAX_PRESENTED):
        crowd = Identity.from_seed(bytes([number]) * 32)
        book.take(crowd.node_id, [receipt(10_000, by=crowd, day=TODAY + 1).text])
    seen = [book.presented() for _ in range(100)]
    assert {len(set(shown)) for shown in seen} == {MAX_PRESENTED}
    assert any(receipt(5).text in shown for shown in seen)


# Asking


class FakeConnection:
    def __init__(self, remote: NodeId, answer: bytes | Exception) -> None:
        self.remote = remote
        self.answer = answer
        self.n_asked = 0

    async def request(self, message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
        assert isinstance(message, m.GetStatus)
        self.n_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return m.Status(data=self.answer)


def status(*receipts: Receipt) -> bytes:
    return json.dumps({"role": "backbone", "receipts": [each.text for each in receipts]}).encode()


class Asking:
    def __init__(self, *connections: FakeConnection, path: Path | None = None) -> None:
        self.time = 100.0
        self.book = ReceiptBook(path, ME)
        self.collector = Collector(
            self.book,
            lambda: cast(list[Connection], list(connections)),
            now=lambda: self.time,
            wall=lambda: TODAY * DAY_S + 5.0,
        )

    def look(self, **options: bool) -> None:
        virtual_time.run(self.collector.look(**options))


def test_a_backbone_is_asked_once_it_is_quiet_and_not_again_before_it_dispatches(path: Path) -> None:
    backbone = FakeConnection(US.node_id, status(receipt(5)))
    asking = Asking(backbone, FakeConnection(OTHER.node_id, b"never asked"), path=path)
    asking.look()
    assert backbone.n_asked == 0, "nothing was computed for it"
    asking.collector.note(US.node_id)
    asking.time += max(QUIET_S, LEAST_ASK_S)
    asking.look()
    assert (backbone.n_asked, asking.collector.today().n_pairs) == (1, 5)
    wait_saved(asking.book)
    assert ReceiptBook(path, ME).totals().n_pairs == 5, "kept at once"
    asking.time += 1000
    asking.look()
    assert backbone.n_asked == 1


def test_under_load_a_backbone_is_asked_now_and_then() -> None:
    backbone = FakeConnection(US.node_id, status(receipt(5)))
    asking = Asking(backbone)
    for _ in range(int(3 * ASK_S)):
        asking.collector.note(US.node_id)
        asking.look()
        asking.time += 1.0
    assert backbone.n_asked == 3


def test_who_leaves_asks_at_once() -> None:
    backbone = FakeConnection(US.node_id, status(receipt(5)))
    asking = Asking(backbone)
    asking.collector.note(US.node_id)
    asking.look(is_last=True)
    assert (backbone.n_asked, asking.book.totals().n_pairs) == (1, 5)


async def test_who_leaves_waits_until_the_last_ones_are_written(path: Path) -> None:
    asking = Asking(FakeConnection(US.node_id, status(receipt(5))), path=path)
    asking.collector.note(US.node_id)
    await asking.collector.look(is_last=True)
    assert ReceiptBook(path, ME).totals().n_pairs == 5


async def test_who_leaves_waits_for_what_is_not_written_yet_also_where_nobody_owes_any(path: Path) -> None:
    asking = Asking(path=path)
    asking.book.take(US.node_id, [receipt(5).text])
    await asking.collector.look(is_last=True)
    assert ReceiptBook(path, ME).totals().n_pairs == 5


def test_a_backbone_that_did_not_answer_is_asked_again() -> None:
    backbone = FakeConnection(US.node_id, ConnectionLost("gone"))
    asking = Asking(backbone)
    asking.collector.note(US.node_id)
    asking.time += LEAST_ASK_S
    asking.look()
    backbone.answer = status(receipt(5))
    asking.time += 1.0
    asking.look()
    assert backbone.n_asked == 1, "but not at once"
    asking.time += LEAST_ASK_S
    asking.look()
    assert (backbone.n_asked, asking.book.totals().n_pairs) == (2, 5)


def test_a_crowd_is_asked_a_few_at_a_time_and_nobody_is_left_out() -> None:
    crowd = [FakeConnection(NodeId(bytes([number]) * 32), b"{}") for number in range(3 * module.MAX_ASKED)]
    asking = Asking(*crowd)
    for each in crowd:
        asking.collector.note(each.remote)
    asking.time += LEAST_ASK_S
    for n in range(3):
        asking.look()
        assert sum(each.n_asked for each in crowd) == (n + 1) * module.MAX_ASKED
    assert {each.n_asked for each in crowd} == {1}


def test_a_backbone_that_is_away_is_asked_once_it_is_back() -> None:
    connections: list[FakeConnection] = []
    asking = Asking()
    asking.collector = Collector(
        asking.book, lambda: cast(list[Connection], connections), now=lambda: asking.time, wall=lambda: 0.0
    )
    asking.collector.note(US.node_id)
    asking.time += LEAST_ASK_S
    asking.look()
    connections.append(FakeConnection(US.node_id, status(receipt(5))))
    asking.time += LEAST_ASK_S
    asking.look()
    assert asking.book.totals().n_pairs == 5


@pytest.mark.parametrize(
    "answer",
    [b'{"role": "backbone", "audits": null}', b"", b"{", b"[" * 99_999, status(receipt(5, by=OTHER))],
    ids=repr,
)
def test_an_older_backbone_and_one_that_talks_nonsense_give_nothing(answer: bytes) -> None:
    asking = Asking(FakeConnection(US.node_id, answer))
    asking.collector.note(US.node_id)
    asking.look(is_last=True)
    assert asking.book.totals() == Totals()


def test_who_asked_longest_ago_is_forgotten_first() -> None:
    asking = Asking()
    for number in range(MAX_BACKBONES + 5):
        asking.collector.note(NodeId(number.to_bytes(32, "big")))
        asking.collector.note(NodeId(bytes(32)))
        asking.time += 1.0
    known = asking.collector._backbones
    assert len(known) == MAX_BACKBONES
    assert NodeId(bytes(32)) in known
