"""Tables in memory: data frames of pandas or polars, columns by name, and arrays whose columns are named.

Nothing here imports pandas or polars: a data frame is whatever has ``columns`` and gives each by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from bpfed.data.blanks import Blanks
from bpfed.data.csvfile import column_of
from bpfed.data.table import Column, Table, Words, check_range, written
from bpfed.errors import UserError, quoted

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
        missing: What else stands for no value (`bpfed.data.blanks`).

    Raises:
        UserError: It is none of these, or a column that is needed has a type that is not read.
    """
    what, blanks = "array" if columns is not None else "data frame", Blanks.of(missing)
    found = _array_columns(x, columns) if columns is not None else _own_columns(x)
    wanted = None if used is None else set(used)
    made: dict[str, Column] = {}
    for name, values in found.items():
        if wanted is None or name in wanted:
            made[name] = _column(values, name, what, name in words, blanks)
        else:
            made[name] = Words(np.full(len(values), -1), ())
    lengths = {len(column) for column in made.values()}
    if len(lengths) > 1:
        raise UserError(f"The columns of the {what} differ in length; give every row one entry in each.")
    table = blanks.out_of(Table(what, lengths.pop() if lengths else 0, made))
    check_range(table)
    return table


def column_table(table: Table, name: str, values: Any, missing: Iterable[str] = (), words: bool = False) -> Table:
    """The table with one more column."""
    column = _column(values, name, table.name, words, Blanks.of(missing))
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


def _column(values: Any, name: str, what: str, words: bool, blanks: Blanks) -> Column:
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
    return column_of(blanks.cells(name, spelt), name, what, words)


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
