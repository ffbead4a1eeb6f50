"""Scores that are made of an order of examples, within each client."""

from __future__ import annotations

import torch
from torch import Tensor

from bpfed.metrics.sums import cumulative, summed


def risk(confidence: Tensor, wrong: Tensor, owner: Tensor, n_clients: int) -> Tensor:
    """The area under the risk-coverage curve of each client times its number of examples, ``[N]`` float64.

    Args:
        confidence: ``[E]``.
        wrong: Which are wrong, ``[E]`` bool.
        owner: Whose they are, ``[E]``.
        n_clients: N.
    """
    order, tie, place = _ranked(-confidence, owner, n_clients)
    owner, errors = owner[order], wrong.double()[order]
    tied, size = summed([errors, torch.ones_like(errors)], tie, len(order))
    expected = cumulative((tied / size)[tie])
    total = summed([errors], owner, n_clients)[0]
    errors = expected - (total.cumsum(0) - total)[owner]
    return summed([errors / place], owner, n_clients)[0]


def in_order(score: Tensor, positive: Tensor, owner: Tensor, n_clients: int) -> Tensor:
    """Of each client, how many pairs of a positive and a negative have the higher score at the positive; a tie is half a pair.

    Args:
        score: ``[E]``.
        positive: ``[E]`` bool.
        owner: Whose they are, ``[E]``.
        n_clients: N.

    Returns:
        ``[N]`` float64.
    """
    order, tie, place = _ranked(score, owner, n_clients)
    owner, found = owner[order], positive.double()[order]
    ranks, size = summed([place, torch.ones_like(place)], tie, len(order))
    total, count = summed([(ranks / size)[tie] * found, found], owner, n_clients)
    return total - count * (count + 1) / 2


def _ranked(score: Tensor, owner: Tensor, n_clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """Examples client by client with rising scores, the number of each one's tie, and its place in its client, from 1."""
    order = score.argsort()
    order = order[owner[order].argsort(stable=True)]
    score, owner = score[order], owner[order]
    tie = torch.ones_like(order)
    tie[1:] = (score.diff() != 0) | (owner.diff() != 0)
    place = torch.arange(1, len(order) + 1, device=order.device, dtype=torch.float64)
    sizes = summed([torch.ones_like(place)], owner, n_clients)[0]
    return order, tie.cumsum(0) - 1, place - (sizes.cumsum(0) - sizes)[owner]
