"""Server rules for members that are not all trusted: each coordinate is taken from the middle of the uploads.

Of S uploads up to k may be anything at all: where the k least and the k greatest values are left out, what remains lies
between the least and the greatest of the others (Yin et al. 2018). They act on means and on standard deviations alike,
and a middle of positive numbers is positive.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed.methods.base import State


def left_out(share: float, count: int) -> int:
    """How many of ``count`` values are left out at either end so that it is at least that share; one or two remain."""
    return min(math.ceil(share * count - 1e-9), (count - 1) // 2)


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """The mean over the first axis without the least and the greatest ``share`` of values; a half is the median.

    ``[S, ...]`` to ``[...]``.
    """
    cut = left_out(share, len(values))
    return values.sort(0).values[cut : len(values) - cut].mean(0)


def middle(uploads: State, share: float) -> State:
    """The `trimmed_mean` of every coordinate of S uploads: one upload, without client axis."""
    return tree_map(lambda leaf: trimmed_mean(leaf, share), uploads)
