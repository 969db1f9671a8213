"""docs/api.md tells what the gateway serves and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

from swarm.gateway.app import create_app
from swarm.gateway.refused import REFUSED
from tests.swarm.gateway.test_app import ScriptedGenerator

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:4] for line in TEXT.splitlines() if line.startswith("| `")]


def test_every_route_has_a_row() -> None:
    app = create_app(ScriptedGenerator(), peer_map=dict)
    documented = {f"{method} {path}" for cell, *_ in ROWS for method, path in re.findall(r"`(GET|POST) ([^`]+)`", cell)}
    served = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method in ("GET", "POST")
    }
    assert served - documented == set()


def test_every_refused_parameter_is_a_no() -> None:
    nos = {name for cell, answer, _ in ROWS if answer.strip() == "no" for name in re.findall(r"`(\w+)`", cell)}
    assert nos == set(REFUSED)
