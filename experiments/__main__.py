"""``python -m experiments``: the paper's tables and figures, each one command.

The experiments of `ALONE` need no package for terminals, so they also run where typer and rich are missing.
"""

import sys
from importlib import import_module

from bpfed._util.errors import UserError

ALONE = {
    "tables": "experiments.tables",
    "many-classes": "experiments.many_classes",
    "dirichlet": "experiments.dirichlet",
    "small-cells": "experiments.small_cells",
    "honest-sets": "experiments.honest_sets",
    "cifar100-features": "experiments.cifar100_features",
}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        try:
            import_module(ALONE[sys.argv[1]]).main(sys.argv[2:])
        except UserError as error:
            sys.exit(f"{error}")
    else:
        from bpfed.cli import main

        main(["paper", *sys.argv[1:]])
