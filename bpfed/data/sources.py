"""Sources: pooled labelled datasets, before they are distributed over clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bpfed.data.cifar import CIFAR10
from bpfed.data.download import DownloadError
from bpfed.data.folder import DataDir, destination, roots
from bpfed.data.idx import FMNIST, MNIST
from bpfed.data.natural import NATURAL, Natural
from bpfed.errors import UserError, unknown


@dataclass(frozen=True)
class Source:
    """A pooled labelled dataset.

    Inputs stay bytes until they are asked for, which needs a quarter of the memory.

    Attributes:
        name: What it is called.
        raw: Inputs as they were stored, ``[E, ...]`` uint8.
        y: Classes, ``[E]`` int64.
        half: Half of the largest raw value, so that inputs run from -1 to 1.
        labels: A word for each class.
    """

    name: str
    raw: np.ndarray
    y: np.ndarray
    half: float
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.y)

    def inputs(self, rows: np.ndarray) -> Tensor:
        """Inputs of these rows ``[R]``, scaled to -1 .. 1, ``[R, ...]`` float32."""
        return torch.from_numpy(self.raw[rows]).to(torch.float32).div_(self.half).sub_(1.0)

    @property
    def x(self) -> Tensor:
        """All inputs, ``[E, ...]`` float32."""
        return self.inputs(np.arange(len(self)))


class Files(Protocol):
    """How the files of a source are found, read and fetched."""

    @property
    def home(self) -> str: ...
    @property
    def wanted(self) -> str: ...
    def find(self, root: Path) -> Path | None: ...
    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]: ...
    def fetch(self, root: Path) -> None: ...


class Digits:
    """scikit-learn's digits, which come with it: nothing to find and nothing to fetch."""

    home = ""
    wanted = ""

    def find(self, root: Path) -> Path | None:
        """Always there."""
        return root

    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]:
        """Images ``[1797, 64]`` uint8 (0 to 16) and labels ``[1797]`` int64."""
        from sklearn.datasets import load_digits  # here, since importing scikit-learn takes a second

        x, y = load_digits(return_X_y=True)
        return x.astype(np.uint8), y.astype(np.int64)

    def fetch(self, root: Path) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Entry:
    """What is known of a source without opening it."""

    examples: int
    clients: int
    half: float
    labels: tuple[str, ...]
    sentence: str
    files: Files


_NUMERALS = tuple("0123456789")
_CLOTHES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

SOURCES: dict[str, Entry] = {
    "digits": Entry(1797, 10, 8.0, _NUMERALS, "Handwritten digits, 8 x 8 grey, built in.", Digits()),
    "mnist": Entry(70_000, 10, 127.5, _NUMERALS, "Handwritten digits, 28 x 28 grey.", MNIST),
    "fmnist": Entry(70_000, 10, 127.5, _CLOTHES, "Fashion-MNIST, pieces of clothing, 28 x 28 grey.", FMNIST),
    "cifar10": Entry(60_000, 20, 127.5, _THINGS, "Small photographs of ten kinds of things, 32 x 32 colour.", CIFAR10),
}


def entry(name: str) -> Entry | Natural:
    """What is known of this source, or a `UserError` with the nearest name."""
    if name not in SOURCES and name not in NATURAL:
        raise unknown("dataset", name, (*SOURCES, *NATURAL))
    return SOURCES[name] if name in SOURCES else NATURAL[name]


def locate(name: str, data_dir: DataDir = None) -> Path | None:
    """The folder or archive that holds the files of this source, or None where they are not present."""
    files = entry(name).files
    return next((place for root in roots(data_dir) if (place := files.find(root)) is not None), None)


def obtain(name: str, data_dir: DataDir = None, download: bool = True) -> Path:
    """The folder or archive that holds the files of this source, downloaded if need be and allowed."""
    place, files, reason = locate(name, data_dir), entry(name).files, ""
    target = destination(data_dir)
    if place is None and download:
        try:
            files.fetch(target)
            place = files.find(target)
        except DownloadError as error:
            reason = f" and {error}"
    if place is None:
        searched = " or ".join(f"'{root}'" for root in roots(data_dir))
        raise UserError(
            f"Dataset '{name}' is not in {searched}{reason}; put {files.wanted} into '{target / files.home}', "
            "or set --data-dir or BPFED_DATA to the folder that has them."
        )
    return place


def read(name: str, data_dir: DataDir = None, download: bool = True) -> Source:
    """Read a source whole, downloading its files first if they are missing and that is allowed."""
    known = SOURCES[name]
    raw, y = known.files.read(obtain(name, data_dir, download))
    return Source(name, raw, y, known.half, known.labels)
