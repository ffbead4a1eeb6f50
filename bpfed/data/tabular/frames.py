"""Tables in memory: data frames of pandas or polars, datasets of Hugging Face, columns by name, and named arrays.

Nothing here imports pandas, polars, datasets or flwr-datasets: a data frame is whatever has ``columns`` and gives each
by its name, a dataset has ``column_names`` and ``features``, and what gives partitions has ``load_partition``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from bpfed._util.errors import UserError, quoted
from bpfed.data.partition import client_names
from bpfed.data.tabular.csvfile import check_slips, column_of
from bpfed.data.tabular.image_folder import stacked
from bpfed.data.tabular.missing_values import MissingValues
from bpfed.data.tabular.recode import NOTHING, Recoding, recoded
from bpfed.data.tabular.table import (
    AS_THEY_ARE,
    SHOWN,
    SPLIT,
    ArrayOptions,
    Categorical,
    Column,
    Table,
    as_text,
    by_column,
    check_client_name,
    check_range,
    column_name,
    written,
)

#: How the type of a column of images is called in datasets, and what their splits are used for.
IMAGE = "Image"
SPLITS = {"train": "train", "validation": "train", "test": "test"}
#: How pandas calls what is not known, beside NaN and None.
NOT_KNOWN = ("NAType", "NaTType")


def is_named(x: Any) -> bool:
    """Whether these are rows whose columns have names of their own."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is not None
    return isinstance(x, Mapping) or is_dataset(x) or (hasattr(x, "columns") and hasattr(x, "__getitem__"))


def is_dataset(x: Any) -> bool:
    """Whether this is a dataset of Hugging Face, or several of them by split."""
    if isinstance(x, Mapping):
        parts = list(x.values())
        return bool(parts) and all(is_dataset(part) for part in parts)
    return hasattr(x, "column_names") and hasattr(x, "features") and hasattr(x, "with_format")


def is_partitioned(x: Any) -> bool:
    """Whether this gives a dataset for each client, as ``FederatedDataset`` of Flower Datasets does."""
    return hasattr(x, "load_partition") and (hasattr(x, "partitioners") or hasattr(x, "num_partitions"))


def table_of(
    x: Any,
    columns: Sequence[str] | None = None,
    *,
    words: Collection[str] = (),
    used: Iterable[str] | None = None,
    missing: Iterable[str] = (),
    name: str | None = None,
    arrays: ArrayOptions = AS_THEY_ARE,
) -> Table:
    """Rows in memory as a table; a cell is read as that of a CSV file would be, and dates as ISO text.

    Args:
        x: A data frame, a dataset, a mapping of columns, an array with named fields, or an array ``[n, C]``.
        columns: The names of an array's columns, ``[C]``; None where they have names of their own.
        words: Columns that are words, though all their cells may be numbers.
        used: The only columns that are needed; others may have any type. None: all.
        missing: What else stands for no value (`bpfed.data.tabular.missing_values`).
        name: What to call it in errors; None: by what it is.
        arrays: How a dataset's images are read.

    Raises:
        UserError: It is none of these, or a column that is needed has a type that is not read.
    """
    what, missing_values = name or ("array" if columns is not None else "data frame"), MissingValues.of(missing)
    found = _array_columns(x, columns) if columns is not None else _own_columns(x)
    wanted = None if used is None else set(used)
    images, found = _images(x, found, arrays, what) if columns is None and is_dataset(x) else (None, found)
    made: dict[str, Column] = {}
    for name, values in found.items():
        if wanted is None or name in wanted:
            made[name] = _column(values, name, what, name in words, missing_values)
        else:
            made[name] = Categorical(np.full(len(values), -1), ())
    lengths = {len(column) for column in made.values()} | ({len(images)} if images is not None else set())
    if len(lengths) > 1:
        raise UserError(f"The columns of the {what} differ in length; give every row one entry in each.")
    table = missing_values.out_of(Table(what, lengths.pop() if lengths else 0, made, images))
    check_range(table)
    return table


