"""Which drafter drafts how many tokens before a step of one sequence, or none: what is measured to bring most tokens a second.

    drafting n tokens      (others + 1 + accepted(n)) / (step_s(rows + n) + n * token_s)
    not drafting           (others + 1)               / step_s(rows)

`others`: the tokens that the step brings for the sequences beside this one. Drafting must win by MARGIN.

A drafter that costs nothing (n-gram) proposes at every step; what is not drafted for real is watched in the shadow, at no cost.
One that costs time is tried in the shadow as often as a small share of the time allows. So a text in which nothing is accepted
costs no rows at all, and drafting begins a few tokens after a text has become predictable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.speculation.acceptance import Acceptance, Watched
from swarm.speculation.costs import DraftCost, StepCosts
from swarm.speculation.drafter import Doubtful, Drafter

MARGIN = 0.01  # by which drafting must win; guessed
N_SHADOW = 2  # tokens of a trial in the shadow
# Of the time of the steps so far, what such trials may take; an engine's very first one is free. Half of it is too little where
# steps are short: what local experts are worth was then found out too late in texts of 24 tokens (docs/speculation.md).
SHADOW_SHARE = 0.01
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
    by_match: dict[int, Acceptance] = field(default_factory=dict)
    watched: Watched | None = None
    was_tried: bool = False

    def acceptance(self) -> Acceptance:
        """Return that of proposals like the source's latest."""
        match = getattr(self.source.drafter, "n_matched", 0)
        found = self.by_match.get(match)
        if found is None:
            found = self.by_match[match] = Acceptance(parent=self.here)
        return found


class Controller:
    """A `Drafter` that chooses among others; one sequence's."""

    def __init__(
        self, sources: Sequence[Source], experience: Experience, *, n_most: int, now: Callable[[], float]
    ) -> None:
        """`n_most`: tokens of a draft."""
        self._experience = experience
        self._n_most = n_most
        self._now = now
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
        return _State(source, cost, known, here, was_tried=known.is_known)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the drafts for the next step; raises what a drafter raises."""
        self._judge(tokens)
        n = min(n, self._n_most, max(1, self._experience.steps.most_rows - 1 - self._rows_beside))
        if n < 1:
            return []
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
            length, rate = self._best_length(state, n if proposal is None else len(proposal))
            if length and rate > bar and (best is None or rate > best[0]):
                best = rate, state, proposal, length
        if best is not None:
            _, state, proposal, length = best
            drafts = self._run(state, tokens, length) if proposal is None else proposal[:length]
            if drafts:
                self._drafted, self._n_drafted = state, len(drafts)
                state.watched = Watched(len(tokens), drafts, state.acceptance())
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
        self._experience.steps.count(n_rows, seconds, 1.0 / (n_beside + 1))

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
            if watched.is_over:
                state.watched = None

    def _best_length(self, state: _State, n: int) -> tuple[int, float]:
        """Return how many tokens of a source to draft, and the tokens a second that this brings."""
        best, best_rate = 0, 0.0
        for length, accepted in enumerate(state.acceptance().expected_lengths(n), 1):
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

    def _run(self, state: _State, tokens: Sequence[int], n: int) -> list[int]:
        if isinstance(state.source.drafter, Doubtful):
            state.source.drafter.least_reach = self._least_reach(state)
        began = self._now()
        drafts = state.source.drafter.propose(tokens, n)
        state.cost.count(len(drafts), self._now() - began)
        return drafts

    def _least_reach(self, state: _State) -> float:
        """Return how likely a token must be accepted to bring as many tokens as its time would bring otherwise."""
        rows = 1 + self._rows_beside
        steps = self._experience.steps
        token_s = steps.step_s(rows + 1) - steps.step_s(rows) + state.cost.token_s
        return min(token_s * self._best_length(state, self._n_most)[1], 1.0)

    def _try_in_shadow(self, tokens: Sequence[int], n: int) -> None:
        for state in self._states:
            if state.source.is_free or state.watched is not None or not self._experience.steps.is_known:
                continue
            n_trial = min(N_SHADOW, n)
            if state.was_tried and self._shadow_s + n_trial * state.cost.token_s > SHADOW_SHARE * self._steps_s:
                continue
            began = self._now()
            drafts = self._run(state, tokens, n_trial)
            self._shadow_s += self._now() - began if state.was_tried else 0.0
            state.was_tried = True
            if drafts:
                state.watched = Watched(len(tokens), drafts, state.acceptance())
