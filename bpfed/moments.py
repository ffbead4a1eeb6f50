"""Prediction in a single pass: mean and covariance of the outputs under Gaussian weights, and their softmax.

No weight is drawn: mean and variance of every unit are carried through the module (`bpfed.propagation`), with different
units of a layer taken as independent. At the last linear layer the whole covariance of the outputs is kept. So the
first two moments are exact for a network whose head alone is random (whatever its body does) and for one with one
hidden ReLU layer; beyond that correlations between the units of a layer are lost.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from bpfed.errors import UserError
from bpfed.kernels.conv import Convolutions
from bpfed.methods.base import CorrelatedPredictive, GaussianPredictive, PointPredictive, Predictive
from bpfed.model import Model
from bpfed.propagation import Propagation

#: Points at which the softmax of Gaussian outputs is averaged (a power of two).
POINTS = 64
#: Softmaxes held at a time, in numbers.
BLOCK = 1 << 17


class Moments(NamedTuple):
    """Gaussian outputs of S clients for B examples.

    Attributes:
        mean: ``[S, B, K]``.
        covariance: Between the outputs for one example, ``[S, B, K, K]``; None where nothing is random.
    """

    mean: Tensor
    covariance: Tensor | None


def moments(model: Model, predictive: Predictive, x: Tensor) -> Moments:
    """Mean and covariance of the network's outputs under Gaussian weights, in one pass.

    Args:
        model: On the device of the rest.
        predictive: Of S clients.
        x: ``[S, B, ...]``.

    Raises:
        UserError: The module does something there is no rule for, or the weights are not Gaussian.
    """
    if isinstance(predictive, PointPredictive):
        return Moments(model.stacked_outputs(predictive.weights, x), None)
    if isinstance(predictive, CorrelatedPredictive):  # of a network that is linear in its weights
        along = vmap(model.stacked_outputs, (2, None))(predictive.directions, x)  # [R, S, B, K]
        along = along.reshape(*along.shape[:3], -1).movedim(0, -1)
        return Moments(model.stacked_outputs(predictive.mean, x).flatten(2), along @ along.mT)
    if not isinstance(predictive, GaussianPredictive):
        raise UserError("The weights of this method are not Gaussian, so there is no single pass; use how='sample'.")
    mean, sigma = predictive.weights
    own = [n for n in model.factors.names if n not in model.likelihood.parameters()]
    spread = model.factors.unflatten(sigma.amax(0))
    widest = torch.stack([spread[n].amax() for n in own]).tolist()
    random = [n for n, s in zip(own, widest, strict=True) if s > 0.0]
    if not random:
        return Moments(model.stacked_outputs(mean, x), None)
    model.module.eval()

    def one(mean: Tensor, sigma: Tensor, x: Tensor) -> Moments:
        means, sigmas = model.factors.unflatten(mean), model.factors.unflatten(sigma)
        with Convolutions(), Propagation([(means[n], sigmas[n].square()) for n in random]) as propagation:
            outputs = functional_call(model.module, {n: means[n] for n in own}, (x,))
        return Moments(outputs.reshape(len(x), -1), propagation.covariance(outputs))

    return Moments(*vmap(one)(mean, sigma, x))


def gaussian_softmax(found: Moments) -> tuple[Tensor, Tensor]:
    """Mean softmax of Gaussian outputs, and the mean entropy of the single softmaxes: ``[S, B, K]`` and ``[S, B]``.

    There is no closed form. A drawn output costs K numbers, not a pass through the network, so the mean is taken over
    `POINTS` points of a fixed low-discrepancy set, turned into N(mean, covariance) by a Cholesky factor.
    """
    if found.covariance is None:
        logp = torch.log_softmax(found.mean, -1)
        return logp.exp(), -(logp.exp() * logp).sum(-1)
    classes = found.mean.shape[-1]
    means, covariances = found.mean.reshape(-1, classes), found.covariance.reshape(-1, classes, classes)
    points = _points(classes).to(means.device).T
    probs, entropies = [], []
    rows = max(1, BLOCK // (POINTS * classes))
    for mean, covariance in zip(means.split(rows), covariances.split(rows), strict=True):
        # A softmax does not see what all outputs have in common, and rounding may leave an eigenvalue just below zero.
        jitter = 1e-5 * covariance.diagonal(dim1=-2, dim2=-1).amax(-1) + 1e-12
        factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag_embed(jitter[:, None].expand_as(mean)))
        # [rows, K, POINTS]: one matrix product, and every later operation runs along the points.
        logits = (factor.reshape(-1, classes) @ points).unflatten(0, (-1, classes)).add_(mean[..., None])
        logits -= logits.amax(1, keepdim=True)
        weights = logits.exp()
        total = weights.sum(1)
        probs.append((weights / total[:, None]).mean(-1))
        entropies.append((total.log() - (weights * logits).sum(1) / total).mean(-1))
    return torch.cat(probs).reshape(found.mean.shape), torch.cat(entropies).reshape(found.mean.shape[:-1])


@cache
def _points(dimensions: int) -> Tensor:
    """Evenly spread points of a standard normal: scrambled Sobol points and their mirror images, ``[POINTS, K]``."""
    uniform = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=1).draw(POINTS // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform.clamp(1e-6, 1.0 - 1e-6))
    points = torch.cat([half, -half])
    return (points / points.square().mean(0).sqrt()).float()
