"""Image folders: PNG and JPEG files of one client, in a folder for each class or beside a CSV file of labels."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed.data.tabular.npz import LIMIT_NAME, unpacked_limit
from bpfed.data.tabular.table import ArrayOptions, Categorical, Column, ReadOptions, Table, TableFormat, check_columns

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg")
LABELS = (".csv", ".tsv")
#: The column of the classes that folders are named by, and that of the files' names.
LABEL, FILE = "label", "file"
#: Pixels that one image may have: a small file can claim any number.
MOST_PIXELS = 64_000_000
#: Files that systems leave in folders of images.
_LITTER = ("thumbs.db", "desktop.ini")
#: Control characters, and what stands for bytes that are no UTF-8.
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Modes of Pillow that are shades of grey, and those that are read at all.
_GREY = ("1", "L", "LA")
_READ = (*_GREY, "P", "RGB", "RGBA", "CMYK", "YCbCr")


def is_image(path: Path) -> bool:
    """Whether a file's ending is that of an image."""
    return path.suffix.lower() in ENDINGS


def is_image_folder(path: Path) -> bool:
    """Whether a folder has images in it, or in one of its own folders."""
    return path.is_dir() and any(is_image(p) for pattern in ("*", "*/*") for p in path.glob(pattern) if p.is_file())


