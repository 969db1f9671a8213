"""What follows from what peers say of one answer, judged on experts in numpy whose truth is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from swarm.dispatch.audit_opinions import Finding, Part, Question, agreement, deviation, first_look, judge
from swarm.dispatch.plan import HERE, Batch, part_of
from swarm.ids import NodeId
from swarm.wire.rows import RowCodec, decode_rows, encode_rows

A, B, C, T = (NodeId(bytes([n]) * 32) for n in (1, 2, 3, 4))
N, K, D, E = 3, 4, 64, 8
TOLERANCE = 0.02

Rows = npt.NDArray[np.float32]
_rng = np.random.default_rng(3)
X: Rows = _rng.standard_normal((N, D)).astype(np.float32)
MATRICES: Rows = _rng.standard_normal((E, D, D)).astype(np.float32)
IDS = np.stack([_rng.permutation(E)[:K] for _ in range(N)]).astype(np.uint16)
BATCH = Batch(
    destination=A,
    rows=np.arange(N),
    row_counts=np.full(N, K, np.uint8),
    expert_ids=IDS.ravel(),
    slots=np.tile(np.arange(K, dtype=np.uint8), N),
    weights=_rng.random(N * K).astype(np.float32),
)


def truth(batch: Batch, codec: RowCodec) -> Rows:
    """Return what an honest peer answers: raw rows, or sums in float32."""
    at = np.repeat(batch.rows, batch.row_counts)
    raw = np.stack([X[row] @ MATRICES[expert] for row, expert in zip(at, batch.expert_ids, strict=True)])
    if codec is RowCodec.EXACT:
        return raw
    sums = np.zeros((batch.n_rows, D), np.float32)
    np.add.at(sums, np.repeat(np.arange(batch.n_rows), batch.row_counts), raw * batch.weights[:, np.newaxis])
    return sums


def noisy(rows: Rows, share: float, seed: int = 0) -> Rows:
    """Return rows with so much noise, relative to each row's norm."""
    noise = np.random.default_rng(seed).standard_normal(rows.shape)
    noise *= share * np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return (rows + noise).astype(np.float32)


def turned(rows: Rows) -> Rows:
    """Return rows at a right angle to these: linear, and the same each time."""
    out = np.empty_like(rows)
    out[:, 0::2], out[:, 1::2] = -rows[:, 1::2], rows[:, 0::2]
    return out


def carried(rows: Rows, codec: RowCodec) -> Rows:
    return decode_rows(encode_rows(rows, codec), len(rows), rows.shape[1], codec)


def question(answer: Rows, codec: RowCodec) -> Question:
    return Question(layer=1, node=A, batch=BATCH, x=X, answer=carried(answer, codec), codec=codec)


def parts_of(split: bool, codec: RowCodec) -> list[Part]:
    """Return honest second opinions: B's of all, or B's of the lower half of the experts and C's of the rest."""
    low = BATCH.expert_ids < E // 2
    masks = [(B, low), (C, ~low)] if split else [(B, np.ones(len(low), np.bool_))]
    parts = [Part(is_in=mask, batch=part_of(BATCH, mask), node=node) for node, mask in masks]
    for part in parts:
        part.rows = part.again = part.accused = truth(part.batch, codec)
    return parts


CODECS = [RowCodec.EXACT, RowCodec.F32, RowCodec.F16, RowCodec.BF16, RowCodec.INT8, RowCodec.FP8]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("split", [False, True])
def test_honest_answers_are_the_same_whatever_the_form_rounds_and_noise_is_seen(codec: RowCodec, split: bool) -> None:
    honest = truth(BATCH, codec)
    parts = parts_of(split, codec)
    # Other kernels differ in the seventh digit, and now and then flip a rounding of the form.
    for part in parts:
        assert part.rows is not None
        part.rows = noisy(part.rows, 1e-6, seed=1)
    assert first_look(question(honest, codec), parts).error < TOLERANCE / 2
    assert first_look(question(noisy(honest, 0.05), codec), parts).error > 2 * TOLERANCE
    found = first_look(question(turned(honest), codec), parts)
    assert abs(found.cosine) < 0.1
    assert found.error > 1


