"""`swarm peers`: who is there, with what, whether a model is complete, and who has done how much."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from swarm.cli.options import JsonOption, ReceiptsFromOption, RegistryOption, settle_nodes
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import out, print_json, run_async
from swarm.dispatch.audit_standing import MAX_REASON, Verdict
from swarm.errors import SwarmError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import NodeId, format_index_set, parse_index_set
from swarm.net.addresses import is_loopback
from swarm.net.endpoint import Endpoint
from swarm.net.path_finder import PathFinder
from swarm.net.pool import Pool
from swarm.registry.client import DEFAULT_REGISTRY, RegistryAddress, RegistryClient
from swarm.registry.leaderboard import Leaderboard, Ledger
from swarm.registry.names import shown_name
from swarm.registry.publishers import Publishers, own_publishers
from swarm.registry.records import MAX_PAIRS, ExpertAnnouncement, ModelOffer
from swarm.wire import messages as m
from swarm.wire.receipts import day_of

ASK_TIMEOUT_S = 2.0
SETTLE_S = 2.0  # for a punched hole: what a backbone that stays would use
MAX_ASKED_AT_ONCE = 32
MAX_VERDICTS = 256  # taken from one backbone; as many as one tells (`auditor.MAX_REPORTED`)
MAX_TIME = 32_503_680_000  # the year 3000: later times have no date
WORST_FIRST = (Verdict.CAUGHT, Verdict.SUSPECTED, Verdict.NEW, Verdict.HONEST)
SHOWN_VERDICT: dict[str, type] = {"node": str, "verdict": str, "n_passed": int, "n_disagreed": int, "at": int}
SHOWN_STATUS: dict[str, type | tuple[type, ...]] = {"n_assignments": int, "version": str, "uptime_s": (int, float)}


def peers(
    registry: RegistryOption = DEFAULT_REGISTRY,
    leaderboard: Annotated[
        bool,
        typer.Option(
            "--leaderboard",
            help="Who has computed how much in the last days, among those who show a name; no more than that.",
        ),
    ] = False,
    receipts_from: ReceiptsFromOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models on offer, the peers that hold their experts, and what is missing."""
    report = run_async(_report(registry, settle_nodes(receipts_from)))
    if as_json:
        print_json(report)
        return
    if leaderboard:
        _print_leaderboard(report["leaderboard"])
        return
    if not report["models"]:
        out.print("The registry knows no model and no peer yet.")
    for model in report["models"]:
        _print_model(model)


async def _report(registry: str, counted: Collection[NodeId] = ()) -> dict[str, Any]:
    folders = Folders.from_environment()
    nodes: tuple[RegistryAddress, ...] = await settle_registries(registry, folders)
    async with Endpoint(Identity.generate()) as endpoint, PathFinder(endpoint, takes_calls=False) as finder:
        client = RegistryClient(finder, nodes)
        pool = Pool(endpoint, finder)
        try:
            records = await client.records()
            holders = [record for record in records if isinstance(record, ExpertAnnouncement)]
            offers = [record for record in records if isinstance(record, ModelOffer)]
            limit = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
            ledger = Ledger(counted or trusted_backbones(folders, nodes, offers))
            shown = await asyncio.gather(*(_ask(pool, holder, limit, ledger) for holder in holders))
            for each in await asyncio.gather(*(_ask_backbone(pool, offer, limit) for offer in offers)):
                _add_verdicts(shown, each)
        finally:
            await pool.close()
    models = []
    for model in sorted({record.model for record in holders} | {offer.model for offer in offers}):
        of_model = [each for holder, each in zip(holders, shown, strict=True) if holder.model == model]
        model_offers = [offer for offer in offers if offer.model == model]
        held = [holder for holder in holders if holder.model == model]
        reachable = [
            holder
            for holder, each in zip(holders, shown, strict=True)
            if holder.model == model and each["up"] and not holder.is_loading
        ]
        name = (model_offers or held)[0].model_name
        offer = next((offer for offer in model_offers if _is_plausible(offer)), None)
        models.append(
            {
                "id": str(model),
                "name": f"{name}@{model.short}",
                "backbones": [str(offer.node) for offer in model_offers],
                "peers": of_model,
                "missing": _missing(offer, reachable) if offer else None,
            }
        )
    names = {holder.node: holder.name for holder in holders}
    return {"models": models, "leaderboard": Leaderboard(ledger)(names, now=0.0, today=day_of(time.time()))}


