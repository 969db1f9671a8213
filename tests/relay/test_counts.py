"""Metrics of each part: every number is there, under a name of its own, with its help. In virtual time."""

from __future__ import annotations

from relay.counts import of_registry, of_service
from relay.quotas import Limits
from relay.service import RelayService
from relay.web import render
from swarm.identity import Identity
from swarm.registry.node import RegistryNode


def test_counters_and_gauges_follow_prometheus_naming_and_none_is_there_twice() -> None:
    service = RelayService(
        Identity.from_seed(bytes(32)), Limits(), generation=1, secret=b"s" * 32, now=lambda: 1.0, wall=lambda: 2.0
    )
    service.switchboard.receive([b"!" + bytes(20)], ("192.0.2.1", 1), 1.0)
    metrics = [*of_service(service, uptime_s=3.0), *of_registry(RegistryNode(now=lambda: 1.0))]
    names = [each.name for each in metrics]
    assert len(set(names)) == len(names)
    for metric in metrics:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".")
    lines = render(metrics).decode().splitlines()
    assert 'swarm_relay_dropped_packets_total{reason="unknown_channel"} 1.0' in lines
    assert 'swarm_relay_dropped_packets_total{reason="over_rate"} 0.0' in lines
    assert "swarm_relay_uptime_seconds 3.0" in lines
    assert "swarm_registry_records 0.0" in lines
