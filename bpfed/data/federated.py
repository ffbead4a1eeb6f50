"""A federated dataset: named clients, each with training and test examples of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.data.holdout import Holdout, whole_groups
from bpfed.data.partition import OWN
from bpfed.inference import inputs, rng
from bpfed.inference.inputs import Inputs
from bpfed.inference.tasks import Task, get_task

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor


@dataclass(frozen=True)
class Examples:
    """The examples of N clients, end to end: client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    Nothing is padded, so clients may differ in size at no cost, and a hundred thousand of them are three tensors.

    Attributes:
        x: Inputs, ``[E, ...]`` float32; or a dict or tuple of such tensors, where whole numbers are int64 and truth
            values bool (`bpfed.inference.inputs`).
        y: Targets, ``[E]``, of the task's type: int64 for classes, float32 for numbers.
        offsets: ``[N + 1]`` int64, from 0 to E, never falling.
        keys: By what they are held out, ``[E]`` int64: places in time or numbers of groups, of each client by itself
            (`bpfed.data.holdout`); None: they are drawn at random.
    """

    x: Inputs
    y: Tensor
    offsets: Tensor
    keys: Tensor | None = None

    @property
    def sizes(self) -> Tensor:
        """Number of examples of each client, ``[N]``."""
        return self.offsets.diff()

    @property
    def owner(self) -> Tensor:
        """The client of each example, ``[E]``."""
        sizes = self.sizes
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    def client(self, index: int) -> tuple[Inputs, Tensor]:
        """Inputs and targets of one client, ``[n, ...]`` and ``[n]`` (views, not copies)."""
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return inputs.take(self.x, rows), self.y[rows]

    @classmethod
    def of(cls, clients: list[tuple[Inputs, Tensor]]) -> Examples:
        """Lay the (inputs, targets) of several clients end to end."""
        sizes = torch.tensor([0] + [len(y) for _, y in clients])
        return cls(inputs.join([x for x, _ in clients]), torch.cat([y for _, y in clients]), sizes.cumsum(0))

    @classmethod
    def join(cls, parts: list[Examples]) -> Examples:
        """The clients of several federations, one federation's after the other's."""
        sizes = torch.cat([part.sizes for part in parts])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        keys = [part.keys for part in parts if part.keys is not None]
        joined = torch.cat(keys) if len(keys) == len(parts) else None
        return cls(inputs.join([part.x for part in parts]), torch.cat([part.y for part in parts]), offsets, joined)

    def select(self, clients: Tensor) -> Examples:
        """The examples of the clients at these indices ``[S]``, in that order."""
        sizes = self.sizes[clients]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        shift = (self.offsets[clients] - offsets[:-1]).repeat_interleave(sizes)
        index = shift + torch.arange(len(shift), device=shift.device)
        return Examples(
            inputs.take(self.x, index), self.y[index], offsets, None if self.keys is None else self.keys[index]
        )

    def where(self, chosen: Tensor) -> Examples:
        """These examples of each client only, ``[E]`` bool."""
        counts = self.sizes.new_zeros(len(self.sizes)).index_add_(0, self.owner, chosen.long())
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Examples(
            inputs.take(self.x, chosen), self.y[chosen], offsets, None if self.keys is None else self.keys[chosen]
        )


def held_back(sizes: Tensor, fraction: float) -> Tensor:
    """How many of so many training examples, ``[N]``, clients do not train on; see `FederatedData.hold_out`."""
    held = (sizes * fraction).round().long().clamp(min=1)
    return torch.minimum(held, sizes - 1).clamp(min=0)


def last_rows(examples: Examples, held: Tensor) -> Tensor:
    """The last examples in time, ``[E]`` bool, so many of each client, ``[N]``."""
    assert examples.keys is not None
    owner = examples.owner
    order = examples.keys.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    place = torch.arange(len(owner)) - examples.offsets[owner]
    chosen = torch.zeros(len(owner), dtype=torch.bool)
    chosen[order] = place >= (examples.sizes - held)[owner]
    return chosen


def rows_of_groups(examples: Examples, held: Tensor, key: Tensor) -> Tensor:
    """The examples of groups that are drawn, ``[E]`` bool, about so many of each client, ``[N]``.

    ``key`` is each client's, ``[N, ...]``, as `bpfed.inference.rng.keys` gives it.
    """
    assert examples.keys is not None
    draws = rng.fold(rng.fold(key, 0)[examples.owner], examples.keys.int())[:, 0]
    chosen = torch.zeros(len(examples.y), dtype=torch.bool)
    for i, number in enumerate(held.tolist()):
        own = slice(int(examples.offsets[i]), int(examples.offsets[i + 1]))
        # Examples of one group have one draw, and groups are taken in the order of their draws.
        drawn, sizes = draws[own].unique(return_counts=True)
        taken = drawn[torch.from_numpy(whole_groups(sizes.tolist(), number))]
        chosen[own] = torch.isin(draws[own], taken)
    return chosen


def untested(data: FederatedData) -> UserError:
    """A `UserError` for data without any test example."""
    start = f"No client of '{data.name}' has a test example"
    if data.test_fraction != 0 and bool((data.train.sizes <= 1).all()):
        return UserError(f"{start}, because each has a single one, which is for training; give some clients more.")
    if data.test_fraction:
        return UserError(f"{start}, because each class keeps one for training; give some clients more.")
    return UserError(f"{start}; give them some, e.g. with --test-fraction 0.3 (in Python: test_fraction=0.3).")


def _where(x: Inputs, y: Tensor) -> str:
    """Which of a client's inputs ``[n, ...]`` or targets ``[n]`` are no numbers, and of how many examples."""
    what = []
    for part, values in inputs.parts(x).items():
        odd = ~torch.isfinite(values)
        rows = odd.reshape(len(values), -1).any(1) if values.numel() else torch.zeros(len(y), dtype=torch.bool)
        if rows.any():
            columns = odd.any(0).nonzero().flatten().tolist() if values.ndim == 2 else []
            more = f" and {len(columns) - 3} more columns" if len(columns) > 3 else ""
            called = f"x['{part}']" if part else "x"
            name = " and ".join(f"{called}[:, {k}]" for k in columns[:3]) if columns else called
            what.append(f"in {name}{more} of {int(rows.sum())} of its {len(y)} examples")
    wrong = int((~torch.isfinite(y)).sum()) if y.is_floating_point() else 0
    if wrong:
        what.append(f"in y of {wrong} of its {len(y)} examples")
    return " and ".join(what)


