"""A self-contained HTML report of a run: ``write(RunRecord(...), "report.html")``."""

from bpfed.report.page import render, write
from bpfed.report.record import RunRecord

__all__ = ["RunRecord", "render", "write"]
