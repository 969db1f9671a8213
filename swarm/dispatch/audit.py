"""Which answers of peers are computed a second time.

Pure; the generator of chance is given. Knows nothing of what an audit finds.

Of each peer's answers one in every `1 / share` is chosen, at a random place of each run of so many: so nobody can foresee which,
everybody has its part, and between two audits of a peer lie less than twice as many answers, for certain. Chosen singly, with the
same share, one cheat in fifty would go 200 answers unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm.errors import UserError
from swarm.ids import NodeId

# Cost: as much more expert compute for the swarm, and none for the backbone. Use: a cheat is seen within 99 of its answers, which
# is one or two tokens of a deep model and ten of a shallow one. 1 % would double that and save nothing that anybody notices.
DEFAULT_SHARE = 0.02
# From which relative difference of a row on two answers are not the same, where the gate has measured none for a model and form.
# Honest peers differ by 1.5 % at most where one rounds activations as CUDA does, or not at all; noise of 5 % must be seen.
DEFAULT_TOLERANCE = 0.03
NEW_SHARE = 0.1  # of a peer that has passed fewer than NEW_PASSES; guessed
NEW_PASSES = 8
SUSPECT_SHARE = (
    0.5  # of who disagreed with another and neither was found wrong; guessed: soon decided, and not for long
)
OPINION_TIMEOUT_S = 5.0  # of one opinion; guessed: half of the shortest deadline of a batch
OWED_WITHIN = 8  # answers within which an audit that came to nothing is made up for; guessed


def parse_share(text: str) -> float:
    """Return the share that `--audit` names: `2%`, or 0 for none.

    Raises:
        UserError: it is no percentage from 0% to 100%.
    """
    number = text.strip()
    try:
        if not number.endswith("%") and float(number) != 0:
            raise ValueError
        share = float(number.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"bad share of audits: got {text!r}, expected a percentage like 2%, or 0 for none")
    return share


class Chance(Protocol):
    """A generator of chance, as `random.Random` is one."""

    def randrange(self, n: int, /) -> int:
        """Return a number from 0 to n-1."""
        ...


@dataclass(slots=True)
class _Run:
    """So many answers of a peer, of which one is chosen."""

    width: int
    at: int
    n_seen: int = 0
    owed_in: int | None = None  # answers until an audit is made up for


class AuditChooser:
    """Every peer's run of answers under way. Mutable, one owner."""

    def __init__(self, rng: Chance) -> None:
        self._rng = rng
        self._runs: dict[NodeId, _Run] = {}

    def choose(self, node: NodeId, share: float) -> bool:
        """Return whether this answer of the peer, the next one, is to be audited; `share` 0 never asks for one."""
        if share <= 0:
            return False
        run = self._runs.get(node)
        width = max(1, round(1 / share))
        if run is None or run.width != width or run.n_seen >= width:
            owed_in = run.owed_in if run is not None else None
            run = self._runs[node] = _Run(width, self._rng.randrange(width), owed_in=owed_in)
        is_chosen = run.n_seen == run.at
        run.n_seen += 1
        if run.owed_in is not None:
            run.owed_in -= 1
            if is_chosen or run.owed_in < 0:
                run.owed_in = None
                is_chosen = True
        return is_chosen

    def put_back(self, node: NodeId) -> None:
        """An audit of this peer came to nothing: another one soon, again at a random place."""
        run = self._runs.get(node)
        if run is not None and run.owed_in is None:
            run.owed_in = self._rng.randrange(OWED_WITHIN)

    def forget(self, node: NodeId) -> None:
        """The peer is gone."""
        self._runs.pop(node, None)
