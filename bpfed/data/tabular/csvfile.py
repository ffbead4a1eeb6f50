"""CSV: rows of text with a header, separated by comma, semicolon, tab or bar; also compressed by gzip or zstd.

Large plain files are read by pyarrow, where that is installed.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from bpfed._util.errors import OTHERS, UserError, first_of, quoted
from bpfed._util.files import write_whole
from bpfed.data.tabular.npz import LIMIT_NAME, unpacked_limit
from bpfed.data.tabular.recode import MissingValues
from bpfed.data.tabular.table import (
    MISSING,
    UNKNOWN,
    Categorical,
    Column,
    ReadOptions,
    Table,
    TableFormat,
    check_columns,
    column_name,
)

# --- Separators in numbers --------------------------------------------------------------------------------------------
#
# Commas and points that may set off thousands, and would pass silently for decimal marks.

#: A number whose points can only set off thousands: there is a decimal comma too, or there are two of them.
GROUPED = re.compile(r"[+-]?\d{1,3}((\.\d{3})+,\d+|(\.\d{3}){2,})")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_SHORT = re.compile(r"^[^\S\n]*+[+-]?\d{1,3}[^\S\n]*+$", re.MULTILINE)
_LONG = re.compile(r"^[^\S\n]*+[+-]?\d{4,}+[^\S\n]*+$", re.MULTILINE)


@dataclass
class NumberFormat:
    """How the numbers of a column are written, of a file in which ``1,5`` is one and a half.

    Attributes:
        decimal: A cell with a comma that can only be a decimal mark, such as ``0,5``.
        comma: One with a comma that may set off thousands, such as ``1,234``.
        rounded: Whether such a one ends in 0, which a program that drops the last zeros of fractions would not write.
        short: Whether there are whole numbers below 1000.
        long: Whether there are whole numbers from 1000 on without a mark.
        point: A cell with a point that may set off thousands, such as ``1.234``.
        grouped: One with points that can only set off thousands, such as ``1.234,5``.
        fraction: Whether there is a point that can only be a decimal mark.
    """

    decimal: str | None = None
    comma: str | None = None
    rounded: bool = False
    short: bool = False
    long: bool = False
    point: str | None = None
    fraction: bool = False
    grouped: str | None = None

    def add(self, cells: Iterable[str]) -> None:
        """Look at more cells; at as few as tell something new, for a table may be long."""
        cells = list(cells)
        text = "\n".join(cells)
        if "," in text and self.decimal is None:
            for cell in dict.fromkeys(cell.strip() for cell in cells if "," in cell):
                if _THOUSANDS.fullmatch(cell):
                    self.comma = self.comma or cell
                    self.rounded |= cell.endswith("0")
                else:
                    self.decimal = self.decimal or cell
        if "." in text and not self.fraction:
            for cell in dict.fromkeys(cell.strip() for cell in cells if "." in cell):
                if GROUPED.fullmatch(cell):
                    self.grouped = self.grouped or cell
                elif _THOUSANDS.fullmatch(cell):
                    self.point = self.point or cell
                else:
                    self.fraction = True
        self.short = self.short or _SHORT.search(text) is not None
        self.long = self.long or _LONG.search(text) is not None

    @property
    def thousands(self) -> str | None:
        """A cell in which a comma sets off thousands, going by the column alone; None if there is none."""
        certain = self.rounded and self.short and not self.long and self.decimal is None
        return self.comma if certain else None


def misread(columns: Mapping[str, NumberFormat]) -> list[str]:
    """Which columns have thousands that were read as fractions, as parts of a sentence that begins with "Column"."""
    found = [f"'{name}' has a comma for thousands ('{c.thousands}')" for name, c in columns.items() if c.thousands]
    decimals = [(name, c.decimal) for name, c in columns.items() if c.decimal is not None]
    for name, column in columns.items():
        if column.point is None or column.fraction:
            continue
        if column.grouped is not None:
            found.append(f"'{name}' has a point ('{column.point}') that sets off thousands, as in '{column.grouped}'")
        elif decimals:
            other, cell = decimals[0]
            found.append(f"'{name}' has a point ('{column.point}') where '{other}' has a decimal comma ('{cell}')")
    return found


DELIMITERS = ",;\t|"
#: Rows that are text at a time. The rest of the table is numbers and codes, which need a tenth of the memory; and many
#: short-lived lists at once would keep Python's garbage collector busy.
CHUNK = 2_000
#: Numbers and words in one column are categories if there are at most so many different ones, and each word is in so
#: many rows and in such a share of them.
FEW_CATEGORIES, OFTEN, OFTEN_SHARE = 12, 20, 0.05
#: Longest line that is looked at to tell the delimiter.
HEADER = 1 << 20
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
#: Text that a spreadsheet takes for a formula, or that `escaped` has made of such text. Some leave out what cannot be seen
#: at the beginning of a cell, and some take the wide signs of East Asian keyboards for the plain ones.
_FORMULA = re.compile("'*(?:[\\s\x00\u200b\ufeff]*[=+\\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n])")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


#: A header, the delimiter and a chunk of rows; the first chunk has no rows.
Chunks = Iterator[tuple[list[str], str, list[list[str]]]]


def read_csv(path: Path, asked: ReadOptions) -> Table:
    """Read a CSV file: UTF-8, the first line names the columns; see `read_text`."""
    return _fast(path, asked) or read_text(path, lambda: _rows(path), asked.words, asked.missing)


def _fast(path: Path, asked: ReadOptions) -> Table | None:
    """A large plain file, read by pyarrow (`read_columns`); None: it is none, or not plain enough."""
    if asked.missing != MissingValues() or path.stat().st_size < LARGE or path.suffix.lower() not in (".csv", ".tsv"):
        return None
    header, delimiter, first = list(islice(_rows(path), 2))[-1]
    if delimiter != "," or not first or not any(header):
        return None
    numbers = [
        name not in asked.words and _numbers(cells, delimiter) is not None
        for name, cells in zip(header, zip(*first, strict=True), strict=True)
    ]
    columns = read_columns(path, header, numbers)
    if columns is None:
        return None
    named = {name: column for name, column in zip(header, columns, strict=True) if name}
    made = {name: _joined([column], name, path, delimiter, name in asked.words) for name, column in named.items()}
    check_slips({name: column for name, column in made.items() if name not in asked.words}, path, delimiter)
    return Table(str(path), len(columns[0]), made)


def read_text(
    path: Path,
    chunks: Callable[[], Chunks],
    words: frozenset[str] = frozenset(),
    missing_values: MissingValues | None = None,
) -> Table:
    """A table of rows of text, which ``chunks`` gives as often as it is called.

    A column is numbers if all its cells are (or are missing), or all are percentages, and it is none of ``words``; else
    words. Where the delimiter is not the comma, ``1,5`` is one and a half. Columns without a name are left out. Cells
    that are ``missing_values`` are empty.
    """
    as_text = set(words)
    while True:
        found, delimiter, number_formats = _columns(chunks(), as_text, missing_values or MissingValues())
        mixed = {
            name for name, parts in found.items() if len({isinstance(c, Categorical) for c in parts if _some(c)}) > 1
        }
        if not mixed:
            break
        as_text |= mixed  # numbers at first and words later: only a second look has their text
    if wrong := misread(number_formats):
        raise UserError(
            f"Column {first_of(wrong, ', and ', OTHERS)} in '{path}'; write numbers without separators of "
            "thousands, and with the same decimal mark throughout."
        )
    rows = sum(len(c) for c in next(iter(found.values()), []))
    columns = {name: _joined(parts, name, path, delimiter, name in words) for name, parts in found.items()}
    check_slips({name: column for name, column in columns.items() if name not in words}, path, delimiter)
    return Table(str(path), rows, columns)


def write_folder(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Write a CSV file for each client into a new or empty folder; read back they are the same tables.

    Raises:
        UserError: There is something in the folder, or a table is of images.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' is not empty; choose a new folder.")
    texts = {}
    for client, table in tables.items():
        if table.images is not None:
            raise UserError(f"'{table.name}' contains images, which a CSV file cannot hold; use NPZ.")
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(zip(*(table.words(name) for name in table.columns), strict=True))
        texts[folder / f"{client}.csv"] = text.getvalue()
    for path, content in texts.items():
        write_whole(path, content)
    return list(texts)


def escaped(cell: str) -> str:
    """A cell of text for a file that may be opened in a spreadsheet, which would run ``=…`` and the like as a formula.

    Such a cell gets an apostrophe in front, which `unescaped` takes away again; numbers stay as they are.
    """
    return f"'{cell}" if _FORMULA.match(cell) and not _number(cell) else cell


def unescaped(cell: str) -> str:
    """The text that `escaped` gave this cell for."""
    return cell[1:] if cell.startswith("'") and escaped(cell[1:]) == cell else cell


def delimiter_of(path: Path) -> str | None:
    """What separates the columns of a file that was read before; None: it is no CSV file."""
    if path.is_dir() or not path.name.lower().endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")):
        return None
    return next(delimiter for _, delimiter, _ in _rows(path))


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The cells of these columns as they are written."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for header, _, rows in _rows(path):
        check_columns(path, names, filter(None, header))
        for name, cells in found.items():
            place = header.index(name)
            cells += [row[place] for row in rows]
    return found


def column_of(cells: Sequence[str], name: str, where: str, words: bool = False) -> Column:
    """A column of cells as a CSV file would have them: numbers if all are, and it is not to be words."""
    return _joined([_parsed(cells, ",", words)], name, where, ",", words)


def _columns(
    chunks: Chunks, as_text: set[str], missing_values: MissingValues
) -> tuple[dict[str, list[Column]], str, dict[str, NumberFormat]]:
    """The columns in chunks, by name; the delimiter; and how numbers are written, where that is not the comma."""
    found: dict[str, list[Column]] = {}
    number_formats: dict[str, NumberFormat] = {}
    for header, delimiter, rows in chunks:
        found = found or {name: [] for name in header if name}
        for name, cells in zip(header, zip(*rows, strict=True), strict=bool(rows)):
            if not name:
                continue
            filled = missing_values.cells(name, cells)
            column = _parsed(filled, delimiter, name in as_text)
            found[name].append(column)
            if delimiter != "," and not isinstance(column, Categorical):
                number_formats.setdefault(name, NumberFormat()).add(filled)
    return found, delimiter, number_formats


def _rows(path: Path) -> Chunks:
    """The header, the delimiter and a chunk of rows; first without rows, then as often as there are some."""
    try:
        with _bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            header, delimiter, pending = _header(file, path)
            yield header, delimiter, []
            reader = csv.reader(chain(pending, file), delimiter=delimiter, strict=True)
            for rows in _chunks(reader, delimiter, len(header), path):
                yield header, delimiter, rows
    except UnicodeDecodeError as error:
        _not_text(path, error)
    except csv.Error as error:
        raise UserError(f"'{path}' is damaged near line {reader.line_num + 1} ({error}); fix its quotes.") from error


def _header(file: io.TextIOWrapper, path: Path) -> tuple[list[str], str, list[str]]:
    """The names of the columns, the delimiter, and lines that were read to find them but are rows."""
    line = file.readline(HEADER)
    while line and not line.strip():
        line = file.readline(HEADER)
    if not line:
        raise UserError(f"'{path}' is empty; remove it or give it a header and rows.")
    if _CONTROL.search(line):
        raise _binary(path)
    if re.fullmatch(r'"?sep=.?"?', line.strip(), re.IGNORECASE):
        raise UserError(f"'{path}' begins with the line '{line.strip()}', not with column names; remove that line.")
    lines = [line]
    cut = _cuts(lines, file, strict=True)
    if len(cut) < len(DELIMITERS) and all(len(names) == 1 for names, _ in cut.values()):
        if line.count('"') % 2:
            raise UserError(f"The column names of '{path}' are damaged: a quote is not closed; fix it.")
        cut = _cuts(lines, file, strict=False)  # such as a blank between a closing quote and the delimiter
    if not cut:
        raise UserError(f"'{path}' does not begin with a line of column names; save it as CSV with one.")
    # A wrong delimiter cuts through quotes and leaves them in the names.
    delimiter = max(cut, key=lambda d: (not any('"' in name for name in cut[d][0]), len(cut[d][0])))
    names, used = cut[delimiter]
    header = [column_name(name) for name in names]
    if len(header) == 1 and re.search(r"\S[ :^~]+\S", header[0]):
        raise UserError(
            f"The first line of '{path}' has only one column, '{header[0][:60]}'; begin with the column names, "
            "separated by comma, semicolon, tab or bar."
        )
    check_header(header, path)
    return header, delimiter, lines[used:]


def check_header(header: Sequence[str], path: Path) -> None:
    """Raise a `UserError` unless these are names of columns, none of them twice; empty ones are columns without."""
    twice = [name for name in header if name and header.count(name) > 1]
    # Plain counts (0, 1, 2, ...) are what some programs call columns; other numbers are a row of data.
    if any(_number(name) and (not name.isdecimal() or name in twice) for name in header):
        raise UserError(f"The first line of '{path}' has numbers instead of column names; add a line of names.")
    if twice:
        raise UserError(f"'{path}' has two columns '{twice[0]}'; rename or remove one.")


def _cuts(lines: list[str], file: io.TextIOWrapper, strict: bool) -> dict[str, tuple[list[str], int]]:
    """What each delimiter makes of the header, and of how many lines; without those that cannot be."""
    cut = {}
    for delimiter in DELIMITERS:
        # A name in quotes may run over several lines; the reader asks for as many as it needs.
        reader = csv.reader(_kept(lines, file), delimiter=delimiter, strict=strict)
        with suppress(csv.Error):
            cut[delimiter] = next(reader), reader.line_num
    return cut


def _kept(lines: list[str], file: io.TextIOWrapper) -> Iterator[str]:
    """These lines and then those of the file, which are added to them as they are read."""
    yield from lines
    for line in file:
        lines.append(line)
        yield line


def _chunks(reader: Iterator[list[str]], delimiter: str, width: int, path: Path) -> Iterator[list[list[str]]]:
    """Rows in chunks, all of the header's width; blank lines are no rows."""
    before = 0
    while rows := list(islice(reader, CHUNK)):
        if any(len(row) != width for row in rows):
            rows = [row for row in rows if row]
            wrong = next((k for k, row in enumerate(rows) if len(row) != width), None)
            if wrong is not None:
                raise UserError(
                    f"'{path}' has {width} columns, but {len(rows[wrong])} in row {before + wrong + 1} "
                    f"({delimiter.join(rows[wrong])[:60]!r}); correct it."
                )
        if rows:
            before += len(rows)
            yield rows


