"""The command ``bpfed``. Commands are in files here; what takes long to import is imported when a command needs it."""

from __future__ import annotations

import io
import sys
from typing import Annotated, NoReturn

import typer

from bpfed import __version__
from bpfed._util.console import Console
from bpfed._util.errors import UserError
from bpfed._util.imports import imported_whole
from bpfed.cli.terminal import Briefly, LazyCommand, LazyGroup

OUT_OF_MEMORY = (
    "The machine has too little memory for this; give it less at a time (--chunk, --memory, --jobs), or use smaller "
    "settings (--hidden, --members, --eval-draws, --bins)."
)

#: The commands in the order of the help, each with the first paragraph of its own help: a command's module is imported
#: when it is called.
COMMANDS = {
    "run": LazyCommand(
        "run:run",
        "Train a federation. Settings come from flags, then from the TOML file, then from the defaults.",
        options={"cls": Briefly},
    ),
    "compare": LazyCommand(
        "compare:compare",
        "Run methods on the same data with the same seeds, and compare them in a table and a report.",
        options={"cls": Briefly},
    ),
    "tune": LazyCommand(
        "tune:tune",
        "Choose settings on held-out training examples; no test example is used, so the test stays fair.",
    ),
    "predict": LazyCommand(
        "predict:predict",
        "Predict with one client's model: one line of CSV for each row of the input, in the same order.",
    ),
    "export": LazyCommand(
        "serve:export",
        "Write one client's model to a file that other programs use without bpfed.",
        epilog="EXPORT_EXAMPLE",
    ),
    "serve": LazyCommand("serve:serve", "Answer predictions of one client's model over HTTP until Ctrl-C."),
    "adapt": LazyCommand(
        "adapt:adapt",
        "Let a newcomer join a finished run: it learns its own weights, and the shared ones stay as they are.",
    ),
    "methods": LazyCommand("methods:methods", "List the methods, or the settings of one of them."),
    "paper": LazyCommand(
        "methods:paper",
        "The paper's experiments: run them, and make their tables and figures.",
        epilog=None,
        options={
            "add_help_option": False,
            "context_settings": {
                "allow_extra_args": True,
                "ignore_unknown_options": True,
                "help_option_names": [],
            },
        },
    ),
    "report": LazyCommand("report:report", "Write report.html of a run again from its files, and print its figures."),
    "view": LazyCommand(
        "report:view",
        "Make a page that lists the runs and comparisons of a folder and links their reports.",
        epilog="VIEW_EXAMPLE",
    ),
    "data": LazyCommand("data:app", "List, fetch and inspect datasets."),
    "deploy": LazyCommand(
        "deploy:app",
        "A federation of real sites, on Flower: same methods and results, and personal model parts stay at the sites.",
    ),
}

app = typer.Typer(
    name="bpfed",
    cls=LazyGroup.of(COMMANDS),
    help="Bayesian personalised federated learning: each client gets its own model, which knows how sure it is.",
    epilog="Example: bpfed run --data digits --rounds 30 --seed 0",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bpfed {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command, and exit: 0 if all went well, 2 if the user can fix it, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no σ gets a question mark, not a traceback
    try:
        with imported_whole():
            app(arguments)
    except UserError as error:
        _refuse(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"'{error.filename}' cannot be used ({error.strerror}); check the path and its permissions.")
    except KeyboardInterrupt:
        Console(stderr=True).print("bpfed: Stopped.")
        sys.exit(130)
    except MemoryError:
        _refuse(OUT_OF_MEMORY)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch's of the CPU, which has no type of its own
            _refuse(OUT_OF_MEMORY)
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for its name
            raise
        _refuse("The GPU ran out of memory; give it less at a time (--chunk, --memory, --jobs), or use --device cpu.")


def _refuse(sentence: str) -> NoReturn:
    Console(stderr=True).print(f"bpfed: {sentence}", style="red", soft_wrap=True)
    sys.exit(2)
