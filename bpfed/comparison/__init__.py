"""Methods side by side: the same data for all, several seeds, differences with intervals, one report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily

if TYPE_CHECKING:
    from bpfed.comparison.candidates import VARIANTS, Candidate
    from bpfed.comparison.record import Comparison, Difference
    from bpfed.comparison.runner import compare
    from bpfed.comparison.tuning import Tuning, tune

__all__ = ["VARIANTS", "Candidate", "Comparison", "Difference", "Tuning", "compare", "tune"]

# Imported when first asked for: names of files and tables of a comparison need no torch.
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(("VARIANTS", "Candidate"), "bpfed.comparison.candidates"),
        **dict.fromkeys(("Comparison", "Difference"), "bpfed.comparison.record"),
        "compare": "bpfed.comparison.runner",
        **dict.fromkeys(("Tuning", "tune"), "bpfed.comparison.tuning"),
    },
)
