"""What a client would predict without a model, from its own training targets alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bpfed.data.federated import Examples


def mean_targets(train: Examples) -> Tensor:
    """The mean target of each client's training examples, ``[N]`` float64; that of all where a client has none."""
    sizes, y = train.sizes, train.y.cpu().double()
    sums = torch.cat([y.new_zeros(1), y.cumsum(0)])[train.offsets].diff()
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), y.sum() / max(1, len(y)))


def class_shares(train: Examples, classes: int) -> Tensor:
    """The share of each class in each client's training examples, with one more example of each, ``[N, K]`` float64."""
    owner = torch.repeat_interleave(torch.arange(len(train.sizes)), train.sizes)
    cells = torch.bincount(owner * classes + train.y.cpu(), minlength=len(train.sizes) * classes)
    counts = cells.view(-1, classes).double() + 1.0
    return counts / counts.sum(1, keepdim=True)
