"""What chance alone would do."""

from __future__ import annotations

import torch
from torch import Tensor


def binomial_deviation(n: Tensor, p: Tensor) -> Tensor:
    """E|X - n p| of a binomial X, by De Moivre: 2 v C(n, v) p^v (1 - p)^(n - v + 1) with v = floor(n p) + 1."""
    v = torch.minimum((n * p).floor() + 1, n)
    choose = torch.lgamma(n + 1) - torch.lgamma(v + 1) - torch.lgamma(n - v + 1)
    return 2 * (v.log() + choose + torch.xlogy(v, p) + torch.xlogy(n - v + 1, 1 - p)).exp()
