from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.backbone.requests import FinishReason, GenerationRequest, TextDelta, TokenLogprob
from swarm.errors import ExpertUnavailable, Overloaded, UserError
from swarm.gateway.access import MAX_BODY_BYTES, Access
from swarm.gateway.app import create_app

DEADLINE_S = 5.0  # of things that take a few milliseconds
EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_client.py"
MESSAGES: Any = [{"role": "user", "content": "say 日本"}]
CHAT = {"messages": MESSAGES}
COMPLETION = {"prompt": "say 日本"}
LOST = ExpertUnavailable(3, (5, 9), "peer lost")


class ScriptedGenerator:
    """A `TextGenerator` that plays a script: texts are yielded, exceptions raised, events waited for."""

    model_name = "tiny-moe@1a2b3c4d"
    n_ctx = 512

    def __init__(self, *script: str | Exception | asyncio.Event, chat_template: str | None = None) -> None:
        self.script: Sequence[str | Exception | asyncio.Event] = script
        self.chat_template = chat_template
        self.special_tokens = {"bos_token": "", "eos_token": ""}
        self.requests: list[GenerationRequest] = []
        self.logprobs: tuple[TokenLogprob, ...] = ()  # of each step
        self.trace: dict[str, Any] | None = None
        self.waiting = asyncio.Event()  # set when an event of the script is waited for
        self.closed = asyncio.Event()

    def tokenize(self, request: GenerationRequest) -> list[int]:
        assert isinstance(request.prompt, str)
        return [ord(each) for each in request.prompt]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        self.requests.append(request)
        try:
            for n_tokens, step in enumerate(self.script, start=1):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                    continue
                yield TextDelta(text=step, n_prompt_tokens=4, n_completion_tokens=n_tokens, logprobs=self.logprobs)
            n_tokens = len(self.script)
            yield TextDelta(
                text="",
                n_prompt_tokens=4,
                n_completion_tokens=n_tokens,
                finish_reason=FinishReason.LENGTH,
                trace=self.trace,
            )
            raise AssertionError("asked for more than the last delta")
        finally:
            self.closed.set()


