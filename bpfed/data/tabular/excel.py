"""Excel: the one sheet of a workbook that has rows, read by openpyxl, which is an extra of this package."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bpfed._util.errors import UserError, quoted
from bpfed.data.tabular.csvfile import Chunks, check_header, read_text
from bpfed.data.tabular.npz import LIMIT_NAME, unpacked_limit
from bpfed.data.tabular.table import ReadOptions, Table, TableFormat, as_text, check_columns, column_name

_MERGED = re.compile(rb'<(?:\w+:)?mergeCell [^<>]*ref="([A-Z]+\d+:[A-Z]+\d+)"')
#: A cell in a column after ZZZ; the last one that Excel has is XFD.
_FAR = re.compile(rb'<(?:\w+:)?c [^<>]*?\br="([A-Za-z]{4,}+)\d')
#: Rows that a sheet of Excel has, and cells of one that are read, empty ones included: a small file can claim any number.
MOST_ROWS, MOST_CELLS = 1_048_576, 100_000_000


def read_excel(path: Path, asked: ReadOptions) -> Table:
    """Read a sheet as if it had been saved as CSV: the first row that is not empty names the columns.

    Dates and times become ISO text, and a formula is the value that was saved with it.
    """
    header, columns = _sheet(path)
    rows = [list(row) for row in zip(*columns, strict=True)]

    def chunks() -> Chunks:
        yield header, ",", []
        if rows:
            yield header, ",", rows

    return read_text(path, chunks, asked.words, asked.missing)


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The cells of these columns as text."""
    header, columns = _sheet(path)
    check_columns(path, names, filter(None, header))
    return {name: columns[header.index(name)] for name in names}


def _sheet(path: Path) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and the text of each column's cells."""
    _check_archive(path)
    with _workbook(path, values=True) as book:
        sheets = {sheet.title: rows for sheet in book.worksheets if (rows := _filled(sheet, path))}
    if not sheets:
        raise UserError(f"'{path}' is empty; remove it or give it a header and rows.")
    if len(sheets) > 1:
        raise UserError(f"'{path}' has {len(sheets)} sheets with content, {quoted(list(sheets), 3)}; keep one of them.")
    ((title, rows),) = sheets.items()
    _check_formulas(path, title, rows)
    width = max(map(_width, rows.values()))
    first, *numbers = rows
    cells = [[row[k] if k < len(row) else None for k in range(width)] for row in rows.values()]
    header = [column_name(name) for name in as_text(cells[0])]
    check_header(header, path)
    last = max((k for k, name in enumerate(header) if name), default=-1)
    columns = []
    for k, name in enumerate(header):
        values = [row[k] for row in cells[1:]]
        if k > last and any(value is not None for value in values):
            at = next(row for row, value in zip(numbers, values, strict=True) if value is not None)
            raise UserError(
                f"'{path}' has a value in row {at} of the sheet '{title}' below an empty cell of row {first}, which must "
                "name the columns; name that column or clear it."
            )
        try:
            columns.append(as_text(values))
        except TypeError as error:
            raise UserError(f"Column '{name}' of '{path}' has a {error}, which is not read; save it as CSV.") from error
    return header, columns


def _filled(sheet: Any, path: Path) -> dict[int, tuple[Any, ...]]:
    """The rows of a sheet that are not empty, by their numbers; each with at most one of the empty cells at its end."""
    sheet.reset_dimensions()  # what some programs write there is wrong
    found: dict[int, tuple[Any, ...]] = {}
    cells = 0
    for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
        cells += len(row)
        if number > MOST_ROWS or cells > MOST_CELLS:
            raise UserError(
                f"The sheet '{sheet.title}' of '{path}' has more than {MOST_ROWS} rows or {MOST_CELLS} cells; delete "
                "empty rows and columns at its end, or save it as CSV."
            )
        if width := _width(row):
            found[number] = row[: width + 1]  # the empty one says that there may be a formula
    return found


def _width(row: Sequence[Any]) -> int:
    """Cells of a row up to the last that is not empty."""
    return max((k for k, value in enumerate(row, 1) if value is not None and value != ""), default=0)


def _check_formulas(path: Path, title: str, rows: dict[int, tuple[Any, ...]]) -> None:
    """Refuse formulas that no program has computed: their cells would pass for empty ones."""
    if all(None not in row for row in rows.values()) and len({len(row) for row in rows.values()}) == 1:
        return
    with _workbook(path, values=False) as book:
        sheet = book[title]
        sheet.reset_dimensions()
        for number, row in enumerate(sheet.iter_rows(), 1):
            known = rows.get(number, ())
            for k, cell in enumerate(row):
                if cell.data_type == "f" and (k >= len(known) or known[k] is None):
                    raise UserError(
                        f"Cell {cell.coordinate} of '{path}' has a formula without a saved value; open the file in a "
                        "spreadsheet program and save it."
                    )


def _check_archive(path: Path) -> None:
    """Refuse what is no workbook, would unpack to too much, or has merged cells, of which all but one are empty."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if sum(info.file_size for info in infos) > (most := unpacked_limit()) * 2**30:
                raise UserError(
                    f"'{path}' unpacks to more than {most:g} GiB; split it, or allow more with the environment variable "
                    f"{LIMIT_NAME}={2 * most:g}."
                )
            for info in infos:
                if not info.filename.endswith(".xml"):  # a sheet may be anywhere
                    continue
                content = archive.read(info)
                if found := _FAR.search(content):
                    raise UserError(
                        f"'{path}' has a cell in column {found[1].decode()[:20]}, but XFD is the last one of a sheet; save it "
                        "again in a spreadsheet program."
                    )
                if found := _MERGED.search(content):
                    raise UserError(
                        f"'{path}' has merged cells, {found[1].decode()}; split them and fill in each, since only the "
                        "first has the value."
                    )
    except _DAMAGE as error:
        raise _invalid(path, error) from error


@contextmanager
def _workbook(path: Path, values: bool) -> Iterator[Any]:
    """An open workbook, with the saved values of formulas or the formulas themselves."""
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(
            f"'{path}' needs openpyxl, which is not installed; run pip install 'bpfed[tables]', or save the file as CSV."
        ) from error
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=values, keep_links=False)
    except Exception as error:  # openpyxl has no error of its own for what is damaged inside
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _invalid(path, error) from error
    try:
        yield book
    except _DAMAGE as error:
        raise _invalid(path, error) from error
    finally:
        book.close()


#: What a damaged archive or sheet raises when it is read.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    SyntaxError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    KeyError,
)


def _invalid(path: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return UserError(f"'{path}' is not a valid Excel file ({reason}); save it again as .xlsx.")


FORMAT = TableFormat(read_excel, read_cells)
