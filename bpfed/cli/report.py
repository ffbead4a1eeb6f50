"""``bpfed report``: make the report of a run again from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bpfed._util.errors import UserError
from bpfed.cli import terminal

EXAMPLE = "Example: bpfed report runs/first"


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a finished run, or of a finished deployment or a part of it."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write. \\[default: report.html in the run folder]", show_default=False)
    ] = None,
) -> None:
    """Write report.html of a run again from its files, and print its figures."""
    from bpfed._util.paths import REPORT, SUMMARY, of_run, part
    from bpfed.report import RunRecord, write

    place = of_run(folder)
    if not (place / SUMMARY).is_file() and part(folder):
        raise UserError(
            f"'{folder}' belongs to a deployment and has no finished run; go on with it on the server's machine, with "
            "'bpfed deploy run', while the sites are online."
        )
    if out is not None and out.exists() and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"'{out}' exists and is not a web page, so a report must not replace it; choose another --out.")
    run = RunRecord.read(place)
    try:
        written = write(run, out or place / REPORT)
    except UserError as error:
        terminal.result(run)
        if out is not None or not str(error).endswith("choose another location."):
            raise
        raise UserError(f"{str(error).removesuffix('.')} with --out.") from error
    terminal.result(run, written)
