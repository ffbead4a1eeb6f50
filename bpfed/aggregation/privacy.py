"""Differential privacy of clients: what can be learnt, from the server's states of all rounds, about any one client.

Each update (see `bpfed.aggregation.updates`) is cut to norm C, the sum of them gets Gaussian noise of standard
deviation z·C, and that is divided by the number of clients expected in a round. The server's state is made from this
and nothing else. For any two federations that differ in one client, whose updates count in one and are 0 in the other,
the probability of any result computed from these states differs by a factor of at most e^ε, up to δ.

ε depends on what an observer knows:

- It is known who took part in which round (the participants know). Then a client's rounds are Gaussian mechanisms, and
  ε is exact: k of them are one of noise z/√k (Dong, Roth, Su 2022; Balle, Wang 2018). It is that of the busiest client.
- It is not known, and every client takes part by a coin of its own (``sampling = "poisson"``). Then ε is smaller,
  bounded by Rényi divergences (Mironov, Talwar, Zhang 2019).

Drawing a fixed number of clients without replacement does not help: its bounds are for replacing one client by
another, which moves the sum by 2C, and come out above the first of the two cases.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bpfed._util.errors import UserError
from bpfed.aggregation.updates import moved, shortened, updates

if TYPE_CHECKING:
    from bpfed.methods.base import AnyMethod, State


#: From a number of values to as many standard normal ones, ``[count]``.
Draw = Callable[[int], Tensor]

#: Orders of Rényi divergence among which the best is taken.
ORDERS = (
    *(1.0 + k / 20 for k in range(1, 100)),
    *(6.0 + k / 4 for k in range(40)),
    *map(float, range(16, 64)),
    *(2.0**k for k in range(6, 11)),
)
_MOST = 1e6


# --- the mechanism ----------------------------------------------------------------------------------------------------


def private_mean(
    method: AnyMethod, shared: State, uploads: State, clip: float, noise: float, expected: int, draw: Draw
) -> State:
    """One upload instead of all: the server's state moved by the noisy mean of their clipped updates.

    Args:
        method: Of the uploads.
        shared: The server's state.
        uploads: Of those that returned; there may be none, which nobody learns.
        clip: C, the norm that an update may have.
        noise: z, the noise in units of C.
        expected: What the sum is divided by: how many clients a round has when all return, whoever did.
        draw: Where the noise comes from.
    """
    width = sum(leaf.numel() for leaf in tree_leaves(shared))
    like = next(iter(tree_leaves(shared)))
    total = clip * noise * draw(width).to(like) if noise > 0.0 else like.new_zeros(width)
    if tree_leaves(uploads) and len(tree_leaves(uploads)[0]):
        total = total + shortened(updates(method, shared, uploads), clip).sum(0)
    return tree_map(lambda leaf: leaf[0], moved(method, shared, total[None] / expected))


def noised(method: AnyMethod, shared: State, uploads: State, clip: float, noise: float, draw: Draw) -> State:
    """Uploads for a server that must not see a clean one: each update is cut to norm C and gets noise z·C of its own.

    Each is a Gaussian mechanism by itself, whatever the server makes of it and whatever others send. The mean of k of
    them has noise z·C/√k, where a trusted server would need z·C/k for the same ε.
    """
    changes = shortened(updates(method, shared, uploads), clip)
    own = torch.stack([draw(changes.shape[-1]).to(changes) for _ in changes])
    return moved(method, shared, changes + clip * noise * own)


def secret_normal(count: int) -> Tensor:
    """Standard normal numbers that nobody can repeat, ``[count]`` float64: system randomness, by Box and Muller."""
    half = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * half), dtype="<u8").reshape(2, half)
    first, second = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])


# --- the accountant ---------------------------------------------------------------------------------------------------


def gaussian_epsilon(noise: float, rounds: int, delta: float) -> float:
    """ε of a client that is known to have taken part in this many rounds of noise z; exact."""
    if rounds == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    mu = math.sqrt(rounds) / noise
    return _least(lambda epsilon: _gaussian_delta(mu, epsilon) <= delta)


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ): the least δ for that ε of a Gaussian of sensitivity/noise μ."""
    first, second = torch.special.log_ndtr(
        torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    ).tolist()
    return math.exp(first) - math.exp(epsilon + second)


def poisson_epsilon(noise: float, rate: float, rounds: int, delta: float) -> float:
    """ε of a client that takes part in each of this many rounds with probability ``rate`` by a secret coin; a bound.

    The Rényi divergence of order α of one round is that of the mixture (1 − q) N(0, z²) + q N(1, z²) from N(0, z²),
    which is the greater of the two directions; rounds add up, and ε follows by Canonne, Kamath, Steinke 2020,
    Proposition 12. What is known of a client that takes part in all rounds is never exceeded.
    """
    if rounds == 0:
        return 0.0
    if noise == 0.0:
        return math.inf
    bounds = [gaussian_epsilon(noise, rounds, delta)]
    for order in ORDERS if rate < 1.0 else ():
        spent = rounds * renyi(order, noise, rate)
        bounds.append(spent + math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1.0))
    return max(0.0, min(bounds))


def renyi(order: float, noise: float, rate: float) -> float:
    """Rényi divergence of order α > 1 of (1 − q) N(0, z²) + q N(1, z²) from N(0, z²), by the trapezoidal rule.

    The integrand is smooth and falls off as a Gaussian at both ends, so that the rule is exact to rounding.
    """
    step = noise / 16.0
    x = np.arange(-12.0 * noise, order + 12.0 * noise, step)
    ratio = np.logaddexp(np.log1p(-rate), math.log(rate) + (2.0 * x - 1.0) / (2.0 * noise**2))
    log = order * ratio - x**2 / (2.0 * noise**2)
    top = float(log.max())
    total = top + math.log(float(np.exp(log - top).sum()) * step / (noise * math.sqrt(2.0 * math.pi)))
    return max(0.0, total / (order - 1.0))


def noise_for(epsilon: float, delta: float, rounds: int, rate: float = 1.0) -> float:
    """The least noise multiplier z that costs no more than ε.

    Args:
        epsilon: What may be spent.
        delta: At that δ.
        rounds: Number of rounds: all, or with ``rate`` 1 those of the busiest client.
        rate: Probability that a client takes part in a round, by a secret coin; 1: it is known who does.
    """
    if not (epsilon > 0.0 and 0.0 < delta < 1.0 and rounds >= 1 and 0.0 < rate <= 1.0):
        raise UserError(
            f"epsilon is {epsilon}, delta {delta}, rounds {rounds} and rate {rate}, but they must be above 0, delta "
            "below 1 and rate at most 1."
        )
    return _least(lambda noise: noise > 0.0 and poisson_epsilon(noise, rate, rounds, delta) <= epsilon)


def _least(enough: Callable[[float], bool]) -> float:
    """The least number from 0 that is enough, from above, to seven digits."""
    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2.0 * high
        if high > _MOST:
            return math.inf
    while high - low > 1e-7 * high and high > 1e-9:
        centre = 0.5 * (low + high)
        low, high = (low, centre) if enough(centre) else (centre, high)
    return high
