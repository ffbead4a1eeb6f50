"""``bpfed predict``: what a client of a finished run predicts for new rows, and how sure it is."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpfed._util.console import Console
from bpfed._util.errors import UserError, quoted, unknown
from bpfed._util.text import many
from bpfed.cli.flags import DataDir
from bpfed.cli.run import PATIENCE

if TYPE_CHECKING:
    from bpfed.callbacks.progress import Progress
    from bpfed.data.checks.new_rows import Unusual
    from bpfed.data.federated import FederatedData
    from bpfed.inference.predictive import Classified, Regressed
    from bpfed.runs.client import Client
    from bpfed.runs.load import LoadedRun

EXAMPLE = "Example: bpfed predict runs/first --client cleveland --input new.csv --abstain 0.9 --out predictions.csv"
#: Folder of a run that keeps its newcomers, a file for each.
ADAPTED = "adapted"
#: Clients that an error lists.
SHOWN = 12
#: How a set without a label is written; an empty cell would look like a missing value.
EMPTY_SET = "(empty)"


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    rows: Annotated[
        Path | None,
        typer.Option("--input", help="Rows to predict: a table as in training, or NPZ with x.", show_default=False),
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

    For tables, the column "unusual" names columns with a number far outside the training range, an unseen word or code, or no
    value though training always had one.

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
    progress = Progress(patience=PATIENCE)
    try:
        progress.doing(f"loading {folder}")
        run = finished_run(folder, progress.say)
        if rows is None:
            text, count = _tested(run, client, level, abstain, draws, data_dir, progress)
            return _put(text, f"{many(count, 'prediction')} of test rows", out)
        if client is None and adapted is None:
            raise UserError(f"Choose whose model to use, with --client, from: {quoted(known(run), SHOWN)}.")
        who = run.newcomer(adapted) if adapted is not None else find(run, str(client))
        from bpfed.data.tabular.rows import read_rows

        data = who.run.data
        taken = read_rows(data, rows, who.name, progress.say)
        x = taken.x
        kept = _copied(rows, keep, len(x))
        progress.doing(f"predicting {many(len(x), 'row')}")
        found = who.predict(taken, draws=draws)
        if found.scores is None:
            progress.say(f"No sets or intervals: {_why(run, who)}.")
        elif endless := _endless(found, level, who.name):
            progress.say(endless)
        if strange := _strange(run, who, found):
            progress.say(strange)
        text = table(data, found, level, abstain, kept, taken.unusual)
    finally:
        progress.close()
    _put(text, f"{many(len(x), 'prediction')} of '{who.name}'", out)


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
    draws: int | None,
    data_dir: Path | None,
    progress: Progress,
) -> tuple[str, int]:
    """Predictions of a run's own test rows as CSV, and how many there are."""
    from bpfed.runs.load import rows_of

    if client is not None and client not in run.data.clients:
        raise unknown("client", client, run.data.clients)
    progress.doing("reading the run's data")
    parts: list[str] = []
    count = 0
    for each in rows_of(run, data_dir):
        if client not in (None, each.client):
            continue
        progress.doing(f"predicting {many(len(each.numbers), 'row')} of {each.client}")
        assert run.data.preparation is not None
        x = run.data.preparation.inputs(each.table, each.client)
        found = run.client(each.client).predict(x, draws=draws, prepared=True)
        of = {"client": [each.client] * len(each.numbers), "row": list(map(str, each.numbers)), "truth": each.truth}
        text = table(run.data, found, level, abstain, of)
        parts.append(text if not parts else text.partition("\n")[2])
        count += len(each.numbers)
    if not parts:
        whose = f"'{client}'" if client else "the run"
        raise UserError(f"There are no test rows of {whose}; train with some held out.")
    return "".join(parts), count


def _endless(found: Classified | Regressed, level: float, name: str) -> str | None:
    """Why sets hold every label or intervals all numbers; None where they do not."""
    from bpfed.inference.calibration import fewest, threshold
    from bpfed.inference.predictive import Classified

    if found.scores is None or math.isfinite(threshold(found.scores, level)):
        return None
    what = "sets contain every label" if isinstance(found, Classified) else "intervals are infinite"
    least = fewest(level)
    has = many(len(found.scores), "calibration example")
    return (
        f"The {what}: '{name}' has {has}, and a level of {level:g} needs at least {least}; use a lower --level, or "
        "train with a larger --calibration."
    )


