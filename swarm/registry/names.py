"""What strangers call themselves, in a form that can be shown beside others' names. Pure.

A name says nothing of who somebody is: two may have the same, or such as look alike. So whoever shows one shows the node's short
id beside it, and lets it reach no further than its own place (in HTML, `dir="auto"` with `unicode-bidi: isolate`).
"""

from __future__ import annotations

import unicodedata

from swarm.registry.record_fields import MAX_PUBLIC_NAME_LENGTH

MAX_MARKS = 2  # combining marks on one letter; no living script needs more, and a heap of them covers other lines
# Printable by Python's word, but nothing to be seen: fillers, a blank Braille pattern, and marks without a look of their own.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)


def shown_name(text: str) -> str:
    """Return an untrusted name as it may be shown: normalised (NFKC), one line, nothing invisible; empty if nothing is left.

    What steers the direction of text (bidi controls), joins or hides letters is left out, and so are heaps of combining marks.
    """
    # Cut before, since a normal form may be 18 times as long, and after.
    normal = unicodedata.normalize("NFKC", text[: 4 * MAX_PUBLIC_NAME_LENGTH])
    kept: list[str] = []
    n_marks = MAX_MARKS  # none may come before a letter
    for character in normal:
        if not character.isprintable() or character in _INVISIBLE:  # controls, formats, separators, unassigned
            continue
        is_mark = unicodedata.category(character) in ("Mn", "Me")
        n_marks = n_marks + 1 if is_mark else 0
        if n_marks <= MAX_MARKS:
            kept.append(character)
    return " ".join("".join(kept).split())[:MAX_PUBLIC_NAME_LENGTH].strip()