def _parsed(cells: Sequence[str], delimiter: str, as_text: bool) -> Column:
    if not as_text and (numbers := _numbers(cells, delimiter)) is not None:
        return numbers
    return Categorical.of(cells)


def _numbers(cells: Sequence[str], delimiter: str) -> np.ndarray | None:
    """The cells as numbers, NaN where missing; None if they are not all numbers."""
    try:
        values = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        distinct = set(cells)
        read: dict[str, float] = {}
        for cell in distinct:
            text = cell.strip()
            if text.casefold() in MISSING:
                read[cell] = np.nan
                continue
            text = _pointed(text, delimiter)
            if not _number(text):
                return None
            read[cell] = float(text)
        return np.fromiter(map(read.__getitem__, cells), np.float64, len(cells))
    # Python reads 1_000 as a thousand, which nobody writes into a table.
    return None if "_" in "".join(cells) else values


def _pointed(text: str, delimiter: str) -> str:
    """A number with a decimal comma, where that can be one, with a point; ``1.234,5`` without that of its thousands."""
    if delimiter == ",":
        return text
    if GROUPED.fullmatch(text):
        return text.replace(".", "").replace(",", ".")
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else text


def _percentage(text: str, delimiter: str) -> float | None:
    """The number before a percent sign; None if it is no percentage."""
    number = _pointed(text.removesuffix("%").strip(), delimiter)
    return float(number) if text.endswith("%") and number.casefold() not in MISSING and _number(number) else None


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _some(column: Column) -> bool:
    return bool(column.categories if isinstance(column, Categorical) else not np.isnan(column).all())


