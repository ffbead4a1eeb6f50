"""A self-contained HTML report of a run: ``write(RunRecord(...), "report.html")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bpfed.report.record import RunRecord

if TYPE_CHECKING:
    from bpfed.report.page import render, write

__all__ = ["RunRecord", "render", "write"]


def __getattr__(name: str) -> Any:
    if name in ("render", "write"):  # imported when first asked for: predictions need no page
        from bpfed.report import page

        return getattr(page, name)
    raise AttributeError(f"module 'bpfed.report' has no attribute '{name}'")
