"""The figures, over streams whose times are given."""

from __future__ import annotations

import pytest

from swarm.backbone.requests import TokenLogprob
from swarm.bench.gateway import _Stream, compared, together_per_s


def test_tokens_count_only_while_all_stream() -> None:
    early = _Stream(0.0, [1.0, 2.0, 3.0, 4.0, 5.0])
    late = _Stream(0.0, [3.0, 4.0, 5.0, 6.0])
    assert together_per_s([early, late]) == pytest.approx(2.0)
    out_of_step = _Stream(0.0, [2.5, 3.5, 4.5, 5.5])
    assert together_per_s([early, out_of_step]) == pytest.approx(2.0), (
        "where the window cuts between tokens, nothing is lost"
    )
    slow = _Stream(0.0, [0.5, 3.0, 5.0])
    assert together_per_s([early, slow]) == pytest.approx(1.5)
    assert together_per_s([early]) == pytest.approx(1.0)


def test_a_stream_tells_its_first_token_and_its_gaps() -> None:
    stream = _Stream(1.0, [1.5, 2.5, 2.75])
    assert stream.ttft_s == 0.5
    assert stream.gaps_s == [1.0, 0.25]


def token(piece: bytes, gap: float = 5.0) -> TokenLogprob:
    return TokenLogprob(piece=piece, logprob=-0.1, likeliest=((piece, -0.1), (b"?", -0.1 - gap)))


def test_an_answer_may_differ_where_the_alone_one_was_nearly_undecided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    alone = [[token(b"a"), token(b"b")], [token(b"a"), token(b"b", 0.1), token(b"c")], [token(b"a", 3.0)]]
    together = [[token(b"a"), token(b"b")], [token(b"a"), token(b"x"), token(b"y")], [token(b"z")]]
    figures = compared(together, alone)
    assert (figures["n_same_answers"], figures["n_ties"], figures["n_wrong"]) == (1, 1, 1)
    assert figures["n_compared_tokens"] == 6
    assert figures["gaps_where_different"] == pytest.approx([0.1, 3.0])
    assert [(entry.levelname, entry.message.partition(" where ")[2]) for entry in caplog.records] == [
        ("INFO", "the best logit led by 0.100"),
        ("WARNING", "the best logit led by 3.000"),
    ]
    assert "answer 1 differs from the one it has alone from token 1 on" in caplog.records[0].message
