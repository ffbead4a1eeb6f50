"""A generator of synthetic federations, quick enough for a hundred thousand clients."""

from __future__ import annotations

import numpy as np
import torch

from bpfed.data.federated import Examples, FederatedData
from bpfed.data.ordering import client_names, streams
from bpfed.errors import UserError

TEST_FRACTION = 0.25
SPREAD = 2.0  # distance scale of class centres, in units of the noise
SHIFT = 0.5  # how far a client's inputs lie from everybody's


def synthetic(
    clients: int = 100, examples: int = 20, features: int = 20, classes: int = 10, seed: int = 0
) -> FederatedData:
    """Clients that differ: each holds half of the classes, and sees them shifted by a vector of its own.

    An input is its class's centre + its client's shift + noise. A quarter of each client's examples is for testing.

    Args:
        clients: Number of clients N.
        examples: Examples per client, training and test together.
        features: Length of an input.
        classes: Number of classes in all.
        seed: The same seed gives the same federation.
    """
    wrong = [
        f"{what} {number}"
        for what, number in (("clients", clients), ("examples", examples), ("features", features), ("classes", classes))
        if number < 1
    ]
    if wrong:
        raise UserError(f"Synthetic data needs at least 1 of everything, not {wrong[0]}.")
    (rng,) = streams(seed, 1)
    centres = SPREAD * rng.standard_normal((classes, features), dtype=np.float32)
    shifts = SHIFT * rng.standard_normal((clients, 1, features), dtype=np.float32)
    first = rng.integers(classes, size=(clients, 1))
    y = (first + rng.integers((classes + 1) // 2, size=(clients, examples))) % classes
    x = rng.standard_normal((clients, examples, features), dtype=np.float32)
    x += shifts
    x += centres[y]
    test = int(examples * TEST_FRACTION)

    def part(rows: slice, size: int) -> Examples:
        flat = np.ascontiguousarray(x[:, rows]).reshape(clients * size, features)
        return Examples(
            torch.from_numpy(flat),
            torch.from_numpy(np.ascontiguousarray(y[:, rows]).reshape(-1)),
            torch.arange(clients + 1) * size,
        )

    return FederatedData(
        name="synthetic",
        clients=client_names(clients),
        train=part(slice(test, None), examples - test),
        test=part(slice(0, test), test),
        task="classification",
        classes=classes,
        labels=tuple(str(c) for c in range(classes)),
    ).check()
