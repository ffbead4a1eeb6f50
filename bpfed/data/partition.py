"""Partitions: ways to distribute the examples of a dataset over clients.

A partition gives every example at most one owner, so no example can be with two clients. All of them are functions of
the classes ``y`` ``[E]``, the number of clients and a random generator, and give owners ``[E]``, -1 for nobody.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bpfed.data import holders
from bpfed.errors import UserError, unknown

NOBODY = -1
#: What data with its own clients has for a partition; it cannot be asked of other data.
OWN = "natural"


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
        name: One of `KINDS`.
        number: Labels or shards per client, or alpha; None for a kind that has no number.
    """

    name: str
    number: float | None = None

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
        # Classes that do not occur are nobody's; only those that do are counted.
        y = np.unique(y, return_inverse=True)[1]
        number = self.number if self.number is not None else 0
        match self.name:
            case "groups":
                return share(y, holders.groups(clients, int(y.max()) + 1, int(number)), rng)
            case "random":
                return share(y, holders.at_random(clients, np.bincount(y), int(number), rng), rng)
            case "dirichlet":
                return dirichlet(y, clients, number, rng)
            case "shards":
                return shards(y, clients, int(number), rng)
            case _:
                return iid(y, clients, rng)


def parse_partition(text: str) -> Partition:
    """Read a partition such as ``"groups"``, ``"random:3"``, ``"dirichlet:0.3"``, ``"shards:2"`` or ``"iid"``."""
    name, colon, number = text.strip().partition(":")
    if name == OWN:
        raise UserError(f"'{OWN}' is only for data with its own clients; choose another partition: {', '.join(KINDS)}.")
    if name not in KINDS:
        raise unknown("partition", name, KINDS)
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
