"""A mean-field Gaussian as Adam optimises it: mean, ρ and Adam's memory of both; its shared and personal part; and
priors of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpfed.inference.gaussian import Gaussian, kl_gradients_q, softplus, softplus_inverse
from bpfed.inference.likelihoods import Categorical
from bpfed.inference.optim import ADAM, Adam

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: No step takes a σ below 1e-6, which is this ρ.
RHO_FLOOR = -13.8155


class Memory(NamedTuple):
    """Adam's memory of a Gaussian's mean and ρ."""

    mean: Adam
    rho: Adam


class Variational(NamedTuple):
    """A Gaussian as it is optimised: mean and ρ with σ = softplus(ρ), and Adam's memory of both. ``[S, P]`` each."""

    mean: Tensor
    rho: Tensor
    adam_mean: Adam
    adam_rho: Adam

    @classmethod
    def at(cls, g: Gaussian, memory: Memory | None = None) -> Variational:
        """At this Gaussian, with this memory or with none yet."""
        mean, rho = memory or Memory(ADAM.init(g.mean), ADAM.init(g.mean))
        return cls(g.mean, softplus_inverse(g.sigma), mean, rho)

    @property
    def memory(self) -> Memory:
        """What may be kept from round to round."""
        return Memory(self.adam_mean, self.adam_rho)

    @property
    def gaussian(self) -> Gaussian:
        """Mean and σ."""
        return Gaussian(self.mean, softplus(self.rho))

    def moved(self, mean: Tensor, sigma: Tensor, step: Tensor, rate: Tensor) -> Variational:
        """One step of Adam along gradients with respect to mean and σ; dσ/dρ = sigmoid(ρ)."""
        new_mean, adam_mean = ADAM.update(self.mean, mean, self.adam_mean, step, rate)
        new_rho, adam_rho = ADAM.update(self.rho, sigma * torch.sigmoid(self.rho), self.adam_rho, step, rate)
        # Where data are counted again in every round σ falls without end, and below the floor 1/σ² overflows float32.
        # Points stay points.
        new_rho = torch.maximum(new_rho, self.rho.clamp(max=RHO_FLOOR))
        return Variational(new_mean, new_rho, adam_mean, adam_rho)


def join(shared: Gaussian, personal: Gaussian) -> Gaussian:
    """The Gaussian of all weights, ``[..., P]``."""
    return Gaussian(torch.cat([shared.mean, personal.mean], -1), torch.cat([shared.sigma, personal.sigma], -1))


def split(model: Model, g: Gaussian) -> tuple[Gaussian, Gaussian]:
    """Its shared and its personal part, ``[..., P_shared]`` and ``[..., P_personal]``."""
    parts = [model.layout.split(t) for t in g]
    return Gaussian(*(p[0] for p in parts)), Gaussian(*(p[1] for p in parts))


def beyond(points: int, g: Gaussian) -> Gaussian:
    """The Gaussian without its first weights, which are points, ``[S, P - points]``."""
    return Gaussian(g.mean[:, points:], g.sigma[:, points:])


def kl_gradients_beyond(points: int, q: Gaussian, prior: Gaussian) -> tuple[Tensor, Tensor]:
    """Gradients of KL(q ‖ π) in q's mean and σ, ``[S, P]``; 0 for the first weights, points without a KL term."""
    mean, sigma = kl_gradients_q(beyond(points, q), beyond(points, prior))
    return (pad(mean, (points, 0)), pad(sigma, (points, 0))) if points else (mean, sigma)


# --- Heads before they have seen an example: how wide their weights are -----------------------------------------------


#: σ of the logarithm of a noise scale before any example is seen.
NOISE_SIGMA = 0.5


def of_likelihood(model: Model) -> Tensor:
    """Which personal weights are the likelihood's own, such as a noise scale, ``[P_personal]`` bool.

    They are not weights of the network: with a weight's σ, the exponential of a noise scale would span a factor of
    fifty.
    """
    own, layout = model.likelihood.parameters(), model.layout
    parts = [torch.full((size,), n in own) for n, size in zip(layout.names, layout.sizes, strict=True)]
    return layout.split(torch.cat(parts).to(model.initial.device))[1]


def biases(model: Model) -> Tensor:
    """Which personal weights are biases of the network, ``[P_personal]`` bool: they do not depend on the input.

    They are recognised by their name: the scale of a normalisation is a vector as well.
    """
    layout = model.layout
    called = [name.rpartition(".")[2].endswith("bias") for name in layout.names]
    parts = [torch.full((size,), bias) for size, bias in zip(layout.sizes, called, strict=True)]
    return layout.split(torch.cat(parts).to(model.initial.device))[1]


