"""How much one asker may have of what the relay shares among all. Pure: `now` is monotonic seconds from the caller."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.token_bucket import TokenBucket

MBIT_S = 1_000_000
# What may go at once of a rate, seconds of it. As long as the queue may be: a first flight of 100 KB passes a channel unhindered.
BURST_S = 0.030
# The largest packet that is passed on: an Ethernet frame's payload, less IPv4's and UDP's heads.
MAX_PACKET_BYTES = 1472


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a relay gives. The figures are DESIGN's guesses to start from; each is a flag.

    Attributes:
        channel_bit_s: of one channel, each direction.
        node_bit_s: that one node may send through all its channels.
        total_bit_s: of all that the relay passes on.
        n_channels_per_node, n_reservations: at a time; reservations in all.
        queue_s: the longest that what is above a rate waits: a queue holds as many bytes as the rate carries in that time.
        idle_s: after as long without a packet from one of its sides a channel is forgotten.
    """

    channel_bit_s: int = 50 * MBIT_S
    node_bit_s: int = 100 * MBIT_S
    total_bit_s: int = 1000 * MBIT_S
    n_channels_per_node: int = 64
    n_reservations: int = 4096
    queue_s: float = 0.030
    idle_s: float = 60.0


def byte_bucket(rate_bit_s: int, now: float) -> TokenBucket:
    """Return a bucket of bytes for a rate; two packets always fit, however low the rate."""
    rate_per_s = rate_bit_s / 8
    return TokenBucket(rate_per_s=rate_per_s, burst=max(BURST_S * rate_per_s, 2.0 * MAX_PACKET_BYTES), now=now)
