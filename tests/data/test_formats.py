"""Formats of tables: the same rows give the same table in each, and what is damaged or doubtful is refused."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from bpfed._util.errors import UserError
from bpfed.data import load, read_table
from bpfed.data.tabular.csvfile import NumberFormat
from bpfed.data.tabular.table import passthrough

TEXT = "age,sex,seen,y\n" + "".join(
    f"{30.5 + k if k % 5 else ''},{'fm'[k % 2]},2024-05-{k + 1:02d},{'no' if k % 3 else 'yes'}\n" for k in range(12)
)
ARFF = (
    "% a table\n@RELATION visits\n@ATTRIBUTE age REAL\n@attribute 'sex' {f, 'm'}\n@attribute seen date 'yyyy-MM-dd'\n"
)
ARFF += "@attribute y {no,yes}\n@DATA\n"


def frame() -> pd.DataFrame:
    rows = [line.split(",") for line in TEXT.splitlines()[1:]]
    typed = [(float(a) if a else None, s, datetime.fromisoformat(d), y) for a, s, d, y in rows]
    return pd.DataFrame(typed, columns=["age", "sex", "seen", "y"])


def arrow(dates: bool = True) -> pa.Table:
    made = frame() if dates else frame().assign(seen=frame().seen.dt.strftime("%Y-%m-%d"))
    return pa.Table.from_pandas(made, preserve_index=False)


def zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(TEXT.encode())


def stream(path: Path) -> None:
    with pa.ipc.new_stream(str(path), arrow().schema) as writer:
        writer.write_table(arrow(), max_chunksize=5)


def parts(path: Path) -> None:
    path.mkdir()
    (path / "_SUCCESS").touch()
    pq.write_table(arrow(dates=False).slice(0, 5), path / "part-0.parquet")
    pq.write_table(arrow(dates=False).slice(5), path / "part-1.parquet")


def workbook(path: Path, change: Callable[[Any], object] = lambda book: None) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["age", "sex", "seen", "y"])
    for row in frame().astype({"age": object}).where(frame().notna(), None).values.tolist():
        book.active.append([cell.to_pydatetime() if isinstance(cell, pd.Timestamp) else cell for cell in row])
    change(book)
    book.save(path)


def arff(path: Path, head: str = ARFF) -> None:
    rows = [line.split(",") for line in TEXT.splitlines()[1:]]
    path.write_text(head + "".join(f"{a or '?'}, '{s}',\"{d}\",{y}\n" for a, s, d, y in rows))


WRITERS: dict[str, Callable[[Path], object]] = {
    "csv.gz": lambda path: path.write_bytes(gzip.compress(TEXT.encode())),
    "tsv.gz": lambda path: path.write_bytes(gzip.compress(TEXT.replace(",", "\t").encode())),
    "csv.zst": zstd,
    "xlsx": workbook,
    "arff": arff,
    "feather": lambda path: feather.write_feather(arrow(), path),
    "arrow": stream,
    "parquet": parts,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_the_same_rows_are_the_same_table(ending: str, tmp_path: Path) -> None:
    (tmp_path / "bern.csv").write_text(TEXT)
    (tmp_path / "sites").mkdir()
    path = tmp_path / "sites" / f"bern.{ending}"
    WRITERS[ending](path)
    wanted, found = read_table(tmp_path / "bern.csv"), read_table(path)
    assert found.columns.keys() == wanted.columns.keys()
    for name, column in wanted.columns.items():
        assert type(found.column(name)) is type(column)
        assert found.words(name) == wanted.words(name)
    assert passthrough(path, ["sex"]) == passthrough(tmp_path / "bern.csv", ["sex"])
    assert load(f"folder:{tmp_path / 'sites'}", ignore="seen").clients == ("bern",)
    assert load(f"folder:{path}", client_column="sex", ignore="seen").clients == ("f", "m")


def cut(ending: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / f"b.{ending}"
        WRITERS[ending](path)
        path.write_bytes(path.read_bytes()[:-9])

    return write


def rewritten(path: Path, *changes: tuple[str, str]) -> None:
    """A workbook whose sheet has other XML."""
    workbook(path)
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    sheet = files["xl/worksheets/sheet1.xml"].decode()
    for old, new in changes:
        assert old in sheet
        sheet = sheet.replace(old, new, 1)
    files["xl/worksheets/sheet1.xml"] = sheet.encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


LAUGHS = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b0 "&a;">'
LAUGHS += "".join(f'<!ENTITY b{k + 1} "{f"&b{k};" * 10}">' for k in range(9)) + "]>"


def add_sheet(book: Any) -> None:
    book.create_sheet("codes").append(["f", "female"])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "gzip cut short": (cut("csv.gz"), r"b.csv.gz' is not a valid gzip file \(.*\); compress it again"),
    "zstd cut short": (cut("csv.zst"), "b.csv.zst' is not a valid zstd file"),
    "not compressed": (lambda f: (f / "b.csv.gz").write_text(TEXT), "is not a valid gzip file"),
    "a short row inside": (lambda f: (f / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n1\n")), "but 1 in row 1"),
    "feather cut short": (cut("feather"), "is not a valid Feather file"),
    "a stream without its end": (cut("arrow"), "b.arrow' is not a valid Feather file .it ends before"),
    "no workbook": (lambda f: (f / "b.xlsx").write_bytes(b"PK\x03\x04" + bytes(40)), "is not a valid Excel file"),
    "two sheets": (lambda f: workbook(f / "b.xlsx", add_sheet), "has 2 sheets with content, 'Sheet', 'codes'; keep"),
    "merged cells": (
        lambda f: workbook(f / "b.xlsx", lambda book: book.active.merge_cells("B2:B4")),
        "has merged cells, B2:B4; split them",
    ),
    "a formula that was never computed": (
        lambda f: workbook(f / "b.xlsx", lambda book: book.active.append(["=A2+1", "f", None, "no"])),
        "Cell A14 of .* has a formula without a saved value",
    ),
    "a word among numbers": (
        lambda f: workbook(f / "b.xlsx", lambda book: book.active.append(["old", "f", None, "no"])),
        "'age' of .* is numeric except for 'old' in row 13",
    ),
    "a value beside the columns": (
        lambda f: workbook(f / "b.xlsx", lambda book: book.active.append([1, "f", None, "no", 5])),
        "a value in row 14 of the sheet 'Sheet' below an empty cell of row 1",
    ),
    "a column that no sheet has": (
        lambda f: rewritten(f / "b.xlsx", ('r="D3"', 'r="ZZZZZZZ3"')),
        "has a cell in column ZZZZZZZ, but XFD is the last one of a sheet",
    ),
    "entities of entities": (
        lambda f: rewritten(f / "b.xlsx", ("<worksheet", f"{LAUGHS}<worksheet"), ("<v>", "<v>&b9;")),
        "is not a valid Excel file",
    ),
    "ARFF: undeclared value": (
        lambda f: arff(f / "b.arff", ARFF.replace("'m'", "x")),
        "'sex' of .* is declared nominal but has 'm' in row 2",
    ),
    "ARFF: words as numbers": (
        lambda f: arff(f / "b.arff", ARFF.replace("{no,yes}", "numeric")),
        "'y' of .* is declared numeric but has 'no' in row 2",
    ),
    "ARFF: sparse": (lambda f: (f / "b.arff").write_text(ARFF + "{0 1.5}\n"), "Line 8 of .* is a sparse row"),
    "ARFF: open quote": (lambda f: (f / "b.arff").write_text(ARFF + "1,'f,2024-01-01,no\n"), "damaged in line 8"),
    "ARFF: blanks and a quote": (
        lambda f: (f / "b.arff").write_text(f"{ARFF}'1' ,{' ' * 20_000}x{' ' * 20_000}'f\n"),
        "damaged in line 8",
    ),
    "ARFF: no data": (lambda f: (f / "b.arff").write_text(ARFF[:-7]), "it has no line @data"),
    "parts without files": (lambda f: (f / "b.parquet").mkdir(), "is a folder without .parquet files"),
    "parts of other columns": (
        lambda f: (
            parts(f / "b.parquet"),
            pq.write_table(pa.table({"age": [1.0]}), f / "b.parquet" / "part-2.parquet"),
        ),
        "part-2.parquet' and 'part-0.parquet' are parts of one table, but only one of them has 'seen', 'sex'",
    ),
    "parts in folders": (
        lambda f: (parts(f / "b.parquet"), (f / "b.parquet" / "year=2020").mkdir()),
        "year=2020' is not a .parquet file, but everything there must be a part",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    write, words = REFUSED[kind]
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    with pytest.raises(UserError, match=words):
        read_table(path)


@pytest.mark.parametrize(("name", "most"), [("MOST_ROWS", 1000), ("MOST_CELLS", 20)])
def test_a_sheet_that_claims_more_than_there_can_be_is_refused(
    name: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"bpfed.data.tabular.excel.{name}", most)
    far = '<row r="2000000000"><c r="A2000000000"><v>1</v></c></row></sheetData>'
    rewritten(tmp_path / "b.xlsx", ("</sheetData>", far))
    with pytest.raises(
        UserError, match=r"The sheet 'Sheet' of .* has more than .* rows or .* cells; delete empty rows"
    ):
        read_table(tmp_path / "b.xlsx")


def test_a_cell_of_many_blanks_among_numbers_takes_no_time() -> None:
    """Each line is looked at once, however many there are in a cell."""
    found = NumberFormat()
    found.add(["\n" * 100_000 + "12345", "7"])
    assert (found.long, found.short) == (True, True)


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BPFED_NPZ_GIB", "0.0001")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000))
    with pytest.raises(
        UserError, match=r"unpacks to more than 0\.0001 GiB; split it, or allow more with the environment"
    ):
        read_table(tmp_path / "b.csv.gz")


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workbook(tmp_path / "b.xlsx")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(UserError, match=r"needs openpyxl, which is not installed; run pip install 'bpfed\[tables\]'"):
        read_table(tmp_path / "b.xlsx")
