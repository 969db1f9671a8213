"""`swarm trace`: ask a gateway one question and show where its time went."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swarm.cli.chat import DEFAULT_URL, printable
from swarm.cli.chat_session import ChatSession
from swarm.cli.options import JsonOption
from swarm.cli.runtime import out, print_json, run_async
from swarm.errors import UserError

WIDTH = 30  # characters of a bar
STAGE_NAMES = {
    "queue": ("waiting for a slot", "white"),
    "local": ("attention and the rest, here", "blue"),
    "pack": ("packing rows", "cyan"),
    "network": ("on the way, there and back", "yellow"),
    "peer_queue": ("waiting at the slowest peer", "magenta"),
    "peer_compute": ("computing at the slowest peer", "green"),
    "combine": ("combining what returned", "cyan"),
}


def trace(
    question: Annotated[str, typer.Argument(help="What to ask.")] = "Say hello.",
    url: Annotated[
        str, typer.Option("--url", envvar="SWARM_URL", metavar="URL", help="The gateway's API.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="SWARM_API_KEY", metavar="KEY", help="If the gateway wants one.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 16,
    step: Annotated[
        int, typer.Option("--step", help="Which of the latest passes to show layer by layer; -1 is the last.")
    ] = -1,
    as_json: JsonOption = False,
) -> None:
    """Ask one question, and show where the time went: by stage, and of one step layer by layer and peer by peer."""
    answer = run_async(_ask(url.rstrip("/"), api_key or "", question, max_tokens))
    if as_json:
        print_json(answer)
        return
    show(answer, step)


async def _ask(url: str, api_key: str, question: str, max_tokens: int) -> dict[str, Any]:
    session = ChatSession(url=url, api_key=api_key, options={"max_tokens": max_tokens, "temperature": 0})
    session.headers["X-Swarm-Trace"] = "1"
    async with session:
        text = "".join([piece async for piece in session.ask(question)])
    if session.trace is None:
        raise UserError(f"{url} told no trace: it is not a gateway of `swarm serve`")
    return {"text": text, "n_completion_tokens": session.last.n_completion_tokens, **session.trace}


def show(answer: dict[str, Any], step: int) -> None:
    """Print an answer and its waterfall."""
    out.print(printable(answer["text"]), markup=False, highlight=False)
    out.print()
    total_s = max(answer["total_s"], 1e-9)
    table = Table(
        title=f"{answer['total_s']:.3f} s, {answer['n_passes']} passes through the model",
        title_justify="left",
        box=None,
    )
    for heading in ("", "s", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("")
    for name, (words, colour) in STAGE_NAMES.items():
        seconds = answer["stages"][name]
        bar = Text("█" * round(WIDTH * seconds / total_s), style=colour)
        table.add_row(words, f"{seconds:.3f}", f"{seconds / total_s:.0%}", bar)
    out.print(table)
    passes = answer["passes"]
    if not passes:
        return
    try:
        chosen = passes[step]
    except IndexError:
        raise UserError(f"no such pass: got --step {step}, there are {len(passes)}") from None
    _show_pass(chosen, len(passes))


def _show_pass(chosen: dict[str, Any], n_passes: int) -> None:
    layers = chosen["layers"]
    first_s, last = layers[0]["at_s"], layers[-1]
    span_s = max(last["at_s"] + last["pack_s"] + last["wait_s"] + last["combine_s"] - first_s, 1e-9)
    shared = f" beside {chosen['n_sequences'] - 1} other requests" if chosen["n_sequences"] > 1 else ""
    rows = "1 row" if chosen["n_rows"] == 1 else f"{chosen['n_rows']} rows"
    title = f"one of the latest {n_passes} passes: {rows}{shared}, {span_s * 1e3:.1f} ms"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("layer", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("slowest peer: ms, of it computing + waiting; peers asked")
    for layer in layers:
        begins = round(WIDTH * (layer["at_s"] - first_s) / span_s)
        took_s = layer["pack_s"] + layer["wait_s"] + layer["combine_s"]
        bar = Text(" " * begins + "█" * max(1, round(WIDTH * took_s / span_s)), style="yellow")
        slowest = max(layer["peers"], key=lambda peer: peer["s"], default=None)
        words = ""
        if slowest is not None:
            took, computing, waiting = (f"{slowest[name] * 1e3:.1f}" for name in ("s", "compute_s", "queue_s"))
            words = f"{slowest['peer']}: {took}, {computing} + {waiting}; {len(layer['peers'])}"
        table.add_row(str(layer["layer"]), f"{took_s * 1e3:.1f}", bar, words)
    out.print(table)