def read_images(path: Path, asked: ReadOptions) -> Table:
    """Read the images of a folder, or one image.

    Their classes are the names of the folders that they are in, or what a CSV or TSV file in the folder says: a column
    with the name of each file, and others. Without either, as for new images, there are no classes.
    """
    files, columns = _listed(path, asked)
    images = _decoded(files, asked.arrays, path)
    return Table(str(path), len(files), columns, images)


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The names of the files, in the order of the rows."""
    check_columns(path, names, (FILE,))
    return {FILE: file_names(path)}


def file_names(path: Path) -> list[str]:
    """The image of each row, as it is called within the folder."""
    return [str(file.relative_to(path)) if file != path else path.name for file in _images(path)[0]]


def _listed(path: Path, asked: ReadOptions) -> tuple[list[Path], dict[str, Column]]:
    """The images in order, and the columns that say what they show."""
    files, tables = _images(path)
    if not files:
        raise UserError(f"'{path}' has no PNG or JPEG images; put some there.")
    if len(tables) > 1:
        raise UserError(f"'{path}' has {quoted([t.name for t in tables])}; leave the one with the labels there.")
    if tables:
        return files, _labels(tables[0], path, files, asked)
    deep = next((file for file in files if len(file.relative_to(path).parts) > 2), None)
    if deep is not None:
        raise UserError(
            f"'{deep}' is deeper than one folder for each class; move it up, or list it in a CSV of labels."
        )
    folders = [file.relative_to(path).parts[0] if file.parent != path and file != path else "" for file in files]
    if not any(folders):
        return files, {}
    if not all(folders):
        file = files[folders.index("")]
        raise UserError(f"'{file}' is in no folder of a class, as other images of '{path}' are; move it into one.")
    return files, {LABEL: Categorical.of(folders)}


def _images(path: Path) -> tuple[list[Path], list[Path]]:
    """The images below a folder in order, and tables of labels that are directly in it; anything else is refused."""
    if not path.is_dir():
        return [path], []
    files: list[Path] = []
    tables: list[Path] = []
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path).parts
        hidden = any(part.startswith(".") for part in inside) or file.name.lower() in _LITTER
        if file.is_dir() and file.is_symlink() and not hidden:
            raise UserError(f"'{file}' is a link to a folder, which is not followed; put the folder itself there.")
        if hidden or file.suffix.lower() == ".md" or file.is_dir():
            continue
        if not file.is_file():
            raise UserError(f"'{file}' is no file that can be read, or a link to none; remove it.")
        if _NO_TEXT.search("/".join(inside)):
            raise UserError(f"{quoted(['/'.join(inside)])} in '{path}' is a name that is not text; rename it.")
        if is_image(file):
            files.append(file)
        elif len(inside) == 1 and file.suffix.lower() in LABELS:
            tables.append(file)
        else:
            raise UserError(f"'{file}' is not a PNG or JPEG image; move it elsewhere.")
    return files, tables


def _labels(table: Path, path: Path, files: Sequence[Path], asked: ReadOptions) -> dict[str, Column]:
    """The columns of a table of labels, in the order of the images."""
    from bpfed.data.tabular.table import read_table

    names = [file.relative_to(path).as_posix() for file in files]
    text = read_table(table)
    text = read_table(table, list(text.columns))  # as words: names of files may be numbers, such as 0001
    by_name = {key: i for i, name in enumerate(names) for key in (name, str(Path(name).with_suffix("")))}
    found = {c: [by_name.get(word.strip()) for word in text.words(c)] for c in text.columns}
    known = {column: sum(place is not None for place in places) for column, places in found.items()}
    column = max(known, key=lambda c: known[c])
    if not known[column]:
        raise UserError(f"No column of '{table}' has names of the images in '{path}', such as '{names[0]}'; add one.")
    places = found[column]
    if None in places:
        word = text.words(column)[places.index(None)]
        raise UserError(f"'{table}' lists '{word}', which is not in '{path}'; remove that row or add the image.")
    order = {place: row for row, place in enumerate(places)}
    if len(order) < len(places):
        twice = next(names[p] for row, p in enumerate(places) if p is not None and order[p] != row)
        raise UserError(f"'{table}' lists '{twice}' twice; remove one of the rows.")
    if len(order) < len(names):
        lost = next(name for place, name in enumerate(names) if place not in order)
        raise UserError(f"'{table}' does not list '{lost}'; add it, or move the image elsewhere.")
    read = read_table(table, asked.words, ignore=[*asked.ignore, column], missing=())
    rows = np.array([order[place] for place in range(len(names))])
    return dict(read.without([column]).take(rows).columns)


def _decoded(files: Sequence[Path], asked: ArrayOptions, path: Path) -> np.ndarray:
    """All images of these files; see `stacked`."""
    return stacked([(f"'{file}'", file) for file in files], asked, f"'{path}'")


def stacked(given: Sequence[tuple[str, Path | Image]], asked: ArrayOptions, where: str) -> np.ndarray:
    """All images, ``[n, c, h, w]`` bytes: one channel if all are shades of grey, else red, green and blue.

    Args:
        given: What each is called in errors, and its file or the image itself.
        asked: How they are read.
        where: What they are of.
    """
    if asked.kind == "sequence":
        raise UserError(f"{where} has images, so --input is 'image' there; omit it.")
    colour = asked.channels == 3
    made: list[np.ndarray] = []
    first: tuple[int, ...] = ()
    most, held = unpacked_limit() * 2**30, 0
    for what, source in given:
        image, grey = _one(source, asked.size) if isinstance(source, Path) else _pixels(source, what, asked.size)
        colour = colour or not grey
        if not made:
            first = image.shape[:2]
        elif image.shape[:2] != first:
            before = given[0][1]
            raise UserError(
                f"{what} has {_size(image.shape)} pixels, but {quoted([before.name]) if isinstance(before, Path) else 'the first'} "
                f"has {_size(first)} (height x width); make them alike, or have all resized with --image-size "
                f"{_size(first)}."
            )
        held += image.nbytes
        if held * (3 if colour and image.ndim == 2 else 1) > most:
            raise UserError(
                f"The images of {where} take more than {most / 2**30:g} GiB; use a smaller --image-size, or allow more "
                f"with the environment variable {LIMIT_NAME}."
            )
        made.append(image)
    if asked.channels == 1 and colour:
        what = given[next(k for k, image in enumerate(made) if image.ndim == 3)][0]
        raise UserError(f"{what} is a colour image, but training was on greyscale images; convert it.")
    if not colour:
        return np.stack(made)[:, None]
    return np.stack([in_colour(i[None])[0] if i.ndim == 2 else i.transpose(2, 0, 1) for i in made])


def in_colour(grey: np.ndarray) -> np.ndarray:
    """Greyscale images ``[..., h, w]`` with three channels, ``[..., 3, h, w]``."""
    return np.ascontiguousarray(np.broadcast_to(grey[..., None, :, :], (*grey.shape[:-2], 3, *grey.shape[-2:])))


def _one(file: Path, size: tuple[int, int] | None) -> tuple[np.ndarray, bool]:
    """An image as bytes, ``[h, w]`` or ``[h, w, 3]``, and whether it is shades of grey."""
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=("PNG", "JPEG")) as opened:
            wide, high = opened.size
            if wide * high > MOST_PIXELS:
                raise UserError(
                    f"'{file}' would unpack to {wide} x {high} pixels, more than the {MOST_PIXELS // 10**6} million that "
                    "are read; make it smaller."
                )
            if getattr(opened, "n_frames", 1) > 1:
                raise UserError(f"'{file}' is an animation of several images; save one of them.")
            return _pixels(opened, f"'{file}'", size)
    except (
        OSError,
        SyntaxError,
        ValueError,
        struct.error,
        zlib.error,
        EOFError,
        Image.DecompressionBombError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # it could not even be opened
        why = " ".join(str(error).replace(f"'{file}'", "it").split())
        raise UserError(
            f"'{file}' is not a PNG or JPEG image that can be read ({why}); replace or remove it."
        ) from error


def _pixels(opened: Image, what: str, size: tuple[int, int] | None) -> tuple[np.ndarray, bool]:
    """An image of Pillow as `_one` gives it."""
    from PIL import Image, ImageOps

    deep = next((str(tile[3]) for tile in getattr(opened, "tile", ()) if ";16" in str(tile[3])), None)
    if opened.mode not in _READ or deep:
        raise UserError(
            f"{what} has pixels of type {deep or opened.mode}, which bytes cannot hold; save it with 8 bits per channel, "
            "or all images as an NPZ file."
        )
    grey = opened.mode in _GREY
    image = _opaque(ImageOps.exif_transpose(opened), what).convert("L" if grey else "RGB")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image), grey


def _opaque(image: Image, what: str) -> Image:
    """The image, unless one can see through a part of it: what is behind is nobody's guess."""
    if image.mode in ("LA", "RGBA") or "transparency" in image.info:
        seen = image.convert("RGBA").getchannel("A").getextrema()
        if seen[0] != 255:
            raise UserError(f"{what} is transparent in places; save it with a background.")
    return image


def _size(shape: Sequence[int]) -> str:
    return f"{shape[0]}x{shape[1]}"


FORMAT = TableFormat(read_images, read_cells)
