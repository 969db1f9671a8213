"""What a caller asks of a backbone and what streams back: plain values shared by the engine, the gateway and the CLI."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn; llama.cpp's samplers do the drawing.

    Attributes:
        temperature: 0 is greedy; higher is more random.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches p; 1 keeps all.
        min_p: drop tokens below this share of the likeliest one's probability; 0 drops none.
        repeat_penalty: divides the logits of tokens drawn before, in llama.cpp's way; 1 changes nothing.
        logit_bias: (token, what is added to its logit); minus infinity bans the token.
        seed: of the sampler's generator; None draws one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature out of range: got {self.temperature}, expected 0 to 100")
        if self.top_k < 0:
            raise ValueError(f"top_k out of range: got {self.top_k}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p out of range: got {self.top_p}, expected above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p out of range: got {self.min_p}, expected 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} out of range: got {getattr(self, name)}, expected -2 to 2")
        if not 0 < self.repeat_penalty <= 10:
            raise ValueError(f"repeat_penalty out of range: got {self.repeat_penalty}, expected above 0 and at most 10")


class GrammarKind(StrEnum):
    """What the text of a `Grammar` is."""

    JSON_SCHEMA = "json_schema"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like, to the token."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt: text (tokenised with the model's own special tokens when `parse_special`), or token ids.
        add_special: begin a text with the token that the model begins texts with.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        stop: texts that end the answer and are not part of it.
        grammar: what the answer must look like; None: anything.
        n_logprobs: tell each token's log probability, and those of this many likeliest; None tells none.
        is_stream: False: nothing is read before the answer is complete, so until then it can be computed anew.
        is_traced: tell with the last delta where the time went.
        shows_special: write control tokens in the answer as text too, for whoever reads calls of tools from it.
        ignores_end: never draw a token that ends the answer: it goes on to `max_tokens`. For measurements.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    parse_special: bool = False
    add_special: bool = True
    grammar: Grammar | None = None
    n_logprobs: int | None = None
    shows_special: bool = False
    is_stream: bool = True
    is_traced: bool = False
    ignores_end: bool = False


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's natural logarithm of its probability, before temperature, penalties and grammar.

    Attributes:
        piece: the token's bytes, perhaps a part of a character.
        likeliest: (piece, log probability) of the likeliest tokens, best first.
    """

    piece: bytes
    logprob: float
    likeliest: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of an answer. `text` may be empty while a multi-byte character is incomplete.

    Attributes:
        n_prompt_tokens, n_completion_tokens: counts so far.
        n_cached_tokens: of the prompt's, those that were computed before.
        finish_reason: set on the last delta only.
        logprobs: of the tokens drawn since the delta before, if asked for. Their text may be in a later delta, or, after a
            stop text, in none.
        trace: with the last delta, if asked for: see `swarm.backbone.tracing`.
    """

    text: str
    n_prompt_tokens: int
    n_completion_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    trace: dict[str, Any] | None = None
    n_cached_tokens: int = 0


class TextGenerator(Protocol):
    """What the gateway needs of a backbone."""

    @property
    def model_name(self) -> str:
        """The name shown in `/v1/models`: `label@8hex`."""
        ...

    @property
    def n_ctx(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The GGUF's Jinja2 chat template, if it has one."""
        ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and `eos_token` as text, for the chat template."""
        ...

    def tokenize(self, request: GenerationRequest) -> list[int]:
        """Return the prompt's tokens; takes a good part of a second for a long text. Raises UserError as `generate`."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included. Raises UserError for an unknown token."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer; closing the iterator stops the work.

        Raises:
            UserError: the prompt is empty or does not fit the context.
            ExpertUnavailable: no live holder for some experts.
            Overloaded: the bounded waiting line is full.
        """
        ...
