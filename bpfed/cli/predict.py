"""``bpfed predict``: what a client of a finished run predicts for new rows, and how sure it is."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpfed._util.console import Console
from bpfed._util.errors import UserError, quoted, unknown
from bpfed._util.text import many, percent
from bpfed.cli.flags import DataDir
from bpfed.cli.terminal import PATIENCE

if TYPE_CHECKING:
    from bpfed.callbacks.progress import Progress
    from bpfed.data.checks.new_rows import Unusual
    from bpfed.data.federated import FederatedData
    from bpfed.inference.decisions import Rule
    from bpfed.inference.predictive import Prediction
    from bpfed.runs.client import Client
    from bpfed.runs.load import LoadedRun

EXAMPLE = "Example: bpfed predict runs/first --client cleveland --input new.csv --abstain 0.9 --out predictions.csv"
#: Folder of a run that keeps its newcomers, a file for each.
ADAPTED = "adapted"
#: Clients that an error lists.
SHOWN = 12


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    rows: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="Rows to predict: a table as in training, NPZ with x, or an image or a folder of them.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="The run's own test rows instead, of all clients or of --client.")
    ] = False,
    client: Annotated[
        str | None, typer.Option(help="Whose model: a client of the run, or a newcomer.", show_default=False)
    ] = None,
    adapted: Annotated[
        Path | None, typer.Option(help="File of a newcomer that is elsewhere, instead of --client.", show_default=False)
    ] = None,
    level: Annotated[
        float, typer.Option(help="How often sets and intervals contain the truth; needs a run with --calibration.")
    ] = 0.9,
    abstain: Annotated[
        float | None,
        typer.Option(
            help="Mark rows whose label is less probable than this, or with a number far outside the training range.",
            show_default=False,
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            help="What mistakes cost, as TRUTH:DECISION=COST with commas between them, a .csv file, or balanced; adds the "
            "decision of least expected cost.",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="For two classes: from which probability on to decide for the second (or LABEL=0.3), or auto, chosen on "
            "the run's calibration examples; adds the decision.",
            show_default=False,
        ),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            help="For times to an event: times at which to give survival, in the unit of the tables, separated by commas.",
            show_default=False,
        ),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(help="Weight draws to average. \\[default: as in evaluation]", show_default=False)
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Columns of the input to copy, such as an id, separated by commas.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="CSV file to write. \\[default: stdout]", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file in --out.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Predict with one client's model: one line of CSV for each row of the input, in the same order.

    Classes get a label, probabilities and uncertainties (nats); numbers a mean and an sd in their own units.

    If the run held back calibration examples, there are also sets of labels or intervals.

    For tables, the column "unusual" names columns with a number far outside the training range, an unseen word or code,
    or no value though training always had one.

    With --test, each line begins with the client, the number of the row among its own, and the truth.
    """
    from bpfed.callbacks.progress import Progress

    if client is not None and adapted is not None:
        raise UserError("Choose whose model to use, with either --client NAME or --adapted FILE.")
    if test == (rows is not None) or (test and (adapted or keep)):
        raise UserError("Give new rows with --input FILE, or predict a run's own with --test; --keep is for the first.")
    if out is not None and out.exists():
        if rows is not None and rows.exists() and out.samefile(rows):
            raise UserError(f"'{out}' is the input itself, which predictions must not replace; choose another --out.")
        if folder.resolve() in out.resolve().parents and out.suffix.lower() not in (".csv", ".tsv", ".txt"):
            raise UserError(f"'{out}' belongs to the run, so predictions must not replace it; choose another --out.")
        if not overwrite:
            raise UserError(f"'{out}' already exists; add --overwrite to replace it, or choose another --out.")
    if not 0.0 < level < 1.0:
        raise UserError(f"--level is {level:g}, but must be above 0 and below 1, such as 0.9.")
    if abstain is not None and not 0.0 <= abstain <= 1.0:
        raise UserError(f"--abstain is {abstain:g}, but must be a probability, such as 0.9.")
    at = _times(times)
    progress = Progress(patience=PATIENCE)
    try:
        progress.doing(f"loading {folder}")
        run = finished_run(folder, progress.say)
        rule = _rule(run, costs, threshold, draws, progress.say)
        if rows is None:
            text, count, told = _tested(run, client, level, abstain, at, draws, data_dir, progress, rule)
            for sentence in told:
                progress.say(sentence)
            _put(text, f"{many(count, 'prediction')} of test rows", out)
            return
        if client is None and adapted is None:
            raise UserError(f"Choose whose model to use, with --client, from: {quoted(known(run), SHOWN)}.")
        who = run.newcomer(adapted) if adapted is not None else find(run, str(client))
        from bpfed.data.tabular.rows import read_rows

        data = who.run.data
        taken = read_rows(data, rows, who.name, progress.say)
        x = taken.x
        kept = _named(rows) | _copied(rows, keep, len(x))
        progress.doing(f"predicting {many(len(x), 'row')}")
        found = who.predict(taken, draws=draws)
        if found.scores is None:
            progress.say(f"No sets or intervals: {_why(run, who)}.")
        for sentence in about_sets(found, level, who):
            progress.say(sentence)
        if strange := _strange(run, who, found):
            progress.say(strange)
        text = table(data, found, level, abstain, kept, taken.unusual, at, rule)
    finally:
        progress.close()
    _put(text, f"{many(len(x), 'prediction')} of '{who.name}'", out)


