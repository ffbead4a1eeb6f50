"""Levels of classes: the biases of a head, which say how frequent a class is at a client, whatever the example.

A client knows how frequent its classes are before it has learnt anything else. So its head starts with these levels,
and its prior is around them: where nineteen patients in twenty are ill, learning that by steps of the optimiser would
take most of a short run. Labels are counted where they are; nothing of it is uploaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpfed.likelihoods import Categorical
from bpfed.model import Model


def class_biases(model: Model) -> slice:
    """Where the biases of the classes are among the personal weights, member by member; empty if they are shared."""
    factors = model.factors
    if not isinstance(model.likelihood, Categorical) or model.levels not in factors.personal_names:
        return slice(0, 0)
    at = factors.names.index(model.levels)
    start = sum(factors.sizes[:at]) - factors.shared
    return slice(start, start + factors.sizes[at])


def levels(counts: Tensor) -> Tensor:
    """Logarithms of class frequencies, with one more example each, less their mean over the classes the client has.

    A class that it has never seen is as frequent as these are on average: the features have to learn what
    sets it apart, and prediction allows for how rare it is (`bpfed.methods.unseen`).

    Args:
        counts: Examples of each class, ``[S, K]``.

    Returns:
        ``[S, K]``; zeros, to the last bit, where all classes that a client has are equally frequent.
    """
    seen = counts > 0
    most = counts.max(-1, keepdim=True).values
    logs = torch.where(seen, ((counts + 1.0) / (most + 1.0)).log(), 0.0)
    return torch.where(seen, logs - logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1), 0.0)
