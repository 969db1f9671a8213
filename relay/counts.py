"""What each part of a relay counts, as metrics. Their names are what dashboards rely on: they stay."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from relay.metrics import Metric, counter, gauge
from relay.service import RelayService
from swarm.net.endpoint import Endpoint
from swarm.registry.node import RegistryNode

if TYPE_CHECKING:
    from relay.web_socket import SocketBridges  # 20 MB that a relay without web pages need not have


def of_service(service: RelayService, *, uptime_s: float) -> list[Metric]:
    """Return what is counted of calls and packets."""
    board, reservations = service.switchboard, service.reservations
    return [
        gauge("swarm_relay_uptime_seconds", "Since this relay started.", uptime_s),
        gauge("swarm_relay_reservations", "Nodes that can be called.", reservations.n_reservations),
        gauge("swarm_relay_channels", "Open channels.", reservations.n_channels),
        gauge("swarm_relay_draining", "1 once it takes nothing new.", service.is_draining),
        counter("swarm_relay_packets_total", "Packets passed on.", board.n_passed),
        counter("swarm_relay_bytes_total", "Bytes of packets passed on.", board.n_passed_bytes),
        counter("swarm_relay_challenges_total", "Sources asked to prove themselves.", board.n_challenges),
        Metric(
            name="swarm_relay_dropped_packets_total",
            kind="counter",
            help="Packets not passed on.",
            values=asdict(board.drops),
            label="reason",
        ),
    ]


def of_bridges(bridges: SocketBridges) -> list[Metric]:
    """Return what is counted of nodes that come by WebSocket."""
    return [
        gauge("swarm_relay_websockets", "Nodes that come by WebSocket.", bridges.n_open),
        counter("swarm_relay_websocket_drops_total", "Packets that a WebSocket had no room for.", bridges.n_dropped),
    ]


def of_registry(registry: RegistryNode) -> list[Metric]:
    """Return what is counted of records."""
    return [
        gauge("swarm_registry_records", "Records stored.", len(registry.table)),
        gauge("swarm_registry_bytes", "Bytes of records stored.", registry.table.n_bytes),
        gauge("swarm_registry_members", "Known members of the ring.", len(registry.replica.membership.ring)),
    ]


def of_endpoint(endpoint: Endpoint) -> list[Metric]:
    """Return what is counted at the UDP port."""
    return [
        counter("swarm_udp_sent_bytes_total", "UDP payload sent.", endpoint.bytes_sent),
        counter("swarm_udp_received_bytes_total", "UDP payload received.", endpoint.bytes_received),
        counter("swarm_udp_send_drops_total", "Datagrams the socket had no room for.", endpoint.n_send_drops),
        counter("swarm_quic_refused_total", "First packets without room.", endpoint.n_refused),
        counter("swarm_quic_retries_total", "First packets whose sender was to prove itself.", endpoint.n_retries),
    ]
