"""Words of a user's own that stand for no value."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import Command

from bpfed._util.errors import UserError
from bpfed.data import load
from bpfed.data.tabular.recode import MissingValues
from bpfed.data.tabular.table import Categorical, read_table

ROWS = "age;smoker;dose;sick\n" + "".join(
    f"{999 if k % 5 == 0 else 40 + k};{('Unbekannt', 'ja', 'nein')[k % 3]};{'k.A.' if k % 7 == 0 else f'{k},5'};{k % 2}\n"
    for k in range(30)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "clinics"
    made.mkdir()
    for name in ("a", "b"):
        (made / f"{name}.csv").write_text(ROWS)
    return made


def test_words_are_missing_everywhere_and_numbers_in_one_column(folder):
    with pytest.raises(
        UserError, match=r"'dose' of .* is numeric except for 'k.A.' in row 1 and 4 more.* with --missing"
    ):
        read_table(folder / "a.csv")
    table = read_table(folder / "a.csv", missing=["UNBEKANNT", "k.a.", "age=999"])
    assert not isinstance(table.columns["dose"], Categorical)  # without its words it is a column of numbers
    assert np.flatnonzero(table.missing("age")).tolist() == list(range(0, 30, 5))
    assert np.flatnonzero(table.missing("smoker")).tolist() == list(range(0, 30, 3))
    assert np.flatnonzero(table.missing("dose")).tolist() == list(range(0, 30, 7))
    assert table.columns["smoker"].categories == ("ja", "nein")
    assert table.columns["dose"][1] == 1.5


def test_a_word_of_one_column_stays_in_the_others(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n999,999\n1,2\nx,3\n")
    table = read_table(path, missing=["a=999", "a=x", "b=x"])
    assert table.missing("a").tolist() == [True, False, True]
    assert not table.missing("b").any()


@pytest.mark.parametrize("written", ["999", "999.0", "9.99e2"])
def test_a_number_is_missing_however_it_is_written(tmp_path, written):
    path = tmp_path / "t.csv"
    path.write_text(f"a\n{written}\n1\n")
    assert read_table(path, missing=["999"]).missing("a").tolist() == [True, False]


def test_other_kinds_of_files_have_them_too(tmp_path):
    pq.write_table(pa.table({"a": [1.0, 999.0], "w": ["Unknown", "yes"]}), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", missing=["unknown", "999"])
    assert table.missing("a").tolist() == [False, True]
    assert table.missing("w").tolist() == [True, False]
    np.savez(tmp_path / "t.npz", a=np.array([1.0, 999.0]), w=np.array(["unknown", "yes"]))
    table = read_table(tmp_path / "t.npz", missing=["unknown", "999"])
    assert table.missing("a").tolist() == [False, True]
    assert table.missing("w").tolist() == [True, False]


@pytest.mark.parametrize("said", ["", "age=", "=999", " = "])
def test_what_names_nothing_is_refused(said):
    with pytest.raises(UserError, match="names no missing value; write WORD, or COLUMN=WORD"):
        MissingValues.of([said])


def test_a_column_that_nobody_has_is_refused(folder):
    with pytest.raises(UserError, match="No client has the column 'agee' with missing values; did you mean 'age'"):
        load(f"folder:{folder}", target="sick", missing="k.A.,agee=999")


def test_only_a_users_own_tables_have_them():
    with pytest.raises(UserError, match="not a table, so 'missing' does not apply"):
        load("digits", missing="x")


def test_training_and_prediction_agree_on_what_is_missing(capsys, folder, tmp_path):
    bpfed = Command(capsys)
    said = ("--missing", "Unbekannt,k.A.,age=999")
    shown = bpfed.ok("data", "inspect", f"folder:{folder}", "--target", "sick", *said).out
    assert "k.A." not in shown
    assert re.search(r"age +20 +20\b", shown)  # per cent of the ages
    out = tmp_path / "run"
    bpfed.ok(
        "run", "--data", f"folder:{folder}", "--target", "sick", *said, "--rounds", "2", "--quiet", "--out", str(out)
    )
    new = tmp_path / "new.csv"
    new.write_text("age;smoker;dose\n999;Unbekannt;k.A.\n;;\n999;ja;3,5\n")
    bpfed.ok("predict", str(out), "--client", "a", "--input", str(new), "--out", str(tmp_path / "p.csv"))
    first, blank, other = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert first == blank  # the same as cells that are left blank
    assert first != other
