"""Audits: some answers of peers are asked of others as well, after the layer has gone on; who is caught is used no more.

The shell: which answers is `audit`, what they are compared with and what follows is `audit_opinions`, how peers stand is
`audit_standing`, what a caught peer had a part in is `audit_trail`, who is asked is `audit_panel`. Here is the plumbing.

    a layer is done -> observe -> chosen? -> a second opinion of a few of its rows -> the same: passed
                                                                                    -> not: all sides asked again, judged
                                                                                            -> caught -> tainted sequences

An audit never delays a layer. An answer waits at its end for the audits under way that concern it (`settle`), and not for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarm.dispatch.attempts import Order
from swarm.dispatch.audit import DEFAULT_TOLERANCE, NEW_SHARE, OPINION_TIMEOUT_S, SUSPECT_SHARE, AuditChooser
from swarm.dispatch.audit_opinions import Part, Question, Rows, agreement, first_look, judge
from swarm.dispatch.audit_panel import Panel
from swarm.dispatch.audit_records import load_standing, save_standing
from swarm.dispatch.audit_standing import Catch, PeerRecord, Verdict
from swarm.dispatch.audit_trail import Trail
from swarm.dispatch.holders import Holders
from swarm.dispatch.origin import Origin
from swarm.dispatch.plan import HERE, Batch, part_of
from swarm.dispatch.replicas import Replicas
from swarm.errors import EngineError, SwarmError
from swarm.ids import NodeId
from swarm.wire import messages as m
from swarm.wire.rows import RowCodec

logger = logging.getLogger(__name__)

MAX_ROWS = 8  # of a batch that are asked about, drawn at random: a whole prefill would be dear; guessed
MAX_UNDER_WAY = 16  # audits at once; more are put back; guessed
MAX_REPORTED = 256  # peers in `report`; those caught and suspected first

Opinion = Callable[[NodeId, int, Batch, Rows], Awaitable[Rows]]
"""(peer, layer, batch, x [N, D]) -> its raw rows or partial sums, float32, checked; raises SwarmError."""


@dataclass(slots=True)
class AuditStats:
    """What audits did; counts.

    Attributes:
        n_dropped: came to nothing: nobody answered in time; another one follows.
        n_unaudited: chosen, but nobody else holds these experts.
        largest_error: of audits that passed, relative difference of a row.
        n_answers: of peers that were used, all.
    """

    n_answers: int = 0
    n_passed: int = 0
    n_disagreed: int = 0
    n_dropped: int = 0
    n_unaudited: int = 0
    n_caught: int = 0
    largest_error: float = 0.0


class Auditor:
    """Audits of one backbone.

    Attributes:
        on_taint: told of sequences that a peer had a part in which was caught now: sequence -> first position that is not to
            be trusted. Called on the loop.
        on_caught: told of the peer, and why. For benchmarks.
    """

    def __init__(
        self,
        holders: Holders,
        replicas: Replicas,
        opinion: Opinion,
        *,
        share: float,
        tolerance: float = DEFAULT_TOLERANCE,
        records: Path | None = None,
        rng: random.Random | None = None,
        wall_now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare.

        Args:
            share: of each peer's answers; see `audit`.
            tolerance: the relative difference of a row from which on two answers are not the same.
            records: the file in which peers' records outlive this process; None: nowhere.
            rng: of what nobody must foresee; None draws from the system.
        """
        self.share = share
        self.tolerance = tolerance
        self.stats = AuditStats()
        self.on_taint: Callable[[Mapping[int, int]], None] | None = None
        self.on_caught: Callable[[NodeId, Catch], None] | None = None
        self._holders = holders
        self._replicas = replicas
        self._opinion = opinion
        self._rng = rng if rng is not None else random.SystemRandom()
        self._wall_now = wall_now
        self._records = records
        self._chooser = AuditChooser(self._rng)
        self._trail = Trail()
        self._standing = load_standing(records, wall_now())
        self._panel = Panel(holders, self._standing, self._rng)
        self._tainted: dict[int, int] = {}  # sequence -> first position that is not to be trusted
        self._under_way: dict[asyncio.Task[None], NodeId] = {}
        self._open: Counter[NodeId] = Counter()  # sides of cases in which answers differ
        self._held: frozenset[NodeId] = frozenset()
        self._saving: asyncio.Task[None] | None = None
        self._is_unsaved = False
        holders.is_barred = self.bars
        holders.recheck()

    # For the dispatcher

    def bars(self, node: NodeId, seq: int) -> bool:
        """Return whether a peer that announces `seq` is out because it was caught."""
        return self._standing.is_barred(node, seq, self._wall_now())

    def is_caught(self, node: NodeId) -> bool:
        """Return whether a peer is out because it was caught, by what it announced last."""
        record = self._standing.peers.get(node)
        return record is not None and record.caught is not None and self.bars(node, self._seq(node))

    def observe(self, layer: int, x: Rows, answers: Sequence[tuple[Order, m.Result]], origin: Origin | None) -> None:
        """Take note of what made up a layer, and begin audits; in microseconds, on the loop.

        Args:
            x: [T, D], the rows of the layer; not kept.
        """
        whole: dict[int, int] | None = None
        for order, result in answers:
            node, batch = order.node, order.batch
            if node == HERE:
                continue
            if origin is None:
                firsts: Mapping[int, int] = {}
            elif batch.n_rows == len(x):
                firsts = whole = origin.firsts() if whole is None else whole
            else:
                firsts = origin.of(batch.rows).firsts()
            self.stats.n_answers += 1
            if self.is_caught(node):  # its answer was there before it was caught, and the layer's last came after
                self._taint(firsts)
                continue
            number = self._trail.touch(node, firsts)
            if self._chooser.choose(node, self._share_of(node)):
                self._begin(number, self._question(layer, x, order, result))

    # For who owns sequences

    def tainted_from(self, sequence: int) -> int | None:
        """Return the first position of a sequence that is not to be trusted; None: there is none."""
        return self._tainted.get(sequence)

    def healed(self, sequence: int) -> None:
        """Everything from that position on has been forgotten, and is computed anew."""
        self._tainted.pop(sequence, None)

    def adopt(self, child: int, parent: int, n_tokens: int) -> None:
        """Sequence `child` begins with the first tokens of `parent`, as they were computed."""
        self._trail.adopt(child, parent, n_tokens)
        position = self._tainted.get(parent)
        if position is not None and position < n_tokens:
            self._tainted[child] = position

    def release(self, sequence: int) -> None:
        """Nothing depends on this sequence any more: no answer, and no prefix that is kept."""
        self._trail.release(sequence)
        self._tainted.pop(sequence, None)

    async def settle(self, sequence: int, timeout_s: float) -> None:
        """Return when the audits under way are over that may say something of this sequence, or time is."""
        tasks = [task for task, node in self._under_way.items() if self._trail.has_touched(node, sequence)]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Give up what is under way, and keep the records."""
        for task in list(self._under_way):
            task.cancel()
        if self._under_way:
            await asyncio.wait(list(self._under_way))
        while self._saving is not None:
            await asyncio.wait([self._saving])
        if self._records is not None and self._standing.peers:
            await asyncio.to_thread(save_standing, self._records, self._standing.to_json())

    # For people

    def verdict(self, node: NodeId) -> Verdict:
        """Return how a peer stands."""
        return self._standing.verdict(node, self._seq(node), self._wall_now())

    def record(self, node: NodeId) -> PeerRecord | None:
        """Return a peer's record, if it has one."""
        return self._standing.peers.get(node)

    def report(self) -> dict[str, Any]:
        """Return plain values: the figures, and how each peer stands; the worst first, times in seconds since 1970."""
        order = [Verdict.CAUGHT, Verdict.SUSPECTED, Verdict.NEW, Verdict.HONEST]
        known = [(self.verdict(node), node, record) for node, record in self._standing.peers.items()]
        known.sort(key=lambda each: (order.index(each[0]), -each[2].at))
        return {
            "share": self.share,
            "tolerance": self.tolerance,
            **dataclasses.asdict(self.stats),
            "peers": [
                {
                    "node": str(node),
                    "verdict": verdict.value,
                    "n_passed": record.n_passed,
                    "n_disagreed": record.n_disagreed,
                    "at": round(record.at),
                    "caught": None if record.caught is None else dataclasses.asdict(record.caught),
                }
                for verdict, node, record in known[:MAX_REPORTED]
            ],
        }

    # Cases

    def _share_of(self, node: NodeId) -> float:
        if not self.share:
            return 0.0
        if self._standing.is_suspected(node):
            return max(self.share, SUSPECT_SHARE)
        return max(self.share, NEW_SHARE) if self._standing.is_new(node) else self.share

    def _question(self, layer: int, x: Rows, order: Order, result: m.Result) -> Question:
        """Return a few rows of an answer, copied."""
        batch, rows = order.batch, result.rows
        if batch.n_rows > MAX_ROWS:
            kept = np.zeros(batch.n_rows, np.bool_)  # [N]
            kept[self._rng.sample(range(batch.n_rows), MAX_ROWS)] = True
            is_in = np.repeat(kept, batch.row_counts)  # [P]
            rows = rows[is_in if result.codec is RowCodec.EXACT else kept]
            batch = part_of(batch, is_in)
        return Question(
            layer=layer,
            node=order.node,
            batch=dataclasses.replace(batch, rows=np.arange(batch.n_rows)),
            x=x[batch.rows],
            answer=rows,
            codec=result.codec,
        )

    def _begin(self, number: int, question: Question) -> None:
        if len(self._under_way) >= MAX_UNDER_WAY:
            self._chooser.put_back(question.node)
            self.stats.n_dropped += 1
            return
        self._trail.begin(question.node, number)
        task = asyncio.get_running_loop().create_task(self._audit(number, question))
        self._under_way[task] = question.node
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an audit failed", exc_info=error)  # a mistake of ours: nobody else waits for it

    async def _audit(self, number: int, question: Question) -> None:
        has_passed = False
        try:
            has_passed = await self._case(question)
        except SwarmError as error:
            self.stats.n_dropped += 1
            self._chooser.put_back(question.node)
            logger.debug("an audit of peer %s came to nothing: %s", question.node.short, error)
        finally:
            self._trail.end(question.node, number, has_passed=has_passed)

    async def _case(self, question: Question) -> bool:
        """Return whether the answer was right; raises SwarmError when nobody gave a second opinion."""
        parts = self._panel.second(question)
        if parts is None:
            self.stats.n_unaudited += 1
            return False
        opinions = await asyncio.gather(
            *(self._ask(part.node, question, part) for part in parts), return_exceptions=True
        )
        for part, rows in zip(parts, opinions, strict=True):
            if isinstance(rows, BaseException):
                raise rows
            part.rows = rows
        found = first_look(question, parts)
        self._standing.expire(self._wall_now())
        if found.error <= self.tolerance:
            self.stats.n_passed += 1
            self.stats.largest_error = max(self.stats.largest_error, found.error)
            self._standing.passed(question.node, agreement(question, parts), self._wall_now())
            self._follow_suspects()
            return True
        others = [part.node for part in parts if part.node != HERE]
        logger.info(
            "an answer of peer %s differs by %.1f %% (cosine %.4f) from that of %s",
            question.node.short,
            100 * found.error,
            found.cosine,
            ", ".join(node.short for node in others) or "this machine",
        )
        sides = [question.node, *others]
        self._open.update(sides)
        self._follow_suspects()
        try:
            await self._ask_more(question, parts)
            return self._rule(question, parts)
        finally:
            self._open.subtract(sides)
            self._open = +self._open
            self._follow_suspects()

    async def _ask_more(self, question: Question, parts: list[Part]) -> None:
        """Ask all sides again, and a third; who does not answer says nothing."""

        async def ask(node: NodeId, part: Part, name: str) -> None:
            with contextlib.suppress(SwarmError):
                setattr(part, name, await self._ask(node, question, part))

        asked = []
        for part in parts:
            if question.node not in (part.node, HERE):
                asked.append(ask(question.node, part, "accused"))
            if part.node == HERE:
                continue
            asked.append(ask(part.node, part, "again"))
            part.third_node = self._panel.third(question, part)
            if part.third_node is not None:
                asked.append(ask(part.third_node, part, "third"))
        await asyncio.gather(*asked)

    def _rule(self, question: Question, parts: list[Part]) -> bool:
        """Judge a case, and do what follows; return whether the answer was right after all."""
        sides = {question.node, *(node for part in parts for node in (part.node, part.third_node) if node is not None)}
        if any(self.is_caught(node) for node in sides):
            return False  # meanwhile, by another case: what it said here says nothing of the others
        finding = judge(question, parts, self.tolerance)
        if finding.clears:
            self.stats.n_passed += 1
            self._standing.passed(question.node, finding, self._wall_now())
            return True
        self.stats.n_disagreed += 1
        former = self._standing.suspects
        guilty = self._standing.failed(
            finding, self._wall_now(), can_compare=self._panel.can_compare, network_of=self._panel.network_of
        )
        for node, reason in guilty.items():
            self._catch(node, reason)
        new = self._standing.suspects - former
        if new:
            logger.warning(
                "peers %s disagree, and nobody can say yet who is wrong: audited more, used less (`swarm serve "
                "--last-resort` can tell)",
                ", ".join(sorted(node.short for node in new)),
            )
        return False

    async def _ask(self, node: NodeId, question: Question, part: Part) -> Rows:
        """Return what somebody says of a part of a question; raises SwarmError."""
        if self.is_caught(node):
            raise EngineError(f"peer {node.short} was caught meanwhile")
        batch, x = part.batch, question.x[part.batch.rows]
        if node != HERE:
            return await self._opinion(node, question.layer, batch, x)
        own = self._holders.own
        assert own is not None
        weights = None if question.codec is RowCodec.EXACT else batch.weights
        try:
            async with asyncio.timeout(OPINION_TIMEOUT_S):
                return await own.compute(question.layer, x, batch.row_counts, batch.expert_ids, weights)
        except (OSError, MemoryError, RuntimeError) as error:  # a TimeoutError, too; the file may be gone by now
            raise EngineError(f"cannot compute experts here: {type(error).__name__}: {error}") from error

    # What follows

    def _catch(self, node: NodeId, reason: str) -> None:
        caught = self._standing.catch(node, self._seq(node), reason, self._wall_now())
        self.stats.n_caught += 1
        self._chooser.forget(node)
        logger.warning(
            "peer %s returns wrong numbers: %s; it is not used for %.0f h",
            node.short,
            reason,
            (caught.until - caught.at) / 3600,
        )
        self._holders.recheck()
        self._taint(self._trail.taint(node))
        self._save_soon()
        if self.on_caught is not None:
            self.on_caught(node, caught)

    def _taint(self, firsts: Mapping[int, int]) -> None:
        if not firsts:
            return
        for sequence, position in firsts.items():
            self._tainted[sequence] = min(position, self._tainted.get(sequence, position))
        if self.on_taint is not None:
            self.on_taint(firsts)

    def _seq(self, node: NodeId) -> int:
        record = self._holders.announcement(node)
        return -1 if record is None else record.seq

    def _follow_suspects(self) -> None:
        """Nothing that a suspect had a part in counts as audited, and others go before it."""
        suspects = self._standing.suspects
        held = suspects | frozenset(self._open)
        for node in held ^ self._held:
            self._trail.hold(node, is_held=node in held)
        self._held = held
        if suspects != self._replicas.disfavoured:
            self._replicas.disfavoured = suspects
            self._replicas.refresh_soon()

    def _save_soon(self) -> None:
        self._is_unsaved = self._records is not None
        if self._records is None or self._saving is not None:
            return  # one is under way: another follows it
        self._is_unsaved = False
        plain = self._standing.to_json()
        self._saving = asyncio.get_running_loop().create_task(asyncio.to_thread(save_standing, self._records, plain))
        self._saving.add_done_callback(self._saved)

    def _saved(self, _: asyncio.Task[None]) -> None:
        self._saving = None
        if self._is_unsaved:
            self._save_soon()
