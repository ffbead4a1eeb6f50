"""Calibration with examples held back from training: a temperature for each client, and sets that hold the truth.

Both are computed for each client from the part of its training data that `FederatedData.hold_out` keeps from local
training.

- *Temperature*: probabilities become p^(1/T) / Z, with T fitted to the labels held back (`temperatures`).
- *Split-conformal sets*: the k-th smallest score of n examples held back, k = ⌈(n + 1) · level⌉, bounds the score of a
  new example with probability of at least ``level``, whatever the model and however few the examples: those held back
  and the new one need only be exchangeable. Where k > n the bound is infinite and the set is every label (`threshold`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE
from bpfed.metrics import SMALLEST
from bpfed.metrics.sums import owners, summed

#: Strength of the prior that holds a temperature near 1: it weighs as much as about this many examples.
PRIOR = 5.0
#: Steps of the root search; each at least halves a bracket, so that what is left of it is negligible.
STEPS = 60
#: Predicted standard deviations beyond which it makes no difference how far off a target is.
FARTHEST = 10.0


@dataclass(frozen=True, eq=False)
class Calibration:
    """The temperatures and conformal scores of N clients, and how the predictions they belong to were made.

    Attributes:
        how: How those predictions were made, ``sample`` or ``single-pass``.
        draws: With how many weight draws.
        temperatures: T of each client, ``[N]`` float64; 1 where none was fitted.
        scores: Conformal scores end to end, each client's in rising order, ``[E]`` float32: 1 − p of the right label,
            or |target − mean| / predicted standard deviation.
        offsets: Client i owns ``scores[offsets[i]:offsets[i + 1]]``, ``[N + 1]``.
    """

    how: str
    draws: int
    temperatures: Tensor
    scores: Tensor
    offsets: Tensor

    def client(self, index: int) -> tuple[float, Tensor]:
        """One client's temperature and its scores in rising order, ``[n]``."""
        return float(self.temperatures[index]), self.scores[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def thresholds(self, level: float) -> Tensor:
        """`threshold` of each client's scores, ``[N]``."""
        sizes = self.offsets.diff()
        rank = _rank(sizes.double(), level).long()
        index = (self.offsets[:-1] + rank - 1).clamp(0, max(0, len(self.scores) - 1))
        found = self.scores[index] if len(self.scores) else self.scores.new_zeros(len(sizes))
        return found.masked_fill(rank > sizes, math.inf)

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "how": self.how,
            "draws": self.draws,
            "temperatures": self.temperatures.tolist(),
            "scores": self.scores.tolist(),
            "offsets": self.offsets.tolist(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], clients: int | None = None) -> Calibration:
        """What `record` gave, of so many clients; None: of as many as it says.

        Raises:
            ValueError: It cannot be such a calibration.
        """
        made = cls(
            str(record["how"]),
            int(record["draws"]),
            torch.tensor(record["temperatures"], dtype=torch.float64),
            torch.tensor(record["scores"], dtype=torch.float32),
            torch.tensor(record["offsets"], dtype=torch.int64),
        )
        clients = len(record["temperatures"]) if clients is None else clients
        if made.temperatures.shape != (clients,) or made.offsets.shape != (clients + 1,) or made.scores.ndim != 1:
            raise ValueError(f"it is not of {clients} clients")
        if not bool((made.temperatures.isfinite() & (made.temperatures > 0.0)).all()):
            raise ValueError("a temperature is not a number above 0")
        ends = int(made.offsets[0]) == 0 and int(made.offsets[-1]) == len(made.scores)
        if not ends or bool((made.offsets.diff() < 0).any()):
            raise ValueError("its offsets do not fit its scores")
        owner, _ = owners(made.offsets, made.scores)
        falls = (made.scores.diff() < 0.0) & (owner.diff() == 0)
        if bool(made.scores.isnan().any()) or bool(falls.any()):
            raise ValueError("its scores are not numbers in rising order")
        return made


def threshold(scores: Tensor, level: float) -> float:
    """The score that a new example's does not exceed with probability of at least ``level``.

    Args:
        scores: In rising order, ``[n]``.
        level: Above 0 and below 1.

    Returns:
        The ⌈(n + 1) · level⌉-th smallest score; infinity if there are fewer.
    """
    rank = int(_rank(torch.tensor(float(len(scores)), dtype=torch.float64), level))
    return float(scores[rank - 1]) if rank <= len(scores) else math.inf


def fewest(level: float) -> int:
    """The number of calibration examples below which every `threshold` at this level is infinite."""
    _check(level)
    return math.ceil(round(level / (1.0 - level), 9))


def _rank(size: Tensor, level: float) -> Tensor:
    _check(level)
    # Rounded first: (n + 1) · level that should be a whole number must not pass it by the last bit.
    return torch.round((size + 1.0) * level, decimals=9).ceil()


