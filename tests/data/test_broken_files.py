"""Broken files of one's own: each is refused in one sentence, with nothing written, or treated as the docs say."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, files

from bpfed._util.errors import UserError
from bpfed.data import FederatedData, load
from bpfed.data.tabular import npz as npz_module
from bpfed.data.tabular.rows import read_rows
from bpfed.data.tabular.table import Table, check_range, read_table

HEAD = "age,sex,y\n"
ROWS = "".join(f"{30 + k},{'fm'[k % 2]},{'no' if k % 3 else 'yes'}\n" for k in range(12))
GOOD = HEAD + ROWS
Write = Callable[[Path], object]


def text(content: str, name: str = "b.csv", **options: str) -> Write:
    return lambda folder: (folder / name).write_text(content, newline="", **options)


def raw(content: bytes, name: str = "b.csv") -> Write:
    return lambda folder: (folder / name).write_bytes(content)


def npz(**arrays: np.ndarray) -> Write:
    return lambda folder: np.savez(folder / "b.npz", **arrays)


def npy(header: str, body: bytes = b"") -> bytes:
    padded = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + body


def zipped(file: str = "b.npz", **members: bytes) -> Write:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / file, "w") as archive:
            for name, content in members.items():
                archive.writestr(f"{name}.npy", content)

    return write


def parquet(keep: float = 1.0, **columns: object) -> Write:
    def write(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        (folder / "b.parquet").write_bytes(buffer.getvalue()[: int(keep * buffer.tell())])

    return write


def loop(folder: Path) -> None:
    (folder / "b.csv").symlink_to(folder / "b.csv")


X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1])
IMAGES = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)

REFUSED: dict[str, tuple[Write, str]] = {
    "empty file": (text(""), "'.*b.csv' is empty"),
    "blank lines only": (text("\n \n\n"), "is empty"),
    "header only": (text(HEAD), "b.csv' has no rows"),
    "wrong delimiter": (text(GOOD.replace(",", " ")), "has only one column, 'age sex y'"),
    "no header": (text("63.0,f,1\n64.5,m,0\n"), "numbers instead of column names"),
    "binary junk": (raw(bytes(range(256)) * 20), "is not a text file"),
    "compressed": (raw(gzip.compress(GOOD.encode())), "b.csv' is compressed by gzip; unpack it"),
    "a spreadsheet by another name": (zipped("b.csv", x=b"<xml/>"), "b.csv' is a ZIP archive or a spreadsheet; unpack"),
    "zeros": (raw(bytes(500)), "is not a text file"),
    "junk after a good start": (raw(GOOD.encode() + b"31,\x00\x01,no\n"), "contains bytes that are not text"),
    "an image by another name": (raw(b"\x89PNG\r\n\x1a\n" + bytes(60)), "is not a text file"),
    "not UTF-8": (raw(GOOD.replace("yes", "né").encode("latin-1")), "is not UTF-8 .byte 0xe9.; save it as UTF-8"),
    "UTF-16": (raw(GOOD.encode("utf-16")), "is UTF-16"),
    "target missing in a row": (
        text(GOOD + "40,f,\n50,m,NaN\n"),
        "2 of the 14 rows of .* have no 'y', first in row 13",
    ),
    "target column missing": (text(GOOD.replace("y\n", "z\n", 1)), "b.csv' has no column 'y'"),
    "target column by another case": (text(GOOD.replace("y\n", "Y\n", 1)), "has no column 'y'; did you mean 'Y'"),
    "only the target": (text("y\nno\nyes\n"), "has no column other than 'y'"),
    "target numbers here and words there": (
        text(GOOD.replace("no", "0").replace("yes", "1")),
        "numeric at 'b' but text",
    ),
    "column of numbers as words": (text(GOOD.replace("30", "thirty")), "'age' .* except for 'thirty' in row 1"),
    "words at one site": (text("age,y\nold,no\nyoung,yes\nold,no\n"), "'age' is numeric at 'a' but text at 'b'"),
    "two columns of one name": (text("age,age,y\n1,2,no\n"), "has two columns 'age'"),
    "a row too short": (text(GOOD + "40,f\n"), "has 3 columns, but 2 in row 13 .'40,f'."),
    "a row too long": (text(GOOD + "40,f,no,1\n"), "has 3 columns, but 4 in row"),
    "an open quote": (text(GOOD + '"40,f,no\n'), "is damaged near line"),
    "an infinite number": (text(GOOD + "inf,f,no\n"), "'age' .* has an infinite number in row 13"),
    "a huge number": (text(GOOD + "1e300,f,no\n"), "has the number 1e.300 in row 13"),
    "a number too large for anything": (text(GOOD + "1e999,f,no\n"), "infinite number"),
    "text of its own in every row": (
        text("note,y\n" + "".join(f"patient w{k},{'no' if k % 2 else 'yes'}\n" for k in range(300))),
        "'note' of .* different words.*, or use --dates for dates or --text for free text",
    ),
    "several columns of text": (
        text("note,who,y\n" + "".join(f"a w{k},P{k % 150},{'no' if k % 2 else 'yes'}\n" for k in range(300))),
        "Columns 'note', 'who' of .*b.csv' have .* different words, more than .* of 100; .*--ignore 'note,who', or",
    ),
    "several columns of words among numbers": (
        text("age,dose,y\n" + "1,2,no\n" * 5 + "old,2,no\n1,low,yes\n"),
        "Column 'age' of .* except for 'old' in row 6, and 'dose' of .* except for 'low' in row 7; correct",
    ),
    "several columns of words at one site": (
        text("age,sex,y\nold,1,no\nyoung,2,yes\nold,2,no\n"),
        "Column 'age' is numeric at 'a' but text at 'b', such as 'old', and 'sex' is numeric at 'b' but text at 'a'",
    ),
    "a target of text": (
        text("x,y\n" + "".join(f"{k},w{k}\n" for k in range(300))),
        "The target 'y' of .*b.csv' has .* different words, such as '.*', more than the limit of 100; predict another column",
    ),
    "split of unknown words": (text(GOOD.replace("sex", "split"), "a.csv"), "must be 'train' or 'test', not 'f'"),
    "split at one site only": (
        text("age,split,y\n1,train,no\n2,test,yes\n"),
        "'b' has a column 'split' but 'a' does not",
    ),
    "a sheet of another program": (raw(b"PK\x03\x04" + bytes(40), "b.ods"), "b.ods' is not a .csv"),
    "a folder inside": (lambda f: (f / "old").mkdir(), "old' is a folder"),
    "a folder called like a file": (lambda f: (f / "b.csv").mkdir(), "b.csv' is a folder, not a file"),
    "a pipe": (lambda f: os.mkfifo(f / "b.csv"), "is a pipe or device, not a file"),
    "a link to itself": (loop, "b.csv' cannot be read .*symbolic links"),
    "a link to nowhere": (lambda f: (f / "b.csv").symlink_to(f / "gone"), "is a link to a file that does not exist; fix"),
    "two files of one client": (text(GOOD, "a.tsv"), "would both be client 'a'"),
    "a name that cannot be printed": (text(GOOD, "b\nc.csv"), "name that cannot be printed"),
    "a name that is no text": (lambda f: Path(os.fsdecode(bytes(f) + b"/\xff.csv")).write_text(GOOD), "not UTF-8"),
    "NPZ: no zip file": (raw(b"junk" * 30, "b.npz"), "is not a valid NPZ file"),
    "NPZ: cut short": (lambda f: (npz(x=X, y=Y)(f), os.truncate(f / "b.npz", 300)), "is not a valid NPZ file"),
    "NPZ: nothing inside": (npz(), "contains no arrays"),
    "NPZ: pickled objects": (
        npz(x=X, y=np.array([{}] * 6, dtype=object)),
        "contains pickled objects, which can run code",
    ),
    "NPZ: no y": (npz(x=X), "has no column 'y'"),
    "NPZ: lengths differ": (npz(x=X, y=Y[:5]), "differ in length"),
    "NPZ: y is a table": (npz(x=X, y=X), "'y' in .* has shape .6, 2."),
    "NPZ: y is one number": (npz(x=X, y=np.array(1)), "differ in length"),
    "NPZ: complex numbers": (npz(x=X + 1j, y=Y), "has type complex128"),
    "NPZ: five axes": (npz(x=np.zeros((6, 2, 2, 2, 2)), y=Y), "has shape .6, 2, 2, 2, 2."),
    "NPZ: images among tables": (
        npz(x=IMAGES, y=np.array(["no", "yes"] * 3)),
        "Clients have different kinds of inputs",
    ),
    "NPZ: images with gaps": (
        npz(x=np.where(IMAGES > 90, np.nan, IMAGES), y=Y),
        "Image 6 of .* has missing or infinite",
    ),
    "NPZ: a header that asks for a terabyte": (
        zipped(x=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,), }"), y=npy("{}")),
        "'x' in .* is not as long as its header says",
    ),
    "NPZ: a header that is code": (zipped(x=npy("__import__('os').getcwd()")), "is not a valid NPZ file"),
    "Parquet: junk": (raw(b"PAR1" + bytes(60), "b.parquet"), "is not a valid Parquet file"),
    "Parquet: cut short": (parquet(0.6, age=[1.0] * 50, y=["no", "yes"] * 25), "is not a valid Parquet file"),
    "Parquet: lists": (parquet(age=[[1.0], [2.0]], y=["no", "yes"]), "'age' of .* has type list"),
    "Parquet: dates": (parquet(age=np.array(["2020-01-01"] * 2, "datetime64[D]"), y=["no", "yes"]), "has type date32.* out with --ignore 'age'"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "sites"
    made.mkdir()
    (made / "a.csv").write_text(GOOD)
    return made


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_sentence(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, words = REFUSED[kind]
    write(folder)
    out = folder.parent / "out"
    with pytest.raises(UserError, match=words):
        load(f"folder:{folder}", target="y")
    said = Command(capsys)("run", "--data", f"folder:{folder}", "--target", "y", "--out", out, "--quiet").sentence
    assert said.endswith((".", "?"))
    assert sorted(p.name for p in folder.parent.iterdir()) == ["sites"]


def loaded(folder: Path, **options: str) -> FederatedData:
    return load(f"folder:{folder}", target="y", **options)


def names(folder: Path, **options: str) -> tuple[str, ...]:
    preprocessor = loaded(folder, **options).preprocessor
    assert preprocessor is not None
    return preprocessor.input_names


TREATED: dict[str, tuple[Write, Callable[[Path], bool]]] = {
    "a mark of byte order": (text("\ufeff" + GOOD), lambda f: names(f) == ("age", "sex = f", "sex = m")),
    "lines of Windows": (text(GOOD.replace("\n", "\r\n")), lambda f: names(f) == ("age", "sex = f", "sex = m")),
    "lines of old Macs": (
        text(GOOD.replace("\n", "\r")),
        lambda f: len(loaded(f).train.y) + len(loaded(f).test.y) == 24,
    ),
    "semicolons": (text(GOOD.replace(",", ";")), lambda f: names(f) == ("age", "sex = f", "sex = m")),
    "tabs": (text(GOOD.replace(",", "\t"), "b.tsv"), lambda f: names(f) == ("age", "sex = f", "sex = m")),
    "bars": (text(GOOD.replace(",", "|")), lambda f: names(f) == ("age", "sex = f", "sex = m")),
    "decimal commas": (
        text("age;sex;y\n" + "".join(f"{k},5;f;{'no' if k % 2 else 'yes'}\n" for k in range(12))),
        lambda f: names(f) == ("age", "sex = f", "sex = m"),
    ),
    "a line inside of quotes": (
        text(GOOD + '40,"f\nm",no\n41,"f\nm",no\n'),
        lambda f: "sex = f\nm" in names(f),
    ),
    "other order of columns": (
        text("y,sex,age\n" + "".join(",".join(r.split(",")[::-1]) + "\n" for r in ROWS.splitlines())),
        lambda f: names(f) == ("age", "sex = f", "sex = m"),
    ),
    "a column missing at one site": (
        text("sex,y\nf,no\nm,yes\nf,no\n"),
        lambda f: names(f) == ("age", "age missing", "sex = f", "sex = m"),
    ),
    "a column more at one site": (
        text(GOOD.replace("sex,y", "sex,bmi,y").replace(",no", ",21,no").replace(",yes", ",28,yes")),
        lambda f: names(f)[1:3] == ("bmi", "bmi missing"),
    ),
    "a column without a name": (text("," + GOOD.replace("\n", "\n0,")[:-2]), lambda f: "" not in names(f)),
    "commas at the ends of lines": (
        text(GOOD.replace("\n", ",\n")),
        lambda f: names(f) == ("age", "sex = f", "sex = m"),
    ),
    "blank lines between": (
        text(GOOD.replace("\n", "\n\n")),
        lambda f: len(loaded(f).train.y) + len(loaded(f).test.y) == 24,
    ),
    "one row": (text(HEAD + "30,f,no\n"), lambda f: loaded(f).test.sizes.tolist()[1] == 0),
    "one class at one site": (text(GOOD.replace("yes", "no")), lambda f: loaded(f).labels == ("no", "yes")),
    "a class of one row": (
        text(GOOD + "70,f,maybe\n"),
        lambda f: 0 in loaded(f).train.y and all(0 not in load(f"folder:{f}", seed=s).test.y for s in range(9)),
    ),
    "a class that only one site has": (
        text(GOOD.replace("yes", "maybe")),
        lambda f: loaded(f).labels == ("maybe", "no", "yes"),
    ),
    "hidden files and notes": (
        lambda f: [(f / n).write_bytes(b"\xff\x00") for n in (".DS_Store", "README.md", ".b.csv.x.part")],
        lambda f: loaded(f).clients == ("a",),
    ),
    "odd but printable names": (
        text(GOOD, "St. Göran's – «B» #2.csv"),
        lambda f: loaded(f).clients == ("St. Göran's – «B» #2", "a"),
    ),
    "a column that is all missing": (
        text("age,sex,y\n,f,no\n?,m,yes\n NA ,f,no\n"),
        lambda f: names(f)[:2] == ("age", "age missing"),
    ),
    "a constant column": (
        text(GOOD.replace("sex,y", "sex,site,y").replace(",no", ",9,no").replace(",yes", ",9,yes")),
        lambda f: names(f)[3:] == ("site missing",),
    ),
    "truth values in several spellings": (
        lambda f: [
            (f / f"{n}.csv").write_text(GOOD.replace(",f,", f",{t},").replace(",m,", f",{u},"))
            for n, t, u in (("a", "True", "False"), ("b", "TRUE", "FALSE"), ("c", "true", "false"))
        ],
        lambda f: names(f) == ("age", "sex = false", "sex = true"),
    ),
    "NPZ with named columns": (
        npz(age=np.arange(6.0), sex=np.array(list("fmfmfm")), y=np.array(["no", "yes"] * 3)),
        lambda f: names(f) == ("age", "sex = f", "sex = m"),
    ),
    "Parquet with gaps": (
        parquet(age=[1, None, 3, 4], sex=["f", None, "m", "m"], y=["no", "yes", "no", "yes"]),
        lambda f: names(f) == ("age", "age missing", "sex = f", "sex = m", "sex missing"),
    ),
    "text of its own, left out": (
        text("age,note,y\n" + "".join(f"{k},w{k},{'no' if k % 2 else 'yes'}\n" for k in range(300))),
        lambda f: names(f, ignore="note, sex") == ("age",),
    ),
}


@pytest.mark.parametrize("kind", TREATED)
def test_treated_as_documented(kind: str, folder: Path) -> None:
    write, holds = TREATED[kind]
    write(folder)
    before = {p: p.lstat().st_mtime_ns for p in folder.iterdir()}
    assert holds(folder)
    assert before == {p: p.lstat().st_mtime_ns for p in folder.iterdir()}


@pytest.mark.parametrize("ignore", ["sex", " sex ,", ["sex"], ("sex",)])
def test_columns_to_ignore_are_a_list_or_a_text(ignore: str | list[str], folder: Path) -> None:
    made = load(f"folder:{folder}", target="y", ignore=ignore).preprocessor
    assert made is not None
    assert (made.input_names, made.settings()["ignore"]) == (("age",), "sex")


def test_dates_of_parquet_can_be_ignored(folder: Path) -> None:
    day = np.array(["2020-01-01", "2020-02-01", "2021-01-01", "2020-01-05"], "datetime64[D]")
    parquet(
        age=[30.0, 40, 50, 60], sex=["f", "m"] * 2, seen=day, left=day, id=["a", "b", "c", "d"], y=["no", "yes"] * 2
    )(folder)
    with pytest.raises(
        UserError,
        match=r"Columns 'seen', 'left' of .* have types such as date32\[day\], .* with --ignore 'id,seen,left'\.$",
    ):
        load(f"folder:{folder}", target="y", ignore="id")
    data = load(f"folder:{folder}", target="y", ignore="id,seen,left")
    assert data.preprocessor is not None
    assert data.preprocessor.input_names == ("age", "sex = f", "sex = m")
    assert len(read_rows(data, folder / "b.parquet", "b", print).x) == 4  # new rows may have others


def test_the_other_order_of_columns_is_the_same_data(folder: Path) -> None:
    first = loaded(folder)
    (folder / "a.csv").write_text(
        "y,sex,age\n" + "".join(",".join(r.split(",")[::-1]) + "\n" for r in ROWS.splitlines())
    )
    again = loaded(folder)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.y, again.test.y)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (None, {}, "folder.nowhere' cannot be opened .No such file"),
        ("", {}, "contains no .csv"),
        (GOOD, {"target": "Age"}, "has no column 'Age'; did you mean 'age'"),
        (GOOD, {"client_column": "sex"}, "is a folder with one file per client"),
        (GOOD, {"clients": 3}, "has its own clients .1., so it cannot have 3; omit --clients"),
        (GOOD, {"partition": "iid"}, "has its own clients, so 'iid' does not apply; omit it"),
        (GOOD, {"ignore": "sexx"}, "No client has the column 'sexx' to ignore; did you mean 'sex'"),
        (
            GOOD,
            {"ignore": ["sexx", "agee"]},
            "No client has the columns 'sexx', 'agee'; choose from: 'age', 'sex', 'y'",
        ),
        (GOOD, {"ignore": ["age,sex"]}, "Names with a comma in them, such as 'age,sex', cannot be given here"),
        (GOOD, {"task": "regression"}, "'y' of 'a' must be numeric for a regression, but has 'no'; .* --task c"),
        (GOOD, {"task": "ranking"}, "Unknown task 'ranking'"),
        (
            GOOD,
            {"target": "age", "task": "classification", "ignore": "sex,y"},
            "No column other than 'age'|nothing to learn",
        ),
        (GOOD.replace("yes", "no"), {}, "has only one class 'no'"),
        (GOOD.replace("\n", ",9\n").replace("y,9", "y,z"), {"target": "z", "task": "regression"}, "same in all rows"),
        ("sex,y\nf,no\nf,yes\n", {}, "No column other than 'y' has values that differ"),
        (GOOD, {"test_fraction": 1.0}, "below 1"),
        (GOOD, {"seed": -1}, "seed must be 0 or more"),
        (GOOD, {"standardise": "globally"}, "Unknown way to standardise"),
        (
            GOOD.replace("sex,y", "sex,diagnosis"),
            {"target": None},
            "Use --target to name the column to predict: 'age', 'sex', 'diagnosis'",
        ),
    ],
)
def test_what_cannot_be_of_a_whole_folder(change: str | None, options: dict, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if change:
        (folder / "a.csv").write_text(change)
    place = folder / "nowhere" if change is None else folder
    with pytest.raises(UserError, match=words):
        load(f"folder:{place}", **{"target": "y", **options})


def test_a_label_that_only_test_rows_have(folder: Path) -> None:
    (folder / "a.csv").write_text("age,split,y\n1,train,no\n2,train,yes\n3,test,maybe\n")
    with pytest.raises(UserError, match=r"a.csv' has the 'y' 'maybe', which no training row has.*'no', 'yes'"):
        loaded(folder)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # whoever runs the tests may be allowed to read anything
    with pytest.raises(UserError, match=r"a.csv' cannot be read .Permission denied"):
        loaded(folder)


def test_half_of_a_character_is_refused_before_training(tmp_path: Path) -> None:
    """Arrays and frames can hold it, and no file that a run writes can."""
    np.savez(tmp_path / "half.npz", w=np.array(["q", "\ud800"] * 5), y=np.arange(10.0))
    with pytest.raises(UserError, match=r"Column 'w' of .*half.npz' has half of a character"):
        read_table(tmp_path / "half.npz")
    with pytest.raises(UserError, match=r"Column 'w\\ud800' of 'half' has half of a character"):
        check_range(Table("half", 10, {"w\ud800": np.arange(10.0)}))


def test_an_archive_that_unpacks_to_more_than_is_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz_module, "LIMIT", 2.0**-10)
    with zipfile.ZipFile(folder / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(1 << 21))
    assert (folder / "b.npz").stat().st_size < 10_000
    with pytest.raises(
        UserError, match=r"would unpack to 0\.0 GiB, but at most 0\.00097\d+ are read; .* BPFED_NPZ_GIB=1\."
    ):
        loaded(folder)
    monkeypatch.setenv("BPFED_NPZ_GIB", "0.01")
    with pytest.raises(UserError, match="is not a valid NPZ file"):
        loaded(folder)
    for wrong in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv("BPFED_NPZ_GIB", wrong)
        with pytest.raises(UserError, match=r"BPFED_NPZ_GIB is .*, but must be a number of GiB"):
            loaded(folder)


def test_parquet_without_its_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(age=[1.0, 2.0], y=["no", "yes"])(folder)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"needs pyarrow.*pip install 'bpfed\[parquet\]'"):
        loaded(folder)


def test_one_table_for_all(tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    rows = [f"{k},{'no' if k % 3 else 'yes'},{k % 4 + 9}" for k in range(40)]
    table.write_text("age,y,ward\n" + "\n".join(rows) + "\n")
    data = load(f"folder:{table}", client_column="ward")
    assert data.clients == ("10", "11", "12", "9")
    assert data.preprocessor is not None
    assert data.preprocessor.input_names == ("age",)
    for wrong, words in (
        ({}, "is a single file; use --client-column .*: 'age', 'y', 'ward'"),
        ({"client_column": "wart"}, "did you mean 'ward'"),
        ({"client_column": "ward", "target": "ward"}, "Column 'ward' identifies the client, so it cannot be predicted"),
    ):
        with pytest.raises(UserError, match=words):
            load(f"folder:{table}", **wrong)
    table.write_text("age,y,ward\n" + "\n".join([*rows, "3,no,"]) + "\n")
    with pytest.raises(UserError, match=r"Row 41 .* has no 'ward'"):
        load(f"folder:{table}", client_column="ward")


def test_a_path_without_its_prefix_has_a_hint(folder: Path) -> None:
    with pytest.raises(UserError, match="write 'folder:"):
        load(str(folder))


def test_nothing_is_written_into_the_folder(folder: Path) -> None:
    before = files(folder)
    loaded(folder)
    assert files(folder) == before


def test_a_folder_whose_path_is_no_text_is_refused_before_training(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/klinik-\xe4"))
    folder.mkdir()
    (folder / "a.csv").write_text(GOOD)
    with pytest.raises(UserError, match="is a path that is not UTF-8; rename it"):
        load(f"folder:{folder}")
