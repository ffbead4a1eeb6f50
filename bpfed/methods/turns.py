"""Turns: which part of a client's state a phase moves, and how many steps that part has taken."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed.methods.base import State, frozen
from bpfed.model import Model


def counted(steps: Tensor, phase: str) -> tuple[Tensor, Tensor]:
    """The counts after a step, and the one of the weights that move, ``[S]``.

    Args:
        steps: Taken so far, ``[S]``; where shared and personal factors move in turn, of either, ``[S, 2]``.
        phase: ``shared`` where those move.
    """
    if steps.ndim == 1:
        return steps + 1, steps + 1
    shared, personal = steps.unbind(-1)
    if phase == "shared":
        return torch.stack([shared + 1, personal], -1), shared + 1
    return torch.stack([shared, personal + 1], -1), personal + 1


def held(model: Model, before: State, after: State, phase: str) -> State:
    """The state after a step of this phase, tensors ``[S, P]``, with the part that it does not move as before.

    In the phase ``all`` everything moves, in ``shared`` the shared factors, in any other the personal ones.
    """
    if phase == "all":
        return after

    def part(old: Tensor, new: Tensor) -> Tensor:
        return frozen(model, new, old) if phase == "shared" else frozen(model, old, new)

    return tree_map(part, before, after)
