"""NAT routers as nftables rules: the usual kinds, by what they map and what they let in (RFC 4787). Text only.

    kind                 maps by                  lets in, once the inside has sent
    full-cone            inside address           anybody
    address-restricted   inside address           hosts it has sent to
    port-restricted      inside address           addresses and ports it has sent to
    symmetric            inside address and       the same
                         destination
    udp-blocked          no UDP at all

Linux's masquerading keeps the inside port while it is free, so it maps by inside address, and lets in what conntrack knows: that
is port-restricted. With a random port for each flow it is symmetric. The wider kinds remember who sent, and translate what comes.
"""

from __future__ import annotations

from enum import StrEnum

LAN = "lan0"  # the bridge to the inside
INSIDE = "10.0.0.0/8"  # what all insides are part of


class NatKind(StrEnum):
    """What a router does with UDP."""

    FULL_CONE = "full-cone"
    ADDRESS_RESTRICTED = "address-restricted"
    PORT_RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"
    UDP_BLOCKED = "udp-blocked"


def ruleset(
    kind: NatKind, *, wan: str, address: str, hairpin: bool = False, moved: dict[str, int] | None = None
) -> str:
    """Return the router's whole rules, replacing those before, for `nft -f`.

    Args:
        wan: the device to the outside, whose address is `address`.
        hairpin: hosts inside reach each other by the outside address too.
        moved: inside address -> the outside port that its UDP gets, instead of its own: a rebound mapping.
    """
    keeps = kind in (NatKind.FULL_CONE, NatKind.ADDRESS_RESTRICTED)
    lines = [
        "table ip nat",
        "delete table ip nat",
        "table inet guard",
        "delete table inet guard",
        "table ip nat {",
        " map inside { type inet_service : ipv4_addr . inet_service; flags dynamic,timeout; timeout 120s; size 4096; }",
        " set known { type ipv4_addr . inet_service; flags dynamic,timeout; timeout 120s; size 4096; }",
        " chain out { type filter hook forward priority 0;",
    ]
    port_of = f"{{ {', '.join(f'{host} : {port}' for host, port in moved.items())} }}" if moved else ""
    if keeps:
        for host, port in (moved or {}).items():
            lines.append(
                f'  iifname "{LAN}" ip saddr {host} meta l4proto udp update @inside {{ {port} : ip saddr . udp sport }}'
            )
            lines.append(f'  iifname "{LAN}" ip saddr {host} meta l4proto udp update @known {{ ip daddr . {port} }}')
            lines.append(f'  iifname "{LAN}" ip saddr {host} meta l4proto udp return')
        lines.append(f'  iifname "{LAN}" meta l4proto udp update @inside {{ udp sport : ip saddr . udp sport }}')
        lines.append(f'  iifname "{LAN}" meta l4proto udp update @known {{ ip daddr . udp sport }}')
    lines += [" }", " chain pre { type nat hook prerouting priority -100;"]
    if keeps:
        allowed = "" if kind is NatKind.FULL_CONE else " ip saddr . udp dport @known"
        lines.append(f'  iifname "{wan}" ip daddr {address} meta l4proto udp{allowed} dnat ip to udp dport map @inside')
    if hairpin and keeps:
        lines.append(f'  iifname "{LAN}" ip daddr {address} meta l4proto udp dnat ip to udp dport map @inside')
    lines += [" }", " chain post { type nat hook postrouting priority 100;"]
    if hairpin:
        lines.append(f'  oifname "{LAN}" ip saddr {INSIDE} ct status dnat meta l4proto udp snat ip to {address}')
    if port_of:
        lines.append(
            f'  oifname "{wan}" meta l4proto udp ip saddr @moved snat ip to {address} : ip saddr map {port_of}'
        )
    how = " fully-random" if kind is NatKind.SYMMETRIC else ""
    lines.append(f'  oifname "{wan}" meta l4proto udp masquerade{how}')
    lines.append(f'  oifname "{wan}" masquerade')
    lines.append(" }")
    if moved:
        lines.append(f" set moved {{ type ipv4_addr; elements = {{ {', '.join(moved)} }} }}")
    blocked = "  meta l4proto udp drop" if kind is NatKind.UDP_BLOCKED else ""
    lines += [
        "}",
        "table inet guard {",
        # What comes unasked is dropped before conntrack keeps it: else it would take the port that a host inside is about to use.
        f' chain in {{ type filter hook input priority 0; iifname "{wan}" ct state new,invalid drop; }}',
        " chain through { type filter hook forward priority 10; policy drop;",
        blocked,
        f'  iifname "{LAN}" accept',
        "  ct state established,related accept",
        "  ct status dnat accept",
        " }",
        "}",
    ]
    return "\n".join(line for line in lines if line) + "\n"