@dataclass(frozen=True, repr=False)
class FederatedData:
    """What a federation trains and is tested on.

    Attributes:
        name: What it is called, e.g. ``"mnist-small"``.
        clients: The clients' names, ``[N]``. Randomness follows the name, never the position.
        train: Training examples of all clients.
        test: Test examples of all clients, none of which is in ``train``.
        task: Name of the task, such as ``"classification"`` (`bpfed.inference.tasks`).
        classes: Number of classes (0 where targets are no classes).
        labels: A word for each class (may be empty).
        partition: How the examples were dealt out, e.g. ``"groups"``.
        protocol: ``"paper"`` for the paper's six cells, else ``"own"``.
        test_fraction: The part of each client's examples that was held out; None where numbers were given instead.
        seed: Which examples went where; None where nothing was drawn.
        preprocessor: How tables became these inputs and targets, to do the same to new rows; None for arrays.
        calibration: Examples that nobody trains on and predictions are calibrated with (see `hold_out`); may be None.
        notes: What whoever trains on them should know, in words.
    """

    name: str
    clients: tuple[str, ...]
    train: Examples
    test: Examples
    task: str
    classes: int = 0
    labels: tuple[str, ...] = ()
    partition: str = OWN
    protocol: str = "own"
    test_fraction: float | None = None
    seed: int | None = None
    preprocessor: Preprocessor | None = None
    calibration: Examples | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        kinds = f"{self.classes} classes" if self.task_type.has_classes else self.task_type.targets
        return (
            f"<data {self.name!r}: {len(self)} clients, {len(self.train.y)} training and {len(self.test.y)} test "
            f"examples of {inputs.shapes(self.train.x)}, {kinds}>"
        )

    @property
    def task_type(self) -> Task:
        """The task itself: what its targets are and what follows from it."""
        return get_task(self.task)

    @property
    def flat(self) -> bool:
        """Whether an input is a row of numbers."""
        return isinstance(self.train.x, Tensor) and self.train.x.ndim == 2

    @property
    def class_names(self) -> tuple[str, ...]:
        """A word for each class: its label, or its number where classes have none; none for numbers."""
        return self.labels or tuple(str(k) for k in range(self.classes))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis; empty where inputs are several tensors."""
        return tuple(self.train.x.shape[1:]) if isinstance(self.train.x, Tensor) else ()

    def hold_out(self, fraction: float, seed: int) -> FederatedData:
        """The same data with a part of each client's training examples moved to ``calibration``.

        Of n examples round(n · fraction) are moved, at least one where n is 2 or more, and never all; of those of one
        class, that part rounded up or down. Every example of a client has the same chance. Which ones they are depends
        on ``seed``, the client's name and the order of its examples, and on no other client.

        If the tables are held out by time or order (`Preprocessor.holdout`), the last ones are moved, whatever the
        seed. If by group, whole groups are, about as many examples, and none of a client that has one group.
        """
        if self.calibration is not None:
            raise UserError(f"'{self.name}' already has calibration examples; leave the setting 'calibration' at 0.")
        moved = self._moved(fraction, seed)
        return replace(self, train=self.train.where(~moved), calibration=self.train.where(moved))

    def _moved(self, fraction: float, seed: int) -> Tensor:
        """Which training examples `hold_out` moves, ``[E]`` bool."""
        held = held_back(self.train.sizes, fraction)
        key = rng.keys(seed, 0, rng.Purpose.HOLD_OUT, rng.client_ids(self.clients))
        if self.holdout is None:
            return self._drawn(held, key)
        if self.holdout.ordered:
            return last_rows(self.train, held)
        return rows_of_groups(self.train, held, key)

    def folds(self, count: int, held: float, seed: int) -> list[FederatedData]:
        """The data ``count`` times, each with another part of each client's training examples as its test examples.

        The parts are of the size ``held`` and have no example in common. Test and calibration examples are left out.
        The first part is what `held_out` holds out with the same seed.
        """
        whole, left, found = self.train, torch.ones(len(self.train.y), dtype=torch.bool), []
        for at in range(count):
            rows = torch.zeros_like(left)
            rest = replace(self, train=whole.where(left), calibration=None)
            rows[left.nonzero()[:, 0][rest._moved(held / (1.0 - at * held), seed)]] = True
            left = left & ~rows
            train, test = whole.where(~rows), whole.where(rows)
            found.append(replace(self, train=train, test=test, calibration=None, seed=seed + at))
        return found

    @property
    def holdout(self) -> Holdout | None:
        """By which column training examples are held out; None: they are drawn at random."""
        made = self.preprocessor if self.train.keys is not None else None
        return None if made is None else Holdout.of(made.holdout)

    def _drawn(self, held: Tensor, key: Tensor) -> Tensor:
        """Which training examples are held out at random, ``[E]`` bool, so many of each client, ``[N]``."""
        sizes, owner = self.train.sizes, self.train.owner
        place = torch.arange(len(owner)) - self.train.offsets[owner]
        # Each client's examples class by class, in random order inside of a class; then at equal distances from a
        # random start, with which every place has the same chance.
        order = rng.fold(rng.fold(key, 0)[owner], place.int())[:, 0].argsort(stable=True)
        if self.task_type.has_classes:
            order = order[self.train.y[order].argsort(stable=True)]
        order = order[owner[order].argsort(stable=True)]
        start = rng.uniform(rng.fold(key, 1), 1)[:, 0].double()[owner]
        before, after = ((p * held[owner]).double() / sizes[owner] + start for p in (place, place + 1))
        taken = after.floor() > before.floor()
        moved = torch.zeros(len(owner), dtype=torch.bool)
        moved[order[taken]] = True
        return moved

    def check(self) -> FederatedData:
        """Return self, or say in one sentence which client's data cannot be trained on, and why."""
        if len(set(self.clients)) != len(self.clients):
            twice = next(c for c in self.clients if self.clients.count(c) > 1)
            raise UserError(f"Two clients of '{self.name}' are both called '{twice}'; give every client its own name.")
        parts = {"training": self.train, "test": self.test, "calibration": self.calibration}
        for part, examples in parts.items():
            if examples is None:
                continue
            if len(examples.offsets) != len(self) + 1:
                raise UserError(
                    f"'{self.name}' names {len(self)} clients, but its {part} data is of {len(examples.offsets) - 1}; "
                    "name each client once."
                )
            counts = {len(t) for t in inputs.parts(examples.x).values()}
            if counts != {len(examples.y)} or len(examples.y) != int(examples.offsets[-1]):
                raise UserError(
                    f"'{self.name}' has {' or '.join(map(str, sorted(counts)))} inputs and {len(examples.y)} targets in its {part} data for "
                    f"clients that own {int(examples.offsets[-1])}; give one input and one target per example."
                )
            bad = torch.zeros(len(examples.y), dtype=torch.bool)
            for values in inputs.parts(examples.x).values():
                if values.is_floating_point() and values.numel():
                    # The extremes of a row carry its NaN or infinity, and need no copy of the data.
                    rows = values.reshape(len(values), -1)
                    bad |= ~(torch.isfinite(rows.amin(1)) & torch.isfinite(rows.amax(1)))
            if examples.y.is_floating_point():
                bad = bad | ~torch.isfinite(examples.y)
            if bad.any():
                row = int(bad.nonzero()[0])
                who = self.clients[int(torch.searchsorted(examples.offsets, row, right=True)) - 1]
                raise UserError(
                    f"Client '{who}' of '{self.name}' has NaN or infinite values in its {part} data, "
                    f"{_where(*examples.client(self.clients.index(who)))}; clean or drop those rows."
                )
            if len(examples.y) and (fault := self.task_type.fault(examples.y, self.classes, f"in its {part} data")):
                raise UserError(f"'{self.name}' has {fault}.")
        if len(self) == 0:
            raise UserError(f"'{self.name}' has no clients; give it at least one.")
        empty = (self.train.sizes == 0).nonzero().flatten()
        if len(empty):
            who = self.clients[int(empty[0])]
            raise UserError(f"Client '{who}' of '{self.name}' has no training example; remove it or give it one.")
        return self


