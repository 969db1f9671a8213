"""An announcer keeps one record alive through lost renewals, outages and restarts, and takes it back at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from swarm.errors import NetworkError, SwarmError, UserError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.announcer import RENEW_S, RETRY_S, TTL_S, WITHDRAW_TIMEOUT_S, Announcer, SequenceNumbers
from swarm.registry.node import RegistryNode
from swarm.registry.records import MAX_SEQ, ExpertAnnouncement, ModelOffer, Record, SignedRecord, Withdrawal, verify
from swarm.wire import messages as m
from tests import virtual_time
from tests.sample_records import sample_announcement
from tests.virtual_time import now

A = Identity.from_seed(b"a" * 32)
MODEL = ModelId(b"m" * 32)
START_MS = 1_800_000_000_000
ROUND_TRIP_S = 0.01


def clock_at(ms: int) -> SequenceNumbers:
    return SequenceNumbers(None, clock_ns=lambda: ms * 1_000_000)


def record(seq: int, address: str) -> ExpertAnnouncement:
    return sample_announcement(A.node_id, seq=seq, ttl_s=TTL_S, model=MODEL, addresses=(address,))


class OneNodeRegistry:
    """A Registry of one node in memory, a round trip away, that can be away and tells what was published when."""

    def __init__(self) -> None:
        self.node = RegistryNode(now=now)
        self.address = "192.0.2.7:4000"
        self.error: SwarmError | None = None
        self.hangs = False
        self.is_answer_lost = False
        self.published: list[tuple[float, Record]] = []

    async def publish(self, signed: SignedRecord) -> int:
        await asyncio.sleep(ROUND_TRIP_S / 2)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.published.append((now(), verify(signed)))
        answer = self.node.answer(A.node_id, m.Announce(record=signed.to_bytes()))
        assert isinstance(answer, m.Accepted)
        await asyncio.sleep(3600 if self.is_answer_lost else ROUND_TRIP_S / 2)
        return answer.highest_seq

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        return [verify(signed) for signed, _ in self.node.table.lookup(model, now())]  # type: ignore[misc]

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        return []

    async def observed_address(self) -> str:
        if self.error is not None:
            raise self.error
        return self.address

    @property
    def seqs(self) -> list[int]:
        return [each.seq for _, each in self.published]

    @property
    def is_listed(self) -> bool:
        return len(self.node.table.lookup(MODEL, now())) == 1


@contextlib.asynccontextmanager
async def announcing(registry: OneNodeRegistry, numbers: SequenceNumbers | None = None) -> AsyncIterator[Announcer]:
    """Run an announcer; leaving the block cancels it and waits for its end."""
    announcer = Announcer(registry, A, numbers or clock_at(START_MS), record)
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_the_record_carries_the_address_that_the_registry_sees() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
            (found,) = await registry.holders(MODEL)
            assert found.addresses == ("192.0.2.7:4000",)
            registry.address = "192.0.2.8:5000"  # a NAT that was restarted: the next renewal says so
            await asyncio.sleep(RENEW_S + 1)
            (found,) = await registry.holders(MODEL)
            assert found.addresses == ("192.0.2.8:5000",)

    virtual_time.run(main())


def test_it_renews_with_rising_numbers_so_early_that_three_renewals_may_be_lost() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
            for _ in range(600):
                await asyncio.sleep(1.0)
                assert registry.is_listed
            times = [at for at, _ in registry.published]
            assert registry.seqs == list(range(START_MS, START_MS + len(times)))
            assert np.diff(times) == pytest.approx(TTL_S / 4 + ROUND_TRIP_S)
            assert len(times) == 40

    virtual_time.run(main())


def test_nothing_is_announced_before_the_registry_took_it() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        registry.error = NetworkError("away")
        async with announcing(registry) as announcer:
            await asyncio.sleep(100)
            assert not announcer.is_announced.is_set()
            registry.error = None
            await asyncio.sleep(RETRY_S + 1)
            assert announcer.is_announced.is_set()

    virtual_time.run(main())


def test_an_outage_is_one_warning_and_ends_within_a_retry(caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 14: cut off for ten minutes, it announces itself again."""

    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
            for outage in (1, 2):
                caplog.clear()
                registry.error = NetworkError("cut off")
                await asyncio.sleep(600)
                assert not registry.is_listed
                assert [each.levelname for each in caplog.records] == ["WARNING"], f"outage {outage}"
                assert "cut off" in caplog.text
                registry.error = None
                await asyncio.sleep(RETRY_S + 2 * ROUND_TRIP_S)
                assert registry.is_listed
                assert [each.message for each in caplog.records][1:] == ["announced again"]

    with caplog.at_level(logging.INFO, "swarm.registry.announcer"):
        virtual_time.run(main())


def test_the_end_withdraws_the_record_with_a_higher_seq() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
        assert not registry.is_listed
        _, last = registry.published[-1]
        assert isinstance(last, Withdrawal)
        assert last.seq > registry.seqs[-2]

    virtual_time.run(main())


def test_what_may_have_arrived_is_withdrawn_even_if_the_answer_was_lost() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        registry.is_answer_lost = True
        async with announcing(registry) as announcer:
            await asyncio.sleep(1.0)
            assert registry.is_listed
            assert not announcer.is_announced.is_set()
        assert not registry.is_listed

    virtual_time.run(main())


