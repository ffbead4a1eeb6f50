"""Holders: which clients hold which labels, as a table ``[N, C]`` of yes and no."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from bpfed.errors import UserError

SHUFFLES = 30  # trades per client; the mix of label sets stops changing well before


def groups(clients: int, classes: int, k: int) -> np.ndarray:
    """The paper's label groups: client u holds labels (k u + j) mod C for j < k.

    With k = 5 of C = 10 these are two groups, labels 0-4 and labels 5-9.

    Returns:
        ``[N, C]`` bool.
    """
    _check(classes, k)
    held = np.zeros((clients, classes), dtype=bool)
    client = np.arange(clients)[:, None]
    held[client, (k * client + np.arange(k)) % classes] = True
    return held


def at_random(clients: int, serves: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """k labels per client at random, each label held by as many clients as any other, as far as it can serve them.

    Args:
        clients: Number of clients N.
        serves: How many clients each class has examples for, ``[C]``.
        k: Labels per client.
        rng: Source of randomness.

    Returns:
        ``[N, C]`` bool with exactly k True per row.
    """
    _check(len(serves), k)
    wanted = _even(np.minimum(serves, clients), clients * k, rng)
    if wanted is None:
        raise UserError(
            f"Partition 'random:{k}' needs an example of {k} labels for each of {clients} clients, "
            f"but this data has too few; use fewer clients or fewer labels per client."
        )
    # Dealing the labels round like cards gives every client k of them, and never the same one twice since no label
    # is dealt more than N times. It is far from random, which the trades below fix without changing any total.
    cards = np.repeat(np.arange(len(serves)), wanted)
    held = np.zeros((clients, len(serves)), dtype=bool)
    held[np.arange(clients * k) % clients, cards] = True
    for _ in range(SHUFFLES):
        held = _trade(held, rng)
    return held


def _check(classes: int, k: int) -> None:
    if k > classes:
        raise UserError(
            f"The partition asks for {k} labels per client, but the data has {classes}; ask for at most {classes}."
        )


def _even(most: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray | None:
    """Whole numbers ``[C]`` that sum to ``total``, none above ``most``, as equal as can be; None if there are none."""
    if most.sum() < total:
        return None
    level = bisect_right(range(int(most.max()) + 1), total, key=lambda at_most: np.minimum(most, at_most).sum()) - 1
    even = np.minimum(most, level)
    above = np.flatnonzero(most > level)
    even[rng.permutation(above)[: total - even.sum()]] += 1
    return even


def _trade(held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Pair the clients up; each pair pools the labels that just one of the two holds and deals them anew."""
    order = rng.permutation(len(held))
    half = len(held) // 2
    a, b = order[:half], order[half : 2 * half]
    either, both = held[a] ^ held[b], held[a] & held[b]
    # A random rank for each pooled label; the lower ranks go to a, as many as a brought.
    ranks = np.where(either, rng.random(either.shape), np.inf).argsort(1).argsort(1)
    to_a = either & (ranks < (held[a] & either).sum(1, keepdims=True))
    held = held.copy()
    held[a], held[b] = both | to_a, both | (either & ~to_a)
    return held
