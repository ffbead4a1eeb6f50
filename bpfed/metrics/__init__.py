"""How accurate the predictions are, and how well calibrated: per client, on average, at worst, and pooled.

Everything is computed where the predictions are, for all clients at once and without a synchronisation; one small
tensor travels at the end. Sums are float64, so the order of the examples does not show.
"""

from bpfed._util.scores import BEST_IS_HIGH
from bpfed.metrics.classification import SMALLEST, SURE, aurc, evaluate, ood_auroc
from bpfed.metrics.evaluation import Evaluation, Reliability, Score
from bpfed.metrics.from_sums import evaluate_sums
from bpfed.metrics.regression import evaluate_regression
from bpfed.metrics.sums import Form, Sums

__all__ = [
    "BEST_IS_HIGH",
    "SMALLEST",
    "SURE",
    "Evaluation",
    "Form",
    "Reliability",
    "Score",
    "Sums",
    "aurc",
    "evaluate",
    "evaluate_regression",
    "evaluate_sums",
    "ood_auroc",
]
