"""How experts are shared out over the peers of a local swarm. Its processes are tested in tests/e2e/emulation."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.emulation.processes import LocalSwarm, contiguous_shares


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_shares_cover_every_expert_once_in_order_and_evenly(sizes: tuple[int, int]) -> None:
    n_expert, n_peers = sizes
    shares = contiguous_shares(n_expert, n_peers)
    assert [expert for share in shares for expert in share] == list(range(n_expert))
    assert len(shares) == n_peers
    lengths = {len(share) for share in shares}
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


@pytest.mark.parametrize(("n_expert", "n_peers"), [(4, 0), (4, 5), (0, 1), (4, -1)])
def test_a_peer_without_an_expert_is_refused(n_expert: int, n_peers: int) -> None:
    with pytest.raises(ValueError, match=f"got {n_peers}, expected 1 to {n_expert}"):
        contiguous_shares(n_expert, n_peers)


class FakeChild:
    """Notes in which order children end."""

    def __init__(self, name: str, ended: list[str], error: BaseException | None = None) -> None:
        self.arguments = (name,)
        self._ended = ended
        self._error = error

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self._ended.append(self.arguments[0])
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, OSError("gone"), asyncio.CancelledError()])
async def test_relays_end_last_and_whatever_becomes_of_the_others(error: BaseException | None) -> None:
    ended: list[str] = []
    swarm = LocalSwarm(Path())
    children: list[Any] = [FakeChild("relay", ended), FakeChild("join", ended, error), FakeChild("relay", ended)]
    swarm._children = children
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await swarm.__aexit__(None, None, None)
    assert ended == ["join", "relay", "relay"]
