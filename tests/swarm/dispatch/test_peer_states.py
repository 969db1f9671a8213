"""Since when a peer is what it is."""

from __future__ import annotations

from swarm.dispatch.peer_states import FORGET_S, MAX_PEERS, PeerLog, PeerState
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry.records import ExpertAnnouncement
from tests.sample_records import sample_announcement


def record(number: int, *, seq: int = 1) -> ExpertAnnouncement:
    return sample_announcement(
        NodeId(number.to_bytes(32)),
        seq=seq,
        model=ModelId(b"m" * 32),
        experts=ExpertSet.of([0], [1]),
        addresses=("192.0.2.1:1",),
    )


def update(log: PeerLog, now: float, **states: PeerState) -> None:
    records = {name: record(int(name[1:])) for name in states}
    log.update(now, {records[name].node: (records[name], state) for name, state in states.items()})


def test_a_state_keeps_its_beginning_until_it_changes() -> None:
    log = PeerLog()
    update(log, 10.0, n1=PeerState.IN_USE)
    update(log, 20.0, n1=PeerState.IN_USE)
    (view,) = log.views
    assert (view.state, view.state_since, view.seen_since) == (PeerState.IN_USE, 10.0, 10.0)
    update(log, 30.0, n1=PeerState.QUARANTINED)
    (view,) = log.views
    assert (view.state, view.state_since, view.seen_since) == (PeerState.QUARANTINED, 30.0, 10.0)


def test_who_is_no_longer_announced_is_gone_since_then_and_seen_anew_when_back() -> None:
    log = PeerLog()
    update(log, 10.0, n1=PeerState.IN_USE, n2=PeerState.IN_USE)
    update(log, 40.0, n2=PeerState.IN_USE)
    update(log, 50.0, n2=PeerState.IN_USE)
    gone, _ = log.views
    assert (gone.state, gone.state_since, gone.seen_since) == (PeerState.GONE, 40.0, 10.0)
    update(log, 60.0, n1=PeerState.IN_USE, n2=PeerState.IN_USE)
    back, _ = log.views
    assert (back.state, back.state_since, back.seen_since) == (PeerState.IN_USE, 60.0, 60.0)


def test_the_newest_announcement_is_shown() -> None:
    log = PeerLog()
    update(log, 1.0, n1=PeerState.IN_USE)
    newer = record(1, seq=2)
    log.update(2.0, {newer.node: (newer, PeerState.IN_USE)})
    assert log.views[0].record.seq == 2


def test_the_gone_are_forgotten_after_a_day() -> None:
    log = PeerLog()
    update(log, 0.0, n1=PeerState.IN_USE)
    update(log, 1.0)
    update(log, FORGET_S)
    assert len(log.views) == 1
    update(log, 1.0 + FORGET_S)
    assert log.views == []


def test_the_log_is_bounded_and_forgets_the_gone_first() -> None:
    log = PeerLog()
    update(log, 0.0, n1=PeerState.IN_USE)
    for at in range(1, 4):
        names = {f"n{number}": PeerState.IN_USE for number in range(at * 10_000, at * 10_000 + MAX_PEERS // 2)}
        update(log, float(at), n1=PeerState.IN_USE, **names)
    assert len(log.views) == MAX_PEERS
    assert log.views[0].record == record(1)
