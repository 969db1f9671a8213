"""Which requests are in which step of a lane, and with how many rows. Pure: times are arguments.

A request joins a lane's batch when it gets a slot and leaves it when it is done; every step is planned anew:

    every request that has its prompt computed    its last token and the drafts after it: always
    those that have not                           a chunk of the prompt: as many rows as the step may have beside the others

A chunk beside others is as long as makes their step half again as long (`SLOWDOWN`), by what steps of so many rows have taken so
far; half of it goes to the request that has waited longest, the rest to those with least left. So a long prompt neither stops
the others nor waits for them, and a short one overtakes it. Chunks of several lanes share a budget (`row_budget`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarm.errors import Overloaded

# How much longer a step of requests that stream may become by another's prompt. Guessed: what a reader hardly notices.
SLOWDOWN = 0.5
MIN_CHUNK = (
    32  # rows of a prompt in a step, whatever they cost; guessed, so that a prompt of 1,000 takes at most 31 steps
)
DECAY = 0.95  # of a step's weight in the cost model with each further step; guessed
MAX_AHEAD = 64  # tokens that wait for their reader before a request sits out; guessed
FIRST_RETRY_S = 5.0  # before any request has ended; guessed


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on a lane.

    Attributes:
        origin: its id, unique in the process.
        sequence: llama.cpp's number in the lane.
        tokens: the prompt and what was drawn.
        n_computed: first tokens that the KV cache holds.
        n_most: tokens to draw at most.
        n_draft: most tokens drafted in a step.
        n_unread: drawn tokens that its reader has not taken.
        rewind_to: position from which on it is to be computed anew, once the step under way has ended.
        is_gone: nobody waits for it any more.
    """

    origin: int
    sequence: int
    tokens: list[int]
    n_prompt: int
    n_computed: int
    n_most: int
    n_draft: int = 0
    n_unread: int = 0
    rewind_to: int | None = None
    is_gone: bool = False

    @property
    def n_pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.n_computed

    @property
    def n_drawn(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def is_ready(self) -> bool:
        """Whether a step may take it along."""
        return not self.is_gone and self.n_drawn < self.n_most and self.n_unread < MAX_AHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """What a request adds to a step.

    Attributes:
        n_rows: of its tokens, from `n_computed` on.
        n_draft: most drafts after them.
        draws: they reach its last token: one is drawn, or more by drafts.
    """

    request: LiveRequest
    n_rows: int
    n_draft: int
    draws: bool

    @property
    def n_prompt_rows(self) -> int:
        """Rows of a prompt; 0 for a request that has its own computed."""
        return 0 if self.draws and self.n_rows == 1 else self.n_rows


@dataclass(slots=True)
class StepCost:
    """What steps take by their rows, seconds: a line through those so far, the latest weighing most."""

    _weight: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # of rows, seconds, rows^2, rows x seconds

    def add(self, n_rows: int, seconds: float) -> None:
        """Take a step into account."""
        self._weight = self._weight * DECAY + 1
        for index, value in enumerate((n_rows, seconds, n_rows * n_rows, n_rows * seconds)):
            self._sums[index] = self._sums[index] * DECAY + value

    @property
    def row_s(self) -> float:
        """Seconds of one more row; 0 while steps have not differed."""
        if self._weight < 2:
            return 0.0
        rows, seconds, squares, products = (value / self._weight for value in self._sums)
        variance = squares - rows * rows
        return max((products - rows * seconds) / variance, 0.0) if variance > 1e-9 else 0.0

    def seconds(self, n_rows: int) -> float:
        """Return what a step of so many rows should take; 0 before any."""
        if not self._weight:
            return 0.0
        mean_rows, mean_s = self._sums[0] / self._weight, self._sums[1] / self._weight
        return max(mean_s + (n_rows - mean_rows) * self.row_s, 0.0)


class LaneSchedule:
    """The running batch of one lane.

    Attributes:
        requests: in the order in which they joined.
        cost: of its steps.
        n_batch: most rows of a step.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_batch: int = 1,
        fill_wait_s: float = 0.0,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Begin empty.

        Args:
            fill_wait_s: how long a step waits for more requests to join, from the moment that it could begin.
            room: how many rows of prompts the next step may have; None: as many as fit.
        """
        self.requests: list[LiveRequest] = []
        self.cost = StepCost()
        self.isolated: deque[LiveRequest] = deque()
        self._n_slots = n_slots
        self.n_batch = n_batch
        self._fill_wait_s = fill_wait_s
        self._room = room
        self._ready_since: float | None = None

    def join(self, request: LiveRequest) -> None:
        """Add a request to the batch."""
        self.requests.append(request)

    def leave(self, request: LiveRequest) -> None:
        """Remove a request."""
        self.requests = [each for each in self.requests if each is not request]

    def isolate(self, requests: Iterable[LiveRequest]) -> None:
        """Let these have a step of their own each, to find out whose rows cannot be computed."""
        self.isolated.extend(requests)

    def starts_at(self, now: float) -> float | None:
        """Return when the next step may begin, perhaps in the past; None: there is nothing to do."""
        ready = [request for request in self.requests if request.is_ready]
        if not ready:
            self._ready_since = None
            return None
        if self._ready_since is None:
            self._ready_since = now
        return self._ready_since + (self._fill_wait_s if len(ready) < self._n_slots else 0.0)

    def ended(self, n_rows: int, seconds: float) -> None:
        """Note that a step has ended."""
        self._ready_since = None
        self.cost.add(n_rows, seconds)

    def plan(self) -> list[StepShare]:
        """Return the next step; empty if nobody is ready."""
        while self.isolated:
            alone = self.isolated.popleft()
            if alone in self.requests and alone.is_ready:
                return self._shares([alone])
        return self._shares([request for request in self.requests if request.is_ready])

    def _shares(self, ready: list[LiveRequest]) -> list[StepShare]:
        decoding = [request for request in ready if request.n_pending == 1]
        prefilling = [request for request in ready if request.n_pending > 1]
        shares = []
        n_left = self.n_batch
        for index, request in enumerate(decoding):
            # One row is left for each of those that follow, whatever is drafted.
            n_room = n_left - (len(decoding) - index)
            n_draft = max(min(request.n_draft, request.n_most - request.n_drawn - 1, n_room), 0)
            shares.append(StepShare(request=request, n_rows=1, n_draft=n_draft, draws=True))
            n_left -= 1 + n_draft
            if n_left <= 0:
                return shares
        n_chunk = min(n_left, self._chunk(self.n_batch - n_left)) if decoding else n_left
        room = self._room() if prefilling else None
        return shares + self._chunks(prefilling, n_chunk if room is None else min(n_chunk, room))

    def _chunk(self, n_decoding: int) -> int:
        """Return how many rows of prompts a step may have beside those of the requests that stream."""
        row_s = self.cost.row_s
        if not row_s:
            return self.n_batch
        return max(int(self.cost.seconds(n_decoding) * SLOWDOWN / row_s), MIN_CHUNK)

    def _chunks(self, prefilling: list[LiveRequest], n_chunk: int) -> list[StepShare]:
        if not prefilling:
            return []
        oldest, *others = prefilling
        rows = {oldest.origin: min(oldest.n_pending, n_chunk // 2 if others else n_chunk)}
        n_left = n_chunk - rows[oldest.origin]
        for request in sorted(others, key=lambda each: each.n_pending):
            rows[request.origin] = min(request.n_pending, n_left)
            n_left -= rows[request.origin]
        rows[oldest.origin] += min(oldest.n_pending - rows[oldest.origin], n_left)
        return [
            StepShare(request=each, n_rows=rows[each.origin], n_draft=0, draws=rows[each.origin] == each.n_pending)
            for each in prefilling
            if rows[each.origin]
        ]


class WaitingLine:
    """How many requests wait for a slot, at most, and what those are told for whom there is no place."""

    def __init__(self, max_length: int, n_slots: int) -> None:
        self.length = 0
        self._max_length = max_length
        self._n_slots = n_slots
        self._request_s: float | None = None

    def enter(self, n_free: int) -> None:
        """Take a place, on the way to one of `n_free` slots perhaps.

        Raises:
            Overloaded: with the time after which a place should be free.
        """
        if self.length >= self._max_length + n_free:
            raise Overloaded(f"{self.length} requests are waiting", retry_after_s=self.retry_after_s)
        self.length += 1

    def leave(self) -> None:
        """Give the place back."""
        self.length -= 1

    def served(self, seconds: float) -> None:
        """Note how long a request held its slot."""
        self._request_s = seconds if self._request_s is None else 0.9 * self._request_s + 0.1 * seconds

    @property
    def retry_after_s(self) -> float:
        """When one of those that wait now should have got its slot."""
        return FIRST_RETRY_S if self._request_s is None else min(max(self._request_s / self._n_slots, 1.0), 60.0)
