"""A CIFAR batch saved as a pickle, read without running anything that the pickle asks for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bpfed.errors import UserError


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
