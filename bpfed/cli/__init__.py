"""The command ``bpfed``. Commands are in files here; what takes long to import is imported when a command needs it."""

from __future__ import annotations

import io
import sys
from typing import Annotated, NoReturn

import typer

from bpfed import __version__
from bpfed._util.console import Console
from bpfed._util.errors import UserError
from bpfed.cli import adapt, compare, data, deploy, methods, predict, report, run, tune
from bpfed.cli.terminal import Briefly, Group, imported_whole

OUT_OF_MEMORY = (
    "The machine has too little memory for this; give it less at a time (--chunk, --memory, --jobs), or use smaller "
    "settings (--hidden, --members, --eval-draws, --bins)."
)

app = typer.Typer(
    name="bpfed",
    cls=Group,
    help="Bayesian personalised federated learning: each client gets its own model, which knows how sure it is.",
    epilog="Example: bpfed run --data digits --rounds 30 --seed 0",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=Briefly, epilog=run.EXAMPLE)(run.run)
app.command("compare", cls=Briefly, epilog=compare.EXAMPLE)(compare.compare)
app.command("tune", epilog=tune.EXAMPLE)(tune.tune)
app.command("predict", epilog=predict.EXAMPLE)(predict.predict)
app.command("adapt", epilog=adapt.EXAMPLE)(adapt.adapt)
app.command("methods", epilog=methods.EXAMPLE)(methods.methods)
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
app.command("paper", add_help_option=False, context_settings=methods.ANYTHING)(methods.paper)
app.command("report", epilog=report.EXAMPLE)(report.report)
app.command("view", epilog=report.VIEW_EXAMPLE)(report.view)


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
