"""When a TLS link asks elsewhere, in virtual time: late answers, stalls, and what it costs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from swarm.errors import ConnectionLost, RemoteRefused
from swarm.identity import Identity
from swarm.net import tls_link
from swarm.net.link_copies import LinkCopies
from swarm.net.patience import COPY_BURST, COPY_SHARE, LEAST_LATE_S, MOST_LATE, MOST_LATE_S
from swarm.net.tls_link import (
    BEATEN_S,
    MAX_PONGS,
    N_STRIKES,
    STALLED_S,
    TlsLink,
)
from swarm.net.tls_records import RecordKind, RecordReader, encode_exchange, encode_record
from swarm.wire import messages as m
from swarm.wire import session as s
from swarm.wire.frames import encode
from swarm.wire.rows import RowCodec
from tests import virtual_time
from tests.sample_messages import dispatch
from tests.virtual_time import now

CLIENT, SERVER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
SERVICE_S = 0.001
TIMEOUT_S = 30.0


def result(factor: float) -> m.Result:
    return m.Result(codec=RowCodec.F32, rows=np.full((1, 8), factor, np.float32), compute_us=0, queue_us=0)


class Transport(asyncio.Transport):
    """What is written comes out at the other end at once, unless the path is stopped; then when it goes on."""

    def __init__(self, link: TlsLink) -> None:
        super().__init__()
        self._link = link
        self.is_stopped = self._is_closed = False
        self._held = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._held += bytes(data)
        self.go_on(is_stopped=self.is_stopped)

    def go_on(self, *, is_stopped: bool = False) -> None:
        self.is_stopped = is_stopped
        if not is_stopped and self._held:
            data, self._held = self._held, b""
            asyncio.get_running_loop().call_soon(self._link.data_received, data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True


class World:
    """A client's link, the server that answers after `service_s`, and the other way to ask."""

    def __init__(self) -> None:
        self.service_s = SERVICE_S
        self.is_peer_slow = False  # whatever carries its answers
        self.n_elsewhere = self.n_served = 0
        self.server = TlsLink(
            lambda: s.Session(SERVER, is_client=False, now=now(), nonce=bytes(32), serves=(m.Dispatch,)),
            on_request=self._serve,
            on_cancel=lambda link, exchange: None,
            on_open=lambda link: True,
            on_gone=lambda link: None,
        )
        self.link = TlsLink(
            lambda: s.Session(CLIENT, is_client=True, now=now(), expected=SERVER.node_id),
            on_request=lambda link, exchange, request: None,
            on_cancel=lambda link, exchange: None,
            on_open=lambda link: True,
            on_gone=lambda link: None,
        )
        self.forth, self.back = Transport(self.server), Transport(self.link)
        self.link.connection_made(self.forth)
        self.server.connection_made(self.back)

    def _serve(self, link: TlsLink, exchange: int, request: m.Request) -> None:
        self.n_served += 1
        asyncio.get_running_loop().call_later(self.service_s, link.respond, exchange, result(1.0))

    def _elsewhere(self) -> asyncio.Future[m.Response]:
        self.n_elsewhere += 1
        answer: asyncio.Future[m.Response] = asyncio.get_running_loop().create_future()
        after_s = max(SERVICE_S, self.service_s if self.is_peer_slow else 0.0)

        def settle() -> None:
            if not answer.done():
                answer.set_result(result(2.0))

        asyncio.get_running_loop().call_later(after_s, settle)
        return answer

    async def ask(self, n_pairs: int = 1, *, has_retry: bool = True) -> tuple[float, float]:
        """Return the answer's number (1: of the link, 2: from elsewhere) and the seconds that it took."""
        began = now()
        retry = self._elsewhere if has_retry else None
        answer = await self.link.start(dispatch(n_pairs), timeout_s=TIMEOUT_S, retry=retry)
        assert isinstance(answer, m.Result)
        return float(answer.rows[0, 0]), now() - began

    async def warm_up(self) -> None:
        await self.link.opened
        for _ in range(30):
            assert (await self.ask())[0] == 1.0
        assert self.n_elsewhere == 0

    def stop(self) -> None:
        self.forth.is_stopped = self.back.is_stopped = True

    async def go_on(self) -> None:
        """Let the path go on, and what was held arrive."""
        self.forth.go_on()
        self.back.go_on()
        await asyncio.sleep(2 * SERVICE_S)


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_link, "clock", now)


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