def trusted_backbones(
    folders: Folders, registry: Collection[RegistryAddress], offers: Collection[ModelOffer]
) -> frozenset[NodeId]:
    """Return whose receipts this person counts where none are named: those whose models this machine would take part in."""
    publishers = Publishers(
        folders.config / "known_publishers",
        given=own_publishers(folders.config),
        is_registry_here=all(is_loopback(each.address[0]) for each in registry),
    )
    return frozenset(offer.node for offer in offers if publishers.knows(offer))


async def _ask(
    pool: Pool, holder: ExpertAnnouncement, limit: asyncio.Semaphore, ledger: Ledger | None = None
) -> dict[str, Any]:
    """Return how a peer is; its receipts go into `ledger`."""
    shown: dict[str, Any] = {
        "node": str(holder.node),
        "name": shown_name(holder.name),
        "addresses": list(holder.addresses),
        "experts": [list(group) for group in holder.experts.grouped()],
        "exact_kernels": holder.exact_kernels,
        "loading": holder.is_loading,
        "up": False,
    }
    try:
        async with limit:
            connection = await pool.reach(holder, timeout_s=ASK_TIMEOUT_S)
            answer = await connection.request(m.GetStatus(), timeout_s=ASK_TIMEOUT_S)
        assert isinstance(answer, m.Status)  # the session checks an answer's type
        status = json.loads(answer.data)
        shown |= {"up": True, "rtt_s": connection.rtt_s}
        report = await pool.settled_report(holder.node, SETTLE_S)
        if report is not None:
            shown |= {"path": report.path, "is_relayed": report.is_relayed, "why_relayed": report.why_relayed}
        if isinstance(status, dict):
            shown |= {key: status[key] for key, kind in SHOWN_STATUS.items() if isinstance(status.get(key), kind)}
            if ledger is not None and "receipts" in status:
                ledger.present(holder.node, status["receipts"], day_of(time.time()))
    except (SwarmError, ValueError, RecursionError) as error:  # the status is untrusted JSON
        shown["error"] = str(error)
    return shown


async def _ask_backbone(pool: Pool, offer: ModelOffer, limit: asyncio.Semaphore) -> list[dict[str, Any]]:
    """Return what a backbone's audits say of peers; nothing if it does not tell."""
    try:
        async with limit:
            connection = await pool.reach(offer, timeout_s=ASK_TIMEOUT_S)
            answer = await connection.request(m.GetStatus(), timeout_s=ASK_TIMEOUT_S)
        assert isinstance(answer, m.Status)  # the session checks an answer's type
        return read_verdicts(json.loads(answer.data), offer)
    except (SwarmError, ValueError, RecursionError):  # the status is untrusted JSON
        return []


def read_verdicts(status: object, offer: ModelOffer) -> list[dict[str, Any]]:
    """Return a backbone's verdicts out of its status, which is untrusted: what has another form is left out."""
    audits = status.get("audits") if isinstance(status, dict) else None
    peers = audits.get("peers") if isinstance(audits, dict) else None
    verdicts = []
    for each in peers[:MAX_VERDICTS] if isinstance(peers, list) else ():
        if not isinstance(each, dict) or any(type(each.get(key)) is not kind for key, kind in SHOWN_VERDICT.items()):
            continue
        if each["verdict"] not in set(Verdict):
            continue
        caught = each.get("caught")
        reason = caught.get("reason") if isinstance(caught, dict) else None
        verdicts.append(
            {"by": str(offer.node), "model": str(offer.model)}
            | {key: each[key] for key in SHOWN_VERDICT}
            | {"reason": reason[:MAX_REASON] if isinstance(reason, str) else None}
        )
    return verdicts


