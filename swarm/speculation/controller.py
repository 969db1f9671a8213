"""Which drafter drafts how many tokens before a step of one sequence, or none: what is measured to bring most tokens a second.

    drafting n tokens      (others + 1 + accepted(n)) / (step_s(rows + n) + n * token_s)
    not drafting           (others + 1)               / step_s(rows)

`others`: the tokens that the step brings for the sequences beside this one. Drafting must win by MARGIN.

A drafter that costs nothing (n-gram) proposes at every step; what is not drafted for real is watched in the shadow, at no cost.
One that costs time is tried in the shadow as often as a small share of the time allows, the less the more often it was wrong; and
before it was right once in a text, it drafts there only by what it was worth in others. So a text in which nothing is accepted
costs hardly any rows and time, and drafting begins a few tokens after a text has become predictable.

How many tokens pay is reckoned for as many as there may be; what is drafted then goes only a little beyond what was tried so
far. Else nothing would ever be tried where a few rows cost more than they bring and many do not: where most layers' experts
are all here, the first row more costs most of the trips, and the next ones few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.speculation.acceptance import Acceptance, Watched
from swarm.speculation.costs import DraftCost, StepCosts, StepTrips
from swarm.speculation.drafter import Doubtful, Drafter

MARGIN = 0.01  # by which drafting must win; guessed
N_SHADOW = 2  # tokens of a trial in the shadow
# Of the time of the steps so far, what such trials may take of a drafter that is right every other time, or oftener; an engine's
# very first one is free. Half of it is too little where steps are short: what local experts are worth was then found out too late
# in texts of 24 tokens (docs/speculation.md).
SHADOW_SHARE = 0.01
# Drafts for real before any was right in this text: how likely one must have been in others, and how many may be wrong.
# On recorded texts 0.1 and 4 bring 6 % more tokens a second where a quarter of the experts is here, and nothing elsewhere.
LEAST_TRUST, MOST_MISTRUST = 0.25, 3
PRIOR_LOOKS = (
    8.0  # what is known of a drafter from other texts counts so many looks; guessed: nearly all that FADE leaves
)


@dataclass(slots=True)
class Experience:
    """What is known of drafts beyond one text; shared by all sequences of an engine.

    Attributes:
        acceptance: name of a drafter -> its acceptance in all texts; used of those that cost time: theirs is a matter of the
            model, that of n-grams a matter of the text.
        n_drafted, n_accepted: name -> tokens.
    """

    steps: StepCosts = field(default_factory=StepCosts)
    costs: dict[str, DraftCost] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    n_drafted: Counter[str] = field(default_factory=Counter)
    n_accepted: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Source:
    """A drafter that the controller may choose.

    Attributes:
        is_free: proposing costs next to nothing.
    """

    name: str
    drafter: Drafter
    is_free: bool = False


@dataclass(slots=True)
class _State:
    """What the controller knows of a source in its text."""

    source: Source
    cost: DraftCost
    known: Acceptance
    here: Acceptance
    doubtful: Doubtful | None = None
    by_match: dict[int, Acceptance] = field(default_factory=dict)
    watched: Watched | None = None
    was_tried: bool = False
    n_right: int = 0  # first tokens of proposals to this text, right and wrong
    n_wrong: int = 0

    def acceptance(self) -> Acceptance:
        """Return that of proposals like the source's latest."""
        match = getattr(self.source.drafter, "n_matched", 0)
        found = self.by_match.get(match)
        if found is None:
            found = self.by_match[match] = Acceptance(parent=self.here)
        return found

    @property
    def is_trusted(self) -> bool:
        """Whether it may draft for real."""
        if self.source.is_free or self.n_right:
            return True
        return self.n_wrong < MOST_MISTRUST and self.here.probability(0) >= LEAST_TRUST


