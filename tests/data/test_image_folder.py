"""Folders of PNG and JPEG images: the same federation as the same pixels in NPZ files, and what is refused."""

from __future__ import annotations

import csv
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from PIL import Image

from bpfed import data
from bpfed._util.errors import UserError
from bpfed.data import FederatedData

CLASSES = ("coat", "dress")


def pixels(seed: int, shape: tuple[int, ...] = (12, 8, 8)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(shape[0]) % 2
    x = rng.integers(0, 128, shape) + (y * 100).reshape(-1, *[1] * (len(shape) - 1))
    return x.astype(np.uint8), y


def by_class(folder: Path, x: np.ndarray, y: np.ndarray, ending: str = "png") -> None:
    for k, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{k:03d}.{ending}")


def folders(root: Path) -> Path:
    for k, client in enumerate("ab"):
        by_class(root / client, *pixels(k))
    return root


def sorted_rows(loaded: FederatedData) -> list[tuple[int, tuple[float, ...]]]:
    rows = [*zip(loaded.train.y, loaded.train.x, strict=True), *zip(loaded.test.y, loaded.test.x, strict=True)]
    return sorted((int(y), tuple(x.flatten().tolist())) for y, x in rows)


def test_the_same_pixels_as_png_and_npz_are_the_same_examples(tmp_path: Path) -> None:
    images = folders(tmp_path / "png")
    (tmp_path / "npz").mkdir()
    for k, client in enumerate("ab"):
        x, y = pixels(k)
        order = np.argsort(y, kind="stable")  # as the files are: class by class
        np.savez(tmp_path / "npz" / f"{client}.npz", x=x[order], y=np.array(CLASSES)[y[order]])
    one = data.load(f"folder:{images}", standardise="none")
    two = data.load(f"folder:{tmp_path / 'npz'}", standardise="none")
    assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(one.test.y, two.test.y)
    assert one.labels == CLASSES
    assert one.notes[0] == "The inputs are greyscale images of 8 x 8 pixels."


def test_a_table_of_labels_says_the_same_as_folders(tmp_path: Path) -> None:
    images = folders(tmp_path / "png")
    for k, client in enumerate("ab"):
        x, y = pixels(k)
        (tmp_path / "csv" / client).mkdir(parents=True)
        rows = [(f"{i:03d}", CLASSES[label]) for i, label in enumerate(y)]
        for (name, _), image in zip(rows, x, strict=True):
            Image.fromarray(image).save(tmp_path / "csv" / client / f"{name}.png")
        with (tmp_path / "csv" / client / "labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("id", "label"), *reversed(rows)])
    one, two = (data.load(f"folder:{f}", standardise="none") for f in (images, tmp_path / "csv"))
    assert sorted_rows(one) == sorted_rows(two)


def test_one_colour_image_makes_all_colour_images(tmp_path: Path) -> None:
    images = folders(tmp_path / "png")
    x, y = pixels(2, (12, 8, 8, 3))
    by_class(images / "c", x, y, "jpg")
    loaded = data.load(f"folder:{images}", standardise="none")
    assert loaded.input_shape == (3, 8, 8)
    assert loaded.notes[0] == "The inputs are colour images (RGB) of 8 x 8 pixels."
    grey = loaded.train.client(0)[0]
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_images_are_resized_when_asked(tmp_path: Path) -> None:
    images = folders(tmp_path / "png")
    x, y = pixels(2, (12, 16, 12))
    by_class(images / "c", x, y)
    with pytest.raises(UserError, match=r"different kinds of inputs: .* images of"):
        data.load(f"folder:{images}")
    assert data.load(f"folder:{images}", image_size="6x4").input_shape == (1, 6, 4)
    for wrong in ("6", "0x4", "6x4x3", "axb"):
        with pytest.raises(UserError, match="must be HEIGHTxWIDTH in pixels"):
            data.load(f"folder:{images}", image_size=wrong)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in (*chunks, (b"IEND", b"")))


def bomb(side: int) -> bytes:
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return png((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))))


def deep() -> bytes:
    head = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    return png((b"IHDR", head), (b"IDAT", zlib.compress((b"\0" + b"\x01\x02" * 24) * 8)))


