"""What a caller asks of a backbone and what streams back: plain values shared by the engine, the gateway and the CLI."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn; llama.cpp's samplers do the drawing.

    Attributes:
        temperature: 0 is greedy; higher is more random.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches p; 1 keeps all.
        min_p: drop tokens below this share of the likeliest one's probability; 0 drops none.
        seed: of the sampler's generator; None draws one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt: text (tokenised with the model's own special tokens when `parse_special`), or token ids.
        max_tokens: most tokens to generate; None goes on to the end of the context.
        stop: texts that end the answer and are not part of it.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    parse_special: bool = False


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of an answer. `text` may be empty while a multi-byte character is incomplete.

    Attributes:
        n_prompt_tokens, n_completion_tokens: counts so far.
        finish_reason: set on the last delta only.
    """

    text: str
    n_prompt_tokens: int
    n_completion_tokens: int
    finish_reason: FinishReason | None = None


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

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer; closing the iterator stops the work.

        Raises:
            UserError: the prompt is empty or does not fit the context.
            ExpertUnavailable: no live holder for some experts.
            Overloaded: the bounded waiting line is full.
        """
        ...