def _joined(chunks: list[Column], name: str, path: Path | str, delimiter: str, known: bool) -> Column:
    """A whole column; ``known`` says that it is to be words."""
    numbers = [c for c in chunks if not isinstance(c, Categorical)]
    if len(numbers) == len(chunks):
        return np.concatenate([np.zeros(0), *numbers])
    # What is numbers beside words is all missing.
    words = [c if isinstance(c, Categorical) else Categorical(np.full(len(c), UNKNOWN), ()) for c in chunks]
    categories = sorted({category for c in words for category in c.categories})
    place = {category: i for i, category in enumerate(categories)}
    shift = [np.array([*(place[category] for category in c.categories), UNKNOWN])[c.codes] for c in words]
    made = Categorical(np.concatenate(shift), tuple(categories))
    if any(_CONTROL.search(category) for category in categories):
        raise UserError(f"Column '{name}' of '{path}' contains bytes that are not text; save it as CSV.")
    if known:
        return made
    shares = [_percentage(category, delimiter) for category in categories]
    percent = [share for share in shares if share is not None]
    return np.array([*percent, np.nan])[made.codes] if categories and len(percent) == len(categories) else made


def check_slips(columns: Mapping[str, Column], path: Path | str, delimiter: str) -> None:
    """A few words among numbers are slips of the pen, and would silently turn the numbers into categories."""
    slips = []
    for name, column in columns.items():
        if isinstance(column, Categorical):
            percent = [_percentage(category, delimiter) is not None for category in column.categories]
            numeric = [_number(_pointed(category, delimiter)) for category in column.categories]
            slips += _slip(column, numeric, name, "numeric")
            slips += _slip(column, percent, name, "percentages")
    if slips:
        told = [f"'{slip.column}' of '{path}' is {slip.sentence}" for slip in slips]
        raise WordsAmongNumbers(
            f"Column {first_of(told, ', and ', OTHERS)}; correct it, leave the cell blank, or name the word with "
            "--missing if it stands for no value.",
            slips,
        )


