"""Server rules: S uploaded Gaussians and their weights become one.

Each rule is a pure function ``(uploads [S, P], weights [S]) -> Gaussian [P]``. Weights need not sum to one. They differ
in what they make of disagreement between clients: see each formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed.config import registry
from bpfed.inference.gaussian import Gaussian, from_natural, natural

if TYPE_CHECKING:
    from bpfed.methods.base import State


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
    """The server rule of that name, of `RULES` or of another package."""
    if name in RULES:
        registry.RULES.refuse_clash(name)
        return RULES[name]
    found: Rule = registry.RULES.load(name)
    if not callable(found):
        raise registry.RULES.unfit(name, "is not a function of uploads and weights")
    return found


# --- Server rules for members that are not all trusted ----------------------------------------------------------------
#
# Each coordinate is taken from the middle of the uploads.
#
# Of S uploads up to k may be anything at all: where the k least and the k greatest values are left out, what remains
# lies between the least and the greatest of the others (Yin et al. 2018). They act on means and on standard deviations
# alike, and a middle of positive numbers is positive.


def left_out(share: float, count: int) -> int:
    """How many of ``count`` values are left out at either end so that it is at least that share; one or two remain."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """The mean over the first axis without the least and the greatest ``share`` of values; a half is the median.

    ``[S, ...]`` to ``[...]``.
    """
    cut = left_out(share, len(values))
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def middle(uploads: State, share: float) -> State:
    """The `trimmed_mean` of every coordinate of S uploads: one upload, without client axis."""
    return tree_map(lambda leaf: trimmed_mean(leaf, share), uploads)
