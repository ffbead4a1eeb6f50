"""Order: rows that seem to be in the order of time, or windows that overlap, where test rows are drawn at random.

Then rows that are held out have neighbours among those of training that are nearly the same, and a score flatters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bpfed._util.errors import first_of
from bpfed._util.text import percent
from bpfed.data.tabular.table import Categorical, Table

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor

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


def check_order(tables: Mapping[str, Table], preparation: Preprocessor) -> tuple[str, ...]:
    """A sentence each for signs that rows are ordered; none where the way they are held out takes account of it."""
    judged = {client: table for client, table in tables.items() if table.rows >= ROWS}
    if preparation.holdout is not None or not judged:
        return ()
    advice = (
        "rows drawn at random for the test are then nearly known from training; --holdout last holds out the last ones"
    )
    if preparation.shape is not None:
        shares = [_overlap(table.images) for table in judged.values() if table.images is not None]
        common = np.median(shares) if shares else 0.0
        if common > 0.0:
            return (f"Neighbouring windows overlap by {percent(float(common))}; {advice}.",)
    found = []
    numbers = [f.name for f in preparation.features if f.kind == "number" and _TIME.search(f.name)]
    times = [name for name in numbers if _of_most(judged, _rises(name))]
    if times:
        found.append(
            f"{first_of([repr(name) for name in times])} rises from row to row, as a time does; {advice}, or --holdout "
            f"time:{times[0]}."
        )
    elif _of_most(judged, _persists(preparation)):
        found.append(
            f"'{preparation.target}' is mostly the same, or nearly so, in neighbouring rows of a file; {advice}."
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


def _persists(preparation: Preprocessor) -> Callable[[Table], bool]:
    """Whether neighbouring rows have the same target more often than in random order, and the file is not sorted by it."""
    classes = preparation.task_type.has_classes

    def persists(table: Table) -> bool:
        y = preparation.targets(table).double().numpy()
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
