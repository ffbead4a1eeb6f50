"""Small datasets in the real formats, for the tests to write."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

BATCHES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(
    folder: Path, seed: int = 0, zipped: bool = True, train: int = 60, test: int = 20
) -> tuple[np.ndarray, ...]:
    """Write four idx files and return their pooled images and labels."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = [], []
    for part, number in (("train", train), ("t10k", test)):
        images.append(rng.integers(0, 256, (number, 28, 28), dtype=np.uint8))
        labels.append((np.arange(number) % 10).astype(np.uint8))
        for name, array in ((f"{part}-images-idx3-ubyte", images[-1]), (f"{part}-labels-idx1-ubyte", labels[-1])):
            data = idx_bytes(array)
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(data) if zipped else data)
    return np.concatenate(images), np.concatenate(labels)


def cifar_batches(number: int = 4) -> dict[str, np.ndarray]:
    """Six batches of records, ``[n, 3073]`` uint8: a label, then the pixels."""
    rng = np.random.default_rng(1)
    batches = {}
    for k, name in enumerate(BATCHES):
        batches[name] = rng.integers(0, 256, (number, 3073), dtype=np.uint8)
        batches[name][:, 0] = (np.arange(number) + k) % 10
    return batches


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
