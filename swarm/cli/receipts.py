"""`swarm receipts`: what this machine's peers have done, and whether what others present is true."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from swarm.cli.options import JsonOption, ReceiptsFromOption, RegistryOption, settle_nodes
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import out, print_json, run_async
from swarm.errors import NetworkError, RemoteProtocolError, UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.pool import Pool
from swarm.registry.client import DEFAULT_REGISTRY, RegistryClient
from swarm.registry.gatherer import MAX_STATUS_BYTES, receipts_of
from swarm.registry.leaderboard import MAX_PRESENTED
from swarm.registry.records import ExpertAnnouncement
from swarm.wire import messages as m
from swarm.wire.receipts import DAY_S, Receipt, Totals, highest, read_receipt, receipt_bytes, total

app = typer.Typer(
    name="receipts",
    no_args_is_help=True,
    add_completion=False,
    help="What peers have done, as backbones have signed it.",
)

MAX_FILE_BYTES = 4 << 20  # eight times what a peer keeps
MAX_SHOWN_BAD = 20
ASK_TIMEOUT_S = 4.0
LAST_DATE = 2_932_896  # the year 9999: later days have no date


@app.callback()
def receipts() -> None:
    """Set nothing up: it makes the commands subcommands."""


@app.command("ls")
def list_receipts(as_json: JsonOption = False) -> None:
    """List what the peers of this machine have receipts of, and where they are kept."""
    folder = Folders.from_environment().state
    files = [path for path in sorted(folder.glob("*.receipts")) if path.is_file()]
    found = [{"file": str(path), **check(_lines_of(path))} for path in files]
    if as_json:
        print_json({"files": found})
        return
    if not found:
        out.print(f"No receipts yet in {folder}: a peer gets them from the backbones that it computes for.")
    for each in found:
        out.print(each["file"], highlight=False, markup=False)
        _print(each)


@app.command()
def verify(
    file: Annotated[
        Path | None, typer.Argument(help="A file of receipts, one a line, as `swarm receipts ls` names them.")
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            "--peer", metavar="NODEID", help="Ask this peer for what it presents; its first letters are enough."
        ),
    ] = None,
    receipts_from: ReceiptsFromOption = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
    as_json: JsonOption = False,
) -> None:
    """Check receipts, and tell what they add up to; exits 1 if one of them is forged, changed or damaged.

    A good receipt proves that its backbone signed it. Whether that backbone counts is for you to say: --receipts-from.
    """
    if (file is None) == (peer is None):
        raise UserError("give either a file of receipts or --peer NODEID")
    counted = settle_nodes(receipts_from)
    if file is not None:
        checked = check(_lines_of(file), counted=counted)
    else:
        assert peer is not None
        node, texts = run_async(_ask(peer, registry))
        checked = check(texts, counted=counted, expected=node)
    if as_json:
        print_json(checked)
    else:
        _print(checked)
    if checked["bad"]:
        raise typer.Exit(1)


def check(
    texts: Iterable[object], *, counted: frozenset[NodeId] = frozenset(), expected: NodeId | None = None
) -> dict[str, Any]:
    """Return what untrusted receipts add up to, by peer and backbone, and which are bad.

    Args:
        counted: the backbones whose receipts count; empty: all of them.
        expected: the only peer whose receipts these may be.
    """
    good: list[Receipt] = []
    bad: list[dict[str, Any]] = []  # the first few: a strange file may have millions
    n_bad = 0
    for number, text in enumerate(texts, 1):
        try:
            receipt = read_receipt(receipt_bytes(text))
            if expected is not None and receipt.peer != expected:
                raise RemoteProtocolError(f"receipt of another peer: got {receipt.peer.short}")
            good.append(receipt)
        except RemoteProtocolError as error:
            n_bad += 1
            if len(bad) < MAX_SHOWN_BAD:
                bad.append({"number": number, "why": str(error)})
    kept = list(highest(good).values())
    peers = []
    of_peer: dict[NodeId, list[Receipt]] = {}
    for receipt in kept:
        of_peer.setdefault(receipt.peer, []).append(receipt)
    for node, mine in sorted(of_peer.items(), key=lambda each: each[0]):
        by = []
        of_backbone: dict[NodeId, list[Receipt]] = {}
        for receipt in mine:
            of_backbone.setdefault(receipt.backbone, []).append(receipt)
        for backbone, of_one in sorted(of_backbone.items(), key=lambda each: each[0]):
            days = [receipt.day for receipt in of_one]
            by.append(
                {
                    "backbone": str(backbone),
                    "counts": not counted or backbone in counted,
                    "first_day": _date(min(days)),
                    "last_day": _date(max(days)),
                    **_counts(total(of_one)),
                }
            )
        of_counted = total(receipt for receipt in mine if not counted or receipt.backbone in counted)
        peers.append({"peer": str(node), **_counts(of_counted), "by": by})
    return {
        "n_receipts": len(good) + n_bad,
        "n_superseded": len(good) - len(kept),
        "n_bad": n_bad,
        "bad": bad,
        "peers": peers,
    }


def _counts(totals: Totals) -> dict[str, int]:
    return {"rows": totals.n_rows, "pairs": totals.n_pairs, "points": totals.points}


def _date(day: int) -> str:
    return datetime.datetime.fromtimestamp(min(day, LAST_DATE) * DAY_S, datetime.UTC).date().isoformat()


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a file of receipts; raises UserError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} is too large for receipts: expected at most {MAX_FILE_BYTES >> 20} MB")
    return data.decode("ascii", errors="replace").split()


async def _ask(peer: str, registry: str) -> tuple[NodeId, list[object]]:
    """Return who a peer is and what it presents, at most MAX_PRESENTED receipts.

    Raises:
        UserError: nobody, or several, have that name.
        NetworkError, RemoteProtocolError: it does not answer, or not as it should.
    """
    nodes = await settle_registries(registry, Folders.from_environment())
    async with Endpoint(Identity.generate()) as endpoint, PathFinder(endpoint, takes_calls=False) as finder:
        client, pool = RegistryClient(finder, nodes), Pool(endpoint, finder)
        try:
            records = [each for each in await client.records() if isinstance(each, ExpertAnnouncement)]
            found = {each.node: each for each in records if str(each.node).startswith(peer.lower())}
            if len(found) != 1:
                known = ", ".join(sorted(node.short for node in found) or sorted({each.node.short for each in records}))
                raise UserError(
                    f"{len(found)} peers have ids that begin with {peer[:60]!r}: {known or 'there are none'}"
                )
            (record,) = found.values()
            connection = await pool.reach(record, timeout_s=ASK_TIMEOUT_S)
            answer = await connection.request(m.GetStatus(), timeout_s=ASK_TIMEOUT_S, max_answer_bytes=MAX_STATUS_BYTES)
            assert isinstance(answer, m.Status)  # the session checks an answer's type
        finally:
            await pool.close()
    texts = receipts_of(answer.data)
    if texts is None:
        raise NetworkError(
            f"peer {record.node.short} presents no receipts: its owner gave it no --name, or it is older"
        )
    if not isinstance(texts, list):
        raise RemoteProtocolError(f"peer {record.node.short} presents {type(texts).__name__}, expected a list")
    return record.node, texts[:MAX_PRESENTED]


def _print(checked: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 1))
    for column in ("peer", "backbone", "days", "points", "rows", "pairs", ""):
        table.add_column(column, justify="right" if column in ("points", "rows", "pairs") else "left")
    for peer in checked["peers"]:
        for each in peer["by"]:
            days = each["first_day"]
            if each["last_day"] != days:
                days += f" to {each['last_day']}"
            numbers = [f"{each[key]:,}" for key in ("points", "rows", "pairs")]
            table.add_row(
                peer["peer"][:8], each["backbone"][:8], days, *numbers, "" if each["counts"] else "does not count"
            )
        if len(peer["by"]) > 1:
            table.add_row(peer["peer"][:8], "all", "", *(f"{peer[key]:,}" for key in ("points", "rows", "pairs")), "")
    if checked["peers"]:
        out.print(table)
    n_good = checked["n_receipts"] - checked["n_bad"]
    out.print(f"{n_good} good, {checked['n_superseded']} of them superseded; {checked['n_bad']} bad.", highlight=False)
    for each in checked["bad"]:
        out.print(f"  number {each['number']}: {each['why']}", highlight=False, markup=False)
