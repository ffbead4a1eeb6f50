"""Methods side by side: the same data for all, several seeds, differences with intervals, one report."""

from bpfed.comparison.candidates import VARIANTS, Candidate
from bpfed.comparison.record import Comparison, Difference
from bpfed.comparison.runner import compare
from bpfed.comparison.tuning import Tuning, tune

__all__ = ["VARIANTS", "Candidate", "Comparison", "Difference", "Tuning", "compare", "tune"]
