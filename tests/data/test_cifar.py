"""CIFAR-10 in its three layouts, and pickles that would run something."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from data_files import BATCHES, cifar_batches, write_tar

from bpfed._util.errors import UserError
from bpfed.data.sources import pooled
from bpfed.data.sources.images import ARCHIVE


def python2_pickle(batch: np.ndarray) -> bytes:
    """The opcodes that Python 2 wrote for ``{"data": array, "labels": list}``: byte strings and old numpy names."""

    def string(data: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(data)) + data

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    labels, pixels = batch[:, 0].tolist(), np.ascontiguousarray(batch[:, 1:])
    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + integer(0) + integer(1) + b"tR"
    dtype += b"(" + integer(3) + string(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t" + string(b"b") + b"tR"
    shape = b"(" + b"".join(integer(n) for n in pixels.shape) + b"t"
    array += b"(" + integer(1) + shape + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(integer(label) for label in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def python3_pickle(batch: np.ndarray) -> bytes:
    return pickle.dumps({"data": batch[:, 1:], "labels": batch[:, 0].tolist(), "filenames": ["a.png"]}, protocol=4)


def column_major_pickle(batch: np.ndarray) -> bytes:
    return pickle.dumps({"data": np.asfortranarray(batch[:, 1:]), "labels": batch[:, 0].tolist()}, protocol=3)


def write(layout: str, root: Path) -> None:
    batches = cifar_batches()
    if layout == "archive":
        members = {f"cifar-10-batches-bin/{b}.bin": batches[b].tobytes() for b in reversed(BATCHES)}
        write_tar(root / ARCHIVE, members | {"cifar-10-batches-bin/readme.html": b"hello"})
        return
    if layout == "folder":
        folder, suffix, dump = root / "cifar-10-batches-bin", ".bin", np.ndarray.tobytes
    else:
        folder, suffix = root / "cifar-10-batches-py", ""
        dump = {"python2": python2_pickle, "python3": python3_pickle, "columns": column_major_pickle}[layout]
    folder.mkdir()
    for name, batch in batches.items():
        (folder / f"{name}{suffix}").write_bytes(dump(batch))


@pytest.mark.parametrize("layout", ["folder", "archive", "python2", "python3", "columns"])
def test_every_layout_gives_the_same_images(tmp_path: Path, layout: str) -> None:
    write(layout, tmp_path)
    source = pooled.read("cifar10", tmp_path, download=False)
    records = np.concatenate([cifar_batches()[b] for b in BATCHES])
    np.testing.assert_array_equal(source.y, records[:, 0])
    expected = (records[:, 1:].reshape(-1, 3, 32, 32) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(source.x.numpy(), expected, atol=1e-6)


class Attack:
    def __reduce__(self) -> tuple:
        return os.mkdir, (self.target,)

    def __init__(self, target: str) -> None:
        self.target = target


@pytest.mark.parametrize("hidden", ["whole", "in the labels"])
def test_a_pickle_that_runs_something_is_refused(tmp_path: Path, hidden: str) -> None:
    write("python3", tmp_path)
    attack = Attack(str(tmp_path / "ran"))
    batch = attack if hidden == "whole" else {"data": np.zeros((1, 3072), np.uint8), "labels": [attack]}
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(pickle.dumps(batch))
    with pytest.raises(UserError, match=r"data_batch_3' asks to run .*mkdir"):
        pooled.read("cifar10", tmp_path, download=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": b"x", "labels": [1]}),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [11]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.float32), "labels": [1]}),
        python3_pickle(cifar_batches()["test_batch"])[:5000],
        # A state set on the class itself would change how the next file is read.
        b"cnumpy._core.multiarray\n_reconstruct\nN}X\x05\x00\x00\x00arrayK\x01s\x86b.",
    ],
)
def test_a_damaged_pickle_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    write("python3", tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(content)
    with pytest.raises(UserError, match="test_batch' is damaged"):
        pooled.read("cifar10", tmp_path, download=False)


@pytest.mark.parametrize("content", [b"", b"\1" * 3072, b"\x0a" + bytes(3072)])
def test_a_damaged_binary_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    write("folder", tmp_path)
    (tmp_path / "cifar-10-batches-bin/data_batch_2.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"data_batch_2.bin' is damaged"):
        pooled.read("cifar10", tmp_path, download=False)


def test_a_cut_archive_is_one_sentence(tmp_path: Path) -> None:
    write("archive", tmp_path)
    path = tmp_path / ARCHIVE
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(UserError, match="damaged"):
        pooled.read("cifar10", tmp_path, download=False)


def test_an_archive_without_a_batch_is_one_sentence(tmp_path: Path) -> None:
    write_tar(tmp_path / ARCHIVE, {"cifar-10-batches-bin/data_batch_1.bin": bytes(3073)})
    with pytest.raises(UserError, match=r"no valid data_batch_2.bin"):
        pooled.read("cifar10", tmp_path, download=False)
