"""``bpfed data``: list datasets, fetch one, and look at how it is distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bpfed._util import text
from bpfed._util.console import Console
from bpfed.cli import terminal
from bpfed.cli.flags import DataDir, Json, schema_fields, with_schema
from bpfed.cli.run import loading, overrides
from bpfed.cli.terminal import PATIENCE, Group
from bpfed.config.registry import PARTITIONS, PREFIX, check_data

if TYPE_CHECKING:
    from bpfed.callbacks import Progress
    from bpfed.config.reader import Config
    from bpfed.data import FederatedData, Table
    from bpfed.data.checks import Finding
    from bpfed.data.checks.column_types import ColumnRow
    from bpfed.data.overview import Missing

app = typer.Typer(
    cls=Group, help="List, fetch and inspect datasets.", epilog="Example: bpfed data list", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="Name of the dataset (see 'bpfed data list').")]
#: Clients that have a row, width of a bar, and letters of a class's name that can head a column.
ROWS, BAR, SHORT = 40, 12, 3
#: Columns of tables that have a row.
COLUMNS = 60
#: Findings that have a row.
FINDINGS = 100
#: Clients that have a column each in the table of what is missing.
SIDE_BY_SIDE = 6


@app.command("list", epilog="Example: bpfed data list --data-dir ~/datasets")
def list_(data_dir: DataDir = None) -> None:
    """List the datasets, whether their files are present, and the ways to distribute them over clients."""
    from bpfed.data import describe
    from bpfed.data.partition import KINDS

    shown = terminal.table("name", "present", "what it is", "examples", "clients", right=2)
    for row in describe(data_dir):
        present = Text("yes", "green") if row.present else Text("no", "yellow")
        shown.add_row(row.name, present, row.sentence, f"{row.examples}", f"{row.clients}")
    terminal.put(shown)
    shown = terminal.table("--partition", "how examples are distributed over clients")
    for name, kind in KINDS.items():
        shown.add_row(name if kind.default is None else f"{name}:{kind.default:g}", kind.sentence)
    for name in PARTITIONS.plugins():
        shown.add_row(name, f"Of the package {PARTITIONS.package(name)}.")
    terminal.put(shown)


@app.command(epilog="Example: bpfed data fetch mnist")
def fetch(name: Name, data_dir: DataDir = None) -> None:
    """Download a dataset's files if they are not present."""
    check_data(name)
    with _busy() as progress:
        from bpfed.data import fetch as get

        loading(progress, name, data_dir)
        place = get(name, data_dir)
    told = f"'{name}' is built in." if place is None else f"'{name}' is in {place}."
    Console().print(told, soft_wrap=True)


#: Settings that an inspection has no flag for, since they are of a run or have another.
NOT_INSPECTED = tuple(key for key, _ in schema_fields() if key.startswith("run.") or key in ("data.name", "data.seed"))


