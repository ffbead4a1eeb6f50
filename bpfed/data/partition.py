"""Partitions: ways to distribute the examples of a dataset over clients; and the cells of the paper's tables.

A partition gives every example at most one owner, so no example can be with two clients. All of them are functions of
the classes ``y`` ``[E]``, the number of clients and a random generator, and give owners ``[E]``, -1 for nobody. So is
any function of a user's own, given to `bpfed.data.load` or by another package under a name; if it has a fourth argument
``number``, that is what stands after the colon.
"""

from __future__ import annotations

import heapq
import inspect
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError, unknown
from bpfed.config import registry

# --- Holders ----------------------------------------------------------------------------------------------------------
#
# Which clients hold which labels, as a table ``[N, C]`` of yes and no.

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


NOBODY = -1
#: What data with its own clients has for a partition; it cannot be asked of other data.
OWN = "natural"
#: How the name of a partition begins that is a function of a user's own.
FUNCTION = "function"


class Kind(NamedTuple):
    """A kind of partition.

    Attributes:
        number: The type of its number; None: it has none.
        default: The number it has when none is given.
        sentence: What it does, for ``bpfed data list``.
    """

    number: type[int] | type[float] | None
    default: float | None
    sentence: str


KINDS: dict[str, Kind] = {
    "groups": Kind(
        int, 5, "The paper's label groups: client u holds the labels k*u to k*u + k - 1, starting over after the last."
    ),
    "random": Kind(int, 5, "k labels per client, drawn at random; every label has equally many clients."),
    "dirichlet": Kind(
        float, 0.3, "Each class distributed in Dirichlet(alpha) proportions; the smaller alpha, the stronger the skew."
    ),
    "shards": Kind(int, 2, "Examples sorted by label and cut into shards, k of them to each client."),
    "iid": Kind(None, None, "Examples distributed evenly, whatever their label."),
}


@dataclass(frozen=True)
class Partition:
    """A partition as it was asked for.

    Attributes:
        name: One of `KINDS`, or the name of a function.
        number: Labels or shards per client, or alpha; None for a kind that has no number.
        function: What distributes the examples, if it is none of `KINDS`: of ``y``, clients and generator to owners.
    """

    name: str
    number: float | None = None
    function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        # The paper's two are known by their bare names.
        if self.number is None or (self.name in ("groups", "random") and self.number == 5):
            return self.name
        number = int(self.number) if self.number == int(self.number) else self.number
        return f"{self.name}:{number}"  # in full, so that it can be read back

    def owners(self, y: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client of each example, ``[E]`` int64, `NOBODY` where no client holds the label; all clients get some."""
        if clients < 1:
            raise UserError(f"A federation cannot have {clients} clients; ask for at least 1.")
        if clients > len(y):
            raise UserError(f"{clients} clients cannot share {len(y)} examples; ask for at most {len(y)} clients.")
        if self.function is not None:
            more = {} if self.number is None else {"number": self.number}
            return self._checked(self.function(y.copy(), clients, rng, **more), len(y), clients)
        # Classes that do not occur are nobody's; only those that do are counted.
        y = np.unique(y, return_inverse=True)[1]
        number = self.number if self.number is not None else 0
        match self.name:
            case "groups":
                return share(y, groups(clients, int(y.max()) + 1, int(number)), rng)
            case "random":
                return share(y, at_random(clients, np.bincount(y), int(number), rng), rng)
            case "dirichlet":
                return dirichlet(y, clients, number, rng)
            case "shards":
                return shards(y, clients, int(number), rng)
            case _:
                return iid(y, clients, rng)

    def _checked(self, found: Any, examples: int, clients: int) -> np.ndarray:
        """What a function of somebody else's has made, if it can be owners."""
        owners = np.asarray(found)
        if owners.shape != (examples,) or owners.dtype.kind not in "iu":
            why = f"gives {owners.dtype} of shape {list(owners.shape)}, but must give a whole number for each of {examples} examples"
        elif owners.min() < NOBODY or owners.max() >= clients:
            why = f"gives client {owners.min() if owners.min() < NOBODY else owners.max()}, but must give {NOBODY} (nobody) to {clients - 1}"
        elif len(without := np.setdiff1d(np.arange(clients), owners)):
            why = f"gives client {without[0]} no example, but must give each of {clients} clients some"
        else:
            return owners.astype(np.int64)
        raise UserError(f"Partition '{self}' {why}; correct the function.")


def parse_partition(text: str | Callable[..., Any]) -> Partition:
    """Read a partition such as ``"groups"``, ``"random:3"``, ``"dirichlet:0.3"``, ``"shards:2"`` or ``"iid"``.

    It may be a function too, or the name that another package has given to one.
    """
    if not isinstance(text, str):
        if not callable(text):
            raise UserError(f"The partition is {text!r}, but must be a text such as 'iid', or a function.")
        where = f"{getattr(text, '__module__', '')}.{getattr(text, '__qualname__', type(text).__qualname__)}"
        return Partition(f"{FUNCTION}:{where}", function=text)
    name, colon, number = text.strip().partition(":")
    if name == FUNCTION:
        raise UserError(
            f"The partition of this data is the Python function {number}; load the data with "
            "bpfed.data.load(..., partition=THE FUNCTION) and pass it to bpfed.fit."
        )
    if name == OWN:
        raise UserError(f"'{OWN}' is only for data with its own clients; choose another partition: {', '.join(KINDS)}.")
    if name not in registry.PARTITIONS:
        raise unknown("partition", name, registry.PARTITIONS)
    if name not in KINDS:
        return _of_plugin(name, number if colon else None)
    registry.PARTITIONS.refuse_clash(name)
    kind = KINDS[name]
    if kind.number is None:
        if colon:
            raise UserError(f"Partition '{name}' takes no number; write '{name}' instead of '{text}'.")
        return Partition(name)
    if not colon:
        return Partition(name, kind.default)
    whole = kind.number is int
    try:
        value = float(int(number) if whole else float(number))
    except (ValueError, OverflowError):
        value = math.nan
    if not (value >= 1 if whole else value > 0) or math.isinf(value):
        need = "a whole number of at least 1" if whole else "a number above 0"
        raise UserError(f"Partition '{text}' needs {need} after the colon, such as '{name}:{kind.default:g}'.")
    return Partition(name, value)


def _of_plugin(name: str, number: str | None) -> Partition:
    """The partition that another package has under this name."""
    function = registry.PARTITIONS.load(name)
    if not callable(function):
        raise registry.PARTITIONS.unfit(name, "is not a function of classes, clients and a random generator")
    if number is None:
        return Partition(name, function=function)
    if "number" not in inspect.signature(function).parameters:
        raise UserError(f"Partition '{name}' takes no number; write '{name}' instead of '{name}:{number}'.")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"Partition '{name}:{number}' needs a number after the colon, such as '{name}:2'.")
    return Partition(name, value, function)


