"""A federated dataset: named clients, each with training and test examples of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bpfed.errors import UserError

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Examples:
    """The examples of N clients, end to end: client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    Nothing is padded, so clients may differ in size at no cost, and a hundred thousand of them are three tensors.

    Attributes:
        x: Inputs, ``[E, ...]`` float32.
        y: Targets, ``[E]`` int64 (class) or ``[E]`` float32 (regression).
        offsets: ``[N + 1]`` int64, from 0 to E, never falling.
    """

    x: Tensor
    y: Tensor
    offsets: Tensor

    @property
    def sizes(self) -> Tensor:
        """Number of examples of each client, ``[N]``."""
        return self.offsets.diff()

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one client, ``[n, ...]`` and ``[n]`` (views, not copies)."""
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.x[rows], self.y[rows]

    @classmethod
    def of(cls, clients: list[tuple[Tensor, Tensor]]) -> Examples:
        """Lay the (inputs, targets) of several clients end to end."""
        sizes = torch.tensor([0] + [len(y) for _, y in clients])
        return cls(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]), sizes.cumsum(0))

    def select(self, clients: Tensor) -> Examples:
        """The examples of the clients at these indices ``[S]``, in that order."""
        sizes = self.sizes[clients]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        shift = (self.offsets[clients] - offsets[:-1]).repeat_interleave(sizes)
        index = shift + torch.arange(len(shift), device=shift.device)
        return Examples(self.x[index], self.y[index], offsets)


@dataclass(frozen=True)
class FederatedData:
    """What a federation trains and is tested on.

    Attributes:
        name: What it is called, e.g. ``"mnist-small"``.
        clients: The clients' names, ``[N]``. Randomness follows the name, never the position.
        train: Training examples of all clients.
        test: Test examples of all clients, none of which is in ``train``.
        task: ``"classification"`` or ``"regression"``.
        classes: Number of classes (0 for regression).
        labels: A word for each class (may be empty).
        partition: How the examples were dealt out, e.g. ``"groups"``.
        protocol: ``"paper"`` for the paper's six cells, else ``"own"``.
        test_fraction: The part of each client's examples that was held out; None where numbers were given instead.
        seed: Which examples went where; None where nothing was drawn.
    """

    name: str
    clients: tuple[str, ...]
    train: Examples
    test: Examples
    task: Task
    classes: int = 0
    labels: tuple[str, ...] = ()
    partition: str = "natural"
    protocol: str = "own"
    test_fraction: float | None = None
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.train.x.shape[1:])

    def check(self) -> FederatedData:
        """Return self, or say in one sentence which client's data cannot be trained on, and why."""
        if len(set(self.clients)) != len(self.clients):
            twice = next(c for c in self.clients if self.clients.count(c) > 1)
            raise UserError(f"Two clients of '{self.name}' are both called '{twice}'; give every client its own name.")
        for part, examples in (("training", self.train), ("test", self.test)):
            if len(examples.offsets) != len(self) + 1:
                raise UserError(f"'{self.name}' names {len(self)} clients but holds {part} data of another number.")
            if not len(examples.x) == len(examples.y) == int(examples.offsets[-1]):
                raise UserError(
                    f"'{self.name}' has {len(examples.x)} inputs and {len(examples.y)} targets in its {part} data for "
                    f"clients that own {int(examples.offsets[-1])}; give one input and one target per example."
                )
            bad = torch.zeros(len(examples.x), dtype=torch.bool)
            if examples.x.numel():
                # The extremes of a row carry its NaN or infinity, and need no copy of the data.
                rows = examples.x.flatten(1)
                bad = ~(torch.isfinite(rows.amin(1)) & torch.isfinite(rows.amax(1)))
            if examples.y.is_floating_point():
                bad = bad | ~torch.isfinite(examples.y)
            if bad.any():
                row = int(bad.nonzero()[0])
                who = self.clients[int(torch.searchsorted(examples.offsets, row, right=True)) - 1]
                raise UserError(
                    f"Client '{who}' of '{self.name}' has NaN or infinite values in its {part} data; clean or drop those rows."
                )
            if self.task == "classification" and len(examples.y):
                low, high = int(examples.y.min()), int(examples.y.max())
                if low < 0 or high >= self.classes:
                    raise UserError(
                        f"'{self.name}' has labels from {low} to {high} in its {part} data but {self.classes} classes; "
                        f"labels must run from 0 to {self.classes - 1}."
                    )
        if len(self) == 0:
            raise UserError(f"'{self.name}' has no clients.")
        empty = (self.train.sizes == 0).nonzero().flatten()
        if len(empty):
            raise UserError(
                f"Client '{self.clients[int(empty[0])]}' of '{self.name}' has no training example; leave it out or give it one."
            )
        return self