@app.command(epilog="Example: bpfed data inspect folder:hospitals --target disease --plot hospitals.png")
@partial(with_schema, without=NOT_INSPECTED)
def inspect(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the dataset (see 'bpfed data list'), folder:PATH, or a TOML file of settings (FILE.toml)."
        ),
    ],
    seed: Annotated[int, typer.Option(help="Random seed: which examples go where.")] = 0,
    data_dir: DataDir = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it, as .png, .svg or .pdf.", show_default=False)] = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For tables: write a new TOML file of settings that would mend what is found. No data is changed.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    **flags: str | None,
) -> None:
    """Show how many examples of which classes each client would have, and what is missing; trains nothing.

    For tables, it also lists what becomes of each column, and everything in the files that is probably a mistake.
    """
    file = Path(name) if name.endswith(".toml") else None
    if file is None:
        check_data(name)
    with _busy() as progress:
        from bpfed._util.errors import UserError
        from bpfed.config.reader import read as configured
        from bpfed.data.checks.column_types import columns
        from bpfed.data.overview import check_ending, draw, missing

        if plot is not None:
            check_ending(plot)
        if fix is not None and fix.exists():
            raise UserError(f"'{fix}' exists already; choose another --fix.")
        said = {**flags, "seed": str(seed)} if file is not None else {**flags, "data": name, "seed": str(seed)}
        chosen = configured(file, overrides(None, [], said))
        loading(progress, chosen.data.name, data_dir)
        read, found, refused = _examined(chosen, data_dir)
    if found and not json:
        Console().print(_findings(found))
    if fix is not None:
        _propose(fix, found, chosen, Console(stderr=json))
    start = "" if fix is None else "As the files are: "
    if refused:
        raise UserError(start + refused)
    with _busy() as progress:
        progress.doing(f"preparing {chosen.data.name}")
        try:
            data = chosen.load_data(data_dir, read or None, checked=bool(read))
        except UserError as error:
            raise UserError(f"{start}{error}") from error
        gaps = missing(read)
        if plot is not None:
            progress.doing(f"drawing {plot}")
            draw(data, gaps, plot)
    if json:
        listed = columns(read, data.preprocessor) if read and data.preprocessor is not None else []
        terminal.put_json(_as_json(data, found, listed, gaps))
        return
    console = Console()
    if data.task_type.has_classes:
        options = [_clients(data, bars, classes) for bars, classes in ((True, True), (False, True), (True, False))]
    else:
        options = [_clients(data, bars, False) for bars in (True, False)]
    terminal.put(next((t for t in options if terminal.narrowest(t) <= console.width), options[-1]))
    if not all(len(word) <= SHORT for word in data.labels):
        _say("Classes: " + ", ".join(f"{i} {word}" for i, word in enumerate(data.labels)))
    of = f" of {data.classes} classes" if data.task_type.has_classes else ""
    total = f"{len(data.train.y)} training and {text.many(len(data.test.y), 'test example')}{of}"
    cut = f", {ROWS} of {len(data)} shown" if len(data) > ROWS else ""
    shape = " x ".join(map(str, data.input_shape))
    inputs = (
        f"{text.many(data.input_shape[0], 'input')} each" if len(data.input_shape) == 1 else f"inputs of {shape} each"
    )
    _say(f"{text.many(len(data), 'client')}{cut}; {total}; {inputs}.")
    if read and data.preprocessor is not None:
        if listed := columns(read, data.preprocessor):
            terminal.put(_columns(listed))
        if len(listed) > COLUMNS:
            _say(f"... and {len(listed) - COLUMNS} more columns.")
        for note in data.notes:
            _say(note)
    if gaps.columns:
        terminal.put(_missing(gaps))
    elif read:
        _say("No values are missing.")
    if plot is not None:
        _say(f"Picture: {plot}")


def _examined(chosen: Config, data_dir: Path | None) -> tuple[dict[str, Table], list[Finding], str]:
    """The tables, all that is found in them, and why they cannot be used, if a file is refused."""
    from bpfed.data.checks.findings import Asked, examine, survey
    from bpfed.data.datasets import target_of
    from bpfed.data.tabular.recode import Recoding
    from bpfed.data.tabular.table import ArrayOptions

    data = chosen.data
    asked = Asked(
        data.targets,
        data.client_column,
        data.ignore,
        data.missing,
        data.holdout,
        Recoding.of(**data.recoding),
        ArrayOptions.of(data.input, data.image_size),
    )
    if not data.name.startswith(PREFIX):
        read = chosen.tables(data_dir)
        return read, examine(read, replace(asked, target=target_of(data.name, read, data.targets))) if read else [], ""
    read, found, refused = survey(data.name.removeprefix(PREFIX), asked)
    asked = replace(asked, target=target_of(data.name, read, data.targets))
    return read, [*found, *examine(read, asked)], refused


def _findings(found: Sequence[Finding]) -> terminal.Table:
    """What was found in the files, a row each; words may be broken, so that it is never wider than the terminal."""
    shown = terminal.table("file", "column", "row", "what, and what to do", title=f"Findings ({len(found)})")
    shown.columns[2].justify = "right"
    for finding in found[:FINDINGS]:
        told = Text(f"{finding.what}\n")
        told.append(f"→ {finding.do}", "cyan")
        shown.add_row(Text(finding.file), Text(finding.column), str(finding.row or ""), told)
    if len(found) > FINDINGS:
        shown.add_row("...", "", "", f"and {len(found) - FINDINGS} more")
    return shown


