"""Who counts as a holder: listed, greeted, not failed. Over the real pool, a fake network, and virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import replace
from typing import cast

import pytest

from swarm.dispatch import holders as holders_module
from swarm.dispatch.holders import MIN_REFRESH_S, REFRESH_S, RETRY_S, Holders
from swarm.dispatch.peer_states import PeerState
from swarm.dispatch.placement import Placement
from swarm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ExpertUnavailable,
    NetworkError,
    RemoteProtocolError,
    RemoteRefused,
    SwarmError,
)
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import DIAL_TIMEOUT_S, Endpoint
from swarm.net.pool import Pool
from swarm.registry.records import ExpertAnnouncement, ModelOffer, SignedRecord
from swarm.wire import messages as m
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.virtual_time import now

MODEL = ModelId(b"m" * 32)
US = Identity.from_seed(b"u" * 32)
A, B, C = (NodeId(bytes([n]) * 32) for n in (10, 20, 30))
LAYERS = (2, 3)
E = 4
SOON_S = REFRESH_S + 0.5  # a look at the registry and a handshake later


class ListRegistry:
    """A Registry that lists what the test says, or is away."""

    def __init__(self) -> None:
        self.listed: dict[NodeId, ExpertAnnouncement] = {}
        self.error: SwarmError | None = None
        self.n_asked = 0

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        assert model == MODEL
        self.n_asked += 1
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return [self.listed[node] for node in sorted(self.listed)]

    async def publish(self, signed: SignedRecord) -> int:
        raise NotImplementedError

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        raise NotImplementedError

    async def observed_address(self) -> str:
        raise NotImplementedError


class World:
    """A registry, peers at 10.0.0.N, and the holders under test, which run inside `watching`."""

    def __init__(self, *, allowed: Collection[NodeId] | None = None) -> None:
        self.registry = ListRegistry()
        self.network = FakeNetwork()
        self.pool = Pool(cast(Endpoint, FakeEndpoint(self.network, US)))
        self.placement = Placement(MODEL, LAYERS, E, require_exact=False)
        self.holders = Holders(self.registry, self.pool, self.placement, MODEL, allowed=allowed, now=now)

    def announce(
        self, node: NodeId, experts: Iterable[int] = range(E), *, seq: int = 1, port: int = 1, ttl_s: int = 60
    ) -> None:
        self.registry.listed[node] = ExpertAnnouncement(
            node=node,
            seq=seq,
            ttl_s=ttl_s,
            model=MODEL,
            model_name="tiny",
            experts=ExpertSet.of(LAYERS, experts),
            addresses=(f"10.0.0.{node.raw[0]}:{port}",),
            exact_kernels=True,
            wire_versions=(1,),
        )

    def listen(self, node: NodeId, *, port: int = 1) -> FakeNode:
        server = FakeNode(node_id=node, answer=lambda asker, request: m.Status(data=b"{}"))
        self.network.nodes[f"10.0.0.{node.raw[0]}", port] = server
        return server

    def start(self, node: NodeId, experts: Iterable[int] = range(E), *, seq: int = 1, port: int = 1) -> FakeNode:
        """Let a peer listen and announce itself."""
        self.announce(node, experts, seq=seq, port=port)
        return self.listen(node, port=port)

    def kill(self, node: NodeId, *, port: int = 1) -> None:
        """End a peer as kill -9 does, once that was noticed; the registry still lists it."""
        self.network.nodes.pop((f"10.0.0.{node.raw[0]}", port)).lose_connections()

    @property
    def in_use(self) -> list[NodeId]:
        return list(self.placement.destinations)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.holders.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self.pool.close()


def test_a_peer_counts_only_once_it_was_greeted() -> None:
    async def main() -> None:
        world = World()
        world.start(A, range(2)).handshake_s = 1.0
        world.start(B, range(2, 4)).handshake_s = 0.1
        async with world.watching():
            await asyncio.sleep(0.5)
            assert world.in_use == [B]
            assert world.holders.missing() == {2: (0, 1), 3: (0, 1)}
            await asyncio.sleep(1.0)
            assert world.in_use == [A, B]
            assert world.holders.missing() == {}
            world.holders.require_all()

    virtual_time.run(main())


def test_with_a_list_of_allowed_peers_no_other_is_even_dialled() -> None:
    async def main() -> None:
        world = World(allowed=[B])
        stranger = world.start(A)
        world.start(B, range(2))
        async with world.watching():
            await asyncio.sleep(10.0)
            assert world.in_use == [B]
            assert world.holders.missing() == {2: (2, 3), 3: (2, 3)}
            assert world.pool.connection(A) is None
            assert stranger.connections == []
            assert [view.record.node for view in world.holders.peers()] == [B]

    virtual_time.run(main())


def test_a_peer_that_does_not_answer_never_counts_and_is_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        world.announce(A)
        async with world.watching():
            await asyncio.sleep(30)
            assert world.in_use == []
            # Each try takes the dial's timeout, then RETRY_S, then up to one look at the registry.
            assert world.network.count("dial", A) in range(2, 1 + int(30 / (DIAL_TIMEOUT_S + RETRY_S)) + 1)
            assert [each.levelname for each in caplog.records] == ["WARNING"], "one warning, not one for each try"
            world.listen(A)
            await asyncio.sleep(DIAL_TIMEOUT_S + RETRY_S + SOON_S)
            assert world.in_use == [A]

    virtual_time.run(main())


def test_a_peer_that_fails_again_after_it_was_in_use_is_a_new_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        world.announce(A)
        async with world.watching():
            for n_warnings in (1, 2):
                await asyncio.sleep(DIAL_TIMEOUT_S + 1)
                assert [each.levelname for each in caplog.records] == ["WARNING"] * n_warnings
                world.listen(A)
                await asyncio.sleep(DIAL_TIMEOUT_S + RETRY_S + SOON_S)
                assert world.in_use == [A]
                world.kill(A)

    virtual_time.run(main())


def test_a_slow_greeting_is_not_begun_twice() -> None:
    async def main() -> None:
        world = World()
        world.start(A).handshake_s = 3.9
        async with world.watching():
            for _ in range(20):
                world.holders._wake.set()
                await asyncio.sleep(0.15)
                assert sum("_greet" in repr(task.get_coro()) for task in asyncio.all_tasks()) == 1

    virtual_time.run(main())


def test_a_higher_seq_is_reason_to_try_at_once() -> None:
    async def main() -> None:
        world = World()
        world.announce(A, seq=1)
        async with world.watching():
            await asyncio.sleep(DIAL_TIMEOUT_S + 1)
            n_dials = world.network.count("dial")
            world.start(A, seq=2)
            await asyncio.sleep(SOON_S)
            assert world.network.count("dial") == n_dials + 1
            assert world.in_use == [A]

    virtual_time.run(main())


def test_another_node_at_the_announced_address_does_not_count() -> None:
    async def main() -> None:
        world = World()
        world.announce(A)
        world.network.nodes["10.0.0.10", 1] = FakeNode(node_id=B, answer=lambda asker, request: None)
        async with world.watching():
            await asyncio.sleep(SOON_S)
            assert world.in_use == []

    virtual_time.run(main())


def test_a_live_connection_is_kept_over_renewals() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            for seq in range(2, 8):
                await asyncio.sleep(15)
                world.announce(A, seq=seq)
                assert world.in_use == [A]
            assert world.network.count("dial") == 1

    virtual_time.run(main())


def test_a_peer_that_moved_is_dialled_at_its_new_address() -> None:
    async def main() -> None:
        world = World()
        old = world.start(A, port=1)
        async with world.watching():
            await asyncio.sleep(1)
            world.start(A, seq=2, port=2)
            await asyncio.sleep(SOON_S)
            connection = await world.holders.connection(A)
            assert connection.address == ("10.0.0.10", 2)
            assert not old.connections[0].is_open
            assert world.in_use == [A]

    virtual_time.run(main())


def test_a_kill_and_a_return_within_two_seconds_leave_one_entry_and_exact_coverage() -> None:
    """Scenario 11; the dead connection has not been noticed yet when the peer is back."""

    async def main() -> None:
        world = World()
        world.start(B, range(2, 4))
        first = world.start(A, range(2), seq=1_000, port=1)
        async with world.watching():
            await asyncio.sleep(1)
            first.is_up = False
            del world.network.nodes["10.0.0.10", 1]
            await asyncio.sleep(1.5)
            world.start(A, range(2), seq=2_500, port=2)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A, B]
            assert world.placement.n_assigned() == {A: 4, B: 4}
            assert world.holders.missing() == {}
            assert (await world.holders.connection(A)).address == ("10.0.0.10", 2)

    virtual_time.run(main())


def test_a_ghost_goes_when_its_lease_ends_and_nobody_has_to_act() -> None:
    """Scenario 12."""

    async def main() -> None:
        world = World()
        world.start(A, range(4))
        world.start(B, range(4))
        async with world.watching():
            await asyncio.sleep(1)
            world.kill(A)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [B]
            assert world.holders.missing() == {}
            del world.registry.listed[A]
            await asyncio.sleep(60)
            assert world.placement.announcement(A) is None

    virtual_time.run(main())


def test_a_peer_of_a_wire_version_too_far_away_is_not_dialled_and_a_person_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders_module, "WIRE_VERSIONS", (2, 3))

    async def main() -> None:
        world = World()
        for node, versions in ((A, (3, 4)), (B, (1,)), (C, (4, 5))):
            world.start(node)
            world.registry.listed[node] = replace(world.registry.listed[node], wire_versions=versions)
        async with world.watching():
            await asyncio.sleep(60)
            assert world.in_use == [A]
            assert world.network.count("dial") == 1
            states = {view.record.node: view.state for view in world.holders.peers()}
            assert states == {A: PeerState.IN_USE, B: PeerState.SET_ASIDE, C: PeerState.SET_ASIDE}
            world.registry.listed[B] = replace(world.registry.listed[B], wire_versions=(1, 2), seq=9)  # upgraded
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A, B]

    virtual_time.run(main())
    told = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(told) == 2
    assert any(f"peer {B.short}" in line and "other side's program is too old" in line for line in told)
    assert any(f"peer {C.short}" in line and "this program is too old" in line for line in told)


def test_an_old_announcement_played_back_changes_nothing() -> None:
    """Scenario 13, should even the registry play it back."""

    async def main() -> None:
        world = World()
        world.start(A, range(4), seq=5, port=2)
        async with world.watching():
            await asyncio.sleep(1)
            world.start(A, range(1), seq=4, port=1)
            await asyncio.sleep(120)
            assert world.in_use == [A]
            assert world.holders.missing() == {}
            assert world.network.count("dial") == 1

    virtual_time.run(main())


# Registry away, restarted, hostile


def test_a_registry_that_is_away_changes_nothing_and_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            world.registry.error = NetworkError("away")
            await asyncio.sleep(600)
            assert world.in_use == [A]
            assert world.holders.missing() == {}
            assert [each.levelname for each in caplog.records] == ["WARNING"]
            world.registry.error = None
            world.start(B)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A, B]

    virtual_time.run(main())


def test_even_while_the_registry_is_away_a_dead_peer_is_dropped_and_greeted_when_it_is_back() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            world.registry.error = NetworkError("away")
            world.kill(A)
            await asyncio.sleep(SOON_S)
            assert world.in_use == []
            world.listen(A)
            await asyncio.sleep(DIAL_TIMEOUT_S + RETRY_S + SOON_S)
            assert world.in_use == [A]

    virtual_time.run(main())


def test_a_registry_that_has_lost_its_memory_does_not_end_a_running_session() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            world.registry.error = NetworkError("restarting")
            await asyncio.sleep(300)
            world.registry.error, listed = None, world.registry.listed.pop(A)
            for _ in range(100):  # 50 s: peers announce themselves again within 15 s
                await asyncio.sleep(0.5)
                assert world.in_use == [A]
            world.registry.listed[A] = listed
            await asyncio.sleep(300)
            assert world.in_use == [A]
            assert world.network.count("dial") == 1

    virtual_time.run(main())


def test_a_connected_peer_that_stays_unlisted_for_its_ttl_is_dropped() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        world.announce(A, ttl_s=20)
        async with world.watching():
            await asyncio.sleep(1)
            del world.registry.listed[A]
            await asyncio.sleep(19)
            assert world.in_use == [A]
            await asyncio.sleep(2 * REFRESH_S + 1)
            assert world.in_use == []

    virtual_time.run(main())


def test_a_peer_that_leaves_is_dropped_at_the_next_look() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            del world.registry.listed[A]
            world.kill(A)
            await asyncio.sleep(SOON_S)
            assert world.in_use == []
            assert world.network.count("dial") == 1, "nobody looks for it"

    virtual_time.run(main())


def test_a_flood_of_new_names_pushes_out_no_peer_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "MAX_HOLDERS", 3)

    async def main() -> None:
        world = World()
        world.start(C)
        async with world.watching():
            await asyncio.sleep(1)
            for n in range(1, 9):  # all below C
                world.announce(NodeId(bytes([n]) * 32))
            await asyncio.sleep(60)
            assert world.in_use == [C]
            assert len(world.holders._announced) == 3

    virtual_time.run(main())


def test_greetings_are_bounded_and_end_with_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders_module, "MAX_HOLDERS", 4)

    async def main() -> None:
        world = World()
        most = 0
        async with world.watching():
            for wave in range(30):  # always other names, none of which answers
                world.registry.listed.clear()
                for n in range(8):
                    world.announce(NodeId(bytes([1 + n, wave]) * 16))
                world.holders._wake.set()
                await asyncio.sleep(0.15)
                greeting = [task for task in asyncio.all_tasks() if "_greet" in repr(task.get_coro())]
                most = max(most, len(greeting))
        assert most == 4
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    virtual_time.run(main())


# Failed requests


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("no answer within the deadline"),
        RemoteRefused("refused: internal error", remote_code=m.ErrorCode.INTERNAL),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_peer_that_failed_is_tried_again_after_a_while_that_doubles(error: SwarmError) -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            for shut_s in (1.0, 2.0, 4.0):
                world.holders.mark_down(A, error)
                assert world.in_use == []
                await asyncio.sleep(shut_s - 0.01)
                assert world.in_use == []
                await asyncio.sleep(2 * MIN_REFRESH_S)
                assert world.in_use == [A], "it gets another chance, without a new announcement"
            world.holders.succeeded(A)
            await asyncio.sleep(100)
            world.holders.mark_down(A, error)
            await asyncio.sleep(1 + 2 * MIN_REFRESH_S)
            assert world.in_use == [A], "after a good while, a failure is the first again"

    virtual_time.run(main())


def test_a_peer_that_failed_is_on_trial_from_its_return_until_it_has_answered_well() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            assert list(world.holders.on_trial(now())) == []
            world.holders.mark_down(A, DeadlineExceeded("no answer within the deadline"))
            assert list(world.holders.on_trial(now())) == []
            await asyncio.sleep(1.0 + 2 * MIN_REFRESH_S)
            assert world.in_use == list(world.holders.on_trial(now())) == [A]
            world.holders.succeeded(A)
            assert list(world.holders.on_trial(now())) == []

    virtual_time.run(main())


@pytest.mark.parametrize(
    "error",
    [
        RemoteProtocolError("wrong answer"),
        RemoteRefused("refused: leaving", remote_code=m.ErrorCode.SHUTTING_DOWN),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_peer_that_broke_the_protocol_or_leaves_is_down_until_it_announces_a_higher_seq(error: SwarmError) -> None:
    async def main() -> None:
        world = World()
        server = world.start(A, seq=7)
        async with world.watching():
            await asyncio.sleep(1)
            if isinstance(error, RemoteProtocolError):
                server.connections[0].close(error)  # as the dispatcher does: a new connection does not mend it
            world.holders.mark_down(A, error)
            assert world.in_use == []
            await asyncio.sleep(60)
            assert world.in_use == []
            world.announce(A, seq=8)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A]

    virtual_time.run(main())


def test_a_connection_that_is_lost_again_and_again_costs_time() -> None:
    async def main() -> None:
        world = World()
        server = world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            for shut_s in (0.0, 1.0, 2.0):
                server.lose_connections()
                world.holders.mark_down(A, ConnectionLost("silent for 3.0 s"))
                assert world.in_use == []
                await asyncio.sleep(max(0.0, shut_s - 0.01))
                assert world.in_use == []
                await asyncio.sleep(3 * MIN_REFRESH_S)
                assert world.in_use == [A]

    virtual_time.run(main())


def test_a_lost_connection_is_mended_by_a_new_greeting() -> None:
    async def main() -> None:
        world = World()
        server = world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            server.lose_connections()
            world.holders.mark_down(A, ConnectionLost("silent for 3.0 s"))
            assert world.in_use == []
            await asyncio.sleep(2 * MIN_REFRESH_S)
            assert world.in_use == [A], "it is looked for at once, and needs no new announcement"

    virtual_time.run(main())


def test_when_one_holder_fails_another_takes_its_experts() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        world.start(B)
        async with world.watching():
            await asyncio.sleep(1)
            assert world.placement.n_assigned() == {A: 4, B: 4}
            world.holders.mark_down(A, DeadlineExceeded("late"))
            assert world.placement.n_assigned() == {B: 8}
            assert world.holders.missing() == {}

    virtual_time.run(main())


# connection


def test_a_lost_connection_is_dialled_anew_in_the_middle_of_a_request() -> None:
    async def main() -> None:
        world = World()
        server = world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            first = await world.holders.connection(A)
            assert await world.holders.connection(A) is first
            server.lose_connections()
            second = await world.holders.connection(A)
            assert second is not first
            assert second.is_open
            world.kill(A)
            started = now()
            with pytest.raises(DeadlineExceeded):
                await world.holders.connection(A)
            assert now() - started == holders_module.REDIAL_TIMEOUT_S

    virtual_time.run(main())


def test_a_peer_that_nobody_announces_has_no_connection() -> None:
    async def main() -> None:
        with pytest.raises(NetworkError, match=f"peer {A.short} is no longer announced"):
            await World().holders.connection(A)

    virtual_time.run(main())


# wait_complete


def test_waiting_ends_soon_after_the_last_expert_has_a_holder() -> None:
    async def main() -> None:
        world = World()
        world.start(A, range(2))
        async with world.watching():
            await asyncio.sleep(1)

            async def join() -> None:
                await asyncio.sleep(5.3)  # just after a look at the registry that nobody hastened
                world.start(B, range(2, 4))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(join())
                started = now()
                await world.holders.wait_complete(30)
            assert 5.3 < now() - started < 5.3 + 5 * MIN_REFRESH_S

    virtual_time.run(main())


def test_waiting_too_long_names_layer_and_experts() -> None:
    async def main() -> None:
        world = World()
        world.start(A, [0, 2])
        async with world.watching():
            started = now()
            with pytest.raises(ExpertUnavailable) as caught:
                await world.holders.wait_complete(3.0)
            assert now() - started == pytest.approx(3.0)
            assert (caught.value.layer, caught.value.experts) == (2, (1, 3))
            assert "layer 2, experts 1, 3" in str(caught.value)

    virtual_time.run(main())


def test_waiting_for_what_is_there_takes_no_time() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        async with world.watching():
            await asyncio.sleep(1)
            started, n_asked = now(), world.registry.n_asked
            await world.holders.wait_complete(0.0)
            assert (now(), world.registry.n_asked) == (started, n_asked)

    virtual_time.run(main())


def test_impatience_does_not_flood_the_registry(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        async with world.watching():
            with pytest.raises(ExpertUnavailable):
                await world.holders.wait_complete(10.0)
            assert world.registry.n_asked <= 10 / MIN_REFRESH_S
            n_asked = world.registry.n_asked
            await asyncio.sleep(100)
            assert world.registry.n_asked - n_asked <= 100 / REFRESH_S + 1

    with caplog.at_level(logging.DEBUG):
        virtual_time.run(main())


def test_a_peer_that_is_still_loading_is_not_greeted() -> None:
    async def main() -> None:
        world = World()
        server = world.start(A)
        world.registry.listed[A] = replace(world.registry.listed[A], is_loading=True)
        async with world.watching():
            await asyncio.sleep(SOON_S)
            assert world.in_use == []
            assert server.connections == []
            assert world.holders.peers() == []
            world.announce(A, seq=2)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A]

    virtual_time.run(main())


def test_what_became_of_each_peer_is_told_with_its_beginning() -> None:
    async def main() -> None:
        world = World()

        def states() -> dict[NodeId, str]:
            return {view.record.node: view.state.value for view in world.holders.peers()}

        for node in (A, B, C):
            world.start(node)
        async with world.watching():
            await asyncio.sleep(SOON_S)
            assert states() == dict.fromkeys((A, B, C), "in use")
            assert world.holders.rtt_s(A) is None, "the fake connection measures none"
            began = now()
            world.kill(A)
            assert states()[A] == "unreachable", "before the next look at the registry"
            world.holders.mark_down(B, RemoteRefused("bye", remote_code=m.ErrorCode.SHUTTING_DOWN))
            world.holders.mark_down(C, DeadlineExceeded("no answer"))
            assert states() == {A: "unreachable", B: "leaving", C: "quarantined"}
            assert {view.state_since for view in world.holders.peers()} == {began}
            await asyncio.sleep(SOON_S)
            assert states()[C] == "on trial"
            world.holders.succeeded(C)
            world.announce(B, seq=2)
            del world.registry.listed[A]
            await asyncio.sleep(SOON_S)
            assert states() == {A: "gone", B: "in use", C: "in use"}
            world.holders.mark_down(C, RemoteProtocolError("nonsense"))
            await asyncio.sleep(3 * SOON_S)
            assert states()[C] == "set aside"

    virtual_time.run(main())


def test_a_barred_peer_is_dropped_with_its_connection_and_not_dialled_until_it_is_barred_no_more() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        world.start(B)
        barred: dict[NodeId, int] = {}
        world.holders.is_barred = lambda node, seq: seq <= barred.get(node, -1)
        async with world.watching():
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A, B]
            barred[A] = 1
            world.holders.recheck()
            assert world.in_use == [B], "at once"
            assert world.holders.open_connection(A) is None, "what it still owes is lost"
            n_dials = world.network.count("dial", A)
            await asyncio.sleep(60.0)
            assert world.in_use == [B]
            assert world.network.count("dial", A) == n_dials
            states = {view.record.node: view.state for view in world.holders.peers()}
            assert states == {A: PeerState.CAUGHT, B: PeerState.IN_USE}
            world.announce(A, seq=2)
            await asyncio.sleep(SOON_S)
            assert world.in_use == [A, B]

    virtual_time.run(main())


def test_who_shows_a_name_and_is_connected_can_be_asked() -> None:
    async def main() -> None:
        world = World()
        world.start(A)
        world.start(B)
        world.announce(C)  # does not listen
        for node in (A, C):
            world.registry.listed[node] = replace(world.registry.listed[node], name="Ann")
        async with world.watching():
            await asyncio.sleep(SOON_S)
            assert list(world.holders.named_connections()) == [A]
            world.kill(A)
            assert world.holders.named_connections() == {}

    virtual_time.run(main())
