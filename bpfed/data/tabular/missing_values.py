"""Words of a user's own that stand for no value: ``unknown`` everywhere, or ``999`` in one column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bpfed._util.errors import UserError, hint
from bpfed.data.tabular.table import Categorical, Column, Table


@dataclass(frozen=True)
class MissingValues:
    """What else is missing, beside `bpfed.data.tabular.table.MISSING`; whatever its case.

    Attributes:
        everywhere: Words that are in every column.
        columns: By column, those that are in it alone.
    """

    everywhere: frozenset[str] = frozenset()
    columns: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Iterable[str]) -> MissingValues:
        """Of ``WORD`` or ``COLUMN=WORD`` each."""
        everywhere: set[str] = set()
        columns: dict[str, frozenset[str]] = {}
        for text in said:
            column, equals, word = text.rpartition("=")
            word = word.strip().casefold()
            if not word or (equals and not column.strip()):
                raise UserError(f"'{text}' names no missing value; write WORD, or COLUMN=WORD for one column alone.")
            if equals:
                columns[column.strip()] = columns.get(column.strip(), frozenset()) | {word}
            else:
                everywhere.add(word)
        return cls(frozenset(everywhere), columns)

    def words(self, column: str) -> frozenset[str]:
        """Those of a column, in small letters."""
        return self.everywhere | self.columns.get(column, frozenset())

    def cells(self, column: str, cells: Sequence[str]) -> Sequence[str]:
        """Cells of a text file, empty where they stand for no value."""
        gone = self.words(column)
        return [("" if cell.strip().casefold() in gone else cell) for cell in cells] if gone else cells

    def out_of(self, table: Table) -> Table:
        """A table without the values that stand for none; a number is one of them however it is written."""
        if not self.everywhere and not self.columns:
            return table
        return replace(table, columns={name: self._out_of(name, column) for name, column in table.columns.items()})

    def _out_of(self, name: str, column: Column) -> Column:
        if isinstance(column, Categorical):
            return Categorical.of(self.cells(name, column.words()))
        numbers = [number for word in self.words(name) if (number := _number(word)) is not None]
        return np.where(np.isin(column, numbers), np.nan, column) if numbers else column

    def check(self, known: Iterable[str]) -> None:
        """Raise a `UserError` if a column is named that nobody has."""
        known = set(known)
        for name in self.columns:
            if name not in known:
                raise UserError(f"No client has the column '{name}' with missing values; {hint(name, known)}")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
