"""Parquet, also in parts, and Feather: files of typed columns, read by pyarrow, which is an extra of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed.data.tabular.table import Categorical, Column, ReadOptions, Table, TableFormat, as_text, check_columns

#: What pandas calls an index that has no name.
INDEX = "__index_level_"
#: Bytes at the end of an Arrow stream. Without them it may be cut short between two parts.
END = bytes([255, 255, 255, 255, 0, 0, 0, 0])


def read_parquet(path: Path, asked: ReadOptions) -> Table:
    """Read a Parquet file, or a folder of its parts: numbers, words and truth values; nothing nested, no dates.

    Columns that are to be ignored, or are not used, may be of any type; they are read as text. Whole numbers in columns
    of words are words.
    """
    return _table(path, _parquet(path), asked, dates=False)


def read_feather(path: Path, asked: ReadOptions) -> Table:
    """Read a Feather or Arrow file as `read_parquet` does, with dates and times as ISO text."""
    return _table(path, _feather(path), asked, dates=True)


def _table(path: Path, read: Any, asked: ReadOptions, dates: bool) -> Table:
    names = [name for name in read.column_names if not name.startswith(INDEX)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"'{path}' has two columns '{twice[0]}'; rename or remove one.")
    left = set(asked.ignore) if asked.used is None else set(names) - asked.used
    found = {name: _column(read[name], name in left, name in asked.words, dates) for name in names}
    if strange := [name for name, column in found.items() if column is None]:
        what = f"Column '{strange[0]}' of '{path}' has type {read[strange[0]].type}"
        if len(strange) > 1:
            what = f"Columns {quoted(strange)} of '{path}' have types such as {read[strange[0]].type}"
        it, kept = ("it", "is") if len(strange) == 1 else ("them", "are")
        raise UserError(
            f"{what}, which {kept} not read; convert {it} to numbers or text, or leave {it} out with --ignore "
            f"'{','.join((*asked.ignore, *strange))}'."
        )
    return Table(str(path), read.num_rows, {name: column for name, column in found.items() if column is not None})


def _cells(read: Any, path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The values of these columns as text, empty where there is none."""
    check_columns(path, names, read.column_names)
    return {name: ["" if value is None else str(value) for value in read[name].to_pylist()] for name in names}


def _parquet(path: Path) -> Any:
    """A Parquet file as pyarrow's table, or the files of a folder as one."""
    if not path.is_dir():
        return _parquet_file(path)
    # Some programs leave marks beside the parts, such as _SUCCESS.
    files = sorted(file for file in path.iterdir() if not file.name.startswith((".", "_")))
    for file in files:
        if file.suffix.lower() != ".parquet" or not file.is_file():
            raise UserError(
                f"'{file}' is not a .parquet file, but everything there must be a part of the table; move it elsewhere."
            )
    if not files:
        raise UserError(f"'{path}' is a folder without .parquet files; put the parts of a table there or remove it.")
    parts = [_parquet_file(file) for file in files]
    for file, part in zip(files, parts, strict=True):
        if odd := sorted(set(part.column_names) ^ set(parts[0].column_names)):
            raise UserError(
                f"'{file}' and '{files[0].name}' are parts of one table, but only one of them has {quoted(odd, 3)}; "
                "give all parts the same columns."
            )
    import pyarrow as pa

    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(
            f"The parts of '{path}' have different types of values ({_first_line(error)}); save all of them alike."
        ) from error


def _parquet_file(path: Path) -> Any:
    def read() -> Any:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            return file.read()

    return _read(path, "Parquet", read)


def _feather(path: Path) -> Any:
    """A file of Feather as pyarrow's table, or one of Arrow, which may be a stream."""

    def read() -> Any:
        import pyarrow as pa
        from pyarrow import feather

        with path.open("rb") as file:
            start = file.read(6)
        if start == b"ARROW1" or start.startswith(b"FEA1"):
            return feather.read_table(path, memory_map=False)
        content = path.read_bytes()
        if content and not content.endswith(END):
            raise ValueError("it ends before its end mark")
        with pa.ipc.open_stream(content) as stream:
            return stream.read_all()

    return _read(path, "Feather", read)


def _read(path: Path, kind: str, read: Callable[[], Any]) -> Any:
    """What pyarrow reads, or a `UserError` that says why it cannot."""
    try:
        import pyarrow as pa
        import pyarrow.parquet  # some distributions have it apart
    except ImportError as error:
        extra = "parquet" if kind == "Parquet" else "tables"
        raise UserError(
            f"'{path}' needs pyarrow, which is not installed; run pip install 'bpfed[{extra}]', or save the file as CSV."
        ) from error
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError) as error:
        # pyarrow's own errors can have several lines, and OSErrors without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"'{path}' is not a valid {kind} file ({_first_line(error)}); save it again.") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given").rstrip(".")


def _column(column: Any, any_type: bool, words: bool, dates: bool) -> Column | None:
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
    if dates and (pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind)):
        return Categorical.of(as_text(column.to_pylist()))
    return Categorical.of(["" if v is None else str(v) for v in column.to_pylist()]) if any_type else None


PARQUET = TableFormat(read_parquet, lambda path, names: _cells(_parquet(path), path, names))
FEATHER = TableFormat(read_feather, lambda path, names: _cells(_feather(path), path, names))
