"""Dispatches that come twice, over two TLS links of one node, are computed once: what a server knows of them.

On a path that loses packets a client sends each small dispatch on a second link as well, and takes the answer that is there
first. Both carry the same number before them (`tls_records`). What comes first is served; the other gets the same answer.

A number alone proves nothing: the requests are compared, so that nobody can be given another request's answer.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Protocol

from swarm.ids import NodeId
from swarm.wire import messages as m

# Rows and pairs of a dispatch, or rows of an answer, that go twice: longer ones do not wait for a round trip in the first place.
# As net/repair: a flight of 48 packets. Pairs count, since a stranger's kept dispatches may have 255 for each row of one number.
MAX_COPIED_BYTES = 56 << 10
# Answers whose copy has not been asked for yet, of all nodes, 28 MB with their requests; beyond, the oldest go. Guessed.
MAX_KEPT = 256


class CopyLink(Protocol):
    """What is needed of a link."""

    @property
    def remote(self) -> NodeId:
        """Who is there."""
        ...

    def respond(self, exchange: int, message: m.Response | m.Refusal) -> None:
        """Answer a request."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class _Served:
    """A dispatch that came first.

    Attributes:
        answer: kept for the copy, once it is there.
        waiting: the copy's link and exchange, if it came before the answer.
    """

    link: CopyLink
    exchange: int
    request: m.Dispatch
    answer: m.Response | m.Refusal | None = None
    waiting: tuple[CopyLink, int] | None = None


Begin = tuple[CopyLink, int, m.Dispatch]  # what is to be served after all


class LinkCopies:
    """Of one listener."""

    def __init__(self) -> None:
        self._served: dict[tuple[NodeId, int], _Served] = {}  # by node and number
        self._under_way: dict[tuple[CopyLink, int], tuple[NodeId, int]] = {}  # link and exchange -> node and number
        # Answered, and not asked for again; oldest first.
        self._kept: OrderedDict[tuple[NodeId, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def is_first(self, link: CopyLink, exchange: int, number: int, request: m.Dispatch) -> bool:
        """Return whether to serve a request; else it is answered here, now or once the other one is."""
        key = (link.remote, number)
        served = self._served.get(key)
        if served is None:
            self._served[key] = _Served(link, exchange, request)
            self._under_way[link, exchange] = key
            return True
        if served.link is link or served.waiting is not None or not _are_equal(served.request, request):
            return True
        if served.answer is None:
            served.waiting = link, exchange
            return False
        self._forget(key)
        link.respond(exchange, served.answer)
        return False

    def answered(self, link: CopyLink, exchange: int, message: m.Response | m.Refusal) -> None:
        """Learn what a request was answered with, so that its copy is, too."""
        key = self._under_way.pop((link, exchange), None)
        if key is None:
            return
        served = self._served[key]
        if served.waiting is not None:
            self._forget(key)
            other, its_exchange = served.waiting
            other.respond(its_exchange, message)
        elif isinstance(message, m.Result) and message.rows.nbytes > MAX_COPIED_BYTES:
            self._forget(key)
        else:
            served.answer = _own(message)
            self._kept[key] = None
            if len(self._kept) > MAX_KEPT:
                self._forget(next(iter(self._kept)))

    def cancelled(self, link: CopyLink, exchange: int) -> list[Begin]:
        """Learn that a request is not waited for any more; return the copy that has to be served instead."""
        key = self._under_way.get((link, exchange))
        if key is not None:
            served = self._forget(key)
            return [] if served.waiting is None else [(*served.waiting, served.request)]
        for served in self._served.values():
            if served.waiting == (link, exchange):
                served.waiting = None
                break
        return []

    def gone(self, link: CopyLink) -> list[Begin]:
        """Forget what a link that has ended asked for; return the copies that have to be served instead."""
        begin: list[Begin] = []
        for key, served in list(self._served.items()):
            if served.waiting is not None and served.waiting[0] is link:
                served.waiting = None
            if served.link is link:
                self._forget(key)
                if served.waiting is not None:
                    begin.append((*served.waiting, served.request))
        return begin

    def _forget(self, key: tuple[NodeId, int]) -> _Served:
        served = self._served.pop(key)
        self._under_way.pop((served.link, served.exchange), None)
        self._kept.pop(key, None)
        return served


def is_copied(message: m.Request) -> bool:
    """Return whether a request is one of those that go twice."""
    if not isinstance(message, m.Dispatch):
        return False
    n_pairs_bytes = message.row_counts.nbytes + message.expert_ids.nbytes
    if message.weights is not None:
        n_pairs_bytes += message.weights.nbytes
    return message.rows.nbytes + n_pairs_bytes <= MAX_COPIED_BYTES


def _are_equal(a: m.Dispatch, b: m.Dispatch) -> bool:
    if (a.layer, a.model_tag, a.rows.shape) != (b.layer, b.model_tag, b.rows.shape):
        return False
    if (a.rows_codec, a.result_codec, a.weights is None) != (b.rows_codec, b.result_codec, b.weights is None):
        return False
    # As bytes: a NaN is equal to itself, and comparing small arrays element by element costs three times as much.
    return (
        a.row_counts.tobytes() == b.row_counts.tobytes()
        and a.expert_ids.tobytes() == b.expert_ids.tobytes()
        and (a.weights is None or b.weights is None or a.weights.tobytes() == b.weights.tobytes())
        and a.rows.tobytes() == b.rows.tobytes()
    )


def _own(message: m.Response | m.Refusal) -> m.Response | m.Refusal:
    """Return the message with rows of its own: those of an answer are the executor's buffer, perhaps."""
    return dataclasses.replace(message, rows=message.rows.copy()) if isinstance(message, m.Result) else message
