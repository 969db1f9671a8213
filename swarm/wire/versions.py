"""Which wire versions this program speaks, which one two nodes use, and what to tell people when there is none. Pure.

A release speaks its own version and the one before, so that neighbours work together and a swarm is upgraded node by node. To
bump the version: WIRE_VERSIONS becomes its last one and the new one, and each request that an older node does not know gets a
line in SINCE; it is then refused here, before anything is sent, on links to nodes that are too old for it. (An unknown type
would end such a link; types from `frames.IGNORABLE_FROM` on are passed over by whoever does not know them, and need no line.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swarm.wire import messages as m

WIRE_VERSIONS: tuple[int, ...] = (1,)  # ascending; stays (1,) until the first release
SINCE: Mapping[type[m.Request], int] = {}  # the wire version that brought a request, where it was not the first
UPGRADE = "`git pull && pip install --upgrade .` in its checkout, or a newer container image"


def choose_version(ours: Collection[int], theirs: Collection[int]) -> int | None:
    """Return the highest version that both speak; None: there is none."""
    return max(set(ours) & set(theirs), default=None)


def speaks(version: int | None, request: type[m.Request], since: Mapping[type[m.Request], int] | None = None) -> bool:
    """Return whether a node knows this request with which `version` was agreed upon; None: nothing was yet."""
    needed = (SINCE if since is None else since).get(request, 0)
    return not needed or (version is not None and version >= needed)


def disagreement(dialler: Collection[int], dialled: Collection[int]) -> str:
    """Return why two nodes cannot talk and which has to be upgraded how, in words that are true at both; no set is empty."""
    older = "the node that connects" if max(dialler) < max(dialled) else "the node that was called"
    return (
        f"wire versions: got {sorted(dialler)}, expected one of {sorted(dialled)}; {older} is too old: "
        f"whoever runs it should upgrade it by {UPGRADE}"
    )


def own_disagreement(ours: Collection[int], theirs: Collection[int]) -> str:
    """Return the same as one side's operator wants to read it; no set is empty."""
    we, they = (", ".join(map(str, sorted(each))) for each in (ours, theirs))
    if max(ours) < max(theirs):
        return f"this program is too old: it speaks wire version {we}, the other side {they}; upgrade it by {UPGRADE}"
    return (
        f"the other side's program is too old: it speaks wire version {they}, this one {we}; "
        f"whoever runs it should upgrade it by {UPGRADE}"
    )