def _times(given: str | None) -> tuple[float, ...]:
    """The times of ``--times``, or a `UserError`."""
    try:
        return tuple(float(word) for word in (given or "").split(",") if word.strip())
    except ValueError as error:
        raise UserError(
            f"--times is '{given}', but must be numbers with commas between them, such as 365,730."
        ) from error


def _put(text: str, what: str, out: Path | None) -> None:
    """Write what was predicted to a file and say so, or print it."""
    if out is None:
        sys.stdout.write(text)
        return
    from bpfed._util.files import write_whole

    write_whole(out, text)
    Console().print(f"{what}: {out}", style="bold", soft_wrap=True)


def _tested(
    run: LoadedRun,
    client: str | None,
    level: float,
    abstain: float | None,
    times: tuple[float, ...],
    draws: int | None,
    data_dir: Path | None,
    progress: Progress,
    rule: Rule | None = None,
) -> tuple[str, int, list[str]]:
    """Predictions of a run's own test rows as CSV, how many there are, and sentences on their sets and decisions."""
    from bpfed.runs.load import rows_of

    if client is not None and client not in run.data.clients:
        raise unknown("client", client, run.data.clients)
    progress.doing("reading the run's data")
    parts: list[str] = []
    count = 0
    held: list[tuple[str, bool]] = []
    decided: list[tuple[str, str, str]] = []
    for each in rows_of(run, data_dir):
        if client not in (None, each.client):
            continue
        progress.doing(f"predicting {many(len(each.numbers), 'row')} of {each.client}")
        assert run.data.preprocessor is not None
        x = run.data.preprocessor.inputs(each.table, each.client)
        found = run.client(each.client).predict(x, draws=draws, prepared=True)
        of = {"client": [each.client] * len(each.numbers), "row": list(map(str, each.numbers)), "truth": each.truth}
        text = table(run.data, found, level, abstain, of, times=times, rule=rule)
        if rule is not None:
            decided += zip(each.truth, rule.decisions(found), rule.likeliest(found), strict=True)
        held += _held(run.data, found, level, each.truth)
        parts.append(text if not parts else text.partition("\n")[2])
        count += len(each.numbers)
    if not parts:
        whose = f"'{client}'" if client else "the run"
        raise UserError(f"There are no test rows of {whose}; train with some held out.")
    told = [sentence for sentence in (_coverage(held, level, run.data),) if sentence]
    return "".join(parts), count, [*told, *(rule.judged(decided) if rule is not None else ())]


def _rule(
    run: LoadedRun, costs: str | None, threshold: str | None, draws: int | None, say: Callable[[str], None]
) -> Rule | None:
    """How to decide on rows, as ``--costs`` and ``--threshold`` say; None: nothing is to be decided."""
    from bpfed.inference.decisions import BALANCED, Costs, Rule, Threshold, chosen_threshold, split_threshold

    if costs is None and threshold is None:
        return None
    labels, kept = tuple(run.data.class_names), run.calibration
    if not run.data.task_type.has_classes or run.data.task_type.target_axes:
        raise UserError(f"--costs and --threshold are for classes, but this run predicts {run.data.task_type.targets}.")
    truth = kept.truth if kept is not None and (draws is None or draws == kept.draws) else None
    shares = None
    if truth is not None and costs == BALANCED:
        shares = truth.bincount(minlength=len(labels)).double().clamp(min=1.0)
        shares = shares / shares.sum()
    price = Costs.read(costs, labels, shares) if costs is not None else None
    if threshold is None:
        return Rule(labels, price, None)
    positive, value = split_threshold(threshold, labels)
    if value is not None:
        return Rule(labels, price, Threshold(labels, positive, value))
    if truth is None or kept is None:
        raise UserError(
            "A threshold is chosen on calibration examples with their classes, which this run has not; train with "
            "--calibration 0.2, or give a probability, such as --threshold 0.3."
        )
    right = truth == positive
    found = chosen_threshold(kept.scores.where(~right, 1.0 - kept.scores), right, labels, positive, price)
    by = "the least cost" if price is not None else "the largest sum of sensitivity and specificity"
    say(
        f"Decided for '{labels[positive]}' from a probability of {found.value:.3g} on: that had {by} on the "
        f"{len(truth)} calibration examples of all clients."
    )
    return Rule(labels, price, found)


