"""``bpfed paper``: the paper's experiments are beside the package, in a checkout of the repository."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import typer

from bpfed._util.errors import UserError

ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def paper(context: typer.Context) -> None:
    """The paper's experiments: run them, and make their tables and figures."""
    found = find_spec("experiments")
    beside = Path(__file__).resolve().parent.parent.parent / "experiments" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != beside:
        raise UserError(
            "The paper's experiments are not part of the package; in a checkout of the repository run "
            "'python -m experiments --help'."
        )
    import_module("experiments.cli").app(context.args, prog_name="bpfed paper", standalone_mode=False)
