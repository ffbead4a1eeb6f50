"""A table: named columns of numbers or words, or images with their targets, read from one file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bpfed._util.errors import UserError, hint, quoted
from bpfed.config import registry

if TYPE_CHECKING:
    from bpfed.data.tabular.recode import MissingValues

#: Cells that mean "not known", whatever their case.
MISSING = frozenset({"", "?", "-", "--", "na", "n/a", "n.a.", "#n/a", "nan", "null", "<na>"})
TRUTH = frozenset({"true", "false"})
#: Ending of what may be a folder with the parts of one table.
IN_PARTS = ".parquet"
#: Larger numbers are codes or mistakes: their squares would drown all others.
LARGEST = 1e30
UNKNOWN = -1
#: The column that says which rows are for training and which for testing.
SPLIT = "split"
#: Columns that an error lists.
SHOWN = 12


@dataclass(frozen=True)
class Categorical:
    """A column of words.

    Attributes:
        codes: Which category each row has, ``[n]`` int64, `UNKNOWN` where it is missing.
        categories: The words that occur, in order.
    """

    codes: np.ndarray
    categories: tuple[str, ...]

    @classmethod
    def of(cls, cells: Sequence[str]) -> Categorical:
        """Of one word per row; those of `MISSING` are missing, and truth values are written small."""
        spelt = {cell: cell.strip() for cell in set(cells)}
        spelt = {cell: word.casefold() if word.casefold() in TRUTH else word for cell, word in spelt.items()}
        categories = sorted({word for word in spelt.values() if word.casefold() not in MISSING})
        place = {word: i for i, word in enumerate(categories)}
        code = {cell: place.get(word, UNKNOWN) for cell, word in spelt.items()}
        return cls(np.fromiter(map(code.__getitem__, cells), np.int64, len(cells)), tuple(categories))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> Categorical:
        """These rows, with the categories that are left among them."""
        kept, codes = np.unique(self.codes[rows], return_inverse=True)
        categories = tuple(self.categories[k] for k in kept if k != UNKNOWN)
        return Categorical(codes - int(UNKNOWN in kept), categories)

    def words(self) -> list[str]:
        """The word of each row, empty where it is missing."""
        return [self.categories[k] if k != UNKNOWN else "" for k in self.codes.tolist()]


#: Numbers, ``[n]`` float64 with NaN where missing, or words.
Column = np.ndarray | Categorical


@dataclass(frozen=True)
class Table:
    """The rows of one client, or of several.

    Attributes:
        name: Where it is from, for errors.
        rows: Number of rows n.
        columns: Its columns, by name.
        images: Images, ``[n, c, h, w]`` numbers, where the inputs are images, or sequences, ``[n, c, 1, t]``; then the
            columns only say what they show.
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


def as_text(values: Sequence[Any]) -> list[str]:
    """Typed cells of a column as the text that a CSV file would have: dates as in ISO 8601, empty where there is none.

    Where all times of day are midnight, they are dates.

    Raises:
        TypeError: A value is no number, text, truth value, date or time.
    """
    moments = [value for value in values if isinstance(value, datetime) and value == value]
    days = bool(moments) and all(m.time() == time() and m.tzinfo is None for m in moments)
    return [
        _text(value.date() if days and isinstance(value, datetime) and value == value else value) for value in values
    ]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return written(float(value))
    if isinstance(value, date | time):
        return value.isoformat() if value == value else ""  # pandas has a date that is none
    raise TypeError(type(value).__name__)


def column_name(text: str) -> str:
    """The name of a column; a line break in it depends on the program that wrote it, and cannot be typed."""
    return re.sub(r"\s*[\r\n]\s*", " ", text.strip())


@dataclass(frozen=True)
class ArrayOptions:
    """How inputs that are no columns are read: images, and arrays with three axes or more.

    Attributes:
        kind: What an array of three axes is, images ``[n, h, w]`` or sequences ``[n, t, c]``; None: as its shape suggests.
        size: Height and width that images of files are resized to; None: they stay as they are.
        channels: Channels that images of files must have; None: 1 if all are shades of grey, else 3.
    """

    kind: Literal["image", "sequence"] | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None

    @classmethod
    def of(cls, kind: Literal["image", "sequence"] | None = None, image_size: str | None = None) -> ArrayOptions:
        """What ``--input`` and ``--image-size`` say; a size is ``HEIGHTxWIDTH``."""
        if image_size is None:
            return cls(kind)
        found = re.fullmatch(r"\s*([1-9]\d{0,3})\s*[xX×]\s*([1-9]\d{0,3})\s*", image_size)
        if found is None:
            raise UserError(f"The image size is '{image_size}', but must be HEIGHTxWIDTH in pixels, such as 64x64.")
        return cls(kind, (int(found[1]), int(found[2])))


