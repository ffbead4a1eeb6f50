"""``bpfed tune``: choose a method's settings on held-out training examples."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bpfed._util.console import Console
from bpfed._util.errors import UserError
from bpfed._util.text import typed
from bpfed.cli import terminal
from bpfed.cli.flags import ConfigFile, DataDir, Quiet, with_schema
from bpfed.cli.run import RUNS, data_word, loading, overrides
from bpfed.cli.terminal import PATIENCE
from bpfed.config.registry import check_data, check_method, located

if TYPE_CHECKING:
    from bpfed.comparison import Tuning
    from bpfed.config.reader import Config, Override

EXAMPLE = (
    "Example: bpfed tune --data folder:hospitals --target disease --rounds 20, "
    "then bpfed run runs/tune-hospitals-bpfed-recipe/best.toml"
)
#: What is to be used afterwards, in the folder.
BEST = "best.toml"


@with_schema
def tune(
    config: ConfigFile = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method (see 'bpfed methods'). \\[default: bpfed-recipe; a run on tables chooses the settings of "
            "bpfed-adaptive by itself]",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,C",
            help="Values to try of one of the method's settings, or of hidden; repeat it to try all combinations. "
            "\\[default: temperatures]",
            show_default=False,
        ),
    ] = None,
    cuts: Annotated[
        int, typer.Option(metavar="INT", help="How often a part is held out; more cuts give a more reliable choice.")
    ] = 3,
    held: Annotated[
        float, typer.Option(metavar="FLOAT", help="Fraction of each client's training examples that is held out.")
    ] = 0.2,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, e.g. method.lr=0.01; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the trials. \\[default: runs/tune-DATA-METHOD]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    **flags: str | None,
) -> None:
    """Choose settings on held-out training examples; no test example is used, so the test stays fair.

    Trains with each value on a part of every client's training examples, scores it on the rest, and writes the settings
    with the lowest NLL to OUT/best.toml, from which 'bpfed run' trains on all examples. Without --grid it tries
    temperatures: the best one depends on how noisy the labels are.

    Finished trials in OUT are not repeated: after Ctrl-C, run the same command again.
    """
    from bpfed.callbacks.progress import CellProgress

    progress = CellProgress(patience=PATIENCE)
    try:
        if not quiet:
            progress.doing("starting")
        check_method(method)
        check_data(flags["data"])
        from bpfed.config.reader import read

        said = overrides(method, settings or [], flags)
        chosen = read(config, said)
        wanted = _grid(grid, config, said) if grid else None
        from bpfed.comparison.tuning import run_trials, trials

        tried = trials(chosen.method, wanted, chosen.run)
        out = out or RUNS / f"tune-{data_word(chosen)}-{chosen.method.name}"
        for note in chosen.notes:
            progress.say(note)
        if not quiet:
            loading(progress, chosen.data.name, data_dir)
        data = chosen.load_data(data_dir)
        display = None if quiet else progress
        found = run_trials(tried, data, cuts, held, out=out, display=display, say=progress.say)
    except KeyboardInterrupt:
        progress.close()
        progress.say("bpfed: Stopped; at most the current round is lost. Resume with the same command.")
        raise typer.Exit(130) from None
    finally:
        progress.close()
    from bpfed._util.files import to_toml, write_whole

    write_whole(out / BEST, to_toml(_best(chosen, found)))
    _show(found, out, data_dir, _calibrates(chosen))


def _grid(texts: list[str], config: Path | None, said: list[Override]) -> dict[str, list[Any]]:
    """The values of each setting, as its type has them."""
    from bpfed.comparison.tuning import OF_RUN
    from bpfed.config.reader import Override, read
    from bpfed.config.schema import fields_of
    from bpfed.config.settings import Settings

    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        table, _, name = key.strip().rpartition(".")
        if not equals or not name or not values.strip(","):
            raise UserError(f"--grid: '{text}' has no values; write e.g. --grid lr=0.001,0.01.")
        table = table or ("run" if name in fields_of(Settings) else "method")
        if table == "data" or (table == "run" and name in fields_of(Settings) and name not in OF_RUN):
            raise UserError(
                f"--grid: '{name}' is a {table} setting; only settings of the method, such as lr, and hidden can be "
                "tried."
            )
        one_by_one = [
            Override(f"{table}.{name}", value.strip(), "--grid") for value in values.split(",") if value.strip()
        ]
        found.setdefault(name, []).extend(
            getattr(getattr(read(config, [*said, one]), table), name) for one in one_by_one
        )
    return found


def _best(config: Config, found: Tuning) -> dict[str, Any]:
    """The configuration of a run with what was chosen, without what is at its default.

    The seed of the data is in it: with another split, examples that settings were chosen on would be in the test.
    """
    method, run = found.method, replace(config.run, hidden=found.hidden)
    if _calibrates(config):
        run = replace(run, calibration_temperature=found.calibration_temperature, calibrate="none")
    data = replace(config.data, seed=config.data_seed, name=located(config.data.name))
    usual = type(method)().settings()
    return {
        "data": {k: v for k, v in asdict(data).items() if k == "name" or v != getattr(type(data)(), k)},
        "method": {"name": method.name} | {k: v for k, v in method.settings().items() if v != usual[k]},
        "run": {k: v for k, v in asdict(run).items() if k == "rounds" or v != getattr(type(run)(), k)},
    }


def _calibrates(config: Config) -> bool:
    """Whether what was learnt of how sure to be is kept: it is, unless each client gets its own temperature."""
    return config.run.scaling == "none"


def _show(found: Tuning, out: Path, data_dir: Path | None, calibrates: bool) -> None:
    """All trials, the best first, and what to do next."""
    from bpfed.comparison.candidates import REPORT
    from bpfed.comparison.tables import gap, spread
    from bpfed.comparison.tuning import AS_IT_IS, TEMPERATURES, worded
    from bpfed.metrics.registry import METRICS
    from bpfed.report.record import temperature_words

    console, comparison = Console(), found.comparison
    measures = [m for m in comparison.measures if m.place == "progress"]
    shown = terminal.table(
        "", *(m.full for m in measures), "NLL, difference", "seconds", title=comparison.title, right=len(measures) + 2
    )
    reference, as_it_is = comparison.titles[AS_IT_IS], found.trials[AS_IT_IS]
    given = {"hidden": as_it_is.settings.hidden} | as_it_is.method.settings()
    kept = {name: given[name] for trial in found.trials.values() for name in trial.tried}
    for name in comparison.ranking:
        best = "bold green" if name == found.best else ""
        cells = [typed(spread(m, comparison.mean(name, m.name), comparison.sd(name, m.name))) for m in measures]
        apart = "" if name == AS_IT_IS else typed(gap(METRICS["nll"], found.difference(name)))
        cells += [apart, f"{comparison.seconds(name):.1f}"]
        title = comparison.titles[name] if name != AS_IT_IS else f"{reference} as it is, {worded(kept)}"
        shown.add_row(Text(f"{'* ' if best else ''}{title}", best), *(Text(c, best) for c in cells))
    shown.columns[0].no_wrap = True
    terminal.put(shown)
    several = len(comparison.seeds) > 1
    console.print(
        f"On held-out training examples{', mean ± standard deviation over cuts' if several else ''}, lowest NLL first. "
        f"Difference: from {reference} as it is{', with a 95 % interval over cuts' if several else ''}. "
        "No test example was used.",
        style="dim",
    )
    if along := next((trial.along for trial in found.trials.values() if trial.along), ()):
        console.print(
            f"Along with the temperature, {' and '.join(along)} is adjusted, as the method asks. {BEST} has both.",
            style="dim",
        )
    if found.best == AS_IT_IS:
        console.print("No setting that was tried has a lower NLL than the method as it is.")
    elif (t := found.trials[found.best].changed.get("temperature")) in (TEMPERATURES[0], TEMPERATURES[-1]):
        console.print(
            f"{t:g} is the {'lowest' if t == TEMPERATURES[0] else 'highest'} temperature tried without --grid; use "
            "--grid to go further."
        )
    if found.best != AS_IT_IS and several and not found.difference(found.best).clear:
        console.print("The best setting is not clearly better than the method as it is: the interval includes zero.")
    if calibrates and found.calibration_temperature != 1.0:
        console.print(
            f"{BEST} also has a calibration temperature, {temperature_words(found.calibration_temperature)}, which suits "
            "the best setting's predictions on these examples. The figures above are without it."
        )
    again = shlex.join(
        ["bpfed", "run", str(out / BEST), *(["--data-dir", str(data_dir)] if data_dir is not None else [])]
    )
    console.print(f"Report: {out / REPORT}", style="bold", soft_wrap=True)
    console.print(f"Train with the best settings: {again}", style="bold", soft_wrap=True)
