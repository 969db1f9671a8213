"""Draws under grammars and biases, and their log probabilities, on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from swarm.backbone.drawing import Drawer
from swarm.backbone.grammar import GrammarVocabulary
from swarm.backbone.requests import GenerationRequest, Grammar, GrammarKind, SamplingParams
from swarm.errors import UserError
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.conftest import EMBEDDED

PROMPT = "The json module"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


class Holder:
    def __init__(self, model: LlamaModel) -> None:
        self.model = model


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    with LlamaModel(EMBEDDED / "model-Q8_0.gguf") as model:
        yield model


@pytest.fixture(scope="module")
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    with LlamaContext(model, n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1) as context:
        yield context


@pytest.fixture(scope="module")
def vocabulary(model: LlamaModel) -> GrammarVocabulary:
    return GrammarVocabulary(Holder(model))


def write(drawer: Drawer, model: LlamaModel, context: LlamaContext, n_most: int = 120) -> tuple[str, bool]:
    """Return what is drawn after the prompt, and whether it came to its own end."""
    tokens = model.tokenize(PROMPT, add_special=True, parse_special=False)
    context.clear()
    context.decode(tokens, first_position=0, logits="last")
    text = b""
    for position in range(len(tokens), len(tokens) + n_most):
        token = drawer.draw(context)
        if model.is_end_of_generation(token):
            return text.decode(), True
        text += model.piece(token)
        context.decode([token], first_position=position, logits="last")
    return text.decode(errors="replace"), False


def drawer_of(model: LlamaModel, vocabulary: GrammarVocabulary, kind: GrammarKind, text: str, **options: Any) -> Drawer:
    request = GenerationRequest(prompt=PROMPT, **options)
    return Drawer(request, model, vocabulary.matcher(Grammar(kind=kind, text=text)))


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_holds_every_answer(
    model: LlamaModel, context: LlamaContext, vocabulary: GrammarVocabulary, seed: int
) -> None:
    sampling = SamplingParams(temperature=2, seed=seed)
    drawer = drawer_of(model, vocabulary, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), sampling=sampling)
    text, is_whole = write(drawer, model, context)
    drawer.close()
    assert is_whole, text
    value = json.loads(text)
    assert sorted(value) == ["n", "name"]
    assert len(value["name"]) <= 6
    assert 0 <= value["n"] <= 99


def test_a_gbnf_grammar_holds_the_answer(
    model: LlamaModel, context: LlamaContext, vocabulary: GrammarVocabulary
) -> None:
    sampling = SamplingParams(temperature=0)
    drawer = drawer_of(model, vocabulary, GrammarKind.GBNF, 'root ::= "yes" | "no"', sampling=sampling)
    assert write(drawer, model, context) in {("yes", True), ("no", True)}
    drawer.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, "no json"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objekt"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://elsewhere.example/x"}'),
        (GrammarKind.GBNF, "root ::= ("),
        (GrammarKind.GBNF, "other"),
        (GrammarKind.GBNF, "root ::= " + "(" * 20_000),
        (GrammarKind.JSON_SCHEMA, " " * (256 * 1024 + 1)),
    ],
    ids=range(7),
)
def test_a_bad_grammar_is_the_askers_mistake(vocabulary: GrammarVocabulary, kind: GrammarKind, text: str) -> None:
    with pytest.raises(UserError, match=r"grammar|schema|gbnf"):
        vocabulary.matcher(Grammar(kind=kind, text=text))


def test_log_probabilities_are_those_of_the_models_logits(model: LlamaModel, context: LlamaContext) -> None:
    tokens = model.tokenize(PROMPT, add_special=True, parse_special=False)
    context.clear()
    context.decode(tokens, first_position=0, logits="last")
    logits = context.logits(-1).astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    banned = int(expected.argmax())
    request = GenerationRequest(
        prompt=PROMPT,
        n_logprobs=3,
        sampling=SamplingParams(temperature=0, logit_bias=((banned, -np.inf),)),
    )
    drawer = Drawer(request, model)
    token = drawer.draw(context)
    drawer.close()
    best = np.argsort(-expected)[:3]
    assert token == best[1]  # the best was banned
    (entry,) = drawer.logprobs
    assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
    assert [piece for piece, _ in entry.likeliest] == [model.piece(int(each), special=True) for each in best]
    assert [value for _, value in entry.likeliest] == pytest.approx(expected[best], abs=1e-4)


def test_a_bias_of_an_unknown_token_is_refused(model: LlamaModel) -> None:
    sampling = SamplingParams(logit_bias=((model.n_vocab, 1.0),))
    with pytest.raises(UserError, match="unknown token"):
        Drawer(GenerationRequest(prompt=PROMPT, sampling=sampling), model)


def test_what_was_drawn_before_is_penalised(model: LlamaModel, context: LlamaContext) -> None:
    """A huge penalty leaves no token that repeats, where greedy answers of this model do."""
    texts = []
    for penalty in (1.0, 10.0):
        request = GenerationRequest(prompt=PROMPT, sampling=SamplingParams(temperature=0, repeat_penalty=penalty))
        drawer = Drawer(request, model)
        texts.append(write(drawer, model, context, n_most=40)[0])
        drawer.close()
    n_distinct = [len(set(model.tokenize(text, add_special=False, parse_special=False))) for text in texts]
    assert n_distinct[1] > n_distinct[0]


def test_an_answer_that_ignores_its_end_never_draws_one(model: LlamaModel, context: LlamaContext) -> None:
    assert model.end_tokens
    assert all(model.is_end_of_generation(token) for token in model.end_tokens)
    wanted = SamplingParams(temperature=0, logit_bias=tuple((token, 100.0) for token in model.end_tokens))
    for ignores_end, is_ended in ((False, True), (True, False)):
        request = GenerationRequest(prompt=PROMPT, sampling=wanted, ignores_end=ignores_end)
        drawer = Drawer(request, model)
        try:
            assert write(drawer, model, context, n_most=5)[1] is is_ended
        finally:
            drawer.close()
