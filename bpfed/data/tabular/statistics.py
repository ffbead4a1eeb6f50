"""Summary: what a client tells of its training rows before training, and all that it tells.

It holds counts, means, sums of squares and the words that occur in a client's training rows; never a row. Test rows are
in no summary. Of few rows such statistics are the rows themselves, so a deployed site sends `released` ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed._util.files import renamed
from bpfed.data.tabular.table import SPLIT, UNKNOWN, Categorical, Column, Table, written
from bpfed.inference.tasks import get_task

#: How many times as much the pixels of one client may vary as another's. Between bytes and fractions it is some 255.
UNITS_APART = 50.0
#: Whole numbers with more values than this are a regression, unless the task is given.
MOST_WHOLE = 20
#: A column (or target) with more words than this is text or an identity and no category.
MOST_CATEGORIES = 100
#: Different whole numbers that a column of codes has, such as kinds of pain from 1 to 4: at least and at most.
FEWEST_CODES, MOST_CODES = 3, 10
#: Rows of a column that are looked at first: most columns show there that they are no codes.
FIRST = 1000
#: The key of a column's categories in records.
CATEGORIES_KEY = "levels"
#: Stands for all words of a column that are not categories of their own, where there are such (see `released`).
OTHER = "(other words)"
#: Of numbers with up to so many different values, count, mean and squares give the count of each value.
SOLVABLE = 3
#: Share of the squared spread up to which one row may be behind it; beyond that, the spread tells of that row.
ONE_ROW = 0.75


@dataclass(frozen=True)
class ColumnSummary:
    """What a client tells of one column.

    Attributes:
        count: Number of values.
        missing: Number of rows without one.
        mean: Mean of the numbers.
        squares: Sum of their squared distances from the mean. (Count, mean and this are sums of values and squares in
            a form that rounding does not harm.)
        categories: The words that occur, or the different numbers where all are whole and few (up to `MOST_CODES`, of a
            target up to `MOST_CATEGORIES`); None for other numbers.
        words: Whether it is a column of words.
    """

    count: int
    missing: int
    mean: float = 0.0
    squares: float = 0.0
    categories: tuple[str, ...] | None = None
    words: bool = False

    @property
    def scale(self) -> float:
        """Standard deviation, 0 where all values are the same (but for rounding)."""
        sd = math.sqrt(self.squares / self.count) if self.count else 0.0
        return sd if sd > 1e-9 * abs(self.mean) else 0.0

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count if count else 0.0
        squares = self.squares + other.squares + (apart**2 * self.count * other.count / count if count else 0.0)
        known = [s.categories for s in (self, other) if s.count]
        categories = None if None in known else tuple(sorted({w for k in known if k for w in k}))
        return ColumnSummary(count, self.missing + other.missing, mean, squares, categories, self.words or other.words)


@dataclass(frozen=True)
class ColumnStatistics:
    """What a client tells the server before training, and all that it tells.

    Attributes:
        client: Its name.
        rows: Number of its training rows.
        columns: A summary of each column, by name; of images one of each channel.
        target: The target's.
        shape: Shape of an image, ``(c, h, w)``; None for tables.
    """

    client: str
    rows: int
    columns: dict[str, ColumnSummary]
    target: ColumnSummary
    shape: tuple[int, ...] | None = None

    def record(self) -> dict[str, Any]:
        """As plain data for JSON."""
        columns = {name: _column_record(column) for name, column in self.columns.items()}
        return {**asdict(self), "columns": columns, "target": _column_record(self.target)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ColumnStatistics:
        """The summary that gave this record."""
        columns = {name: _column_summary(c) for name, c in record["columns"].items()}
        shape = tuple(record["shape"]) if record["shape"] else None
        return cls(record["client"], record["rows"], columns, _column_summary(record["target"]), shape)


def client_summary(
    table: Table, target: str, *, client: str | None = None, task: str | None = None, ignore: Iterable[str] = ()
) -> ColumnStatistics:
    """Summarise a client's training rows.

    Args:
        table: Its training rows, and no others.
        target: The column to predict.
        client: The client's name; default: the table's.
        task: What the target is; default: inferred.
        ignore: Columns that are not inputs.
    """
    values = table.column(target)
    if isinstance(values, Categorical) and len(values.categories) > MOST_CATEGORIES:
        raise too_many_classes(target, f"'{table.name}'", values.categories)
    aim = _summary(values, table, target)
    if not isinstance(values, Categorical):
        most = MOST_WHOLE if task is None else MOST_CATEGORIES if get_task(task).has_classes else 0
        aim = replace(aim, categories=whole_numbers(values[~np.isnan(values)], most) if most else None)
    shape = None
    if table.images is not None:
        shape, columns = tuple(table.images.shape[1:]), of_channels(table.images)
    else:
        left = table.without([target, SPLIT, *ignore])
        check_words([left], ignore)
        columns = {name: _summary(column, table, name) for name, column in left.columns.items()}
    return ColumnStatistics(client or table.name, table.rows, columns, aim, shape)


def released(
    summary: ColumnStatistics, table: Table, target: str, minimum: int
) -> tuple[ColumnStatistics, dict[str, str]]:
    """What of a summary may be told to others, so that nothing in it is of fewer than ``minimum`` rows.

    - Words, whole numbers and classes in fewer rows are withheld. In a column that is an input, all such words together
      are `OTHER`, if that is of enough rows.
    - A column with fewer values is not told of, nor one whose count, mean and squares would give single rows: one in
      which fewer rows differ from the commonest value, or up to `SOLVABLE` values of which one is rare, or whose spread
      is that of one row.
    - Fewer missing values than that are not told: the column counts as filled.
    - Of a target that may be classes there is no mean, which would give the number of rows of each.

    Args:
        summary: Of all training rows.
        table: These rows.
        target: The column to predict.
        minimum: Rows that everything told must be of.

    Returns:
        The summary to tell, and of each column that is not told as it is, why.
    """
    if summary.rows < minimum:
        raise ValueError(f"a summary of {summary.rows} rows is not told at all")
    why: dict[str, str] = {}
    columns = dict(summary.columns)
    for name, told in summary.columns.items() if summary.shape is None else ():
        columns[name] = _released(told, table.columns[name], summary.rows, minimum, name, why)
    aim, values = summary.target, table.column(target)
    if aim.categories is not None:
        words = values if isinstance(values, Categorical) else Categorical.of([written(v) for v in values.tolist()])
        common = _common(words, minimum)
        if len(common) < len(words.categories):
            why[target] = f"{len(words.categories) - len(common)} of {len(words.categories)} classes are too rare"
        # As they were ordered before; of numbers, by size.
        categories = tuple(category for category in aim.categories if category in common)
        aim = ColumnSummary(summary.rows, 0, categories=categories, words=aim.words)
    else:
        aim = _released(aim, values, summary.rows, minimum, target, why)
    return replace(summary, columns=columns, target=aim), why


def _released(
    told: ColumnSummary, column: Column, rows: int, minimum: int, name: str, why: dict[str, str]
) -> ColumnSummary:
    """What of one column may be told; nothing is a count of 0 with none missing."""
    if not told.count:
        return told
    if told.count < minimum:
        why[name] = f"it has only {told.count} values"
        return ColumnSummary(0, 0)
    if isinstance(column, Categorical):
        words = _common(column, minimum)
        others = told.count - sum(words.values())
        if rare := len(column.categories) - len(words):
            why[name] = f"{rare} of {len(column.categories)} words are too rare"
        told = replace(told, categories=tuple(sorted((*words, *((OTHER,) if others >= minimum else ())))))
    else:
        values = column[~np.isnan(column)]
        different, counts = np.unique(values, return_counts=True)
        apart = np.square(values - told.mean)
        if len(different) <= SOLVABLE and counts.min() < minimum:
            why[name] = f"one of its {len(different)} different values is too rare"
        elif len(different) > SOLVABLE and told.count - counts.max() < minimum:
            why[name] = "nearly all its values are the same"
        elif apart.max() > ONE_ROW * told.squares:
            why[name] = "one value is far from all others"
        if name in why:
            return ColumnSummary(0, 0)
        if told.categories is not None:
            common = {written(value) for value in different[counts >= minimum].tolist()}
            if rare := len(told.categories) - len(common):
                why[name] = f"{rare} of {len(told.categories)} whole numbers are too rare"
            told = replace(told, categories=tuple(category for category in told.categories if category in common))
    if told.missing < minimum:  # as if these were like the others: same mean, same spread
        told = replace(told, count=rows, missing=0, squares=told.squares * rows / told.count)
    return told


def _common(words: Categorical, minimum: int) -> dict[str, int]:
    """In how many rows each word is, of those that are in enough."""
    counts = np.bincount(words.codes[words.codes != UNKNOWN], minlength=len(words.categories)).tolist()
    return {word: count for word, count in zip(words.categories, counts, strict=True) if count >= minimum}


def _summary(column: Column, table: Table, name: str) -> ColumnSummary:
    missing = int(np.count_nonzero(table.missing(name)))
    count = table.rows - missing
    if isinstance(column, Categorical):
        return ColumnSummary(count, missing, categories=column.categories, words=bool(count))
    values = column[~np.isnan(column)]
    return replace(of_numbers(values, missing), categories=whole_numbers(values, MOST_CODES) if count else None)


def whole_numbers(values: np.ndarray, most: int) -> tuple[str, ...] | None:
    """The distinct numbers among ``[n]``, as text by size; None if there are more than ``most`` or any is not whole."""
    different = np.unique(values[:FIRST])
    if len(different) <= most:  # few of the other rows have further ones, if any
        different = np.union1d(different, values[FIRST:][~np.isin(values[FIRST:], different)])
    if len(different) > most or (different != np.trunc(different)).any():
        return None
    return tuple(written(value) for value in different.tolist())


def of_numbers(values: np.ndarray, missing: int) -> ColumnSummary:
    """Of numbers none of which is missing, ``[n]``, beside which so many are."""
    if not len(values):
        return ColumnSummary(0, missing)
    mean = float(values.mean(dtype=np.float64))
    return ColumnSummary(len(values), missing, mean, float(np.square(values - mean, dtype=np.float64).sum()))


def of_channels(images: np.ndarray) -> dict[str, ColumnSummary]:
    """Of the channels of images ``[n, c, h, w]``, by name."""
    return {f"channel {k}": of_numbers(images[:, k].reshape(-1).astype(np.float64), 0) for k in range(images.shape[1])}


def _column_record(column: ColumnSummary) -> dict[str, Any]:
    return renamed(asdict(column), {"categories": CATEGORIES_KEY})


def _column_summary(record: Mapping[str, Any]) -> ColumnSummary:
    told = dict(record)
    categories = told.pop(CATEGORIES_KEY)
    return ColumnSummary(**told, categories=None if categories is None else tuple(categories))


def check_words(tables: Sequence[Table], ignore: Iterable[str] = ()) -> None:
    """Refuse columns with more words, in all of these tables, than a category may have; all of them at once.

    ``ignore`` are columns that have been left out already, for the advice.
    """
    categories: dict[str, set[str]] = {}
    crowded: dict[str, dict[str, int]] = {}
    for table in tables:
        words = {name: c.categories for name, c in table.columns.items() if isinstance(c, Categorical)}
        for name, own in words.items():
            categories.setdefault(name, set()).update(own)
        if own_crowd := {name: len(own) for name, own in words.items() if len(own) > MOST_CATEGORIES}:
            crowded[table.name] = own_crowd
    found = {name: len(words) for name, words in categories.items() if len(words) > MOST_CATEGORIES}
    if not found:
        return
    for where, own_crowd in crowded.items() if len(crowded) == 1 else ():
        if own_crowd.keys() == found.keys():
            raise too_many(own_crowd, f"'{where}'", ignore)
    raise too_many(found, "all clients together", ignore)


def too_many(found: Mapping[str, int], where: str, ignore: Iterable[str] = ()) -> UserError:
    """A `UserError` for columns with more words than a category may have, given with their number; see `check_words`."""
    left = f"--ignore '{','.join((*ignore, *found))}'"
    learn = "use --dates for dates or --text for free text"
    if len(found) == 1:
        ((name, number),) = found.items()
        return UserError(
            f"Column '{name}' of {where} has {number} different words, more than the limit of {MOST_CATEGORIES}; leave it "
            f"out with {left}, or {learn}."
        )
    numbers = ", ".join(map(str, found.values()))
    return UserError(
        f"Columns {quoted(list(found), len(found))} of {where} have {numbers} different words, more than the limit of "
        f"{MOST_CATEGORIES}; leave them out with {left}, or {learn}."
    )


def too_many_classes(target: str, where: str, words: Sequence[str]) -> UserError:
    """A `UserError` for a target with more words than there may be classes."""
    return UserError(
        f"The target '{target}' of {where} has {len(words)} different words, such as '{words[0][:40]}', more than the "
        f"limit of {MOST_CATEGORIES}; predict another column, or write it as plain numbers, such as 1234.5."
    )
