"""Split: which of each client's examples are held out for testing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np

from bpfed._util.errors import UserError, quoted
from bpfed.data.tabular.table import Categorical, Table


def split(y: np.ndarray, owners: np.ndarray, test_fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Hold out a fraction of every client's examples, of each class alike.

    Of n examples of a client, n * test_fraction are held out, rounded; of those of one class, that fraction rounded up
    or down. Every client keeps at least one for training, so a client with a single example has none to test on.

    Args:
        y: Class of each example, ``[E]``; all zero where there are no classes.
        owners: Client of each example, ``[E]``, negative for nobody.
        test_fraction: From 0 up to, but not, 1.
        rng: Source of randomness.

    Returns:
        ``[E]`` bool, True for a test example.
    """
    check_fraction(test_fraction)
    test = np.zeros(len(y), dtype=bool)
    rows = np.flatnonzero(owners >= 0)
    if not len(rows):
        return test
    owner, label = owners[rows], np.unique(y[rows], return_inverse=True)[1]
    # Line every client's examples up class by class, classes in an order of the client's own, and take every
    # (1 / fraction)-th. What rounding gives or takes then falls on classes at random.
    cell = owner * (label.max() + 1) + label
    _, cell = np.unique(cell, return_inverse=True)
    key = rng.random(cell.max() + 1)[cell]
    order = np.lexsort((rng.random(len(rows)), key, owner))
    owner = owner[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    sizes = np.diff(first, append=len(owner))
    place = np.arange(len(owner)) - np.repeat(first, sizes)
    taken = rounded(place + 1, test_fraction) > rounded(place, test_fraction)
    none_left = np.add.reduceat(taken, first, dtype=np.int64) == sizes
    taken[first[none_left]] = False
    test[rows[order[taken]]] = True
    return test


def check_fraction(test_fraction: float) -> None:
    """Raise a `UserError` unless this is a fraction that leaves something to train on."""
    if not 0 <= test_fraction < 1:
        raise UserError(f"A test fraction must be at least 0 and below 1, not {test_fraction:g}.")


def rounded(examples: np.ndarray, fraction: float) -> np.ndarray:
    """That fraction of so many examples as a whole number; halves are rounded up."""
    # Rounded first: 0.1 * 35 + 0.5 must not fall below 4 by the last bit.
    return np.floor(np.round(examples * fraction + 0.5, 9))


# --- Hold-out by a column ---------------------------------------------------------------------------------------------
#
# The last rows of each client by time, or whole groups of its rows.
#
# Rows drawn at random flatter a model where neighbours are alike, such as overlapping windows or visits of one patient:
# what is held out was nearly seen in training.

_MONTH = re.compile(r"\d{4}-\d{2}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Holdout:
    """How rows are held out, for the test and among training rows.

    Attributes:
        kind: ``"time"``: the last rows of each client by a column. ``"last"``: the last ones as they are in its file.
            ``"group"``: whole groups of its rows.
        column: The column of times (numbers or ISO dates) or of groups, which is no input; empty for ``"last"``.
        share: Of ``"last"``, the share of rows held out for the test; None: the test fraction.
    """

    kind: Literal["time", "group", "last"]
    column: str = ""
    share: float | None = None

    @classmethod
    def of(cls, text: str | None) -> Holdout | None:
        """What ``time:COLUMN``, ``group:COLUMN``, ``last`` or ``last:0.3`` says; None: rows are drawn at random."""
        if text is None:
            return None
        kind, _, column = text.partition(":")
        kind, column = kind.strip(), column.strip()
        if kind == "time" and column:
            return cls("time", column)
        if kind == "group" and column:
            return cls("group", column)
        if kind == "last" and not column:
            return cls("last")
        if kind == "last":
            try:
                share = float(column)
            except ValueError:
                share = 0.0
            if not 0.0 < share < 1.0:
                raise UserError(f"The hold-out is '{text}', but the share of last rows must be above 0 and below 1.")
            return cls("last", share=share)
        raise UserError(
            f"The hold-out is '{text}', but must be time:COLUMN, group:COLUMN or last:SHARE, such as time:admitted, "
            "group:patient or last:0.3."
        )

    def __str__(self) -> str:
        if self.kind == "last":
            return "last" if self.share is None else f"last:{self.share:g}"
        return f"{self.kind}:{self.column}"

    @property
    def ordered(self) -> bool:
        """Whether the last rows are held out, in whatever order."""
        return self.kind != "group"

    @property
    def columns(self) -> tuple[str, ...]:
        """The column by which rows are held out, if there is one."""
        return (self.column,) if self.column else ()

    @property
    def words(self) -> tuple[str, ...]:
        """Columns to be read as words: identities, which may look like numbers."""
        return (self.column,) if self.kind == "group" else ()

    def check(self, tables: Mapping[str, Table], name: str) -> None:
        """Raise a `UserError` if nothing of these clients' tables can be held out so; ``name`` is what they are called."""
        if len(self._undivided(tables)) == len(tables):
            raise UserError(
                f"All rows of each client of '{name}' are of one '{self.column}', so no group can be held out; choose "
                "another column for --holdout."
            )

    def notes(self, tables: Mapping[str, Table]) -> list[str]:
        """What is done to these clients' tables, in sentences."""
        if self.kind == "last":
            return ["The last rows of each client, in the order of its file, are held out."]
        what = "The last rows of each client by" if self.kind == "time" else "Whole groups of rows by"
        found = [f"{what} '{self.column}' are held out; the column is used for this alone and is no input."]
        if lone := self._undivided(tables):
            who = f"Client {quoted(lone)} has" if len(lone) == 1 else f"Clients {quoted(lone)} have"
            found.append(f"{who} rows of one '{self.column}' only, so none of them is held out.")
        return found

    def _undivided(self, tables: Mapping[str, Table]) -> list[str]:
        """Clients whose rows are all of one group, where groups are held out."""
        return [client for client, table in tables.items() if self.kind == "group" and not self.keys(table).any()]

    def keys(self, table: Table) -> np.ndarray:
        """What decides about each row, ``[n]`` int64: its place in time, or the number of its group.

        Rows of the same time are in the order of the file.

        Raises:
            UserError: The column lacks, or a value of it; or its text is no date.
        """
        if self.kind == "last":
            return np.arange(table.rows)
        column = table.column(self.column)
        table.check_filled(self.column)
        if self.kind == "group":
            return column.codes if isinstance(column, Categorical) else np.unique(column, return_inverse=True)[1]
        times = self._times(column, table.name) if isinstance(column, Categorical) else column
        places = np.empty(table.rows, dtype=np.int64)
        places[np.argsort(times, kind="stable")] = np.arange(table.rows)
        return places

    def rows(self, table: Table, fraction: float, rng: np.random.Generator) -> np.ndarray:
        """Which rows of a client are held out, ``[n]`` bool: about this fraction of them, and never all.

        Args:
            table: The client's rows.
            fraction: From 0 up to, but not, 1; `share` goes before it.
            rng: Which groups are drawn.
        """
        fraction = fraction if self.share is None else self.share
        check_fraction(fraction)
        keys = self.keys(table)
        number = min(int(rounded(np.array(table.rows), fraction)), table.rows - 1)
        if self.ordered:
            return keys >= table.rows - number
        sizes = np.bincount(keys)
        order = rng.permutation(len(sizes))
        chosen = order[whole_groups(sizes[order].tolist(), number)]
        return np.isin(keys, chosen)

    def _times(self, column: Categorical, name: str) -> np.ndarray:
        """Microseconds of dates that are written as text, ``[n]`` int64."""
        read = [self._date(word, name) for word in column.categories]
        zoned = [date.tzinfo is not None for date in read]
        if any(zoned) and not all(zoned):
            one, other = column.categories[zoned.index(True)], column.categories[zoned.index(False)]
            raise UserError(
                f"Column '{self.column}' of '{name}' has dates with a time zone and without, such as '{one}' and "
                f"'{other}'; write all alike."
            )
        dates = [date if date.tzinfo is not None else date.replace(tzinfo=UTC) for date in read]
        return np.array([(date - _EPOCH) // timedelta(microseconds=1) for date in dates], dtype=np.int64)[column.codes]

    def _date(self, word: str, name: str) -> datetime:
        try:
            return datetime.fromisoformat(f"{word}-01" if _MONTH.fullmatch(word) else word)
        except ValueError:
            raise UserError(
                f"Column '{self.column}' of '{name}' has '{word[:40]}', but to hold out rows by time it must have numbers "
                "or ISO dates, such as 2024-05-14 or 2024-05-14T10:30; convert it."
            ) from None


def whole_groups(sizes: Sequence[int], number: int) -> np.ndarray:
    """Which groups are held out so that about ``number`` rows are, ``[G]`` bool; one at least, and never all.

    Each is taken in turn if that brings the number of rows nearer, so that it is off by half a group at most. Where
    none does, the smallest is taken.

    Args:
        sizes: Rows of each group, ``[G]``, in the order in which they are taken.
        number: Rows to hold out; 0: none.
    """
    taken = np.zeros(len(sizes), dtype=bool)
    if number < 1 or len(sizes) < 2:
        return taken
    held, total = 0, sum(sizes)
    for k, size in enumerate(sizes):
        if held + size < total and abs(held + size - number) < abs(held - number):
            held += size
            taken[k] = True
    if not held:
        taken[int(np.argmin(sizes))] = True
    return taken
