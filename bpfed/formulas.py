"""Moments of functions of Gaussians: one rectified, the larger of two, smooth functions, a convolution's neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

#: Nodes of the quadrature for smooth functions.
NODES = 12


def rectified(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, X) for Gaussian X.

    With a = μ/σ they are m = μ Φ(a) + σ φ(a) and σ² Φ(a) − m (m − μ), which loses no digits where X is far from 0.
    """
    sigma = variance.sqrt()
    a = mean / sigma.clamp(min=1e-18)
    below = torch.special.ndtr(a)
    first = mean * below + sigma * _density(a)
    return first, (variance * below - first * (first - mean)).clamp(min=0.0)


def larger(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], covariance: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the larger of two Gaussians, each (mean, variance), and the chance that it is the first."""
    gap = a[0] - b[0]
    theta = (a[1] + b[1] - 2.0 * covariance).clamp(min=0.0).sqrt()
    ratio = (gap / theta.clamp(min=1e-18)).clamp(-1e4, 1e4)
    first, other = torch.special.ndtr(ratio), torch.special.ndtr(-ratio)
    peak = theta * _density(ratio)
    # Both moments about the mean of the first.
    mean = peak - gap * other
    square = a[1] * first + (b[1] + gap.square()) * other - gap * peak
    return a[0] + mean, (square - mean.square()).clamp(min=0.0), first


def averaged(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a smooth function of a Gaussian, by Gauss-Hermite quadrature."""
    sigma = variance.sqrt()
    first, square = torch.zeros_like(mean), torch.zeros_like(mean)
    for at, weight in zip(*_nodes(), strict=True):
        value = function(mean + at * sigma)
        first, square = first + weight * value, square + weight * value.square()
    return first, (square - first.square()).clamp(min=0.0)


def neighbours(
    input: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor | None],
    shift: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    apart: tuple[int, int],
) -> Tensor:
    """Covariance of a convolution's outputs with those ``apart`` rows and columns further on, which share its weights.

    Σ S² m(p) m(p') + s² from the weights, and Σ W(k) W(k') v from the inputs that both see.

    Args:
        input: Mean and variance, ``[B, C, H, W]``.
        weight: Mean and variance, ``[O, C, kh, kw]``.
        shift: Variance of the bias, ``[O]``.
        stride: Of the convolution, as ``padding``.
        padding: With zeros.
        apart: Rows (0 or more) and columns (any).

    Returns:
        ``[B, O, h - rows, w - |columns|]`` for outputs of ``[B, O, h, w]``, from the first that has such a neighbour
        on.
    """
    rows, columns = apart[0] * stride[0], apart[1] * stride[1]
    edge = (padding[1], padding[1], padding[0], padding[0])
    mean = F.pad(input[0], edge)
    height, width = mean.shape[-2:]
    here = (slice(0, height - rows), slice(max(0, -columns), width - max(0, columns)))
    there = (slice(rows, height), slice(max(0, columns), width - max(0, -columns)))
    parts = []
    if weight[1] is not None:
        parts.append(F.conv2d(mean[(..., *here)] * mean[(..., *there)], weight[1], None, tuple(stride)))
    if input[1] is not None:
        kernel = weight[0]
        high, wide = kernel.shape[-2:]
        moved = F.pad(kernel, (columns, -columns, rows, -rows)) if rows < high and abs(columns) < wide else None
        if moved is not None:
            parts.append(F.conv2d(F.pad(input[1], edge)[(..., *here)], kernel * moved, None, tuple(stride)))
    if shift is not None:
        parts.append(shift[:, None, None].expand_as(parts[0]) if parts else shift[:, None, None])
    return total(*parts)


def total(*parts: Tensor | None) -> Tensor:
    """Of those that are there, of which there is one."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0])


def _density(a: Tensor) -> Tensor:
    return torch.exp(-0.5 * a.square()) * (1.0 / math.sqrt(2.0 * math.pi))


@cache
def _nodes() -> tuple[list[float], list[float]]:
    at, weight = np.polynomial.hermite_e.hermegauss(NODES)
    return at.tolist(), (weight / weight.sum()).tolist()
