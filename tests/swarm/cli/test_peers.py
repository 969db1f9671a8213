"""What `swarm peers` makes of records and answers, all of which strangers wrote."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.cli.peers import (
    _add_verdicts,
    _ask,
    _is_plausible,
    _missing,
    _print_leaderboard,
    _print_model,
    read_verdicts,
    trusted_backbones,
)
from swarm.cli.runtime import out
from swarm.errors import LocalProtocolError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.net.endpoint import Endpoint
from swarm.net.pool import Pool
from swarm.registry.client import RegistryAddress
from swarm.registry.leaderboard import Ledger
from swarm.registry.records import ExpertAnnouncement, ModelOffer
from swarm.wire import messages as m
from swarm.wire.receipts import Totals, day_of, sign_receipt
from tests import virtual_time
from tests.fake_network import FakeEndpoint, FakeNetwork, FakeNode
from tests.sample_records import sample_announcement, sample_offer

US = Identity.from_seed(b"u" * 32)
MODEL = ModelId(b"m" * 32)
A, B = (NodeId(bytes([n]) * 32) for n in (10, 20))


def holder(node: NodeId, experts: ExpertSet) -> ExpertAnnouncement:
    return sample_announcement(node, model=MODEL, experts=experts, addresses=("10.0.0.1:1",))


def offer(*, n_expert: int = 8, moe_layers: str = "1-3") -> ModelOffer:
    return sample_offer(A, model=MODEL, n_expert=n_expert, moe_layers=moe_layers, addresses=("10.0.0.1:1",))


def test_missing_experts_are_named_layer_by_layer() -> None:
    holders = [holder(A, ExpertSet.of([1, 2, 3], range(6))), holder(B, ExpertSet({2: frozenset({6, 7})}))]
    assert _missing(offer(), holders) == {"1": "6-7", "3": "6-7"}
    assert _missing(offer(), []) == {"1": "0-7", "2": "0-7", "3": "0-7"}
    assert _missing(offer(), [holder(A, ExpertSet.of(range(9), range(9)))]) == {}


def test_an_offer_of_billions_of_experts_is_not_listed() -> None:
    assert _is_plausible(offer())
    assert _is_plausible(offer(n_expert=1024, moe_layers="0-127"))
    try:
        monstrous = offer(n_expert=65_536, moe_layers="0-65535")
    except LocalProtocolError:
        return  # refused where records are made: better still
    started = time.monotonic()
    assert not _is_plausible(monstrous)
    assert time.monotonic() - started < 5


# Asking a peer


def ask(answer: m.Response | None, *, is_up: bool = True) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        network = FakeNetwork()
        network.nodes["10.0.0.1", 1] = FakeNode(node_id=A, answer=lambda asker, request: answer, is_up=is_up)
        pool = Pool(cast(Endpoint, FakeEndpoint(network, US)))
        try:
            return await _ask(pool, holder(A, ExpertSet.of([1], range(2))), asyncio.Semaphore(1))
        finally:
            await pool.close()

    return virtual_time.run(main())


def status(value: object) -> m.Status:
    return m.Status(data=json.dumps(value).encode())


def test_a_peer_that_answers_is_up_and_says_what_it_did() -> None:
    shown = ask(status({"n_assignments": 7, "version": "0.1.0", "uptime_s": 1.5, "secret": "x", "up": False}))
    assert shown == {
        "node": str(A),
        "name": "",
        "addresses": ["10.0.0.1:1"],
        "experts": [["1", "0-1"]],
        "exact_kernels": True,
        "loading": False,
        "up": True,
        "rtt_s": None,
        "path": "direct 10.0.0.1:1",
        "is_relayed": False,
        "why_relayed": "",
        "n_assignments": 7,
        "version": "0.1.0",
        "uptime_s": 1.5,
    }


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b"\xff\xfe", b"", b"{", b"9" * 5000],
    ids=["deep", "not utf-8", "empty", "cut", "long number"],
)
def test_an_answer_that_is_no_json_is_an_error_of_that_peer_alone(data: bytes) -> None:
    assert ask(m.Status(data=data))["error"]


@pytest.mark.parametrize("value", [[1], "text", None, {"n_assignments": "[/x]", "version": 1, "uptime_s": []}])
def test_what_a_peer_says_in_another_form_is_left_out(value: object) -> None:
    shown = ask(status(value))
    assert shown["up"] is True
    assert not {"n_assignments", "version", "uptime_s"} & shown.keys()


@pytest.mark.parametrize("is_up", [True, False])
def test_a_silent_peer_is_down_and_says_why(is_up: bool) -> None:
    shown = ask(None, is_up=is_up)
    assert "no answer" in shown["error"]
    assert shown["up"] is False


# Printing


def printed(model: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    _print_model(model)
    return capsys.readouterr().out


def test_a_name_or_an_error_with_brackets_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 200)
    peer = ask(None, is_up=False) | {"error": "refused: [/red] [bold]x", "addresses": ["[2001:db8::1]:7440"]}
    shown = printed({"name": "[/b]tiny@1", "peers": [peer], "missing": {"1": "2-3"}}, capsys)
    for text in ("[/b]tiny@1", "refused: [/red] [bold]x", "[2001:db8::1]:7440", "Missing experts: layer 1: 2-3"):
        assert text in shown


def test_the_last_line_says_whether_a_model_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Every expert has a reachable peer" in printed({"name": "x", "peers": [], "missing": {}}, capsys)
    assert "No backbone serves this model" in printed({"name": "x", "peers": [], "missing": None}, capsys)


# What backbones' audits say

VERDICT = {"node": str(B), "verdict": "caught", "n_passed": 3, "n_disagreed": 1, "at": 1_800_000_000}


def test_a_caught_peer_is_shown_with_when_why_and_by_whom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 250)
    caught = {"reason": "it [/x] lied", "until": 1, "seq": 5}
    verdicts = read_verdicts({"audits": {"peers": [VERDICT | {"caught": caught, "secret": 5}]}}, offer())
    shown = [ask(status({})) | {"node": str(node)} for node in (A, B)]
    _add_verdicts(shown, verdicts)
    assert shown[0]["audits"] == []
    expected = {key: value for key, value in VERDICT.items() if key != "node"}
    assert shown[1]["audits"] == [expected | {"by": str(A), "model": str(MODEL), "reason": "it [/x] lied"}]
    text = printed({"name": "x", "peers": shown, "missing": {}}, capsys)
    assert f"caught: 3 passed, 1 not, 15 Jan 08:00 UTC, by {str(A)[:8]}" in text


def test_the_worst_verdict_is_shown_and_audits_of_all_backbones_are_added(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "width", 250)
    shown = [ask(status({})) | {"node": str(B)}]
    for verdict in ("honest", "suspected"):
        _add_verdicts(shown, read_verdicts({"audits": {"peers": [VERDICT | {"verdict": verdict}]}}, offer()))
    assert len(shown[0]["audits"]) == 2
    assert "suspected: 6 passed, 2 not" in printed({"name": "x", "peers": shown, "missing": {}}, capsys)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"audits": None},
        {"audits": {"peers": 5}},
        {
            "audits": {
                "peers": [5, {}, VERDICT | {"verdict": "[/x]"}, VERDICT | {"n_passed": True}, VERDICT | {"at": 1.5}]
            }
        },
    ],
)
def test_what_a_backbone_says_in_another_form_is_left_out(value: object) -> None:
    assert read_verdicts(value, offer()) == []


def test_a_backbone_cannot_make_the_list_long_or_break_it(capsys: pytest.CaptureFixture[str]) -> None:
    endless = [VERDICT | {"at": 10**400, "caught": {"reason": "x" * 10_000}}] * 100_000
    verdicts = read_verdicts({"audits": {"peers": endless}}, offer())
    assert len(verdicts) <= 256
    assert len(verdicts[0]["reason"]) <= 300
    shown = [ask(status({})) | {"node": str(B)}]
    _add_verdicts(shown, verdicts)
    assert "caught" in printed({"name": "x", "peers": shown, "missing": {}}, capsys)


# The leaderboard


def test_receipts_that_a_peer_presents_count_where_their_backbone_is_known() -> None:
    backbone, sybil = (Identity.from_seed(bytes([n]) * 32) for n in (7, 8))
    totals = Totals(n_rows=2, n_pairs=6, weight=6000)
    today = day_of(time.time())
    texts = [sign_receipt(by, peer=A, period=bytes(8), day=today, totals=totals).text for by in (backbone, sybil)]

    def asked(receipts: object) -> tuple[dict[str, Any], Ledger]:
        async def main() -> tuple[dict[str, Any], Ledger]:
            ledger, network = Ledger([backbone.node_id]), FakeNetwork()
            answer = status({"role": "peer", "receipts": receipts})
            network.nodes["10.0.0.1", 1] = FakeNode(node_id=A, answer=lambda asker, request: answer)
            pool = Pool(cast(Endpoint, FakeEndpoint(network, US)))
            try:
                return await _ask(pool, holder(A, ExpertSet.of([1], range(2))), asyncio.Semaphore(1), ledger), ledger
            finally:
                await pool.close()

        return virtual_time.run(main())

    shown, ledger = asked(texts)
    assert "error" not in shown
    assert ledger.totals(today) == {A: totals}
    for receipts in ([texts[0][:-9] + "A" * 9], ["x"], 7, None):
        shown, ledger = asked(receipts)
        assert "receipt" in shown["error"]
        assert ledger.totals(today) == {}


def test_by_default_those_count_whose_models_this_machine_would_take_part_in(tmp_path: Path) -> None:
    folders = Folders.below(tmp_path)
    folders.config.mkdir(parents=True)
    known, own = NodeId(b"k" * 32), Identity.load_or_create(folders.config / "serve.key").node_id
    (folders.config / "known_publishers").write_text(f"{known}\n")
    offers = [
        sample_offer(node, model=MODEL, addresses=(address,))
        for node, address in ((known, "192.0.2.1:1"), (own, "192.0.2.1:2"), (A, "192.0.2.1:3"), (B, "127.0.0.1:4"))
    ]
    here, there = (RegistryAddress(address=(host, 7440), node=None) for host in ("127.0.0.1", "192.0.2.9"))
    assert trusted_backbones(folders, [there], offers) == {known, own}
    assert trusted_backbones(folders, [here], offers) == {known, own, B}


def test_the_leaderboard_is_a_table_in_which_names_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": str(A), "short": A.short, "name": "[red]Ann[/red]", "points": 12_345, "rows": 1, "pairs": 2}
    _print_leaderboard({"days": 7, "counted_by": [str(B)], "rows": [row]})
    text = capsys.readouterr().out
    assert "[red]Ann[/red]" in text
    assert "12,345" in text
    assert B.short in text
    _print_leaderboard(None)
    assert "--receipts-from" in capsys.readouterr().out
