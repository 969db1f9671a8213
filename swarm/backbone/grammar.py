"""Holds an answer to a JSON schema or a grammar, token by token. The work is llguidance's; here it meets the model's vocabulary.

Schemas and grammars come from strangers: llguidance bounds what they cost (its `LLParserLimits`), their length is bounded here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from swarm.backbone.requests import Grammar, GrammarKind
from swarm.errors import UserError
from swarm.native.llama import LlamaModel

if TYPE_CHECKING:  # else imported when the first answer is held to something: 2.4 MB
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 256 * 1024  # guessed: the longest published JSON schemas have some 200 Ki
JSON_SPACE = (
    r" |\n[ \t]{0,20}|"  # between JSON's tokens, as llama.cpp: without a bound a model may write blanks for ever
)
SPECIAL = b"\xff"  # llguidance's mark of a token that no text can spell


class HasModel(Protocol):
    """An engine."""

    @property
    def model(self) -> LlamaModel:
        """The loaded model."""
        ...


class GrammarVocabulary:
    """A model's tokens in llguidance's form; made at the first use, which takes about a second for 150,000 tokens."""

    def __init__(self, owner: HasModel) -> None:
        """`owner`: of the model, which is asked for at the first use: an engine may not have loaded it yet."""
        self._owner = owner
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the grammar's start; not for the event loop's thread.

        Raises:
            UserError: the grammar is malformed, or more complex than its limits allow.
        """
        from llguidance import LLMatcher, grammar_from

        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise UserError(
                f"the grammar is too long: got {len(grammar.text)} characters, expected at most {MAX_GRAMMAR_CHARS}"
            )
        try:
            if grammar.kind is GrammarKind.JSON_SCHEMA:
                options: Any = {"whitespace_pattern": JSON_SPACE}
                compiled = LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
            else:
                compiled = grammar_from("gbnf", grammar.text)
        except Exception as error:  # its parsers raise what they like
            raise UserError(f"bad {grammar.kind.value}: {str(error)[:500]}") from error
        matcher = LLMatcher(self._made(), compiled, log_level=0)
        if matcher.is_error():
            raise UserError(f"bad {grammar.kind.value}: {_first_line(matcher.get_error())}")
        return GrammarMatcher(matcher, self._owner.model.n_vocab)

    def _made(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                model = self._owner.model
                vocabulary = _Vocabulary(model)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary), n_vocab=model.n_vocab, eos_token=vocabulary.ends
                )
            return self._tokenizer


class GrammarMatcher:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, [V]; at least one of them may.

        Raises:
            UserError: the grammar went past a limit while it was matched.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._n_vocab].view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by one token that was allowed. Raises UserError as `allowed`."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> GrammarMatcher:
        """Return a matcher at the same place that goes on by itself."""
        return GrammarMatcher(self._matcher.deep_copy(), self._n_vocab)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")


class _Vocabulary:
    """What `TokenizerWrapper` reads."""

    def __init__(self, model: LlamaModel) -> None:
        tokens = range(model.n_vocab)
        self._model = model
        self.ends = [token for token in tokens if model.is_end_of_generation(token)]
        if not self.ends:
            raise UserError("this model has no token that ends an answer: its answers cannot be held to a grammar")
        self.bos_token_id = model.bos_token
        self.eos_token_id = model.eos_token if model.eos_token in self.ends else self.ends[0]
        self.special_token_ids = [token for token in tokens if _is_special(model, token)]
        special = set(self.special_token_ids)
        self.tokens = [
            SPECIAL + model.piece(token, special=True) if token in special else model.piece(token) for token in tokens
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._model.tokenize(text, add_special=False, parse_special=False)


def _is_special(model: LlamaModel, token: int) -> bool:
    """Return whether no text spells the token: control tokens, and marks such as <tool_call> that a model was given."""
    if model.is_control(token) or model.is_end_of_generation(token):
        return True
    piece = model.piece(token, special=True)
    return model.is_user_defined(token) and piece.startswith(b"<") and piece.endswith(b">")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
