"""What a session tells its link: events, and the bytes to send. Plain values; the rules are in `session`.

Those of a request and its answer are not frozen, since they are made for each layer: frozen, each would take 1 us more to make
(docs/performance.md). Nobody changes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import SwarmError
from swarm.ids import NodeId
from swarm.wire import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The greetings are done: `remote` is who is there, proved."""

    remote: NodeId
    version: int
    observed_address: str | None


@dataclass(slots=True, kw_only=True)
class RequestReceived:
    """The other side wants an answer on `exchange`."""

    exchange: int
    request: m.Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The other side no longer wants the answer on `exchange`."""

    exchange: int


@dataclass(slots=True, kw_only=True)
class Answered:
    """Our request on `exchange` has its answer."""

    exchange: int
    response: m.Response


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """Our request on `exchange` ended without an answer."""

    exchange: int
    error: SwarmError


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The session is over. All requests that waited have failed with `error` in the events before."""

    error: SwarmError


Event = Opened | RequestReceived | RequestCancelled | Answered | RequestFailed | Closed


@dataclass(slots=True, kw_only=True)
class Outgoing:
    """Bytes for the link to send on an exchange; `is_end` closes our half; `is_reset` abandons both halves."""

    exchange: int
    data: bytes = b""
    is_end: bool = False
    is_reset: bool = False
