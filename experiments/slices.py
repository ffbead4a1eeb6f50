"""The split of the public reference code: consecutive slices of the dataset, and one test file for small and large.

Images of each class are taken in the dataset's own order, so neighbours (in MNIST often of one hand) come to the same
client, in training and in test. Client u gets the labels 5u to 5u + 4, wrapping around, of each label the next slice;
its images are then shuffled and cut, not class by class. And whatever the size of the training set, the test images are
those of the *large* cell: of a small cell's test images some were trained on. None of this is how the protocol
``paper`` splits.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

from bpfed.data.federated import Examples, FederatedData
from bpfed.data.partition import CELLS, client_names
from bpfed.data.sources import pooled
from bpfed.data.sources.pooled import Source

LABELS = 5
#: The reference shuffles with Python's generator at this seed, whatever the run's.
SHUFFLE = 1


class Slices(NamedTuple):
    """Clients, and training and test images of each label and client."""

    clients: int
    train: int
    test: int


#: CIFAR-10 has 16 clients there, and other numbers than the paper's text.
SLICES: dict[str, Slices] = {
    "mnist-small": Slices(10, 50, 950),
    "mnist-large": Slices(10, 900, 300),
    "fmnist-small": Slices(10, 50, 950),
    "fmnist-large": Slices(10, 900, 300),
    "cifar10-small": Slices(16, 25, 450),
    "cifar10-large": Slices(16, 475, 150),
}


def load_slices(cell: str) -> FederatedData:
    """A cell as the reference code has it; the same for every seed."""
    name = CELLS[cell].source
    source = pooled.read(name)
    train = [part[0] for part in cut(source.y, SLICES[cell])]
    test = [part[1] for part in cut(source.y, SLICES[f"{name}-large"])]
    return FederatedData(
        name=cell,
        clients=client_names(SLICES[cell].clients),
        train=_examples(source, train),
        test=_examples(source, test),
        task="classification",
        classes=len(source.labels),
        labels=source.labels,
        partition="groups",
        protocol="published",
    ).check()


def cut(y: np.ndarray, slices: Slices) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of each client's training and test images."""
    members = [np.flatnonzero(y == label) for label in range(int(y.max()) + 1)]
    taken = [0] * len(members)
    shuffle = random.Random(SHUFFLE)
    found = []
    for client in range(slices.clients):
        rows: list[int] = []
        for j in range(LABELS):
            label = (LABELS * client + j) % len(members)
            start, taken[label] = taken[label], taken[label] + slices.train + slices.test
            rows += members[label][start : taken[label]].tolist()
        shuffle.shuffle(rows)
        found.append((np.array(rows[: LABELS * slices.train]), np.array(rows[LABELS * slices.train :])))
    return found


def _examples(source: Source, rows: list[np.ndarray]) -> Examples:
    offsets = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    every = np.concatenate(rows)
    return Examples(source.inputs(every), torch.from_numpy(source.y[every]), offsets)
