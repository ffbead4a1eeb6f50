"""Smaller messages: means in half precision, standard deviations as one byte each on a logarithmic scale.

A mean keeps 11 bits: its relative error is at most 2^-11 (of numbers under 6·10⁻⁵ the error is at most 2^-25). A σ
becomes one of 255 levels between the least and the greatest of its tensor, evenly spaced in log σ, and level 0 is
σ = 0; its relative error is at most e^(r/508) − 1, with r the log of greatest over least. A Gaussian takes 3 bytes
instead of 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed._util.errors import UserError
from bpfed.aggregation.updates import scale_leaves

if TYPE_CHECKING:
    from bpfed.methods.base import Method, State


#: The greatest number in half precision.
GREATEST = 65504.0


class Quantised(NamedTuple):
    """Standard deviations as levels.

    Attributes:
        level: ``[..., P]`` uint8; 0 is σ = 0, 1 the least σ above 0 and 255 the greatest.
        bounds: Log of that least and greatest, ``[..., 2]`` float32.
    """

    level: Tensor
    bounds: Tensor


def quantise(sigma: Tensor) -> Quantised:
    """One byte for each σ of ``[..., P]``, a scale of its own for each row."""
    log = sigma.log()
    some = sigma > 0.0
    least = torch.where(some, log, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0.0)
    greatest = torch.where(some, log, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    width = (greatest - least).clamp(min=1e-30)
    level = torch.where(some, 1.0 + (254.0 * (log - least) / width).round(), 0.0)
    return Quantised(level.to(torch.uint8), torch.cat([least, greatest], -1).float())


def dequantise(quantised: Quantised) -> Tensor:
    """The σ that they stand for, float32."""
    least, greatest = quantised.bounds[..., :1], quantised.bounds[..., 1:]
    at = (quantised.level.float() - 1.0) / 254.0
    return torch.where(quantised.level > 0, torch.exp(torch.lerp(least, greatest, at)), 0.0)


def compress(method: Method, state: State) -> list[Tensor | Quantised]:
    """The tensors of a state, each ``[..., P]``, in their order: half precision, or `Quantised` of standard deviations."""
    packed: list[Tensor | Quantised] = []
    for leaf, scale in zip(tree_flatten(state)[0], scale_leaves(method, state), strict=True):
        if scale and leaf.shape[-1]:
            packed.append(quantise(leaf))
            continue
        if bool((leaf.abs() > GREATEST).any()):
            raise UserError(
                f"A weight is beyond {GREATEST:.0f}, the greatest number in half precision; set compression to 'none', "
                "or lower the step size, method.lr, if training has diverged."
            )
        packed.append(leaf.half())
    return packed


def expand(packed: list[Tensor | Quantised], like: State) -> State:
    """The state that was compressed; ``like`` is any of its kind."""
    leaves = [dequantise(part) if isinstance(part, Quantised) else part.float() for part in packed]
    return tree_unflatten(leaves, tree_flatten(like)[1])


def travelled(method: Method, state: State) -> State:
    """A state as it arrives after it was sent compressed."""
    return expand(compress(method, state), state)
