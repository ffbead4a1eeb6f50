"""How accurate the predictions are, and how well calibrated: per client, on average, at worst, and pooled.

Everything is computed where the predictions are, for all clients at once and without a synchronisation; one small
tensor travels at the end. Sums are float64, so the order of the examples does not show.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bpfed.metrics.registry import BEST_IS_HIGH, METRICS, Metric, get_metric, register_metric

if TYPE_CHECKING:
    from bpfed.metrics.evaluation import SMALLEST, SURE, Evaluation, Form, Reliability, Score, Sums
    from bpfed.metrics.scores import aurc, evaluate, evaluate_regression, evaluate_sums, ood_auroc

__all__ = [
    "BEST_IS_HIGH",
    "METRICS",
    "SMALLEST",
    "SURE",
    "Evaluation",
    "Form",
    "Metric",
    "Reliability",
    "Score",
    "Sums",
    "aurc",
    "evaluate",
    "evaluate_regression",
    "evaluate_sums",
    "get_metric",
    "ood_auroc",
    "register_metric",
]

# Imported when first asked for: pages are made of the registry alone, and need no torch.
_HOME = {
    **dict.fromkeys(("aurc", "evaluate", "evaluate_regression", "evaluate_sums", "ood_auroc"), "scores"),
    **dict.fromkeys(("SMALLEST", "SURE", "Evaluation", "Form", "Reliability", "Score", "Sums"), "evaluation"),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bpfed.metrics.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bpfed.metrics' has no attribute '{name}'")
