"""MNIST and Fashion-MNIST: four files of the idx format, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle
import struct
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from bpfed._util.errors import UserError
from bpfed._util.files import DownloadError, Remote, download, whole

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


# --- A CIFAR batch saved as a pickle, read without running anything that the pickle asks for --------------------------


class _Bytes:
    """Stands in for numpy's dtype: remembers that it was asked for, and for what."""

    def __init__(self, kind: str = "", *_: object) -> None:
        self.kind = kind

    def __setstate__(self, _: object) -> None:
        """Byte order and the like mean nothing for single bytes."""


class _Array:
    """Stands in for numpy's array: keeps the shape and the bytes it was saved with."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """The array of bytes that was saved."""
        _, shape, dtype, column_major, data = self.state
        if dtype.kind not in ("u1", "|u1"):
            raise ValueError("its pixels are not bytes")
        raw = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if column_major else "C")


# What a saved array of bytes names, and what it gets. A pickle can call whatever it can name, so it gets our
# stand-ins and not numpy's own functions; anything else it names is refused.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "dtype"): _Bytes,
    ("numpy", "ndarray"): "ndarray",
}


class _Unpickler(pickle.Unpickler):
    where: Path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise UserError(
                f"'{self.where}' asks to run '{module}.{name}', which no CIFAR-10 file does; "
                "delete it and fetch the dataset again from a place you trust."
            )
        return _ADMITTED[module, name]


def read_pickled(path: Path, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch: pixels ``[n, pixels]`` uint8 and labels ``[n]`` int64, from 0 to 9.

    Raises:
        UserError: The file is damaged, or holds more than arrays, lists and text.
    """
    try:
        with path.open("rb") as file:
            # latin1 takes the byte strings of Python 2, which wrote the originals, one to one.
            unpickler = _Unpickler(file, encoding="latin1")
            unpickler.where = path
            batch = unpickler.load()
        data, labels = batch["data"].array(), np.asarray(batch["labels"], dtype=np.int64)
        if data.shape != (len(labels), pixels) or labels.ndim != 1 or not set(labels.tolist()) <= set(range(10)):
            raise ValueError("its pixels and labels do not belong together")
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way at all
        why = str(error).strip().rstrip(".") or type(error).__name__
        raise UserError(f"'{path}' is damaged ({why}); delete it and fetch the dataset again.") from error
    return data, labels


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------
#
# The binary version (folder or archive), and the folder of pickles that torchvision leaves.

BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
MEMBER = 10_000 * RECORD  # bytes of one .bin file of the original
SHA256 = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
ARCHIVE = "cifar-10-binary.tar.gz"
# The archive's own hash is left open because each file inside it is checked.
REMOTE = Remote(f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}", 170_052_171, None)
FOLDERS = ("", "CIFAR10", "cifar10", "cifar-10", "CIFAR-10")


@dataclass(frozen=True)
class CifarFiles:
    """The files of CIFAR-10."""

    home: str = "cifar-10-batches-bin"
    remote: Remote = REMOTE

    @property
    def wanted(self) -> str:
        """The files that have to be there, in words."""
        return f"data_batch_1.bin to data_batch_5.bin and test_batch.bin (all in {ARCHIVE})"

    def find(self, root: Path) -> Path | None:
        """The folder or archive below ``root`` that holds the dataset, if one does."""
        for base in (root / f for f in FOLDERS):
            for folder in (base / self.home, base):
                if all((folder / f"{b}.bin").is_file() for b in BATCHES):
                    return folder
            if (base / ARCHIVE).is_file():
                return base / ARCHIVE
            for folder in (base / "cifar-10-batches-py", base):
                if all((folder / b).is_file() for b in BATCHES):
                    return folder
        return None

    def read(self, place: Path) -> tuple[np.ndarray, np.ndarray]:
        """Training and test batches pooled: images ``[E, 3, 32, 32]`` uint8 and labels ``[E]`` int64."""
        if place.is_file():
            members = _members(place)
            batches = [_records(members[b], f"{b}.bin in {place}") for b in BATCHES]
        elif (place / f"{BATCHES[0]}.bin").is_file():
            batches = [_records(_bytes(place / f"{b}.bin"), f"{place / b}.bin") for b in BATCHES]
        else:
            batches = [read_pickled(place / b, PIXELS) for b in BATCHES]
        images = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
        return images, np.concatenate([labels for _, labels in batches]).astype(np.int64)

    def fetch(self, root: Path) -> None:
        """Download the archive and unpack it into its home below ``root``: all six files, or none."""
        folder = root / self.home
        if all((folder / f"{b}.bin").is_file() for b in BATCHES):
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
                download(self.remote, Path(part) / ARCHIVE)
                members = _members(Path(part) / ARCHIVE)
            for name, data in members.items():
                if hashlib.sha256(data).hexdigest() != SHA256[name]:
                    raise DownloadError(f"{name}.bin in {self.remote.url} is not the original file")
            for name, data in members.items():
                with whole(folder / f"{name}.bin") as file:
                    file.write(data)
        except UserError as error:
            raise DownloadError(f"{self.remote.url} sent a damaged archive") from error
        except OSError as error:
            raise DownloadError(f"{folder} cannot be written ({error.strerror or error})") from error


def _members(archive: Path) -> dict[str, bytes]:
    # Members are read by name into memory; no path that the archive names is ever written to.
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rsplit("/", 1)[-1].removesuffix(".bin")
                if name in BATCHES and member.name.endswith(".bin") and member.isreg() and member.size <= MEMBER:
                    file = tar.extractfile(member)
                    found[name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{archive}' is damaged ({error}); delete it and fetch it again.") from error
    missing = [b for b in BATCHES if b not in found]
    if missing:
        raise UserError(f"'{archive}' is damaged (it has no valid {missing[0]}.bin); delete it and fetch it again.")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be read ({error.strerror}); fix its permissions or fetch it again."
        ) from error


def _records(data: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    if not data or len(data) % RECORD:
        raise UserError(f"'{where}' is damaged (not whole records of {RECORD} bytes); delete it and fetch it again.")
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    if rows[:, 0].max() > 9:
        raise UserError(f"'{where}' is damaged (a label above 9); delete it and fetch it again.")
    return rows[:, 1:], rows[:, 0]


CIFAR10 = CifarFiles()
