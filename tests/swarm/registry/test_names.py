"""Names of strangers: normalised, visible, on one line, and no longer than they may be."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.registry.names import MAX_MARKS, shown_name
from swarm.registry.record_fields import MAX_PUBLIC_NAME_LENGTH


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Ann's box", "Ann's box"),
        ("  two \u00a0 words ", "two words"),
        ("Zoe\u0308", "Zo\u00eb"),  # one letter, however it is written
        ("\uff21\uff4e\uff4e", "Ann"),  # wide letters
        ("\u05d0\u05d1", "\u05d0\u05d1"),  # a name in Hebrew stays one
        ("evil\u202egnp.exe", "evilgnp.exe"),  # right-to-left override
        ("\u2066a\u2069\u200b\u200db\ufeff", "ab"),  # isolates, and joiners that nobody sees
        ("\u3164\u2800\u115f", ""),  # letters without a look
        ("a\nb\x1b[31m", "ab[31m"),
        ("x" + "\u0301\u0323" * 30, unicodedata.normalize("NFKC", "x\u0323\u0323\u0323")[: 1 + MAX_MARKS]),
        ("\u0301", ""),  # a mark alone would sit on whatever comes before
        ("\ufdfa" * 40, None),  # one character that is eighteen when it is normalised
        ("", ""),
    ],
)
def test_a_name_is_shown_so_that_it_stays_in_its_place(name: str, shown: str | None) -> None:
    if shown is None:
        assert 0 < len(shown_name(name)) <= MAX_PUBLIC_NAME_LENGTH
    else:
        assert shown_name(name) == shown


@given(st.text(max_size=200))
def test_whatever_is_shown_is_short_visible_and_without_bidi_controls(name: str) -> None:
    shown = shown_name(name)
    assert len(shown) <= MAX_PUBLIC_NAME_LENGTH
    assert shown == shown.strip()
    assert shown.isprintable()
    bad = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN", "B"}
    assert not bad & {unicodedata.bidirectional(character) for character in shown}
    run = 0
    for character in shown:
        run = run + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        assert run <= MAX_MARKS
