"""A smaller model drafts (`swarm serve --draft-model`): here the same one, over real peers; another vocabulary is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.backbone.assembly import BackboneConfig, RunningBackbone, open_backbone
from swarm.backbone.continuation import Continuation
from swarm.backbone.engine import EngineConfig
from swarm.backbone.model_drafts import DraftModel
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.emulation.processes import LocalSwarm
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.registry.client import parse_registry
from swarm.wire.rows import parse_wire
from tests.synthetic_moe import write_synthetic_moe

N_EXPERT = 32
COVER_TIMEOUT_S = 30.0
PROMPT = "The json module can be used to read and write text in the JSON format.\n"


async def written(running: RunningBackbone) -> str:
    """Return what is said greedily after the prompt."""
    await running.holders.wait_complete(COVER_TIMEOUT_S)
    request = GenerationRequest(prompt=PROMPT, sampling=SamplingParams(temperature=0), max_tokens=40)
    return "".join([delta.text async for delta in running.backbone.generate(request)])


async def test_its_drafts_stand_and_the_text_is_the_same(tmp_path: Path, tiny_moe: Path) -> None:
    model = tiny_moe / "model-Q8_0.gguf"

    def config(swarm: LocalSwarm, folder: str, **fields: object) -> BackboneConfig:
        return BackboneConfig(
            registry=parse_registry(swarm.registry),
            folders=Folders.below(tmp_path / folder),
            model_file=model,
            wire=parse_wire("f32"),
            host="127.0.0.1",
            engine=EngineConfig(n_ctx=256),
            **fields,  # type: ignore[arg-type]
        )

    async with LocalSwarm(tmp_path / "children") as swarm:
        await swarm.add_peers(2, N_EXPERT, "--model", str(model))
        async with open_backbone(config(swarm, "plain"), Identity.generate()) as running:
            expected = await written(running)
            n_plain = running.dispatcher.stats.n_round_trips
        drafting = config(swarm, "drafting", n_draft=6, draft_model=model)
        async with open_backbone(drafting, Identity.generate()) as running:
            assert await written(running) == expected
            assert running.dispatcher.stats.n_round_trips <= n_plain
            engine = running.engine
            with DraftModel(model) as drafts:  # always drafting, whether it pays or not
                continuation = Continuation(
                    engine,
                    lambda row: int(engine.context.logits(row).argmax()),
                    n_batch=512,
                    n_draft=6,
                    drafter=drafts.drafter(engine, 0),
                )
                await continuation.start(engine.model.tokenize(PROMPT, add_special=True, parse_special=False))
                tokens = [token async for token in continuation.tokens(40)]
            assert b"".join(engine.model.piece(token) for token in tokens).decode() == expected
            assert continuation.stats.accept_length > 5
        other = write_synthetic_moe(tmp_path / "other.gguf", architecture="qwen3moe", n_layers=1, seed=1)
        wrong = config(swarm, "wrong", n_draft=6, draft_model=other)
        with pytest.raises(UserError, match=r"the draft model other\.gguf has another vocabulary: got"):
            async with open_backbone(wrong, Identity.generate()):
                pass
