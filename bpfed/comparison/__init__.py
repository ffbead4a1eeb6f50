"""Methods side by side: the same data for all, several seeds, differences with intervals, one report."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed.comparison.candidates import VARIANTS, Candidate
    from bpfed.comparison.record import Comparison, Difference
    from bpfed.comparison.runner import compare
    from bpfed.comparison.tuning import Tuning, tune

__all__ = ["VARIANTS", "Candidate", "Comparison", "Difference", "Tuning", "compare", "tune"]

# Imported when first asked for: names of files and tables of a comparison need no torch.
_HOME = {
    **dict.fromkeys(("VARIANTS", "Candidate"), "candidates"),
    **dict.fromkeys(("Comparison", "Difference"), "record"),
    "compare": "runner",
    **dict.fromkeys(("Tuning", "tune"), "tuning"),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bpfed.comparison.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bpfed.comparison' has no attribute '{name}'")
