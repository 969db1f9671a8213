"""Drafts where they pay, none where they do not, and a text whose nature changes: against a simulated step of known costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from swarm.speculation.controller import Controller, Experience, Source
from swarm.speculation.costs import TOGETHER, StepTrips
from swarm.speculation.ngram import NgramDrafter


class Model:
    """A sequence whose text is given: every step adds what was drafted rightly, and one token.

    Attributes:
        n_rows, n_steps, seconds: so far; drafting counts in `seconds`.
    """

    def __init__(self, text: Sequence[int], *, step_s: float = 0.5, row_s: float = 0.01) -> None:
        self.text = list(text)
        self.step_s, self.row_s = step_s, row_s
        self.time = 0.0
        self.n_rows = self.n_steps = 0

    def run(self, controller: Controller, start: int, end: int | None = None, *, n_beside: int = 0) -> list[int]:
        """Return the tokens that each step added, from a text of `start` tokens on."""
        end, at, added = len(self.text) if end is None else end, start, []
        while at < end:
            drafts = controller.propose(self.text[:at], 8)
            n = 0
            while n < len(drafts) and at + n < end - 1 and drafts[n] == self.text[at + n]:
                n += 1
            n_rows = 1 + n_beside + len(drafts)
            took = self.took_s(n_rows)
            self.time += took
            controller.observe(n_rows, took, n_beside)
            for _ in range(n_beside):  # the others tell of the same step
                self.experience.steps.count(n_rows, took, 1 / (n_beside + 1))
            self.n_rows += 1 + len(drafts)
            self.n_steps += 1
            added.append(n + 1)
            at += n + 1
        return added

    def took_s(self, n_rows: int) -> float:
        return self.step_s + self.row_s * (n_rows - 1)

    def controller(self, *sources: Source, experience: Experience | None = None) -> Controller:
        self.experience = experience or Experience()
        return Controller(sources, self.experience, n_most=8, now=lambda: self.time)


class Knowing:
    """A drafter that costs time, and is right with a certain probability at each token."""

    def __init__(self, model: Model, share: Callable[[int], float], token_s: float = 0.01, seed: int = 0) -> None:
        self.model, self.share, self.token_s = model, share, token_s
        self.rng = np.random.default_rng(seed)
        self.n_drafted = 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        self.model.time += n * self.token_s
        self.n_drafted += n
        following = self.model.text[len(tokens) : len(tokens) + n]
        return [token if self.rng.random() < self.share(len(tokens)) else -1 for token in following]


def novel(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).permutation(100_000)[:n]]


def ngram() -> Source:
    return Source("ngram", NgramDrafter(), is_free=True)


def test_copied_text_is_drafted_after_a_few_tokens_and_whole() -> None:
    model = Model(novel(50) * 4)
    added = model.run(model.controller(ngram()), 50)
    assert sum(added) / len(added) > 5
    assert max(added[:8]) > 1, "within a handful of tokens"


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.5])
def test_text_in_which_nothing_is_accepted_costs_no_rows(step_s: float) -> None:
    rng = np.random.default_rng(1)
    model = Model(
        rng.integers(0, 12, 600).tolist(), step_s=step_s
    )  # every bigram was seen before, nothing follows from it

    class Wrong:
        n_matched = 2

        def propose(self, tokens: Sequence[int], n: int) -> list[int]:
            return [-1] * n

    added = model.run(model.controller(Source("wrong", Wrong(), is_free=True)), 10)
    assert set(added) == {1}
    assert model.n_rows == model.n_steps


def test_a_drafter_that_is_never_right_costs_little_time() -> None:
    """Scenario 7, in time: at least 98 % of the speed without drafts."""
    model = Model(novel(400), step_s=0.04)
    bad = Knowing(model, lambda at: 0.0, token_s=0.004)  # a tenth of a step for each token
    added = model.run(model.controller(Source("local", bad)), 5)
    assert set(added) == {1}
    assert model.time / (model.n_steps * model.step_s) < 1.006
    assert bad.n_drafted >= 2, "but it is tried"


def test_text_that_turns_into_copying_is_noticed_within_forty_tokens() -> None:
    first = novel(200)
    model = Model(first + first[60:160])
    controller = model.controller(ngram())
    assert set(model.run(controller, 5, 200)) == {1}
    assert sum(model.run(controller, 200, 240)) / len(model.run(controller, 240, 280)) > 2.5


def test_copying_that_ends_costs_few_rows_more() -> None:
    copied = novel(40)
    model = Model(copied * 3 + novel(300, seed=5))
    controller = model.controller(ngram())
    model.run(controller, 40, 120)
    before = model.n_rows - model.n_steps
    model.run(controller, 120)
    assert model.n_rows - model.n_steps - before <= 16


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_drafter_that_is_often_right_is_used_and_brings_what_it_can(share: float) -> None:
    model = Model(novel(400))
    added = model.run(model.controller(Source("local", Knowing(model, lambda at: share))), 5)
    best = (1 - share**9) / (1 - share)
    assert sum(added[20:]) / len(added[20:]) > 0.8 * best
    plain_s = 395 * model.step_s
    assert plain_s / model.time > 0.75 * best * 0.5 / (0.5 + 8 * 0.02)


def test_a_row_that_is_dear_makes_drafts_short_or_none() -> None:
    lengths = {}
    for row_s in (0.0, 0.1, 0.6):
        model = Model(novel(300), row_s=row_s)
        drafter = Knowing(model, lambda at: 0.6)
        model.run(model.controller(Source("local", drafter)), 5)
        lengths[row_s] = (model.n_rows - model.n_steps) / model.n_steps
        assert 295 * model.step_s / model.time > 0.97
    assert lengths[0.0] > lengths[0.1] > lengths[0.6]
    assert lengths[0.6] < 0.2


def test_the_better_of_two_is_taken() -> None:
    model = Model(novel(60) * 5)
    local = Knowing(model, lambda at: 0.3)
    experience = Experience()
    model.run(model.controller(ngram(), Source("local", local), experience=experience), 60)
    assert experience.n_drafted["ngram"] > 20 * experience.n_drafted["local"]
    assert experience.n_accepted["ngram"] > 0.9 * experience.n_drafted["ngram"]
    model = Model(novel(300))
    good = Knowing(model, lambda at: 0.8)
    experience = Experience()
    model.run(model.controller(ngram(), Source("local", good), experience=experience), 5)
    assert experience.n_drafted["ngram"] == 0
    assert experience.n_accepted["local"] > 100


def test_what_a_drafter_costs_and_is_worth_is_known_to_the_next_sequence() -> None:
    model = Model(novel(300))
    experience = Experience()
    model.run(model.controller(Source("local", Knowing(model, lambda at: 0.9)), experience=experience), 5)
    second = Model(novel(40, seed=9))
    controller = second.controller(Source("local", Knowing(second, lambda at: 0.9)), experience=experience)
    assert second.run(controller, 5)[0] > 1, "from its first step on"


def test_beside_other_sequences_dear_rows_are_weighed_against_what_all_get() -> None:
    lengths = []
    for n_beside in (0, 15):
        model = Model(novel(400), step_s=0.1, row_s=0.05)
        model.run(model.controller(Source("local", Knowing(model, lambda at: 0.7))), 5, n_beside=n_beside)
        lengths.append((model.n_rows - model.n_steps) / model.n_steps)
    assert lengths[0] > 2 * lengths[1]


def test_a_step_that_is_rolled_back_is_no_judgement() -> None:
    model = Model(novel(30) * 6)
    controller = model.controller(ngram())
    model.run(controller, 30, 90)
    drafts = controller.propose(model.text[:90], 8)
    assert len(drafts) == 8
    assert controller.propose(model.text[:80], 8) == model.text[80:88]
    assert controller.propose(model.text[:80], 8) == model.text[80:88]


class Sure(Knowing):
    """A drafter that says how likely its tokens are: each as likely as `says`."""

    def __init__(self, model: Model, share: Callable[[int], float], says: float, token_s: float = 0.01) -> None:
        super().__init__(model, share, token_s)
        self.says = says
        self.least_reach = 0.0
        self.reaches: list[float] = []
        self.asked: list[float] = []

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        self.asked.append(self.least_reach)
        self.reaches = [self.says ** (at + 1) for at in range(n)]
        return super().propose(tokens, n)


def test_a_drafter_that_knows_its_chances_is_told_what_is_worth_it() -> None:
    asked = {}
    for token_s in (0.001, 0.1):
        model = Model(novel(200))
        drafter = Sure(model, lambda at: 0.8, 0.8, token_s)
        model.run(model.controller(Source("local", drafter)), 5)
        assert drafter.asked[0] == 0, "a trial in the shadow goes on whatever it thinks"
        asked[token_s] = np.median(drafter.asked)
    assert 0 < asked[0.001] < 0.02
    assert 0.2 < asked[0.1] <= 1


def test_of_a_draft_that_itself_doubts_what_follows_only_what_pays_is_computed() -> None:
    drafted = {}
    for says in (0.2, 0.9):
        model = Model(novel(200), row_s=0.1)
        model.run(model.controller(Source("local", Sure(model, lambda at: 0.9, says))), 5)
        drafted[says] = (model.n_rows - model.n_steps) / model.n_steps
    assert drafted[0.2] < 1.5
    assert drafted[0.9] > 2 * drafted[0.2]


N_LAYERS, TRIP_S = 6, 0.08


class Skipping(Model):
    """A step needs trips for the layers whose experts are not all here: one row for few, many for most."""

    def __init__(self, text: Sequence[int], share: float) -> None:
        super().__init__(text)
        self.share = share
        self.rng = np.random.default_rng(3)
        self.trips = StepTrips()

    def took_s(self, n_rows: int) -> float:
        n_skipped = int((self.rng.random(N_LAYERS) < self.share ** (n_rows**TOGETHER)).sum())
        trip_s = TRIP_S * (N_LAYERS - n_skipped)
        self.trips = StepTrips(n_trips=N_LAYERS - n_skipped, n_skipped=n_skipped, trip_s=trip_s)
        return 0.02 + trip_s

    def controller(self, *sources: Source, experience: Experience | None = None) -> Controller:
        self.experience = experience or Experience()
        return Controller(sources, self.experience, n_most=8, now=lambda: self.time, trips=lambda: self.trips)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.85])
def test_many_rows_are_drafted_where_a_few_cost_more_than_they_bring(share: float) -> None:
    """Most layers need no peer for one row: the first drafted row costs most of what eight cost."""
    speedups = []
    for seed in range(3):
        model = Skipping(novel(300, seed), share)
        model.run(model.controller(Source("local", Knowing(model, lambda at: 0.85, token_s=0.0015, seed=seed))), 5)
        drafted_s = model.time
        plain = Skipping(novel(300, seed), share)
        plain.run(plain.controller(), 5)
        speedups.append(plain.time / drafted_s)
    steps = [0.02 + TRIP_S * N_LAYERS * (1 - share ** (rows**TOGETHER)) for rows in (1, 9)]
    best = (1 - 0.85**9) / 0.15 * steps[0] / steps[1]
    assert np.median(speedups) > 0.75 * best
    assert min(speedups) > 1.05


def test_what_was_right_in_other_texts_costs_a_text_where_it_is_not_few_rows() -> None:
    experience = Experience()
    for seed in range(3):
        model = Model(novel(200, seed=seed))
        model.run(model.controller(Source("local", Knowing(model, lambda at: 0.9)), experience=experience), 5)
    hostile = Model(novel(200, seed=9))
    bad = Knowing(hostile, lambda at: 0.0)
    hostile.run(hostile.controller(Source("local", bad), experience=experience), 5)
    assert 0 < hostile.n_rows - hostile.n_steps <= 16, "two drafts"
    again = Model(novel(200, seed=10))
    again.run(again.controller(Source("local", Knowing(again, lambda at: 0.0)), experience=experience), 5)
    assert again.n_rows == again.n_steps, "that is remembered"


def test_never_more_than_there_is_room_for() -> None:
    model = Model(novel(30) * 6)
    controller = model.controller(ngram())
    model.run(controller, 30, 90)
    assert len(controller.propose(model.text[:90], 3)) == 3
    assert controller.propose(model.text[:90], 0) == []
    assert len(controller.propose(model.text[:90], 100)) == 8
