"""CSV as it is written and read back, and files longer than what is looked at in one go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpfed.data import Table, csvfile, read_table
from bpfed.data.csvfile import write_folder
from bpfed.data.table import MISSING, Words
from bpfed.errors import UserError

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
    words = Words.of([w for _, w in rows])
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


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_points_between_thousands_are_not_read_as_decimals(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text("rent;b\n999;1\n1.234;2\n950,5;3\n2.345;4\n")
    with pytest.raises(
        UserError,
        match=r"'rent' of .* has '950,5', with a decimal comma, and '1.234', where the point may .* separators\.$",
    ):
        read_table(path)
    for plain in ("999;1\n1.234;2\n2.345;4\n", "999;1\n0.234;2\n950,5;3\n", "1.2345;1\n950,5;2\n1.23;3\n"):
        path.write_text(f"rent;b\n{plain}")
        assert isinstance(read_table(path).columns["rent"], np.ndarray)
    path.write_text("rent,b\n1.234,1\n950.5,2\n")  # no comma can be a decimal one here
    assert read_table(path).columns["rent"].tolist() == [1.234, 950.5]
    path.write_text("rent;b\n1.234;1\n950,5;2\n")
    assert read_table(path, ["rent"]).words("rent") == ["1.234", "950,5"]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_row_of_another_width_is_named_by_its_line(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csvfile, "CHUNK", chunk)
    path = tmp_path / "t.csv"
    path.write_text('\na;b\n1;2\n\n"x\ny";2\n1;2;3\n' + "1;2\n" * 60)
    with pytest.raises(UserError, match=r"has 2 columns, but 3 in the row '1;2;3' in line 7; correct it\.$"):
        read_table(path)
    path.write_text("a,b\n1,2,3\n" + "1,2\n" * 60)
    with pytest.raises(UserError, match=r"in the row '1,2,3' in line 2;"):
        read_table(path)
