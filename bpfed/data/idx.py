"""MNIST and Fashion-MNIST: four files of the idx format, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from bpfed.data.download import Remote, download
from bpfed.errors import UserError

PARTS = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
NAMES = tuple(name for part in PARTS for name in part)


@dataclass(frozen=True)
class IdxFiles:
    """The files of one dataset of 28x28 grey images.

    Attributes:
        home: Folder below the data folder where downloads of it belong.
        folders: Folders below the data folder where its files may lie.
        remote: Where to fetch each file of `NAMES`, gzipped.
        foreign: SHA-256 of the unzipped training labels of the dataset whose files bear the same names as these.
    """

    home: str
    folders: tuple[str, ...]
    remote: dict[str, Remote]
    foreign: str

    @property
    def wanted(self) -> str:
        """The files that have to be there, in words."""
        return ", ".join(f"{name}.gz" for name in NAMES)

    def find(self, root: Path) -> Path | None:
        """The folder below ``root`` that holds all four files of this dataset, if one does."""
        for folder in (root / f for f in self.folders):
            if all(_file(folder, name) for name in NAMES) and not self._is_foreign(folder):
                return folder
        return None

    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]:
        """Training and test files pooled: images ``[E, 1, 28, 28]`` uint8 and labels ``[E]`` int64."""
        pairs = [tuple(_present(place, name) for name in part) for part in PARTS]
        images, labels = [], []
        for image_file, label_file in pairs:
            images.append(read_idx(image_file, dims=3))
            labels.append(read_idx(label_file, dims=1))
            if images[-1].shape[1:] != (28, 28):
                raise UserError(
                    f"'{image_file}' contains images of {images[-1].shape[1:]}, not 28 x 28; fetch it again."
                )
            if len(images[-1]) != len(labels[-1]):
                raise UserError(
                    f"'{image_file}' has {len(images[-1])} images, but '{label_file.name}' has {len(labels[-1])} "
                    "labels; fetch both again."
                )
            if labels[-1].max(initial=0) > 9:
                raise UserError(f"'{label_file}' is damaged (a label above 9); delete it and fetch it again.")
        return np.concatenate(images)[:, None], np.concatenate(labels).astype(np.int64)

    def fetch(self, root: Path) -> None:
        """Download what is missing into its home below ``root``."""
        folder = root / self.home
        for name, remote in self.remote.items():
            if not _file(folder, name):
                download(remote, folder / f"{name}.gz")

    def _is_foreign(self, folder: Path) -> bool:
        # MNIST and Fashion-MNIST use the same file names; taking one for the other would go unnoticed for long.
        try:
            with _open(_present(folder, "train-labels-idx1-ubyte")) as file:
                return hashlib.sha256(file.read()).hexdigest() == self.foreign
        except (OSError, EOFError, zlib.error):
            return False  # damaged: reading will say so


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an idx file of bytes with this many dimensions, ``[n]`` or ``[n, rows, columns]`` uint8.

    Raises:
        UserError: The file is cut short, too long, or not such a file at all.
    """
    try:
        with _open(path) as file:
            magic = file.read(4)
            if magic != bytes((0, 0, 8, dims)):
                raise _damaged(path, f"it does not start like an idx file of {dims} dimension(s)")
            shape = struct.unpack(f">{dims}I", file.read(4 * dims))
            data = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise _damaged(path, str(error)) from error
    if len(data) != math.prod(shape):
        raise _damaged(path, "its length is not what its header says")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"'{path}' is damaged ({why.rstrip('.')}); delete it and fetch it again.")


def _file(folder: Path, name: str) -> Path | None:
    # The unzipped one first: where both are (as torchvision leaves them) it is the quicker to read.
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _present(folder: Path, name: str) -> Path:
    path = _file(folder, name)
    if path is None:
        raise UserError(f"'{folder / name}.gz' is missing; fetch it again.")
    return path


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _remotes(base: str, files: dict[str, tuple[int, str]]) -> dict[str, Remote]:
    return {name: Remote(f"{base}/{name}.gz", size, sha256) for name, (size, sha256) in files.items()}


_MNIST_TRAIN_LABELS = "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
_FMNIST_TRAIN_LABELS = "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"

MNIST = IdxFiles(
    home="MNIST/raw",
    folders=("MNIST/raw", "MNIST", "mnist/raw", "mnist", "raw", ""),
    remote=_remotes(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            "train-labels-idx1-ubyte": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            "t10k-images-idx3-ubyte": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            "t10k-labels-idx1-ubyte": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        },
    ),
    foreign=_FMNIST_TRAIN_LABELS,
)

FMNIST = IdxFiles(
    home="FashionMNIST/raw",
    folders=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fmnist/raw", "fmnist", "raw", ""),
    remote=_remotes(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            "train-labels-idx1-ubyte": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            "t10k-images-idx3-ubyte": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            "t10k-labels-idx1-ubyte": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        },
    ),
    foreign=_MNIST_TRAIN_LABELS,
)