class Slip(NamedTuple):
    """A few words in a column of numbers: which, the first row (from 1) with one, and both in words."""

    column: str
    words: tuple[str, ...]
    row: int
    sentence: str


class WordsAmongNumbers(UserError):
    """Columns of a file are numbers but for a few words."""

    def __init__(self, sentence: str, slips: Sequence[Slip]) -> None:
        super().__init__(sentence)
        self.slips = tuple(slips)


def _slip(column: Categorical, such: list[bool], name: str, what: str) -> list[Slip]:
    """The rows that are not such, where most are."""
    number = np.array([*such, False])[column.codes]
    known = column.codes != UNKNOWN
    if not number.sum() * 2 > np.count_nonzero(known) or _categories(column, such):
        return []
    rows = np.flatnonzero(known & ~number)
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    words = tuple(dict.fromkeys(column.categories[code] for code in column.codes[rows].tolist()))
    return [Slip(name, words, int(rows[0]) + 1, f"{what} except for {quoted(words[:1])} in row {rows[0] + 1}{more}")]


def _categories(column: Categorical, such: list[bool]) -> bool:
    """Whether numbers and words are all names of categories, as in 0, 1, 2, 3+: few, and no word among them is rare."""
    counts = np.bincount(column.codes[column.codes != UNKNOWN], minlength=len(column.categories))
    others = counts[~np.array(such)]
    return len(column.categories) <= FEW_CATEGORIES and bool((others >= max(OFTEN, OFTEN_SHARE * counts.sum())).all())


