"""An address is the same whatever clothes it wears."""

from __future__ import annotations

import pytest

from swarm.ip import plain_ip


def test_an_ipv4_address_in_ipv6_clothes_is_itself() -> None:
    assert str(plain_ip("::ffff:192.0.2.1")) == str(plain_ip("192.0.2.1")) == "192.0.2.1"
    assert plain_ip("::ffff:127.0.0.1").is_loopback


def test_other_ipv6_addresses_stay_as_they_are() -> None:
    assert str(plain_ip("2001:db8::1")) == "2001:db8::1"


@pytest.mark.parametrize("host", ["localhost", "", "192.0.2.1:80", "::ffff:192.0.2.256"])
def test_what_is_no_literal_is_refused(host: str) -> None:
    with pytest.raises(ValueError):
        plain_ip(host)
