"""Downloads: whole and checked, or nothing and one sentence."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_files import cifar_batches, write_idx, write_tar

from bpfed._util.errors import UserError
from bpfed._util.files import DownloadError, Remote, cache, download, whole
from bpfed.data import fetch, load
from bpfed.data.sources import images, pooled
from bpfed.data.sources.images import ARCHIVE, NAMES

Serve = Callable[[Path], str]


def remote(path: Path, address: str) -> Remote:
    data = path.read_bytes()
    return Remote(f"{address}/{path.name}", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def mnist_server(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST is now what lies in this folder, and is fetched from there."""
    folder = tmp_path / "server"
    write_idx(folder)
    address = serve(folder)
    known = pooled.SOURCES["mnist"]
    remotes = {name: remote(folder / f"{name}.gz", address) for name in NAMES}
    monkeypatch.setitem(pooled.SOURCES, "mnist", replace(known, files=replace(known.files, remote=remotes)))
    return folder


@pytest.fixture
def cifar_server(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 is now a small archive in this folder, and is fetched from there."""
    folder = tmp_path / "server"
    folder.mkdir()
    batches = {name: batch.tobytes() for name, batch in cifar_batches().items()}
    write_tar(folder / ARCHIVE, {f"cifar-10-batches-bin/{name}.bin": data for name, data in batches.items()})
    monkeypatch.setattr(images, "SHA256", {name: hashlib.sha256(data).hexdigest() for name, data in batches.items()})
    files = replace(images.CIFAR10, remote=remote(folder / ARCHIVE, serve(folder))._replace(sha256=None))
    monkeypatch.setitem(pooled.SOURCES, "cifar10", replace(pooled.SOURCES["cifar10"], files=files))
    return folder


def files_below(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_fetched_once_into_the_cache_and_then_found(mnist_server: Path) -> None:
    place = fetch("mnist")
    assert place == cache() / "MNIST/raw"
    assert sorted(p.name for p in files_below(cache())) == sorted(f"{n}.gz" for n in NAMES)
    for file in mnist_server.iterdir():
        file.unlink()
    assert len(load("mnist", clients=2, download=False).train.x) == 40


def test_a_named_folder_is_where_it_is_put(mnist_server: Path, tmp_path: Path) -> None:
    assert fetch("mnist", tmp_path / "mine") == tmp_path / "mine/MNIST/raw"
    assert files_below(cache()) == []


def test_only_what_is_missing_is_fetched(mnist_server: Path, tmp_path: Path) -> None:
    fetch("mnist", tmp_path / "mine")
    (tmp_path / "mine/MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    for name in NAMES[:3]:
        (mnist_server / f"{name}.gz").unlink()
    assert fetch("mnist", tmp_path / "mine") == tmp_path / "mine/MNIST/raw"


def test_other_bytes_than_the_original_leave_nothing(mnist_server: Path) -> None:
    file = mnist_server / "train-images-idx3-ubyte.gz"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="sent different bytes from the original") as caught:
        load("mnist")
    assert files_below(cache()) == []
    for word in ("train-images-idx3-ubyte.gz", str(cache() / "MNIST/raw"), "--data-dir", "BPFED_DATA"):
        assert word in str(caught.value)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x" * 100_000])
def test_shorter_or_longer_leaves_nothing(tmp_path: Path, serve: Serve, change: Callable[[bytes], bytes]) -> None:
    (tmp_path / "server").mkdir()
    file = tmp_path / "server/a.bin"
    file.write_bytes(b"0123456789" * 1000)
    expected = remote(file, serve(tmp_path / "server"))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DownloadError, match="different bytes"):
        download(expected._replace(sha256=None), tmp_path / "out/a.bin")
    assert files_below(tmp_path / "out") == []


def test_no_answer_is_one_sentence(mnist_server: Path) -> None:
    for file in mnist_server.iterdir():
        file.unlink()
    with pytest.raises(UserError, match="404"):
        load("mnist")


def test_an_old_file_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with whole(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_loses_the_bytes_leaves_nothing(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server/a.bin"
    file.parent.mkdir()
    file.write_bytes(b"0123456789")

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DownloadError, match=r"could not be fetched \(.*No space left"):
        download(remote(file, serve(tmp_path / "server")), tmp_path / "out/a.bin")
    assert files_below(tmp_path / "out") == []


def test_a_folder_that_cannot_be_written_is_one_sentence(mnist_server: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"could not be fetched \(.*taken"):
        fetch("mnist", tmp_path / "taken")


def test_without_download_nothing_is_asked_of_the_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("asked the net"))
    with pytest.raises(UserError, match="Dataset 'fmnist' is not in"):
        load("fmnist", download=False)


def test_the_archive_is_unpacked(cifar_server: Path) -> None:
    place = fetch("cifar10")
    assert place == cache() / "cifar-10-batches-bin"
    assert len(files_below(cache())) == 6
    raw, _ = pooled.SOURCES["cifar10"].files.read(place)
    np.testing.assert_array_equal(raw[:4].reshape(4, -1), cifar_batches()["data_batch_1"][:, 1:])


def test_an_archive_with_one_wrong_member_leaves_nothing(cifar_server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(images.SHA256, "test_batch", "0" * 64)
    with pytest.raises(UserError, match=r"test_batch.bin in .* is not the original"):
        fetch("cifar10-small")
    assert files_below(cache()) == []


def test_built_in_data_needs_no_fetching() -> None:
    assert fetch("digits") is None
