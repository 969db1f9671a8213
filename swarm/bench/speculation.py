"""Drafts against no drafts: the same texts, step by step in turn, over emulated paths, on one backbone with its local experts.

Both are sequences of one engine, a step of one after a step of the other: whatever else the machine does meets both. What is
written is given beforehand, or greedy; a draft counts as accepted where the text has it. `break_even_accept_length` is how long a
step with drafts takes by one without: an accept length above it pays.

With a forced acceptance no drafter is asked: each draft token is right with that probability, at no cost, and the number drafted
is fixed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm.backbone.assembly import RunningBackbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.drafting import Drafting
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.model_drafts import DraftModel
from swarm.bench.draft_texts import (
    ADVERSARIAL_TOKENS,
    COPY_TOKENS,
    KINDS,
    NOVEL_TOKENS,
    TURN_SETTLED,
    Piece,
    adversarial_pieces,
    copy_pieces,
    distinct_4gram_share,
    novel_pieces,
)
from swarm.bench.lookahead import LookaheadDrafter
from swarm.bench.popularity import open_local
from swarm.bench.testbed import PathOptions, Testbed, open_testbed
from swarm.dispatch.layer_counts import DispatchStats
from swarm.errors import UserError
from swarm.speculation.accept import DraftStats
from swarm.speculation.drafter import Drafter
from swarm.wire.rows import Wire

DRAFTERS = ("auto", "ngram", "local", "model", "lookahead", "off")
MAX_TEXT_BYTES = 400_000  # of a file of text; tokenising more only takes time
N_LEARN = 1000  # tokens whose routing is known before local experts are chosen
N_BATCH = EngineConfig().n_batch
Z95 = 1.645  # one-sided 95 % of a normal distribution

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """What to measure.

    Attributes:
        source: text from whose first half local experts are learned, and from whose second half texts are taken.
        local_share: of the model's experts, by bytes, that the backbone keeps; 0: none.
        forced_acceptance: None: real drafts.
        n_pieces: texts, each written with drafts and without.
        n_tokens: of each text; None: as its kind has it.
    """

    model: Path
    source: Path
    wire: Wire
    paths: PathOptions
    drafter: str = "auto"
    text: str = "novel"
    n_draft: int = 8
    local_share: float = 0.0
    draft_model: Path | None = None
    forced_acceptance: float | None = None
    n_pieces: int = 8
    n_tokens: int | None = None
    n_peers: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS or self.text not in KINDS:
            raise UserError(f"expected a drafter of {', '.join(DRAFTERS)} and a text of {', '.join(KINDS)}")
        if self.drafter == "local" and not self.local_share:
            raise UserError("--drafter local needs local experts: give --local-share, for example 0.5")
        if self.drafter == "model" and self.draft_model is None:
            raise UserError("--drafter model needs a --draft-model")


class Forced:
    """A `Drafter` that knows the text and is right with a given probability at each token."""

    def __init__(self, text: Sequence[int], acceptance: float, rng: np.random.Generator) -> None:
        self._text = text
        self._acceptance = acceptance
        self._rng = rng

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the next tokens, some of them wrong."""
        following = self._text[len(tokens) : len(tokens) + n]
        is_right = self._rng.random(len(following)) < self._acceptance
        return [token if right else (token + 1) % 200 for token, right in zip(following, is_right, strict=True)]


async def measure_speculation(options: SpeculationOptions, progress: Progress) -> dict[str, Any]:
    """Return the figures of `swarm bench speculation`.

    Raises:
        UserError: a text that is too short, or a draft model with another vocabulary.
    """
    engine = EngineConfig(n_ctx=512, n_threads=1)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-bench-")))
        opening = open_testbed(
            folder,
            options.model,
            n_peers=options.n_peers,
            wire=options.wire,
            paths=options.paths,
            engine=engine,
            adapt=lambda config: replace(config, n_slots=2),
        )
        testbed = await stack.enter_async_context(opening)
        text = read_tokens(options.source, testbed.running.engine)
        running = await _with_local(stack, testbed, options, engine, text)
        model: DraftModel | None = None
        if options.draft_model is not None:
            model = stack.enter_context(DraftModel(options.draft_model))
            model.require_same_vocabulary(running.engine.model)
        drafting = _drafting(options, running, model)
        pieces = _pieces(options, text)
        done: list[tuple[Piece, _Writer, _Writer]] = []
        for number, piece in enumerate(pieces):
            progress(number, len(pieces))
            drafter = _drafter(options, drafting, running.engine, piece, number, text)
            on = _Writer(running, piece, 0, options.n_draft, drafter)
            off = _Writer(running, piece, 1)
            for writer in (on, off):
                await writer.begin()
            while not (on.is_done and off.is_done):
                for writer in (on, off) if number % 2 else (off, on):
                    await writer.step()
            if drafter is not None:  # without drafts a turn shows nothing
                await on.turn()
            done.append((piece, on, off))
        progress(1, 1)
        return _figures(options, running, drafting, done)


