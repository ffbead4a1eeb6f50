"""Optimisers on tensors with a client axis, behind one protocol; step size and step count are each client's own.

Methods call `ADAM`, `SGD` and `IVON`, or the one that a setting names (`get_optimizer`). Another one is a class with
`Optimizer.init` and `Optimizer.update` and an entry in `OPTIMIZERS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bpfed._util.errors import unknown
from bpfed.inference.gaussian import Gaussian

Variable = TypeVar("Variable")
Gradient = TypeVar("Gradient", contravariant=True)
Memory = TypeVar("Memory")

#: The further numbers of an optimiser that has none.
NONE: Mapping[str, Tensor] = {}


class Optimizer(Protocol[Variable, Gradient, Memory]):
    """How a variable moves along gradients. It is a value without state: what it remembers is handed on by the method.

    A variable is a tensor ``[S, P]``, or a Gaussian of such tensors; its gradient is of the same kind.
    """

    def init(self, variable: Variable) -> Memory:
        """The memory before the first step."""
        ...

    def update(
        self,
        variable: Variable,
        gradient: Gradient,
        memory: Memory,
        step: Tensor,
        rate: Tensor,
        hparams: Mapping[str, Tensor] = NONE,
    ) -> tuple[Variable, Memory]:
        """One step.

        Args:
            variable: Where it starts.
            gradient: Of what is minimised.
            memory: Of the steps before.
            step: Number of this step, from 1, ``[S]``.
            rate: Step size, ``[S]``.
            hparams: The method's numbers by name, ``[S]`` each, of which an optimiser may need some.

        Returns:
            The moved variable and the new memory.
        """
        ...


BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class Adam(NamedTuple):
    """Adam's memory for one variable.

    Attributes:
        first: Mean of the gradients, ``[S, P]``.
        second: Mean of their squares, ``[S, P]``.
    """

    first: Tensor
    second: Tensor

    @classmethod
    def like(cls, variable: Tensor) -> Adam:
        """No memory yet."""
        return cls(torch.zeros_like(variable), torch.zeros_like(variable))


def adam(variable: Tensor, gradient: Tensor, memory: Adam, step: Tensor, rate: Tensor) -> tuple[Tensor, Adam]:
    """One step of Adam.

    Args:
        variable: ``[S, P]``.
        gradient: ``[S, P]``.
        memory: Of the steps before.
        step: Number of this step, from 1, ``[S]``.
        rate: Step size, ``[S]``.

    Returns:
        The moved variable and the new memory.
    """
    first = torch.lerp(memory.first, gradient, 1.0 - BETA1)
    second = torch.lerp(memory.second, gradient * gradient, 1.0 - BETA2)
    # 1 − βᵗ; subtracted in float32, 1 − 0.999 would lose five digits.
    correction1 = -torch.expm1(step * math.log(BETA1))
    correction2 = torch.sqrt(-torch.expm1(step * math.log(BETA2)))
    scale = (rate * correction2 / correction1)[:, None]
    # m̂ / (√v̂ + ε) with both corrections gathered in one factor per client.
    moved = variable - scale * first / (torch.sqrt(second) + EPS * correction2[:, None])
    return moved, Adam(first, second)


class Velocity(NamedTuple):
    """The memory of descent with momentum: the fading sum of the gradients, ``[S, P]``."""

    sum: Tensor

    @classmethod
    def like(cls, variable: Tensor) -> Velocity:
        """No memory yet."""
        return cls(torch.zeros_like(variable))


def descent(
    variable: Tensor, gradient: Tensor, memory: Velocity, momentum: Tensor, rate: Tensor
) -> tuple[Tensor, Velocity]:
    """One step of gradient descent with momentum: v ← m v + g, x ← x − rate · v.

    Args:
        variable: ``[S, P]``.
        gradient: ``[S, P]``.
        memory: Of the steps before.
        momentum: m, ``[S]``; 0 is plain descent.
        rate: Step size, ``[S]``.

    Returns:
        The moved variable and the new memory.
    """
    velocity = momentum[:, None] * memory.sum + gradient
    return variable - rate[:, None] * velocity, Velocity(velocity)


# --- IVON -------------------------------------------------------------------------------------------------------------
#
# Variational online Newton steps on a mean-field Gaussian, here with any Gaussian prior.
#
# Shen et al.: Variational Learning is Effective for Large Deep Networks, 2024, arXiv 2402.17641, Algorithm 1. There the
# prior is N(0, 1/(λδ)), the loss a mean over n examples, h the running estimate of its curvature and σ² = 1/(λ(h + δ)).
# Here the objective is E_q[L(w)] + T · KL(q ‖ π) with L the sum of −log p over a client's examples and π = N(m_π, s²)
# weight by weight. Put λ = n/T and λδ = 1/s²; then λ(h + δ) is q's precision Λ = 1/σ² itself, δ m becomes δ (m − m_π),
# and the algorithm reads, with ĝ and ĥ the estimated gradient and curvature of L:
#
#     ĝ = ∇L(w),  ĥ = ĝ ⊙ (w − m)/σ²,  w ~ q
#     g ← β1 g + (1 − β1) ĝ
#     e = ĥ/T + 1/s² − Λ
#     Λ ← Λ + (1 − β2) e + ½ (1 − β2)² e²/Λ
#     m ← m − α (ḡ/T + (m − m_π)/s²)/Λ,  ḡ = g/(1 − β1ᵗ)
#
# Λ stays positive whatever ĥ is, since 1 + x + x²/2 > 0. The fixed point has Λ = E_q[∇²L]/T + 1/s² and
# E_q[∇L] + T (m − m_π)/s² = 0: the mean-field posterior. Nothing but q and g is carried, so a prior that moves between
# steps is allowed.

IVON_BETA1 = 0.9


class Momentum(NamedTuple):
    """IVON's memory: the running mean g of the gradients of L, ``[S, P]``."""

    gradient: Tensor

    @classmethod
    def like(cls, variable: Tensor) -> Momentum:
        """No memory yet."""
        return cls(torch.zeros_like(variable))


