"""Tests on the virtual internet: they need root, `ip`, `nft` and `conntrack`."""

from __future__ import annotations

import os

import pytest

from swarm.emulation import internet


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    reason = internet.missing()
    if reason is not None:
        if os.environ.get("SWARM_REQUIRE_E2E"):
            pytest.fail(reason)
        pytest.skip(reason)
