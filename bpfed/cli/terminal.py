"""Tables on the terminal, and commands that are imported when called."""

from __future__ import annotations

import io
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import typer
from click import Command
from rich import box
from rich.cells import cell_len
from rich.table import Table
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

from bpfed._util import text
from bpfed._util.console import Console
from bpfed._util.errors import UserError, unknown
from bpfed._util.files import to_json

if TYPE_CHECKING:
    from click import Context, HelpFormatter, Parameter
    from click.shell_completion import CompletionItem

    from bpfed.metrics.registry import Metric
    from bpfed.report import RunRecord

#: Seconds that a command may be silent where there is no terminal to show a display on.
PATIENCE = 2.0


def table(*columns: str, title: str | None = None, right: int = 0) -> Table:
    """An empty table in the style of all; the last ``right`` columns are numbers."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, name in enumerate(columns):
        number = index >= len(columns) - right
        made.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made


def put(shown: Table) -> None:
    """Print a table on stdout; where it is wider than the terminal it runs over, for a number cut short would lie."""
    width = max(Console().width, narrowest(shown))
    enough = next((more for more in range(8) if _whole(shown, width + more)), 0)
    Console(width=width + enough).print(shown)


def narrowest(shown: Table) -> int:
    """The width that a table needs at least, when text may wrap between words and numbers may not."""
    for column in shown.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        column.min_width = max(
            cell_len(part) for cell in cells for part in ([cell] if column.no_wrap else cell.split(" "))
        )
    slack = sum(not column.no_wrap for column in shown.columns)  # what rich takes from the one that wraps best
    return Console(width=10_000).measure(shown).minimum + slack


def _whole(shown: Table, width: int) -> bool:
    """Whether no word is cut at this width (columns with a least width may come out too wide by a character or two)."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(shown)
    there = set(capture.get().split())
    cells = (str(cell) for column in shown.columns for cell in (column.header, *column.cells))
    return all(word in there for cell in cells for word in cell.split())


def _figures(run: RunRecord, measure: Metric) -> list[str]:
    """A measure in the last round, at the worst client, and in the best round."""
    best = run.best(measure.name) if measure.has_best_round else None
    top = text.MISSING if best is None else f"{measure.typed(best[1])} (round {best[0]})"
    return [measure.typed(run.last(measure.name)), measure.typed(run.worst(measure.name)), top]


def result(run: RunRecord, report: Path | None = None) -> None:
    """What came out of a run, and where its report is; None: there is none."""
    from bpfed.metrics.registry import METRICS
    from bpfed.report.record import value

    shown = table("", "last round", "worst client", "best round", title=run.title, right=3)
    for measure in run.listed:
        name = measure.full
        if measure.name == "ece":
            by_chance = METRICS["ece"].typed(value(run.evaluation, "ece_floor"))
            name = f"ECE ({run.evaluation.get('bins')} bins, {by_chance} by chance)"
        elif measure.name == "answered_accuracy" and run.sure:
            name = text.typed(f"{name} (of {text.count(run.sure)})")
        if own := run.in_units(measure):
            shown.add_row(own.full, *_figures(run, own))
            if measure.name != "rmse":
                continue
        shown.add_row(name, *_figures(run, measure))
    put(shown)
    console = Console()
    for note in filter(
        None,
        (
            run.verdict,
            run.skipped_baselines,
            run.untested,
            run.participation_note,
            run.uncovered,
            run.no_use,
            run.calibration_words,
            run.calibration_advice,
        ),
    ):
        console.print(text.typed(note))
    # A deployed site's own run does not know the time; that of all rounds is with the server.
    lasted = f" for {text.duration(seconds)}" if (seconds := value(run.summary, "seconds")) > 0 else ""
    console.print(f"Trained{lasted} on {run.summary['device']}.")
    if "epsilon" in run.summary:
        console.print(
            f"Privacy of a client: epsilon {text.epsilon(run.summary['epsilon'], 2)}, delta {run.summary['delta']:g}"
            f"{'.' if run.summary['protocol'] == 'deployed' else ', valid only if the seed is secret.'}",
        )
    if report is not None:
        console.print(f"Report: {report}", style="bold", soft_wrap=True)


def put_json(found: Mapping[str, Any]) -> None:
    """Print a result for programs."""
    sys.stdout.write(to_json(dict(found)))


# --- A group of commands ----------------------------------------------------------------------------------------------


