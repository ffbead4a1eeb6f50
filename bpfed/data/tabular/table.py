"""A table: named columns of numbers or words, or images with their targets, read from one file."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bpfed._util.errors import UserError, hint, quoted

#: Cells that mean "not known", whatever their case.
MISSING = frozenset({"", "?", "-", "--", "na", "n/a", "n.a.", "#n/a", "nan", "null", "<na>"})
TRUTH = frozenset({"true", "false"})
#: Endings of the files that are read, and what reads them.
ENDINGS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".npz": "npz"}
#: Larger numbers are codes or mistakes: their squares would drown all others.
LARGEST = 1e30
UNKNOWN = -1


@dataclass(frozen=True)
class Categorical:
    """A column of words.

    Attributes:
        codes: Which level each row has, ``[n]`` int64, `UNKNOWN` where it is missing.
        levels: The words that occur, in order.
    """

    codes: np.ndarray
    levels: tuple[str, ...]

    @classmethod
    def of(cls, cells: Sequence[str]) -> Categorical:
        """Of one word per row; those of `MISSING` are missing, and truth values are written small."""
        spelt = {cell: cell.strip() for cell in set(cells)}
        spelt = {cell: word.casefold() if word.casefold() in TRUTH else word for cell, word in spelt.items()}
        levels = sorted({word for word in spelt.values() if word.casefold() not in MISSING})
        place = {word: i for i, word in enumerate(levels)}
        code = {cell: place.get(word, UNKNOWN) for cell, word in spelt.items()}
        return cls(np.fromiter(map(code.__getitem__, cells), np.int64, len(cells)), tuple(levels))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> Categorical:
        """These rows, with the levels that are left among them."""
        kept, codes = np.unique(self.codes[rows], return_inverse=True)
        levels = tuple(self.levels[k] for k in kept if k != UNKNOWN)
        return Categorical(codes - int(UNKNOWN in kept), levels)

    def words(self) -> list[str]:
        """The word of each row, empty where it is missing."""
        return [self.levels[k] if k != UNKNOWN else "" for k in self.codes.tolist()]


#: Numbers, ``[n]`` float64 with NaN where missing, or words.
Column = np.ndarray | Categorical


@dataclass(frozen=True)
class Table:
    """The rows of one client, or of several.

    Attributes:
        name: Where it is from, for errors.
        rows: Number of rows n.
        columns: Its columns, by name.
        images: Images, ``[n, c, h, w]`` numbers, where the inputs are images; then the columns only say what they show.
    """

    name: str
    rows: int
    columns: dict[str, Column] = field(default_factory=dict)
    images: np.ndarray | None = None

    def __len__(self) -> int:
        return self.rows

    def take(self, rows: np.ndarray, name: str | None = None) -> Table:
        """The table of these rows only, ``[m]`` indices or ``[n]`` bool."""
        columns = {key: c.take(rows) if isinstance(c, Categorical) else c[rows] for key, c in self.columns.items()}
        number = int(np.count_nonzero(rows)) if rows.dtype == bool else len(rows)
        images = None if self.images is None else self.images[rows]
        return Table(name or self.name, number, columns, images)

    def without(self, names: Iterable[str]) -> Table:
        """The table without these columns; those that it has not are no mistake."""
        left = set(names)
        return replace(self, columns={key: c for key, c in self.columns.items() if key not in left})

    def column(self, name: str) -> Column:
        """The column of that name."""
        if name not in self.columns:
            raise UserError(f"'{self.name}' has no column '{name}'; {hint(name, self.columns)}")
        return self.columns[name]

    def words(self, name: str) -> list[str]:
        """A column as words, one per row, empty where missing; whole numbers are written as such."""
        column = self.column(name)
        return column.words() if isinstance(column, Categorical) else [written(v) for v in column.tolist()]

    def missing(self, name: str) -> np.ndarray:
        """Where a column has no value, ``[n]`` bool; everywhere, if the table lacks it."""
        column = self.columns.get(name)
        if column is None:
            return np.ones(self.rows, dtype=bool)
        return column.codes == UNKNOWN if isinstance(column, Categorical) else np.isnan(column)

    def check_filled(self, name: str) -> None:
        """Raise a `UserError` unless every row has a value in this column."""
        rows = np.flatnonzero(self.missing(name))
        if len(rows):
            have, them = ("has", "the row") if len(rows) == 1 else ("have", "them")
            raise UserError(
                f"{len(rows)} of the {self.rows} rows of '{self.name}' {have} no '{name}', first in row "
                f"{rows[0] + 1}; fill it in or remove {them}."
            )


def written(value: float) -> str:
    """A number as a word: ``3`` for 3.0, the shortest that reads back as the same otherwise, empty for NaN."""
    if value != value:
        return ""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def read_table(
    path: str | Path,
    words: Iterable[str] = (),
    *,
    ignore: Sequence[str] = (),
    used: Iterable[str] | None = None,
    missing: Iterable[str] = (),
) -> Table:
    """Read a file of rows: CSV or TSV with a header, Parquet, or NPZ.

    An NPZ file holds ``x`` ``[n, F]`` numbers or ``[n, h, w]`` or ``[n, h, w, c]`` images, and ``y`` ``[n]``; or one
    array ``[n]`` for each column. Pickled objects are refused.

    Args:
        path: The file.
        words: Columns that are words, though all their cells may look like numbers: ``250.00``, ``007``.
        ignore: Columns that are not inputs, and may have a type that is not read otherwise, such as dates in Parquet.
        used: The only columns that are needed; others may have such a type too. None: all but those of ``ignore``.
        missing: What else stands for no value, ``WORD`` or ``COLUMN=WORD`` each (`bpfed.data.tabular.missing_values`).

    Raises:
        UserError: It cannot be read, or is not what its ending says.
    """
    from bpfed.data.tabular.missing_values import MissingValues

    path, missing_values, words = Path(path), MissingValues.of(missing), frozenset(words)
    kind = ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"'{path}' is not a {any_of(ENDINGS)} file; convert it to one of these.")
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"'{path}' is a {_kind(mode)}, not a file; put a file there or remove it.")
        if kind == "csv":
            from bpfed.data.tabular.csvfile import read_csv

            table = read_csv(path, words, missing_values)
        elif kind == "parquet":
            from bpfed.data.tabular.parquet import read_parquet

            table = read_parquet(path, ignore, used, words)
        else:
            from bpfed.data.tabular.npz import read_npz

            table = read_npz(path, words)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise UserError(f"'{path}' is a link to a file that does not exist; fix it or remove it.") from error
        raise UserError(f"'{path}' does not exist; check the path.") from error
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror or error}); fix it or remove it.") from error
    except MemoryError as error:
        raise UserError(f"'{path}' does not fit into memory; split it into smaller files.") from error
    if not table.rows:
        raise UserError(f"'{path}' has no rows; remove it or give it some.")
    table = missing_values.out_of(table)
    check_range(table)
    return table


def check_columns(path: Path, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names of columns that a file has not; all of them at once."""
    known = list(known)
    strange = [name for name in names if name not in known]
    if len(strange) == 1:
        raise UserError(f"'{path}' has no column '{strange[0]}'; {hint(strange[0], known)}")
    if strange:
        raise UserError(f"'{path}' has no columns {quoted(strange)}; choose from: {quoted(known, 12)}.")