def _check(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise UserError(f"The level of a prediction set is {level}, but must be above 0 and below 1, such as 0.9.")


def sorted_scores(scores: Tensor, offsets: Tensor) -> Tensor:
    """Each client's scores in rising order, ``[E]``."""
    order = scores.argsort(stable=True)
    owner, _ = owners(offsets, scores)
    return scores[order[owner[order].argsort(stable=True)]]


def temperatures(probs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The temperature of each client, for all clients at once.

    With β = 1/T this minimises

        Σ −log(p_y^β / Σ_k p_k^β)  +  PRIOR · (β − 1 − log β),

    the labels' negative log-likelihood and a Gamma prior whose mode is β = 1. Both are convex in β, so there is one
    minimum. The prior goes to infinity at β = 0 and β = ∞: a handful of examples, all right or all wrong, moves T but
    cannot send it to either end, and a client without examples has T = 1.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    Returns:
        ``[N]`` float64.
    """
    logp = probs.double().clamp(min=SMALLEST).log()
    owner, clients = owners(offsets, y)
    right = logp.gather(1, y[:, None]).squeeze(1)

    def slope(beta: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivative of the loss."""
        p = torch.softmax(beta[owner, None] * logp, 1)
        mean = (p * logp).sum(1)
        variance = (p * (logp - mean[:, None]).square()).sum(1)
        first, second = summed([mean - right, variance], owner, clients)
        return first + PRIOR * (1.0 - 1.0 / beta), second + PRIOR / beta.square()

    # |log p| is at most 27.6 (`SMALLEST`), so the root lies between these for any number of examples in memory.
    beta = torch.ones(clients, dtype=torch.float64, device=probs.device)
    low, high = torch.full_like(beta, 1e-9), torch.full_like(beta, 1e9)
    for _ in range(STEPS):
        first, second = slope(beta)
        low, high = torch.where(first < 0, beta, low), torch.where(first < 0, high, beta)
        newton = beta - first / second
        # Newton's step where it stays inside the bracket; else its middle on the scale of log β.
        inside = (newton > low) & (newton < high)
        beta = torch.where(first == 0, beta, torch.where(inside, newton, (low * high).sqrt()))
    return beta.reciprocal()


def common_temperature(probs: Tensor, y: Tensor) -> float:
    """The one temperature that suits all of these examples best, ``[E, K]`` and ``[E]``; see `temperatures`."""
    return float(temperatures(probs, y, torch.tensor([0, len(y)])))


def squared_errors(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """((y − mean) / scale)², at most `FARTHEST`²; all ``[E]``, the result float64."""
    return ((y.double() - mean.double()) / scale.double()).square().clamp(max=FARTHEST**2)


def common_scale_factor(squares: Tensor) -> float:
    """The factor of all predicted standard deviations that suits these targets best; their `squared_errors` z², ``[E]``.

    With β, one over the factor, it minimises the Gaussian negative log-likelihood and the prior of `temperatures`,

        Σ (β² z²/2 − log β)  +  PRIOR · (β − 1 − log β),

    so that β² Σ z² + PRIOR · β = E + PRIOR.
    """
    total, weight = float(squares.sum()), len(squares) + PRIOR
    return (PRIOR + math.sqrt(PRIOR**2 + 4.0 * total * weight)) / (2.0 * weight)


def tempered(probs: Tensor, temperature: Tensor | float) -> Tensor:
    """p^(1/T) / Z, ``[..., K]``; a tensor of temperatures broadcasts against ``probs`` without its last axis."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        return probs
    t = torch.as_tensor(temperature, dtype=torch.float64, device=probs.device)
    logits = probs.double().clamp(min=SMALLEST).log() / t[..., None]
    return torch.where((t == 1.0)[..., None], probs, torch.softmax(logits, -1).to(probs.dtype))


# --- One calibration temperature for the examples of clients that never meet, from sums over the examples of each --------------------
#
# `bpfed.inference.calibration.temperatures` and `common_scale_factor` find the calibration temperature 1/β at which the
# slope of a convex loss in β is zero. That slope is a sum over examples, so each client can send its part of it, at a
# few fixed β; the sum of all parts and of the prior's changes its sign at the calibration temperature of all examples
# together.

#: Places at which slopes are sent. With this many the calibration temperature is off by less than a ten-thousandth.
PLACES = 257
#: Steps of the root search, each of which halves a bracket.
BISECTIONS = 50


class HeldOutSlopes(NamedTuple):
    """What a client sends about the examples that it holds out.

    Attributes:
        examples: How many there are.
        slopes: Their `slopes`, ``[PLACES]``.
    """

    examples: int
    slopes: Tensor


def betas() -> Tensor:
    """The places β = 1/T, from that of the least confident predictions to that of the most confident, ``[PLACES]``, at equal ratios."""
    return torch.linspace(-math.log(MAX_TEMPERATURE), -math.log(MIN_TEMPERATURE), PLACES, dtype=torch.float64).exp()


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
    """The calibration temperature of all examples whose slopes these are in sum, ``[PLACES]``.

    If it would be outside `betas`, the nearer end is returned.
    """
    beta = betas()
    full = total + PRIOR * (1.0 - 1.0 / beta)
    below = int((full < 0.0).sum())
    if below == 0:
        return MAX_TEMPERATURE
    if below == PLACES:
        return MIN_TEMPERATURE
    # A cubic in log β through the four places around the change of sign, and the prior as it is.
    first = min(max(below - 2, 0), PLACES - 4)
    near, start = total[first : first + 4].tolist(), math.log(float(beta[first]))
    ratio = math.log(float(beta[1] / beta[0]))

    def slope(place: float) -> float:
        return _cubic(near, place) + PRIOR * (1.0 - math.exp(-start - ratio * place))

    low, high = float(below - 1 - first), float(below - first)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return math.exp(-start - ratio * low)


def _cubic(values: list[float], at: float) -> float:
    """The cubic through these values at 0, 1, 2 and 3."""
    others = [[m for m in range(4) if m != j] for j in range(4)]
    return sum(v * math.prod((at - m) / (j - m) for m in others[j]) for j, v in enumerate(values))
