"""Leakage: extreme numbers, rows that two clients have, a column that gives the answer away, and rows in order of time.

These are looked for where all clients' rows are at hand; nothing of it is told where they are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bpfed._util.errors import first_of
from bpfed._util.text import percent
from bpfed.data.checks.new_rows import FAR, far_numbers
from bpfed.data.tabular.table import SPLIT, Categorical, Column, Table

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor

#: Rows that two clients must have in common, as a share of the smaller one's and in number, to be taken for a copy.
COPIED, FEWEST = 0.5, 5
#: Share of a client's rows that must differ from one another: where few values are possible, rows are alike by chance.
DISTINCT = 0.9
#: Training rows from which on a column can be said to give the answer away, and how many there are for each of its
#: words: where each is in a few rows only, as names are, it tells everything.
JUDGED, OFTEN = 20, 10
#: More classes than there can be.
MANY = 1 << 16


def check_leakage(
    tables: Mapping[str, Table], training: Mapping[str, Table], preprocessor: Preprocessor
) -> tuple[str, ...]:
    """A sentence each for what there is of it.

    Args:
        tables: All rows of each client.
        training: Those for training.
        preprocessor: What was made of these.
    """
    if preprocessor.shape is not None:
        return ()
    found = [_far(training, preprocessor), _copies(tables), _answers(training, preprocessor)]
    return tuple(sentence for sentence in found if sentence)


def _far(training: Mapping[str, Table], preprocessor: Preprocessor) -> str:
    told = []
    # Counts of words are 0 nearly everywhere, and no typing errors.
    hashed = preprocessor.recoding.hashed
    numbers = {
        f.name: (f.mean, f.scale)
        for f in preprocessor.features
        if f.kind == "number" and f.scale and f.name not in hashed
    }
    if preprocessor.task_type.standardised:
        numbers[preprocessor.target] = (preprocessor.target_mean, preprocessor.target_scale)
    for client, table in training.items():
        own = preprocessor.local.get(client, {})
        for name, common in numbers.items():
            if name not in table.columns:
                continue
            where = far_numbers(table, name, *own.get(name, common))
            if where.any():
                value = table.take(np.flatnonzero(where)[:1]).words(name)[0]
                told.append(f"'{name}' of '{client}' ({np.count_nonzero(where)} of {table.rows} rows, such as {value})")
    if not told:
        return ""
    return (
        f"More than {FAR:g} standard deviations from the training mean: {first_of(told)}. If such a value is a typing error, "
        "correct it: it distorts the scaling of the column for all clients."
    )


def _copies(tables: Mapping[str, Table]) -> str:
    clients = list(tables)
    rows = [np.unique(row_hashes(tables[client])) for client in clients]
    whose = np.repeat(np.arange(len(clients)), [len(r) for r in rows])
    every = np.concatenate(rows)
    order = np.lexsort((whose, every))
    every, whose = every[order], whose[order]
    same = np.flatnonzero(every[1:] == every[:-1])
    common = Counter(zip(whose[same].tolist(), whose[same + 1].tolist(), strict=True))
    for (one, other), count in common.most_common():
        pair = (clients[one], clients[other])
        fewer = min(tables[client].rows for client in pair)
        unlike = all(len(rows[k]) >= DISTINCT * tables[clients[k]].rows for k in (one, other))
        if unlike and count >= max(FEWEST, COPIED * fewer):
            return (
                f"Clients '{pair[0]}' and '{pair[1]}' have {count} rows in common; if one is a copy of the other, remove "
                "it, or rows that one is tested on are trained on by the other."
            )
    return ""


def row_hashes(table: Table) -> np.ndarray:
    """A word for each row, ``[n]`` uint64: the same for the same values in columns of the same names."""
    total = np.zeros(table.rows, dtype=np.uint64)
    for name in sorted(table.columns.keys() - {SPLIT}):
        with np.errstate(over="ignore"):
            total = (total ^ _words(table.columns[name])) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(29)
    return total


def _words(column: Column) -> np.ndarray:
    """The value of each row in 64 bits, ``[n]``."""
    if isinstance(column, Categorical):
        # Within one process a text has one hash, and no other process sees these.
        categories = np.array([*(hash(category) for category in column.categories), 0], dtype=np.int64)
        return categories[column.codes].view(np.uint64)
    return np.where(np.isnan(column), np.nan, column + 0.0).view(np.uint64)


def _answers(training: Mapping[str, Table], preprocessor: Preprocessor) -> str:
    rows = sum(table.rows for table in training.values())
    if not preprocessor.task_type.has_classes or rows < JUDGED:
        return ""
    classes = [preprocessor.targets(table).numpy() for table in training.values()]
    told = [f.name for f in preprocessor.features if tells(f.name, list(training.values()), classes, rows // OFTEN)]
    if not told:
        return ""
    return (
        f"{first_of([repr(name) for name in told])} alone tells '{preprocessor.target}' in all {rows} training rows; if it "
        "is known only afterwards, leave it out with --ignore."
    )


def tells(name: str, tables: Sequence[Table], classes: Sequence[np.ndarray], most: int) -> bool:
    """Whether each word of a column, and none, has one class, and not all the same; numbers count as one word.

    Of columns with more than ``most`` words it is not.
    """
    class_of: dict[str | None, int] = {}
    for table, own in zip(tables, classes, strict=True):
        column = table.columns.get(name)
        codes = np.zeros(table.rows, dtype=np.int64)
        categories: tuple[str, ...] = ("",)
        if isinstance(column, Categorical):
            codes, categories = column.codes, column.categories
        if len(categories) > most:
            return False
        codes = np.where(table.missing(name), len(categories), codes)
        for code, class_ in zip(*divmod(np.unique(codes * MANY + own), MANY), strict=True):
            word = None if code == len(categories) else categories[code]
            if class_of.setdefault(word, class_) != class_:
                return False
    return len(class_of) <= most and len(set(class_of.values())) > 1


# --- Order of the rows ------------------------------------------------------------------------------------------------
#
# Rows that seem to be in the order of time, or windows that overlap, where test rows are drawn at random. Then rows that
# are held out have neighbours among those of training that are nearly the same, and a score flatters.


#: Rows that a client must have to be judged, and the share of such clients that a sentence must be true of.
ROWS, MOST = 30, 0.8
#: Share of the class changes of rows in random order below which classes persist; correlation of numbers with those of the
#: row before from which on they do.
CHANGES, CORRELATED = 0.5, 0.9
#: Share of the rows that must have a value of their own in a column of times.
DIFFERENT = 0.5
#: Names of columns of times; others that rise may just be what a file was sorted by.
_TIME = re.compile(r"time|date|day|week|month|year|hour|minute|second|stamp|epoch", re.IGNORECASE)
#: Neighbouring windows that are looked at, and the share of them that must overlap.
PAIRS, OVERLAP = 50, 0.5


def check_order(tables: Mapping[str, Table], preprocessor: Preprocessor) -> tuple[str, ...]:
    """A sentence each for signs that rows are ordered; none where the way they are held out takes account of it."""
    judged = {client: table for client, table in tables.items() if table.rows >= ROWS}
    if preprocessor.holdout is not None or not judged:
        return ()
    advice = (
        "rows drawn at random for the test are then nearly known from training; --holdout last holds out the last ones"
    )
    if preprocessor.shape is not None:
        shares = [_overlap(table.images) for table in judged.values() if table.images is not None]
        common = np.median(shares) if shares else 0.0
        if common > 0.0:
            return (f"Neighbouring windows overlap by {percent(float(common))}; {advice}.",)
    found = []
    numbers = [f.name for f in preprocessor.features if f.kind == "number" and _TIME.search(f.name)]
    times = [name for name in numbers if _of_most(judged, _rises(name))]
    if times:
        found.append(
            f"{first_of([repr(name) for name in times])} rises from row to row, as a time does; {advice}, or --holdout "
            f"time:{times[0]}."
        )
    elif _of_most(judged, _persists(preprocessor)):
        found.append(
            f"'{preprocessor.target}' is mostly the same, or nearly so, in neighbouring rows of a file; {advice}."
        )
    return tuple(found)


def _of_most(tables: Mapping[str, Table], said: Callable[[Table], bool]) -> bool:
    return sum(map(said, tables.values())) >= MOST * len(tables)


def _rises(name: str) -> Callable[[Table], bool]:
    """Whether a column never falls, and has many different values."""

    def rises(table: Table) -> bool:
        column = table.columns.get(name)
        if column is None or isinstance(column, Categorical) or np.isnan(column).any():
            return False
        steps = np.diff(column)
        return bool((steps >= 0).all() and np.count_nonzero(steps) >= DIFFERENT * table.rows)

    return rises


def _persists(preprocessor: Preprocessor) -> Callable[[Table], bool]:
    """Whether neighbouring rows have the same target more often than in random order, and the file is not sorted by it."""
    classes = preprocessor.task_type.has_classes

    def persists(table: Table) -> bool:
        y = preprocessor.targets(table).double().numpy()
        if y.ndim != 1 or not np.ptp(y):
            return False
        if classes:
            counts = np.unique(y, return_counts=True)[1]
            changes = np.count_nonzero(np.diff(y))
            usual = (table.rows - 1) * (1.0 - np.square(counts / table.rows).sum())
            # Sorted by class, it changes once for each; sorted within two parts, such as training and test, twice as often.
            return bool(2 * (len(counts) - 1) + 1 < changes < CHANGES * usual)
        ranks = np.argsort(np.argsort(y, kind="stable"), kind="stable").astype(np.float64)
        steps = np.diff(y)
        turns = np.count_nonzero(np.diff(np.sign(steps[steps != 0])))  # none where the file is sorted by it
        return bool(turns > 2 and np.corrcoef(ranks[1:], ranks[:-1])[0, 1] > CORRELATED)

    return persists


def _overlap(windows: np.ndarray) -> float:
    """The share of a window ``[c, h, t]`` with which the next begins, where most do; 0: they do not."""
    steps = windows.shape[3]
    first = np.linspace(0, len(windows) - 2, min(PAIRS, len(windows) - 1)).astype(int)
    found: list[int] = []
    for k in first:
        one, two = windows[k], windows[k + 1]
        for start in np.flatnonzero((one == two[:, :, :1]).all((0, 1))):
            if 0 < start < steps - 1 and np.ptp(two) and (one[:, :, start:] == two[:, :, : steps - start]).all():
                found.append(steps - int(start))
                break
    return float(np.median(found)) / steps if len(found) > OVERLAP * len(first) else 0.0
