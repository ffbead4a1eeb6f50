"""A self-contained HTML report of a run: ``write(RunRecord(...), "report.html")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily
from bpfed.report.record import RunRecord

if TYPE_CHECKING:
    from bpfed.report.page import render, write

__all__ = ["RunRecord", "render", "write"]

# Imported when first asked for: predictions need no page.
__getattr__ = lazily(__name__, dict.fromkeys(("render", "write"), "bpfed.report.page"))