def test_a_link_that_has_used_up_its_numbers_says_so_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        monkeypatch.setattr(tls_link, "MAX_EXCHANGE", world.link._session._next_exchange)  # type: ignore[union-attr]
        assert (await world.ask())[0] == 1.0
        n_served = world.n_served
        with pytest.raises(ConnectionLost, match="numbers"):
            world.link.start(dispatch(), timeout_s=TIMEOUT_S, retry=world._elsewhere)
        await asyncio.sleep(1.0)
        assert (world.n_served, world.n_elsewhere) == (n_served, 0), "its asker goes elsewhere"
        assert not world.link.is_open

    virtual_time.run(main())


def test_a_stall_costs_no_more_than_its_bound_and_mostly_far_less() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        for _ in range(20):
            world.stop()
            number, taken_s = await world.ask()
            assert number == 2.0
            stalled_s = taken_s - SERVICE_S
            assert stalled_s <= max(3 * SERVICE_S, SERVICE_S + 0.2)
            assert stalled_s <= SERVICE_S + LEAST_LATE_S + 0.002, "the timer's own steps"
            assert world.link.is_stalled
            await world.go_on()
            assert not world.link.is_stalled
            for _ in range(10):
                assert (await world.ask())[0] == 1.0
        assert world.link.is_open
        assert world.n_elsewhere == 20
        world.link.close()
        world.server.close()

    run(main())


def test_a_slow_answer_still_counts_if_it_is_there_first() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.service_s = SERVICE_S + 3 * LEAST_LATE_S
        world.is_peer_slow = True
        number, _ = await world.ask()
        assert (number, world.n_elsewhere) == (1.0, 1)
        world.link.close()
        world.server.close()

    run(main())


def test_a_peer_that_has_become_slow_does_not_get_all_of_its_work_twice() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.service_s, world.is_peer_slow = 0.05, True
        for _ in range(200):
            await world.ask()
        assert world.n_elsewhere <= COPY_BURST + 200 * COPY_SHARE
        before = world.n_elsewhere
        for _ in range(20):
            await world.ask()
        assert world.n_elsewhere == before, "it is known by now"
        world.link.close()
        world.server.close()

    run(main())


def test_a_peer_that_is_slow_without_losing_anything_is_not_asked_twice_however_long_it_takes() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.link._patience.n_copies, world.service_s, world.is_peer_slow = 0.0, 2.0, True
        answers = await asyncio.gather(*(world.ask() for _ in range(4)))
        answers.append(await world.ask(200))  # nor is what has no measure yet
        for number, taken_s in answers:
            assert number == 1.0
            assert taken_s == pytest.approx(2.0, abs=0.01)
        assert world.n_elsewhere == 0
        assert world.link.is_open
        world.link.close()
        world.server.close()

    run(main())


def test_a_peer_that_is_known_to_take_seconds_is_pinged_as_soon_as_any_other() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.service_s = 10.0
        for _ in range(3):
            assert (await world.ask(200, has_retry=False))[0] == 1.0
        await asyncio.sleep(s.KEEPALIVE_S + 0.1)  # its timer is that of a quiet link, seconds later
        began, asked = now(), asyncio.create_task(world.ask(200, has_retry=False))
        await asyncio.sleep(s.PING_AFTER_S + 0.01)
        assert world.link._session is not None
        assert world.link._session._last_heard >= began + s.PING_AFTER_S, "a pong"
        assert (await asked)[0] == 1.0
        world.link.close()
        world.server.close()

    run(main())


