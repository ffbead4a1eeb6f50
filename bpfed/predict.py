"""The posterior predictive: what a distribution over weights says of new inputs, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bpfed.likelihoods import Normal
from bpfed.methods.base import Predictive
from bpfed.model import Model


@dataclass(frozen=True)
class Classified:
    """Predicted classes of B examples (with a leading client axis where there is one).

    Attributes:
        probs: Class probabilities averaged over the weight draws, ``[..., B, K]``.
        entropy: Total uncertainty, the entropy of ``probs`` in nats, ``[..., B]``.
        aleatoric: What more data would not remove: the mean entropy of the single draws, ``[..., B]``.
    """

    probs: Tensor
    entropy: Tensor
    aleatoric: Tensor

    @property
    def epistemic(self) -> Tensor:
        """What more data would remove: the mutual information of label and weights, ``[..., B]``."""
        return (self.entropy - self.aleatoric).clamp(min=0.0)

    @property
    def label(self) -> Tensor:
        """The most probable class, ``[..., B]``."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Its probability, ``[..., B]``."""
        return self.probs.amax(-1)


@dataclass(frozen=True)
class Regressed:
    """Predicted targets of B examples.

    Attributes:
        mean: ``[..., B]``.
        epistemic: Variance of the mean over the weight draws, ``[..., B]``.
        aleatoric: Variance of the noise, averaged over the weight draws, ``[..., B]``.
        nll: −log of the predictive density at the targets, if they were given, ``[..., B]``.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    nll: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """Predictive standard deviation, ``[..., B]``."""
        return (self.epistemic + self.aleatoric).sqrt()


def classify(model: Model, predictive: Predictive, x: Tensor, key: Tensor, draws: int) -> Classified:
    """Average the softmax over weight draws, each draw one coherent function for all examples.

    Args:
        model: On the device of the rest.
        predictive: Of S clients.
        x: ``[S, B, ...]``.
        key: ``[S, 2]``.
        draws: Number of draws (a point estimate uses one).
    """
    count = predictive.draws(draws)
    probs: Tensor | float = 0.0
    entropy: Tensor | float = 0.0
    for m in range(count):
        logp = torch.log_softmax(model.stacked_outputs(predictive.draw(key, m), x), -1)
        p = logp.exp()
        probs = probs + p / count
        entropy = entropy - (p * logp).sum(-1) / count
    assert isinstance(probs, Tensor)
    assert isinstance(entropy, Tensor)
    return Classified(probs, torch.special.entr(probs).sum(-1), entropy)


def regress(
    model: Model, predictive: Predictive, x: Tensor, key: Tensor, draws: int, y: Tensor | None = None
) -> Regressed:
    """Mean and variance over weight draws; arguments as `classify`, ``y`` is ``[S, B]``."""
    likelihood = model.likelihood
    assert isinstance(likelihood, Normal)
    count = predictive.draws(draws)
    means, noises, densities = [], [], []
    for m in range(count):
        weights = predictive.draw(key, m)
        out = model.stacked_outputs(weights, x).reshape(x.shape[:2])
        parameters = torch.func.vmap(model.factors.unflatten)(weights)
        log_scale = torch.as_tensor(likelihood.log_scale(parameters), device=out.device).expand(len(out), 1)
        means.append(out)
        noises.append(torch.exp(2.0 * log_scale).expand_as(out))
        if y is not None:
            densities.append(
                -0.5 * ((y - out).square() / noises[-1] + math.log(2.0 * math.pi)) - log_scale.expand_as(out)
            )
    stacked = torch.stack(means)
    nll = math.log(count) - torch.logsumexp(torch.stack(densities), 0) if y is not None else None
    return Regressed(stacked.mean(0), stacked.var(0, correction=0), torch.stack(noises).mean(0), nll)
