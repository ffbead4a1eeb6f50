"""One softness for the examples of clients that never meet, from sums over the examples of each.

`bpfed.calibration.temperatures` and `common_stretch` find the softness 1/β at which the slope of a convex loss in β is
zero. That slope is a sum over examples, so each client can send its part of it, at a few fixed β; the sum of all parts
and of the prior's changes its sign at the softness of all examples together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bpfed.calibration import FARTHEST, PRIOR
from bpfed.metrics import SMALLEST
from bpfed.softness import SOFTEST, SUREST

#: Places at which slopes are sent. With this many the softness is off by less than a ten-thousandth.
PLACES = 257
#: Steps of the root search, each of which halves a bracket.
STEPS = 50


class HeldOutSlopes(NamedTuple):
    """What a client sends about the examples that it holds out.

    Attributes:
        examples: How many there are.
        slopes: Their `slopes`, ``[PLACES]``.
    """

    examples: int
    slopes: Tensor


def betas() -> Tensor:
    """The places β = 1/T, from that of the softest predictions to that of the surest, ``[PLACES]``, at equal ratios."""
    return torch.linspace(-math.log(SOFTEST), -math.log(SUREST), PLACES, dtype=torch.float64).exp()


def slopes(probs: Tensor, y: Tensor) -> Tensor:
    """Σ d/dβ of −log(p_y^β / Σ_k p_k^β) over these examples.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.

    Returns:
        At each of `betas`, ``[PLACES]`` float64, rising.
    """
    logp = probs.double().clamp(min=SMALLEST).log()
    right = logp.gather(1, y[:, None]).sum()
    return torch.stack([(torch.softmax(beta * logp, 1) * logp).sum() - right for beta in betas().tolist()]).cpu()


def slopes_of_numbers(squares: Tensor) -> Tensor:
    """Σ d/dβ of β² z²/2 − log β over examples with these `squared_errors` z², ``[E]``; as `slopes`."""
    beta = betas()
    return beta * float(squares.sum()) - len(squares) / beta


def fault(told: HeldOutSlopes) -> str:
    """Why these cannot be `slopes` of so many examples; empty if they can."""
    examples, slopes = told
    if slopes.shape != (PLACES,):
        return f"its slopes are not {PLACES} numbers."
    most = -math.log(SMALLEST) * examples
    if not bool((slopes.abs() <= 1.000001 * most).all()):
        return f"its slopes are not those of {examples} examples."
    if not bool((slopes.diff() >= -1e-9 * most).all()):
        return "its slopes do not rise, as those of a loss with one minimum do."
    return ""


def fault_of_numbers(told: HeldOutSlopes) -> str:
    """Why these cannot be `slopes_of_numbers` of so many examples; empty if they can."""
    examples, slopes = told
    if slopes.shape != (PLACES,):
        return f"its slopes are not {PLACES} numbers."
    beta = betas()
    data, rest = float(slopes[-1] / beta[-1] + examples / beta[-1].square()), examples / beta  # data is Σ z²
    possible = -1e-6 * examples <= data <= 1.000001 * FARTHEST**2 * examples
    if not possible or not bool(((slopes - data * beta + rest).abs() <= 1e-6 * (data * beta + rest)).all()):
        return f"its slopes are not those of {examples} examples."
    return ""


def fitted(total: Tensor) -> float:
    """The softness of all examples whose slopes these are in sum, ``[PLACES]``.

    If it would be outside `betas`, the nearer end is returned.
    """
    beta = betas()
    full = total + PRIOR * (1.0 - 1.0 / beta)
    below = int((full < 0.0).sum())
    if below == 0:
        return SOFTEST
    if below == PLACES:
        return SUREST
    # A cubic in log β through the four places around the change of sign, and the prior as it is.
    first = min(max(below - 2, 0), PLACES - 4)
    near, start = total[first : first + 4].tolist(), math.log(float(beta[first]))
    ratio = math.log(float(beta[1] / beta[0]))

    def slope(place: float) -> float:
        return _cubic(near, place) + PRIOR * (1.0 - math.exp(-start - ratio * place))

    low, high = float(below - 1 - first), float(below - first)
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return math.exp(-start - ratio * low)


def _cubic(values: list[float], at: float) -> float:
    """The cubic through these values at 0, 1, 2 and 3."""
    others = [[m for m in range(4) if m != j] for j in range(4)]
    return sum(v * math.prod((at - m) / (j - m) for m in others[j]) for j, v in enumerate(values))
