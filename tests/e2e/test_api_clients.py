"""The API through two clients that others wrote, over a real swarm on the embedded model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from huggingface_hub import AsyncInferenceClient

from swarm.emulation.processes import LocalSwarm
from tests.e2e.conftest import N_EXPERT, wait_healthy

KEY = "sk-0123456789abcdef"
ASK: Any = [{"role": "user", "content": "What does the json module do?"}]
MODEL = "model-Q4_K_M"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory, tiny_moe: Path) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("api")
    keys = folder / "keys.txt"
    keys.write_text(f"# one a line\n{KEY}\n")
    async with LocalSwarm(folder) as processes:
        backbone = await processes.start_backbone(tiny_moe / "model-Q4_K_M.gguf", "--api-key-file", str(keys))
        await processes.add_peers(2, N_EXPERT)
        await wait_healthy(backbone.ready["url"])
        yield backbone.ready["url"]


def is_thing(text: str) -> bool:
    value = json.loads(text)
    return sorted(value) == ["n", "name"] and len(value["name"]) <= 8 and 0 <= value["n"] <= 9


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client(url: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        await openai.AsyncOpenAI(base_url=url, api_key="sk-wrong-wrong-wrong", max_retries=0).models.list()
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        chat: Any = client.chat.completions
        plain = await chat.create(model=model, messages=ASK, max_tokens=12, temperature=0)
        stream = await chat.create(
            model=model, messages=ASK, max_tokens=12, temperature=0, stream=True, logprobs=True, top_logprobs=2
        )
        texts, tokens = [], []
        async for chunk in stream:
            for choice in chunk.choices:
                texts.append(choice.delta.content or "")
                tokens += choice.logprobs.content if choice.logprobs else []
        assert "".join(texts) == plain.choices[0].message.content
        assert len(tokens) == plain.usage.completion_tokens
        assert all(token.top_logprobs[0].token == token.token for token in tokens)  # greedy

        held = await chat.create(model=model, messages=ASK, response_format=FORMAT, temperature=1, seed=3)
        assert is_thing(held.choices[0].message.content)
        called = await chat.create(model=model, messages=ASK, tools=TOOLS, tool_choice="required", seed=4)
        assert called.choices[0].finish_reason == "tool_calls"
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "look_up"
        assert is_thing(call.function.arguments)
        turns = [
            *ASK,
            called.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "found"},
        ]
        assert (await chat.create(model=model, messages=turns, tools=TOOLS, max_tokens=4)).choices

        two = await client.completions.create(model=model, prompt="import ", n=2, max_tokens=4, seed=1, temperature=1)
        assert [choice.index for choice in two.choices] == [0, 1]
        assert two.usage is not None
        assert two.usage.completion_tokens > 2
        banned = await client.completions.create(
            model=model, prompt="import ", max_tokens=1, temperature=0, logprobs=1, logit_bias={}
        )
        assert banned.choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError, match="bad json_schema"):
            await chat.create(model=model, messages=ASK, response_format={"type": "json_object", "schema": {"type": 5}})


@pytest.mark.asyncio(loop_scope="module")
async def test_the_client_of_hugging_face(url: str) -> None:
    async with AsyncInferenceClient(base_url=url, api_key=KEY) as client:
        answer = await client.chat_completion(ASK, model=MODEL, max_tokens=12, temperature=0)
        text = answer.choices[0].message.content
        pieces = []
        async for chunk in await client.chat_completion(ASK, model=MODEL, max_tokens=12, temperature=0, stream=True):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == text
        held = await client.chat_completion(ASK, model=MODEL, response_format=FORMAT, seed=3)
        assert is_thing(held.choices[0].message.content or "")
        called = await client.chat_completion(ASK, model=MODEL, tools=TOOLS, tool_choice="required", seed=4)
        assert called.choices[0].message.tool_calls is not None
        assert is_thing(str(called.choices[0].message.tool_calls[0].function.arguments))
