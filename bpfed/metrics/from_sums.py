"""Clients that never meet, scored together from their sums."""

from __future__ import annotations

import math

import torch

from bpfed.metrics.classification import classified
from bpfed.metrics.evaluation import Evaluation
from bpfed.metrics.regression import regressed
from bpfed.metrics.sums import Sums


def evaluate_sums(sums: Sums, bins: int = 10) -> Evaluation:
    """What `evaluate` or `evaluate_regression` would give for all these clients' examples together.

    But for the pooled ``aurc`` and ``auroc`` of several clients, which are NaN: they need all examples in one order.
    """
    if len(sums.cells) != 4:
        return regressed(sums, bins)
    ordered = {name: part for name, part in sums.further.items() if name in ("risk", "in_order")}
    if sums.losses.shape[1] > 1:
        ordered = {name: torch.full_like(part[:1], math.nan) for name, part in ordered.items()}
    return classified(sums, bins, ordered)
