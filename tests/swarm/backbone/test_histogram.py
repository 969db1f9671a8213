"""When a backbone tells how it uses its experts, and what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from swarm.backbone.histogram import CHECK_S, MIN_TOKENS, PUBLISH_S, HistogramPublisher
from swarm.dispatch.popularity import Popularity
from swarm.errors import NetworkError, SwarmError
from swarm.identity import Identity
from swarm.ids import ModelId
from swarm.registry.announcer import SequenceNumbers
from swarm.registry.records import MAX_TTL_S, ExpertAnnouncement, ModelOffer, RoutingHistogram, SignedRecord, verify
from tests import virtual_time
from tests.virtual_time import now

ME = Identity.from_seed(b"b" * 32)
MODEL = ModelId(b"m" * 32)
LAYERS = (1, 3)


class Registry:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.published: list[tuple[float, RoutingHistogram]] = []
        self.error: SwarmError | None = None

    async def publish(self, signed: SignedRecord) -> int:
        if self.error is not None:
            raise self.error
        record = verify(signed)
        assert isinstance(record, RoutingHistogram)
        self.published.append((now(), record))
        return record.seq

    async def observed_address(self) -> str:
        return "192.0.2.1:1"

    async def holders(self, model: ModelId) -> list[ExpertAnnouncement]:
        raise NotImplementedError

    async def offers(self, model: ModelId | None = None) -> list[ModelOffer]:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def publishing(registry: Registry) -> AsyncIterator[Popularity]:
    popularity = Popularity(LAYERS, 4, now=now())
    numbers = SequenceNumbers(None, clock_ns=lambda: 10**18)
    publisher = HistogramPublisher(registry, ME, numbers, popularity, MODEL, now=now)
    task = asyncio.create_task(publisher.run())
    try:
        yield popularity
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def use(popularity: Popularity, n_tokens: int, experts: tuple[int, ...] = (0, 0, 0, 1)) -> None:
    for layer in LAYERS:
        popularity.add(layer, np.resize(np.array(experts, np.int32), (n_tokens, 1)))


def test_what_is_told_are_steps_for_each_expert_and_the_rate() -> None:
    async def main() -> None:
        registry = Registry()
        async with publishing(registry) as popularity:
            use(popularity, 400)
            await asyncio.sleep(CHECK_S + 1)
            ((_, record),) = registry.published
        assert (record.node, record.model, record.ttl_s) == (ME.node_id, MODEL, MAX_TTL_S)
        assert [layer for layer, _ in record.loads] == [1, 3]
        shares = record.shares(3)
        assert shares[2:] == (0.0, 0.0)
        assert 2.5 < shares[0] / shares[1] < 3.5, "steps of the square root of two"
        assert 0.95 * 400 <= record.n_tokens <= 400
        assert record.window_s == round(CHECK_S)

    virtual_time.run(main())


def test_a_few_short_requests_are_not_told() -> None:
    async def main() -> None:
        registry = Registry()
        async with publishing(registry) as popularity:
            use(popularity, MIN_TOKENS - 1)
            await asyncio.sleep(10 * PUBLISH_S)
        assert registry.published == []

    virtual_time.run(main())


def test_it_is_told_every_few_minutes_and_sooner_after_a_big_change() -> None:
    async def main() -> None:
        registry = Registry()
        async with publishing(registry) as popularity:
            use(popularity, 10_000)
            await asyncio.sleep(CHECK_S + 2 * PUBLISH_S + 1)
            times = [at for at, _ in registry.published]
            # The rate of one burst falls by half again and again in the first minutes; then only the period counts.
            registry.published.clear()
            await asyncio.sleep(10 * PUBLISH_S)
            gaps = np.diff([at for at, _ in registry.published])
            assert len(gaps) >= 5
            assert times == sorted(times)
            use(popularity, 5_000, (2, 3))
            registry.published.clear()
            await asyncio.sleep(CHECK_S + 1)
            assert len(registry.published) == 1
            assert registry.published[0][1].shares(1)[2] > 0
        assert all(CHECK_S - 1e-6 <= gap <= PUBLISH_S + CHECK_S + 1e-6 for gap in gaps)

    virtual_time.run(main())


def test_a_registry_that_is_away_is_told_later() -> None:
    async def main() -> None:
        registry = Registry()
        registry.error = NetworkError("no registry answers")
        async with publishing(registry) as popularity:
            use(popularity, 1000)
            await asyncio.sleep(5 * CHECK_S)
            registry.error = None
            await asyncio.sleep(CHECK_S + 1)
        assert len(registry.published) == 1

    virtual_time.run(main())
