"""The routers' rules as text; what they do to packets is checked in tests/e2e/internet."""

from __future__ import annotations

import pytest

from swarm.emulation.nat import LAN, NatKind, ruleset


def rules(kind: NatKind, **more: object) -> str:
    return ruleset(kind, wan="wan0", address="198.18.0.1", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NatKind)
def test_every_kind_drops_what_comes_unasked_before_it_takes_a_port(kind: NatKind) -> None:
    assert 'iifname "wan0" ct state new,invalid drop' in rules(kind)


def test_only_the_symmetric_kind_draws_ports_and_only_the_blocked_one_drops_udp() -> None:
    assert [kind for kind in NatKind if "fully-random" in rules(kind)] == [NatKind.SYMMETRIC]
    assert [kind for kind in NatKind if "meta l4proto udp drop" in rules(kind)] == [NatKind.UDP_BLOCKED]


def test_the_wider_kinds_lead_back_inside_and_the_restricted_one_only_for_those_it_knows() -> None:
    leading = [line for line in rules(NatKind.FULL_CONE).splitlines() if "dnat" in line and "wan0" in line]
    assert len(leading) == 1
    assert "@known" not in leading[0]
    known = [line for line in rules(NatKind.ADDRESS_RESTRICTED).splitlines() if "dnat" in line and "wan0" in line]
    assert "@known" in known[0]
    assert "dnat ip" not in rules(NatKind.PORT_RESTRICTED)


def test_a_moved_host_gets_its_new_port() -> None:
    text = rules(NatKind.PORT_RESTRICTED, moved={"10.1.0.2": 40_001})
    assert "snat ip to 198.18.0.1 : ip saddr map { 10.1.0.2 : 40001 }" in text
    assert "elements = { 10.1.0.2 }" in text


def test_hairpin_is_for_the_inside_only() -> None:
    text = rules(NatKind.FULL_CONE, hairpin=True)
    assert f'iifname "{LAN}" ip daddr 198.18.0.1' in text
    assert "hairpin" not in rules(NatKind.FULL_CONE)