def saved(mode: str, value: Any, **info: Any) -> Callable[[Path], None]:
    return lambda file: Image.new(mode, (8, 8), value).save(file, **info)


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no image": ("coat/x.png", lambda f: f.write_bytes(b"junk"), r"x.png' is not a PNG or JPEG image that can be read"),
    "cut short": (
        "coat/x.png",
        lambda f: f.write_bytes((f.parent / "000.png").read_bytes()[:60]),
        r"x.png' is not a PNG or JPEG image that can be read",
    ),
    "a bomb": ("coat/x.png", lambda f: f.write_bytes(bomb(60_000)), r"x.png' .*decompression bomb"),
    "a smaller one": ("coat/x.png", lambda f: f.write_bytes(bomb(9_999)), r"would unpack to 9999 x 9999 pixels"),
    "another size": ("coat/x.png", lambda f: Image.new("L", (9, 5)).save(f), "5x9 pixels.*--image-size 8x8"),
    "see-through": ("coat/x.png", saved("RGBA", (9, 9, 9, 40)), "x.png' is transparent in places"),
    "16 bits": ("coat/x.png", saved("I;16", 999), "which bytes cannot hold"),
    "16 bits in colour": ("coat/x.png", lambda f: f.write_bytes(deep()), "RGB;16B, which bytes cannot hold"),
    "a link to a folder": ("hat", lambda f: f.symlink_to(f.parent / "coat"), "hat' is a link to a folder"),
    "a link to nothing": ("coat/x.png", lambda f: f.symlink_to("nowhere.png"), "x.png' is no file that can be read"),
    "a pipe": ("coat/x.png", os.mkfifo, "x.png' is no file that can be read"),
    "orders to a terminal": (
        "coat/=1\x1b[2J.png",
        saved("L", 3),
        r"'coat/=1\\x1b\[2J.png' in .* is a name that is not text",
    ),
    "a class that is no text": ("\udcff/x.png", saved("L", 3), r"'\\udcff/x.png' in .* is a name that is not text"),
    "of another kind": ("coat/x.gif", saved("L", 3), "x.gif' is not a PNG or JPEG image; move it"),
    "in no class": ("x.png", saved("L", 3), "x.png' is in no folder of a class"),
    "too deep": ("coat/old/x.png", saved("L", 3), "deeper than one folder for each class"),
    "a table with gaps": ("labels.csv", lambda f: f.write_text("f,label\ncoat/000.png,coat\n"), "does not list"),
    "a table of others": ("labels.csv", lambda f: f.write_text("f,label\nz.png,coat\n"), "has names of the images"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_used_is_named(what: str, tmp_path: Path) -> None:
    name, write, sentence = BROKEN[what]
    file = folders(tmp_path / "png") / "a" / name
    file.parent.mkdir(exist_ok=True)
    write(file)
    with pytest.raises(UserError, match=sentence):
        data.load(f"folder:{tmp_path / 'png'}")


def test_images_without_a_folder_for_each_client_are_refused(tmp_path: Path) -> None:
    folders(tmp_path)
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    with pytest.raises(UserError, match="belongs to no client; use a folder for each client"):
        data.load(f"folder:{tmp_path}")


def test_a_run_on_images_and_its_predictions(command: Command, tmp_path: Path) -> None:
    folders(tmp_path / "png")
    shown = command("data", "inspect", "folder:png")
    assert "greyscale images of 8 x 8 pixels" in shown.out
    run = ("run", "--data", "folder:png", "--method", "fedavg", "--rounds", "2", "--epochs", "1", "--eval-draws", "1")
    assert command(*run, "--image-size", "8x8", "--compile", "off", "--out", "r", "--quiet").code == 0
    new = tmp_path / "new"
    new.mkdir()
    for k, image in enumerate(pixels(9, (3, 12, 12))[0]):
        Image.fromarray(image).save(new / f"n{k}.png")
    folder = command("predict", "r", "--client", "a", "--input", "new").out.splitlines()
    assert [line.split(",")[0] for line in folder] == ["file", "n0.png", "n1.png", "n2.png"]
    one = command("predict", "r", "--client", "a", "--input", "new/n1.png").out.splitlines()
    assert one == [folder[0], folder[2]]
    Image.new("RGB", (8, 8)).save(new / "n3.png")
    assert (
        "is a colour image, but training was on greyscale"
        in command("predict", "r", "--client", "a", "--input", "new").err
    )
