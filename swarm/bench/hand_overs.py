"""What the bridge between an engine's thread and the event loop costs a layer while tokens are decoded.

`to_loop_s` is from the hook, which has the layer's inputs, to the dispatch's first line on the loop; `back_s` from its last to
where the engine's thread goes on, of the layers it was asleep for. Wake-ups are a thread's voluntary switches: it had slept, for
a socket, for the other thread, or for the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm.backbone.bridge import HandOver
from swarm.backbone.engine import Engine


class HandOverWatch:
    """Of one running engine; make it, and count, on the loop's thread."""

    def __init__(self, engine: Engine) -> None:
        """Be told of each layer from now on."""
        self._loop_thread = threading.get_native_id()
        self._engine_thread: int | None = None
        self._seen: list[HandOver] = []
        self._counted: list[HandOver] = []
        self._n_wakeups: dict[str, int | None] = {"loop": 0, "engine": 0}
        engine.watch_hand_overs(self._note)

    def _note(self, hand_over: HandOver) -> None:
        if self._engine_thread is None:
            self._engine_thread = threading.get_native_id()
        self._seen.append(hand_over)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what happens within."""
        self._seen.clear()
        threads = {"loop": self._loop_thread, "engine": self._engine_thread}
        before = {name: n_wakeups(thread) for name, thread in threads.items()}
        yield
        for name, thread in threads.items():
            known, first, last = self._n_wakeups[name], before[name], n_wakeups(thread)
            self._n_wakeups[name] = None if None in (known, first, last) else known + last - first  # type: ignore[operator]
        self._counted += self._seen

    def figures(self) -> dict[str, Any]:
        """Return medians in seconds, shares and counts of a layer; None where nothing was counted, or nobody tells."""
        n_layers = len(self._counted)
        waited = [each for each in self._counted if each.is_waited]
        return {
            "to_loop_s": statistics.median(each.began_s - each.asked_s for each in self._counted) if n_layers else None,
            "back_s": statistics.median(each.taken_s - each.done_s for each in waited) if waited else None,
            "waited_share": len(waited) / n_layers if n_layers else None,
            **{
                f"{name}_wakeups_per_layer": n / n_layers if n is not None and n_layers else None
                for name, n in self._n_wakeups.items()
            },
        }


def n_wakeups(thread: int | None) -> int | None:
    """Return how often a thread of this process has slept so far, by its native id; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{os.getpid()}/task/{thread}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches:")]
    return int(found[0]) if found else None