def _held(data: FederatedData, found: Prediction, level: float, truth: list[str]) -> list[tuple[str, bool]]:
    """Of each row with a known class its label, and whether its set holds it; of no other task's rows."""
    from bpfed.inference.predictive import Classified

    if not isinstance(found, Classified) or found.scores is None:
        return []
    place = {label: k for k, label in enumerate(data.class_names)}
    sets = found.prediction_set(level).tolist()
    return [(word, row[place[word]]) for word, row in zip(truth, sets, strict=True) if word in place]


def _coverage(held: list[tuple[str, bool]], level: float, data: FederatedData) -> str:
    """A sentence on how often sets hold the truth, of all rows and of each class; empty: there are none."""
    if not held:
        return ""
    shares = []
    for label in data.class_names:
        own = [inside for word, inside in held if word == label]
        shares += [f"{percent(sum(own) / len(own))} of the {len(own)} rows of {label}"] if own else []
    shown = f" ({', '.join(shares)})" if len(shares) <= SHOWN else ""
    return f"The sets at level {level:g} hold the truth in {percent(sum(inside for _, inside in held) / len(held))} of the rows{shown}."


def about_sets(found: Prediction, level: float, who: Client) -> list[str]:
    """Sentences on sets that hold every label, or always one, or none, and on intervals without end."""
    from bpfed.inference.calibration import fewest
    from bpfed.inference.predictive import Classified

    if found.scores is None:
        return []
    sets, name, least = who.run.data.task_type.regions == "sets", who.name, fewest(level)
    bounds, by_class = found.scores.bounds(level), found.scores.classes is not None
    if not by_class and not bool(bounds.isfinite().all()):
        what = "sets contain every label" if sets else "intervals are infinite"
        pool = found.scores.pool
        has = many(len(found.scores) if pool is None else int(pool.sum()), "calibration example")
        start = f"The {what}: '{name}' has" if pool is None else f"The {what}: all clients together have"
        return [
            f"{start} {has}, and a level of {level:g} needs at least {least}; use a lower --level, or train with a larger --calibration."
        ]
    said = []
    if by_class and (always := (~bounds.isfinite()).nonzero().flatten().tolist()):
        labels = [who.run.data.class_names[k] for k in always]
        few = (
            "there are too few calibration examples of it"
            if len(labels) == 1
            else "there are too few calibration examples of these"
        )
        said.append(f"Every set contains {quoted(labels)}: {few} for a level of {level:g}.")
    if isinstance(found, Classified) and (empty := int((~found.prediction_set(level).any(1)).sum())):
        of = f"{many(empty, 'set')} {'is' if empty == 1 else 'are'} empty"
        said.append(
            f"{of}: no label is as probable there as it usually is when it is right, so leave {'that row' if empty == 1 else 'those rows'} to a person."
        )
    return said


def _strange(run: LoadedRun, who: Client, found: Prediction) -> str | None:
    """How many rows get labels that the client has no training example of; None where none does, or nobody knows."""
    from bpfed.inference.predictive import Classified
    from bpfed.runs.adapt import NewClient

    if isinstance(who, NewClient):
        seen = [bool(count) for count in who.examples] if any(who.examples) else []
    else:
        seen = [letter == "1" for letter in run.seen[who.index]] if run.seen else []
    if not isinstance(found, Classified) or not seen:
        return None
    given = [k for k in found.label.tolist() if not seen[k]]
    if not given:
        return None
    labels = who.run.data.class_names
    named = quoted([labels[k] for k in sorted(set(given))])
    return (
        f"{many(len(given), 'row')} {'is' if len(given) == 1 else 'are'} predicted as {named}, of which '{who.name}' "
        "has no training example."
    )