def read_tokens(path: Path, engine: Engine) -> list[int]:
    """Return the tokens of a text file, of its beginning if it is long."""
    with path.open("rb") as file:
        text = file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    return engine.model.tokenize(text, add_special=False, parse_special=False)


async def _with_local(
    stack: contextlib.AsyncExitStack,
    testbed: Testbed,
    options: SpeculationOptions,
    engine: EngineConfig,
    text: list[int],
) -> RunningBackbone:
    """Return the backbone to measure: the testbed's, or one that keeps the experts that the text's first half uses most."""
    running = testbed.running
    if not options.local_share:
        return running
    for at in range(0, min(N_LEARN, len(text) // 2), N_BATCH // 2):
        part = text[at : at + N_BATCH // 2]
        await running.engine.call(running.engine.context.clear)
        await running.engine.call(lambda part=part: running.engine.decode(part, 0, "all"))  # type: ignore[misc]
    spec = running.manifest.spec
    all_bytes = spec.n_expert * sum(map(spec.block_size_bytes, spec.moe_layers))
    return await open_local(stack, testbed, engine, running.dispatcher.popularity, int(all_bytes * options.local_share))


def _drafting(options: SpeculationOptions, running: RunningBackbone, model: DraftModel | None) -> Drafting:
    wanted = options.drafter
    return Drafting(
        options.n_draft,
        local=running.local if wanted in ("auto", "local") else None,
        model=model if wanted in ("auto", "model") else None,
        has_ngram=wanted in ("auto", "ngram"),
    )


def _drafter(
    options: SpeculationOptions, drafting: Drafting, engine: Engine, piece: Piece, number: int, text: list[int]
) -> Drafter | None:
    if options.drafter == "off":
        return None
    if options.drafter == "lookahead":
        rng = np.random.default_rng((options.seed, number))
        return LookaheadDrafter(lambda row: int(engine.context.logits(row).argmax()), text, rng)
    if options.forced_acceptance is None:
        return drafting(engine, 0)
    if piece.target is None:
        raise UserError("--forced-acceptance needs a text that is given: --text copy")
    rng = np.random.default_rng((options.seed, number))
    return Forced([*piece.prompt, *piece.target], options.forced_acceptance, rng)


def _pieces(options: SpeculationOptions, text: list[int]) -> list[Piece]:
    second_half, n_tokens = text[len(text) // 2 :], options.n_tokens
    if options.text == "copy":
        return copy_pieces(second_half, options.n_pieces, options.seed, n_tokens=n_tokens or COPY_TOKENS)
    if options.text == "novel":
        return novel_pieces(second_half, options.n_pieces, n_tokens=n_tokens or NOVEL_TOKENS)
    n_tokens = n_tokens or ADVERSARIAL_TOKENS
    return adversarial_pieces(sorted(set(text)), options.n_pieces, options.seed, n_tokens=n_tokens)


class _Writer:
    """Writes one piece in a sequence of the engine; what counts begins behind the prompt's first token.

    Attributes:
        seconds: that its steps took, up to the turn.
        turned: steps behind the turn, but for those that drafts may take to begin.
    """

    def __init__(
        self, running: RunningBackbone, piece: Piece, sequence: int, n_draft: int = 0, drafter: Drafter | None = None
    ) -> None:
        self.seconds = 0.0
        self.tokens: list[int] = []
        self.drafts = DraftStats()
        self.turned = DraftStats()
        self.dispatch = DispatchStats()
        self._dispatcher = running.dispatcher
        self._piece = piece
        self._n_main = piece.n_tokens - piece.n_turn
        engine, given = running.engine, iter(piece.target or ())

        def draw(row: int) -> int:
            return int(engine.context.logits(row).argmax()) if piece.target is None else next(given)

        self._continuation = Continuation(
            engine,
            draw,
            n_batch=N_BATCH,
            n_draft=n_draft if drafter is not None else 0,
            drafter=drafter,
            stats=self.drafts,
            sequence=sequence,
        )

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self._n_main

    async def begin(self) -> None:
        """Compute the prompt and draw the first token."""
        await self._continuation.start(list(self._piece.prompt))
        self.tokens = [await self._continuation.first()]

    async def step(self) -> None:
        """Make one step, if any is left."""
        if self.is_done:
            return
        self._dispatcher.stats = self.dispatch
        began_at = time.perf_counter()
        self.tokens += await self._continuation.step(self._n_main - len(self.tokens))
        self.seconds += time.perf_counter() - began_at
        self._dispatcher.stats = DispatchStats()

    async def turn(self) -> None:
        """Write what is behind the turn."""
        n_more = 0
        while n_more < self._piece.n_turn:
            if n_more <= TURN_SETTLED:
                self._continuation.stats = self.turned = DraftStats()
            n_more += len(await self._continuation.step(self._piece.n_turn - n_more))


def _figures(
    options: SpeculationOptions,
    running: RunningBackbone,
    drafting: Drafting,
    done: list[tuple[Piece, _Writer, _Writer]],
) -> dict[str, Any]:
    ons, offs = [on for _, on, _ in done], [off for _, _, off in done]
    turns = [on.turned for piece, on, _ in done if piece.n_turn]
    speedups = [off.seconds / on.seconds for on, off in zip(ons, offs, strict=True)]
    logs = [math.log(each) for each in speedups]
    scatter = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    n_tokens = sum(len(each.tokens) - 1 for each in ons)
    n_steps = sum(each.drafts.n_steps for each in ons)
    n_drafted = sum(each.drafts.n_drafted for each in ons)
    accept_length = n_tokens / n_steps
    on_s, off_s = sum(each.seconds for each in ons), sum(each.seconds for each in offs)
    differ = [_first_difference(on.tokens, off.tokens) for on, off in zip(ons, offs, strict=True)]
    experience = drafting.experience(running.engine)
    n_trips, n_trips_off = (sum(each.dispatch.n_round_trips for each in of) for of in (ons, offs))
    n_rows, n_rows_off = (sum(each.dispatch.n_token_layers for each in of) for of in (ons, offs))
    return {
        "model": options.model.name,
        "n_peers": options.n_peers,
        "wire": str(options.wire),
        "rtt_s": options.paths.rtt_s(0),
        "drafter": options.drafter if options.forced_acceptance is None else "forced",
        "forced_acceptance": options.forced_acceptance,
        "text": options.text,
        "n_draft": options.n_draft,
        "local_share": options.local_share,
        "n_local_experts": len(running.local.experts) if running.local is not None else 0,
        "n_pieces": len(done),
        "n_tokens": n_tokens,
        "accept_length": accept_length,
        "tokens_per_s": n_tokens / on_s,
        "tokens_per_s_off": n_tokens / off_s,
        "speedup": statistics.median(speedups),
        "speedup_low": math.exp(statistics.fmean(logs) - Z95 * scatter),
        "speedups": speedups,
        "break_even_accept_length": (on_s / n_steps) / (off_s / n_tokens),
        "drafted_per_step": n_drafted / n_steps,
        "accepted_share": sum(each.drafts.n_accepted for each in ons) / n_drafted if n_drafted else None,
        "round_trips_per_token": n_trips / n_tokens,
        "extra_rows_share": n_rows / n_rows_off - 1,
        "extra_trips_share": n_trips / n_trips_off - 1 if n_trips_off else None,
        "choices_kept_share": sum(each.dispatch.n_local_assignments for each in offs)
        / sum(each.dispatch.n_assignments for each in offs),
        "skipped_trips_share": sum(each.dispatch.n_skipped_trips for each in offs)
        / (n_trips_off + sum(each.dispatch.n_skipped_trips for each in offs)),
        "accept_length_after_turn": statistics.fmean(each.accept_length for each in turns) if turns else None,
        "distinct_4gram_share": distinct_4gram_share([each.tokens for each in offs]),
        "first_differences": differ,
        "step_s_off": off_s / n_tokens,
        "draft_token_s": {name: cost.token_s for name, cost in experience.costs.items()},
        "drafted_by": dict(experience.n_drafted),
        "accepted_by": dict(experience.n_accepted),
    }


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