def column_table(table: Table, name: str, values: Any, missing: Iterable[str] = (), words: bool = False) -> Table:
    """The table with one more column."""
    column = _column(values, name, table.name, words, MissingValues.of(missing))
    if len(column) != table.rows:
        raise UserError(f"{table.rows} rows and {len(column)} targets were given; give one target for each row.")
    return Table(table.name, table.rows, {**table.columns, name: column})


def _own_columns(x: Any) -> dict[str, Any]:
    if is_dataset(x):
        return _of_splits(x) if isinstance(x, Mapping) else _of_dataset(x)
    names = list(x.dtype.names if isinstance(x, np.ndarray) else x if isinstance(x, Mapping) else x.columns)
    texts = [column_name(str(name)) for name in names]
    if twice := sorted({text for text in texts if text and texts.count(text) > 1}):
        raise UserError(f"The data frame has two columns {quoted(twice[:1])}; rename or remove one.")
    return {text: x[name] for text, name in zip(texts, names, strict=True) if text}


def _of_dataset(x: Any) -> dict[str, Any]:
    """The columns of a dataset, as pyarrow or Python holds them; labels by their names."""
    if not hasattr(x, "__getitem__") or not hasattr(x, "__len__"):
        raise UserError(
            f"The data are a stream ({type(x).__name__}), but are read more than once; load them as a whole."
        )
    stored, found = x.with_format("arrow")[:], {}
    for name in x.column_names:
        kind = x.features[name]
        if type(kind).__name__ == IMAGE:
            found[name] = list(x.with_format(None)[name])
        elif hasattr(kind, "names"):
            found[name] = _class_names(stored.column(name).to_pylist(), kind.names, name)
        else:
            found[name] = stored.column(name)
    texts = [column_name(str(name)) for name in found]
    return {text: column for text, column in zip(texts, found.values(), strict=True) if text}


def _class_names(codes: Sequence[int | None], names: Sequence[str], column: str) -> list[str | None]:
    if strange := next((code for code in codes if code is not None and not -1 <= code < len(names)), None):
        raise UserError(
            f"Column '{column}' of the dataset has the label {strange}, but {len(names)} names; correct it."
        )
    return [None if code is None or code < 0 else str(names[code]) for code in codes]


