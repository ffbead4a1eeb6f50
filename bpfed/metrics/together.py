"""Clients that never meet, scored together from their sums."""

from __future__ import annotations

import math

import torch

from bpfed.metrics.classes import classified
from bpfed.metrics.evaluation import Evaluation
from bpfed.metrics.numbers import regressed
from bpfed.metrics.sums import Sums


def evaluate_sums(sums: Sums, bins: int = 10) -> Evaluation:
    """What `evaluate` or `evaluate_regression` would give for all these clients' examples together.

    But for the pooled ``aurc`` of several clients, which is NaN: it needs all confidences in one order.
    """
    if len(sums.cells) != 4:
        return regressed(sums, bins)
    risk = sums.further["risk"]
    return classified(sums, bins, risk if len(risk) == 1 else torch.full_like(risk[:1], math.nan))