def _binary(path: Path) -> UserError:
    with _bytes(path) as file:
        start = file.read(4)
    if start.startswith(b"\x1f\x8b"):
        return UserError(f"'{path}' is compressed by gzip; unpack it.")
    if start == b"PK\x03\x04":
        return UserError(f"'{path}' is a ZIP archive or a spreadsheet; unpack it, or save it as CSV.")
    return UserError(f"'{path}' is not a text file; save it as CSV.")


def _not_text(path: Path, error: UnicodeDecodeError) -> NoReturn:
    with _bytes(path) as file:
        start = file.read(HEADER)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"'{path}' is UTF-16; save it as UTF-8 (in Excel: 'CSV UTF-8').") from error
    if _CONTROL.search(start.decode("latin-1")):
        raise _binary(path) from error
    raise UserError(
        f"'{path}' is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8 (in Excel: 'CSV UTF-8')."
    ) from error


# --- Compressed files -------------------------------------------------------------------------------------------------


class _Unpacked(io.RawIOBase):
    """What a compressed file unpacks to, up to the limit: a small file may unpack to any amount."""

    def __init__(self, file: Any, path: Path) -> None:
        self.file, self.path, self.most, self.count = file, path, unpacked_limit(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.count += len(data)
        if self.count > self.most * 2**30:
            raise UserError(
                f"'{self.path}' unpacks to more than {self.most:g} GiB; split it, or allow more with the environment "
                f"variable {LIMIT_NAME}={2 * self.most:g}."
            )
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked if its ending says that it is compressed."""
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if kind is None:
        with path.open("rb") as plain:
            yield plain
        return
    try:
        with path.open("rb") as packed, _unpacking(packed, kind, path) as file:
            yield io.BufferedReader(_Unpacked(file, path))
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"'{path}' is not a valid {kind} file ({str(error).splitlines()[0].rstrip('.')}); compress it again."
        ) from error


def _unpacking(packed: io.BufferedReader, kind: str, path: Path) -> Any:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=packed)
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UserError(
            f"'{path}' needs pyarrow, which is not installed; run pip install 'bpfed[tables]', or unpack the file."
        ) from error
    return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), kind)


# --- Large plain files ------------------------------------------------------------------------------------------------
#
# These are read by pyarrow, where that is installed, with the same result. Whatever could be read in two ways is left
# to the reader above: quotes, separators other than the comma, numbers among words. So is whatever is wrong, since it
# says what and where.


#: Bytes from which on a file is read so.
LARGE = 4_000_000
#: Bytes that are looked at together.
BLOCK = 1 << 24
#: Cells that mean "not known" in columns of numbers; other spellings of them are left to the other reader.
_GAPS = sorted({spelt for word in MISSING for spelt in (word, word.upper(), word.capitalize())} | {"NaN", "<Na>"})


def read_columns(path: Path, header: Sequence[str], numbers: Sequence[bool]) -> list[Column] | None:
    """The columns of a file that is separated by commas; None: it is for the other reader.

    Args:
        path: The file.
        header: The names of its columns, in its first line.
        numbers: Whether each column is numbers in its first rows.
    """
    if path.stat().st_size < LARGE:
        return None
    try:
        import pyarrow as pa
        from pyarrow import csv as fast
    except ImportError:
        return None
    if not _plain(path):
        return None
    names = [str(k) for k in range(len(header))]
    words = pa.dictionary(pa.int32(), pa.string())
    types = {name: pa.float64() if number else words for name, number in zip(names, numbers, strict=True)}
    try:
        table = fast.read_csv(
            path,
            fast.ReadOptions(column_names=names, skip_rows=1),
            fast.ParseOptions(quote_char=False),
            fast.ConvertOptions(column_types=types, null_values=_GAPS, strings_can_be_null=False),
        )
    except (pa.ArrowException, OSError):
        return None
    found: list[Column] = []
    for k, number in enumerate(numbers):
        column = table.column(k)
        table = table.set_column(k, names[k], pa.nulls(table.num_rows))  # which frees what is no longer needed
        found.append(column.to_numpy() if number else _words(column.combine_chunks()))
    return found


def _plain(path: Path) -> bool:
    """Whether a file begins with a name, has no quotes and no NUL, ends all lines alike, and has none that is very long.

    A cell that the other reader takes for a quote that was not closed could be in such a line.
    """
    ends, both, first, last = 0, 0, b"", b""
    returns, begun = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            first = first or block[:1]
            if b'"' in block or b"\0" in block:
                return False
            returns += block.count(b"\r")
            ends += block.count(b"\n")
            both += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
            places = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            if np.diff(places, prepend=-begun, append=len(block)).max() > csv.field_size_limit():
                return False
            begun = len(block) - int(places[-1]) if len(places) else begun + len(block)
            last = block[-1:]
    return bool(first.strip()) and returns in (0, ends) and returns == both


def _words(column: object) -> Categorical:
    """An array of words with their dictionary, which `Categorical.of` would have made of the same cells."""
    cells = column.dictionary.to_pylist()  # type: ignore[attr-defined]
    codes = column.indices.to_numpy().astype(np.int64)  # type: ignore[attr-defined]
    categories = Categorical.of(cells)
    made = np.append(categories.codes, UNKNOWN)[codes]
    return Categorical(made, categories.categories)


FORMAT = TableFormat(read_csv, read_cells)
