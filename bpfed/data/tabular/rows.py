"""Rows of a file, or of a table in memory, as a run takes them: prepared as its training data was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError, quoted
from bpfed.data.checks.new_rows import Unusual, check_new_rows, unusual
from bpfed.data.federated import FederatedData
from bpfed.data.load import names, source_of
from bpfed.data.sources.pooled import SOURCES
from bpfed.data.tabular.csvfile import column_of
from bpfed.data.tabular.missing_values import MissingValues
from bpfed.data.tabular.npz import read_arrays
from bpfed.data.tabular.preprocessing import SHOWN, Preprocessor
from bpfed.data.tabular.table import Categorical, Column, Table, check_range, read_table, written

# --- Tables in memory -------------------------------------------------------------------------------------------------
#
# Data frames of pandas or polars, columns by name, and arrays whose columns are named.
#
# Nothing here imports pandas or polars: a data frame is whatever has ``columns`` and gives each by its name.

#: How pandas calls what is not known, beside NaN and None.
NOT_KNOWN = ("NAType", "NaTType")


def is_named(x: Any) -> bool:
    """Whether these are rows whose columns have names of their own."""
    if isinstance(x, np.ndarray):
        return x.dtype.names is not None
    return isinstance(x, Mapping) or (hasattr(x, "columns") and hasattr(x, "__getitem__"))


def table_of(
    x: Any,
    columns: Sequence[str] | None = None,
    *,
    words: Collection[str] = (),
    used: Iterable[str] | None = None,
    missing: Iterable[str] = (),
) -> Table:
    """Rows in memory as a table; a cell is read as that of a file would be.

    Args:
        x: A data frame, a mapping of columns, an array with named fields, or an array ``[n, C]``.
        columns: The names of an array's columns, ``[C]``; None where they have names of their own.
        words: Columns that are words, though all their cells may be numbers.
        used: The only columns that are needed; others may have any type. None: all.
        missing: What else stands for no value (`bpfed.data.tabular.missing_values`).

    Raises:
        UserError: It is none of these, or a column that is needed has a type that is not read.
    """
    what, missing_values = "array" if columns is not None else "data frame", MissingValues.of(missing)
    found = _array_columns(x, columns) if columns is not None else _own_columns(x)
    wanted = None if used is None else set(used)
    made: dict[str, Column] = {}
    for name, values in found.items():
        if wanted is None or name in wanted:
            made[name] = _column(values, name, what, name in words, missing_values)
        else:
            made[name] = Categorical(np.full(len(values), -1), ())
    lengths = {len(column) for column in made.values()}
    if len(lengths) > 1:
        raise UserError(f"The columns of the {what} differ in length; give every row one entry in each.")
    table = missing_values.out_of(Table(what, lengths.pop() if lengths else 0, made))
    check_range(table)
    return table


def column_table(table: Table, name: str, values: Any, missing: Iterable[str] = (), words: bool = False) -> Table:
    """The table with one more column."""
    column = _column(values, name, table.name, words, MissingValues.of(missing))
    if len(column) != table.rows:
        raise UserError(f"{table.rows} rows and {len(column)} targets were given; give one target for each row.")
    return Table(table.name, table.rows, {**table.columns, name: column})


def _own_columns(x: Any) -> dict[str, Any]:
    names = list(x.dtype.names if isinstance(x, np.ndarray) else x if isinstance(x, Mapping) else x.columns)
    texts = [str(name) for name in names]
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        raise UserError(f"The data frame has two columns {quoted(twice[:1])}; rename or remove one.")
    return {text: x[name] for text, name in zip(texts, names, strict=True)}


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
    if array.dtype.kind in "mM":  # of which some have whole numbers as values
        raise UserError(
            f"Column '{name}' of the {what} has dates or times, which are not read; convert them to numbers or text."
        )
    if array.dtype.kind == "f" or (array.dtype.kind in "iu" and not words):
        return array.astype(np.float64)
    cells = [_cell(value, name, what) for value in array.tolist()]
    if not words and all(isinstance(cell, float) for cell in cells):
        return np.array(cells, dtype=np.float64)
    spelt = [cell if isinstance(cell, str) else written(cell) for cell in cells]
    return column_of(missing_values.cells(name, spelt), name, what, words)


def _cell(value: Any, name: str, what: str) -> str | float:
    """A number, or a text; what is not known is NaN."""
    if value is None or type(value).__name__ in NOT_KNOWN:
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


@dataclass(frozen=True)
class Rows:
    """What was read.

    Attributes:
        x: Inputs, ``[n, ...]``.
        y: Targets, ``[n]``; None where they were not asked for.
        preparation: That of the run, with the client's own statistics where it has some; None for arrays.
        unusual: Where they are unlike the rows of training; None for arrays and images.
    """

    x: Tensor
    y: Tensor | None
    preparation: Preprocessor | None
    unusual: Unusual | None = None


def read_rows(
    data: FederatedData,
    source: Any,
    client: str,
    say: Callable[[str], None],
    *,
    labelled: bool = False,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    y: Any = None,
) -> Rows:
    """Read rows of a file or of a table in memory.

    Args:
        data: Of the run.
        source: The path of a CSV, TSV, Parquet or NPZ file for a run on tables, and NPZ with ``x`` (and ``y``) for one
            on arrays; or, for a run on tables, rows in memory (`bpfed.data.tabular.rows`).
        client: Whose rows.
        say: Called with sentences that the user should read.
        labelled: Whether targets are wanted; the client is then a newcomer.
        target: Column of the targets; None: the one that the run predicts.
        columns: Names of the columns of an array in memory.
        y: Targets of rows in memory, as the tables of training have them; None: they are in the column ``target``.
    """
    in_file = isinstance(source, str | Path)
    if in_file and (columns is not None or y is not None):
        what = "columns have names and its targets a column" if y is not None else "columns have names"
        raise UserError(f"'{source}' is a file, whose {what} there; omit {'y' if y is not None else 'columns'}.")
    preparation = data.preparation
    if preparation is None:
        if not in_file:
            raise UserError(f"'{data.name}' was trained on arrays, not on a table; give an array without column names.")
        return _arrays(data, Path(source), labelled)
    wanted = target or preparation.target
    needed = {f.name for f in preparation.features} | ({wanted} if labelled else set())
    if in_file:
        table = read_table(source, preparation.words, used=needed, missing=preparation.missing)
    else:
        table = _in_memory(preparation, source, columns, needed, say)
        if y is not None:
            if wanted in table.columns:
                raise UserError(f"The targets are given twice, as y and in the column '{wanted}'; omit one of them.")
            table = column_table(table, wanted, y, preparation.missing)
    found = None
    if labelled:
        found = preparation.targets(table, wanted)
        kept = table.without({wanted, preparation.target} - {wanted}).columns
        named = {preparation.target if name == wanted else name: column for name, column in kept.items()}
        table = replace(table, columns=named)
        preparation = preparation.joined(client, table)
    if preparation.shape is None and in_file:
        lost = [f.name for f in preparation.features if f.name not in table.columns]
        if lost and len(lost) < len(preparation.features):
            what = "column" if len(lost) == 1 else "columns"
            it = "it is" if len(lost) == 1 else "they are"
            say(f"'{source}' has no {what} {quoted(lost)}; {it} treated as missing in every row.")
    made = Rows(preparation.inputs(table, client), found, preparation)
    for sentence in check_new_rows(preparation, table, client):
        say(sentence)
    return made if preparation.shape is not None else replace(made, unusual=unusual(preparation, table, client))


def _in_memory(
    preparation: Preprocessor,
    source: Any,
    columns: Sequence[str] | None,
    needed: set[str],
    say: Callable[[str], None],
) -> Table:
    """Rows in memory as a table that has every column of training; others are ignored with a word."""
    if preparation.shape is not None:
        raise UserError(
            "The run was trained on images of files, which it scales; give the path of an NPZ file, or inputs that are "
            "scaled as run.data is, with prepared=True."
        )
    used = [f.name for f in preparation.features if f.inputs]
    if columns is None and not isinstance(source, Table) and not is_named(source):
        raise UserError(
            "The run was trained on tables, whose columns it knows by name and scales, but the inputs have no names; "
            f"name them with columns=[{quoted(used, 3)}], or give a data frame or the path of a file (inputs that are "
            "prepared as run.data is need prepared=True)."
        )
    if isinstance(source, Table) and columns is None:
        table = source
    else:
        table = table_of(source, columns, words=preparation.words, used=needed, missing=preparation.missing)
    if lost := [name for name in used if name not in table.columns]:
        what = "column" if len(lost) == 1 else "columns"
        raise UserError(
            f"The {table.name} has no {what} {quoted(lost, SHOWN)}; give every column that training used"
            f"{', with NaN where a value is not known' if len(lost) < len(used) else f' ({quoted(used, SHOWN)})'}."
        )
    known = {*needed, preparation.target, *preparation.left_out, preparation.client_column}
    if extra := [name for name in table.columns if name not in known]:
        many = len(extra) > 1
        say(
            f"The {table.name} has {'columns' if many else 'the column'} {quoted(extra, SHOWN)}, which training did not "
            f"use; {'they are' if many else 'it is'} ignored."
        )
    return table


def _arrays(data: FederatedData, path: Path, labelled: bool) -> Rows:
    shape = ", ".join(["n", *map(str, data.input_shape)])
    if path.suffix.lower() != ".npz":
        raise UserError(
            f"'{data.name}' was trained on arrays, not on a table; give an NPZ file with x of shape [{shape}]."
        )
    try:
        found = read_arrays(path)
    except FileNotFoundError as error:
        raise UserError(f"There is no file '{path}'; give an NPZ file.") from error
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); give an NPZ file.") from error
    for name in ("x", "y") if labelled else ("x",):
        if name not in found:
            raise UserError(f"'{path}' has no array '{name}'; it contains: {', '.join(found) or 'nothing'}.")
    x = found["x"]
    if x.dtype.kind not in "fiub" or x.shape[1:] != data.input_shape:
        raise UserError(f"x of '{path}' is {x.dtype} of shape {list(x.shape)}, but must be numbers of shape [{shape}].")
    if x.dtype.kind != "f":
        x = _scaled(data, path, x)
    y = None
    if labelled:
        y = torch.from_numpy(_targets(data, path, found["y"]))
        if len(y) != len(x):
            raise UserError(f"'{path}' has {len(x)} inputs and {len(y)} targets; give one target per input.")
    return Rows(torch.from_numpy(x.astype(np.float32)), y, None)


def _scaled(data: FederatedData, path: Path, x: Any) -> Any:
    """Raw pixels of a built-in dataset, as it scales them."""
    source = source_of(data.name) if data.name in names() else ""
    if source not in SOURCES:
        raise UserError(f"x of '{path}' is {x.dtype}, but training was on real numbers; scale it in the same way.")
    return x / SOURCES[source].half - 1.0


def _targets(data: FederatedData, path: Path, y: Any) -> Any:
    if y.ndim != 1:
        raise UserError(f"y of '{path}' has shape {list(y.shape)}, but must be one target per input.")
    if data.task == "regression":
        if y.dtype.kind not in "fiu":
            raise UserError(f"y of '{path}' is {y.dtype}, but must be numbers.")
        return y.astype(np.float32)
    named = bool(data.labels) and all(label.removeprefix("-").isdecimal() for label in data.labels)
    if y.dtype.kind in "iu" and not named:  # else a number is the class of that name, wherever it stands among them
        return y.astype(np.int64)
    words = [str(word) for word in y.tolist()]
    strange = [word for word in words if word not in data.labels]
    if strange:
        raise UserError(f"'{path}' has the label '{strange[0]}', but it must be one of {quoted(list(data.labels))}.")
    return np.array([data.labels.index(word) for word in words], dtype=np.int64)