#: Nothing is said of them.
AS_THEY_ARE = ArrayOptions()


@dataclass(frozen=True)
class ReadOptions:
    """How the columns of a file are read; see `read_table`."""

    words: frozenset[str]
    ignore: Sequence[str]
    used: frozenset[str] | None
    missing: MissingValues
    arrays: ArrayOptions = AS_THEY_ARE


@dataclass(frozen=True)
class TableFormat:
    """What reads the files of one ending; `bpfed.config.registry.FORMATS` says which.

    Attributes:
        read: The table in a file.
        read_cells: The text of each cell of some columns, by name, as it is written there.
    """

    read: Callable[[Path, ReadOptions], Table]
    read_cells: Callable[[Path, Sequence[str]], dict[str, list[str]]]


def read_table(
    path: str | Path,
    words: Iterable[str] = (),
    *,
    ignore: Sequence[str] = (),
    used: Iterable[str] | None = None,
    missing: Iterable[str] = (),
    arrays: ArrayOptions = AS_THEY_ARE,
) -> Table:
    """Read a file of rows: CSV or TSV with a header, also compressed, Excel, ARFF, Parquet, Feather, NPZ or NPY.

    A folder that is called ``NAME.parquet`` is one table in parts. A folder of PNG or JPEG images is one table
    (`bpfed.data.tabular.image_folder`), as is one with ``x.npy`` and ``y.npy``.

    An NPZ file holds ``x`` ``[n, F]`` numbers, ``[n, h, w]`` or ``[n, h, w, c]`` images or ``[n, t, c]`` sequences, and
    ``y`` ``[n]``; or one array ``[n]`` for each column. Pickled objects are refused.

    Args:
        path: The file.
        words: Columns that are words, though all their cells may look like numbers: ``250.00``, ``007``.
        ignore: Columns that are not inputs, and may have a type that is not read otherwise, such as dates in Parquet.
        used: The only columns that are needed; others may have such a type too. None: all but those of ``ignore``.
        missing: What else stands for no value, ``WORD`` or ``COLUMN=WORD`` each
            (`bpfed.data.tabular.recode.MissingValues`).
        arrays: How images and sequences are read.

    Raises:
        UserError: It cannot be read, or is not what its ending says.
    """
    from bpfed.data.tabular.recode import MissingValues

    path = Path(path)
    needed = None if used is None else frozenset(used)
    asked = ReadOptions(frozenset(words), ignore, needed, MissingValues.of(missing), arrays)
    ending, several = ending_of(path), array_format(path)
    if ending is None and several is None:
        raise UserError(f"'{path}' is not a {any_of(endings())} file; convert it to one of these.")
    try:
        mode = path.stat().st_mode
        if several is None and not stat.S_ISREG(mode) and not (ending == IN_PARTS and stat.S_ISDIR(mode)):
            raise UserError(f"'{path}' is a {_kind(mode)}, not a file; put a file there or remove it.")
        own = several or _own_format(ending or "")
        table = own.read(path, asked) if own is not None else _of_plugin(path, ending or "", asked.words)
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
    table = asked.missing.out_of(table)
    check_range(table)
    return table


def endings() -> tuple[str, ...]:
    """Endings of the files that are read, with those of other packages' formats."""
    return tuple(f".{name}" for name in registry.FORMATS)


def ending_of(path: Path) -> str | None:
    """The ending of a file that is read, such as ``.csv.gz``; None: it has none of them."""
    name = path.name.lower()
    for known in (registry.FORMATS.own, registry.FORMATS.plugins):  # what is installed is asked only where it matters
        found = [f".{e}" for e in (known() if callable(known) else known) if name.endswith(f".{e}") and name != f".{e}"]
        if found:
            return max(found, key=len)
    return None


