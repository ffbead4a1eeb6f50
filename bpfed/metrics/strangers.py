"""Telling examples of another distribution by how unsure the model is of them."""

from __future__ import annotations

import torch
from torch import Tensor


def ood_auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """How well a score (entropy, epistemic uncertainty) tells examples of another distribution from familiar ones.

    Args:
        inside: Scores of familiar examples, ``[A]``.
        outside: Scores of the others, ``[B]``.

    Returns:
        The chance that one of the others has the higher score (a tie counts half), a scalar: 1 is perfect, 0.5 is no
        better than guessing.
    """
    familiar = inside.double().sort().values
    below, upto = (torch.searchsorted(familiar, outside.double(), right=side) for side in (False, True))
    return (below + upto).double().mean() / (2 * len(familiar))
