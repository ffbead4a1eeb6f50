"""Which examples each client sees in each local step of a round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bpfed import noise


class Plan(NamedTuple):
    """The mini-batches of S clients in one phase of a round.

    Attributes:
        rows: Positions in the training examples, ``[T, S, B]`` int64; of padding, some row of the client's.
        mask: 1 for an example, 0 for padding, ``[T, S, B]`` float32.
        steps: Number of steps each client takes, ``[S]`` int32; T is the largest.
        first: Number of the phase's first step in the round, ``[S]`` int32.
        size: Number of the client's examples, ``[S]`` float32.
    """

    rows: Tensor
    mask: Tensor
    steps: Tensor
    first: Tensor
    size: Tensor


def plan(
    key: Tensor, start: Tensor, size: Tensor, batch: int, epochs_before: int, epochs: int, longest: int, width: int
) -> Plan:
    """Deal the clients' examples out to mini-batches, in a new random order in each epoch.

    Args:
        key: Of the shuffle, ``[S, 2]``.
        start: Where each client's examples begin, ``[S]``.
        size: How many it has, ``[S]``.
        batch: Mini-batch size.
        epochs_before: Epochs of earlier phases of this round (their orders are other ones).
        epochs: Epochs of this phase.
        longest: Largest number of examples of any of these clients.
        width: Padded batch size B, ``min(batch, longest)`` or more.
    """
    order = noise.permutations(key, size, epochs_before + epochs, longest)[:, epochs_before:]  # [S, E, longest]
    per_epoch = (size + batch - 1) // batch  # [S]
    steps = per_epoch * epochs
    t = torch.arange(-(-longest // batch) * epochs, device=key.device)[:, None]  # [T, 1]
    epoch = (t // per_epoch).clamp(max=epochs - 1)  # [T, S]
    slot = torch.arange(width, device=key.device)
    position = (t % per_epoch)[..., None] * batch + slot  # [T, S, B]
    mask = (position < size[:, None]) & (t < steps)[..., None] & (slot < batch)
    client = torch.arange(len(size), device=key.device)[:, None]
    rows = order[client, epoch[..., None], position.clamp(max=longest - 1)]
    rows = torch.where(mask, rows, 0) + start[:, None]
    return Plan(rows, mask.float(), steps.int(), (per_epoch * epochs_before).int(), size.float())
