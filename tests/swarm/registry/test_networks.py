"""What an address says: its network, its reach."""

from __future__ import annotations

import pytest

from swarm.registry.networks import Scope, host_of, is_one_network, prefix_of, rival_prefix, scope_of


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("127.0.0.1", Scope.MACHINE),
        ("::1", Scope.MACHINE),
        ("::ffff:127.0.0.1", Scope.MACHINE),
        ("10.1.2.3", Scope.SITE),
        ("172.31.255.1", Scope.SITE),
        ("172.32.0.1", Scope.WORLD),
        ("192.168.0.1", Scope.SITE),
        ("169.254.0.1", Scope.SITE),
        ("100.64.0.1", Scope.SITE),
        ("fd00::1", Scope.SITE),
        ("fe80::1", Scope.SITE),
        ("198.51.100.1", Scope.WORLD),
        ("2001:db8::1", Scope.WORLD),
        ("::ffff:10.0.0.1", Scope.SITE),
    ],
)
def test_scope(host: str, scope: Scope) -> None:
    assert scope_of(host) is scope


def test_only_addresses_of_the_world_compete() -> None:
    assert rival_prefix("198.51.100.7:1") == prefix_of("198.51.100.99") == "198.51.100.0/24"
    assert rival_prefix("[2001:db8:1::7]:1") == "2001:db8:1::/48"
    assert rival_prefix("192.168.1.7:1") is None
    assert rival_prefix("127.0.0.1:1") is None


@pytest.mark.parametrize(("address", "host"), [("192.0.2.1:7", "192.0.2.1"), ("[2001:db8::1]:7", "2001:db8::1")])
def test_host_of_a_records_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_name_has_no_scope() -> None:
    with pytest.raises(ValueError):
        scope_of("relay.example")


@pytest.mark.parametrize(
    ("addresses", "is_one"),
    [
        (["198.51.100.1:1", "198.51.100.250:2"], True),
        (["198.51.100.1:1", "198.51.101.1:1"], False),
        (["198.51.100.1:1", "10.0.0.1:1"], False),
        (["10.0.0.1:1", "192.168.0.1:1", "127.0.0.1:1"], True),
    ],
)
def test_addresses_of_one_host_are_in_one_network(addresses: list[str], is_one: bool) -> None:
    assert is_one_network(addresses) is is_one
