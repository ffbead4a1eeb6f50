"""Parquet, read by pyarrow, which is an extra of this package."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed.data.tabular.table import Categorical, Column, Table, check_columns

#: What pandas calls an index that has no name.
INDEX = "__index_level_"


def read_parquet(
    path: Path,
    ignore: Sequence[str] = (),
    used: Iterable[str] | None = None,
    words: Collection[str] = (),
) -> Table:
    """Read a Parquet file of numbers, words and truth values; nothing nested, no dates, but where these are not used.

    Columns to ``ignore``, and all but those ``used`` (None: all are), may be of any type; they are read as text. Whole
    numbers in columns of ``words`` are words.
    """
    read = _read(path)
    names = [name for name in read.column_names if not name.startswith(INDEX)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"'{path}' has two columns '{twice[0]}'; rename or remove one.")
    left = set(ignore) if used is None else set(names) - set(used)
    found = {name: _column(read[name], name in left, name in words) for name in names}
    if strange := [name for name, column in found.items() if column is None]:
        what = f"Column '{strange[0]}' of '{path}' has type {read[strange[0]].type}"
        if len(strange) > 1:
            what = f"Columns {quoted(strange)} of '{path}' have types such as {read[strange[0]].type}"
        it, kept = ("it", "is") if len(strange) == 1 else ("them", "are")
        raise UserError(
            f"{what}, which {kept} not read; convert {it} to numbers or text, or leave {it} out with --ignore "
            f"'{','.join((*ignore, *strange))}'."
        )
    return Table(str(path), read.num_rows, {name: column for name, column in found.items() if column is not None})


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The values of these columns as text, empty where there is none."""
    read = _read(path)
    check_columns(path, names, read.column_names)
    return {name: ["" if value is None else str(value) for value in read[name].to_pylist()] for name in names}


def _read(path: Path) -> Any:
    """The file as pyarrow's table."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"'{path}' needs pyarrow, which is not installed; run pip install 'bpfed[parquet]', or save the file as "
            "CSV."
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        # pyarrow's own errors can have several lines, and OSErrors without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"'{path}' is not a valid Parquet file ({str(error).splitlines()[0].rstrip('.')}); save it again."
        ) from error


def _column(column: Any, any_type: bool, words: bool) -> Column | None:
    """A column; None where its type is not read, unless any type is to be, as text; whole numbers may be ``words``."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_boolean(kind) or (words and pa.types.is_integer(kind)):
        return Categorical.of(["" if v is None else str(v) for v in column.to_pylist()])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Categorical.of(["" if v is None else v for v in column.to_pylist()])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = column.cast(kind).cast(pa.float64(), safe=False)
        return np.asarray(values.to_numpy(), dtype=np.float64)
    return Categorical.of(["" if v is None else str(v) for v in column.to_pylist()]) if any_type else None
