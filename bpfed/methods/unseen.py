"""Classes that a client has never seen: how probable its model thinks they are, and how rare its labels show they are.

A bias has a prior, and so a class without a single example keeps some probability p̄ at a client. Training yields it at
no cost: the data term's gradient in the bias of class c is Σ_j (p_c(x_j) − 1[y_j = c]), that is n p̄ for a class that
is never the label. (It is p̄ with the weights that the client has in its last steps; those it predicts with are
averaged after that, and hardly differ where steps have become small.) The rule of succession, with one more example
that is shared out among all K classes, gives w = 1/(K (n + 1)). Where p̄ is above that, the odds of the class are
multiplied by

    w (1 − Σ p̄) / (p̄ (1 − Σ w)),    sums over all such classes,

as one corrects a classifier for other shares of classes (Saerens, Latinne & Decaestecker 2002); an input that looks
like the class and like no other may still be one.

This concerns prediction only: in training, features still have to learn to tell all classes apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

#: How much of the running mean of p̄ the last step is.
RATE = 0.05


def noted(seen: Tensor, gradient: Tensor) -> Tensor:
    """The running mean of the biases' gradients ``[S, M K]``, after one more; the last column is its total weight.

    Args:
        seen: The mean before, ``[S, M K + 1]``; zeros at first.
        gradient: Of the data term over all n examples of the client.
    """
    return torch.lerp(seen, pad(gradient, (0, 1), value=1.0), RATE)


def corrections(seen: Tensor, counts: Tensor, extra: Tensor) -> Tensor:
    """What is added to the biases for prediction, ``[S, M K]``: 0 for classes the client has, 0 or less for others.

    Args:
        seen: See `noted`; of the biases of M members.
        counts: Examples of each class, ``[S, K]``.
        extra: Examples that are added to them, in equal parts to all classes, ``[S]``; 0: nothing is corrected.
    """
    size, classes, extra = counts.sum(-1, keepdim=True), counts.shape[-1], extra[:, None]
    found = seen[:, :-1] / (seen[:, -1:].clamp(min=1e-30) * size.clamp(min=1.0))
    wanted = (extra / (classes * (size + extra))).expand_as(found)
    known = (counts > 0).repeat(1, found.shape[-1] // classes)
    lower = ~known & (found > wanted) & (size > 0) & (extra > 0) & (seen[:, -1:] > 0)

    def left(part: Tensor) -> Tensor:
        """What such classes of a member leave to the others, of these shares."""
        taken = torch.where(lower, part, 0.0).unflatten(-1, (-1, classes)).sum(-1, keepdim=True)
        return (1.0 - taken).clamp(min=1e-6).expand(-1, -1, classes).flatten(-2)

    odds = wanted * left(found) / (found * left(wanted)).clamp(min=1e-30)
    return torch.where(lower, odds.clamp(min=1e-30).log(), 0.0)
