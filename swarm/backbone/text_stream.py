"""Turns tokens into text that can be shown: whole characters, and nothing that a stop text may still take back. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Text of one answer as its tokens come."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.is_stopped = False

    def feed(self, piece: bytes) -> str:
        """Return the text that is certain after one more token. After a stop text was met, `is_stopped` is true."""
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what was held back, at the end of the answer."""
        text = self._advance(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str) -> str:
        if self.is_stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        n_held = max((overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - n_held
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def overlap(text: str, mark: str) -> int:
    """Return how many last characters of the text begin `mark`; all of `mark` does not count."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
