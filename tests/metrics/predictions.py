"""Predictions to score, and what they are scored by."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

METRICS = ("accuracy", "nll", "brier", "ece", "mce")
MORE = ("aurc", "abstained", "answered_accuracy")


def offsets_of(*sizes: int) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def made(seed: int, sizes: list[int], classes: int, sharpness: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Random probabilities and labels that are right more often than not."""
    g = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    y = torch.randint(classes, (total,), generator=g)
    logits = sharpness * torch.randn(total, classes, generator=g)
    logits[torch.arange(total), y] += sharpness
    return logits.softmax(1), y, offsets_of(*sizes)


federations = st.tuples(
    st.integers(0, 2**31), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(2, 7), st.floats(0.1, 8)
)
