"""Server rules: S uploaded Gaussians and their weights become one.

Each rule is a pure function ``(uploads [S, P], weights [S]) -> Gaussian [P]``. Weights need not sum to one. They differ
in what they make of disagreement between clients: see each formula.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bpfed.errors import unknown
from bpfed.gaussian import Gaussian, from_natural, natural

Rule = Callable[[Gaussian, Tensor], Gaussian]


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Σ w_i v_i / Σ w_i over the first axis: ``[S, ...]`` and ``[S]`` to ``[...]``."""
    weights = weights.to(values.dtype)
    return torch.tensordot(weights / weights.sum(), values, dims=1)


def mean(uploads: Gaussian, weights: Tensor) -> Gaussian:
    """μ = Σ w μ_i, σ = Σ w σ_i: Algorithm 1's rule, the Wasserstein-2 barycentre. Disagreement leaves no trace in σ."""
    return Gaussian(weighted_mean(uploads.mean, weights), weighted_mean(uploads.sigma, weights))


def moments(uploads: Gaussian, weights: Tensor) -> Gaussian:
    """μ = Σ w μ_i, σ² = Σ w (σ_i² + (μ_i − μ)²): moment matching (Eq. 22-25). Disagreement widens σ."""
    centre = weighted_mean(uploads.mean, weights)
    variance = weighted_mean(uploads.sigma.square() + (uploads.mean - centre).square(), weights)
    return Gaussian(centre, variance.sqrt())


def precision(uploads: Gaussian, weights: Tensor) -> Gaussian:
    """1/σ² = Σ w /σ_i², μ = σ² Σ w μ_i/σ_i²: the mean of natural parameters. The surer client counts for more."""
    first, second = natural(uploads)
    return from_natural(weighted_mean(first, weights), weighted_mean(second, weights))


def product(uploads: Gaussian, weights: Tensor) -> Gaussian:
    """1/σ² = Σ S w /σ_i², μ as `precision`: the product of the S densities, as if uploads were independent evidence."""
    joint = precision(uploads, weights)
    return Gaussian(joint.mean, joint.sigma / len(weights) ** 0.5)


RULES: dict[str, Rule] = {"mean": mean, "moments": moments, "precision": precision, "product": product}


def rule(name: str) -> Rule:
    """The server rule of that name."""
    if name not in RULES:
        raise unknown("server rule", name, RULES)
    return RULES[name]
