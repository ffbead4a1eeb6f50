"""NPZ: numpy arrays in a zip file, read without trusting it: no pickles, and no more memory than the file admits to."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from bpfed._util.errors import UserError
from bpfed.data.tabular.table import Categorical, Column, ReadOptions, Table, TableFormat, check_columns

#: GiB that the arrays of one file may have unpacked, and the environment variable that says otherwise.
LIMIT, LIMIT_NAME = 2.0, "BPFED_NPZ_GIB"
INPUTS, TARGET = "x", "y"


def read_npz(path: Path, asked: ReadOptions) -> Table:
    """Read arrays: ``x`` with one entry per row (numbers or images) beside ``y``, or one array ``[n]`` per column.

    Whole numbers in columns of words are words.
    """
    arrays = read_arrays(path)
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
        images = _images(inputs, path)
    return Table(str(path), rows, columns, images)


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The entries of these arrays ``[n]`` as text."""
    arrays = {name: array for name, array in read_arrays(path).items() if array.ndim == 1}
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


def _images(x: np.ndarray, path: Path) -> np.ndarray:
    """As ``[n, c, h, w]``; channels may be last, or first where only that can be."""
    if x.ndim == 3:
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
            f"'{INPUTS}' in '{path}' must be images of numbers, but has shape {x.shape} and type {x.dtype}."
        )
    return np.ascontiguousarray(x)


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
        if math.prod(shape) * dtype.itemsize != info.file_size - file.tell():
            raise UserError(f"'{name}' in '{path}' is not as long as its header says; save it again with numpy.savez.")
        flat = np.frombuffer(file.read(), dtype)
    return cast(np.ndarray, flat.reshape(shape, order="F" if fortran else "C"))


FORMAT = TableFormat(read_npz, read_cells)
