"""``bpfed report``: make the report of a run again from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bpfed.cli import show

EXAMPLE = "Example: bpfed report runs/first"


def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]) -> None:
    """Write report.html of a run again from its files, and print its figures."""
    from bpfed.report import RunRecord, write
    from bpfed.report.record import REPORT

    run = RunRecord.read(folder)
    show.result(run, write(run, folder / REPORT))