def _why(run: LoadedRun, who: Client) -> str:
    """Why there is nothing to calibrate a prediction with."""
    if who.run is not run:
        return "a newcomer has no calibration examples"
    if run.calibration is None:
        return "the run has no calibration examples (train with --calibration 0.2 to get them)"
    return f"they were calibrated for {run.calibration.draws} draws (omit --draws to get them)"


def finished_run(folder: Path, say: Any) -> LoadedRun:
    """The run in this folder, or a `UserError` unless it is finished."""
    from bpfed.report.manifest import finished
    from bpfed.runs.run import Run

    run = Run.load(folder, say=say)
    if not run.federation.finished and finished(run.folder):
        raise UserError(
            f"The last checkpoint of the run in '{folder}' is damaged or missing; put it back from a copy, or train its "
            f"last rounds again with: bpfed run --out {folder} --resume"
        )
    if not run.finished:
        raise UserError(f"The run in '{folder}' is not finished; resume it with: bpfed run --out {folder} --resume")
    return run


def newcomers_of(folder: Path) -> Path:
    """Where the newcomers to the run in this folder are; beside a site's own model, which may be written again."""
    from bpfed._util.files import PLAN

    return (folder.parent if (folder.parent / PLAN).is_file() else folder) / ADAPTED


def find(run: LoadedRun, name: str) -> Client:
    """The client of that name: one of the run's own, or a newcomer kept in its folder."""
    if name in run.data.clients:
        return run.client(name)
    newcomers = _newcomers(run)
    if name not in newcomers:
        if (there := _another_site(run.folder, name)) is not None:
            raise there
        raise unknown("client", name, known(run))
    found = run.newcomer(newcomers[name])
    if found.name != name:
        raise UserError(
            f"'{newcomers[name]}' is the newcomer '{found.name}', not '{name}'; rename the file, or choose it with "
            "--adapted FILE."
        )
    return found


def known(run: LoadedRun) -> list[str]:
    """The names that `find` knows."""
    return [*run.data.clients, *_newcomers(run)]


def _newcomers(run: LoadedRun) -> dict[str, Path]:
    return {path.stem: path for path in sorted(newcomers_of(run.folder).glob("*.safetensors"))}


def _another_site(folder: Path, name: str) -> UserError | None:
    """The error where a site's own run is asked for another site's model; None: it is not."""
    from bpfed._util.files import PLAN
    from bpfed.deploy.settings import Plan

    if not (folder.parent / PLAN).is_file():
        return None
    plan = Plan.read(folder.parent)
    if not plan.site or name not in plan.sites:
        return None
    return UserError(
        f"'{folder}' has only the model of site '{plan.site}'; the model of '{name}' is in that site's own folder, so "
        "predict there."
    )


def _named(path: Path) -> dict[str, list[str]]:
    """The file of each row, where rows are images."""
    from bpfed.data.tabular.image_folder import FILE, FORMAT, file_names
    from bpfed.data.tabular.table import array_format

    return {FILE: file_names(path)} if array_format(path) is FORMAT else {}


def _copied(path: Path, keep: str | None, rows: int) -> dict[str, list[str]]:
    """The columns of the input that go into the output as they are, by name."""
    from bpfed.data.tabular.table import column_names, passthrough

    kept = passthrough(path, column_names(keep)) if keep else {}
    for name, cells in kept.items():
        if len(cells) != rows:
            raise UserError(
                f"'{name}' of '{path}' has {len(cells)} entries for {many(rows, 'row')}; choose another column."
            )
    return kept


def table(
    data: FederatedData,
    found: Prediction,
    level: float,
    abstain: float | None,
    kept: Mapping[str, list[str]] | None = None,
    unusual: Unusual | None = None,
    times: tuple[float, ...] = (),
    rule: Rule | None = None,
) -> str:
    """Predictions as CSV with a header, after the columns that were kept; the last says what is unlike training.

    Text that a spreadsheet would run as a formula is escaped (`bpfed.data.tabular.csvfile.escaped`).
    """
    from bpfed.data.tabular.csvfile import escaped
    from bpfed.runs.client import prediction_columns

    if times and data.task != "survival":
        raise UserError(f"--times is for times to an event, but this run predicts {data.task_type.targets}; omit it.")
    columns = prediction_columns(data, found, level, abstain, unusual, times, rule)
    if clash := [name for name in kept or () if name in columns]:
        raise UserError(
            f"--keep: {quoted(clash)} of the input would clash with a column of the predictions; rename it in the "
            "input."
        )
    columns = {**(kept or {}), **columns}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([escaped(name) for name in columns])
    writer.writerows([escaped(cell) for cell in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()