class Client:
    """A plain HTTP client of one gateway, and where that is."""

    def __init__(self, session: aiohttp.ClientSession, host: str, port: int) -> None:
        self.get, self.post, self.options = session.get, session.post, session.options
        self.host, self.port = host, port
        self.base_url = f"http://{host}:{port}/v1"

    async def post_raw(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own; read nothing yet."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1024)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        return reader, writer


@contextlib.asynccontextmanager
async def serving(
    generator: ScriptedGenerator, *, handler_cancellation: bool = False, **options: Any
) -> AsyncIterator[Client]:
    """Serve on an ephemeral loopback port; yield a client of it."""
    app = create_app(generator, **options)
    runner = web.AppRunner(app, handler_cancellation=handler_cancellation, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield Client(session, host, port)
    finally:
        await runner.cleanup()


def sdk(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """Return the data of each server-sent event, parsed, up to the end of the body."""
    assert response.content_type == "text/event-stream"
    blocks = (await response.read()).decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


async def test_a_chat_streams_role_texts_finish_usage_done() -> None:
    generator = ScriptedGenerator("日", "", "本!")
    async with serving(generator) as client:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3, "temperature": 0}
        async with client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            chunks = await events(response)
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "日"},
        {"content": "本!"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert generator.closed.is_set()
    (request,) = generator.requests
    assert request.prompt == "<|im_start|>user\nsay 日本<|im_end|>\n<|im_start|>assistant\n"
    assert (request.max_tokens, request.sampling.temperature, request.parse_special) == (3, 0, True)


async def test_a_completion_streams_its_echo_first() -> None:
    async with (
        serving(ScriptedGenerator("a", "b")) as client,
        client.post("/v1/completions", json={**COMPLETION, "stream": True, "echo": True}) as response,
    ):
        chunks = await events(response)
    assert chunks.pop() == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["say 日本", "a", "b", ""]
    assert all("usage" not in chunk for chunk in chunks)


async def test_whole_answers_count_their_tokens() -> None:
    async with serving(ScriptedGenerator("日", "本")) as client:
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            chat = await response.json()
        async with client.post("/v1/completions", json={**COMPLETION, "echo": True}) as response:
            completion = await response.json()
    counts = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    usage = counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert (chat["choices"][0]["message"]["content"], chat["usage"]) == ("日本", usage)
    assert (completion["choices"][0]["text"], completion["usage"]) == ("say 日本日本", usage)
    assert chat["choices"][0]["finish_reason"] == "length"


async def test_the_official_client_talks_to_it() -> None:
    async with serving(ScriptedGenerator("日", "本", "!")) as client, sdk(client) as official:
        model = (await official.models.list()).data[0].id
        assert (await official.models.retrieve("tiny-moe")).id == model == ScriptedGenerator.model_name

        answer = await official.chat.completions.create(model=model, messages=MESSAGES)
        assert answer.choices[0].message.content == "日本!"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 7

        stream = await official.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "日本!"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3

        completion = await official.completions.create(model="1a2b3c4d", prompt=[1, 2, 3])
        assert completion.choices[0].text == "日本!"
        pieces = [piece async for piece in await official.completions.create(model=model, prompt="x", stream=True)]
        assert [piece.choices[0].text for piece in pieces] == ["日", "本", "!", ""]


async def test_the_example_streams_a_chat() -> None:
    generator = ScriptedGenerator("日", "本")
    async with serving(generator) as client:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, EXAMPLE, client.base_url, "where?"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PYTHONIOENCODING": "utf-8"},
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.decode() == "日本\n\n4 + 2 tokens of tiny-moe@1a2b3c4d\n"
    assert "where?" in str(generator.requests[0].prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_expert_before_the_first_text_is_a_503(stream: bool) -> None:
    generator = ScriptedGenerator(LOST)
    async with serving(generator) as client, sdk(client) as official:
        async with client.post("/v1/completions", json={**COMPLETION, "stream": stream}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            error = (await response.json())["error"]
        assert (error["code"], error["layer"], error["experts"]) == ("expert_unavailable", 3, [5, 9])
        assert error["message"] == str(LOST)
        with pytest.raises(openai.InternalServerError) as caught:
            await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, stream=stream)
        assert (caught.value.status_code, caught.value.code) == (503, "expert_unavailable")
        # and the gateway lives on
        generator.script = ("ok",)
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200
            await response.read()
    assert generator.closed.is_set()


async def test_a_lost_expert_in_mid_stream_is_an_error_event_and_no_done() -> None:
    async with serving(ScriptedGenerator("a", LOST)) as client, sdk(client) as official:
        async with client.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
            assert response.status == 200
            *chunks, last = await events(response)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"]
        assert (last["error"]["code"], last["error"]["layer"]) == ("expert_unavailable", 3)

        stream = await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "expert_unavailable"

        reader, writer = await client.post_raw("/v1/completions", {**COMPLETION, "stream": True})
        everything = await asyncio.wait_for(reader.read(), DEADLINE_S)  # ends, so the connection closed
        assert b"expert_unavailable" in everything
        writer.close()


async def test_a_lost_expert_after_some_text_fails_a_whole_answer() -> None:
    async with (
        serving(ScriptedGenerator("a", LOST)) as client,
        client.post("/v1/completions", json=COMPLETION) as response,
    ):
        assert response.status == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("the prompt does not fit: got 600 tokens, expected at most 512"), 400, None),
        (Overloaded("8 requests wait", retry_after_s=2.5), 429, "overloaded"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_the_generators_errors_have_their_statuses(
    error: Exception, status: int, code: str | None, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ScriptedGenerator(error)) as client, sdk(client) as official:
        with pytest.raises(openai.APIStatusError) as caught:
            await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("Retry-After") == ("3" if status == 429 else None)
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    if status == 500:
        assert "secret" not in caught.value.message
        assert [record.exc_info is not None for record in logged] == [True]
    else:
        assert str(error) in caught.value.message
        assert logged == []


async def test_an_answer_without_an_end_is_our_bug_and_said_so() -> None:
    class Endless(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
            yield TextDelta(text="a", n_prompt_tokens=1, n_completion_tokens=1)

    async with serving(Endless()) as client:
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 500
        async with client.post("/v1/completions", json={**COMPLETION, "stream": True}) as response:
            assert (await events(response))[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_to_close_does_not_spoil_a_sent_answer(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
            try:
                yield TextDelta(text="a", n_prompt_tokens=1, n_completion_tokens=1, finish_reason=FinishReason.STOP)
            finally:
                raise RuntimeError("cannot close")

    async with serving(Unclosable()) as client:
        for _ in range(2):  # the second on the same connection, which must still be in step
            async with client.post("/v1/completions", json={**COMPLETION, "stream": stream}) as response:
                body = await response.read()
            assert response.status == 200
            assert b'"text":"a"' in body
    assert caplog.text.count("RuntimeError: cannot close") == 2


@pytest.mark.parametrize("handler_cancellation", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("texts", [(), ("a",)], ids=["prefill", "decode"])
async def test_a_client_that_hangs_up_closes_its_generator(
    texts: tuple[str, ...], stream: bool, handler_cancellation: bool, caplog: pytest.LogCaptureFixture
) -> None:
    generator = ScriptedGenerator(*texts, asyncio.Event())
    async with serving(generator, handler_cancellation=handler_cancellation) as client:
        _, writer = await client.post_raw("/v1/completions", {**COMPLETION, "stream": stream})
        await asyncio.wait_for(generator.waiting.wait(), DEADLINE_S)
        assert not generator.closed.is_set()
        writer.close()
        await asyncio.wait_for(generator.closed.wait(), DEADLINE_S)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_iterator_that_outlives_cancellation_is_closed(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(AsyncGenerator[TextDelta, None]):
        """Work that only `aclose` ends."""

        async def asend(self, value: None) -> TextDelta:
            generator.waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def athrow(self, *_: Any) -> TextDelta:
            raise NotImplementedError

        async def aclose(self) -> None:
            generator.closed.set()

    generator = ScriptedGenerator()
    monkeypatch.setattr(generator, "generate", lambda request: Stubborn())
    async with serving(generator) as client:
        _, writer = await client.post_raw("/v1/completions", {**COMPLETION, "stream": stream})
        await asyncio.wait_for(generator.waiting.wait(), DEADLINE_S)
        writer.close()
        await asyncio.wait_for(generator.closed.wait(), DEADLINE_S)


async def test_a_client_that_stops_reading_closes_its_generator() -> None:
    generator = ScriptedGenerator(*["x" * 100_000] * 500)
    async with serving(generator, stall_s=0.1) as client:
        _, writer = await client.post_raw("/v1/completions", {**COMPLETION, "stream": True})
        await asyncio.wait_for(generator.closed.wait(), DEADLINE_S)
        writer.close()


async def test_a_shutdown_closes_what_runs() -> None:
    generator = ScriptedGenerator(asyncio.Event())
    async with serving(generator) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await asyncio.wait_for(generator.waiting.wait(), DEADLINE_S)
    await asyncio.wait_for(generator.closed.wait(), DEADLINE_S)
    with pytest.raises(aiohttp.ClientError):
        await request


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, dict[str, Any]]:
    """Return the status and the error object, once its shape is checked."""
    error = (await response.json())["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    return response.status, error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bad_bodies_are_refused_in_openais_shape(path: str) -> None:
    header = {"Content-Type": "application/json"}
    bad = [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"9" * 5000, b"\xef\xbb\xbf{}", b"null", b"{}"]
    async with serving(ScriptedGenerator("ok")) as client:
        for body in bad:
            async with client.post(path, data=body, headers=header) as response:
                assert (await refusal(response))[0] == 400, body[:20]
        async with client.post(path, data=b"hello", headers={**header, "Content-Encoding": "gzip"}) as response:
            assert (await refusal(response))[0] == 400
        bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
        async with client.post(path, data=bomb, headers={**header, "Content-Encoding": "gzip"}) as response:
            assert (await refusal(response))[0] == 413
        for data in (b"{}", b'{"prompt": "x"}'):
            async with client.post(path, data=data, headers={"Content-Type": "text/plain"}) as response:
                assert (await refusal(response))[0] == 415


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(is_chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async with serving(ScriptedGenerator("ok")) as client:
        data = pieces() if is_chunked else b" " * (MAX_BODY_BYTES + 1)
        async with client.post("/v1/completions", data=data, headers={"Content-Type": "application/json"}) as response:
            status, error = await refusal(response)
    assert status == 413
    assert str(MAX_BODY_BYTES) in error["message"]


async def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gateway.app.BODY_S", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with serving(ScriptedGenerator("ok")) as client:
        headers = {"Content-Type": "application/json"}
        async with client.post("/v1/completions", data=never(), headers=headers) as response:
            status, error = await refusal(response)
    assert status == 408
    assert error["message"] == "the body did not come within 0.05 s"


async def test_refusals_name_parameter_and_code() -> None:
    async with serving(ScriptedGenerator("ok")) as client, sdk(client) as official:
        with pytest.raises(openai.BadRequestError) as bad:
            await official.completions.create(model="tiny-moe", prompt="x", suffix="tail")
        assert (bad.value.param, bad.value.code) == ("suffix", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError) as missing:
            await official.completions.create(model="gpt-4o", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await official.models.retrieve("gpt-4o")
        async with client.post("/v1/completions", json={"model": "\ud800", "prompt": "x"}) as response:
            assert (await refusal(response))[0] == 404


async def test_wrong_paths_and_methods_have_openais_shape() -> None:
    async with serving(ScriptedGenerator("ok")) as client:
        async with client.get("/v2") as response:
            assert (await refusal(response))[0] == 404
        async with client.post("/api/chat", json={}) as response:  # Ollama's
            status, error = await refusal(response)
            assert (status, error["code"]) == (404, "unsupported_endpoint")
            assert error["message"] == "nothing is served at POST /api/chat: use /v1/chat/completions"
        async with client.get("/v1/completions") as response:
            assert (await refusal(response))[0] == 405
            assert response.headers["Allow"] == "POST"
        async with client.options("/v1/completions", headers={"Origin": "http://evil.example"}) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_models_names_the_one_served() -> None:
    async with serving(ScriptedGenerator()) as client, client.get("/v1/models") as response:
        listing = await response.json()
    (entry,) = listing["data"]
    assert listing["object"] == "list"
    assert (entry["id"], entry["object"], entry["meta"]) == ("tiny-moe@1a2b3c4d", "model", {"n_ctx": 512})


@pytest.mark.parametrize(
    ("status", "code", "body"),
    [
        (None, 200, {"status": "ok"}),
        (lambda: {"n_peers": 3, "reasons": []}, 200, {"status": "ok", "n_peers": 3, "reasons": []}),
        (
            lambda: {"reasons": ["no holder for experts 8-15"]},
            503,
            {"status": "unavailable", "reasons": ["no holder for experts 8-15"]},
        ),
    ],
)
async def test_health_gives_reasons(status: Callable[[], dict[str, Any]] | None, code: int, body: Any) -> None:
    async with serving(ScriptedGenerator(), status=status) as client, client.get("/health") as response:
        assert (response.status, await response.json()) == (code, body)


async def test_a_template_that_refuses_speaks_to_the_client() -> None:
    generator = ScriptedGenerator("ok", chat_template="{{ raise_exception('no system role') }}")
    async with serving(generator) as client, client.post("/v1/chat/completions", json=CHAT) as response:
        status, error = await refusal(response)
    assert (status, generator.requests) == (400, [])
    assert "no system role" in error["message"]


async def test_half_a_surrogate_pair_in_a_template_is_no_500() -> None:
    for template in (r"{{ raise_exception('\ud800') }}", r"{{ '\ud800' }}"):
        async with (
            serving(ScriptedGenerator("ok", chat_template=template)) as client,
            client.post("/v1/chat/completions", json=CHAT) as response,
        ):
            assert (await refusal(response))[0] == 400


async def test_a_broken_template_refuses_chats_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ScriptedGenerator("ok", chat_template="{% for %}")) as client:
        assert "chats will be refused" in caplog.text
        async with client.post("/v1/chat/completions", json=CHAT) as response:
            assert "does not compile" in (await refusal(response))[1]["message"]
        async with client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200


async def test_prompts_and_answers_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(ScriptedGenerator("the answer")) as client:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "a secret"}], "stream": stream}
            async with client.post("/v1/chat/completions", json=body) as response:
                await response.read()
        async with client.post("/v1/completions", json={"prompt": ["a secret", "b"]}) as response:
            await response.read()
    assert "finished (length), 4 + 1 tokens" in caplog.text
    assert "secret" not in caplog.text
    assert "the answer" not in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["prompt", "messages", "stream", "stream_options", "stop", "seed", "max_tokens", "model", "echo", "top_k", "n"]
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)
BODIES = st.one_of(
    st.binary(max_size=30),
    JSON.map(json.dumps).map(str.encode),
    FIELDS.map(lambda fields: json.dumps({**CHAT, **COMPLETION, **fields}).encode()),
)


def test_no_body_makes_a_500() -> None:
    with asyncio.Runner() as runner:

        async def start() -> Client:
            return await stack.enter_async_context(serving(ScriptedGenerator("ok")))

        async def post(client: Client, path: str, body: bytes) -> None:
            async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                await response.read()
                assert response.status in (200, 400, 404, 413), (path, body)

        stack = contextlib.AsyncExitStack()
        client = runner.run(start())
        try:

            @settings(max_examples=200, derandomize=True, deadline=None)
            @given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), BODIES)
            def check(path: str, body: bytes) -> None:
                runner.run(post(client, path, body))

            check()
        finally:
            runner.run(stack.aclose())


async def test_many_clients_at_once_do_not_mix(caplog: pytest.LogCaptureFixture) -> None:
    class Echo(ScriptedGenerator):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
            for number, letter in enumerate(str(request.prompt)):
                await asyncio.sleep(0)
                yield TextDelta(text=letter, n_prompt_tokens=1, n_completion_tokens=number)
            yield TextDelta(text="", n_prompt_tokens=1, n_completion_tokens=9, finish_reason=FinishReason.STOP)

    rng = random.Random(7)
    prompts = ["".join(rng.choices("abc", k=20)) for _ in range(20)]
    async with serving(Echo()) as client:

        async def ask(prompt: str) -> str:
            async with client.post("/v1/completions", json={"prompt": prompt, "stream": True}) as response:
                chunks = await events(response)
                return "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])

        assert await asyncio.gather(*map(ask, prompts)) == prompts


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_prompt_far_beyond_the_context_never_reaches_the_generator(path: str) -> None:
    text = "x" * (MAX_BODY_BYTES - 1000)
    async with serving(ScriptedGenerator("ok")) as client:
        body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        async with client.post(path, json=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
    assert error["code"] == "context_length_exceeded"
    assert "expected at most 32768 for 512 tokens of context" in error["message"]


async def test_a_conversation_that_its_template_swells_is_refused_too() -> None:
    generator = ScriptedGenerator("ok", chat_template="{% for m in messages %}" + "y" * 100 + "{% endfor %}")
    async with serving(generator) as client:
        turns = [{"role": "user", "content": "x"}] * 400
        async with client.post("/v1/chat/completions", json={"messages": turns}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
    assert generator.requests == []


REBOUND = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example:80", "192.0.2.1", ""]
REBOUND += ["[::1", "::1", "127.0.0.1:x", "localhost:80:80", "user@localhost", "[2001:db8::1]:80"]


@pytest.mark.parametrize("host", REBOUND)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_page_whose_name_was_bound_to_this_machine_is_refused(host: str, method: str) -> None:
    generator = ScriptedGenerator("ok")
    async with serving(generator, access=Access(allowed_hosts=["ours.example"])) as client:
        path, options = ("/v1/models", {}) if method == "GET" else ("/v1/completions", {"json": COMPLETION})
        ask = client.get if method == "GET" else client.post
        async with ask(path, headers={"Host": host}, **options) as response:
            assert response.status == 403
            error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "host_not_allowed")
    assert "--allow-host" in error["message"]
    assert generator.requests == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "127.0.0.1",
        "127.0.0.1:9",
        "[::1]",
        "[::1]:8080",
        "Ours.Example",
        "ours.example:443",
    ],
)
async def test_this_machines_names_and_allowed_ones_are_served(host: str) -> None:
    async with (
        serving(ScriptedGenerator("ok"), access=Access(allowed_hosts=["ours.EXAMPLE."])) as client,
        client.post("/v1/completions", json=COMPLETION, headers={"Host": host}) as response,
    ):
        assert response.status == 200


async def test_a_request_must_name_one_host() -> None:
    async with serving(ScriptedGenerator("ok"), access=Access(allowed_hosts=())) as client:
        for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(f"GET /v1/models HTTP/1.0\r\n{hosts}\r\n".encode())
            status = (await reader.readline()).split()[1]
            assert status in (b"403", b"400")  # aiohttp may refuse two by itself
            writer.close()


async def test_a_gateway_that_is_open_to_others_takes_every_name() -> None:
    async with (
        serving(ScriptedGenerator("ok")) as client,
        client.get("/v1/models", headers={"Host": "gateway.example"}) as response,
    ):
        assert response.status == 200


# Several answers, log probabilities, tools


async def test_several_answers_come_side_by_side() -> None:
    generator = ScriptedGenerator("a", "b")
    async with serving(generator) as client, sdk(client) as official:
        whole = await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, n=3, seed=5)
        assert [(each.index, each.message.content) for each in whole.choices] == [(0, "ab"), (1, "ab"), (2, "ab")]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 6)
        assert [request.sampling.seed for request in generator.requests] == [5, 6, 7]
        texts = {0: "", 1: ""}
        reasons = {}
        async for chunk in await official.completions.create(model="tiny-moe", prompt="x", n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == {0: "ab", 1: "ab"}
        assert reasons == {0: "length", 1: "length"}


async def test_of_several_answers_the_first_failure_ends_all() -> None:
    generator = ScriptedGenerator(LOST)
    async with serving(generator) as client:
        async with client.post("/v1/completions", json={**COMPLETION, "n": 2}) as response:
            assert (await refusal(response))[0] == 503
        await asyncio.wait_for(generator.closed.wait(), DEADLINE_S)


async def test_log_probabilities_are_read_by_the_official_client() -> None:
    generator = ScriptedGenerator("a")
    generator.logprobs = (TokenLogprob(piece=b"a", logprob=-0.5, likeliest=((b"b", -0.25),)),)
    async with serving(generator) as client, sdk(client) as official:
        whole = await official.chat.completions.create(
            model="tiny-moe", messages=MESSAGES, logprobs=True, top_logprobs=1
        )
        found = whole.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        assert (found.content[0].token, found.content[0].top_logprobs[0].logprob) == ("a", -0.25)
        plain = await official.completions.create(model="tiny-moe", prompt="x", logprobs=1)
        assert plain.choices[0].logprobs is not None
        assert plain.choices[0].logprobs.token_logprobs == [-0.5]
    assert [request.n_logprobs for request in generator.requests] == [1, 1]


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_tools_are_called_through_the_official_client() -> None:
    generator = ScriptedGenerator("Wait. <tool_", 'call>{"name": "add", ', '"arguments": {"a": 1}}</tool_call>')
    async with serving(generator) as client, sdk(client) as official:
        whole = await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, tools=TOOLS)
        message = whole.choices[0].message
        assert message.content == "Wait."
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert "<tools>" in str(generator.requests[0].prompt)
        stream = await official.chat.completions.create(model="tiny-moe", messages=MESSAGES, tools=TOOLS, stream=True)
        streamed = [each.delta.tool_calls async for chunk in stream for each in chunk.choices if each.delta.tool_calls]
        assert [(each[0].index, each[0].function.name) for each in streamed if each[0].function] == [(0, "add")]


