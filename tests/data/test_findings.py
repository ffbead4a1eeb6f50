"""One look at a nasty folder names every fault, and one configuration mends them all; no file is changed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Command
from nasty import PLANTED, clean, nasty, write

import bpfed
from bpfed._util.errors import UserError
from bpfed._util.files import from_toml
from bpfed.config.reader import read
from bpfed.data import load
from bpfed.data.checks.agreement import code_findings, matched, unit_findings
from bpfed.data.checks.findings import Asked, configuration, examine, survey
from bpfed.data.tabular.recode import parse_dates
from bpfed.data.tabular.table import Categorical, Table

QUICK = {"rounds": 4, "epochs": 3, "adapt": "off", "members": 1, "eval_draws": 5, "compile": "off", "baselines": "off"}


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.iterdir()))).hexdigest()


def test_one_inspection_names_every_fault_and_one_configuration_mends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    folder, command = nasty(tmp_path / "nasty"), Command(capsys)
    before = digest(folder)
    tables, refused, why = survey(folder, Asked(target="died"))
    found = [*refused, *examine(tables, Asked(target="died"))]
    assert {(finding.file, finding.column) for finding in found} == set(PLANTED)
    assert len(PLANTED) >= 12
    assert "numeric except for 'unknown'" in why

    asked = ("data", "inspect", "folder:nasty", "--target", "died")
    shown = command(*asked, "--fix", "fix.toml")
    assert shown.code == 2
    assert "is numeric except for 'unknown' in row" in shown.err.splitlines()[-1]
    assert "As the files are: " in shown.err
    assert max(map(len, shown.out.splitlines())) <= 80
    for file, column in PLANTED:
        assert re.search(rf"^ {re.escape(file)} +{re.escape(column)} ", shown.out, re.MULTILINE), (file, column)
    assert "'fix.toml' exists already" in command(*asked, "--fix", "fix.toml").sentence
    left = command.ok("data", "inspect", "fix.toml").out
    assert "Findings (2)" in left  # semicolons, which are read as such, and the column that one hospital has not

    mended = read(Path("fix.toml")).load_data()
    tidy = load(f"folder:{clean(tmp_path / 'clean')}", target="died", dates="admitted")
    assert mended.input_shape == tidy.input_shape
    run, plain = (bpfed.fit("bpfed-adaptive", data, progress=False, **QUICK) for data in (mended, tidy))
    assert run.history[-1]["nll"] == pytest.approx(plain.history[-1]["nll"], rel=0.01)
    here = run.client("davos").predict(folder / "davos.csv").probs  # new rows are recoded too
    there = plain.client("davos").predict(tmp_path / "clean" / "davos.csv").probs
    assert float((here - there).abs().max()) < 0.05
    assert digest(folder) == before


def test_words_of_files_are_neither_settings_nor_orders_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word = "x\n]\n[run]\nseed = 7\nrounds = [#\x9b2J"
    for client in ("ann", "ben"):
        rows = "".join(f"{k / 7},{'uv'[k % 2]}\u202e,{'pq'[k % 2]}\n" for k in range(60))
        Path(f"rows/{client}.csv").parent.mkdir(exist_ok=True)
        Path(f"rows/{client}.csv").write_text(f'"a\x9b2J",b,t\n"{word}",u,p\n{rows}')
    shown = Command(capsys)("data", "inspect", "folder:rows", "--target", "t", "--fix", "fix.toml")
    assert "'x\\n]\\n[run]" in shown.err
    assert not re.search("[\x80-\x9f\u202e]", shown.out + shown.err)
    assert from_toml(Path("fix.toml").read_bytes()) == {
        "data": {"name": "folder:rows", "target": "t", "missing": [f"a\x9b2J={word}"]}
    }


def test_a_clean_folder_has_no_findings(tmp_path: Path) -> None:
    asked = Asked(target="died", ignore="admitted")
    tables, refused, why = survey(clean(tmp_path), asked)
    assert (refused, why) == ([], "")
    assert [f for f in examine(tables, asked) if f.column != "pressure"] == []  # which is empty at one of them


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    clean(tmp_path)
    (tmp_path / "aarau.csv").write_text("a,b\n1\n")
    (tmp_path / "bern.csv").write_bytes(b"\xff\xfe\x00")
    tables, refused, why = survey(tmp_path, Asked(target="died"))
    assert set(tables) == {"chur", "davos", "emmen"}
    assert [finding.file for finding in refused] == ["aarau.csv", "bern.csv"]
    assert "has 2 columns, but 1 in row 1" in refused[0].what
    assert "aarau.csv" in why


RNG = np.random.default_rng(1)


def tables_of(name: str, *values: np.ndarray) -> dict[str, Table]:
    return {c: Table(c, len(v), {name: v}) for c, v in zip("abcdefgh", values, strict=False)}


@pytest.mark.parametrize(
    ("name", "values", "change", "entry"),
    [
        ("creatinine", np.exp(RNG.normal(0, 0.35, (3, 60))), lambda v: 88.4 * v, "/88.4"),
        ("fasting glucose", np.exp(RNG.normal(1.7, 0.2, (3, 60))), lambda v: 18.02 * v, "/18.02"),
        ("body_temp", RNG.normal(37, 0.6, (3, 60)), lambda v: 1.8 * v + 32, "-32/1.8"),
        ("body_temp", RNG.normal(98.6, 1.0, (3, 60)), lambda v: (v - 32) / 1.8, "*1.8+32"),
        ("height", RNG.normal(170, 9, (3, 60)), lambda v: v / 100, "*100"),
        ("height", RNG.normal(170, 9, (3, 60)), lambda v: v / 2.54, "*2.54"),
        ("weight", RNG.normal(75, 12, (3, 60)), lambda v: 2.20462 * v, "/2.20462"),
        ("share", RNG.uniform(0.3, 0.6, (3, 60)), lambda v: 100 * v, "/100"),
        ("HbA1c", RNG.normal(6, 0.6, (3, 60)), lambda v: 10.93 * v - 23.5, "+23.5/10.93"),
    ],
)
def test_units_are_recognised_and_the_conversion_brings_them_back(
    name: str, values: np.ndarray, change: Any, entry: str
) -> None:
    tables = tables_of(name, values[0], values[1], change(values[2]))
    (found,) = unit_findings(tables, [name], {})
    assert (found.file, found.column, found.setting, found.entry) == ("c", name, "convert", f"{name}@c:{entry}")
    assert f"--convert '{name}@c:{entry}'" in str(found)
    from bpfed.data.tabular.recode import Recoding

    made = Recoding.of(convert=[found.entry]).apply(tables["c"], "c")
    assert made.columns[name] == pytest.approx(values[2], rel=0.01)
    assert Recoding.of(convert=[found.entry]).apply(tables["a"], "a") == tables["a"]
    pair = tables_of(name, values[0], change(values[1]), values[2], change(values[0] + 0.0))
    assert {f.file for f in unit_findings(pair, [name], {})} in ({"b", "d"}, {"a", "c"})  # two of each unit


def test_an_unknown_factor_is_said_but_not_taken_for_sure() -> None:
    values = RNG.normal(50, 5, (3, 60))
    (found,) = unit_findings(tables_of("x", values[0], values[1], 7.3 * values[2]), ["x"], {})
    assert "is 7.3 times what it is elsewhere" in found.what
    assert not found.sure
    assert '# "x@c:/7.3"' in configuration([found], {"name": "folder:d"})


def test_populations_that_differ_are_no_units() -> None:
    young, old = RNG.normal(30, 5, 80), RNG.normal(72, 9, 80)
    assert unit_findings(tables_of("age", young, old, old), ["age"], {}) == []
    lengths = np.exp(RNG.normal(1, 1, (3, 80)))
    assert unit_findings(tables_of("stay", lengths[0], lengths[1], 3 * lengths[2]), ["stay"], {}) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"),
    [
        (["F", "M"], ["female", "male"], {"F": "female", "M": "male"}),
        (["0", "1"], ["ja", "nein"], {"0": "nein", "1": "ja"}),
        (["w", "m"], ["F", "M"], {"w": "F", "m": "M"}),
        (["No", "Yes"], ["no", "yes"], {"No": "no", "Yes": "yes"}),
        (["mod", "sev"], ["mild", "moderate", "severe"], {"mod": "moderate", "sev": "severe"}),
        (["0", "1"], ["female", "male"], None),
        (["a", "b"], ["x", "y"], None),
    ],
)
def test_codes_are_matched_only_where_that_is_clear(
    mine: list[str], theirs: list[str], wanted: dict[str, str] | None
) -> None:
    assert matched(mine, theirs) == wanted


def test_wards_that_each_hospital_names_for_itself_are_said_without_a_map() -> None:
    words = {"a": ["x", "y"], "b": ["x", "z"], "c": ["p", "q"]}
    tables = {c: Table(c, 20, {"ward": Categorical.of(w * 10)}) for c, w in words.items()}
    (found,) = code_findings(tables, ["ward"])
    assert (found.file, found.setting) == ("c", "")
    assert "has 'p', 'q', and elsewhere 'x', 'y', 'z'" in str(found)


def rows(seed: int, n: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=n), "b": rng.normal(size=n), "y": Categorical.of(["no", "yes"] * (n // 2))}


def test_copies_between_clients_and_between_training_and_test_are_found() -> None:
    one, two = Table("one", 60, rows(0)), Table("two", 60, rows(1))
    shared = {k: np.concatenate([v[:10], rows(1)[k][10:]]) for k, v in rows(0).items() if k != "y"}
    other = Table("two", 60, {**shared, "y": rows(1)["y"]})
    (found,) = examine({"one": one, "two": other}, Asked(target="y"))
    assert (found.file, found.row) == ("two", 1)
    assert found.what == "has 10 rows that 'one' has too"
    assert examine({"one": one, "two": two}, Asked(target="y")) == []
    split = Categorical.of(["train"] * 50 + ["test"] * 10)
    again = two.take(np.r_[np.arange(53), np.arange(0, 6), 59])
    parts = Table("two", 60, {**again.columns, "split": split})
    (found,) = examine({"one": Table("one", 60, {**one.columns, "split": split}), "two": parts}, Asked(target="y"))
    assert found.what == "has 6 test rows also among the training rows"
    assert found.row == 54


def test_an_identifier_that_rows_share_and_a_column_that_tells_the_answer_are_found() -> None:
    tables = {}
    for seed, client in enumerate("abc"):
        columns = rows(seed)
        columns["patient_id"] = Categorical.of([f"{client}{k // 2}" for k in range(60)])
        columns["autopsy"] = Categorical.of(["done" if k % 2 else "none" for k in range(60)])
        tables[client] = Table(client, 60, columns)
    found = {f.column: f for f in examine(tables, Asked(target="y"))}
    assert set(found) == {"patient_id", "autopsy"}
    assert "--holdout 'group:patient_id'" in found["patient_id"].do
    assert "alone tells 'y'" in found["autopsy"].what
    assert not found["autopsy"].sure


def test_a_new_value_far_from_the_clients_own_is_unusual(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for client, scale in (("a", 1.0), ("b", 88.4)):
        lines = [f"{scale * v:.3f},{k % 2}" for k, v in enumerate(np.exp(rng.normal(0, 0.3, 80)))]
        (tmp_path / f"{client}.csv").write_text("\n".join(["creatinine,y", *lines]))
    data = load(f"folder:{tmp_path}")
    assert any("looks like" in note and "--convert" in note for note in data.notes)
    from bpfed.data.checks.new_rows import check_new_rows, unusual

    made, new = data.preprocessor, Table("new.csv", 2, {"creatinine": np.array([1.0, 88.0])})
    assert made is not None
    assert unusual(made, new, "a").names() == [[], ["creatinine"]]
    assert unusual(made, new, "b").names() == [[], []]
    assert any(
        "from the training mean of 'a' itself in 'creatinine' (1 of 2 rows, such as 88)" in s
        for s in check_new_rows(made, new, "a")
    )
    assert made.alone("a").own.keys() == {"a"}
    assert type(made).from_record(made.record()) == made


def test_what_names_no_column_is_refused(tmp_path: Path) -> None:
    clean(tmp_path)
    for said, why in (
        ({"map": "sexx:F=female"}, "No client has the column 'sexx' to recode; did you mean 'sex'?"),
        ({"convert": "age@zug:/2"}, "There is no client 'zug' to recode a column of"),
        ({"convert": "sex:/2"}, "is to be converted, but has 'F'"),
        ({"convert": "age:times 2"}, "is no conversion; write COLUMN:/88.4"),
        ({"map": "sex"}, "maps no words; write COLUMN:WORD=WORD"),
        ({"rename": "age"}, "renames no column; write OLD=NEW"),
        ({"rename": "age=sex"}, "has both 'age' and 'sex'"),
        ({"dates": "sex"}, "has 'F', which is no date"),
    ):
        with pytest.raises(UserError, match=re.escape(why)):
            load(f"folder:{tmp_path}", target="died", **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["2024051412345678", "1" * 5000, "20240514x12", "2024-05-14-12:00", "2024-02-30"])
def test_numbers_that_begin_like_a_date_are_none(word: str) -> None:
    with pytest.raises(UserError, match="which is no date"):
        parse_dates(["2024-05-14", word], "seen", "rows.csv")
    assert len(set(parse_dates(["2024-05-14", "20240514", "2024-05-14T12:00:30", "2024-W20-2"], "seen", "a.csv"))) == 1


def test_columns_made_of_texts_and_dates_are_neither_typing_errors_nor_codes(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for client in "ab":
        words = [f"seen {k} {rng.choice(['fever', 'cough'])}" for k in range(150)]
        days = [str(np.datetime64("2024-01-01") + int(k)) for k in rng.integers(0, 300, 150)]
        write(tmp_path / f"{client}.csv", {"note": words, "day": days, "x": rng.normal(size=150), "y": ["u", "v"] * 75})
    data = load(f"folder:{tmp_path}", target="y", text="note", dates="day")
    assert not [note for note in data.notes if "standard deviations" in note or "may be codes" in note]


def test_numbers_with_decimal_commas_are_said_of_the_file_that_has_them(tmp_path: Path) -> None:
    for client in "ab":
        numbers = [f"{k}{',' if client == 'b' else '.'}{k + 1}" for k in range(40)]
        write(tmp_path / f"{client}.csv", {"x": numbers, "z": list(range(40)), "y": ["u", "v"] * 20})
    tables, _, _ = survey(tmp_path, Asked(target="y"))
    assert [f.file for f in examine(tables, Asked(target="y")) if "written as words" in f.what] == ["b.csv"]


def test_free_text_in_which_every_value_differs_may_also_be_read() -> None:
    notes = [f"came by foot with pain number {k} in the left arm" for k in range(60)]
    names = [f"patient-{k}" for k in range(60)]
    rows = {"a": np.arange(60.0), "note": Categorical.of(notes), "who": Categorical.of(names)}
    tables = {client: Table(client, 60, {**rows, "y": Categorical.of(["no", "yes"] * 30)}) for client in "xy"}
    said = {one.column: one.do for one in examine(tables, Asked(target="y")) if "identifier" in one.what}
    assert "--text 'note'" in said["note"]
    assert "--text" not in said["who"]
