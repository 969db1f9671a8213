"""Every import in swarm/, relay/ and peer/ against the layer table in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "relay", "peer")
IMPURE = {"asyncio", "ctypes", "multiprocessing", "random", "secrets", "select", "socket", "subprocess", "time"}


@dataclass(frozen=True)
class Import:
    """`module` imports `target` in this line; at the top, or inside a function."""

    module: str
    target: str
    line: int
    is_lazy: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module: str, source: str, modules: set[str]) -> Iterator[Import]:
    """Yield the imports of `source`; `from package import name` counts as the module `package.name` where there is one."""
    tree = ast.parse(source)
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import"
            assert node.module is not None
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in modules else node.module for name in full]
        else:
            continue
        for target in dict.fromkeys(targets):
            yield Import(module, target, node.lineno, id(node) in lazy)


def read_table(text: str) -> dict[str, tuple[int, str]]:
    """Return name -> (rank, layer) of the table under `## Layers`, bottom up."""
    section = text.split("\n## Layers\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    table: dict[str, tuple[int, str]] = {}
    for rank, (layer, names) in enumerate(rows):
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in table, f"{name} stands in two layers"
            table[name] = rank, layer.strip()
    return table


def layer_of(module: str, table: dict[str, tuple[int, str]]) -> tuple[int, str] | None:
    """Return the place of a module: that of the longest name which it is or is in. `swarm` names only itself."""
    name = module
    while name:
        if name in table and (name == module or name != "swarm"):
            return table[name]
        name = name.rpartition(".")[0]
    return None


def problems_of(each: Import, table: dict[str, tuple[int, str]]) -> Iterator[str]:
    """Yield what is wrong with one import of our own code by our own code."""
    source, target = layer_of(each.module, table), layer_of(each.target, table)
    if source is None or target is None:
        yield f"{each}: not in the table"
        return
    if target[0] > source[0]:
        yield f"{each}: up from {source[1]} to {target[1]}"
    if {source[1], target[1]} == {"net", "native"}:
        yield f"{each}: net and native do not know each other"
    package, owner = each.target.split(".")[0], each.module.split(".")[0]
    if package in ("peer", "relay") and owner != package:
        if not each.module.startswith("swarm.cli."):
            yield f"{each}: only swarm.cli imports {package}"
        elif not each.is_lazy:
            yield f"{each}: not inside a function"


SOURCES = {module_name(path, ROOT): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text())
IMPORTS = [each for module, path in SOURCES.items() for each in imports_of(module, path.read_text(), set(SOURCES))]
OURS = [each for each in IMPORTS if each.target.split(".")[0] in PACKAGES]


def test_every_module_has_a_layer() -> None:
    assert [module for module in SOURCES if layer_of(module, TABLE) is None] == []


def test_the_table_names_only_what_exists() -> None:
    assert [name for name in TABLE if name not in SOURCES] == []


def test_no_import_goes_up() -> None:
    assert len(OURS) > 100, "the imports were not found"
    assert [problem for each in OURS for problem in problems_of(each, TABLE)] == []


def test_init_files_hold_nothing_but_the_version() -> None:
    full = [str(path) for path in SOURCES.values() if path.name == "__init__.py" and path.read_text().strip()]
    assert full == [str(ROOT / "swarm" / "__init__.py")]


@pytest.mark.parametrize("layer", ["leaf", "pure"])
def test_leaf_and_pure_modules_import_no_clock_no_randomness_and_no_network(layer: str) -> None:
    modules = {module for module in SOURCES if (layer_of(module, TABLE) or (0, ""))[1] == layer}
    assert len(modules) >= 5
    impure = [each for each in IMPORTS if each.module in modules and each.target.split(".")[0] in IMPURE]
    assert list(map(str, impure)) == []


# The checks themselves

SMALL_TABLE = read_table(
    "\n## Layers\n| layer | modules |\n|---|---|\n| leaf | `swarm` (version), `swarm.a` |\n| pure | `swarm.b.pure` |\n"
    "| native | `swarm.n` |\n| net | `swarm.net` |\n| service | `swarm.b` |\n| edge | `peer`, `relay` |\n"
    "| cli | `swarm.cli`, `peer.__main__` |\n\n## Next\n| x | `swarm.z` |\n"
)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("swarm.b.x", "from swarm import a, b", None),
        ("swarm.b.pure", "from swarm.b.x import thing", "up from pure to service"),
        ("swarm.b.pure", "def f():\n    import swarm.b.x", "up from pure to service"),
        ("swarm.a", "from swarm.b import pure", "up from leaf to pure"),
        ("swarm.a", "from swarm import __version__", None),
        ("swarm.b.x", "import swarm.unknown", "not in the table"),
        ("swarm.net", "import swarm.n", "do not know each other"),
        ("relay.d", "import peer.d", "only swarm.cli"),
        ("peer.d", "from relay import d", "only swarm.cli"),
        ("swarm.cli.m", "import peer.d", "not inside a function"),
        ("swarm.cli.m", "async def f():\n    from peer.d import P", None),
        ("peer.d", "import swarm.cli.m", "up from edge to cli"),
        ("peer.__main__", "import swarm.cli.m", None),
    ],
)
def test_the_check_finds(module: str, source: str, expected: str | None) -> None:
    modules = {"swarm", "swarm.a", "swarm.b", "swarm.b.pure", "swarm.b.x", "relay.d", "peer.d"}
    found = [problem for each in imports_of(module, source, modules) for problem in problems_of(each, SMALL_TABLE)]
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert expected in found[0]