def _add_verdicts(shown: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> None:
    """Put a backbone's verdicts beside the peers that they are about."""
    of_node = {verdict["node"]: verdict for verdict in verdicts}
    for peer in shown:
        peer.setdefault("audits", [])
        if (verdict := of_node.get(peer["node"])) is not None:
            peer["audits"].append({key: value for key, value in verdict.items() if key != "node"})


def _audits_of(peer: dict[str, Any]) -> str:
    """Return how a peer stands with those who audited it, for people: the worst verdict, and by whom."""
    audits = peer.get("audits") or []
    if not audits:
        return ""
    worst = min(audits, key=lambda each: list(WORST_FIRST).index(each["verdict"]))
    n_passed, n_disagreed = (sum(each[key] for each in audits) for key in ("n_passed", "n_disagreed"))
    text = f"{worst['verdict']}: {n_passed} passed"
    if n_disagreed:
        when = datetime.datetime.fromtimestamp(min(max(worst["at"], 0), MAX_TIME), datetime.UTC).strftime(
            "%d %b %H:%M UTC"
        )
        text += f", {n_disagreed} not, {when}, by {worst['by'][:8]}"
    return text


def _is_plausible(offer: ModelOffer) -> bool:
    """Return whether an offer's layers and experts can be listed: it is untrusted, and may speak of billions."""
    return len(parse_index_set(offer.moe_layers, "layers")) * offer.n_expert <= MAX_PAIRS


def _missing(offer: ModelOffer, holders: list[ExpertAnnouncement]) -> dict[str, str]:
    """Return layer -> range text of experts without a reachable holder."""
    missing = {}
    for layer in sorted(parse_index_set(offer.moe_layers, "layers")):
        held = frozenset[int]().union(*(holder.experts.by_layer.get(layer, frozenset()) for holder in holders))
        absent = set(range(offer.n_expert)) - held
        if absent:
            missing[str(layer)] = format_index_set(absent)
    return missing


def _print_leaderboard(board: dict[str, Any] | None) -> None:
    if board is None:
        out.print(
            "No backbone here is known to you, so nobody's receipts count: name some with --receipts-from NODEID."
        )
        return
    table = Table(title=f"The last {board['days']} days", title_justify="left", box=None, padding=(0, 1))
    for column in ("", "name", "node", "points", "rows", "pairs"):
        table.add_column(column, justify="right" if column in ("", "points", "rows", "pairs") else "left")
    for number, row in enumerate(board["rows"], 1):
        counts = (f"{row[key]:,}" for key in ("points", "rows", "pairs"))
        table.add_row(str(number), Text(row["name"]), row["short"], *counts)
    out.print(table)
    counted_by = ", ".join(node[:8] for node in board["counted_by"])
    out.print(f"Counted by {counted_by}. Listed is who joined with --name.", highlight=False)


def _state_of(peer: dict[str, Any]) -> str:
    if not peer["up"]:
        return f"down: {peer.get('error', '')}"
    return "loading" if peer.get("loading") else "up"


def _path_of(peer: dict[str, Any]) -> str:
    """Return how a peer was reached, and why not directly; where it was not, the address it announces."""
    path = peer.get("path") or peer["addresses"][0]
    return f"{path} ({peer['why_relayed']})" if peer.get("why_relayed") else str(path)


def _print_model(model: dict[str, Any]) -> None:
    table = Table(title=Text(model["name"]), title_justify="left", box=None, padding=(0, 1))
    for column in ("peer", "path", "experts", "layers", "round trip", "pairs", "audits", "state"):
        table.add_column(column, overflow="fold", no_wrap=column == "peer")
    for peer in model["peers"]:
        for layers, experts in peer["experts"]:
            rtt = peer.get("rtt_s")
            table.add_row(
                peer["node"][:8],
                Text(_path_of(peer)),  # as text: brackets would be read as markup
                experts,
                layers,
                "" if rtt is None else f"{rtt * 1000:.1f} ms",
                str(peer.get("n_assignments", "")),
                Text(_audits_of(peer)),
                Text(_state_of(peer)),
            )
    out.print(table)
    if model["missing"] is None:
        out.print("No backbone serves this model now.")
    elif model["missing"]:
        out.print("Missing experts: " + "; ".join(f"layer {k}: {v}" for k, v in model["missing"].items()))
    else:
        out.print("Every expert has a reachable peer.")