def test_one_bad_row_among_good_ones_is_seen() -> None:
    answer = truth(BATCH, RowCodec.F32)
    answer[1] = noisy(answer[1:2], 0.05)[0]
    assert first_look(question(answer, RowCodec.F32), parts_of(False, RowCodec.F32)).error == pytest.approx(
        0.05, rel=0.1
    )


def test_deviation_of_zeros_of_what_is_not_finite_and_of_a_silent_peer() -> None:
    rows = truth(BATCH, RowCodec.F32)
    zeros = np.zeros_like(rows)
    assert deviation(zeros, zeros).error == 0
    assert deviation(rows, zeros).error == pytest.approx(1)
    broken = rows.copy()
    broken[0, 0] = np.nan
    assert deviation(rows, broken).error == np.inf
    assert deviation(rows, rows * np.float32(1.03)).error == pytest.approx(0.03 / 1.03, rel=1e-3)
    assert deviation(rows, -rows) == deviation(-rows, rows)


def test_what_agrees_is_an_agreement_with_each_but_oneself() -> None:
    parts = parts_of(True, RowCodec.F32)
    assert agreement(question(truth(BATCH, RowCodec.F32), RowCodec.F32), parts).agreements == ((A, B), (A, C))
    parts[0].node = HERE
    assert agreement(question(truth(BATCH, RowCodec.F32), RowCodec.F32), parts).agreements == ((A, C),)


@pytest.mark.parametrize("split", [False, True])
def test_who_says_something_else_each_time_contradicts_itself(split: bool) -> None:
    parts = parts_of(split, RowCodec.F16)
    finding = judge(question(noisy(truth(BATCH, RowCodec.F16), 0.05), RowCodec.F16), parts, TOLERANCE)
    assert list(finding.guilty) == [A]
    assert "asked again" in finding.guilty[A]
    assert finding.disputes == ()

    parts[0].rows = noisy(truth(parts[0].batch, RowCodec.F16), 0.05)  # now the one that gave the second opinion
    finding = judge(question(truth(BATCH, RowCodec.F16), RowCodec.F16), parts, TOLERANCE)
    assert list(finding.guilty) == [B]


def test_a_consistent_cheat_against_one_is_a_dispute() -> None:
    parts = parts_of(False, RowCodec.F32)
    parts[0].accused = turned(truth(parts[0].batch, RowCodec.F32))
    finding = judge(question(turned(truth(BATCH, RowCodec.F32)), RowCodec.F32), parts, TOLERANCE)
    assert finding == Finding(disputes=((B, A),))


def test_a_consistent_cheat_against_two_has_a_dispute_with_each() -> None:
    parts = parts_of(True, RowCodec.F32)
    for part in parts:
        part.accused = turned(truth(part.batch, RowCodec.F32))
    finding = judge(question(turned(truth(BATCH, RowCodec.F32)), RowCodec.F32), parts, TOLERANCE)
    assert finding == Finding(disputes=((B, A), (C, A)))


def test_of_two_that_share_an_opinion_only_the_one_that_differs_is_in_dispute() -> None:
    parts = parts_of(True, RowCodec.F32)
    parts[1].rows = parts[1].again = turned(truth(parts[1].batch, RowCodec.F32))
    finding = judge(question(truth(BATCH, RowCodec.F32), RowCodec.F32), parts, TOLERANCE)
    assert finding == Finding(agreements=((B, A),), disputes=((C, A),))


