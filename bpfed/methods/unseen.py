"""Classes that a client has never seen: how probable its model finds them there, and how rare its labels say they are.

A bias has a prior, and so a class without a single example keeps some probability p̄ at a client. At the client's own examples p̄ is known
without asking the model again: the data term's gradient in the bias of class c is Σ_j (p_c(x_j) − 1[y_j = c]), that is n p̄ for a
class that is never the label. The rule of succession, with one more example that is shared out among all K classes, says 1/(K (n + 1)).
Where p̄ is above that, the odds of the class are lowered by what is between the two, as one corrects a classifier for another share of
classes (Saerens, Latinne & Decaestecker 2002); an input that looks like the class and like no other may still be one.

This concerns prediction alone. In training the other classes stay what features must tell apart.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpfed.likelihoods import Categorical
from bpfed.methods.heads import is_bias
from bpfed.model import Model

#: How much of the running mean of p̄ the last step is.
RATE = 0.05


def class_biases(model: Model) -> slice:
    """Where among the personal weights the biases of the classes are, member by member; an empty slice if they are not all there."""
    factors, likelihood = model.factors, model.likelihood
    ends = list(accumulate(factors.sizes))
    named = [(end - size, end) for n, size, end in zip(factors.names, factors.sizes, ends, strict=True) if is_bias(n)]
    own = [(start - factors.shared, end - factors.shared) for start, end in named if start >= factors.shared]
    if not isinstance(likelihood, Categorical) or [end - start for start, end in own] != [
        model.members * likelihood.classes
    ]:
        return slice(0, 0)
    return slice(*own[0])


def noted(seen: Tensor, gradient: Tensor) -> Tensor:
    """The running mean of the gradients ``[S, K]`` of biases, after one more; its last column says how much of a mean it is yet.

    Args:
        seen: The mean before, ``[S, K + 1]``; zeros at first.
        gradient: Of the data term over all n examples of the client.
    """
    return torch.lerp(seen, pad(gradient, (0, 1), value=1.0), RATE)


def corrections(seen: Tensor, counts: Tensor, extra: Tensor) -> Tensor:
    """What is added to the biases for prediction, ``[S, M K]``: 0 for classes that the client has, 0 or less for others.

    Args:
        seen: See `noted`; of the biases of M members.
        counts: Examples of each class, ``[S, K]``.
        extra: Examples that are added to them, in equal parts to all classes, ``[S]``; 0: nothing is corrected.
    """
    size, classes, extra = counts.sum(-1, keepdim=True), counts.shape[-1], extra[:, None]
    found = seen[:, :-1] / (seen[:, -1:].clamp(min=1e-30) * size.clamp(min=1.0))
    wanted = extra / (classes * (size + extra))
    lowered = (wanted.clamp(min=1e-30).log() - found.clamp(min=1e-30).log()).clamp(max=0.0)
    known = (counts > 0).repeat(1, found.shape[-1] // classes)
    return torch.where(known | (size == 0) | (extra == 0) | (seen[:, -1:] == 0), 0.0, lowered)
