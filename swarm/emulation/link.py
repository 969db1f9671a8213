"""A link of finite rate with a bounded queue: when a packet that reaches it has left it. Pure; times are integers.

Times everywhere in the emulation's core are whole nanoseconds of one monotonic clock, because in floats
`sent + delay == now` and `sent <= now - delay` can disagree, and then a timer fires for a packet that is not due.
"""

from __future__ import annotations

from dataclasses import dataclass

NS_PER_S = 1_000_000_000
DEFAULT_QUEUE_S = 0.1  # guessed: home routers hold 50 to 500 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One direction of a host's access to the network, or a bottleneck.

    Attributes:
        rate_bit_s: bits of IP packets per second; None: infinite, no queue.
        queue_s: a packet that would wait longer than this is dropped.
        queue_bytes: the same bound in bytes before it; at most one of the two is given, none means DEFAULT_QUEUE_S.
    """

    rate_bit_s: float | None = None
    queue_s: float | None = None
    queue_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.rate_bit_s is not None and not self.rate_bit_s > 0:
            raise ValueError(f"rate out of range: got {self.rate_bit_s} bit/s, expected more than 0")
        if self.queue_s is not None and self.queue_bytes is not None:
            raise ValueError("two bounds of one queue: got queue_s and queue_bytes, expected one")
        for bound in (self.queue_s, self.queue_bytes):
            if bound is not None and not bound >= 0:
                raise ValueError(f"queue bound out of range: got {bound}, expected 0 or more")

    @property
    def longest_wait_ns(self) -> int:
        """The longest that a packet waits before its first bit leaves."""
        if self.queue_bytes is not None and self.rate_bit_s is not None:
            return round(self.queue_bytes * 8 * NS_PER_S / self.rate_bit_s)
        return round((DEFAULT_QUEUE_S if self.queue_s is None else self.queue_s) * NS_PER_S)


class Link:
    """One link; its packets leave in the order in which they were given to `carry`."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._free_ns = 0  # when the last bit accepted so far leaves
        self._spare_ns = 0.0  # what rounding took from _free_ns: else 1,000 packets are late by up to 500 ns

    @property
    def spec(self) -> LinkSpec:
        """What it does; may be changed: what it has accepted keeps its times."""
        return self._spec

    @spec.setter
    def spec(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._ns_per_byte = 0.0 if spec.rate_bit_s is None else 8 * NS_PER_S / spec.rate_bit_s
        self._longest_wait_ns = spec.longest_wait_ns

    def carry(self, size_bytes: int, now_ns: int) -> int | None:
        """Return when the packet's last bit leaves; None: the queue is full, it is dropped (tail drop)."""
        if self._ns_per_byte == 0.0:
            return now_ns
        wait_ns = self._free_ns - now_ns
        if wait_ns > self._longest_wait_ns:
            return None
        exact = size_bytes * self._ns_per_byte
        if wait_ns > 0:
            exact += self._spare_ns
            start_ns = self._free_ns
        else:
            start_ns = now_ns
        whole = int(exact)
        self._spare_ns = exact - whole
        self._free_ns = start_ns + whole
        return self._free_ns