def test_without_an_announcement_there_is_nothing_to_withdraw() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        registry.error = NetworkError("away")
        async with announcing(registry):
            await asyncio.sleep(0.5)
            registry.error = None
        assert registry.published == []

    virtual_time.run(main())


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_registry_that_is_away_at_the_end_delays_it_by_a_second_at_most(is_silent: bool) -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
            registry.hangs = is_silent
            registry.error = None if is_silent else NetworkError("away")
            started = now()
        assert now() - started <= WITHDRAW_TIMEOUT_S

    virtual_time.run(main())


def test_a_lost_count_jumps_above_what_the_registry_remembers() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry, clock_at(START_MS + 3_600_000)) as announcer:
            await announcer.is_announced.wait()
        highest = registry.seqs[-1]
        # Restarted with its state folder gone and its clock set back by two hours.
        async with announcing(registry, clock_at(START_MS - 3_600_000)) as announcer:
            await announcer.is_announced.wait()
            assert registry.is_listed
            assert registry.seqs[-1] == highest + 1
            n_published = len(registry.published)
            await asyncio.sleep(RENEW_S + 1)
            assert len(registry.published) == n_published + 1, "the count is found again: one try is enough"
        assert not registry.is_listed, "the withdrawal counts too"

    virtual_time.run(main())


def test_a_number_that_cannot_be_passed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        async with announcing(registry, clock_at(START_MS + 10**13)) as announcer:
            await announcer.is_announced.wait()
        caplog.clear()
        async with announcing(registry) as announcer:
            await announcer.is_announced.wait()
            assert not registry.is_listed
            assert "a registry holds a newer record" in caplog.text

    virtual_time.run(main())


def test_a_kill_and_a_restart_within_two_seconds_leave_one_entry() -> None:
    """Scenario 11."""

    async def main() -> None:
        registry = OneNodeRegistry()
        killed = Announcer(registry, A, clock_at(START_MS), record)
        await killed.announce()  # and no withdrawal
        await asyncio.sleep(1.5)
        async with announcing(registry, clock_at(START_MS + 1_500)) as announcer:
            await announcer.is_announced.wait()
            (found,) = await registry.holders(MODEL)
            assert found.seq == START_MS + 1_500

    virtual_time.run(main())


def test_an_address_that_no_record_may_carry_is_tried_again_and_not_the_end() -> None:
    async def main() -> None:
        registry = OneNodeRegistry()
        registry.address = "\x1b[2J"  # what a hostile registry says it sees
        async with announcing(registry):
            await asyncio.sleep(5)
            assert registry.published == []
            registry.address = "192.0.2.7:4000"
            await asyncio.sleep(RETRY_S + 1)
            assert registry.is_listed

    virtual_time.run(main())


# SequenceNumbers


def numbers(path: Path | None, ms: int) -> SequenceNumbers:
    return SequenceNumbers(path, clock_ns=lambda: ms * 1_000_000)


def test_numbers_start_at_the_clock_in_milliseconds_and_rise() -> None:
    found = numbers(None, START_MS)
    assert [found.next() for _ in range(3)] == [START_MS, START_MS + 1, START_MS + 2]


@pytest.mark.parametrize("ms", [START_MS, START_MS - 3_600_000, 0, START_MS + 5_000])
def test_numbers_rise_over_restarts_whatever_the_clock_does(tmp_path: Path, ms: int) -> None:
    path = tmp_path / "state" / "join.seq"
    highest = -1
    clock = START_MS
    for _ in range(4):
        found = numbers(path, clock)
        for _ in range(3):
            number = found.next()
            assert number > highest
            highest = number
        clock = ms


def test_the_clock_counts_once_it_has_passed_the_file(tmp_path: Path) -> None:
    numbers(tmp_path / "seq", START_MS).next()
    later = START_MS + 3_600_000
    assert numbers(tmp_path / "seq", later).next() == later


def test_numbers_rise_over_a_restart_after_more_than_one_reservation(tmp_path: Path) -> None:
    first = numbers(tmp_path / "seq", START_MS)
    taken = [first.next() for _ in range(SequenceNumbers._RESERVED + 5)]
    assert taken == list(range(START_MS, START_MS + len(taken)))
    assert numbers(tmp_path / "seq", 0).next() > taken[-1]


def test_a_jump_is_remembered_over_a_restart(tmp_path: Path) -> None:
    first = numbers(tmp_path / "seq", START_MS)
    first.go_above(START_MS + 10**9)
    number = first.next()
    assert number == START_MS + 10**9 + 1
    assert numbers(tmp_path / "seq", START_MS).next() > number


def test_nobody_can_make_a_node_use_up_its_numbers() -> None:
    found = numbers(None, START_MS)
    for seq in (MAX_SEQ, 2**64 - 1, START_MS + 10**12 + 1):
        found.go_above(seq)
    found.go_above(START_MS - 1)
    assert found.next() == START_MS


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"twelve", b"-5", b"9" * 30, b"9" * 5000, "²".encode(), b"1.5"])
def test_a_damaged_file_leaves_the_clock(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "seq"
    path.write_bytes(content)
    found = numbers(path, START_MS)
    assert found.next() == START_MS
    assert numbers(path, 0).next() > START_MS, "and it is mended"


def test_a_file_that_cannot_be_read_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "seq").mkdir()
    with pytest.raises(UserError, match="cannot read"):
        numbers(tmp_path / "seq", START_MS)


def test_a_folder_that_cannot_be_written_does_not_end_a_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    found = SequenceNumbers(None, clock_ns=lambda: START_MS * 1_000_000)
    found._path = tmp_path / "state" / "seq"
    assert [found.next(), found.next()] == [START_MS, START_MS + 1]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
