"""A whole network of a client's own, beside the shared one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Own(NamedTuple):
    """A network of the client's own, once it has one.

    Attributes:
        weights: ``[S, P]``.
        known: 1 once there are such weights, 0 before, ``[S, 1]``.
    """

    weights: Tensor
    known: Tensor

    @classmethod
    def none(cls, like: Tensor) -> Own:
        """No such network yet, for weights like these ``[P]``."""
        return cls(torch.zeros_like(like), like.new_zeros(1))

    def over(self, shared: Tensor) -> Tensor:
        """The client's own weights, or the shared ones if it has none, ``[S, P]``."""
        return torch.where(self.known > 0, self.weights, shared)
