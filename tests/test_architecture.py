"""How modules import each other at the top level: no cycles, no long chains, and no small modules for one importer.

`lint-imports` checks the layers. Imports inside of functions and those for type checkers alone do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import bpfed

ROOT = Path(bpfed.__file__).parent
#: Modules in the longest chain of imports, at most.
LONGEST = 14
#: Lines of a module that has one importer, at least.
SMALL = 60
#: Smaller ones with one importer, and why they are files of their own.
ALONE = dict.fromkeys(("fedbabu", "fedper", "fedrep", "lgfedavg", "local"), "a method is one file")


def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            yield from at_import(node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from at_import(node.body)


@cache
def imported() -> dict[str, frozenset[str]]:
    """Of each module those that it imports."""
    known = modules()
    found: dict[str, frozenset[str]] = {}
    for name, path in known.items():
        names: list[str] = []
        for node in at_import(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            else:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [one if one in known else str(node.module) for one in inner]
        found[name] = frozenset(n for n in names if n in known and n != name)
    return found


def longest(name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain that begins with a module."""
    assert name not in above, f"a cycle of imports: {' -> '.join((*above, name))}"
    if name not in CHAINS:
        below = [longest(other, (*above, name)) for other in sorted(imported()[name])]
        CHAINS[name] = (name, *max(below, key=len, default=()))
    return CHAINS[name]


CHAINS: dict[str, tuple[str, ...]] = {}


def test_no_chain_of_imports_is_long() -> None:
    chain = max(map(longest, imported()), key=len)
    assert len(chain) <= LONGEST, f"{len(chain)} modules: {' -> '.join(chain)}"


def test_no_small_module_is_there_for_one_importer() -> None:
    importers = {name: sum(name in others for others in imported().values()) for name in imported()}
    small = {
        name
        for name, path in modules().items()
        if path.name != "__init__.py" and importers[name] == 1 and len(path.read_text().splitlines()) < SMALL
    }
    assert {name.rpartition(".")[2] for name in small} <= set(ALONE), small
