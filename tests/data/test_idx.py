"""MNIST-like files: what was written is read, and a damaged file is named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from data_files import idx_bytes, write_idx

from bpfed._util.errors import UserError
from bpfed.data.sources import pooled
from bpfed.data.sources.images import FMNIST, MNIST, read_idx


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", ""])
@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_was_written(tmp_path: Path, folder: str, zipped: bool) -> None:
    images, labels = write_idx(tmp_path / folder, zipped=zipped)
    source = pooled.read("mnist", tmp_path, download=False)
    assert source.x.shape == (80, 1, 28, 28)
    np.testing.assert_allclose(source.x[:, 0].numpy(), (images / 255 - 0.5) / 0.5, atol=1e-6)
    np.testing.assert_array_equal(source.y, labels)


def test_three_files_of_four_are_not_found(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    assert MNIST.find(tmp_path) is None


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: gzip.compress(b"\0\0\x0d\3" + d[4:]), "does not start like an idx file"),
        (lambda d: gzip.compress(_cut(d)), "length is not what its header says"),
        (lambda d: gzip.compress(d + b"more"), "length is not what its header says"),
        (lambda d: _cut(gzip.compress(d)), "damaged"),
        (lambda d: gzip.compress(d)[:-8] + bytes(8), "damaged"),
        (lambda d: gzip.compress(d[:7]), "damaged"),
        (lambda d: b"not gzip at all", "damaged"),
        (lambda d: b"", "damaged"),
    ],
)
def test_damage_is_one_sentence_that_names_the_file(tmp_path: Path, damage, why: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(idx_bytes(np.zeros((3, 28, 28), np.uint8))))
    with pytest.raises(UserError, match=why) as caught:
        read_idx(path, dims=3)
    assert str(path) in str(caught.value)


def test_images_and_labels_must_be_equally_many(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(59, np.uint8))))
    with pytest.raises(UserError, match=r"60 images, but .* 59 labels"):
        MNIST.read(tmp_path)


def test_a_label_above_nine_is_damage(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.full(60, 10, np.uint8))))
    with pytest.raises(UserError, match="label above 9"):
        MNIST.read(tmp_path)


def test_fashion_is_not_taken_for_mnist(real_data: str) -> None:
    # The two bear the same file names, so the folder itself does not say which it is.
    fashion = Path(real_data) / "FashionMNIST/raw"
    assert FMNIST.find(fashion) == fashion
    assert MNIST.find(fashion) is None


@pytest.mark.parametrize(("name", "smallest"), [("mnist", 6313), ("fmnist", 7000)])
def test_the_real_files(real_data: str, name: str, smallest: int) -> None:
    source = pooled.read(name, real_data, download=False)
    assert source.raw.shape == (70_000, 1, 28, 28)
    assert np.bincount(source.y).min() == smallest