@pytest.mark.parametrize("liar", [A, B, T])
def test_two_against_one(liar: NodeId) -> None:
    (part,) = parts_of(False, RowCodec.F32)
    part.third_node, part.third = T, truth(BATCH, RowCodec.F32)
    lie = turned(truth(BATCH, RowCodec.F32))
    answer = truth(BATCH, RowCodec.F32)
    if liar == A:
        answer, part.accused = lie, lie
    elif liar == B:
        part.rows = part.again = lie
    else:
        part.third = lie
    finding = judge(question(answer, RowCodec.F32), [part], TOLERANCE)
    assert list(finding.guilty) == [liar]
    assert finding.disputes == ()
    assert [set(pair) for pair in finding.agreements] == [{A, B, T} - {liar}]


def test_three_that_say_three_things_are_all_in_dispute() -> None:
    (part,) = parts_of(False, RowCodec.F32)
    lies = [noisy(truth(BATCH, RowCodec.F32), 0.5, seed=seed) for seed in (1, 2)]
    part.accused, part.third_node, part.third = lies[0], T, lies[1]
    finding = judge(question(lies[0], RowCodec.F32), [part], TOLERANCE)
    assert finding.guilty == {}
    assert {frozenset(pair) for pair in finding.disputes} == {frozenset(pair) for pair in ((A, B), (A, T), (B, T))}


@pytest.mark.parametrize("codec", [RowCodec.EXACT, RowCodec.F16], ids=str)
@pytest.mark.parametrize("liar", [A, B])
def test_this_machines_own_computation_decides_alone(liar: NodeId, codec: RowCodec) -> None:
    (part,) = parts_of(False, codec)
    part.third_node, part.third = HERE, truth(BATCH, codec)
    lie = noisy(truth(BATCH, codec), 0.05)
    answer = truth(BATCH, codec)
    if liar == A:
        answer = part.accused = lie
    else:
        part.rows = part.again = lie
    finding = judge(question(answer, codec), [part], TOLERANCE)
    assert list(finding.guilty) == [liar]
    assert "own computation" in finding.guilty[liar]
    if liar == A:
        part.accused = None  # and it does not answer any more
        assert list(judge(question(answer, codec), [part], TOLERANCE).guilty) == [A]


def test_where_this_machine_gave_the_second_opinion_the_other_is_wrong() -> None:
    (part,) = parts_of(False, RowCodec.F32)
    part.node, part.accused, part.again = HERE, None, None
    finding = judge(question(noisy(truth(BATCH, RowCodec.F32), 0.05), RowCodec.F32), [part], TOLERANCE)
    assert list(finding.guilty) == [A]


def test_where_nobody_answers_again_all_are_suspected() -> None:
    parts = parts_of(True, RowCodec.F32)
    for part in parts:
        part.again = part.accused = None
    finding = judge(question(turned(truth(BATCH, RowCodec.F32)), RowCodec.F32), parts, TOLERANCE)
    assert finding == Finding(suspects=frozenset({A, B, C}))


def test_where_all_say_the_same_when_asked_in_float32_rounding_was_to_blame_and_nobody_is() -> None:
    """A coarse form makes more of a small difference; what devices differ by is judged without it."""
    parts = parts_of(True, RowCodec.FP8)
    device = noisy(truth(BATCH, RowCodec.FP8), 0.015)
    for part in parts:
        part.accused = noisy(truth(part.batch, RowCodec.FP8), 0.015, seed=1)
    whole = np.zeros((N, D), np.float32)
    for part in parts:
        assert part.accused is not None
        whole[part.batch.rows] += part.accused
    asked = question(whole, RowCodec.FP8)
    assert first_look(asked, parts).error > TOLERANCE > 0.0151
    assert judge(asked, parts, TOLERANCE).clears
    assert not judge(question(noisy(device, 0.05), RowCodec.FP8), parts, TOLERANCE).clears


def test_exact_rows_are_compared_pair_by_pair() -> None:
    raw = truth(BATCH, RowCodec.EXACT)
    raw[5] = noisy(raw[5:6], 0.05)[0]
    asked = dataclasses.replace(question(raw, RowCodec.EXACT))
    assert first_look(asked, parts_of(True, RowCodec.EXACT)).error == pytest.approx(0.05, rel=0.1)
