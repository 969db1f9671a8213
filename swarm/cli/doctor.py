"""`swarm doctor`: how others can reach this machine, why, and what would make it better; fit to paste into a report."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from dataclasses import dataclass
from typing import Any

import typer

from swarm import __version__
from swarm.cli.options import JsonOption, PortOption, RegistryOption
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import out, print_json, run_async
from swarm.errors import NetworkError, RemoteProtocolError, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ip import plain_ip
from swarm.net.addresses import format_address, own_hosts
from swarm.net.connection import Connection
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.reachability import Reach, Verdict
from swarm.registry.client import DEFAULT_REGISTRY, RegistryAddress
from swarm.wire import messages as m

DIAL_TIMEOUT_S = 4.0
SETTLE_S = 0.2  # for the first round trip to be measured
NAMES = {
    m.Mapping.UNKNOWN: "seen by too few relays to tell what is in between",
    m.Mapping.NONE: "no NAT: others see this machine's own address",
    m.Mapping.SAME: "a NAT that keeps one port for all destinations (holes can be punched)",
    m.Mapping.VARYING: "a symmetric NAT: another port for each destination (no holes can be punched to its like)",
    m.Mapping.BLOCKED: "no UDP gets through",
}
MEANINGS = {
    Reach.PUBLIC: "Others reach this machine directly.",
    Reach.PUNCHABLE: "Others reach this machine through a relay at first, then directly by a punched hole, unless they are "
    "behind a symmetric NAT themselves.",
    Reach.RELAYED: "Others reach this machine through a relay; directly only where their own network lets everybody in.",
    Reach.UNKNOWN: "It is not known yet whether others reach this machine directly: too few others are there to try.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayFinding:
    """What one relay or registry node says: `seen_at` is where it sees us, None if it does not answer, then `error` says why."""

    address: str
    seen_at: str | None
    rtt_s: float | None
    is_by_websocket: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one kind of IP can do."""

    version: int
    own_host: str | None
    mapping: m.Mapping
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found."""

    reach: Reach
    port: int
    relays: tuple[RelayFinding, ...]
    findings: tuple[Finding, ...]

    def advice(self) -> list[str]:
        """Return what would make this machine easier to reach, likeliest first."""
        if not any(relay.seen_at for relay in self.relays):
            return ["No relay answers: check the address of --registry, and whether this machine is online."]
        if any(finding.mapping is m.Mapping.BLOCKED for finding in self.findings):
            return [
                "Let UDP out of this network. Until then everything goes through a relay by WebSocket, which is slower.",
            ]
        if self.reach is Reach.PUBLIC:
            public = {finding.version for finding in self.findings if finding.verdict is Verdict.PUBLIC}
            return [] if 4 in public else ["Start with --host ::, since others reach this machine by IPv6 alone."]
        advice = []
        for finding in self.findings:
            if finding.mapping is m.Mapping.NONE and finding.verdict is Verdict.CLOSED:
                advice.append(f"Open UDP port {self.port} for IPv{finding.version} in this machine's firewall.")
            is_behind = finding.version == 4 and finding.mapping in (m.Mapping.SAME, m.Mapping.VARYING)
            if is_behind and finding.own_host is not None:
                advice.append(
                    f"Forward UDP port {self.port} on your router to {finding.own_host}, and start with --port {self.port}. "
                    "Behind a provider's NAT (CGNAT) that does not help; IPv6 may."
                )
        return advice

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "version": __version__,
            "python": platform.python_version(),
            "system": f"{sys.platform} {platform.machine()}",
            "reach": self.reach.value,
            "means": MEANINGS[self.reach],
            "port": self.port,
            "relays": [
                {
                    "address": relay.address,
                    "seen_at": relay.seen_at,
                    "rtt_s": relay.rtt_s,
                    "by_websocket": relay.is_by_websocket,
                    "error": relay.error,
                }
                for relay in self.relays
            ],
            "ip": {
                f"v{finding.version}": {
                    "own_address": finding.own_host,
                    "mapping": finding.mapping.name.lower(),
                    "dial_back": finding.verdict.name.lower(),
                }
                for finding in self.findings
            },
            "advice": self.advice(),
        }

    def lines(self) -> list[str]:
        """Return it for people."""
        lines = [f"swarm {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"]
        for relay in self.relays:
            if relay.seen_at is None:
                lines.append(f"Relay {relay.address}: {relay.error}")
                continue
            rtt = "" if relay.rtt_s is None else f", round trip {relay.rtt_s * 1e3:.0f} ms"
            how = " by WebSocket, not by UDP" if relay.is_by_websocket else f", sees this machine at {relay.seen_at}"
            lines.append(f"Relay {relay.address}: answers{how}{rtt}")
        for finding in self.findings:
            own = finding.own_host or "none"
            lines.append(f"IPv{finding.version}: own address {own}; {NAMES[finding.mapping]}; {finding.verdict.value}")
        lines.append(f"Result: {self.reach.value}. {MEANINGS[self.reach]}")
        return lines + self.advice()


def doctor(registry: RegistryOption = DEFAULT_REGISTRY, port: PortOption = 0, as_json: JsonOption = False) -> None:
    """Tell how others can reach this machine: public, hole-punchable or relayed, why, and which port to open."""
    report = run_async(_examine(registry, port))
    if as_json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    if not any(relay.seen_at for relay in report.relays):
        raise typer.Exit(1)


async def _examine(registry: str, port: int) -> Report:
    nodes = await settle_registries(registry, Folders.from_environment())
    host = "::" if own_hosts(frozenset((6,))) else "0.0.0.0"
    async with (
        Endpoint(Identity.generate(), host=host, port=port, handler=_answer, serves=(m.GetStatus,)) as endpoint,
        PathFinder(endpoint, takes_calls=False) as finder,
    ):
        relays = await asyncio.gather(*(_ask_relay(finder, node) for node in nodes))
        await asyncio.sleep(SETTLE_S)
        verdicts = await finder.reach.check()
        findings = []
        for version in sorted(endpoint.families):
            own = own_hosts(frozenset((version,)))
            if own or version == 4:
                findings.append(
                    Finding(
                        version=version,
                        own_host=own[0] if own else None,
                        mapping=finder.mapping(version),
                        verdict=verdicts[version],
                    )
                )
        return Report(reach=finder.how_reached(), port=endpoint.port, relays=tuple(relays), findings=tuple(findings))


async def _ask_relay(finder: PathFinder, node: RegistryAddress) -> RelayFinding:
    where = format_address(node.address)
    start = time.monotonic()
    try:
        connection = await finder.dial(node.address, expected=node.node, timeout_s=DIAL_TIMEOUT_S)
        asked = time.monotonic()
        await connection.request(m.GetMembers(known=()), timeout_s=DIAL_TIMEOUT_S)
        rtt_s = time.monotonic() - asked
    except (NetworkError, RemoteProtocolError, UserError) as error:
        took_s = time.monotonic() - start
        return RelayFinding(
            address=where,
            seen_at=None,
            rtt_s=None,
            is_by_websocket=False,
            error=f"no answer in {took_s:.0f} s: {error}",
        )
    by = connection.path.address[0]
    is_by_websocket = plain_ip(by).is_loopback and not plain_ip(node.address[0]).is_loopback
    return RelayFinding(
        address=where,
        seen_at=connection.observed_address or "",
        rtt_s=rtt_s,
        is_by_websocket=is_by_websocket,
        error="",
    )


async def _answer(connection: Connection, request: m.Request) -> m.Response:
    return m.Status(data=b"{}")