def any_of(names: Iterable[str]) -> str:
    """Names as alternatives: ``.csv, .tsv or .npz``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _kind(mode: int) -> str:
    return "folder" if stat.S_ISDIR(mode) else "pipe or device"


def check_range(table: Table) -> None:
    """Raise a `UserError` if a column has a number too large to be one."""
    for name, column in table.columns.items():
        if isinstance(column, Categorical):
            continue
        with np.errstate(invalid="ignore"):
            bad = np.abs(column) > LARGEST
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            what = "an infinite number" if np.isinf(column[row]) else f"the number {column[row]:g}"
            raise UserError(
                f"Column '{name}' of '{table.name}' has {what} in row {row + 1}; correct it, or leave the cell blank."
            )
    if table.images is not None and table.images.dtype.kind == "f":
        bad = ~(np.abs(table.images.reshape(table.rows, -1)).max(1) <= LARGEST)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise UserError(f"Image {row + 1} of '{table.name}' has missing or infinite values; correct or remove it.")


# --- Verbatim ---------------------------------------------------------------------------------------------------------
#
# Columns of a file as they are written there, to be copied and not to be learnt from.


def passthrough(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The text of each cell of these columns, by name, of a file that was read before.

    Raises:
        UserError: There is no such column.
    """
    kind = ENDINGS.get(path.suffix.lower())
    if kind == "csv":
        from bpfed.data.tabular.csvfile import read_cells as read
    elif kind == "parquet":
        from bpfed.data.tabular.parquet import read_cells as read
    else:
        from bpfed.data.tabular.npz import read_cells as read
    return read(path, names)
