"""``bpfed report``: make the report of a run again; ``bpfed view``: an index of runs, as a page or served on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpfed._util import text
from bpfed._util.console import Console
from bpfed._util.errors import UserError, unknown
from bpfed._util.text import plain
from bpfed.cli import terminal
from bpfed.cli.flags import DataDir

if TYPE_CHECKING:
    from bpfed.report.html import Table
    from bpfed.runs.load import LoadedRun, Tested

EXAMPLE = "Example: bpfed report runs/first"
VIEW_EXAMPLE = "Example: bpfed view runs --out runs/index.html"
#: Browsers that can print a page without a window, by the name of their command.
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "msedge",
    "brave-browser",
)
#: Seconds that a browser may take to print.
PATIENCE = 120.0
#: Rows of each kind in the examples of a client, and columns.
EXAMPLES, SHOWN = 5, 8


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a finished run, or of a finished deployment or a part of it."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. \\[default: report.html in the run folder]", show_default=False)
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="With --examples: the client whose rows are shown.", show_default=False)
    ] = None,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples",
            help="Add sure and unsure cases from the rows of --client. The page then holds rows of that client; it is "
            "report-CLIENT.html by default.",
        ),
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also print it to a PDF beside the page, with a browser that is installed.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts and figures as JSON.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Write report.html of a run again from its files, and print its figures."""
    from bpfed._util.files import REPORT, SUMMARY, of_run, part
    from bpfed.report import RunRecord
    from bpfed.report.html import write_page
    from bpfed.report.page import render
    from bpfed.report.verdicts import summary

    place = of_run(folder)
    if not (place / SUMMARY).is_file() and part(folder):
        raise UserError(
            f"'{folder}' belongs to a deployment and has no finished run; go on with it on the server's machine, with "
            "'bpfed deploy run', while the sites are online."
        )
    if out is not None and out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"'{out}' exists and is not a web page, so a report must not replace it; choose another --out.")
    if examples != (client is not None):
        raise UserError("Examples are rows of one client; give both --examples and --client NAME, or neither.")
    browser = _browser() if pdf else None
    run = RunRecord.read(place)
    target, cases = out or place / REPORT, None
    if client is not None:
        cases = _examples(place, client, data_dir)
        target = out or place / f"report-{_file_name(client)}.html"
    with _as_written(place):
        try:
            written = write_page(render(run, cases), target)
        except UserError as error:
            terminal.result(run)
            if out is not None or not str(error).endswith("choose another location."):
                raise
            raise UserError(f"{str(error).removesuffix('.')} with --out.") from error
        if json:
            terminal.put_json(summary(run) | {"report": str(written)})
        else:
            terminal.result(run, written)
    if browser is not None:
        printed = _print(browser, written)
        Console(stderr=json).print(f"PDF: {printed}", style="bold", soft_wrap=True)


@contextlib.contextmanager
def _as_written(place: Path) -> Iterator[None]:
    """Inside, a record that no run has written is refused: hashes tell damage, but whoever forges a file can forge them."""
    from bpfed.report.record import UNFIT

    try:
        yield
    except UNFIT as error:
        words = plain(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"The records in '{place}' are not such as a run writes ({words}); put its files back from a copy."
        ) from error


def _file_name(client: str) -> str:
    """A client's name as a part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in client)[:60]


# --- PDF --------------------------------------------------------------------------------------------------------------


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UserError(
            "No browser was found that can print a PDF (Chromium, Chrome, Edge or Brave); install one, or open "
            "report.html and print it."
        )
    return found


def _print(browser: str, page: Path) -> Path:
    """The page as a PDF beside it."""
    from bpfed._util.files import write_whole

    target = page.with_suffix(".pdf")
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / "report.pdf"
        command = [browser, "--headless", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        command += ["--no-first-run", f"--user-data-dir={place}/profile", "--no-pdf-header-footer"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append(
                "--no-sandbox"
            )  # which a browser has none of for root; the page is our own and loads nothing
        command += [f"--print-to-pdf={made}", page.resolve().as_uri()]
        try:
            subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"'{browser}' could not print '{page}' ({error}); open the page and print it.") from error
        content = made.read_bytes() if made.is_file() else b""
        if not content.startswith(b"%PDF"):
            raise UserError(f"'{browser}' printed nothing of '{page}'; open the page and print it.")
        write_whole(target, content)
    return target


# --- Examples of a client ---------------------------------------------------------------------------------------------


def _examples(place: Path, client: str, data_dir: Path | None) -> dict[str, Any]:
    """Sure and unsure cases of a client's own test rows, for its page."""
    from bpfed.callbacks.progress import Progress
    from bpfed.cli.predict import ADAPTED, finished_run
    from bpfed.runs.load import rows_of

    progress = Progress(patience=2.0)
    try:
        progress.doing(f"loading {place}")
        run = finished_run(place, progress.say)
        if client not in run.data.clients and (place / ADAPTED / f"{client}.safetensors").is_file():
            raise UserError(
                f"'{client}' took no part in training, so the run has no test rows of it; predict rows whose targets are known "
                "with 'bpfed predict --keep TARGET' instead."
            )
        if client not in run.data.clients:
            raise unknown("client", client, run.data.clients)
        progress.doing("reading the run's data")
        own = next((one for one in rows_of(run, data_dir) if one.client == client), None)
        if own is None:
            raise UserError(f"There are no test rows of '{client}'; train with some held out.")
        return _cases(run, own)
    finally:
        progress.close()


