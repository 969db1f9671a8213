"""The tree in the docstring is the tree in the code, wire codes are unique, and values are attributes."""

from __future__ import annotations

import inspect
import re

from swarm import errors
from swarm.wire.messages import ErrorCode

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, str]:
    """Return class -> parent as the module's docstring draws it, by the column where a name begins."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    open_at: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"[ │├└─]*(?=[A-Z])", line)
        name = line[found.end() :].split()[0] if found else ""
        if not found or name not in CLASSES or not line.startswith("    "):
            continue
        column = found.end()
        while open_at and open_at[-1][0] >= column:
            open_at.pop()
        parents[name] = open_at[-1][1] if open_at else ""
        open_at.append((column, name))
    return parents


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    assert drawn_tree() == {
        name: "" if name == "SwarmError" else kind.__mro__[1].__name__ for name, kind in CLASSES.items()
    }


def test_wire_codes_are_unique_and_stand_in_the_messages_table() -> None:
    protocol = {name: kind for name, kind in CLASSES.items() if issubclass(kind, errors.RemoteProtocolError)}
    assert protocol.pop("ExpertsNotHeld").code == 0x01  # told as a refusal (NOT_FOUND), it closes no link
    codes = {name: kind.code for name, kind in protocol.items()}
    assert codes == {"RemoteProtocolError": 0x01, "VersionRefused": 0x02, "IdentityMismatch": 0x03}
    assert set(codes.values()) == {code.value for code in ErrorCode if code < 0x10}


def test_error_codes_never_change() -> None:
    assert {code.name: code.value for code in ErrorCode} == {
        "PROTOCOL": 0x01,
        "VERSION": 0x02,
        "IDENTITY": 0x03,
        "NOT_FOUND": 0x10,
        "BUSY": 0x11,
        "INTERNAL": 0x12,
        "NOT_ALLOWED": 0x13,
        "SHUTTING_DOWN": 0x14,
    }


def test_an_unavailable_expert_is_named_with_its_layer() -> None:
    error = errors.ExpertUnavailable(3, [5, 6], "peer abc is gone")
    assert (error.layer, error.experts, error.reason) == (3, (5, 6), "peer abc is gone")
    assert str(error) == "no answer for layer 3, experts 5, 6: peer abc is gone"


def test_a_long_list_of_experts_is_cut_in_the_message_only() -> None:
    error = errors.ExpertUnavailable(0, range(100), "late")
    assert len(error.experts) == 100
    assert str(error).endswith("14, 15, ...: late")


def test_values_are_attributes() -> None:
    assert errors.RemoteRefused("no", remote_code=0x10).remote_code == 0x10
    assert errors.Overloaded("full").retry_after_s == 1.0
    assert errors.Overloaded("full", retry_after_s=0.1).retry_after_s == 0.1
