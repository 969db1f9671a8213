"""Which addresses a stranger's name may lead to."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver
from yarl import URL

from swarm.sources.public_only import GuardedResolver, PrivateAddress, is_public, is_public_literal


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_public_addresses(host: str) -> None:
    assert is_public(host)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2002:a9fe:a9fe::1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
        "::7f00:1",
        "::ffff:0:7f00:1",
        "localhost",
        "",
    ],
)
def test_everything_else_is_not(host: str) -> None:
    assert not is_public(host)


def test_a_urls_name_is_left_to_the_resolver_and_a_literal_is_not() -> None:
    assert is_public_literal(URL("https://h.example/m"))
    assert is_public_literal(URL("https://8.8.8.8/m"))
    assert not is_public_literal(URL("https://[::1]/m"))
    assert not is_public_literal(URL("https://127.0.0.1/m"))


class Fixed(AbstractResolver):
    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        return [
            {"hostname": host, "host": each, "port": port, "family": family, "proto": 0, "flags": 0}
            for each in self.hosts
        ]

    async def close(self) -> None:
        pass


async def test_of_a_names_addresses_only_the_public_ones_are_connected_to() -> None:
    guarded = GuardedResolver(Fixed("10.0.0.1", "8.8.8.8"), is_public_only=True)
    assert [each["host"] for each in await guarded.resolve("h.example", 443)] == ["8.8.8.8"]
    with pytest.raises(PrivateAddress, match=r"h\.example has no public address"):
        await GuardedResolver(Fixed("10.0.0.1", "::1"), is_public_only=True).resolve("h.example", 443)


async def test_without_the_guard_all_are_and_public_hosts_are_remembered() -> None:
    free = GuardedResolver(Fixed("10.0.0.1", "8.8.8.8"), is_public_only=False)
    assert len(await free.resolve("h.example", 443)) == 2
    assert free.public_hosts == {"h.example"}
    near = GuardedResolver(Fixed("10.0.0.1"), is_public_only=False)
    assert len(await near.resolve("nas.lan", 80)) == 1
    assert near.public_hosts == set()