def _cases(run: LoadedRun, own: Tested) -> dict[str, Any]:
    import torch

    from bpfed.inference.predictive import Classified, Regressed

    made = run.data.preprocessor
    assert made is not None
    found = run.client(own.client).predict(made.inputs(own.table, own.client), prepared=True)
    if isinstance(found, Classified):
        labels = run.data.class_names
        predicted = [labels[k] for k in found.label.tolist()]
        unsure = 1.0 - found.confidence
        shown = [text.percent(p) for p in found.confidence.tolist()]
        right = torch.tensor([said == truth for said, truth in zip(predicted, own.truth, strict=True)])
        last, wrong = "Sure and wrong", unsure + right * 10.0
        few = int((~right).sum())
        head = "Probability"
    elif isinstance(found, Regressed) and run.data.task_type.standardised:
        mean, scale = found.mean * made.target_scale + made.target_mean, found.scale * made.target_scale
        predicted = [text.figure(v) for v in mean.tolist()]
        unsure, shown = scale, [text.figure(v) for v in scale.tolist()]
        truth = torch.tensor([_number(word) for word in own.truth])
        off = ((truth - mean) / scale).abs().nan_to_num(-1.0)
        last, wrong, few = "Furthest from the truth for how sure it is", -off, int((off > 1.0).sum())
        head = "Standard deviation"
    else:
        raise UserError(
            f"Examples are shown of classes and of numbers, but this run predicts {run.data.task_type.targets}."
        )
    parts = (
        ("Surest", unsure.argsort(stable=True)[:EXAMPLES]),
        ("Least sure", unsure.argsort(descending=True, stable=True)[:EXAMPLES]),
        (last, wrong.argsort(stable=True)[: min(EXAMPLES, few)]),
    )
    columns = _shown_columns(run, own)
    said = (
        f"Test rows of '{own.client}', with what its model predicts. These are rows of this client: keep the page with it, "
        "and share the page without them."
    )
    tables = [
        _case_table(title, places.tolist(), own, predicted, shown, head, columns)
        for title, places in parts
        if len(places)
    ]
    return {"said": said, "parts": tables}


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


def _shown_columns(run: LoadedRun, own: Tested) -> list[str]:
    """The columns that matter most, where that is known; else the first."""
    made = run.data.preprocessor
    assert made is not None
    effects = run.diagnostics().get("effects", {}).get("columns", [])
    names = [*effects, *(feature.name for feature in made.features)]
    return [name for name in dict.fromkeys(names) if name in own.table.columns][:SHOWN]


def _case_table(
    title: str,
    places: Sequence[int],
    own: Tested,
    predicted: list[str],
    shown: list[str],
    head: str,
    columns: list[str],
) -> Table:
    import numpy as np

    from bpfed.report.html import Row, Table

    mine = own.table.take(np.asarray(places))
    cells = [mine.words(name) for name in columns]
    lines = [
        Row(
            f"row {own.numbers[at]}",
            [own.truth[at], predicted[at], shown[at], *(text.short(column[k], 20) for column in cells)],
        )
        for k, at in enumerate(places)
    ]
    return Table(["Case", "Truth", "Predicted", head, *columns], lines, title)


# --- An index of runs -------------------------------------------------------------------------------------------------


def view(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of runs and comparisons.")] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="File to write. \\[default: index.html in the folder]", show_default=False)
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page and its reports on this machine until Ctrl-C instead.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --serve: port to listen at; 0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Make a page that lists the runs and comparisons of a folder and links their reports."""
    from bpfed.report import index

    if serve:
        if out is not None:
            raise UserError("Choose a file with --out, or --serve.")
        made = index.server(folder, port)
        Console().print(f"http://127.0.0.1:{made.server_port}/  (Ctrl-C ends it)", style="bold", soft_wrap=True)
        with made, contextlib.suppress(KeyboardInterrupt):
            made.serve_forever()
        return
    target = out or folder / "index.html"
    if target.exists() and target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"'{target}' exists and is not a web page, so it is not replaced; choose another --out.")
    Console().print(f"Index: {index.write(folder, target)}", style="bold", soft_wrap=True)