def per_head(model: Model) -> float:
    """What the prior's σ of a head weight is multiplied by: 1 for logits; in a regression, 1/√(number of weights).

    Logits have no unit, targets do. A sum of a hundred features with weights of σ = 1 spreads far beyond the targets,
    and a mean-field q, which cannot let the errors of its weights cancel, then explains the spread that is left as
    noise.
    """
    if isinstance(model.likelihood, Categorical):
        return 1.0
    return (int((~of_likelihood(model)).sum()) // model.members) ** -0.5


# --- Log-priors of classes --------------------------------------------------------------------------------------------
#
# The biases of a head, which say how frequent a class is at a client, whatever the example.
#
# A client knows how frequent its classes are before it has learnt anything else. So its head starts with their
# log-priors, and its prior is around them: where nineteen patients in twenty are ill, learning that by steps of the
# optimiser would take most of a short run. Labels are counted where they are; nothing of it is uploaded.


def class_biases(model: Model) -> slice:
    """Where the biases of the classes are among the personal weights, member by member; empty if they are shared."""
    layout = model.layout
    if not isinstance(model.likelihood, Categorical) or model.output_bias not in layout.personal_names:
        return slice(0, 0)
    at = layout.names.index(model.output_bias)
    start = sum(layout.sizes[:at]) - layout.shared
    return slice(start, start + layout.sizes[at])


def class_log_prior(counts: Tensor) -> Tensor:
    """Logarithms of class frequencies, with one more example each, less their mean over the classes the client has.

    A class that it has never seen is as frequent as these are on average: the features have to learn what
    sets it apart, and prediction allows for how rare it is (`bpfed.methods.variational`).

    Args:
        counts: Examples of each class, ``[S, K]``.

    Returns:
        ``[S, K]``; zeros, to the last bit, where all classes that a client has are equally frequent.
    """
    seen = counts > 0
    most = counts.max(-1, keepdim=True).values
    logs = torch.where(seen, ((counts + 1.0) / (most + 1.0)).log(), 0.0)
    return torch.where(seen, logs - logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1), 0.0)


# --- Classes that a client has never seen -----------------------------------------------------------------------------
#
# How probable its model thinks they are, and how rare its labels show they are.
#
# A bias has a prior, and so a class without a single example keeps some probability p̄ at a client. Training yields it
# at no cost: the data term's gradient in the bias of class c is Σ_j (p_c(x_j) − 1[y_j = c]), that is n p̄ for a class
# that is never the label. (It is p̄ with the weights that the client has in its last steps; those it predicts with are
# averaged after that, and hardly differ where steps have become small.) The rule of succession, with one more example
# that is shared out among all K classes, gives w = 1/(K (n + 1)). Where a client has classes with a single example,
# there are likely more to come: by Good and Turing, new classes together are as frequent as those seen once, which
# gives w = n₁/(U (n + 1)) for n₁ classes seen once and U not seen; the larger of the two is used. Where p̄ is above w,
# the odds of the class are multiplied by
#
#     w (1 − Σ p̄) / (p̄ (1 − Σ w)),    sums over all such classes,
#
# as one corrects a classifier for other shares of classes (Saerens, Latinne & Decaestecker 2002); an input that looks
# like the class and like no other may still be one.
#
# This concerns prediction only: in training, features still have to learn to tell all classes apart.

#: How much of the running mean of p̄ the last step is.
RATE = 0.05


def noted(seen: Tensor, gradient: Tensor) -> Tensor:
    """The running mean of the biases' gradients ``[S, M K]``, after one more; the last column is its total weight.

    Args:
        seen: The mean before, ``[S, M K + 1]``; zeros at first.
        gradient: Of the data term over all n examples of the client.
    """
    return torch.lerp(seen, pad(gradient, (0, 1), value=1.0), RATE)


def corrections(seen: Tensor, counts: Tensor, extra: float) -> Tensor:
    """What is added to the biases for prediction, ``[S, M K]``: 0 for classes the client has, 0 or less for others.

    Args:
        seen: See `noted`; of the biases of M members.
        counts: Examples of each class, ``[S, K]``.
        extra: Examples that are added to them, in equal parts to all classes.
    """
    size, classes = counts.sum(-1, keepdim=True), counts.shape[-1]
    found = seen[:, :-1] / (seen[:, -1:].clamp(min=1e-30) * size.clamp(min=1.0))
    new = (counts == 0).sum(-1, keepdim=True).clamp(min=1)
    once = (counts == 1.0).sum(-1, keepdim=True)
    wanted = torch.maximum(extra / (classes * (size + extra)), once / (new * (size + extra).clamp(min=1.0)))
    wanted = wanted.expand_as(found)
    known = (counts > 0).repeat(1, found.shape[-1] // classes)
    lower = ~known & (found > wanted) & (size > 0) & (seen[:, -1:] > 0)

    def left(part: Tensor) -> Tensor:
        """What such classes of a member leave to the others, of these shares."""
        taken = torch.where(lower, part, 0.0).unflatten(-1, (-1, classes)).sum(-1, keepdim=True)
        return (1.0 - taken).clamp(min=1e-6).expand(-1, -1, classes).flatten(-2)

    odds = wanted * left(found) / (found * left(wanted)).clamp(min=1e-30)
    return torch.where(lower, odds.clamp(min=1e-30).log(), 0.0)
