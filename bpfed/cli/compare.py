"""``bpfed compare``: methods x seeds on the same data, a table and one report."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bpfed._util.console import Console
from bpfed._util.errors import UserError, hint
from bpfed._util.text import typed
from bpfed.cli import terminal
from bpfed.cli.flags import DataDir, Json, Quiet, argument, flag, schema_fields, with_schema
from bpfed.cli.run import RUNS, data_word, loading, override, overrides
from bpfed.cli.terminal import PATIENCE
from bpfed.config.registry import check_data, check_method
from bpfed.config.schema import ROUNDS

if TYPE_CHECKING:
    from bpfed.comparison import Candidate, Comparison
    from bpfed.config.reader import Config, Override
    from bpfed.data import FederatedData

EXAMPLE = "Example: bpfed compare --data digits --methods bpfed,fedper,fedper+laplace,local --seeds 3 --out runs/digits"


@partial(with_schema, without=("run.seed", "run.rounds"))
def compare(
    methods: Annotated[
        str,
        typer.Option(
            metavar="all|A,B,C",
            help="Methods to compare (see 'bpfed methods'), or variants such as fedper+laplace; default is what 'bpfed run' "
            "uses without --method.",
        ),
    ] = "all",
    seeds: Annotated[
        str,
        typer.Option(
            metavar="N|A,B,C", help="How many seeds (3: seeds 0, 1, 2), or which (0,4,7); each splits the data again."
        ),
    ] = "3",
    rounds: Annotated[int, typer.Option(metavar="INT", help="Communication rounds of every run.")] = ROUNDS,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Method that the others are compared with. \\[default: default, else bpfed-adaptive, else bpfed-recipe, else bpfed, else the first]",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting, for all (run.epochs=5, data.seed=0, method.lr=0.01) or for one (bpfed.sigma=0.05); "
            "repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison. \\[default: runs/compare-DATA]", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
    **flags: str | None,
) -> None:
    """Run methods on the same data with the same seeds, and compare them in a table and a report.

    Each run has its own folder, OUT/METHOD/seed-K. Finished runs are not repeated and interrupted ones are resumed:
    repeat the command, with more methods or seeds if you like.
    """
    from bpfed.callbacks.progress import CellProgress

    progress = CellProgress(patience=PATIENCE)
    try:
        if not quiet:
            progress.doing("starting")
        # The display is up before torch is imported, which takes seconds, and names are looked at before that.
        for word in filter(None, map(str.strip, methods.split(","))):
            check_method(None if word in ("all", "default") else word.partition("+")[0])
        check_data(flags["data"])
        from bpfed.comparison.candidates import REPORT
        from bpfed.comparison.runner import run_cells

        who, first = _candidates(methods, rounds, settings or [], flags)
        out = out or RUNS / f"compare-{data_word(first)}"

        def deal(seed: int) -> FederatedData:
            if not quiet:
                loading(progress, first.data.name, data_dir)
            return replace(first, run=replace(first.run, seed=seed)).load_data(data_dir)

        found = run_cells(
            who,
            deal,
            _seeds(seeds),
            reference=reference,
            out=out,
            display=None if quiet else progress,
            say=progress.say,
        )
    except KeyboardInterrupt:
        progress.close()
        again = _again(methods, seeds, rounds, reference, settings or [], out, data_dir, quiet, flags)
        progress.say(f"bpfed: Stopped; at most the current round is lost. Resume with: {again}")
        raise typer.Exit(130) from None
    finally:
        progress.close()
    if json:
        from bpfed.comparison.tables import record

        terminal.put_json(record(found) | {"report": str(out / REPORT)})
        return
    _show(found)
    Console().print(f"Report: {out / REPORT}", style="bold", soft_wrap=True)


def _candidates(
    methods: str, rounds: int, settings: list[str], flags: dict[str, str | None]
) -> tuple[list[Candidate], Config]:
    """Who takes part, and the configuration of the first of them."""
    from bpfed.comparison.candidates import DEFAULT, Candidate, changes, check_common, listed, title
    from bpfed.config.reader import Override, no_prefix, read

    names = listed(methods)
    common = [Override("run.rounds", str(rounds), "--rounds"), *overrides(None, [], flags)]
    own: dict[str, list[Override]] = {}  # by the word before the dot, where that is none of a configuration's tables
    for one in map(_override, settings):
        table, dot, key = one.key.partition(".")
        if not dot:
            raise no_prefix(one, names[0].partition("+")[0])
        if table in ("data", "run", "method"):
            common.append(one)
        elif any(table in (name, name.partition("+")[0]) for name in names):
            own.setdefault(table, []).append(one._replace(key=f"method.{key}"))
        else:
            raise UserError(
                f"--set: '{table}' is not part of this comparison; {hint(table, ('data', 'run', 'method', *names))}"
            )

    found, configs = [], []
    for name in names:
        base = name.partition("+")[0]
        # What is said for a method is said for its variants too, but not what makes them variants.
        variant = {key: Override(key, str(value)) for key, value in changes(name).items()}
        theirs, mine = own.get(base, []), own.get(name, []) if name != base else []
        _check(base, [*common, *theirs, *mine])
        check_common(name, {o.key: o.text for o in common})
        if undone := [o for o in mine if o.key in variant]:
            raise UserError(
                f"--set: {name} would no longer be what its name says with another {undone[0].key.partition('.')[2]}; "
                f"set that for {base}."
            )
        called = [] if name == DEFAULT else [Override("method.name", base)]
        config = read(None, [*called, *common, *theirs, *variant.values(), *mine])
        found.append(Candidate(name, title(name), config.method if called else None, config.run))
        configs.append(config)
    return found, configs[0]


def _override(setting: str) -> Override:
    found = override(setting)
    if found.key in ("run.seed", "run.rounds"):
        flag = {"run.seed": "--seeds", "run.rounds": "--rounds"}[found.key]
        raise UserError(f"--set: {found.key} cannot be set here; use {flag}.")
    return found


def _check(base: str, overrides: list[Override]) -> None:
    """Raise unless the method has all settings that are meant for it; the default has none, since it may be any."""
    from bpfed.comparison.candidates import DEFAULT
    from bpfed.config.schema import fields_of
    from bpfed.methods import method

    known = {} if base == DEFAULT else fields_of(method(base))
    for table, _, key in (o.key.partition(".") for o in overrides):
        if table == "method" and key not in known:
            raise UserError(
                f"--set: {base} has no setting '{key}'; to set it for one method only, name the method, e.g. "
                "--set bpfed.sigma=0.05."
            )


def _seeds(text: str) -> int | list[int]:
    try:
        found = [int(word) for word in text.removesuffix(",").split(",")]
    except ValueError:
        raise UserError(f"--seeds: '{text}' is not a number or a list of numbers; write e.g. 3 or 0,4,7.") from None
    return found if "," in text else found[0]


def _again(
    methods: str,
    seeds: str,
    rounds: int,
    reference: str | None,
    settings: list[str],
    out: Path | None,
    data_dir: Path | None,
    quiet: bool,
    flags: dict[str, str | None],
) -> str:
    """The same command once more."""
    words = ["bpfed", "compare"]
    for key, _ in schema_fields():
        if (text := flags.get(argument(key))) is not None:
            words += [flag(key), text]
    words += ["--methods", methods, "--seeds", seeds, "--rounds", str(rounds)]
    for name, value in (("--reference", reference), ("--out", out), ("--data-dir", data_dir)):
        words += [name, str(value)] if value is not None else []
    words += [word for setting in settings for word in ("--set", setting)]
    return shlex.join([*words, *(["--quiet"] if quiet else [])])


def _show(comparison: Comparison) -> None:
    """Both tables on stdout."""
    from bpfed._util import text
    from bpfed.comparison.tables import better, caption, compared, gap, pairing, pairs, spread

    console, measures = Console(), comparison.measures
    heads = [f"ECE ({comparison.bins} bins)" if m.name == "ece" else m.full for m in measures]
    shown = terminal.table("", *heads, "seconds", title=comparison.title, right=len(heads) + 1)
    for name in comparison.shown:
        cells = []
        for m in measures:
            best = comparison.best(m.name) == name
            told = typed(spread(m, comparison.mean(name, m.name), comparison.sd(name, m.name)))
            cells.append(Text(f"*{told}" if best else told, "bold green" if best else ""))
        shown.add_row(Text(comparison.label(name)), *cells, text.decimal(comparison.seconds(name), 1))
    shown.columns[0].no_wrap = True
    terminal.put(shown)
    console.print(typed(caption(comparison, "with a star")), style="dim")
    if comparison.verdict:
        console.print(typed(comparison.verdict))
    if len(comparison.shown) < 2:
        return
    reference, chosen = comparison.titles[comparison.reference], compared(comparison)
    found = {m.name: comparison.differences(m.name, baselines=True) for m in chosen}
    heads = [m.label for m in chosen]
    shown = terminal.table(
        "", *heads, "lower NLL for", title=f"\nDifferences from {reference}, mean over clients", right=len(heads) + 1
    )
    for name in found["nll"]:
        cells = []
        for m in chosen:
            one = found[m.name][name]
            cells.append(Text(typed(gap(m, one)), "" if one.clear else "dim"))
        shown.add_row(Text(comparison.label(name)), *cells, f"{better(found['nll'][name])} {pairs(comparison)}")
    shown.columns[0].no_wrap = True
    terminal.put(shown)
    console.print(typed(pairing(comparison)), style="dim")
