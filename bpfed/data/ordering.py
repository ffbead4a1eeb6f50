"""Ordering: from one owner per example to the rows of each client, end to end, and the random streams behind it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bpfed.errors import UserError


def lay_out(
    owners: np.ndarray, chosen: np.ndarray, clients: int, rng: np.random.Generator
) -> tuple[np.ndarray, Tensor]:
    """Rows of the chosen examples ``[E]`` bool, client by client, in random order within each.

    The order is random because whoever trains on rows as they come must not meet one class after the other.

    Returns:
        Rows ``[R]`` int64 and offsets ``[N + 1]`` int64: client i has ``rows[offsets[i]:offsets[i + 1]]``.
    """
    rows = rng.permutation(np.flatnonzero(chosen & (owners >= 0)))
    rows = rows[np.argsort(owners[rows], kind="stable")]
    sizes = np.bincount(owners[rows], minlength=clients)
    return rows, torch.from_numpy(np.concatenate([[0], sizes.cumsum()]))


def client_names(clients: int) -> tuple[str, ...]:
    """``client-00``, ``client-01`` and so on, of one width so that they sort by number."""
    width = max(2, len(str(clients - 1)))
    return tuple(f"client-{i:0{width}d}" for i in range(clients))


def check_seed(seed: int) -> None:
    """Raise a `UserError` unless this can be a seed."""
    if seed < 0:
        raise UserError(f"A seed must be 0 or more, not {seed}.")


def streams(seed: int, number: int) -> list[np.random.Generator]:
    """Independent random generators, so that e.g. another test fraction does not change who holds what."""
    check_seed(seed)
    return [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(number)]
