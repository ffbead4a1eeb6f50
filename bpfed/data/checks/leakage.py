"""Leakage: a number that is far from all others, rows that two clients have, a column that gives the answer away.

These are looked for where all clients' rows are at hand; nothing of it is told where they are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bpfed._util.errors import first_of
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
    tables: Mapping[str, Table], training: Mapping[str, Table], preparation: Preprocessor
) -> tuple[str, ...]:
    """A sentence each for what there is of it.

    Args:
        tables: All rows of each client.
        training: Those for training.
        preparation: What was made of these.
    """
    if preparation.shape is not None:
        return ()
    found = [_far(training, preparation), _copies(tables), _answers(training, preparation)]
    return tuple(sentence for sentence in found if sentence)


def _far(training: Mapping[str, Table], preparation: Preprocessor) -> str:
    told = []
    # Counts of words are 0 nearly everywhere, and no typing errors.
    hashed = preparation.recoding.hashed
    numbers = {
        f.name: (f.mean, f.scale)
        for f in preparation.features
        if f.kind == "number" and f.scale and f.name not in hashed
    }
    if preparation.task_type.standardised:
        numbers[preparation.target] = (preparation.target_mean, preparation.target_scale)
    for client, table in training.items():
        own = preparation.local.get(client, {})
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
        levels = np.array([*(hash(level) for level in column.levels), 0], dtype=np.int64)
        return levels[column.codes].view(np.uint64)
    return np.where(np.isnan(column), np.nan, column + 0.0).view(np.uint64)


def _answers(training: Mapping[str, Table], preparation: Preprocessor) -> str:
    rows = sum(table.rows for table in training.values())
    if not preparation.task_type.has_classes or rows < JUDGED:
        return ""
    classes = [preparation.targets(table).numpy() for table in training.values()]
    told = [f.name for f in preparation.features if tells(f.name, list(training.values()), classes, rows // OFTEN)]
    if not told:
        return ""
    return (
        f"{first_of([repr(name) for name in told])} alone tells '{preparation.target}' in all {rows} training rows; if it "
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
        levels: tuple[str, ...] = ("",)
        if isinstance(column, Categorical):
            codes, levels = column.codes, column.levels
        if len(levels) > most:
            return False
        codes = np.where(table.missing(name), len(levels), codes)
        for code, class_ in zip(*divmod(np.unique(codes * MANY + own), MANY), strict=True):
            word = None if code == len(levels) else levels[code]
            if class_of.setdefault(word, class_) != class_:
                return False
    return len(class_of) <= most and len(set(class_of.values())) > 1
