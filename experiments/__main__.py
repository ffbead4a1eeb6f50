"""``python -m experiments``: the studies behind the pages of results, each one command.

The experiments of `ALONE` need no package for terminals, so they also run where typer and rich are missing. The others
are the paper's, and are also called ``bpfed paper``.
"""

import ast
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bpfed._util.errors import UserError

ALONE = {
    "tables": "experiments.tables",
    "many-classes": "experiments.many_classes",
    "dirichlet": "experiments.dirichlet",
    "small-cells": "experiments.small_cells",
    "honest-sets": "experiments.honest_sets",
    "cifar100-features": "experiments.cifar100_features",
    "tweets": "experiments.tweets",
    "brca": "experiments.brca",
}


def about(module: str) -> str:
    """The first line of a module's docstring, read without importing it."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0]


def overview() -> str:
    """The experiments of `ALONE`, a line each."""
    lines = [
        textwrap.fill(f"  {name:<18} {about(module)}", 80, subsequent_indent=" " * 21) for name, module in ALONE.items()
    ]
    return "\n".join(["Studies of their own, each with --help (python -m experiments NAME):", "", *lines, ""])


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        try:
            import_module(ALONE[sys.argv[1]]).main(sys.argv[2:])
        except UserError as error:
            sys.exit(f"{error}")
    else:
        from bpfed.cli import main

        if sys.argv[1:] in ([], ["--help"], ["-h"]):
            print(overview(), "And those of the paper, also called 'bpfed paper NAME':", sep="\n", flush=True)
        main(["paper", *sys.argv[1:]])