# --- Training examples instead of test examples -----------------------------------------------------------------------
#
# What settings are chosen on, so that a test stays a test.

#: Fraction of each client's training examples that is held out by default.
HELD = 0.2


def held_out(data: FederatedData, held: float, cut: int) -> FederatedData:
    """As `parted`, or a `UserError` where nothing is held out."""
    kept = parted(data, held, cut)
    if not len(kept.test.y) and (by := data.holdout) is not None and by.kind == "group":
        raise UserError(
            f"The training rows of each client of '{data.name}' are of one '{by.column}', so no group can be held out to "
            "choose settings on; choose another column for --holdout."
        )
    if not len(kept.test.y):
        raise UserError(
            f"No client of '{data.name}' has two training examples, so none can be held out to choose settings on; "
            "give them more."
        )
    return kept


def parted(data: FederatedData, held: float, cut: int) -> FederatedData:
    """The data with a part of the training examples instead of the test examples, which are left out.

    Args:
        data: Its calibration examples, if any, are left out too.
        held: How large a part of each client's; of one with a single training example none.
        cut: Which part: another number, another part.
    """
    kept = replace(data, calibration=None).hold_out(held, cut)
    assert kept.calibration is not None
    name = f"{data.name}, {100 * held:g} % of training examples held out"
    return replace(kept, name=name, seed=cut, test=kept.calibration, calibration=None)