async def test_a_call_that_is_required_is_begun_for_the_model() -> None:
    generator = ScriptedGenerator('{"name": "add", "arguments": {}}')
    async with serving(generator) as client, sdk(client) as official:
        whole = await official.chat.completions.create(
            model="tiny-moe", messages=MESSAGES, tools=TOOLS, tool_choice="required"
        )
        assert whole.choices[0].message.content is None
        assert whole.choices[0].message.tool_calls
    (request,) = generator.requests
    assert str(request.prompt).endswith("<|im_start|>assistant\n<tool_call>\n")
    assert request.grammar is not None


async def test_a_template_that_knows_tools_gets_them() -> None:
    template = "{% for tool in tools %}{{ tool.function.name }}<tool_call>{% endfor %}{{ flavour }}"
    generator = ScriptedGenerator("ok", chat_template=template)
    async with serving(generator) as client:
        body = {**CHAT, "tools": TOOLS, "chat_template_kwargs": {"flavour": "mint", "messages": []}}
        async with client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
    assert generator.requests[0].prompt == "add<tool_call>mint"


async def test_a_template_reads_how_hard_to_think() -> None:
    generator = ScriptedGenerator("ok", chat_template="effort {{ reasoning_effort }}")
    async with serving(generator) as client:
        for fields in ({}, {"chat_template_kwargs": {"reasoning_effort": "high"}}):
            async with client.post(
                "/v1/chat/completions", json={**CHAT, "reasoning_effort": "low", **fields}
            ) as response:
                assert response.status == 200
    assert [request.prompt for request in generator.requests] == ["effort low", "effort high"]


async def test_text_becomes_tokens_and_text_again() -> None:
    async with serving(ScriptedGenerator()) as client:
        async with client.post("/tokenize", json={"content": "ab"}) as response:
            assert await response.json() == {"tokens": [97, 98]}
        async with client.post("/detokenize", json={"tokens": [97, 98]}) as response:
            assert await response.json() == {"content": "ab"}
        async with client.post("/v1/embeddings", json={"input": "ab"}) as response:
            assert (await refusal(response))[0] == 400


async def test_ready_says_in_a_word_whether_requests_would_be_answered() -> None:
    reasons: list[str] = []
    async with serving(ScriptedGenerator(), status=lambda: {"reasons": reasons}) as client:
        async with client.get("/ready") as response:
            assert (response.status, await response.json()) == (200, {"ready": True})
        reasons.append("layer 3 lacks an expert")
        async with client.get("/ready") as response:
            assert (response.status, await response.json()) == (503, {"ready": False})
