"""Who stands where in tables and figures, and under which name."""

from __future__ import annotations

from collections.abc import Iterable

from bpfed.comparison.candidates import title
from experiments import published

__all__ = ["CALIBRATED", "DATASETS", "ORDER", "cell_title", "ordered", "place", "title"]

#: Ours, the paper's baselines in the paper's order, then what the paper does not have.
ORDER = (
    "bpfed-recipe",
    "bpfed-recipe+calibrated",
    "bpfed-population",
    "bpfed-population+calibrated",
    "bpfed",
    "bpfed+ivon",
    *(name for name in published.METHODS if name != "bpfed"),
    "fedper+temperature",
    "fedper+laplace",
    "pfedvem",
    "ditto",
    "fedbabu",
    "fedavg-ft",
    "local",
)


#: What ends the name of a method whose calibration temperature was learnt: a row of tables, but no line of its own, since it is the
#: same model.
CALIBRATED = "+calibrated"


def ordered(names: Iterable[str]) -> list[str]:
    """Names in the order of the tables, unknown ones last."""
    return sorted(set(names), key=place)


def place(name: str) -> tuple[int, str]:
    """Where a name stands; a variant that is not in the order, after its method, and unknown ones last."""
    known = name if name in ORDER else name.partition("+")[0]
    return ORDER.index(known) if known in ORDER else len(ORDER), name


def cell_title(cell: str) -> str:
    """A cell's name for people: ``cifar10-small`` is CIFAR-10 small."""
    data, _, size = cell.partition("-")
    return f"{DATASETS.get(data, data)} {size}".strip()


#: The datasets of the six cells.
DATASETS = {"mnist": "MNIST", "fmnist": "FMNIST", "cifar10": "CIFAR-10"}
