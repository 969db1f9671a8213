"""What `/metrics` makes of counts that are kept elsewhere."""

from __future__ import annotations

from swarm.gateway.metrics import network_bytes
from swarm.net.byte_counts import Amount, Amounts, PathKind


def test_bytes_are_told_by_direction_kind_and_path_and_only_datagrams_have_repair() -> None:
    counted = Amounts(
        {
            PathKind.DIRECT: Amount(100, 200, 7),
            PathKind.RELAY: Amount(),
            PathKind.TLS: Amount(30, 40),
            PathKind.UNIX: Amount(5, 6),
        }
    )
    samples = {tuple(labels.values()): value for labels, value in network_bytes(counted)}
    assert samples == {
        ("out", "data", "direct"): 100,
        ("back", "data", "direct"): 200,
        ("out", "repair", "direct"): 7,
        ("out", "data", "relay"): 0,
        ("back", "data", "relay"): 0,
        ("out", "repair", "relay"): 0,
        ("out", "data", "tls"): 30,
        ("back", "data", "tls"): 40,
        ("out", "data", "unix"): 5,
        ("back", "data", "unix"): 6,
    }
