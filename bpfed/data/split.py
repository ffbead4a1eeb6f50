"""Split: which of each client's examples are held out for testing."""

from __future__ import annotations

import numpy as np

from bpfed.errors import UserError


def split(y: np.ndarray, owners: np.ndarray, test_fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Hold out a fraction of every client's examples, of each class alike.

    Of n examples of a client, n * test_fraction are held out, rounded; of those of one class, that fraction rounded up
    or down. Every client keeps at least one for training, so a client with a single example has none to test on.

    Args:
        y: Class of each example, ``[E]``; all zero where there are no classes.
        owners: Client of each example, ``[E]``, negative for nobody.
        test_fraction: From 0 up to, but not, 1.
        rng: Source of randomness.

    Returns:
        ``[E]`` bool, True for a test example.
    """
    check_fraction(test_fraction)
    test = np.zeros(len(y), dtype=bool)
    rows = np.flatnonzero(owners >= 0)
    if not len(rows):
        return test
    owner, label = owners[rows], np.unique(y[rows], return_inverse=True)[1]
    # Line every client's examples up class by class, classes in an order of the client's own, and take every
    # (1 / fraction)-th. What rounding gives or takes then falls on classes at random.
    cell = owner * (label.max() + 1) + label
    _, cell = np.unique(cell, return_inverse=True)
    key = rng.random(cell.max() + 1)[cell]
    order = np.lexsort((rng.random(len(rows)), key, owner))
    owner = owner[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    sizes = np.diff(first, append=len(owner))
    place = np.arange(len(owner)) - np.repeat(first, sizes)
    taken = rounded(place + 1, test_fraction) > rounded(place, test_fraction)
    none_left = np.add.reduceat(taken, first, dtype=np.int64) == sizes
    taken[first[none_left]] = False
    test[rows[order[taken]]] = True
    return test


def check_fraction(test_fraction: float) -> None:
    """Raise a `UserError` unless this is a fraction that leaves something to train on."""
    if not 0 <= test_fraction < 1:
        raise UserError(f"A test fraction must be at least 0 and below 1, not {test_fraction:g}.")


def rounded(examples: np.ndarray, fraction: float) -> np.ndarray:
    """That fraction of so many examples as a whole number; halves are rounded up."""
    # Rounded first: 0.1 * 35 + 0.5 must not fall below 4 by the last bit.
    return np.floor(np.round(examples * fraction + 0.5, 9))
