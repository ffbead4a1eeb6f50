"""Heads before they have seen an example: how wide their weights are."""

from __future__ import annotations

import torch
from torch import Tensor

from bpfed.likelihoods import Categorical
from bpfed.model import Model

#: σ of the logarithm of a noise scale before any example is seen.
NOISE_SIGMA = 0.5


def of_likelihood(model: Model) -> Tensor:
    """Which personal weights are the likelihood's own, such as a noise scale, ``[P_personal]`` bool.

    They are not weights of the network: with a weight's σ, the exponential of a noise scale would span a factor of
    fifty.
    """
    own, factors = model.likelihood.parameters(), model.factors
    parts = [torch.full((size,), n in own) for n, size in zip(factors.names, factors.sizes, strict=True)]
    return factors.split(torch.cat(parts).to(model.initial.device))[1]


def biases(model: Model) -> Tensor:
    """Which personal weights are biases of the network, ``[P_personal]`` bool: levels that do not depend on the input.

    They are recognised by their name: the scale of a normalisation is a vector as well.
    """
    factors = model.factors
    called = [name.rpartition(".")[2].endswith("bias") for name in factors.names]
    parts = [torch.full((size,), bias) for size, bias in zip(factors.sizes, called, strict=True)]
    return factors.split(torch.cat(parts).to(model.initial.device))[1]


def per_head(model: Model) -> float:
    """What the prior's σ of a head weight is multiplied by: 1 for logits; in a regression, 1/√(number of weights).

    Logits have no unit, targets do. A sum of a hundred features with weights of σ = 1 spreads far beyond the targets,
    and a mean-field q, which cannot let the errors of its weights cancel, then explains the spread that is left as
    noise.
    """
    if isinstance(model.likelihood, Categorical):
        return 1.0
    return (int((~of_likelihood(model)).sum()) // model.members) ** -0.5
