"""ARFF, the format of Weka: a header that says the type of each column, then rows as in CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bpfed._util.errors import UserError
from bpfed.data.tabular.csvfile import CHUNK, Chunks, check_header, read_text
from bpfed.data.tabular.table import Categorical, ReadOptions, Table, TableFormat, check_columns, column_name

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s++({_QUOTED}|[^\s'\"{{]\S*+)\s++(.+)", re.IGNORECASE)
#: Nothing is tried in two ways: a line of blanks and a wrong quote would take hours.
_CELL = re.compile(rf"\s*+({_QUOTED}|[^,'\"]*+)\s*+(?:,|$)")
_NUMERIC = ("numeric", "real", "integer")


class _Attribute(NamedTuple):
    """A column as the header declares it.

    Attributes:
        name: Of the column.
        kind: ``numeric``, ``nominal``, ``string`` or ``date``.
        values: Those that a nominal one may have.
    """

    name: str
    kind: str
    values: frozenset[str] = frozenset()


def read_arff(path: Path, asked: ReadOptions) -> Table:
    """Read an ARFF file: numeric columns are numbers; nominal ones, strings and dates are words."""
    header = next(iter(_attributes_and_rows(path)))[0]
    declared = frozenset(a.name for a in header if a.kind != "numeric")

    def chunks() -> Chunks:
        for attributes, rows in _attributes_and_rows(path):
            yield [a.name for a in attributes], ",", rows

    table = read_text(path, chunks, asked.words | declared, asked.missing)
    for attribute in header:
        column = table.columns.get(attribute.name)
        if not isinstance(column, Categorical) or attribute.name in asked.words:
            continue
        strange = None
        if attribute.kind == "numeric":
            strange = next((word for word in column.categories if not _is_number(word)), None)
        elif attribute.kind == "nominal":
            strange = next((word for word in column.categories if word not in attribute.values), None)
        if strange is not None:
            row = column.words().index(strange) + 1
            raise UserError(
                f"Column '{attribute.name}' of '{path}' is declared {attribute.kind} but has '{strange[:40]}' in row "
                f"{row}; correct one of them."
            )
    return table


def read_cells(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The cells of these columns as they are written, without quotes."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for attributes, rows in _attributes_and_rows(path):
        known = [a.name for a in attributes]
        check_columns(path, names, known)
        for name, cells in found.items():
            cells += [row[known.index(name)] for row in rows]
    return found


def _attributes_and_rows(path: Path) -> Iterator[tuple[list[_Attribute], list[list[str]]]]:
    """The columns and a chunk of rows; first without rows, then as often as there are some."""
    attributes: list[_Attribute] = []
    rows: list[list[str]] = []
    data, count = False, 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, raw in enumerate(file, 1):
                line = raw.strip()
                if not line or line.startswith("%"):
                    continue
                if not data:
                    data = line.lower().startswith("@data")
                    if data:
                        check_header([a.name for a in attributes], path)
                        yield attributes, []
                    elif line.lower().startswith("@attribute"):
                        attributes.append(_attribute(line, number, path))
                    elif not line.lower().startswith("@relation"):
                        raise UserError(
                            f"Line {number} of '{path}' is '{line[:60]}', where an ARFF file has @relation, @attribute or "
                            "@data; correct it."
                        )
                    continue
                rows.append(_row(line, number, path))
                count += 1
                if len(rows[-1]) != len(attributes):
                    raise UserError(
                        f"'{path}' has {len(attributes)} columns, but {len(rows[-1])} in row {count} ({line[:60]!r}); "
                        "correct it."
                    )
                if len(rows) == CHUNK:
                    yield attributes, rows
                    rows = []
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8.") from error
    if not data:
        raise UserError(f"'{path}' is not a valid ARFF file (it has no line @data); save it again.")
    if rows:
        yield attributes, rows


def _attribute(line: str, number: int, path: Path) -> _Attribute:
    found = _ATTRIBUTE.fullmatch(line)
    if found is None:
        raise UserError(
            f"Line {number} of '{path}' is '{line[:60]}', which declares no column with a type; correct it."
        )
    name, kind = column_name(_unquoted(found[1])), found[2].strip()
    if kind.startswith("{") and kind.endswith("}"):
        return _Attribute(name, "nominal", frozenset(_word(cell) for cell in _row(kind[1:-1], number, path)))
    word = kind.split()[0].lower()
    if word not in (*_NUMERIC, "string", "date"):
        raise UserError(
            f"Column '{name}' of '{path}' has type {word}, which is not read; declare it numeric, string or by its values."
        )
    return _Attribute(name, "numeric" if word in _NUMERIC else word)


def _row(line: str, number: int, path: Path) -> list[str]:
    """The cells of a line, without quotes."""
    if line.startswith("{"):
        raise UserError(
            f"Line {number} of '{path}' is a sparse row, which is not read; save it with every value written."
        )
    if "'" not in line and '"' not in line:
        return [cell.strip() for cell in line.split(",")]
    cells, at = [], 0
    while True:
        found = _CELL.match(line, at)
        if found is None:
            raise UserError(
                f"'{path}' is damaged in line {number} (a quote is not closed or not alone); fix its quotes."
            )
        cells.append(_unquoted(found[1].rstrip()))
        at = found.end()
        if at == len(line) and not found[0].endswith(","):
            return cells


def _unquoted(cell: str) -> str:
    if len(cell) > 1 and cell[0] == cell[-1] and cell[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", cell[1:-1])
    return cell


def _word(cell: str) -> str:
    """A value as `Categorical` has it."""
    categories = Categorical.of([cell]).categories
    return categories[0] if categories else ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


FORMAT = TableFormat(read_arff, read_cells)
