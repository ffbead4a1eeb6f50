"""Adam, and descent with momentum, on tensors with a client axis; step size and step count are each client's own."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