def _strange(run: LoadedRun, who: Client, found: Classified | Regressed) -> str | None:
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
    from bpfed._util.paths import PLAN

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
    from bpfed._util.paths import PLAN
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


def _copied(path: Path, keep: str | None, rows: int) -> dict[str, list[str]]:
    """The columns of the input that go into the output as they are, by name."""
    from bpfed.data.tabular.federate import column_names
    from bpfed.data.tabular.table import passthrough

    kept = passthrough(path, column_names(keep)) if keep else {}
    for name, cells in kept.items():
        if len(cells) != rows:
            raise UserError(
                f"'{name}' of '{path}' has {len(cells)} entries for {many(rows, 'row')}; choose another column."
            )
    return kept


def table(
    data: FederatedData,
    found: Classified | Regressed,
    level: float,
    abstain: float | None,
    kept: Mapping[str, list[str]] | None = None,
    unusual: Unusual | None = None,
) -> str:
    """Predictions as CSV with a header, after the columns that were kept; the last says what is unlike training.

    Text that a spreadsheet would run as a formula is escaped (`bpfed.data.tabular.csvfile.escaped`).
    """
    from bpfed.data.tabular.csvfile import escaped
    from bpfed.inference.predictive import Classified

    columns = (
        _classes(data, found, level, abstain)
        if isinstance(found, Classified)
        else _numbers(data, found, level, abstain)
    )
    if unusual is not None:
        if "abstain" in columns:
            columns["abstain"] = [
                "yes" if far else said for said, far in zip(columns["abstain"], unusual.far.tolist(), strict=True)
            ]
        columns["unusual"] = [" | ".join(names) for names in unusual.names()]
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


def _classes(data: FederatedData, found: Classified, level: float, abstain: float | None) -> dict[str, list[Any]]:
    labels = data.class_names
    columns: dict[str, list[Any]] = {"label": [labels[k] for k in found.label.tolist()]}
    columns |= {f"p({label})": _typed(found.probs[:, k]) for k, label in enumerate(labels)}
    parts = (("total", found.entropy), ("epistemic", found.epistemic), ("aleatoric", found.aleatoric))
    columns |= {name: _typed(part) for name, part in parts}
    if found.scores is not None:
        sets = found.prediction_set(level).tolist()
        columns[f"set({level:g})"] = [
            " | ".join(label for label, held in zip(labels, row, strict=True) if held) or EMPTY_SET for row in sets
        ]
    if abstain is not None:
        columns["abstain"] = ["yes" if p < abstain else "no" for p in found.confidence.tolist()]
    return columns


def _numbers(data: FederatedData, found: Regressed, level: float, abstain: float | None) -> dict[str, list[Any]]:
    if abstain is not None:
        raise UserError("--abstain needs the probability of a label, but this run predicts numbers; omit it.")
    mean, unit = (
        (0.0, 1.0) if data.preparation is None else (data.preparation.target_mean, data.preparation.target_scale)
    )
    columns = {
        "mean": _typed(found.mean.double() * unit + mean, unit),
        "sd": _typed(found.scale * unit),
        "epistemic": _typed(found.epistemic.sqrt() * unit),
        "aleatoric": _typed(found.aleatoric.sqrt() * unit),
    }
    if found.scores is not None:
        low, high = found.interval(level)
        ends = {"low": low.double() * unit + mean, "high": high.double() * unit + mean}
        columns |= {f"{name}({level:g})": _typed(end, unit) for name, end in ends.items()}
    return columns


def _typed(values: Any, unit: float = math.inf) -> list[str]:
    """Numbers with six digits, and more where they are large beside the unit in which they differ."""
    ratios = [abs(value) / unit for value in values.tolist()]
    digits = [6 + math.ceil(math.log10(r)) if 1.0 < r < math.inf else 6 for r in ratios]
    return [f"{value:.{count}g}" for value, count in zip(values.tolist(), digits, strict=True)]
