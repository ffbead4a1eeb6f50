"""A mean-field Gaussian as it is optimised by Adam: mean, ρ, and Adam's memory of both; and its shared and personal part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bpfed.gaussian import Gaussian, softplus, softplus_inverse
from bpfed.model import Model
from bpfed.optim import Adam, adam


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
        return Variational(new_mean, new_rho, adam_mean, adam_rho)


def join(shared: Gaussian, personal: Gaussian) -> Gaussian:
    """The Gaussian of all weights, ``[..., P]``."""
    return Gaussian(torch.cat([shared.mean, personal.mean], -1), torch.cat([shared.sigma, personal.sigma], -1))


def split(model: Model, g: Gaussian) -> tuple[Gaussian, Gaussian]:
    """Its shared and its personal part, ``[..., P_shared]`` and ``[..., P_personal]``."""
    parts = [model.factors.split(t) for t in g]
    return Gaussian(*(p[0] for p in parts)), Gaussian(*(p[1] for p in parts))
