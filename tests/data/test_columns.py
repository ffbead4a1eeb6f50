"""What becomes of each column, and which are doubted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import Command

from bpfed._util.errors import UserError
from bpfed.data.checks.column_types import columns, doubts, telling
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import Categorical, Table

N = 30


def clients(**made: list[str] | np.ndarray) -> dict[str, Table]:
    """Two clients with the same columns, the target ``y`` and a quantity ``age``."""
    rng = np.random.default_rng(0)
    found = {}
    for client in "ab":
        own = {name: c if isinstance(c, np.ndarray) else Categorical.of(c) for name, c in made.items()}
        own |= {"age": rng.integers(20, 90, N).astype(float), "y": Categorical.of(["no", "yes"] * (N // 2))}
        found[client] = Table(client, N, own)
    return found


def test_each_column_is_told() -> None:
    tables = clients(
        word=["x", "z", ""] * (N // 3),
        same=["x"] * N,
        gone=np.full(N, np.nan),
        gaps=np.array([1.0, np.nan] * (N // 2)),
        out=np.arange(float(N)),
    )
    made = federate("t", tables, "y", ignore=["out"]).preprocessor
    assert made is not None
    assert columns(tables, made) == [
        ("word", "2 categories, some missing", 3),
        ("same", "constant, not used", 0),
        ("gone", "all missing, not used", 0),
        ("gaps", "constant, some missing", 1),
        ("out", "ignored (--ignore)", 0),
        ("age", "numbers", 1),
        ("y", "target", 0),
    ]
    assert sum(row.inputs for row in columns(tables, made)) == len(made.input_names)


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("seen", [f"2024-05-{k + 1:02d}" for k in range(N)], "dates in 'seen'"),
        ("seen", [f"{k % 7 + 1}.5.2024 10:00" for k in range(N)], "dates in 'seen'"),
        ("seen", 20240500.0 + np.arange(1, N + 1), "dates in 'seen'"),
        ("who", [f"P{k}" for k in range(N)], "identifiers (nearly every value is different) in 'who'"),
        ("row", np.arange(float(N)), "identifiers (nearly every value is different) in 'row'"),
        ("patient_ID", np.arange(N)[::-1] ** 3.0, "identifiers (nearly every value is different) in 'patient_ID'"),
        ("income", np.random.default_rng(1).permutation(N) ** 3.0, None),
        ("dose", np.random.default_rng(1).normal(size=N), None),
        ("ward", ["east", "west", "1.5"] * (N // 3), None),
    ],
)
def test_what_looks_like_no_input_is_named(name: str, column: list[str] | np.ndarray, said: str | None) -> None:
    tables = clients(**{name: column}, out=[f"{k}" for k in range(N)])
    data = federate("t", tables, "y", ignore=["out"])
    assert data.preprocessor is not None
    sentence = f"There seem to be {said}; if these should not be inputs, leave them out with --ignore 'out,{name}'."
    assert doubts(tables, data.preprocessor) == data.notes == ((sentence,) if said else ())


@pytest.mark.parametrize(
    ("words", "such"),
    [
        ([f"{1000 + k:,}" for k in range(N)], "1,000"),
        ([f"${k}.50" for k in range(N)], "$0.50"),
        ([f"{k} mg/l" for k in range(N)], "0 mg/l"),
        ([f"−{k}" for k in range(N)], "−0"),
        ([f"{k}" for k in range(N)], "0"),  # text, of a file that tells text from numbers
        ([f"{k}" for k in range(N - 1)] + ["none"], "0"),
        ([f"{k % 9} mg" for k in range(N)], None),  # nine doses may be categories
        ([f"{k}-{k + 9}" for k in range(N)], None),
        ([f"E{k}.9" for k in range(N)], None),
        ([f"{k:02d}:30" for k in range(N)], None),
    ],
)
def test_numbers_written_as_text_are_named(words: list[str], such: str | None) -> None:
    said = "Words of 'dose' look like numbers, such as"
    data = federate("t", clients(dose=words), "y", test_fraction=0.0)
    found = [note for note in data.notes if note.startswith(said)]
    assert len(found) == (such is not None)
    assert such is None or f"such as '{such}', but each is a category of its own" in found[0]
    target = federate(
        "t", {"a": Table("a", N, {"x": np.arange(N) / 7, "y": Categorical.of(words)})}, "y", test_fraction=0.0
    )
    assert any("Words of 'y' look like numbers" in note for note in target.notes) == (such not in (None, "0"))


@pytest.mark.parametrize(
    ("numbers", "gap"),
    [
        (np.where(np.arange(N) % 5 == 0, -999.0, np.arange(N) / 7), "-999"),
        (np.where(np.arange(N) % 5 == 0, 9999.0, np.arange(N) / 7), "9999"),
        (np.where(np.arange(N) == 3, -999.0, np.where(np.arange(N) % 2, np.nan, np.arange(N) / 7)), None),  # two in all
        (np.where(np.arange(N) % 5 == 0, -999.0, -40.0 * np.arange(N)), None),
        (np.where(np.arange(N) % 5 == 0, 999.0, 5.0), None),  # two values, such as a price
        (np.arange(N) / 7, None),
    ],
)
def test_numbers_that_stand_for_missing_values_are_named(numbers: np.ndarray, gap: str | None) -> None:
    notes = [n for n in federate("t", clients(dose=numbers), "y").notes if "may stand for missing values" in n]
    assert len(notes) == (gap is not None)
    assert gap is None or notes[0].startswith(f"Numbers such as {gap} in 'dose' are far from all others")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("Split", ["train", "train", "test"], True),
        ("set", ["Train", "Training", "TEST"], True),
        ("set", ["train", "bus", "train"], False),
        ("split", ["train", "train", "test"], False),
    ],
)
def test_a_split_under_another_name_is_named(name: str, words: list[str], said: bool) -> None:
    notes = federate("t", clients(**{name: words * (N // 3)}), "y").notes
    assert (
        any(f"'{name}' has the words of a split, but is used as an input; call it 'split'" in n for n in notes) == said
    )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ((["H1"] * N, ["H2"] * N), True),
        ((np.full(N, 101.0), np.full(N, 102.0)), True),
        ((np.full(N, 101.0), np.full(N, 102.0), np.full(N, 101.0)), True),
        ((["H1"] * N, ["H2", ""] * (N // 2), [""] * N), True),  # what is missing is no other value
        ((["H1"] * N, [""] * N), False),
        ((np.full(N, 1.5), np.full(N, 2.5)), False),  # measured
        ((["H1"] * N, ["H2"] * (N - 1) + ["H1"]), False),
        ((np.full(N, 101.0), np.array([102.0] * (N - 1) + [101.0])), False),
    ],
)
def test_what_says_whose_a_row_is_is_named(columns: tuple[list[str] | np.ndarray, ...], said: bool) -> None:
    tables = {}
    for client, column in zip("abc", columns, strict=False):
        own = column if isinstance(column, np.ndarray) else Categorical.of(column)
        tables[client] = replace(clients(hospital=["x"] * N)["a"], name=client)
        tables[client].columns["hospital"] = own
    sentence = (
        "There seem to be client names (the same in all rows of a client, but not between clients) in 'hospital'; if "
        "these should not be inputs, leave them out with --ignore 'hospital'."
    )
    notes = [note for note in federate("t", tables, "y").notes if "in common" not in note]  # their other columns are
    assert notes == ([sentence] if said else [])


def test_one_client_or_one_row_each_names_nobody() -> None:
    table = clients(hospital=["H1"] * N)
    (only,) = federate("t", {"a": table["a"]}, "y").notes
    assert only.startswith("There is only one client")
    one = {
        c: Table(c, 1, {"hospital": Categorical.of([c]), "age": np.array([a]), "y": Categorical.of([y])})
        for c, a, y in (("a", 1.0, "no"), ("b", 2.5, "yes"), ("c", 3.5, "no"))
    }
    assert federate("t", one, "y", test_fraction=0.0).notes == ()


@pytest.mark.parametrize(
    "cells", [["1,234.50", "999.00", "12,000"], ["1.234,50", "999", "1.234.567"], ["1'234", "2'345"]]
)
def test_numbers_with_thousands_separators_are_not_called_identifiers(cells: list[str]) -> None:
    own = [cells[0].replace("34", f"{k + 10}") for k in range(N - len(cells))]
    tables = clients(price=[*cells, *own], who=[f"P{k}" for k in range(N)])
    data = federate("t", tables, "y")
    assert data.notes[0].startswith("Words of 'price' look like numbers, such as '")
    assert data.notes[1:] == (
        "There seem to be identifiers (nearly every value is different) in 'who'; if these should not be inputs, leave "
        "them out with --ignore 'who'.",
    )
    assert telling(tables["a"].without(["who"])) == {"numbers written as text": ["price"]}


def test_long_tables_of_whole_numbers_cost_no_time() -> None:
    rng, rows = np.random.default_rng(0), 200_000
    wide = {f"c{k}": rng.integers(0, 10**9, rows).astype(float) for k in range(30)}
    tables = {"a": Table("a", rows, wide | {"y": rng.integers(0, 2, rows).astype(float)})}
    made = federate("t", tables, "y", test_fraction=0.0).preprocessor
    assert made is not None
    began = time.perf_counter()
    assert doubts(tables, made) == ()
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize(
    ("others", "how"),
    [((), "remove them from the files."), (("row",), "leave them out with --ignore 'row' (rename any with a comma")],
)
def test_a_name_with_a_comma_is_not_advised_to_be_ignored(others: tuple[str, ...], how: str) -> None:
    tables = clients(**{"number, of patient": np.arange(float(N)), **{name: np.arange(float(N)) for name in others}})
    (note,) = federate("t", tables, "y").notes
    assert f"if these should not be inputs, {how}" in note


def test_whoever_trains_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of, out = tmp_path / "rows", tmp_path / "out"
    rows_of.mkdir()
    for k, client in enumerate("ab"):
        rows = (f"{100 * k + i},{i % 3 + 0.5 * (i % 2)},{i % 2}" for i in range(40))
        (rows_of / f"{client}.csv").write_text("\n".join(["patient_id,age,y", *rows]))
    asked = (f"folder:{rows_of}", "--target", "y", "--rounds", "1")
    told = (
        "There seem to be identifiers (nearly every value is different) in 'patient_id'; if these should not be inputs"
    )
    said = Command(capsys).ok("run", "--data", *asked, "--out", str(out / "run")).err
    assert said.count(told) == 1
    methods = ("--methods", "local,fedavg", "--seeds", "2", "--out", str(out / "compared"))
    assert Command(capsys).ok("compare", "--data", *asked, *methods).err.count(told) == 1
    left = Command(capsys).ok("run", "--data", *asked, "--ignore", "patient_id", "--out", str(out / "left"))
    assert "There seem to be" not in left.err
    both = ("--ignore", "patient_id", "--ignore", "age")  # nothing is left
    said = Command(capsys)("run", "--data", *asked, *both, "--out", str(out / "both")).sentence
    assert said.startswith("No column other than 'y' has values that differ")


def test_inspect_lists_columns_and_folds_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{k % 40}" for k in range(120)]
    for client in "ab":
        numbers = rng.normal(size=(120, 98)).round(2)
        head = ",".join(["y", "kind", *(f"c{k:02d}" for k in range(98))])
        rows = (f"{k % 2},{words[k]}," + ",".join(map(str, row)) for k, row in enumerate(numbers))
        (tmp_path / f"{client}.csv").write_text("\n".join([head, *rows]))
    out = Command(capsys).ok("data", "inspect", f"folder:{tmp_path}", "--target", "y").out
    assert " kind     40 categories       40 \n" in out
    assert " c57 " in out
    assert " c58 " not in out
    assert "... and 40 more columns.\n" in out
    assert "has 40 different words" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["p1", "p2", "p3", "p4", "p5"], "identifiers"),
        (["p1", "p2", "p3", "p4", "p5", ""], "identifiers"),
        ([f"p{i}" for i in range(N - 2)] + ["p0", "p1"], "identifiers"),
        (["2024-05-14", "2024-05-14", "2024-06-01"], "dates"),
        (["p1", "p2", "p3", "p4"], None),
        (["a", "b", "c", "a", "d"], None),
        (["a", "b", "c", "d", "e", "f", "a", "b"], None),
        (["", "", "", "", ""], None),
    ],
)
def test_words_that_others_should_not_be_told(words: list[str], wanted: str | None) -> None:
    table = Table("a", len(words), {"word": Categorical.of(words), "number": np.arange(float(len(words)))})
    assert telling(table) == ({} if wanted is None else {wanted: ["word"]})


def test_a_refusal_keeps_what_is_ignored_already() -> None:
    n = 150
    tables = {
        "a": Table(
            "a",
            n,
            {c: Categorical.of([f"{c}{k}" for k in range(n)]) for c in ("id", "seen")} | {"y": np.arange(n) % 2.0},
        )
    }
    with pytest.raises(UserError, match="leave it out with --ignore 'id,seen', or"):
        federate("t", tables, "y", ignore=["id"])
