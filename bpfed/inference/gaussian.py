"""The mean-field Gaussian: draws, divergence and its gradients, moments and natural parameters.

All functions are element-wise, in closed form, and keep whatever leading axes their inputs have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """Independent Gaussians, one for each weight.

    Attributes:
        mean: ``[..., P]``.
        sigma: Standard deviation, ``[..., P]``, same shape; 0 is the Dirac case, a point.
    """

    mean: Tensor
    sigma: Tensor

    def draw(self, noise: Tensor) -> Tensor:
        """w = μ + σ ⊙ ε (Eq. 7, 8) for given ε ~ N(0, I) of the same shape."""
        return torch.addcmul(self.mean, self.sigma, noise)


def either(which: Tensor, first: Gaussian, second: Gaussian) -> Gaussian:
    """The first where ``which``, ``[..., P]`` or ``[..., 1]`` bool, else the second."""
    return Gaussian(torch.where(which, first.mean, second.mean), torch.where(which, first.sigma, second.sigma))


def softplus(rho: Tensor) -> Tensor:
    """σ = log(1 + exp ρ); ρ = −∞ gives σ = 0."""
    return torch.nn.functional.softplus(rho)


def softplus_inverse(sigma: Tensor) -> Tensor:
    """ρ = log(exp σ − 1), exact for small σ too; σ = 0 gives ρ = −∞."""
    return sigma + torch.log(-torch.expm1(-sigma))


def kl(q: Gaussian, p: Gaussian) -> Tensor:
    """KL(q ‖ p) summed over the last axis: Σ log(σ_p/σ_q) + (σ_q² + (μ_q − μ_p)²) / (2 σ_p²) − ½.  ``[...]``."""
    ratio = q.sigma / p.sigma
    shift = (q.mean - p.mean) / p.sigma
    return (0.5 * (ratio.square() + shift.square() - 1.0) - torch.log(ratio)).sum(-1)


def kl_gradients_q(q: Gaussian, p: Gaussian) -> tuple[Tensor, Tensor]:
    """∂KL/∂μ_q = (μ_q − μ_p)/σ_p² and ∂KL/∂σ_q = σ_q/σ_p² − 1/σ_q, which is exactly 0 where q = p."""
    inverse = p.sigma.reciprocal()
    return (q.mean - p.mean) * inverse.square(), ((q.sigma / p.sigma).square() - 1.0) / q.sigma


def kl_gradients_p(q: Gaussian, p: Gaussian) -> tuple[Tensor, Tensor]:
    """∂KL/∂μ_p = (μ_p − μ_q)/σ_p² and ∂KL/∂σ_p = 1/σ_p − (σ_q² + (μ_q − μ_p)²)/σ_p³; exactly 0 where q = p."""
    inverse = p.sigma.reciprocal()
    shift = (p.mean - q.mean) * inverse
    ratio = q.sigma / p.sigma
    return shift * inverse, (1.0 - ratio.square() - shift.square()) * inverse


def natural(g: Gaussian) -> tuple[Tensor, Tensor]:
    """Natural parameters (precision 1/σ², precision times mean)."""
    precision = g.sigma.square().reciprocal()
    return precision, precision * g.mean


def from_natural(precision: Tensor, weighted_mean: Tensor) -> Gaussian:
    """The Gaussian with this precision and this precision-times-mean."""
    return Gaussian(weighted_mean / precision, precision.rsqrt())


def discounted(g: Gaussian, discount: Tensor | float, sigma0: Tensor | float) -> Gaussian:
    """The prior made of last round's posterior: same mean, 1/s² = a/σ² + (1 − a)/s0².

    a = 1 is the paper's continual prior (precision grows without end when the same data is refitted), a = 0 a fixed
    scale s0, and between them the precision of a refitted posterior stays bounded.
    """
    a = torch.as_tensor(discount, dtype=g.sigma.dtype, device=g.sigma.device)
    precision = a / g.sigma.square() + (1.0 - a) / (sigma0 * sigma0)
    return Gaussian(g.mean, torch.where(a == 1.0, g.sigma, precision.rsqrt()))
