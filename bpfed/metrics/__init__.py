"""How accurate the predictions are, and how well calibrated: per client, on average, at worst, and pooled.

Everything is computed where the predictions are, for all clients at once and without a synchronisation; one small
tensor travels at the end. Sums are float64, so the order of the examples does not show.
"""

from bpfed.metrics.classes import SMALLEST, SURE, aurc, evaluate
from bpfed.metrics.evaluation import Evaluation, Reliability, Score
from bpfed.metrics.numbers import evaluate_regression
from bpfed.metrics.strangers import ood_auroc
from bpfed.metrics.sums import Form, Sums
from bpfed.metrics.together import evaluate_sums
from bpfed.scores import BEST_IS_HIGH

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
