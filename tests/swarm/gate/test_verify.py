"""The comparison itself: what counts as different, and that it asks both sides the same."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarm.errors import NetworkError, RemoteRefused
from swarm.gate.verify import PromptReport, VerifyReport, compare
from swarm.ids import NodeId
from swarm.wire import messages as m

V = 8
PEERS = [NodeId(bytes([i]) * 32) for i in (1, 2)]
N_LAYERS, N_USED = 3, 2


def rows(*values: float) -> npt.NDArray[np.float32]:
    """Return one row of logits for each value: that value, then 1, 2, ..."""
    logits = np.tile(np.arange(V, dtype=np.float32), (len(values), 1))
    logits[:, 0] = values
    return logits


# One prompt


def test_equal_rows_are_counted_and_not_different() -> None:
    report = PromptReport(2)
    report.add(0, rows(0.5, 0.25), rows(0.5, 0.25))
    report.add(2, rows(3.5), rows(3.5))
    assert (report.n_positions, report.n_different, report.first_difference) == (3, 0, -1)
    assert (report.max_difference, report.n_same_argmax) == (0.0, 3)


def test_one_last_bit_is_a_difference() -> None:
    report = PromptReport(3)
    report.add(0, rows(0.5, 0.25), rows(0.5, 0.25))
    report.add(2, rows(1, 1, 1, 1), rows(1, np.nextafter(np.float32(1), np.float32(2)), 1, 9))
    assert (report.n_positions, report.n_different, report.first_difference) == (6, 2, 3)
    assert report.max_difference == 8.0
    assert report.n_same_argmax == 5, "the row with a 9 is led by it on one side alone"


def test_the_first_difference_stays_the_first() -> None:
    report = PromptReport(1)
    report.add(0, rows(1), rows(2))
    report.add(1, rows(1), rows(5))
    assert (report.first_difference, report.max_difference) == (0, 4.0)


def test_minus_zero_is_not_zero() -> None:
    report = PromptReport(1)
    report.add(0, rows(-0.0), rows(0.0))
    assert (report.n_different, report.first_difference, report.max_difference) == (1, 0, 0.0)


@pytest.mark.parametrize(
    ("ours", "stock"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (math.inf, -math.inf), (3e38, -3e38)]
)
def test_what_is_no_number_on_one_side_is_the_largest_difference(ours: float, stock: float) -> None:
    report = PromptReport(2)
    report.add(0, rows(0, ours), rows(0.5, stock))
    assert report.n_different == 2
    assert report.max_difference == float(np.finfo(np.float32).max)
    assert json.loads(json.dumps(report.max_difference, allow_nan=False)) > 1e38


def test_the_same_nan_or_infinity_on_both_sides_is_equal() -> None:
    report = PromptReport(2)
    report.add(0, rows(math.nan, math.inf), rows(math.nan, math.inf))
    assert (report.n_different, report.max_difference) == (0, 0.0)
    both = rows(math.nan), rows(math.nan)
    both[0][0, 3] += 1
    report.add(2, *both)
    assert (report.n_different, report.max_difference) == (1, 1.0)


def test_another_nan_is_a_difference() -> None:
    other = rows(0)
    other.view(np.uint32)[0, 0] = 0x7FC00001
    report = PromptReport(1)
    report.add(0, rows(math.nan), other)
    assert report.n_different == 1


@pytest.mark.parametrize(("ours", "stock"), [((1, V), (3, V)), ((3, V), (1, V)), ((2, V), (2, V + 1))])
def test_logits_that_do_not_cover_the_same_are_refused(ours: tuple[int, int], stock: tuple[int, int]) -> None:
    report = PromptReport(1)
    with pytest.raises(ValueError, match="logits do not match"):
        report.add(0, np.zeros(ours, np.float32), np.zeros(stock, np.float32))
    assert report.n_positions == 0


# The verdict


def prompt_report(n_positions: int, n_different: int) -> PromptReport:
    return PromptReport(1, n_positions=n_positions, n_different=n_different)


@pytest.mark.parametrize(
    ("prompts", "identical"),
    [
        ([], False),
        ([prompt_report(5, 0)], True),
        ([prompt_report(5, 0), prompt_report(5, 1)], False),
        ([prompt_report(5, 0), prompt_report(0, 0)], False),
    ],
)
def test_identical_means_every_row_of_every_prompt_and_at_least_one(
    prompts: list[PromptReport], identical: bool
) -> None:
    assert VerifyReport(prompts=prompts).identical is identical


@pytest.mark.parametrize(("n", "expected"), [(10, True), (9, False), (11, False)])
def test_assignments_add_up_when_none_is_missing_and_none_is_doubled(n: int, expected: bool) -> None:
    assert VerifyReport(n_assignments=n, n_assignments_expected=10).assignments_add_up is expected


# The whole comparison, over models that are a formula


def formula(tokens: Sequence[int], position: int) -> npt.NDArray[np.float32]:
    """Return logits that depend on token and position; the likeliest next token is (3 * token + position) % V."""
    logits = np.zeros((len(tokens), V), np.float32)
    for row, token in enumerate(tokens):
        logits[row, (3 * token + position + row) % V] = 1 + token
    return logits


class FakeStock:
    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []
        self.n_clears = 0

    def clear(self) -> None:
        self.n_clears += 1

    def logits(self, tokens: Sequence[int], position: int) -> npt.NDArray[np.float32]:
        self.calls.append((list(tokens), position))
        return formula(tokens, position)


class FakeSwarm:
    """Engine, holders and peers in one: a dispatch adds to the peers' counters."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []
        self.n_clears = 0
        self.counts = {PEERS[0]: 1000, PEERS[1]: 50}  # from earlier work
        self.logits = np.empty(0, np.float32)
        self.faulty_at = -1
        self.status: dict[NodeId, Any] = {}
        self.context = SimpleNamespace(clear=self._clear, all_logits=lambda: self.logits)
        spec = SimpleNamespace(moe_layers=tuple(range(N_LAYERS)), n_used=lambda layer: N_USED)
        self.running: Any = SimpleNamespace(
            engine=self,
            manifest=SimpleNamespace(spec=spec),
            holders=SimpleNamespace(placement=SimpleNamespace(destinations=PEERS), connection=self._connection),
        )

    def _clear(self) -> None:
        self.n_clears += 1

    async def call(self, step: Any) -> Any:
        return step()

    def decode(self, tokens: Sequence[int], position: int, logits: str) -> None:
        assert logits == "all"
        self.calls.append((list(tokens), position))
        self.logits = formula(tokens, position)
        if position <= self.faulty_at < position + len(tokens):
            self.logits[self.faulty_at - position, 0] += 0.5
        n_pairs = len(tokens) * N_LAYERS * N_USED
        self.counts[PEERS[0]] += n_pairs // 3
        self.counts[PEERS[1]] += n_pairs - n_pairs // 3

    async def _connection(self, node: NodeId) -> Any:
        async def request(message: m.Request, *, timeout_s: float, max_answer_bytes: int | None = None) -> m.Response:
            assert isinstance(message, m.GetStatus)
            if node in self.status:
                outcome = self.status[node]
                if isinstance(outcome, Exception):
                    raise outcome
                return m.Status(data=outcome)
            return m.Status(data=json.dumps({"n_assignments": self.counts[node]}).encode())

        return SimpleNamespace(request=request)


