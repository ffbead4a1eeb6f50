"""CIFAR-10: the binary version (folder or archive), and the folder of pickles that torchvision leaves."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bpfed.data.download import DownloadError, Remote, download
from bpfed.data.pickled import read_pickled
from bpfed.errors import UserError
from bpfed.files import whole

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
