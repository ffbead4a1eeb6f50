"""A mean-field Gaussian as Adam optimises it: mean, ρ and Adam's memory of both; and its shared and personal part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpfed.inference.gaussian import Gaussian, kl_gradients_q, softplus, softplus_inverse
from bpfed.inference.optim import Adam, adam
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
        mean, rho = memory or Memory(Adam.like(g.mean), Adam.like(g.mean))
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
        new_mean, adam_mean = adam(self.mean, mean, self.adam_mean, step, rate)
        new_rho, adam_rho = adam(self.rho, sigma * torch.sigmoid(self.rho), self.adam_rho, step, rate)
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