def _as_json(
    data: FederatedData, found: Sequence[Finding], listed: Sequence[ColumnRow], gaps: Missing
) -> dict[str, Any]:
    """The same for programs."""
    from bpfed.data import inspect as look

    classes = data.task_type.has_classes
    return {
        "data": data.name,
        "task": data.task,
        "partition": data.partition,
        **({"classes": list(data.class_names)} if data.task_type.labelled else {}),
        "inputs": list(data.input_shape),
        "clients": [
            {"name": row.client, "train": row.train, "test": row.test}
            | ({"train_labels": list(row.train_labels)} if classes else {})
            for row in look(data)
        ],
        "columns": [row._asdict() for row in listed],
        "missing": {
            column: dict(zip(gaps.clients, map(float, gaps.shares[:, k]), strict=True))
            for k, column in enumerate(gaps.columns)
        },
        "findings": [one._asdict() for one in found],
        "notes": list(data.notes),
    }


def _propose(path: Path, found: Sequence[Finding], chosen: Config, console: Console) -> None:
    """Write the configuration that the findings propose."""
    from bpfed._util.files import write_whole
    from bpfed.data.checks.findings import configuration

    default = type(chosen.data)()
    settings = {k: v for k, v in vars(chosen.data).items() if v != getattr(default, k) or k == "name"}
    if chosen.data.seed is None and chosen.run.seed:
        settings["seed"] = chosen.run.seed
    write_whole(path, configuration(found, settings))
    entries = {(finding.setting, finding.entry) for finding in found if finding.setting}
    told = f"{text.many(len(entries), 'proposal')} in {path}; check them, then: bpfed data inspect {path}"
    console.print(told, soft_wrap=True)


@app.command(epilog="Example: bpfed data prepare folder:public --target disease --out preprocessing.json")
@partial(with_schema, without=NOT_INSPECTED)
def prepare(
    name: Annotated[
        str, typer.Argument(help="Tables: folder:PATH or the name of a dataset; or the folder of a run on tables.")
    ],
    out: Annotated[Path, typer.Option(help="The new file.")] = Path("preprocessing.json"),
    seed: Annotated[int, typer.Option(help="Random seed: which rows are for training.")] = 0,
    data_dir: DataDir = None,
    **flags: str | None,
) -> None:
    """Write how tables become inputs, as a file that the sites of a deployment can agree on.

    It holds columns, means, scales, words and classes of the training rows, and can be edited or written by hand. With it
    ('bpfed deploy init --preprocessing') sites tell nothing of their own columns.
    """
    with _busy() as progress:
        from bpfed._util.errors import UserError
        from bpfed._util.files import DATA, of_run
        from bpfed.config.reader import read as configured
        from bpfed.data.tabular.preprocessing import write_preprocessor
        from bpfed.runs.metadata import preprocessor_of

        if out.exists():
            raise UserError(f"'{out}' exists already; choose another --out.")
        if (of_run(Path(name)) / DATA).is_file():
            if given := next((key for key, value in flags.items() if value is not None), None):
                raise UserError(f"'{name}' is a run, which has its preprocessing already; leave out '{given}'.")
            made = preprocessor_of(of_run(Path(name)))
        else:
            check_data(name)
            chosen = configured(None, overrides(None, [], {**flags, "data": name, "seed": str(seed)}))
            loading(progress, name, data_dir)
            made = chosen.load_data(data_dir).preprocessor
        if made is None:
            raise UserError(f"'{name}' is no dataset of tables, so it has no preprocessing; give tables.")
        digest = write_preprocessor(out, made)
    _say(f"{text.many(len(made.features), 'column')} in {out}, SHA-256 {digest}.")
    _say(
        "It holds means, scales and words of these tables, also those of a single row: whoever gets the file can read them."
    )


@app.command(epilog="Example: bpfed data export breast-cancer hospitals")
def export(
    name: Annotated[str, typer.Argument(help="A dataset of tables, such as breast-cancer (built in).")],
    folder: Annotated[Path, typer.Argument(help="A new folder, for one CSV file per client.")],
    data_dir: DataDir = None,
) -> None:
    """Write the tables of a dataset as CSV files, one per client, to be used as folder:PATH."""
    check_data(name)
    with _busy() as progress:
        from bpfed.data.datasets import tables
        from bpfed.data.tabular.csvfile import write_folder

        loading(progress, name, data_dir)
        read = tables(name, data_dir=data_dir)
        progress.doing(f"writing {folder}")
        written = write_folder(read, folder)
    _say(f"{text.many(len(written), 'file')} in {folder}, such as {written[0].name}.")


