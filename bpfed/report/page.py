"""The report: one HTML page that needs nothing beside itself."""

from __future__ import annotations

import os
from pathlib import Path

from bpfed.files import write_whole
from bpfed.report.html import document
from bpfed.report.record import RunRecord
from bpfed.report.sections import baselines, calibration, clients, headline, settings, training


def render(run: RunRecord) -> str:
    """The whole page as text. The same record gives the same page, byte for byte."""
    parts = [headline(run), baselines(run), training(run), calibration(run), clients(run), settings(run)]
    parts.append("<footer>Made by bpfed from the run's own records.</footer>")
    return document(run.title, parts)


def write(run: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all: an interrupted write leaves what was there before."""
    target = Path(path)
    # A name that was once a file's may hold what is no UTF-8.
    write_whole(target, render(run).encode("utf-8", "replace"))
    return target