class SlowLine(Transport):
    """Carries so many bytes a second, in packets."""

    def __init__(self, link: TlsLink, bytes_s: float) -> None:
        super().__init__(link)
        self._bytes_s = bytes_s
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._held += bytes(data)
        if self._timer is None:
            self._carry(b"")

    def _carry(self, packet: bytes) -> None:
        if packet and not self.is_stopped:
            self._link.data_received(packet)
        packet, self._held, self._timer = self._held[:1500], self._held[1500:], None
        if packet:
            self._timer = asyncio.get_running_loop().call_later(len(packet) / self._bytes_s, self._carry, packet)

    def get_write_buffer_size(self) -> int:
        return len(self._held)


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_what_still_moves_is_not_asked_for_twice_however_slow_the_line(direction: str) -> None:
    """The ping waits behind the request, or its pong behind the answer; on a slow line a second one makes both slower."""
    row = np.full((1, 100_000), 1.0, np.float32)

    async def main() -> None:
        world = World()
        await world.warm_up()
        message = dispatch(200)
        if direction == "forth":
            world.link._transport = line = SlowLine(world.server, 1e5)
            message = dataclasses.replace(message, rows=row)
        else:
            world.server._transport = line = SlowLine(world.link, 1e5)
            answer = m.Result(codec=RowCodec.F32, rows=row, compute_us=0, queue_us=0)
            world.server._on_request = lambda link, exchange, request: link.respond(exchange, answer)
        began = now()
        await world.link.start(message, timeout_s=TIMEOUT_S, retry=world._elsewhere)
        assert now() - began == pytest.approx(4.0, abs=0.1)
        assert now() - began > s.LOST_AFTER_S, "without a pong"
        assert world.n_elsewhere == 0
        asked = world.link.start(message, timeout_s=TIMEOUT_S, retry=world._elsewhere)
        await asyncio.sleep(1.0)
        line.is_stopped, line._held = True, b""  # the path is cut
        await asyncio.sleep(s.LOST_AFTER_S + 1.0)
        assert asked.done()
        assert world.n_elsewhere == 1
        world.link.close()
        world.server.close()

    run(main())


def test_a_small_request_behind_a_long_one_on_a_slow_line_goes_elsewhere_and_the_link_goes_on() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.link._transport = SlowLine(world.server, 1e5)
        long = dataclasses.replace(dispatch(200), rows=np.full((1, 100_000), 1.0, np.float32))
        answer = world.link.start(long, timeout_s=TIMEOUT_S, retry=world._elsewhere)
        for n in range(4):
            number, taken_s = await world.ask()
            assert number == 2.0
            assert taken_s < 0.1
            assert world.n_elsewhere == n + 1
            await asyncio.sleep(0.5)
        assert world.link.is_open
        await answer
        assert world.n_elsewhere == 4
        assert not world.link.is_stalled
        world.link.close()
        world.server.close()

    run(main())


def test_what_is_large_is_asked_elsewhere_only_when_it_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World()
        monkeypatch.setattr(tls_link, "is_copied", lambda message: False)
        await world.warm_up()
        world.stop()
        number, taken_s = await world.ask()
        assert number == 2.0
        assert taken_s == pytest.approx(SERVICE_S + MOST_LATE_S + SERVICE_S, abs=0.005)
        world.link.close()
        world.server.close()

    run(main())


def test_a_copy_that_is_refused_does_not_fail_what_is_still_under_way() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.service_s = 0.02
        refused = asyncio.get_running_loop().create_future()
        refused.set_exception(RemoteRefused("too many", remote_code=m.ErrorCode.BUSY))
        answer = await world.link.start(dispatch(), timeout_s=TIMEOUT_S, retry=lambda: refused)
        assert isinstance(answer, m.Result)
        assert world.link.n_retried == 1
        refused = asyncio.get_running_loop().create_future()
        refused.set_exception(RemoteRefused("too many", remote_code=m.ErrorCode.BUSY))
        world.stop()
        lost = world.link.start(dispatch(), timeout_s=TIMEOUT_S, retry=lambda: refused)
        await asyncio.sleep(0.5)
        assert not lost.done()
        world.link.close()
        with pytest.raises(ConnectionLost):
            await lost
        world.server.close()

    run(main())


def test_work_of_another_size_is_measured_by_itself() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.service_s = 0.1
        assert (await world.ask(200))[0] == 1.0
        assert (await world.ask(200))[0] == 1.0
        assert world.n_elsewhere == 0
        world.link.close()
        world.server.close()

    run(main())


def test_a_link_from_which_nothing_comes_is_given_up() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.stop()
        await world.ask()
        await asyncio.sleep(STALLED_S)
        assert not world.link.is_open
        world.server.close()

    run(main())


def test_a_link_that_stalls_again_and_again_is_given_up() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        for n in range(N_STRIKES):
            world.stop()
            assert world.link.is_open, n
            await world.ask()
            await asyncio.sleep(MOST_LATE_S + 0.01)
            await world.go_on()
        assert not world.link.is_open
        world.server.close()

    run(main())


