"""A backbone whose requests draft by several drafters, several at once: each text as it is alone and without drafts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from swarm.backbone.drafting import Drafting
from swarm.backbone.engine import Engine, EngineConfig
from swarm.backbone.generate import Backbone, ServingConfig
from swarm.backbone.local_experts import LocalExperts
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.source import GgufSource
from swarm.speculation import controller
from tests.swarm.backbone.local_experts import LocalExperts as AllExperts
from tests.swarm.backbone.local_experts import SplitModel
from tests.swarm.backbone.test_generate import FakeHolders

# Prompts and how many tokens the model says after them with the two best logits at least 0.2 apart, so that a batch of another
# size, which may sum in another order, changes none.
PROMPTS = (
    (
        "`zipimport`.\n\n.. note::\n\n   This module provides functionality similar to `pkg_resources\n"
        "   <https://setuptools.readthed",
        40,
    ),
    (
        "and each value is a dict describing how to configure\n  the corresponding Filter instance.\n\n"
        "  The configuring dict is sea",
        40,
    ),
    (
        "ed version of the module's code.\n   The :term:`finder` should always set this attribute but it may be ``None``\n"
        "   for mo",
        24,
    ),
)
DELAY_S = 0.02  # of a layer: then drafts pay


class SlowExperts:
    """Experts behind a round trip."""

    def __init__(self, experts: AllExperts) -> None:
        self._experts = experts
        self.n_trips = 0

    async def dispatch(self, layer, x, topk_ids, topk_weights, origin=None):  # type: ignore[no-untyped-def]
        self.n_trips += 1
        await asyncio.sleep(DELAY_S if layer == 0 else 0.0)
        return self._experts.compute(layer, x, topk_ids, topk_weights)


@pytest.fixture
def slow(experts: AllExperts) -> SlowExperts:
    return SlowExperts(experts)


@pytest_asyncio.fixture
async def engine(tiny: SplitModel, slow: SlowExperts) -> AsyncIterator[Engine]:
    config = EngineConfig(n_ctx=384, n_batch=64, n_ubatch=64, n_threads=1, n_sequences=3)
    engine = Engine(tiny.backbone, tiny.spec, config, slow)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def local(tiny: SplitModel) -> Iterator[LocalExperts]:
    local = LocalExperts(tiny.spec)
    with GgufFile(tiny.file) as file:
        local.change(ExpertSet.of(tiny.spec.moe_layers, range(24)), GgufSource(file).read_block)
    yield local
    local.close()


async def texts(engine: Engine, drafting: Drafting | None) -> list[str]:
    """Return the answers to all prompts, asked at once."""

    async def answer(backbone: Backbone, prompt: str, n_tokens: int) -> str:
        request = GenerationRequest(prompt=prompt, sampling=SamplingParams(temperature=0), max_tokens=n_tokens)
        return "".join([delta.text async for delta in backbone.generate(request)])

    config = ServingConfig(cache_bytes=0, n_draft=8 if drafting is not None else 0)
    holders = FakeHolders()
    async with Backbone(engine, holders, "tiny@1", n_slots=3, config=config, proposer=drafting) as backbone:  # type: ignore[arg-type]
        return list(await asyncio.gather(*(answer(backbone, *prompt) for prompt in PROMPTS)))


async def test_drafts_change_no_text_and_save_round_trips(
    engine: Engine, slow: SlowExperts, local: LocalExperts
) -> None:
    expected = await texts(engine, None)
    n_plain, slow.n_trips = slow.n_trips, 0
    drafting = Drafting(8, local=local)
    assert await texts(engine, drafting) == expected
    assert slow.n_trips < 0.8 * n_plain
    counts = drafting.counts()
    assert counts["local"][1] > 0
    assert all(0 <= n_accepted <= n_drafted for n_drafted, n_accepted in counts.values())


async def test_what_was_measured_is_known_to_later_sequences_of_an_engine(engine: Engine, local: LocalExperts) -> None:
    drafting = Drafting(8, local=local)
    await texts(engine, drafting)
    experience = drafting.experience(engine)
    assert experience.steps.step_s(1) > DELAY_S / 2
    assert 0 < experience.costs["local"].token_s < DELAY_S
    assert drafting(engine, 0)._experience is experience
    assert isinstance(drafting(engine, 0), controller.Controller)
