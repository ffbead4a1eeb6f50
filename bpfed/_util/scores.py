"""Mean and spread of scores over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing. (Added exactly: since Python 3.12 ``sum`` rounds otherwise than before.)"""
    return math.fsum(values) / len(values) if len(values) else math.nan


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN of one value."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def student(freedom: int, coverage: float = 0.95) -> float:
    """The t with P(|T| < t) = ``coverage`` at this many degrees of freedom."""
    from scipy.special import stdtrit  # takes a tenth of a second

    return float(stdtrit(freedom, 0.5 + coverage / 2))
