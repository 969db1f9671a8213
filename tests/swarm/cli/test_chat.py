"""`swarm chat` against a gateway whose model plays a script."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm.cli import chat
from swarm.cli.chat_session import AnswerFailed, ChatSession
from swarm.errors import ExpertUnavailable, NetworkError
from swarm.gateway.access import Access
from tests.swarm.gateway.test_app import ScriptedGenerator, serving

LOST = ExpertUnavailable(3, (5,), "peer lost")
KEY = "sk-0123456789abcdef"


def lines(*given: str) -> chat.ReadLine:
    """Return a terminal at which somebody types these lines and then Ctrl-D."""
    left: Iterator[str] = iter(given)

    async def read() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


async def collect(session: ChatSession, question: str) -> str:
    return "".join([piece async for piece in session.ask(question)])


async def test_an_answer_streams_and_becomes_a_turn() -> None:
    generator = ScriptedGenerator("Hel", "lo")
    async with serving(generator) as client, ChatSession(url=client.base_url, options={"temperature": 0}) as session:
        assert await session.served_model() == "tiny-moe@1a2b3c4d"
        assert await collect(session, "hi") == "Hello"
        assert session.turns == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
        assert (session.last.n_prompt_tokens, session.last.n_completion_tokens) == (4, 2)
        assert session.last.finish_reason == "length"
        await collect(session, "again")
    assert "Hello" in str(generator.requests[1].prompt)
    assert generator.requests[0].sampling.temperature == 0


async def test_what_the_gateway_says_of_a_failure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(ScriptedGenerator("a", LOST)) as client:
        async with ChatSession(url=client.base_url) as session:
            with pytest.raises(AnswerFailed, match="no answer for layer 3"):
                await collect(session, "hi")
            assert session.turns[-1]["content"] == "a"
        await chat.converse(ChatSession(url=client.base_url), lines("hi", "hi"))
    assert capsys.readouterr().err.count("no answer for layer 3") == 2  # the conversation went on


async def test_a_key_is_sent_and_its_lack_is_told() -> None:
    async with serving(ScriptedGenerator("ok"), access=Access(api_keys=(KEY,))) as client:
        async with ChatSession(url=client.base_url, api_key=KEY) as session:
            assert await collect(session, "hi") == "ok"
        async with ChatSession(url=client.base_url) as session:
            with pytest.raises(AnswerFailed, match="API key"):
                await session.served_model()


async def test_nobody_there_is_a_network_error() -> None:
    async with ChatSession(url="http://127.0.0.1:1/v1") as session:
        with pytest.raises(NetworkError, match=r"127\.0\.0\.1:1"):
            await session.served_model()
        with pytest.raises(NetworkError):
            await collect(session, "hi")
    assert session.turns == []


async def test_closing_an_answer_keeps_what_came() -> None:
    generator = ScriptedGenerator("one", asyncio.Event())
    async with serving(generator) as client, ChatSession(url=client.base_url) as session:
        async with aclosing(session.ask("hi")) as pieces:
            assert await anext(pieces) == "one"
        assert session.turns[-1] == {"role": "assistant", "content": "one"}
        await asyncio.wait_for(generator.closed.wait(), 5)  # the backbone's work ends too


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    generator = ScriptedGenerator("one", asyncio.Event())

    async def interrupt() -> None:
        await generator.waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    async with serving(generator) as client:
        session = ChatSession(url=client.base_url)
        interrupting = asyncio.create_task(interrupt())
        await asyncio.wait_for(chat.converse(session, lines("hi", "/help")), 10)
        await interrupting
    shown = capsys.readouterr().out
    assert "one [stopped]" in shown
    assert "/retry" in shown


async def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    generator = ScriptedGenerator("ok")
    async with serving(generator) as client:
        session = ChatSession(url=client.base_url, turns=[{"role": "system", "content": "brief"}])
        await chat.converse(
            session, lines("a", "/retry", "/new", "b", "/system be rude", "c", "/nonsense", "/quit", "d")
        )
    prompts = [str(request.prompt) for request in generator.requests]
    assert [prompt.count("<|im_start|>user") for prompt in prompts] == [1, 1, 1, 1]
    assert ["brief" in prompt for prompt in prompts] == [True, True, True, False]
    assert "be rude" in prompts[3]
    assert "no such command: /nonsense" in capsys.readouterr().out


def test_an_answer_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    chat.show("a\x1b[2Jb\n\tc\x07")
    assert capsys.readouterr().out == "a[2Jb\n\tc"


async def test_a_question_that_failed_is_asked_again_and_takes_no_other_turn_away() -> None:
    generator = ScriptedGenerator("ok")
    async with serving(generator) as client, ChatSession(url=client.base_url) as session:
        await collect(session, "first")
        chat._command(session, "/retry", "second")
        assert [turn["content"] for turn in session.turns] == ["first", "ok"]
        chat._command(session, "/retry", "first")
        assert session.turns == []


def test_what_was_typed_is_kept_where_nobody_else_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    monkeypatch.setattr(chat, "line_reader", lambda history: lines())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(chat, "run_async", lambda main: main.close())
    chat.chat()
    assert (tmp_path / "state" / chat.HISTORY_FILE).stat().st_mode & 0o777 == 0o600
