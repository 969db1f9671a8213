"""A count of bytes that several sessions share, with a limit. Knows nothing of what the bytes are."""

from __future__ import annotations


class ByteBudget:
    """Bytes taken and given back. Whoever takes them gives back exactly as many."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0  # taken now

    def has_room(self, n_bytes: int) -> bool:
        """Return whether so many more would fit."""
        return self.n_bytes + n_bytes <= self.limit_bytes

    def take(self, n_bytes: int) -> bool:
        """Take so many bytes; False, and nothing is taken, if they do not fit."""
        if not self.has_room(n_bytes):
            return False
        self.n_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        """Give back what was taken."""
        assert 0 <= n_bytes <= self.n_bytes
        self.n_bytes -= n_bytes