def share(y: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Share each class evenly among the clients that hold it (``held`` is ``[N, C]`` bool)."""
    owners = np.full(len(y), NOBODY)
    for label in range(held.shape[1]):
        who, members = np.flatnonzero(held[:, label]), np.flatnonzero(y == label)
        if len(who) > len(members):
            raise UserError(
                f"A label with {len(members)} examples cannot be given to {len(who)} clients; "
                "use fewer clients or fewer labels per client."
            )
        if len(who):
            owners[rng.permutation(members)] = np.resize(rng.permutation(who), len(members))
    return owners


def dirichlet(y: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Cut each class in Dirichlet(alpha) proportions; then those without any get one example of the largest."""
    owners = np.full(len(y), NOBODY)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        cuts = np.rint(_proportions(clients, alpha, rng).cumsum() * len(members)).astype(np.int64)
        cuts[-1] = len(members)
        owners[members] = np.repeat(np.arange(clients), np.diff(cuts, prepend=0))
    return _fill(owners, clients, rng)


def shards(y: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Sort by class, cut into N k shards of equal size, and give each client k of them."""
    if clients * k > len(y):
        raise UserError(
            f"Partition 'shards:{k}' cuts {clients * k} shards for {clients} clients, but there are {len(y)} examples; "
            "use fewer clients or shards."
        )
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    shard = np.arange(len(y)) * (clients * k) // len(y)
    owners = np.empty(len(y), dtype=np.int64)
    owners[order] = rng.permutation(np.repeat(np.arange(clients), k))[shard]
    return owners


def iid(y: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deal everything out evenly."""
    return rng.permutation(np.arange(len(y)) % clients)


def _proportions(clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """One draw of Dirichlet(alpha, ..., alpha), ``[N]``.

    Gammas are drawn as logarithms, Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), since with a small alpha every one of
    them would underflow to 0 and leave nothing to divide by.
    """
    alpha = min(max(alpha, 1e-300), 1e12)  # beyond these the result is the same, but the arithmetic is not
    uniform = np.maximum(rng.random(clients), np.finfo(float).tiny)
    log = np.log(rng.standard_gamma(alpha + 1, clients)) + np.log(uniform) / alpha
    weight = np.exp(log - log.max())
    return weight / weight.sum()


def _fill(owners: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Move one example at a time from whoever has most to someone who has none; ends after at most N moves."""
    order = rng.permutation(len(owners))
    order = order[np.argsort(owners[order], kind="stable")]
    sizes = np.bincount(owners, minlength=clients)
    last = sizes.cumsum() - 1
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    owners = owners.copy()
    for empty in np.flatnonzero(sizes == 0):
        size, giver = heap[0]
        heapq.heapreplace(heap, (size + 1, giver))
        owners[order[last[giver]]] = empty
        last[giver] -= 1
    return owners


# --- Ordering ---------------------------------------------------------------------------------------------------------
#
# From one owner per example to the rows of each client, end to end, and the random streams behind it.


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


# --- Cells: the six datasets of the paper's tables, with an exact number of examples per client and class -------------


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
        held = groups(cell.clients, len(counts), cell.labels)
    else:
        # Every label can serve all clients here, so all labels get equally many, which is what fits.
        held = at_random(cell.clients, np.full(len(counts), cell.clients), cell.labels, rng)
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