@contextmanager
def _busy() -> Iterator[Progress]:
    """Show what is going on, from before torch is imported on."""
    from bpfed.callbacks.progress import Progress

    progress = Progress(patience=PATIENCE)
    try:
        progress.doing("starting")
        yield progress
    finally:
        progress.close()


def _say(sentence: str) -> None:
    Console().print(sentence, soft_wrap=True)


def _clients(data: FederatedData, bars: bool, classes: bool) -> terminal.Table:
    """A row for each client, with a bar for its size and a column for each class if so wanted."""
    from bpfed.data import inspect as look

    words = data.labels if all(len(word) <= SHORT for word in data.labels) else [str(c) for c in range(data.classes)]
    numbers = not data.task_type.has_classes
    columns = ["client", "train", "test", *([""] if bars else [])]
    columns += ["mean", "spread"] if numbers else words if classes else ["classes"]
    rows = look(data)
    what = "training examples of each class" if classes else "number of classes in training"
    what = f"mean and standard deviation of {_target(data)} in training" if numbers else what
    shown = terminal.table(*columns, title=f"{data.name}, {_dealt(data)}: {what}", right=len(columns))
    for column in shown.columns[: 4 if bars else 1]:
        column.justify = "left" if column.header in ("client", "") else "right"
    shown.padding = (0, 1, 0, 0)
    largest = max(row.train + row.test for row in rows)
    for index, row in enumerate(rows[:ROWS]):
        bar = Text("█" * max(1, round(BAR * row.train / largest)), "cyan")
        bar.append("░" * round(BAR * row.test / largest), "cyan dim")
        bar.pad_right(BAR + 1 - len(bar))
        mix = [str(n) if n else "·" for n in row.train_labels] if classes else [str(sum(map(bool, row.train_labels)))]
        mix = _spread(data, index) if numbers else mix
        shown.add_row(row.client, str(row.train), str(row.test), *([bar] if bars else []), *mix)
    return shown


def _dealt(data: FederatedData) -> str:
    """Who the clients are, in words."""
    from bpfed.data.partition import OWN

    if data.partition != OWN:
        return f"partition {data.partition}"
    if data.preprocessor is not None and data.preprocessor.client_column is not None:
        return f"one client per '{data.preprocessor.client_column}'"
    return "one client per file" if data.name.startswith(PREFIX) else "the dataset's own clients"


def _target(data: FederatedData) -> str:
    return f"'{data.preprocessor.target}'" if data.preprocessor is not None else "the target"


def _spread(data: FederatedData, client: int) -> list[str]:
    targets = data.train.client(client)[1]
    if data.preprocessor is not None:
        targets = data.preprocessor.in_units(targets)
    return [text.typed(text.figure(float(x))) for x in (targets.mean(), targets.std(correction=0))]


def _columns(listed: Sequence[ColumnRow]) -> terminal.Table:
    shown = terminal.table("column", "what it is", "inputs", title="Columns", right=1)
    for row in listed[:COLUMNS]:
        shown.add_row(Text(row.name), row.what, str(row.inputs or "·"))
    return shown


def _missing(gaps: Missing) -> terminal.Table:
    """The share missing: of each client where they are few, else the mean and the client with most."""
    shares = gaps.shares.mean(0)
    order = sorted(range(len(gaps.columns)), key=lambda k: -shares[k])[:ROWS]
    if len(gaps.clients) <= SIDE_BY_SIDE:
        shown = terminal.table("column", *gaps.clients, title="Missing, % of rows", right=len(gaps.clients))
        for k in order:
            shown.add_row(gaps.columns[k], *(_percent(share) for share in gaps.shares[:, k]))
        return shown
    shown = terminal.table("column", "clients with gaps", "mean", "most", "at", title="Missing, % of rows", right=4)
    for k in order:
        worst = int(gaps.shares[:, k].argmax())
        some = int((gaps.shares[:, k] > 0).sum())
        shown.add_row(
            gaps.columns[k], str(some), _percent(shares[k]), _percent(gaps.shares[worst, k]), gaps.clients[worst]
        )
    return shown


def _percent(share: float) -> str:
    return "·" if share == 0 else "<1" if share < 0.01 else f"{100 * share:.0f}"