class Newton(NamedTuple):
    """A Gaussian as IVON optimises it: mean and σ, and its memory. ``[S, P]`` each."""

    mean: Tensor
    sigma: Tensor
    memory: Momentum

    @classmethod
    def at(cls, g: Gaussian, memory: Momentum | None = None) -> Newton:
        """At this Gaussian, with this memory or with none yet."""
        return cls(g.mean, g.sigma, memory or Momentum.like(g.mean))

    @property
    def gaussian(self) -> Gaussian:
        """Mean and σ."""
        return Gaussian(self.mean, self.sigma)


def ivon(
    q: Newton,
    mean: Tensor,
    sigma: Tensor,
    prior: Gaussian,
    temperature: Tensor,
    step: Tensor,
    rate: Tensor,
    beta2: Tensor,
) -> Newton:
    """One step of IVON.

    Args:
        q: Where it starts.
        mean: Gradient of the data term in q's mean, an estimate of E_q[∇L], ``[S, P]``.
        sigma: Its gradient in q's σ; divided by σ it estimates the curvature E_q[∇²L], ``[S, P]``.
        prior: π, ``[S, P]``.
        temperature: T > 0, ``[S]``.
        step: Number of this step, from 1, ``[S]``.
        rate: α, ``[S]``; 1 is a whole Newton step.
        beta2: Memory of the curvature, ``[S]``.
    """
    temperature, rate, share = temperature[:, None], rate[:, None], 1.0 - beta2[:, None]
    precision, tie = q.sigma.square().reciprocal(), prior.sigma.square().reciprocal()
    gradient = torch.lerp(q.memory.gradient, mean, 1.0 - IVON_BETA1)
    change = share * (sigma / (q.sigma * temperature) + tie - precision) / precision
    precision = precision * (1.0 + change + 0.5 * change.square())
    unbiased = gradient / -torch.expm1(step * math.log(IVON_BETA1))[:, None]
    moved = q.mean - rate * (unbiased / temperature + tie * (q.mean - prior.mean)) / precision
    return Newton(moved, precision.rsqrt(), Momentum(gradient))


# --- Behind one protocol ----------------------------------------------------------------------------------------------


class AdamOptimizer:
    """Adam; see `adam`."""

    def init(self, variable: Tensor) -> Adam:
        return Adam.like(variable)

    def update(
        self,
        variable: Tensor,
        gradient: Tensor,
        memory: Adam,
        step: Tensor,
        rate: Tensor,
        hparams: Mapping[str, Tensor] = NONE,
    ) -> tuple[Tensor, Adam]:
        return adam(variable, gradient, memory, step, rate)


class SGDOptimizer:
    """Gradient descent with momentum, the number ``momentum``; see `descent`."""

    def init(self, variable: Tensor) -> Velocity:
        return Velocity.like(variable)

    def update(
        self,
        variable: Tensor,
        gradient: Tensor,
        memory: Velocity,
        step: Tensor,
        rate: Tensor,
        hparams: Mapping[str, Tensor] = NONE,
    ) -> tuple[Tensor, Velocity]:
        return descent(variable, gradient, memory, hparams["momentum"], rate)


class FreeEnergyGradient(NamedTuple):
    """What IVON needs to know of E_q[L(w)] + T · KL(q ‖ π).

    Attributes:
        mean: Gradient of the data term in q's mean, ``[S, P]``.
        sigma: Its gradient in q's σ, ``[S, P]``.
        prior: π, ``[S, P]``.
        temperature: T, ``[S]``.
    """

    mean: Tensor
    sigma: Tensor
    prior: Gaussian
    temperature: Tensor


class IVONOptimizer:
    """IVON on a Gaussian, with the number ``curvature``, β2; see `ivon`."""

    def init(self, variable: Gaussian) -> Momentum:
        return Momentum.like(variable.mean)

    def update(
        self,
        variable: Gaussian,
        gradient: FreeEnergyGradient,
        memory: Momentum,
        step: Tensor,
        rate: Tensor,
        hparams: Mapping[str, Tensor] = NONE,
    ) -> tuple[Gaussian, Momentum]:
        q, (mean, sigma, prior, temperature) = Newton.at(variable, memory), gradient
        moved = ivon(q, mean, sigma, prior, temperature, step, rate, hparams["curvature"])
        return moved.gaussian, moved.memory


ADAM: Optimizer[Tensor, Tensor, Adam] = AdamOptimizer()
SGD: Optimizer[Tensor, Tensor, Velocity] = SGDOptimizer()
IVON: Optimizer[Gaussian, FreeEnergyGradient, Momentum] = IVONOptimizer()

#: Optimisers of a tensor, by the name that settings use.
OPTIMIZERS: dict[str, Optimizer[Tensor, Tensor, Any]] = {"adam": ADAM, "sgd": SGD}


def get_optimizer(name: str) -> Optimizer[Tensor, Tensor, Any]:
    """The optimiser of that name, or a `UserError` that lists those there are."""
    if name not in OPTIMIZERS:
        raise unknown("optimiser", name, OPTIMIZERS)
    return OPTIMIZERS[name]
