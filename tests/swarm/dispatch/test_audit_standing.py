"""How peers stand after findings: who is caught, who is only suspected, and what outlives a restart."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from swarm.dispatch import audit_standing
from swarm.dispatch.audit import NEW_PASSES
from swarm.dispatch.audit_opinions import Finding
from swarm.dispatch.audit_standing import CAUGHT_S, LONGEST_S, SUSPECT_S, Standing, Verdict
from swarm.errors import UserError
from swarm.ids import NodeId

A, B, C, X = (NodeId(bytes([n]) * 32) for n in (1, 2, 3, 9))
NOW = 1.8e9


def failed(
    standing: Standing,
    finding: Finding,
    *,
    now: float = NOW,
    comparable: bool = True,
    networks: dict[NodeId, str] | None = None,
) -> dict[NodeId, str]:
    known = networks or {}
    return standing.failed(finding, now, can_compare=lambda a, b: comparable, network_of=lambda node: known.get(node))


def dispute(*pairs: tuple[NodeId, NodeId], agreed: tuple[tuple[NodeId, NodeId], ...] = ()) -> Finding:
    return Finding(disputes=pairs, agreements=agreed)


def test_one_dispute_makes_both_suspects_and_convicts_nobody() -> None:
    standing = Standing()
    assert failed(standing, dispute((A, X))) == {}
    assert standing.suspects == {A, X}
    assert standing.verdict(A, 1, NOW) is Verdict.SUSPECTED
    assert standing.peers[A].n_disagreed == 1


def test_against_two_that_agree_a_peer_is_wrong_and_they_are_cleared() -> None:
    standing = Standing()
    standing.passed(A, Finding(agreements=((A, B),)), NOW)
    assert failed(standing, dispute((A, X))) == {}
    assert list(failed(standing, dispute((B, X)))) == [X]
    assert standing.suspects == frozenset()


def test_two_that_could_agree_and_have_not_convict_nobody_yet() -> None:
    standing = Standing()
    assert failed(standing, dispute((A, X), (B, X))) == {}
    assert standing.suspects == {A, B, X}
    assert list(failed(standing, dispute((C, X), agreed=((A, B),)))) == [X], "with the next case it is decided"


def test_two_that_have_nothing_to_compare_need_not_agree() -> None:
    assert list(failed(Standing(), dispute((A, X), (B, X)), comparable=False)) == [X]


def test_two_that_disagree_do_not_convict_a_third_together() -> None:
    standing = Standing()
    assert failed(standing, dispute((A, B), (A, X), (B, X)), comparable=False) == {}
    assert standing.suspects == {A, B, X}


def test_two_in_one_network_count_as_one() -> None:
    networks = {A: "203.0.113.0/24", B: "203.0.113.0/24"}
    standing = Standing()
    standing.passed(A, Finding(agreements=((A, B), (A, C), (B, C))), NOW)
    assert failed(standing, dispute((A, X), (B, X)), networks=networks) == {}
    assert list(failed(standing, dispute((C, X)), networks=networks)) == [X]


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_of_cases_one_cheat_among_many_is_convicted_and_nobody_else(seed: int) -> None:
    rng = random.Random(seed)
    peers = [NodeId(bytes([n]) * 32) for n in range(1, 7)]
    cheat = rng.choice(peers)
    pairs = list(itertools.combinations(peers, 2)) * 2
    rng.shuffle(pairs)
    standing, guilty = Standing(), dict[NodeId, str]()
    for pair in pairs:
        if guilty:
            break
        if cheat in pair:
            guilty |= failed(standing, dispute(pair))
        else:
            standing.passed(pair[0], Finding(agreements=(pair,)), NOW)
    assert list(guilty) == [cheat]


def test_proof_needs_no_votes_and_clears_who_stood_against_it() -> None:
    standing = Standing()
    failed(standing, dispute((A, X)))
    assert failed(standing, Finding(guilty={X: "why"})) == {X: "why"}
    assert standing.suspects == frozenset()


def test_suspicion_without_a_side_ends_with_time() -> None:
    standing = Standing()
    failed(standing, Finding(suspects=frozenset({A, X})))
    standing.expire(NOW + SUSPECT_S - 1)
    assert standing.suspects == {A, X}
    standing.expire(NOW + SUSPECT_S)
    assert standing.suspects == frozenset()


def test_agreements_of_long_ago_count_no_more() -> None:
    standing = Standing()
    standing.passed(A, Finding(agreements=((A, B),)), NOW)
    standing.expire(NOW + SUSPECT_S)
    assert failed(standing, dispute((A, X), (B, X)), now=NOW + SUSPECT_S) == {}


def test_who_is_caught_is_out_until_it_announces_itself_anew_and_time_has_passed() -> None:
    standing = Standing()
    caught = standing.catch(X, 7, "why", NOW)
    assert caught.until - caught.at == CAUGHT_S
    assert standing.is_barred(X, 8, NOW + CAUGHT_S - 1)
    assert standing.is_barred(X, 7, NOW + CAUGHT_S + 1)
    assert not standing.is_barred(X, 8, NOW + CAUGHT_S)
    assert standing.verdict(X, 8, NOW) is Verdict.CAUGHT
    assert standing.verdict(X, 8, NOW + CAUGHT_S) is Verdict.NEW
    assert not standing.is_barred(A, 1, NOW)


def test_the_second_time_lasts_longer_and_no_longer_than_the_longest() -> None:
    standing = Standing()
    lasted = [standing.catch(X, 1, "why", NOW) for _ in range(8)]
    assert [each.until - each.at for each in lasted][:2] == [CAUGHT_S, 2 * CAUGHT_S]
    assert lasted[-1].until - lasted[-1].at == LONGEST_S
    assert lasted[-1].n_times == 8


def test_a_peer_is_new_until_it_has_passed_some_audits_and_anew_after_it_was_caught() -> None:
    standing = Standing()
    for _ in range(NEW_PASSES):
        assert standing.verdict(A, 1, NOW) is Verdict.NEW
        standing.passed(A, Finding(), NOW)
    assert standing.verdict(A, 1, NOW) is Verdict.HONEST
    standing.catch(A, 1, "why", NOW)
    assert standing.is_new(A)


def test_what_was_found_outlives_a_restart_and_suspicions_do_not() -> None:
    standing = Standing()
    standing.passed(A, Finding(), NOW)
    failed(standing, dispute((A, B)))
    standing.catch(X, 7, "why " * 200, NOW)
    kept = Standing.from_json(json.loads(json.dumps(standing.to_json())), NOW + 5)
    assert kept.peers == standing.peers
    assert kept.is_barred(X, 8, NOW + CAUGHT_S - 1)
    assert kept.suspects == frozenset()


def test_a_clock_that_was_set_back_does_not_bar_for_years() -> None:
    standing = Standing()
    standing.catch(X, 7, "why", NOW)
    then = NOW - 1e8
    kept = Standing.from_json(standing.to_json(), then)
    assert kept.is_barred(X, 8, then + CAUGHT_S - 1)
    assert not kept.is_barred(X, 8, then + CAUGHT_S)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"peers": {"x": {}}},
        {"peers": []},
        {"peers": {str(A): {"n_passed": -1, "n_disagreed": 0, "at": 0, "caught": None}}},
        {"peers": {str(A): {"n_passed": True, "n_disagreed": 0, "at": 0, "caught": None}}},
        {"peers": {str(A): {"n_passed": 1, "n_disagreed": 0, "at": float("nan"), "caught": None}}},
        {"peers": {str(A): {"n_passed": 1, "n_disagreed": 0, "at": 0, "caught": {"seq": 1}}}},
        {
            "peers": {
                str(A): {
                    "n_passed": 1,
                    "n_disagreed": 0,
                    "at": 0,
                    "caught": {"seq": 1, "at": 0, "until": 1, "n_times": 1, "reason": 5},
                }
            }
        },
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, UserError)):
        Standing.from_json(Standing().to_json() | change, NOW)


def test_records_are_bounded_and_those_caught_are_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_standing, "MAX_PEERS", 3)
    standing = Standing()
    standing.catch(X, 1, "why", NOW - 100)
    for n in range(1, 6):
        standing.passed(NodeId(bytes([n]) * 32), Finding(), NOW + n)
    assert len(standing.peers) == 3
    assert X in standing.peers
