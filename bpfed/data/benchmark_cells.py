"""Cells: the six datasets of the paper's tables, with an exact number of examples per client and class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bpfed._util.errors import UserError
from bpfed.data import partition as label_assignment
from bpfed.data.partition import NOBODY, Partition


class Cell(NamedTuple):
    """One cell. Training and test examples are counted per client and per label the client holds."""

    source: str
    clients: int
    labels: int
    train: int
    test: int


# fmt: off
CELLS: dict[str, Cell] = {
    #                     source  clients  labels  train  test
    "mnist-small":   Cell("mnist",     10,      5,    50,  950),
    "mnist-large":   Cell("mnist",     10,      5,   900,  300),
    "fmnist-small":  Cell("fmnist",    10,      5,    50,  950),
    "fmnist-large":  Cell("fmnist",    10,      5,   900,  300),
    "cifar10-small": Cell("cifar10",   20,      5,    25,  475),
    "cifar10-large": Cell("cifar10",   20,      5,   450,  150),
}
# fmt: on


def deal_cell(
    cell: Cell, y: np.ndarray, partition: Partition, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Distribute the examples of a cell's source: exact quotas, no example in two places.

    Args:
        cell: Which cell.
        y: Classes of the source, ``[E]``.
        partition: ``groups`` or ``random``, with the cell's number of labels per client.
        rng: Source of randomness: which images go where and, for ``random``, who holds which labels.

    Returns:
        Owners ``[E]`` int64 (negative for nobody) and whether each example is for testing, ``[E]`` bool.
    """
    if partition.name not in ("groups", "random") or partition.number != cell.labels:
        raise UserError(
            f"The paper's cells give each client {cell.labels} labels by 'groups' or 'random', not by '{partition}'; "
            f"use '{cell.source}' for another partition."
        )
    each, counts = cell.train + cell.test, np.bincount(y)
    if partition.name == "groups":
        held = label_assignment.groups(cell.clients, len(counts), cell.labels)
    else:
        # Every label can serve all clients here, so all labels get equally many, which is what fits.
        held = label_assignment.at_random(cell.clients, np.full(len(counts), cell.clients), cell.labels, rng)
    owners, test = np.full(len(y), NOBODY), np.zeros(len(y), dtype=bool)
    for label in range(len(counts)):
        who = np.flatnonzero(held[:, label])
        if len(who) * each > counts[label]:
            raise UserError(
                f"Label {label} of '{cell.source}' has {counts[label]} examples, but this cell needs "
                f"{len(who) * each}; the dataset's files are incomplete, so fetch them again."
            )
        quotas = rng.permutation(np.flatnonzero(y == label))[: len(who) * each].reshape(len(who), each)
        owners[quotas] = who[:, None]
        test[quotas[:, cell.train :]] = True
    return owners, test
