"""Large CSV files by the reader of pyarrow: the same table as by the other, and what it leaves to that."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bpfed._util.errors import UserError
from bpfed.data.tabular import csvfile
from bpfed.data.tabular.table import Categorical, Table, read_table

PLAIN = "n,w,share,gap,code,flag,empty\n" + "".join(
    f"{k / 7:.4f},{('x ', 'y', 'NA', '')[k % 4]},{k % 100}%,{('', 'NaN', '1e3', ' 2.5 ', 'NULL')[k % 5]},{k % 3},"
    f"{('TRUE', 'false')[k % 2]},\n"
    for k in range(5000)
)
LEFT: dict[str, str | bytes] = {
    "quotes": PLAIN.replace("y,", '"y",', 1),
    "a word after many numbers": PLAIN + "abc,x,1%,1,1,true,\n",
    "underscores": PLAIN + "1_000,x,1%,1,1,true,\n",
    "semicolons": PLAIN.replace(",", ";"),
    "mixed line ends": PLAIN + "1,x,1%,1,1,true,\r\n",
    "blank lines first": "\n\n" + PLAIN,
    "a cell that is too long": PLAIN + f"1,{'x' * 140_000},1%,1,1,true,\n",
    "a number that is too long": PLAIN + f"1.{'0' * 140_000},x,1%,1,1,true,\n",
    "no column with a name": ",\n" + "a,1\n" * 5000,
}


def same(one: Table, two: Table) -> None:
    assert one.rows == two.rows
    assert list(one.columns) == list(two.columns)
    for name, column in one.columns.items():
        other = two.columns[name]
        if isinstance(column, Categorical):
            assert isinstance(other, Categorical)
            assert column.categories == other.categories
            assert np.array_equal(column.codes, other.codes)
        else:
            assert np.array_equal(column, other, equal_nan=True)


def both(path: Path, monkeypatch: pytest.MonkeyPatch, **options: list[str]) -> tuple[Table | str, Table | str, bool]:
    """What both readers make of a file, and whether the fast one read it."""
    used: list[bool] = []
    found: list[Table | str] = []
    original = csvfile.read_columns
    monkeypatch.setattr(csvfile, "read_columns", lambda *a: (r := original(*a), used.append(r is not None))[0])
    for large in (1, 1 << 60):
        monkeypatch.setattr(csvfile, "LARGE", large)
        try:
            found.append(read_table(path, **options))
        except UserError as error:
            found.append(str(error))
    return found[0], found[1], any(used)


@pytest.mark.parametrize("text", [PLAIN, PLAIN.replace("\n", "\r\n"), "\ufeff" + PLAIN, PLAIN + "\n\n"])
def test_plain_files_are_the_same_table(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.csv").write_bytes(text.encode())
    fast, slow, used = both(tmp_path / "a.csv", monkeypatch)
    assert used
    assert isinstance(fast, Table)
    assert isinstance(slow, Table)
    same(fast, slow)
    fast, slow, used = both(tmp_path / "a.csv", monkeypatch, words=["code", "n"])
    assert used
    assert isinstance(fast, Table)
    assert isinstance(slow, Table)
    same(fast, slow)


@pytest.mark.parametrize("what", LEFT)
def test_whatever_could_be_read_otherwise_is_left_to_the_other_reader(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_bytes(str(LEFT[what]).encode())
    fast, slow, used = both(tmp_path / "a.csv", monkeypatch)
    assert not used
    if isinstance(slow, Table):
        assert isinstance(fast, Table)
        same(fast, slow)
    else:
        assert fast == slow


@pytest.mark.parametrize(
    "wrong", [PLAIN + "1,2\n", PLAIN.encode() + b"\xff\xfe,x,1%,1,1,true,\n", PLAIN + "1e400,x,1%,1,1,true,\n"]
)
def test_what_is_wrong_is_said_in_the_same_sentence(
    wrong: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_bytes(wrong if isinstance(wrong, bytes) else wrong.encode())
    fast, slow, _ = both(tmp_path / "a.csv", monkeypatch)
    assert isinstance(slow, str)
    assert fast == slow


#: Cells that a number or a word could be taken for, and that readers disagree on.
CELLS = (
    "1 0x10 1_0 inf -inf nan nAn +nan NA Na n/a ? - -- null Null 1e400 1e-400 99999999999999999999999999 0.30000000000000004"
    " 1.7976931348623159e308 4.9e-324 .5 5. 1e 1d5 ٣ １ ² #N/A <NA> <Na> -0 00012 9007199254740993 =1+1 @x 'q TRUE tRue 12% %"
    " é e\u0301 \\N \\ \u2028 \x0b \x0c \x1b \x85 \x1a \ufeff 😀"
)
#: Lines of any number of cells.
ODD = ("", " ", "\t", "1", "1,2,3", ",", "#c", '"', '"a\nb",1', "\r")


@pytest.mark.parametrize("seed", range(4))
def test_hostile_files_are_read_alike_by_both(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    rng, path = random.Random(seed), tmp_path / "a.csv"
    monkeypatch.setattr(csvfile, "CHUNK", 20)  # what the fast reader goes by, so that the odd cells are after it
    fast_ones = 0
    for _ in range(60):
        kinds = [["1", "2.5", ""], ["u", "v", ""]]
        cells = [[rng.choice(kind) for _ in range(40)] for kind in rng.choices(kinds, k=2)]
        for _ in range(rng.randint(0, 3)):
            rng.choice(cells)[rng.randrange(40)] = rng.choice(CELLS.split(" "))
        lines = [rng.choice(["a,b", "a,b", "a,", ",", "a,a", " a ,é", "1,2"]), *map(",".join, zip(*cells, strict=True))]
        if rng.random() < 0.2:
            lines.insert(rng.randrange(1, 40), rng.choice(ODD))
        end = rng.choice(["\n", "\n", "\r\n", "\r"])
        path.write_bytes(
            rng.choice(["", "", "", "\ufeff"]).encode() + end.join(lines).encode() + rng.choice([b"", b"\n"])
        )
        fast, slow, used = both(path, monkeypatch)
        fast_ones += used
        if isinstance(fast, Table) and isinstance(slow, Table):
            same(fast, slow)
        else:
            assert fast == slow, path.read_bytes()
    assert fast_ones > 10
