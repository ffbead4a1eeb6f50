"""NPZ and NPY: numpy arrays, read without trusting the file: no pickles, and no more memory than it admits to."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from bpfed._util.errors import UserError
from bpfed.data.tabular.table import Categorical, Column, ReadOptions, Table, TableFormat, check_columns

#: GiB that the arrays of one file may have unpacked, and the environment variable that says otherwise.
LIMIT, LIMIT_NAME = 2.0, "BPFED_NPZ_GIB"
INPUTS, TARGET = "x", "y"
#: Channels that a sequence may have, and how many times as many steps, to be recognised as one.
MOST_CHANNELS, LONGER = 16, 4


def read_npz(path: Path, asked: ReadOptions) -> Table:
    """Read arrays: ``x`` with one entry per row (numbers or images) beside ``y``, or one array ``[n]`` per column.

    Whole numbers in columns of words are words.
    """
    return _table(read_arrays(path), path, asked)


def read_npy(path: Path, asked: ReadOptions) -> Table:
    """Read one array, the inputs ``x``: new rows, whose targets are not known."""
    return _table({INPUTS: _npy(path)}, path, asked)


def read_folder(path: Path, asked: ReadOptions) -> Table:
    """Read the arrays of a folder, a file ``NAME.npy`` each, as those of an NPZ file."""
    return _table(_folder(path), path, asked)


def is_array_folder(path: Path) -> bool:
    """Whether a folder holds inputs as ``x.npy``."""
    return (path / f"{INPUTS}.npy").is_file()


def _table(arrays: dict[str, np.ndarray], path: Path, asked: ReadOptions) -> Table:
    if not arrays:
        raise UserError(f"'{path}' contains no arrays; give it '{INPUTS}' and '{TARGET}'.")
    inputs = arrays.pop(INPUTS, None)
    lengths = {name: array.shape[:1] for name, array in arrays.items()}
    if inputs is not None:
        lengths[INPUTS] = inputs.shape[:1]
    if () in lengths.values() or len(set(lengths.values())) > 1:
        shown = ", ".join(f"'{name}' {n[0] if n else 'one value'}" for name, n in lengths.items())
        raise UserError(f"The arrays of '{path}' differ in length ({shown}); give every row one entry in each.")
    ((rows,),) = set(lengths.values())
    columns = {name: _column(array, name, path, name in asked.words) for name, array in arrays.items()}
    images = None
    if inputs is not None and inputs.ndim <= 2:
        inputs = inputs.reshape(rows, -1) if rows else inputs.reshape(0, 1)
        width = len(str(inputs.shape[1] - 1))
        parts = {f"{INPUTS}{k:0{width}d}": inputs[:, k] for k in range(inputs.shape[1])}
        clash = sorted(parts.keys() & columns.keys())
        if clash:
            raise UserError(
                f"'{path}' has an array '{clash[0]}', which is also the name of a column of '{INPUTS}'; rename it."
            )
        columns |= {name: _column(part, name, path) for name, part in parts.items()}
    elif inputs is not None:
        images = _images(inputs, path, asked.arrays.kind)
    return Table(str(path), rows, columns, images)


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The entries of these arrays ``[n]`` as text."""
    read = _folder(path) if path.is_dir() else {} if path.suffix.lower() == ".npy" else read_arrays(path)
    arrays = {name: array for name, array in read.items() if array.ndim == 1}
    check_columns(path, names, arrays)
    return {name: [str(entry) for entry in arrays[name].tolist()] for name in names}


def _column(array: np.ndarray, name: str, path: Path, words: bool = False) -> Column:
    if array.ndim != 1:
        raise UserError(f"'{name}' in '{path}' has shape {array.shape}; only '{INPUTS}' may have more than one axis.")
    if array.dtype.kind == "b":
        return Categorical.of(["true" if v else "false" for v in array.tolist()])
    if words and array.dtype.kind in "iu":
        return Categorical.of([str(v) for v in array.tolist()])
    return Categorical.of(array.tolist()) if array.dtype.kind == "U" else array.astype(np.float64)