def test_what_cannot_be_asked_elsewhere_waits() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.stop()
        waiting = asyncio.create_task(world.ask(has_retry=False))
        await asyncio.sleep(0.5)
        await world.go_on()
        assert (await waiting)[0] == 1.0
        assert not world.link.is_stalled
        world.stop()
        waiting = asyncio.create_task(world.ask(has_retry=False))
        await asyncio.sleep(0.01)
        world.link.close()
        with pytest.raises(ConnectionLost):
            await waiting
        world.server.close()

    run(main())


def test_what_is_overdue_is_asked_elsewhere_whatever_else_was() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        world.link._patience.n_copies = 0.0
        world.stop()
        number, taken_s = await world.ask()
        assert number == 2.0
        assert taken_s == pytest.approx(max(MOST_LATE * SERVICE_S, SERVICE_S + MOST_LATE_S) + SERVICE_S, abs=0.005)
        world.link.close()
        world.server.close()

    run(main())


def test_a_request_that_does_not_arrive_in_time_is_given_up() -> None:
    async def main() -> None:
        world = World()
        await world.warm_up()
        await asyncio.sleep(2 * s.GREETING_DEADLINE_S)  # that timer is over
        session = world.server._session
        assert session is not None
        exchange = session._next_of_theirs
        head = encode(dispatch())[:20]
        world.server.data_received(b"".join(encode_exchange(exchange, head, is_end=False)))
        assert session._arriving
        await asyncio.sleep(s.ARRIVAL_DEADLINE_S + 1.0)
        assert not session._arriving, "what has arrived of it is held no more"
        world.link.close()
        world.server.close()

    run(main())


class Doubled:
    """A client's link that is doubled by a second one, to one server."""

    def __init__(self) -> None:
        self.first, self.second = World(), World()
        self._copies = LinkCopies()
        self.n_cancelled = 0
        for world in (self.first, self.second):
            world.server._on_request = functools.partial(self._on_request, world)
            world.server._on_cancel = self._on_cancel
        self.first.link.second, self.first.link.is_copying = self.second.link, True

    def _on_request(self, world: World, link: TlsLink, exchange: int, request: m.Request) -> None:
        assert isinstance(request, m.Dispatch)
        link.on_answered = self._copies.answered
        if link.copy_number is None or self._copies.is_first(link, exchange, link.copy_number, request):
            world._serve(link, exchange, request)

    def _on_cancel(self, link: TlsLink, exchange: int) -> None:
        self.n_cancelled += 1

    async def open(self) -> None:
        await asyncio.gather(self.first.link.opened, self.second.link.opened)

    @property
    def n_served(self) -> int:
        return self.first.n_served + self.second.n_served

    def close(self) -> None:
        for world in (self.first, self.second):
            world.link.close()
            world.server.close()


def assert_in_time(answer: tuple[float, float]) -> None:
    """Over one of the links, not late."""
    number, taken_s = answer
    assert number == 1.0
    assert taken_s == pytest.approx(SERVICE_S, abs=1e-4)


def test_a_small_dispatch_goes_over_both_links_and_is_served_once() -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        for n in range(20):
            assert_in_time(await both.first.ask())
            await asyncio.sleep(SERVICE_S)
            assert both.n_served == n + 1
        assert (both.first.n_served, both.first.n_elsewhere) == (20, 0)
        assert len(both._copies) == 0, "each was asked for twice"
        sent = both.second.link.bytes_sent
        both.first.link.is_copying = False
        await both.first.ask()
        await asyncio.sleep(SERVICE_S)
        assert both.second.link.bytes_sent == sent
        both.close()

    run(main())


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_what_one_link_is_late_with_the_other_brings_in_time(direction: str) -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        for n in range(10):
            late = getattr(both.first if n % 2 else both.second, direction)
            late.is_stopped = True
            assert_in_time(await both.first.ask())
            late.go_on()
            await asyncio.sleep(2 * SERVICE_S)
            assert both.n_served == n + 1
        assert both.first.n_elsewhere == 0
        assert both.first.link.is_open
        assert both.second.link.is_open
        assert not both.first.link.is_stalled
        both.close()

    run(main())


def test_the_same_number_stands_before_a_request_on_both_links() -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        for world in (both.first, both.second):
            world.forth.is_stopped = True
        answer = both.first.link.start(dispatch(), timeout_s=TIMEOUT_S)
        await asyncio.sleep(0.0001)
        first, second = (RecordReader().feed(world.forth._held) for world in (both.first, both.second))
        for records in (first, second):
            assert [record.kind for record in records] == [RecordKind.COPY, RecordKind.END]
        assert first[0].exchange == second[0].exchange
        assert first[1].data == second[1].data
        for world in (both.first, both.second):
            world.forth.go_on()
        await answer
        both.close()

    run(main())