class Group(TyperGroup):
    """Refuses a command that does not exist in one sentence with the nearest; typer and click would each name that.

    Without a command it shows its help, which is no mistake.
    """

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help().rstrip())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


class LazyCommand(NamedTuple):
    """A command, or a group of some, whose module is imported when it is called.

    Attributes:
        place: Its module in `bpfed.cli`, and the name of its function or of its group there.
        summary: The first paragraph of its help.
        epilog: The name in the module of the example below its help; None: there is none.
        options: How it is registered beside that.
    """

    place: str
    summary: str
    epilog: str | None = "EXAMPLE"
    options: Mapping[str, Any] = MappingProxyType({})

    def load(self, name: str) -> Command:
        """The command under its name."""
        module, _, own = self.place.partition(":")
        found = import_module(f"bpfed.cli.{module}")
        made = getattr(found, own)
        if isinstance(made, typer.Typer):
            group = get_group(made)
            group.name = name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name, epilog=getattr(found, self.epilog) if self.epilog else None, **self.options)(made)
        return get_command(alone)


class LazyGroup(Group):
    """A group of commands that are imported when they are called; its help shows their summaries."""

    lazy: ClassVar[Mapping[str, LazyCommand]] = {}

    @classmethod
    def of(cls, lazy: Mapping[str, LazyCommand]) -> type[LazyGroup]:
        """The group of these commands, for ``typer.Typer(cls=...)``."""
        return type("LazyGroup", (cls,), {"lazy": lazy})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Loading(self.lazy, self.commands)
        self._shown = False

    def list_commands(self, ctx: Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if self._shown and cmd_name in self.lazy:
            return Command(cmd_name, help=self.lazy[cmd_name].summary)
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        with self._summaries():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        with self._summaries():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _summaries(self) -> Iterator[None]:
        """Inside of the block a command is its name and its summary."""
        self._shown = True
        try:
            yield
        finally:
            self._shown = False


class _Loading(UserDict[str, Command]):
    """Commands by name; a lazy one is loaded when it is asked for."""

    def __init__(self, lazy: Mapping[str, LazyCommand], given: Mapping[str, Command]) -> None:
        super().__init__()
        self.data = {**lazy, **given}  # type: ignore[dict-item]

    def __getitem__(self, name: str) -> Command:
        found = self.data[name]
        if isinstance(found, LazyCommand):
            found = self.data[name] = found.load(name)
        return found


class Briefly(TyperCommand):
    """A command of many flags, whose help shows the common ones; ``--help-all`` shows all."""

    #: Parameters that `--help` shows, in this order.
    common: tuple[str, ...] = (
        "config",
        "data",
        "target",
        "client_column",
        "method",
        "methods",
        "rounds",
        "seed",
        "seeds",
        "calibration",
        "calibrate",
        "out",
        "resume",
        "help",
        "help_all",
    )

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.everything = False
        self.params.append(
            TyperOption(
                param_decls=["--help-all"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=self._all,
                help="Show all flags and exit.",
            )
        )
        # Who knows scikit-learn looks for it, and the flag that is spelt most like it is about something else.
        self.params.append(
            TyperOption(
                param_decls=["--class-weight", "--class-weights"],
                type=str,
                expose_value=False,
                hidden=True,
                callback=_no_class_weights,
            )
        )

    def _all(self, ctx: Context, param: Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            self.everything = True
            try:
                print(ctx.get_help().rstrip())
            finally:
                self.everything = False
            ctx.exit()

    def get_params(self, ctx: Context) -> list[Parameter]:
        """All, the common ones first."""
        found = super().get_params(ctx)
        place = {name: k for k, name in enumerate(self.common)}
        return sorted(found, key=lambda one: place.get(one.name or "", len(place)))

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        shown = self.get_params(ctx)
        if self.everything:
            super().format_help(ctx, formatter)
            return
        before = [(one, getattr(one, "hidden", False), getattr(one, "rich_help_panel", None)) for one in shown]
        try:
            for one, hidden, _ in before:
                one.hidden = hidden or one.name not in self.common  # type: ignore[attr-defined]
                one.rich_help_panel = None  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            for one, hidden, panel in before:
                one.hidden, one.rich_help_panel = hidden, panel  # type: ignore[attr-defined]


def _no_class_weights(ctx: Context, param: Parameter, given: str | None) -> None:
    if given is not None:
        raise UserError(
            "There are no class weights in training, since predictions would no longer be the probabilities of the clients' "
            "own rows; train without, and say what mistakes cost: bpfed predict RUN --costs balanced, or --costs yes=10."
        )
