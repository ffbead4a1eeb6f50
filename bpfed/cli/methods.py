"""``bpfed methods``: the methods, or the settings of one; ``bpfed paper``: where the paper's experiments are."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from bpfed._util.console import Console
from bpfed._util.errors import UserError
from bpfed.cli import terminal
from bpfed.config.registry import check_method

EXAMPLE = "Example: bpfed methods bpfed"
#: On a terminal of fewer columns, what is random and the paper are said of a single method alone.
ROOMY = 130


def methods(
    name: Annotated[str | None, typer.Argument(help="Show the settings of this method.", show_default=False)] = None,
) -> None:
    """List the methods, or the settings of one of them."""
    check_method(name)
    terminal.put(_one(name) if name is not None else _all())
    if name is None and Console().width < ROOMY:
        Console().print("Paper and settings of one: bpfed methods NAME")
    if name is not None:
        Console().print(f"Set one with e.g. bpfed run --method {name} --set method.lr=0.01")


def _all() -> terminal.Table:
    from bpfed.methods import method as method_of
    from bpfed.methods import names

    wide = Console().width >= ROOMY
    shown = terminal.table("name", "shared", "personal", *(("random", "paper") if wide else ()))
    shown.columns[0].no_wrap = True
    for name in names():
        try:
            method = method_of(name)
        except UserError as error:  # of another package
            Console(stderr=True).print(f"bpfed: {error}", soft_wrap=True)
            continue
        more = (method.random_words, method.paper) if wide else ()
        shown.add_row(method.name, method.shared_words, method.personal_words, *more)
    return shown


def _one(name: str) -> terminal.Table:
    from bpfed.config.schema import about, fields_of, plain
    from bpfed.methods import method

    chosen = method(name)
    title = plain(inspect.cleandoc(chosen.__doc__ or "").split("\n\n")[0].replace("\n", " "))
    random = f"; random: {chosen.random_words}"
    shown = terminal.table("setting", "default", "what it is", title=f"{title} ({chosen.paper}{random})")
    for setting, field in fields_of(chosen).items():
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        shown.add_row(setting, default, about(field))
    return shown


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