def _of_splits(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of several datasets, end to end; and which rows are for testing, where a split is called so."""
    if strange := [name for name in parts if name not in SPLITS]:
        raise UserError(
            f"The dataset has {'a split' if len(strange) == 1 else 'splits'} {quoted(strange, SHOWN)}, but only "
            f"{quoted(list(SPLITS))} are known; give one of its splits, or a dict of those to use."
        )
    read = [_of_dataset(part) for part in parts.values()]
    other = next((columns for columns in read if columns.keys() != read[0].keys()), None)
    if other is not None:
        only = sorted(other.keys() ^ read[0].keys())
        raise UserError(f"Not all splits of the dataset have a column {quoted(only[:1])}; remove it or add it to all.")
    if SPLIT in read[0]:
        raise UserError(f"The dataset has splits and a column '{SPLIT}'; rename or remove the column.")
    made = {name: [cell for columns in read for cell in _cells(columns[name])] for name in read[0]}
    if "test" not in parts:
        return made
    marks = [SPLITS[name] for name, part in parts.items() for _ in range(len(part))]
    return {**made, SPLIT: marks}


def _cells(column: Any) -> list[Any]:
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _images(
    x: Any, columns: dict[str, Any], asked: ArrayOptions, what: str
) -> tuple[np.ndarray | None, dict[str, Any]]:
    """The images of a dataset, ``[n, c, h, w]``, or None; and its other columns."""
    features = (next(iter(x.values())) if isinstance(x, Mapping) else x).features
    names = [name for name in columns if name in features and type(features[name]).__name__ == IMAGE]
    if not names:
        return None, columns
    if len(names) > 1:
        raise UserError(f"The {what} has images in the columns {quoted(names)}; keep one with remove_columns.")
    if None in columns[names[0]]:
        row = columns[names[0]].index(None) + 1
        raise UserError(f"Row {row} of the {what} has no image in '{names[0]}'; remove the row.")
    opened = [(f"Image {row + 1} of the {what}", image) for row, image in enumerate(columns[names[0]])]
    return stacked(opened, asked, what), {name: c for name, c in columns.items() if name != names[0]}


def partitions(x: Any) -> dict[str, Any]:
    """The dataset of each client, by the client's name: what it is split by if it says so, else ``client-00`` and so on.

    Where training and test rows are both partitioned, a client has both (`is_dataset`).
    """
    given = getattr(x, "partitioners", None)
    if given is None:
        given = {"train": x}
    loaded: dict[str, list[Any]] = {}
    for split, partitioner in given.items():
        ask = partitioner.load_partition if partitioner is x else lambda i, split=split: x.load_partition(i, split)
        try:
            first = ask(0)  # before it nobody knows how many there are
            loaded[split] = [first, *(ask(i) for i in range(1, partitioner.num_partitions))]
        except (ValueError, AttributeError) as error:
            raise UserError(f"The partitions of the dataset cannot be loaded ({error}); correct them.") from error
    if len({len(parts) for parts in loaded.values()}) > 1:
        counts = ", ".join(f"'{split}' {len(parts)}" for split, parts in loaded.items())
        raise UserError(f"The splits have different numbers of partitions ({counts}); give all the same.")
    number = len(next(iter(loaded.values())))
    known = [getattr(one, "partition_id_to_natural_id", {}) for one in given.values()]
    if any(ids != known[0] for ids in known):
        raise UserError(
            "The splits have different clients; give one of them to bpfed, which splits each client's rows."
        )
    names = [str(known[0][i]) for i in range(number)] if len(known[0]) == number else list(client_names(number))
    if len(loaded) == 1:
        return dict(zip(names, next(iter(loaded.values())), strict=True))
    return {name: {split: parts[i] for split, parts in loaded.items()} for i, name in enumerate(names)}


def _array_columns(x: Any, columns: Sequence[str]) -> dict[str, Any]:
    if is_named(x):
        raise UserError("The columns of a data frame have names of their own; omit columns.")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise UserError("columns must be a list of the columns' names, such as columns=['age', 'sex'].")
    if twice := sorted({name for name in columns if list(columns).count(name) > 1}):
        raise UserError(f"columns names {quoted(twice[:1])} twice; name each column once.")
    try:
        if isinstance(x, Tensor):
            array = x.detach().cpu().numpy()
        elif isinstance(x, np.ndarray):
            array = x
        else:  # of rows such as [63, "f"] numpy would make text of all
            array = np.array(list(x), dtype=object)
    except (TypeError, ValueError) as error:
        raise UserError("The inputs are not an array; give a row for each example.") from error
    if array.ndim != 2 or array.shape[1] != len(columns):
        raise UserError(
            f"The inputs have shape {list(array.shape)}, but {len(columns)} columns are named; give an array of "
            f"[n, {len(columns)}]."
        )
    return {name: array[:, k] for k, name in enumerate(columns)}


def _column(values: Any, name: str, what: str, words: bool, missing_values: MissingValues) -> Column:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    array = values.to_numpy() if hasattr(values, "to_numpy") else values
    if not isinstance(array, np.ndarray):
        array = np.array(list(array), dtype=object)
    if array.ndim != 1:
        raise UserError(f"Column '{name}' of the {what} has shape {list(array.shape)}; give one value for each row.")
    if isinstance(array, np.ma.MaskedArray):
        array = np.ma.filled(array.astype(object), None)
    if array.dtype.kind == "m":  # of which some have whole numbers as values
        raise UserError(
            f"Column '{name}' of the {what} has spans of time, which are not read; convert them to numbers or text."
        )
    if array.dtype.kind == "M":
        return Categorical.of(missing_values.cells(name, _iso(array)))
    if array.dtype.kind == "f" or (array.dtype.kind in "iu" and not words):
        return array.astype(np.float64)
    values = [None if type(value).__name__ in NOT_KNOWN else value for value in array.tolist()]
    if any(isinstance(value, date | time) for value in values):
        return Categorical.of(missing_values.cells(name, _dates(values, name, what)))
    cells = [_cell(value, name, what) for value in values]
    if not words and all(isinstance(cell, float) for cell in cells):
        return np.array(cells, dtype=np.float64)
    spelt = [cell if isinstance(cell, str) else written(cell) for cell in cells]
    return column_of(missing_values.cells(name, spelt), name, what, words)


def _cell(value: Any, name: str, what: str) -> str | float:
    """A number, or a text; what is not known is NaN."""
    if value is None:
        return np.nan
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, Number | Decimal) and not isinstance(value, complex):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise UserError(f"Column '{name}' of the {what} has a number that is too large; correct it.") from None
    raise UserError(
        f"Column '{name}' of the {what} has a {type(value).__name__}, which is not read; convert it to numbers or text."
    )


def _iso(array: np.ndarray) -> list[str]:
    """Dates of numpy as ISO text, to the day or the second where that is all there is."""
    known = array[~np.isnat(array)]
    unit = next((u for u in ("D", "s") if (known.astype(f"datetime64[{u}]") == known).all()), "ns")
    return [
        "" if text == "NaT" else text for text in np.datetime_as_string(array.astype(f"datetime64[{unit}]")).tolist()
    ]


def _dates(values: Sequence[Any], name: str, what: str) -> list[str]:
    try:
        return as_text(values)
    except TypeError as error:
        raise UserError(
            f"Column '{name}' of the {what} has a {error} beside dates, which is not read; convert it to text."
        ) from error


# --- Federations ------------------------------------------------------------------------------------------------------


def clients_of_frame(
    frame: Any,
    client_column: str | None,
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
    recoding: Recoding = NOTHING,
    arrays: ArrayOptions = AS_THEY_ARE,
) -> dict[str, Table]:
    """The tables of all clients in one data frame or dataset, cut by its client column; or in partitions.

    ``ignore`` are columns of any type, which are not read; ``missing`` and ``words`` are as for `table_of`; ``recoding``
    is done to columns then.
    """
    if is_partitioned(frame):
        if client_column is not None:
            raise UserError("Each partition of the dataset is a client; omit client_column.")
        return clients_of_frames(partitions(frame), ignore, missing, words, recoding, arrays)
    if not isinstance(frame, Table) and not is_named(frame):
        raise UserError(
            f"The data are a {type(frame).__name__}; give the name of a dataset, 'folder:PATH', or a data frame."
        )
    # As in a file, names are words even if they are digits.
    words = [*words, *recoding.words, *([client_column] if client_column else ())]
    table = training_table(frame, "dataset" if is_dataset(frame) else "data frame", ignore, missing, words, arrays)
    if client_column is None:
        raise UserError(
            f"The data are a single {table.name}; use client_column to name the column that identifies the client: "
            f"{quoted(list(table.columns), SHOWN)}; or give one for each client with from_frames."
        )
    return recoded(by_column(table, client_column), recoding, missing)


def clients_of_frames(
    frames: Mapping[str, Any],
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
    recoding: Recoding = NOTHING,
    arrays: ArrayOptions = AS_THEY_ARE,
) -> dict[str, Table]:
    """The table of each client, from a data frame for each, by name; for the arguments see `clients_of_frame`."""
    if not isinstance(frames, Mapping) or not frames:
        raise UserError("There are no data frames; give one for each client, by its name.")
    for name, frame in frames.items():
        if not isinstance(name, str):
            raise UserError(f"The client {name!r} is not named by text; use frames such as {{'{name}': frame}}.")
        check_client_name(name, "the data frames")
        if not isinstance(frame, Table) and not is_named(frame):
            raise UserError(f"The rows of client '{name}' are a {type(frame).__name__}; give a data frame.")
    words = [*words, *recoding.words]
    found = {name: training_table(frame, name, ignore, missing, words, arrays) for name, frame in frames.items()}
    return recoded(found, recoding, missing)


def training_table(
    frame: Any,
    name: str,
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
    arrays: ArrayOptions = AS_THEY_ARE,
) -> Table:
    """A data frame as a table to learn from, with the checks that a file gets."""
    if isinstance(frame, Table):
        return frame
    used = [column for column in _own_columns(frame) if column not in ignore] if ignore else None
    table = table_of(frame, words=words, used=used, missing=missing, name=name, arrays=arrays)
    if not table.rows:
        raise UserError(f"'{name}' has no rows; remove it or give it some.")
    check_slips({key: column for key, column in table.columns.items() if key not in words}, name, ",")
    return table
