"""How accurate the predictions are, and how well calibrated: per client, on average, at worst, and pooled.

Everything is computed where the predictions are, for all clients at once and without a synchronisation; one small
tensor travels at the end. Sums are float64, so the order of the examples does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily
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
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(
            ("aurc", "evaluate", "evaluate_regression", "evaluate_sums", "ood_auroc"), "bpfed.metrics.scores"
        ),
        **dict.fromkeys(
            ("SMALLEST", "SURE", "Evaluation", "Form", "Reliability", "Score", "Sums"), "bpfed.metrics.evaluation"
        ),
    },
)
