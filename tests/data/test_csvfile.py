"""CSV as it is written and read back, and files longer than what is looked at in one go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpfed._util.errors import UserError
from bpfed.data import Table, read_table
from bpfed.data.tabular import csvfile
from bpfed.data.tabular.csvfile import write_folder
from bpfed.data.tabular.table import MISSING, Categorical

WORD = st.text(st.characters(categories=("L", "P", "S", "Zs")), min_size=1, max_size=9).map(str.strip)
WORD = WORD.filter(
    lambda w: w.casefold() not in MISSING | {"inf", "infinity", "true", "false"} and not csvfile._number(w)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.floats(-1e30, 1e30) | st.just(np.nan), WORD), min_size=1, max_size=12),
    st.sampled_from([1, 3, 100]),
)
def test_written_and_read_back_it_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, str]], chunk: int
) -> None:
    words = Categorical.of([w for _, w in rows])
    table = Table("t", len(rows), {"a number": np.array([v for v, _ in rows]), 'words, "quoted"': words})
    (path,) = write_folder({"one": table}, tmp_path_factory.mktemp("w"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csvfile, "CHUNK", chunk)
        again = read_table(path)
    assert list(again.columns) == list(table.columns)
    np.testing.assert_array_equal(again.columns["a number"], table.columns["a number"])
    assert again.words('words, "quoted"') == table.words('words, "quoted"')


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_how_much_is_looked_at_in_one_go_does_not_matter(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text("late,early,gaps,number,truth\n1,a,,1,True\n2,b,,2,TRUE\nx,3,,,true\ny,4,?,4,no idea\nz,c,w,5,\n")
    table = read_table(path)
    assert table.words("truth") == ["true", "true", "true", "no idea", ""]
    assert table.words("late") == ["1", "2", "x", "y", "z"]
    assert table.words("early") == ["a", "b", "3", "4", "c"]
    assert table.words("gaps") == ["", "", "", "", "w"]
    np.testing.assert_array_equal(table.columns["number"], [1, 2, np.nan, 4, 5])
    path.write_text("a\n" + "1\n" * 9 + "x\n")
    with pytest.raises(UserError, match=r"'a' of .* is numeric except for 'x' in row 10"):
        read_table(path)


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1", " 2 ", "-3e-2", ".5"], True),
        (["1_000", "2_000"], False),
        (["0x10", "0x11"], False),
        (["1,5", "2,5"], False),
        (["1", "NaN", "n/a", "NULL", "?"], True),
        (["57%", "3.5 %", " -2e1% ", "NA"], True),
        (["57%", "low"], False),
        (["%", "nan%"], False),
        (["57,5%", "2,5%"], False),
    ],
)
def test_what_is_a_number(cells: list[str], numbers: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f'"{cell}",1\n' for cell in cells))
    assert isinstance(read_table(path).columns["a"], np.ndarray) == numbers
    path.write_text("a;b\n1,5;1\n-,25;2\n")
    assert read_table(path).columns["a"].tolist() == [1.5, -0.25]


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_percentages_are_numbers_where_all_are(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text("a;b;c\n57%;1,5 %;57%\n;?;57\n100 %;-,25%;low\n")
    table = read_table(path)
    np.testing.assert_array_equal(table.columns["a"], [57, np.nan, 100])
    np.testing.assert_array_equal(table.columns["b"], [1.5, np.nan, -0.25])
    assert table.words("c") == ["57%", "57", "low"]
    path.write_text("a\n57%\n58%\n59\n")
    with pytest.raises(UserError, match=r"'a' of .* is percentages except for '59' in row 3"):
        read_table(path)


def test_a_header_of_counts_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",0,1,10,target\n0,5,6,7,a\n")
    assert list(read_table(path).columns) == ["0", "1", "10", "target"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_name_may_run_over_lines_whatever_the_delimiter(delimiter: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = ['a{}"blood', "pressure, systolic; mmHg", '(seated)"{}y', "1{}2{}x", "3{}4{}z"]
    path.write_text(end.join(line.replace("{}", delimiter) for line in lines) + end, newline="")
    table = read_table(path)
    assert list(table.columns) == ["a", "blood pressure, systolic; mmHg (seated)", "y"]
    assert (table.columns["a"].tolist(), table.words("y")) == ([1, 3], ["x", "z"])


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ('a;"b, in c, or d";y', ["a", "b, in c, or d", "y"]),
        ('"a";"b, in c, or d";y', ["a", "b, in c, or d", "y"]),
        ('a;size 5";y', ["a", 'size 5"', "y"]),
        ('"a" ;"b" ;"y"', ["a", "b", "y"]),
        ('a ;"b" ;y', ["a", "b", "y"]),
    ],
)
def test_quotes_in_names(header: str, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n1;2;3\n")
    assert list(read_table(path).columns) == names


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,"b,y\n1,2,3\n')
    with pytest.raises(UserError, match=r"The column names of .* are damaged: a quote is not closed"):
        read_table(path)
    path.write_text("x" * 200_000)
    with pytest.raises(UserError, match="does not begin with a line of column names"):
        read_table(path)


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        (
            "x;y",
            ["986;1", "1,017;2", "1,020;3"],
            "Column 'x' has a comma for thousands \\('1,017'\\) in '.*t.csv'; w",
        ),
        (
            "x;y",
            ["1.100;0,5", "2.350;1,5"],
            r"'x' has a point \('1.100'\) where 'y' has a decimal comma \('0,5'",
        ),
        (
            "x;y",
            ["1.100;0,5", "2;1,5", "0,25;3"],
            r"'x' has a point \('1.100'\) where 'x' has a decimal comma \('0,25'",
        ),
        (
            "x;y",
            ["1.100;1", "1.234.567;2"],
            r"'x' has a point \('1.100'\) that sets off thousands, as in '1.234.567'",
        ),
        ("x;y", ["1.100;1", "1.234,50;2"], r"'x' has a point \('1.100'\) that sets off thousands, as in '1.234,50'"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1000])
def test_thousands_are_not_taken_for_fractions(
    header: str, rows: list[str], words: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text("\n".join([header, *rows]))
    with pytest.raises(UserError, match=words):
        read_table(path)


@pytest.mark.parametrize(
    ("rows", "x"),
    [
        (["1,017;1", "1,020;2"], [1.017, 1.02]),  # fractions of three digits throughout
        (["986;1", "1,017;2", "1,023;3"], [986, 1.017, 1.023]),  # the last zeros dropped
        (["986;1", "1,017;2", "1,020;3", "0,5;4"], [986, 1.017, 1.02, 0.5]),
        (["986;1", "1,017;2", "1,020;3", "1000;4"], [986, 1.017, 1.02, 1000]),
        (["1.100;0,5", "2.35;1,5"], [1.1, 2.35]),
        (["1.100;1", "2.350;2"], [1.1, 2.35]),
        (["0,00;1", "1.234,50;2", "-12.345.678,9;3", "1.234.567;4"], [0, 1234.5, -12345678.9, 1234567]),
    ],
)
def test_fractions_stay_fractions(rows: list[str], x: list[float], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["x;y", *rows]))
    assert read_table(path).columns["x"].tolist() == x


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_a_row_of_another_length_is_named(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text("a;b\n1;2\n\n3;4\n5;6;\n7;8\n")
    with pytest.raises(UserError, match=r"has 2 columns, but 3 in row 3 \('5;6;'\)"):
        read_table(path)


def test_a_line_before_the_names_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("sep=;\na;b\n1;2\n")
    with pytest.raises(UserError, match="begins with the line 'sep=;', not with column names"):
        read_table(path)
    path.write_text("# exported today\na;b\n1;2\n")
    with pytest.raises(UserError, match=r"The first line of .* has only one column, '# exported today'; begin"):
        read_table(path)


def test_all_cells_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n" + "\n".join(f"{'.' if i % 3 == 1 else i},0" for i in range(30)) + "\n")
    with pytest.raises(UserError, match=r"'a' of .* is numeric except for '\.' in row 2 and 9 more; correct it"):
        read_table(tmp_path / "a.csv")


def test_a_word_among_decimal_commas_is_named_and_not_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("bmi;y\n22,5;1\n1.200,0;0\nk.A.;1\n31,0;0\n")
    with pytest.raises(UserError, match=r"'bmi' of .* is numeric except for 'k.A.' in row 3"):
        read_table(path)


def test_a_word_that_is_as_common_as_numbers_is_a_category(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("children,y\n" + "".join(f"{k},0\n" for k in ["0", "1", "2", "3+"] * 25))
    column = read_table(path).columns["children"]
    assert isinstance(column, Categorical)
    assert column.categories == ("0", "1", "2", "3+")
    path.write_text("children,y\n" + "".join(f"{k},0\n" for k in ["0", "1", "2"] * 30 + ["3+"] * 4))
    with pytest.raises(UserError, match=r"'children' of .* is numeric except for '3\+' in row 91 and 3 more"):
        read_table(path)
