"""Where a direct path between two nodes may be, and why there is none: what each offers, and what their NATs allow. Pure.

Both sides probe each other's addresses at the same moment (`paths`): each side's probes open its own NAT for the other's. It
works unless a NAT gives this pair an address that nobody could know before, and the other NAT lets only known ones in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from swarm.errors import UserError
from swarm.ip import plain_ip
from swarm.net.addresses import SocketAddress, format_address, literal_address
from swarm.wire.messages import MAX_CANDIDATES, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One node's word where it sees us.

    Attributes:
        by: that node's address.
        at: where it sees us.
        own: the address of ours that packets to it leave from, with the port of our socket; None: not known.
    """

    by: SocketAddress
    at: SocketAddress
    own: SocketAddress | None


def mapping_of(sightings: Collection[Sighting], version: int) -> Mapping:
    """Return what the sightings of one IP version say of the NAT between us and the others.

    Two nodes at different addresses must have seen us before a NAT counts as one of a kind.
    """
    seen = [each for each in sightings if plain_ip(each.by[0]).version == version and _is_far(each.by[0])]
    if not seen:
        return Mapping.UNKNOWN
    if all(each.own is not None and each.own == each.at for each in seen):
        return Mapping.NONE
    if len({each.at for each in seen}) > 1:
        return Mapping.VARYING
    return Mapping.SAME if len({each.by[0] for each in seen}) > 1 else Mapping.UNKNOWN


def candidates(sightings: Collection[Sighting], own: Sequence[SocketAddress]) -> tuple[str, ...]:
    """Return the addresses to offer, likeliest first: where others see us, then our own."""
    found: dict[str, None] = {}
    for address in [each.at for each in sightings] + list(own):
        found[format_address(address)] = None
    return tuple(found)[:MAX_CANDIDATES]


MAX_PORTS_PER_IP = 2  # of one offer: where others see the node, and its own; more would knock at a third party's doors


def usable(offered: Sequence[str], *, may_be_here: bool) -> list[SocketAddress]:
    """Return those of a node's offered addresses that may be probed; `may_be_here`: addresses of this machine, too."""
    addresses: list[SocketAddress] = []
    for text in offered[:MAX_CANDIDATES]:
        try:
            address = literal_address(text)
        except UserError:
            continue
        ip = plain_ip(address[0])
        if address[0].endswith(".255") or (ip.is_loopback and not may_be_here):
            continue
        if isinstance(ip, ipaddress.IPv6Address) and ip.is_link_local:  # means nothing without a zone
            continue
        n_ports = sum(plain_ip(known[0]) == ip for known in addresses)
        if address not in addresses and n_ports < MAX_PORTS_PER_IP:
            addresses.append(address)
    return addresses


def is_hopeless(ours: int, theirs: int) -> bool:
    """Return whether punching cannot work: both NATs give each destination another address, or there is no UDP."""
    return ours == theirs == Mapping.VARYING or Mapping.BLOCKED in (ours, theirs)


def why_relayed(ours: int, theirs: int) -> str:
    """Return why two nodes have no direct path, as far as their NATs tell."""
    for mapping, who in ((ours, "this side's"), (theirs, "the other side's")):
        if mapping == Mapping.BLOCKED:
            return f"{who} network lets no UDP through"
    if is_hopeless(ours, theirs):
        return "both sides are behind NATs that use another port for each destination (symmetric), so no hole can be punched"
    if Mapping.VARYING in (ours, theirs):
        who = "this side" if ours == Mapping.VARYING else "the other side"
        return f"{who} is behind a symmetric NAT, and the other NAT lets in only ports it knows"
    return "no probe came through: a firewall on one side lets no unknown UDP in, or there is no common kind of IP"


def _is_far(host: str) -> bool:
    return not plain_ip(host).is_loopback
