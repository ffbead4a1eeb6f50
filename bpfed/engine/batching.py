"""Which examples each client sees in each local step of a round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bpfed.inference import rng


class Plan(NamedTuple):
    """The mini-batches of S clients in one phase of a round.

    Attributes:
        rows: Positions in the training examples, ``[T, S, B]`` int64; of padding, some row of the client's.
        mask: 1 for an example, 0 for padding, ``[T, S, B]`` float32.
        key: Of the noise of each step, ``[T, S, 2]`` int32.
        steps: Number of steps each client takes, ``[S]`` int32; T is at least the largest.
        size: Number of the client's examples, ``[S]`` float32.
    """

    rows: Tensor
    mask: Tensor
    key: Tensor
    steps: Tensor
    size: Tensor


def plan(
    shuffle: Tensor,
    key: Tensor,
    start: Tensor,
    size: Tensor,
    batch: int,
    epochs_before: int,
    epochs: int,
    longest: int,
    width: int,
) -> Plan:
    """Deal the clients' examples out to mini-batches, in a new random order in each epoch.

    Args:
        shuffle: Keys of the orders, ``[S, 2]``.
        key: Keys of the noise in this round, ``[S, 2]``.
        start: Where each client's examples begin, ``[S]``.
        size: How many it has, ``[S]``.
        batch: Mini-batch size.
        epochs_before: Epochs of earlier phases of this round (their orders are other ones).
        epochs: Epochs of this phase.
        longest: At least the largest number of examples of any of these clients.
        width: Padded batch size B, ``min(batch, longest)`` or more.
    """
    order = rng.permutations(shuffle, size, epochs_before + epochs, longest)[:, epochs_before:]  # [S, E, longest]
    per_epoch = (size + batch - 1) // batch  # [S]
    steps = per_epoch * epochs
    t = torch.arange(-(-longest // batch) * epochs, device=shuffle.device)[:, None]  # [T, 1]
    epoch = (t // per_epoch).clamp(max=epochs - 1)  # [T, S]
    slot = torch.arange(width, device=shuffle.device)
    position = (t % per_epoch)[..., None] * batch + slot  # [T, S, B]
    mask = (position < size[:, None]) & (t < steps)[..., None] & (slot < batch)
    client = torch.arange(len(size), device=shuffle.device)[:, None]
    rows = order[client, epoch[..., None], position.clamp(max=longest - 1)]
    rows = torch.where(mask, rows, 0) + start[:, None]
    number = (per_epoch * epochs_before + t).int()  # a client's own count, whoever trains beside it
    keys = rng.fold(key.expand(len(t), -1, -1), number)
    return Plan(rows, mask.float(), keys, steps.int(), size.float())


def cyclic(
    key: Tensor, start: Tensor, size: Tensor, batch: int, first: Tensor, batches: int, repeats: int, width: int
) -> Plan:
    """Mini-batches in the order the examples are in, the first again after the last.

    Args:
        key: Keys of the noise in this round, ``[S, 2]``.
        start: Where each client's examples begin, ``[S]``.
        size: How many it has, ``[S]``.
        batch: Mini-batch size; the last batch of a pass may be smaller.
        first: Mini-batches of the rounds before, ``[S]`` int64.
        batches: How many to take.
        repeats: Steps with each of them.
        width: Padded batch size B, at least that of the largest batch.
    """
    t = torch.arange(batches * repeats, device=size.device)[:, None]  # [T, 1]
    slot = torch.arange(width, device=size.device)
    position = ((first + t // repeats) % ((size + batch - 1) // batch))[..., None] * batch + slot  # [T, S, B]
    mask = (position < size[:, None]) & (slot < batch)
    rows = torch.where(mask, position, 0) + start[:, None]
    keys = rng.fold(key.expand(len(t), -1, -1), t.int())
    return Plan(rows, mask.float(), keys, torch.full_like(size, len(t)).int(), size.float())