class Controller:
    """A `Drafter` that chooses among others; one sequence's."""

    def __init__(
        self,
        sources: Sequence[Source],
        experience: Experience,
        *,
        n_most: int,
        now: Callable[[], float],
        trips: Callable[[], StepTrips] | None = None,
    ) -> None:
        """Prepare.

        Args:
            n_most: tokens of a draft.
            trips: what the latest step asked of the network; None: not known.
        """
        self._experience = experience
        self._n_most = n_most
        self._now = now
        self._trips = trips
        self._n_text = 0
        self._steps_s = self._shadow_s = 0.0
        self._drafted: _State | None = None  # whose proposal the step under way computes
        self._n_drafted = 0
        self._n_beside = 0  # sequences beside this one in the latest step, and their rows
        self._rows_beside = 0
        self._states = [self._state(source) for source in sources]

    def _state(self, source: Source) -> _State:
        known = self._experience.acceptance.setdefault(source.name, Acceptance())
        here = Acceptance() if source.is_free else Acceptance(prior=known, prior_looks=PRIOR_LOOKS)
        cost = self._experience.costs.setdefault(source.name, DraftCost())
        doubtful = source.drafter if isinstance(source.drafter, Doubtful) else None
        return _State(source, cost, known, here, doubtful, was_tried=known.is_known)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the drafts for the next step; raises what a drafter raises."""
        self._judge(tokens)
        n = min(n, self._n_most)
        if n < 1:
            return []
        n_bold = max(1, self._experience.steps.most_rows - 1 - self._rows_beside)
        best: tuple[float, _State, list[int] | None, int] | None = None
        bar = self._rate(0.0, 0, 0.0) * (1.0 + MARGIN)
        for state in self._states:
            proposal: list[int] | None = None
            if state.source.is_free:
                proposal = state.source.drafter.propose(tokens, n)
                if state.watched is None and proposal:
                    state.watched = Watched(len(tokens), proposal, state.acceptance())
                if not proposal:
                    continue
            if not state.is_trusted:
                continue
            length, rate = self._best_length(state, n if proposal is None else len(proposal))
            if length and rate > bar and (best is None or rate > best[0]):
                best = rate, state, proposal, length
        if best is not None:
            _, state, proposal, length = best
            n_drafts = length = min(length, n_bold)
            if proposal is None:
                proposal = self._run(state, tokens, length, self._least_reach(state))
                n_drafts = self._n_worth(state, len(proposal))
            drafts = proposal[:n_drafts]
            if proposal:
                state.watched = Watched(len(tokens), proposal[:length], state.acceptance())
            if drafts:
                self._drafted, self._n_drafted = state, len(drafts)
                return drafts
        self._try_in_shadow(tokens, n)
        return []

    def observe(self, n_rows: int, seconds: float, n_beside: int = 0) -> None:
        """A step has been made.

        Args:
            n_rows: of all its sequences, drafts included.
            seconds: it took, drafting not counted.
            n_beside: sequences beside this one.
        """
        self._n_beside = n_beside
        self._rows_beside = max(0, n_rows - 1 - self._n_drafted)
        self._steps_s += seconds
        trips = self._trips() if self._trips is not None else None
        self._experience.steps.count(n_rows, seconds, 1.0 / (n_beside + 1), trips)

    def _judge(self, tokens: Sequence[int]) -> None:
        """Learn from what the text says by now of earlier proposals."""
        is_back = len(tokens) < self._n_text  # a step was rolled back
        if self._drafted is not None and not is_back:
            name = self._drafted.source.name
            self._experience.n_drafted[name] += self._n_drafted
            self._experience.n_accepted[name] += max(0, min(len(tokens) - self._n_text - 1, self._n_drafted))
        self._drafted, self._n_drafted = None, 0
        self._n_text = len(tokens)
        for state in self._states:
            watched = state.watched
            if watched is None:
                continue
            if is_back or watched.start > len(tokens):
                state.watched = None
                continue
            n_before = watched.n_judged
            for position, is_right in enumerate(watched.judge(tokens), n_before):
                state.known.count(position, is_right)
                if position == 0:
                    state.n_right += is_right
                    state.n_wrong += not is_right
            if watched.is_over:
                state.watched = None

    def _best_length(self, state: _State, n: int) -> tuple[int, float]:
        """Return how many tokens of a source to draft, and the tokens a second that this brings."""
        acceptance = state.acceptance()
        if n * acceptance.probability(0) <= MARGIN * (self._n_beside + 1):
            return 0, 0.0  # no length can win: reckoned in a tenth of the time
        best, best_rate = 0, 0.0
        for length, accepted in enumerate(acceptance.expected_lengths(n), 1):
            rate = self._rate(accepted, length, state.cost.token_s)
            if rate > best_rate:
                best, best_rate = length, rate
        return best, best_rate

    def _rate(self, accepted: float, n_drafted: int, token_s: float) -> float:
        steps = self._experience.steps
        if not steps.is_known:
            return 1.0  # nothing is drafted before a step was measured
        seconds = steps.step_s(1 + self._rows_beside + n_drafted) + n_drafted * token_s
        return (self._n_beside + 1 + accepted) / seconds

    def _run(self, state: _State, tokens: Sequence[int], n: int, least_reach: float) -> list[int]:
        if state.doubtful is not None:
            state.doubtful.least_reach = least_reach
        began = self._now()
        drafts = state.source.drafter.propose(tokens, n)
        state.cost.count(len(drafts), self._now() - began)
        return drafts

    def _least_reach(self, state: _State) -> float:
        """Return how likely a token must be accepted to be worth its drafting; what its row costs is weighed later."""
        return min(state.cost.token_s * self._best_length(state, self._n_most)[1], 1.0)

    def _n_worth(self, state: _State, n: int) -> int:
        """Return how many of a source's latest `n` tokens to compute, by what the source itself thinks of them."""
        if state.doubtful is None:
            return n
        best, best_rate, accepted = 0, self._rate(0.0, 0, 0.0) * (1.0 + MARGIN), 0.0
        for length, reach in enumerate(state.doubtful.reaches[:n], 1):
            accepted += reach
            rate = self._rate(accepted, length, 0.0)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def _try_in_shadow(self, tokens: Sequence[int], n: int) -> None:
        for state in self._states:
            if state.source.is_free or state.watched is not None or not self._experience.steps.is_known:
                continue
            n_trial = min(N_SHADOW, n)
            share = SHADOW_SHARE * min(2 * state.here.hope, 1.0)
            if state.was_tried and self._shadow_s + n_trial * state.cost.token_s > share * self._steps_s:
                continue
            began = self._now()
            drafts = self._run(state, tokens, n_trial, 0.0)
            self._shadow_s += self._now() - began if state.was_tried else 0.0
            state.was_tried = True
            if drafts:
                state.watched = Watched(len(tokens), drafts, state.acceptance())
