"""The terms of the paper's error bound (its section on theory and appendix), and the distance that the bound is on.

Theorem 1: the mean over clients of E_q[d²(P_i, P_w)] is at most C r_n + (C'/N) Σ ξ_i + C'' ε_n², with

    r_n   what variational inference adds,
    ξ_i   how well a network of this shape can come to client i's true function,
    ε_n   what estimation from n examples adds,

for networks of L hidden layers, all K wide, with e0 inputs, T weights in all (shared and personal), each bounded by B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bpfed.aggregation.rules import moments
from bpfed.inference.gaussian import Gaussian

#: The optimal prior of the appendix (Eq. 22-25) given the clients' posteriors: moment matching.
optimal_prior = moments


@dataclass(frozen=True)
class Shape:
    """A fully connected network of equal width.

    Attributes:
        inputs: e0.
        width: K.
        hidden: L, number of hidden layers.
        outputs: Number of outputs.
        bound: B, the largest weight.
    """

    inputs: int
    width: int
    hidden: int
    outputs: int = 1
    bound: float = 1.0

    @property
    def weights(self) -> int:
        """T, all weights and biases."""
        sizes = [self.inputs, *[self.width] * self.hidden, self.outputs]
        return sum((a + 1) * b for a, b in pairwise(sizes))


def r_n(shape: Shape, n: int, clients: int) -> float:
    """((L + 1) T / n) log N + (T / n) log(e0 √(n / T)), as printed: N is the number of clients.

    The proof (and the papers it follows) arrives at log K, of the width, instead of log N; use ``clients=shape.width``
    for that reading. Either way the rate in n is that of log(n) / n.
    """
    per_example = shape.weights / n
    return per_example * ((shape.hidden + 1) * math.log(clients) + _log_ratio(shape, n))


def epsilon_n(shape: Shape, n: int, alpha: float = 1.0, delta: float = 1.1) -> float:
    """α n^(−1/2) log^δ(n) √(T ((L + 1) log K + log(e0 √(n / T)))), with δ > 1."""
    inside = (shape.hidden + 1) * math.log(shape.width) + _log_ratio(shape, n)
    if inside < 0.0:
        raise ValueError(
            f"ε_n is not real for n = {n} and {shape.weights} weights: (L + 1) log K + log(e0 √(n/T)) < 0."
        )
    return alpha * math.log(n) ** delta * math.sqrt(shape.weights * inside / n)


def construction_variance(shape: Shape, n: int) -> float:
    """σ² of the distribution around the best weights that the proof constructs.

    T/(8n) · 1/log(3 e0 K) · (2BK)^(−2(L+1)) · {(e0 + BK/(BK − 1))² + 1/((2BK)² − 1) + 2/(2BK − 1)²}^(−1)
    """
    bk = shape.bound * shape.width
    if bk <= 1.0:
        raise ValueError(f"The construction needs B K > 1, not {bk}.")
    braces = (shape.inputs + bk / (bk - 1)) ** 2 + 1 / ((2 * bk) ** 2 - 1) + 2 / (2 * bk - 1) ** 2
    scale = (2 * bk) ** (-2 * (shape.hidden + 1)) / math.log(3 * shape.inputs * shape.width)
    return shape.weights / (8 * n) * scale / braces


def bound(
    shape: Shape, n: int, clients: int, xi: float = 0.0, constants: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> float:
    """C r_n + C' mean ξ + C'' ε_n². The constants are not known; what the theorem gives is the rate."""
    c, c1, c2 = constants
    return c * r_n(shape, n, clients) + c1 * xi + c2 * epsilon_n(shape, n) ** 2


def squared_hellinger(predicted: Tensor, true: Tensor, noise: float) -> Tensor:
    """d² = E_x[1 − exp(−(f_w(x) − f_i(x))² / (8 σ_ε²))], the mean over the last axis (the inputs).

    Args:
        predicted: f_w at the inputs, ``[..., B]``.
        true: f_i at the same inputs, ``[..., B]``.
        noise: σ_ε, standard deviation of the targets around their true function.
    """
    return -torch.expm1(-(predicted - true).square() / (8.0 * noise * noise)).mean(-1)


def kl_to_optimal_prior(posteriors: Gaussian) -> Tensor:
    """Mean over clients of KL(q_i ‖ π*), with π* of Eq. 22-25, in closed form, ``[]``.

    The quadratic terms average to ½ per weight, so that only Σ_t ½ (log s_t² − mean_i log σ_{i,t}²) is left.

    Args:
        posteriors: ``[N, T]``.
    """
    prior = optimal_prior(posteriors, posteriors.mean.new_ones(len(posteriors.mean)))
    return (torch.log(prior.sigma) - torch.log(posteriors.sigma).mean(0)).sum()


def _log_ratio(shape: Shape, n: int) -> float:
    return math.log(shape.inputs * math.sqrt(n / shape.weights))