def test_who_waits_no_more_is_not_served_on_either_link() -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        both.first.service_s = 1.0
        answer = both.first.link.start(dispatch(), timeout_s=TIMEOUT_S)
        await asyncio.sleep(0.1)
        answer.cancel()
        await asyncio.sleep(0.1)
        assert both.n_cancelled == 2
        both.close()

    run(main())


def test_a_link_whose_second_answers_everything_is_given_up_and_takes_it_along() -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        both.first.stop()
        began = now()
        while both.first.link.is_open:
            assert now() - began < 2 * BEATEN_S
            assert (await both.first.ask())[0] == 1.0
            await asyncio.sleep(0.05)
        assert now() - began >= BEATEN_S
        assert not both.second.link.is_open
        both.close()

    run(main())


def test_without_its_second_a_link_goes_on_alone() -> None:
    async def main() -> None:
        both = Doubled()
        await both.open()
        both.second.link.close()
        assert_in_time(await both.first.ask())
        assert both.first.link.is_open
        both.close()

    run(main())


def never_read(world: World) -> None:
    """Let the server's transport take nothing more."""
    world.server.pause_writing()
    world.back.is_stopped = True


def test_pings_of_who_does_not_read_their_pongs_are_bounded() -> None:
    async def main() -> None:
        world = World()
        await world.link.opened
        never_read(world)
        world.server.data_received(MAX_PONGS * encode_record(1, RecordKind.PING))
        assert world.server.is_open
        world.server.resume_writing()
        world.server.pause_writing()
        world.server.data_received(MAX_PONGS * encode_record(1, RecordKind.PING))
        assert world.server.is_open, "they were written"
        world.server.data_received(encode_record(1, RecordKind.PING))
        assert not world.server.is_open
        assert world.server._n_unsent() == 0
        world.link.close()

    run(main())


def test_refusals_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(tls_link, "MAX_UNSENT_BYTES", 10_000)
        world = World()
        await world.link.opened
        never_read(world)
        told: list[int] = []
        world.server._on_unsent = lambda link, n_given, n_held: told.append(n_held)
        for n in range(1000):
            if not world.server.is_open:
                break
            data = encode(m.GetStatus())  # not served here
            world.server.data_received(b"".join(encode_exchange(2 * n, data, is_end=True)))
            assert world.server._n_unsent() <= 11_000
        assert not world.server.is_open
        assert max(told) >= 9_000, "it counts with the answers that all others hold"
        world.link.close()

    run(main())


def test_long_messages_are_written_piece_by_piece_as_the_transport_takes_them_and_arrive_whole() -> None:
    class Slow(Transport):
        """Asks to pause at each write, as one does whose socket is full."""

        def __init__(self, writer: TlsLink, reader: TlsLink) -> None:
            super().__init__(reader)
            self.sizes: list[int] = []
            self._writer = writer

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.sizes.append(len(data))
            super().write(data)
            self._writer.pause_writing()

    async def main() -> None:
        world = World()
        await world.link.opened
        slow = Slow(world.link, world.server)
        world.link._transport = slow
        rows = np.full((200, 1024), 0.25, np.float32)  # 800 KB
        message = m.Dispatch(
            model_tag=bytes(8),
            layer=0,
            rows_codec=RowCodec.F32,
            result_codec=RowCodec.F32,
            row_counts=np.ones(200, np.uint8),
            expert_ids=np.zeros(200, np.uint16),
            weights=np.ones(200, np.float32),
            rows=rows,
        )
        answers = [world.link.start(message, timeout_s=TIMEOUT_S) for _ in range(2)]
        await asyncio.sleep(0)
        assert len(slow.sizes) == 1, "the rest waits"
        assert world.link._n_unsent() > 2 * rows.nbytes - tls_link.WRITE_BYTES - 1024
        while not all(answer.done() for answer in answers):
            world.link.resume_writing()
            await asyncio.sleep(SERVICE_S)
        assert world.n_served == 2
        assert max(slow.sizes) <= tls_link.WRITE_BYTES + 1024
        assert world.link._n_unsent() == 0

    run(main())