def _images(x: np.ndarray, path: Path, kind: str | None) -> np.ndarray:
    """As ``[n, c, h, w]``; channels may be last, or first where only that can be. Sequences are ``[n, c, 1, t]``."""
    if kind == "sequence" and x.ndim != 3:
        raise UserError(f"'{INPUTS}' in '{path}' has shape {x.shape}, but sequences must be [n, steps, channels].")
    if x.ndim == 3 and (kind or array_kind(x)) == "sequence":
        x = x.transpose(0, 2, 1)[:, :, None]
    elif x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] <= 4:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] > 4:
        raise UserError(
            f"'{INPUTS}' in '{path}' has shape {x.shape}; images must be [n, height, width] or [n, height, width, "
            "channels] with at most 4 channels."
        )
    if x.dtype.kind == "U" or not x[0:1].size:
        raise UserError(
            f"'{INPUTS}' in '{path}' must be images or sequences of numbers, but has shape {x.shape} and type {x.dtype}."
        )
    return np.ascontiguousarray(x)


def array_kind(x: np.ndarray) -> str:
    """What an array of three axes most likely is, ``"image"`` or ``"sequence"``.

    Bytes are images. Other numbers are sequences if their last axis is short and the one before at least four times as
    long, as of 128 steps in 9 channels.
    """
    _, steps, channels = x.shape
    long = channels <= MOST_CHANNELS and steps >= LONGER * channels and steps > 1
    return "sequence" if x.dtype != np.uint8 and long else "image"


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an NPZ file by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            size = sum(info.file_size for info in infos)
            if size > (most := unpacked_limit()) * 2**30:
                raise UserError(
                    f"'{path}' would unpack to {size / 2**30:.1f} GiB, but at most {most:g} are read; split it, or allow "
                    f"more with the environment variable {LIMIT_NAME}={math.ceil(size / 2**30)}."
                )
            found: dict[str, np.ndarray] = {}
            for info in infos:
                name = info.filename.removesuffix(".npy")
                if name in found:
                    raise UserError(f"'{path}' has two arrays '{name}'; rename or remove one.")
                if name != info.filename:
                    found[name] = _array(archive, info, name, path)
            return found
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"'{path}' is not a valid NPZ file ({error}); save it again with numpy.savez.") from error


def unpacked_limit() -> float:
    """GiB that one file may have unpacked."""
    said = os.environ.get(LIMIT_NAME, "")
    try:
        found = float(said or LIMIT)
    except ValueError:
        found = math.nan
    if not 0.0 < found < math.inf:
        raise UserError(f"The environment variable {LIMIT_NAME} is {said!r}, but must be a number of GiB, such as 8.")
    return found


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, path: Path) -> np.ndarray:
    with archive.open(info) as file:
        return _parsed(file, info.file_size, name, path)


def _npy(path: Path) -> np.ndarray:
    """The array of one file."""
    size = path.stat().st_size
    if size > (most := unpacked_limit()) * 2**30:
        raise UserError(
            f"'{path}' has {size / 2**30:.1f} GiB, but at most {most:g} are read; split it, or allow more with the "
            f"environment variable {LIMIT_NAME}={math.ceil(size / 2**30)}."
        )
    try:
        with path.open("rb") as file:
            return _parsed(file, size, path.stem, path)
    except (ValueError, EOFError) as error:
        raise UserError(f"'{path}' is not a valid NPY file ({error}); save it again with numpy.save.") from error


def _folder(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a folder by name."""
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith(".")]
    if strange := next((file for file in files if file.suffix != ".npy"), None):
        raise UserError(f"'{strange}' is not a .npy file, as the others of that folder are; move it elsewhere.")
    return {file.stem: _npy(file) for file in files}


def _parsed(file: IO[bytes], size: int, name: str, path: Path) -> np.ndarray:
    """The array in a file that is open, of so many bytes."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise UserError(
            f"'{name}' in '{path}' contains pickled objects, which can run code; save it as numbers or text."
        )
    if dtype.kind not in "biufU" or dtype.fields is not None:
        raise UserError(f"'{name}' in '{path}' has type {dtype}; save it as numbers or text.")
    # What the header promises must be there, or a small file could ask for any amount of memory.
    if math.prod(shape) * dtype.itemsize != size - file.tell():
        raise UserError(f"'{name}' in '{path}' is not as long as its header says; save it again with numpy.savez.")
    flat = np.frombuffer(file.read(), dtype)
    return cast(np.ndarray, flat.reshape(shape, order="F" if fortran else "C"))


FORMAT = TableFormat(read_npz, read_cells)
NPY = TableFormat(read_npy, read_cells)
FOLDER = TableFormat(read_folder, read_cells)
