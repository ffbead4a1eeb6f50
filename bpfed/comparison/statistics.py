"""Differences between two methods that saw the same data: paired by client and by seed, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bpfed._util.scores import deviation, student
from bpfed._util.text import many

#: Fewer clients than this say nothing about other clients.
FEWEST = 5
#: Resamples of the bootstrap.
RESAMPLES = 10_000


class Difference(NamedTuple):
    """A method's metric minus the reference's, mean over clients, then over seeds.

    Attributes:
        mean: The difference.
        low: Lower end of its 95 % interval; NaN where there is none.
        high: Upper end of it.
        interval: How the interval was made, in words.
        seeds: The mean over clients for each seed.
        lower: In how many pairs (a client of a seed) the method's value is the lower one.
        higher: In how many it is the higher one.
        pairs: How many pairs there are.
    """

    mean: float
    low: float
    high: float
    interval: str
    seeds: tuple[float, ...]
    lower: int
    higher: int
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def difference(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> Difference:
    """What two methods differ by; a client that one of them was not tested on is left out.

    With two seeds or more the interval is Student's over the seeds' means. With one it is a bootstrap over clients,
    which says how far the difference depends on who these clients are and nothing about other splits or other training.

    Args:
        ours: Metric by seed and client.
        theirs: The reference's.
    """
    pairs = [_apart(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    found = [d for d in pairs if len(d)]
    means = tuple(float(d.mean()) for d in found)
    if not means:
        return Difference(math.nan, math.nan, math.nan, "none: there is no pair", (), 0, 0, 0)
    every = np.concatenate(found)
    centre = sum(means) / len(means)
    if len(means) > 1:
        half = student(len(means) - 1) * deviation(means) / math.sqrt(len(means))
        low, high, how = centre - half, centre + half, f"paired t over {len(means)} seeds"
    elif len(every) >= FEWEST:
        low, high = _bootstrap(every)
        how = f"bootstrap over {len(every)} clients of one seed"
    else:
        low, high, how = math.nan, math.nan, f"none: one seed and {many(len(every), 'client')} are too few"
    return Difference(centre, low, high, how, means, int((every < 0).sum()), int((every > 0).sum()), len(every))


def _apart(ours: Mapping[str, float], theirs: Mapping[str, float]) -> np.ndarray:
    found = [ours[c] - theirs[c] for c in ours if c in theirs]
    return np.array([d for d in found if math.isfinite(d)])


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)
