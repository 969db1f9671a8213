"""`swarm chat`: talk to a gateway in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.cli.chat_session import AnswerStats, ChatSession
from swarm.cli.options import JsonOption
from swarm.cli.runtime import err, out, print_json, run_async
from swarm.errors import SwarmError
from swarm.files import Folders

DEFAULT_URL = "http://127.0.0.1:8080/v1"
HISTORY_FILE = "chat-history"  # in the state folder: what was typed, not what was answered
HELP = """/new          forget the conversation
/retry        ask the last question again
/system TEXT  begin anew with these instructions
/help         this list
/quit         leave (or Ctrl-D); Ctrl-C stops an answer"""

ReadLine = Callable[[], Awaitable[str]]


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Ask this and leave; - reads it from standard input.", show_default=False)
    ] = None,
    url: Annotated[
        str, typer.Option("--url", envvar="SWARM_URL", metavar="URL", help="The gateway's API.")
    ] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model to ask.", show_default="the one served")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="SWARM_API_KEY", metavar="KEY", help="If the gateway wants one.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="Instructions to begin with.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0 is greedy.", show_default="the gateway's: 1")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Longest answer.", show_default="to the end of the context"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Talk to a gateway: a conversation, or one question."""
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    session = ChatSession(
        url=url.rstrip("/"),
        model=model or "",
        api_key=api_key or "",
        options={name: value for name, value in options.items() if value is not None},
        turns=[{"role": "system", "content": system}] if system else [],
    )
    if question == "-" or (question is None and not sys.stdin.isatty()):
        question = sys.stdin.read()
    if question is not None:
        run_async(_ask_once(session, question.strip(), as_json))
        return
    history = Folders.from_environment().state / HISTORY_FILE
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)  # what was typed is nobody else's
    run_async(converse(session, line_reader(history)))


async def _ask_once(session: ChatSession, question: str, as_json: bool) -> None:
    async with session:
        text = ""
        async for piece in session.ask(question):
            text += piece
            if not as_json:
                show(piece)
        if as_json:
            print_json({"text": text, **stats_of(session.last)})
        else:
            out.print()
            err.print(stats_line(session.last), style="dim", highlight=False)


async def converse(session: ChatSession, read_line: ReadLine) -> None:
    """Talk until the person leaves. An error ends an answer, never the conversation."""
    async with session:
        name = await session.served_model()
        out.print(
            f"Talking to {printable(name)}. /help lists the commands.", style="dim", highlight=False, markup=False
        )
        last = ""
        while True:
            try:
                line = (await read_line()).strip()
            except EOFError:
                return
            except KeyboardInterrupt:  # clears the line, as in a shell
                continue
            if line.startswith("/"):
                if line == "/quit":
                    return
                line = _command(session, line, last)
            if line:
                last = line
                await answer(session, line)


async def answer(session: ChatSession, question: str) -> None:
    """Show one answer; Ctrl-C stops it, and what came so far is kept."""
    task = asyncio.ensure_future(_stream(session, question))
    loop = asyncio.get_running_loop()
    has_handler = True
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (NotImplementedError, RuntimeError):  # Windows, or not the main thread
        has_handler = False
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
            task.cancel()
            raise
        out.print(" [stopped]", style="dim", highlight=False, markup=False)
    except SwarmError as error:
        out.print()
        err.print(printable(str(error)), style="red", highlight=False, markup=False)
        return
    finally:
        if has_handler:
            loop.remove_signal_handler(signal.SIGINT)
    out.print(stats_line(session.last), style="dim", highlight=False)


async def _stream(session: ChatSession, question: str) -> None:
    async with contextlib.aclosing(session.ask(question)) as pieces:
        async for piece in pieces:
            show(piece)
    out.print()


def show(piece: str) -> None:
    """Print a piece of an answer at once, but for the control characters that could command the terminal."""
    out.file.write(printable(piece))  # rich would widen tabs and wrap each piece by itself
    out.file.flush()


def printable(text: str) -> str:
    """Return a text of others without what could command the terminal."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")


def _command(session: ChatSession, line: str, last: str) -> str:
    """Do what a command says; return what to ask, if anything."""
    word, _, rest = line.partition(" ")
    match word:
        case "/new":
            session.turns = [turn for turn in session.turns if turn["role"] == "system"]
        case "/system":
            session.turns = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
        case "/retry":
            if session.turns[-2:-1] == [{"role": "user", "content": last}]:  # else it had no answer
                del session.turns[-2:]
            return last
        case "/help":
            out.print(HELP, highlight=False, markup=False)
        case _:
            out.print(f"no such command: {word}; /help lists them", highlight=False, markup=False)
    return ""


def stats_of(stats: AnswerStats) -> dict[str, Any]:
    """Return the figures of an answer."""
    return {
        "n_prompt_tokens": stats.n_prompt_tokens,
        "n_completion_tokens": stats.n_completion_tokens,
        "first_piece_s": round(stats.first_piece_s, 3),
        "total_s": round(stats.total_s, 3),
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "finish_reason": stats.finish_reason,
    }


def stats_line(stats: AnswerStats) -> str:
    """Return the same for people."""
    return (
        f"{stats.n_completion_tokens} tokens, first after {stats.first_piece_s:.2f} s, "
        f"then {stats.tokens_per_s:.1f} tokens/s; prompt {stats.n_prompt_tokens} tokens"
    )


def line_reader(history: Path) -> ReadLine:
    """Return what reads a line from the terminal, with editing and a history that is kept."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    session: PromptSession[str] = PromptSession(history=FileHistory(str(history)))

    async def read() -> str:
        return await session.prompt_async("> ")

    return read