def array_format(path: Path) -> TableFormat | None:
    """What reads a folder of images or arrays, or an image; None: it is none."""
    from bpfed.data.tabular import image_folder, npz

    if image_folder.is_image(path) or image_folder.is_image_folder(path):
        return image_folder.FORMAT
    return npz.FOLDER if npz.is_array_folder(path) else None


def _own_format(ending: str) -> TableFormat | None:
    """What reads files of this ending; None: another package does."""
    name = ending.removeprefix(".")
    return registry.FORMATS.load_own(name) if name in registry.FORMATS.own else None


def _of_plugin(path: Path, ending: str, words: Iterable[str]) -> Table:
    """A file as the format of another package reads it: a function of its path to a `Table`."""
    name = ending.removeprefix(".")
    read = registry.FORMATS.load(name)
    if not callable(read):
        raise registry.FORMATS.unfit(name, "is not a function of a path")
    try:
        table = read(path)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"'{path}' cannot be read by the package {registry.FORMATS.package(name)} ({reason}); check the file."
        ) from error
    if not isinstance(table, Table):
        raise registry.FORMATS.unfit(name, f"gives a {type(table).__name__} instead of a Table")
    as_words = {
        n: Categorical.of([written(v) for v in column.tolist()])
        for n, column in table.columns.items()
        if n in words and not isinstance(column, Categorical)
    }
    return replace(table, columns={**table.columns, **as_words})


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


#: What stands for half of a character, or for a byte that is no UTF-8.
_HALF = re.compile("[\ud800-\udfff]")


def check_range(table: Table) -> None:
    """Raise a `UserError` if a column has a number too large to be one, or text with half of a character."""
    for name, column in table.columns.items():
        text = "\n".join([name, *(column.categories if isinstance(column, Categorical) else ())])
        if _HALF.search(text):
            raise UserError(
                f"Column {quoted([name])} of '{table.name}' has half of a character, which no file of text can hold; "
                "correct its name and its words."
            )
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


# --- Clients ----------------------------------------------------------------------------------------------------------


def by_column(table: Table, client_column: str) -> dict[str, Table]:
    """Cut a table into one for each client, named by a column, which they do not have any more."""
    column = table.column(client_column)
    words = column if isinstance(column, Categorical) else Categorical.of(table.words(client_column))
    nobody = table.missing(client_column)
    if nobody.any():
        raise UserError(
            f"Row {int(np.flatnonzero(nobody)[0]) + 1} of '{table.name}' has no '{client_column}'; fill it in or "
            "remove the row."
        )
    rest = table.without([client_column])
    order = np.argsort(words.codes, kind="stable")
    ends = np.bincount(words.codes, minlength=len(words.categories)).cumsum()
    parts = np.split(order, ends[:-1])
    return {
        check_client_name(name, table.name): rest.take(rows, name)
        for name, rows in zip(words.categories, parts, strict=True)
    }


def column_names(given: str | Iterable[str] | None) -> list[str]:
    """Names of columns or the like, given one by one or in one text with commas between them."""
    if given is None or isinstance(given, str):
        return [name.strip() for name in (given or "").split(",") if name.strip()]
    names = list(given)
    strange = [name for name in names if "," in name]
    if strange:
        raise UserError(f"Names with a comma in them, such as {quoted(strange)}, cannot be given here; rename them.")
    return names


def check_client_name(name: str, where: str) -> str:
    """A client's name, if it can be shown and written down."""
    if not is_utf8(name):
        raise UserError(f"A client of '{where}' has a name that is not UTF-8, {name!r}; rename it.")
    if not name.isprintable() or not name.strip():
        raise UserError(f"A client of '{where}' has a name that cannot be printed, {name!r}; rename it.")
    return name


def is_utf8(name: str) -> bool:
    """Whether a name in the file system can be written down."""
    try:
        os.fsencode(name).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# --- Verbatim ---------------------------------------------------------------------------------------------------------
#
# Columns of a file as they are written there, to be copied and not to be learnt from.


def passthrough(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The text of each cell of these columns, by name, of a file that was read before.

    Raises:
        UserError: There is no such column.
    """
    ending = ending_of(path)
    own = array_format(path) or (_own_format(ending) if ending is not None else None)
    if own is None:
        raise UserError(f"Columns of '{path}' cannot be copied as they are written there; convert it to a .csv file.")
    return own.read_cells(path, names)