async def run(swarm: FakeSwarm, stock: FakeStock, progress: Any = lambda *_: None) -> VerifyReport:
    return await compare(
        swarm.running,
        stock,  # type: ignore[arg-type]
        n_tokens=4,
        prompt_tokens=[5, 3, 6, 2, 7, 1],
        progress=progress,
        prompt_lengths=(1, 5),
    )


async def test_both_sides_see_the_same_tokens_and_stocks_choice_goes_on() -> None:
    swarm, stock = FakeSwarm(), FakeStock()
    seen: list[tuple[int, int]] = []
    report = await run(swarm, stock, lambda done, total: seen.append((done, total)))
    assert report.identical
    assert swarm.calls == stock.calls
    assert [len(tokens) for tokens, _ in stock.calls] == [1, 1, 1, 1, 1, 5, 1, 1, 1, 1]
    assert [position for _, position in stock.calls] == [0, 1, 2, 3, 4, 0, 5, 6, 7, 8]
    assert stock.calls[5][0] == [5, 3, 6, 2, 7]
    for prompt in (stock.calls[:5], stock.calls[5:]):
        for (tokens, position), (following, _) in itertools.pairwise(prompt):
            assert following == [(3 * tokens[-1] + position + len(tokens) - 1) % V]
    assert (swarm.n_clears, stock.n_clears) == (2, 2)
    assert [prompt.n_prompt for prompt in report.prompts] == [1, 5]
    assert [prompt.n_positions for prompt in report.prompts] == [5, 9]
    assert seen[-1] == (14, 14)


async def test_only_the_peers_work_in_between_is_counted() -> None:
    report = await run(FakeSwarm(), FakeStock())
    assert report.n_assignments == report.n_assignments_expected == 14 * N_LAYERS * N_USED
    assert report.assignments_add_up
    assert set(report.assignments_by_peer) == {str(node) for node in PEERS}
    assert sum(report.assignments_by_peer.values()) == report.n_assignments


async def test_a_pair_that_was_computed_twice_does_not_add_up() -> None:
    swarm = FakeSwarm()
    decode = swarm.decode

    def doubled(tokens: Sequence[int], position: int, logits: str) -> None:
        decode(tokens, position, logits)
        swarm.counts[PEERS[0]] += 1 if position == 7 else 0

    swarm.decode = doubled  # type: ignore[method-assign]
    report = await run(swarm, FakeStock())
    assert report.identical
    assert not report.assignments_add_up


async def test_one_wrong_logit_is_found_and_placed() -> None:
    swarm = FakeSwarm()
    swarm.faulty_at = 6
    report = await run(swarm, FakeStock())
    assert not report.identical
    assert [prompt.n_different for prompt in report.prompts] == [0, 1]
    assert report.prompts[1].first_difference == 6
    assert report.prompts[1].max_difference == 0.5


@pytest.mark.parametrize(
    "status",
    [
        b"no json",
        b"\xff",
        b"[]",
        b"{}",
        b'{"n_assignments": null}',
        b'{"n_assignments": Infinity}',
        b"[" * 100_000,
        RemoteRefused("busy", remote_code=0x11),
    ],
    ids=range(8),
)
async def test_a_peer_that_does_not_tell_its_counters_is_a_network_error(status: Any) -> None:
    swarm = FakeSwarm()
    swarm.status[PEERS[1]] = status
    with pytest.raises(NetworkError, match=f"peer {PEERS[1].short} does not tell its counters"):
        await run(swarm, FakeStock())
