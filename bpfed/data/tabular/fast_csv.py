"""Fast CSV: large plain files by the reader of pyarrow, where that is installed, with the same result.

Whatever could be read in two ways is left to `bpfed.data.tabular.csvfile`: quotes, separators other than the comma, numbers
among words. So is whatever is wrong, since it says what and where.
"""

from __future__ import annotations

import csv as other
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bpfed.data.tabular.table import MISSING, UNKNOWN, Categorical, Column

#: Bytes from which on a file is read so.
LARGE = 4_000_000
#: Bytes that are looked at together.
BLOCK = 1 << 24
#: Cells that mean "not known" in columns of numbers; other spellings of them are left to the other reader.
_GAPS = sorted({spelt for word in MISSING for spelt in (word, word.upper(), word.capitalize())} | {"NaN", "<Na>"})


def read_columns(path: Path, header: Sequence[str], numbers: Sequence[bool]) -> list[Column] | None:
    """The columns of a file that is separated by commas; None: it is for the other reader.

    Args:
        path: The file.
        header: The names of its columns, in its first line.
        numbers: Whether each column is numbers in its first rows.
    """
    if path.stat().st_size < LARGE:
        return None
    try:
        import pyarrow as pa
        from pyarrow import csv
    except ImportError:
        return None
    if not _plain(path):
        return None
    names = [str(k) for k in range(len(header))]
    words = pa.dictionary(pa.int32(), pa.string())
    types = {name: pa.float64() if number else words for name, number in zip(names, numbers, strict=True)}
    try:
        table = csv.read_csv(
            path,
            csv.ReadOptions(column_names=names, skip_rows=1),
            csv.ParseOptions(quote_char=False),
            csv.ConvertOptions(column_types=types, null_values=_GAPS, strings_can_be_null=False),
        )
    except (pa.ArrowException, OSError):
        return None
    found: list[Column] = []
    for k, number in enumerate(numbers):
        column = table.column(k)
        table = table.set_column(k, names[k], pa.nulls(table.num_rows))  # which frees what is no longer needed
        found.append(column.to_numpy() if number else _words(column.combine_chunks()))
    return found


def _plain(path: Path) -> bool:
    """Whether a file begins with a name, has no quotes and no NUL, ends all lines alike, and has none that is very long.

    A cell that the other reader takes for a quote that was not closed could be in such a line.
    """
    ends, both, first, last = 0, 0, b"", b""
    returns, begun = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            first = first or block[:1]
            if b'"' in block or b"\0" in block:
                return False
            returns += block.count(b"\r")
            ends += block.count(b"\n")
            both += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
            places = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            if np.diff(places, prepend=-begun, append=len(block)).max() > other.field_size_limit():
                return False
            begun = len(block) - int(places[-1]) if len(places) else begun + len(block)
            last = block[-1:]
    return bool(first.strip()) and returns in (0, ends) and returns == both


def _words(column: object) -> Categorical:
    """An array of words with their dictionary, which `Categorical.of` would have made of the same cells."""
    cells = column.dictionary.to_pylist()  # type: ignore[attr-defined]
    codes = column.indices.to_numpy().astype(np.int64)  # type: ignore[attr-defined]
    levels = Categorical.of(cells)
    made = np.append(levels.codes, UNKNOWN)[codes]
    return Categorical(made, levels.levels)
