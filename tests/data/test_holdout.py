"""Rows held out by time or by group: by hand, for any rows, and all the way through a run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import Command
from hypothesis import assume, given
from hypothesis import strategies as st

import bpfed as library
from bpfed._util.errors import UserError
from bpfed._util.files import from_toml
from bpfed.data import FederatedData, Preprocessor, Table, load
from bpfed.data.checks.column_types import columns
from bpfed.data.checks.new_rows import check_new_rows
from bpfed.data.federated import held_out as held_out_of
from bpfed.data.holdout import Holdout, whole_groups
from bpfed.data.tabular.federate import federate, held_out
from bpfed.data.tabular.preprocessing import read_preprocessor, write_preprocessor
from bpfed.data.tabular.rows import read_rows
from bpfed.data.tabular.table import Categorical
from bpfed.deploy.site.data import one_client

FRACTION = st.one_of(st.sampled_from([0.1, 0.2, 0.25, 0.5, 0.9]), st.floats(0.01, 0.99))


def table(name: str = "a", **made: list[str] | np.ndarray) -> Table:
    """Rows with these columns, their own numbers ``row`` and the target ``y``."""
    own = {key: c if isinstance(c, np.ndarray) else Categorical.of(c) for key, c in made.items()}
    n = len(next(iter(own.values())))
    row, y = np.arange(float(n)) + 0.5, Categorical.of([("no", "yes")[k % 2] for k in range(n)])
    return Table(name, n, {**own, "row": row, "y": y})


def federated(holdout: str | None, *tables: Table, **options: float) -> FederatedData:
    """With the numbers of rows as inputs."""
    return federate("t", {t.name: t for t in tables}, "y", standardise="none", holdout=holdout, **options)  # type: ignore[arg-type]


def rows(x: torch.Tensor) -> list[int]:
    """The numbers of rows among a client's inputs, whose last column they are."""
    return sorted(int(value) for value in x[:, -1].tolist())


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_the_last_rows_of_each_client_are_held_out() -> None:
    when = np.array([5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0, 0.0])
    data = federated("time:when", table(when=when), table("b", when=-when))
    assert [rows(data.test.client(i)[0]) for i in (0, 1)] == [[2, 4, 6], [1, 5, 9]]
    kept = data.hold_out(0.3, 0)
    assert kept.calibration is not None
    assert [rows(kept.calibration.client(i)[0]) for i in (0, 1)] == [[0, 8], [3, 7]]  # of the seven that are left
    assert rows(held_out_of(kept, 0.4, 3).test.client(0)[0]) == [3, 7]  # and of the five that are left then


def test_whole_groups_are_held_out() -> None:
    who = ["p1", "p1", "p2", "p2", "p3", "p3", "p4", "p4", "p5", "p5"]
    data = federated("group:who", table(who=who))
    tested = rows(data.test.x)
    assert len(tested) in (2, 4)  # three rows were asked for
    assert {k // 2 for k in tested}.isdisjoint({k // 2 for k in rows(data.train.x)})
    seen = set()
    for cut in range(20):
        kept = held_out_of(data, 0.2, cut)
        one = rows(kept.test.x)
        assert len(one) == 2
        assert one[1] == one[0] + 1
        assert sorted([*one, *rows(kept.train.x)]) == rows(data.train.x)
        seen.add(one[0])
    assert len(seen) > 1  # another cut, another group


def test_rows_of_one_time_are_in_the_order_of_the_file() -> None:
    assert held_out(table(when=np.zeros(10)), "y", "a", by=Holdout("time", "when")).tolist() == [False] * 7 + [True] * 3


DATES = {
    "days": ["2024-01-31", "2023-12-01", "2024-02-01"],
    "months": ["2024-01", "2023-12", "2024-02"],
    "instants": ["2024-01-31T10:00", "2024-01-31T09:59:59.5", "2024-02-01 00:00"],
    "zones": ["2024-01-31T10:00+01:00", "2024-01-31T08:30Z", "2024-01-31T09:00-01:00"],
}


@pytest.mark.parametrize("kind", DATES)
def test_dates_as_text_are_in_the_order_of_time(kind: str) -> None:
    assert Holdout("time", "when").keys(table(when=DATES[kind])).tolist() == [1, 0, 2]


@pytest.mark.parametrize("kind", ["time", "group"])
def test_rows_that_the_column_split_marks_stay_the_test(kind: str) -> None:
    parts = ["test"] * 2 + ["train"] * 8
    data = federated(f"{kind}:by", table(by=np.arange(10.0)[::-1], split=parts))
    assert rows(data.test.x) == [0, 1]
    kept = data.hold_out(0.25, 0)
    assert kept.calibration is not None
    assert len(rows(kept.calibration.x)) == 2
    if kind == "time":
        assert rows(kept.calibration.x) == [2, 3]


def test_without_it_nothing_has_changed() -> None:
    when = np.arange(20.0)
    data = federated(None, table(when=when))
    assert data.holdout is None
    assert data.train.keys is None
    assert rows(data.test.x) != list(range(14, 20))


# --- for any rows -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), FRACTION, st.integers(0, 5))
def test_no_held_out_time_is_before_a_kept_one(times: list[int], fraction: float, seed: int) -> None:
    made = table(when=np.array(times, dtype=float))
    test = held_out(made, "y", "a", test_fraction=fraction, seed=seed, by=Holdout("time", "when"))
    assert test.sum() == min(np.floor(round(len(times) * fraction + 0.5, 9)), len(times) - 1)
    when = np.array(times)
    if test.any():
        assert when[test].min() >= when[~test].max()
    if len(times) < 3:
        return
    data = federated("time:when", made, table("b", when=np.arange(9.0)), test_fraction=0.0)
    kept = data.hold_out(fraction, seed)
    assert kept.calibration is not None
    for i, n in enumerate((len(times), 9)):
        early, late = rows(kept.train.client(i)[0]), rows(kept.calibration.client(i)[0])
        assert len(late) == min(max(round(n * fraction), 1), n - 1)
        assert sorted([*early, *late]) == list(range(n))
        own = when if i == 0 else np.arange(9)
        assert own[late].min() >= own[early].max()


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=3, max_size=30), min_size=1, max_size=3),
    FRACTION,
    st.integers(0, 5),
)
def test_no_group_is_on_both_sides(clients: list[list[str]], fraction: float, seed: int) -> None:
    assume(any(len(set(groups)) > 1 for groups in clients))
    tables = [table(f"c{k}", who=groups) for k, groups in enumerate(clients)]
    for made, groups in zip(tables, clients, strict=True):
        test = held_out(made, "y", made.name, test_fraction=fraction, seed=seed, by=Holdout("group", "who"))
        assert {groups[k] for k in np.flatnonzero(test)}.isdisjoint({groups[k] for k in np.flatnonzero(~test)})
        assert not test.all()
    data = federated("group:who", *tables, test_fraction=0.0)
    kept = data.hold_out(fraction, seed)
    assert kept.calibration is not None
    for i, groups in enumerate(clients):
        train, held = rows(kept.train.client(i)[0]), rows(kept.calibration.client(i)[0])
        assert sorted([*train, *held]) == list(range(len(groups)))
        assert {groups[k] for k in train}.isdisjoint({groups[k] for k in held})
        assert bool(held) is (len(set(groups)) > 1)
        assert train
        alone = one_client(data, f"c{i}").hold_out(fraction, seed)  # as at a deployed site
        assert alone.calibration is not None
        assert rows(alone.calibration.x) == held


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(0, 100))
def test_about_as_many_rows_as_asked_for(sizes: list[int], number: int) -> None:
    taken = whole_groups(sizes, number)
    held = int(np.array(sizes)[taken].sum())
    if number == 0 or len(sizes) == 1:
        assert not taken.any()
        return
    assert 0 < taken.sum() < len(sizes)
    one_is_too_many = taken.sum() == 1 and held == min(sizes) and held > number
    all_but_one = taken.sum() == len(sizes) - 1 and held < number
    assert abs(held - number) <= max(sizes) / 2 or one_is_too_many or all_but_one


def test_every_group_is_drawn_alike() -> None:
    data = federated("group:who", table(who=[f"p{k % 5}" for k in range(20)]), test_fraction=0.0)
    counts = np.zeros(5)
    for cut in range(400):
        held = held_out_of(data, 0.2, cut)
        assert len(held.test.y) == 4
        counts[rows(held.test.x)[0] % 5] += 1
    assert counts.min() > 50  # of 80 on average; a standard deviation is 8


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holdout", "words"),
    [
        ("when", "The hold-out is 'when', but must be time:COLUMN, group:COLUMN or last:SHARE"),
        ("time:", "must be time:COLUMN, group:COLUMN or last:SHARE"),
        ("last:1.3", "the share of last rows must be above 0 and below 1"),
        ("last:few", "the share of last rows must be above 0 and below 1"),
        ("time:wen", "'a' has no column 'wen'; did you mean 'when'?"),
        ("time:y", "Column 'y' is to be predicted, so nothing can be held out by it"),
        ("group:same", "All rows of each client of 't' are of one 'same', so no group can be held out; choose another"),
        ("time:same", "Column 'same' of 'a' has 'x', but to hold out rows by time it must have numbers or ISO dates"),
        ("time:gap", "1 of the 10 rows of 'a' has no 'gap', first in row 3"),
        ("group:gap", "1 of the 10 rows of 'a' has no 'gap', first in row 3"),
        ("time:mixed", "has dates with a time zone and without, such as '2024-01-01T10:00Z' and '2024-01-02T10:00'"),
    ],
)
def test_what_cannot_be_held_out_is_refused_in_one_sentence(holdout: str, words: str) -> None:
    gap = np.arange(10.0)
    gap[2] = np.nan
    mixed = ["2024-01-01T10:00Z", "2024-01-02T10:00"] * 5
    with pytest.raises(UserError) as raised:
        federated(holdout, table(when=np.arange(10.0), same=["x"] * 10, gap=gap, mixed=mixed))
    assert words in str(raised.value)
    assert str(raised.value).count("\n") == 0


def test_the_marks_of_the_test_are_no_groups() -> None:
    with pytest.raises(UserError, match="Column 'split' marks the test rows"):
        federated("group:split", table(x=np.arange(10.0), split=["train"] * 7 + ["test"] * 3))


def test_no_table_has_no_column() -> None:
    with pytest.raises(UserError, match="'digits' is not a table, so 'holdout' does not apply"):
        load("digits", holdout="time:when")


def test_training_rows_of_one_group_leave_none_to_choose_on() -> None:
    data = federated("group:who", table(who=["p"] * 10 + ["q"] * 10), test_fraction=0.5)
    words = "training rows of each client of 't' are of one 'who', so no group can be held out to choose settings on"
    with pytest.raises(UserError, match=words):
        held_out_of(data, 0.2, 0)


# --- what is said and kept --------------------------------------------------------------------------------------------


def test_the_column_is_no_input_and_that_is_said() -> None:
    days = [str(date(2024, 1, 1) + timedelta(days=k)) for k in range(120)]  # more words than a category may have
    tables = table(when=days, dose=np.random.default_rng(0).normal(size=120))
    data = federated("time:when", tables)
    assert data.preprocessor is not None
    assert data.preprocessor.input_names == ("dose", "row")
    said = "The last rows of each client by 'when' are held out; the column is used for this alone and is no input."
    assert said in data.notes
    assert ("when", "says what is held out (--holdout)", 0) in columns({"a": tables}, data.preprocessor)


def test_new_rows_may_have_the_column() -> None:
    """It is known, so it is neither a stranger nor a feature spelt otherwise."""
    made = federated("time:Dose", table(Dose=np.arange(20.0), dose=np.linspace(-1.5, 2.5, 20)))
    assert made.preprocessor is not None
    new = {"Dose": [1.0, 2.0], "dose": [0.5, 1.5], "row": [3.5, 4.5]}
    said: list[str] = []
    read_rows(made, new, "a", said.append)
    assert said == []
    read_rows(made, {**new, "other": [1.0, 2.0]}, "a", said.append)
    assert said == ["The data frame has the column 'other', which training did not use; it is ignored."]
    without = Table("new", 2, {"Dose": np.array([1.0, 2.0]), "row": np.array([3.5, 4.5])})
    assert not [note for note in check_new_rows(made.preprocessor, without, "a") if "training had" in note]


def test_clients_of_one_group_are_named() -> None:
    data = federated("group:who", table(who=["p", "q"] * 5), table("b", who=["p"] * 10))
    assert (
        "Whole groups of rows by 'who' are held out; the column is used for this alone and is no input." in data.notes
    )
    assert "Client 'b' has rows of one 'who' only, so none of them is held out." in data.notes
    assert data.test.sizes.tolist() == [5, 0]


def test_records_keep_it_and_files_of_all_sites_do_not(tmp_path: Path) -> None:
    made = federated("time:when", table(when=np.arange(20.0))).preprocessor
    assert made is not None
    record = json.loads(json.dumps(made.record()))
    assert Preprocessor.from_record(record) == made
    del record["holdout"]  # as earlier versions wrote it
    assert Preprocessor.from_record(record).holdout is None
    write_preprocessor(tmp_path / "p.json", made)
    assert read_preprocessor(tmp_path / "p.json")[0] == replace(made, holdout=None, own={})


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Visits of patients to two hospitals; numbers of patients have leading zeros, and dates are in no order."""
    place = tmp_path_factory.mktemp("visits")
    rng = np.random.default_rng(0)
    for name in ("bern", "genf"):
        n = 60
        age, days = rng.normal(60, 10, n).round(1), rng.permutation(n)
        pd.DataFrame(
            {
                "age": age,
                "patient": [f"{k:04d}" for k in rng.integers(0, 12, n)],
                "seen": [str(date(2024, 1, 1) + timedelta(days=int(d))) for d in days],
                "ill": np.where(age + rng.normal(0, 5, n) > 60, "y", "n"),
            }
        ).to_csv(place / f"{name}.csv", index=False)
    return place


def test_the_column_of_times_cannot_be_an_input_as_well(visits: Path) -> None:
    with pytest.raises(UserError, match=r"Column 'seen' is what rows are held out by .* leave it out of --dates"):
        load(f"folder:{visits}", target="ill", ignore="patient", dates="seen", holdout="time:seen")


@pytest.mark.parametrize("holdout", ["time:seen", "group:patient"])
def test_a_run_keeps_it_and_its_test_rows_are_found_again(visits: Path, command: Command, holdout: str) -> None:
    other = "patient" if holdout == "time:seen" else "seen"
    data = ("--data", f"folder:{visits}", "--target", "ill", "--ignore", other, "--holdout", holdout)
    command.ok("run", *data, "--method", "fedavg", "--rounds", "1", "--epochs", "1", "--quiet", "--out", "run")
    assert from_toml(Path("run/config.toml").read_bytes())["data"]["holdout"] == holdout
    command.ok("run", "run/config.toml", "--out", "again", "--quiet")  # or its fingerprint is another
    told = pd.read_csv(StringIO(command.ok("predict", "run", "--test").out), dtype=str)
    column = holdout.partition(":")[2]
    for name in ("bern", "genf"):
        table_ = pd.read_csv(visits / f"{name}.csv", dtype=str)
        test = np.zeros(len(table_), dtype=bool)
        test[told[told["client"] == name]["row"].astype(int).to_numpy() - 1] = True
        held, kept = table_[column][test], table_[column][~test]
        assert len(held) == pytest.approx(18, abs=0 if column == "seen" else 5)
        assert held.min() > kept.max() if column == "seen" else set(held).isdisjoint(kept)
    said = command.ok("predict", "run", "--client", "bern", "--input", visits / "bern.csv").err
    assert "which training did not use" not in said


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fedavg", "calibrate": "pilot:1"},
        {"method": "fedavg", "calibration": 0.2},
        {"method": "bpfed-adaptive", "adapt": "auto", "network": "linear"},
    ],
    ids=["pilots", "calibration", "pilots"],
)
def test_whoever_holds_training_rows_out_does_so_by_the_column(
    visits: Path, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration pilots, calibration and pilot runs all ask the data."""
    data = load(f"folder:{visits}", target="ill", ignore="patient", holdout="time:seen")
    cuts: list[FederatedData] = []
    real = FederatedData.hold_out

    def noted(self: FederatedData, fraction: float, seed: int) -> FederatedData:
        cuts.append(real(self, fraction, seed))
        return cuts[-1]

    monkeypatch.setattr(FederatedData, "hold_out", noted)
    library.fit(options.pop("method"), data, rounds=2, epochs=1, progress=False, say=str, **options)
    assert cuts
    for cut in cuts:
        assert cut.calibration is not None
        for i in range(2):
            train, held = (e.select(torch.tensor([i])).keys for e in (cut.train, cut.calibration))
            assert train is not None
            assert held is not None
            assert held.min() > train.max()


def test_tune_chooses_on_whole_groups(visits: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[tuple[set[int], set[int]]] = []
    real = FederatedData.hold_out

    def noted(self: FederatedData, fraction: float, seed: int) -> FederatedData:
        cut = real(self, fraction, seed)
        assert cut.calibration is not None
        assert cut.train.keys is not None
        assert cut.calibration.keys is not None
        for i in range(2):
            both = [e.select(torch.tensor([i])).keys for e in (cut.train, cut.calibration)]
            groups.append((set(both[0].tolist()), set(both[1].tolist())))  # type: ignore[union-attr]
        return cut

    monkeypatch.setattr(FederatedData, "hold_out", noted)
    data = ("--data", f"folder:{visits}", "--target", "ill", "--ignore", "seen", "--holdout", "group:patient")
    command.ok(
        "tune", *data, "--method", "fedavg", "--grid", "lr=0.01,0.1", "--rounds", "1", "--epochs", "1", "--out", "tuned"
    )
    assert groups
    assert all(held and train and held.isdisjoint(train) for train, held in groups)
    assert 'holdout = "group:patient"' in Path("tuned/best.toml").read_text()


def test_identities_that_look_like_numbers_are_not_rounded(tmp_path: Path) -> None:
    """As numbers, 007 and 7 would be one group, and so would these two of 18 digits."""
    for names in (("007", "7"), ("900000000000000001", "900000000000000002"), ("12", "x12")):
        lines = [f"{names[k // 10]},{k}.5,{'yn'[k % 2]}" for k in range(20)]
        (tmp_path / "a.csv").write_text("\n".join(["who,age,y", *lines]))
        data = load(f"folder:{tmp_path}", target="y", holdout="group:who")
        assert data.test.sizes.tolist() == [10]


def test_identities_are_words_and_parquet_dates_are_read(visits: Path, tmp_path: Path) -> None:
    frames = {name: pd.read_csv(visits / f"{name}.csv", dtype={"patient": str}) for name in ("bern", "genf")}
    for name, frame in frames.items():
        frame["seen"] = pd.to_datetime(frame["seen"])
        frame.to_parquet(tmp_path / f"{name}.parquet")
    for how in ("time:seen", "group:patient"):
        left = {"ignore": "patient" if how == "time:seen" else "seen", "target": "ill", "holdout": how}
        one, other = load(f"folder:{visits}", **left), load(f"folder:{tmp_path}", **left)  # type: ignore[arg-type]
        assert torch.equal(one.test.x, other.test.x)
        assert torch.equal(one.train.keys, other.train.keys)  # type: ignore[arg-type]


# --- the last rows of a file, and signs of order ----------------------------------------------------------------------


def test_the_last_rows_of_each_file_are_for_the_test_and_the_last_before_them_for_calibration() -> None:
    data = federated("last:0.2", table(a=np.arange(20.0) * 7 % 20), table("b", a=np.arange(20.0) * 3 % 20))
    assert "The last rows of each client, in the order of its file, are held out." in data.notes
    assert data.preprocessor is not None
    assert data.preprocessor.holdout == "last:0.2"
    assert data.test_fraction == 0.2
    kept = data.hold_out(0.25, 0)
    assert kept.calibration is not None
    for k in (0, 1):
        assert rows(data.test.client(k)[0]) == [16, 17, 18, 19]
        assert rows(kept.calibration.client(k)[0]) == [12, 13, 14, 15]
    with pytest.raises(UserError, match="omit --test-fraction, or use --holdout last"):
        federated("last:0.2", table(x=np.arange(20.0)), test_fraction=0.5)
    half = federated("last", table(x=np.arange(20.0)), test_fraction=0.5)
    assert len(half.test.y) == 10


def test_signs_of_order_are_said_where_rows_are_drawn_at_random() -> None:
    rng = np.random.default_rng(0)
    n, words = 120, "--holdout last holds out the last ones"

    def said(holdout: str | None = None, **columns: Any) -> list[str]:
        own = {key: c if isinstance(c, np.ndarray) else Categorical.of(c) for key, c in columns.items()}
        return [note for note in federated(holdout, Table("a", n, own)).notes if words in note]

    drift = {"x": rng.normal(size=n), "y": ["ab"[k // 10 % 2] for k in range(n)]}
    assert "'y' is mostly the same, or nearly so, in neighbouring rows" in said(**drift)[0]
    assert said("last", **drift) == []
    assert said(x=rng.normal(size=n), y=[*"a" * 60, *"b" * 60]) == []  # sorted by class
    mixed = [*rng.permutation(list("ab" * 60))]
    assert said(x=rng.normal(size=n), y=mixed) == []
    assert "'day' rises from row to row, as a time does" in said(day=rng.random(n).cumsum(), y=mixed)[0]
    assert said(age=rng.random(n).cumsum(), y=mixed) == []
    walk = {"x": rng.normal(size=n), "y": rng.normal(size=n).cumsum()}
    assert "'y' is mostly the same" in said(**walk)[0]
    assert said(x=rng.normal(size=n), y=rng.normal(size=n)) == []


def test_windows_that_overlap_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(32 + 16 * 59, 2))
    for name, step in {"apart": 32, "half": 16}.items():
        long = rng.normal(size=(32 * 60, 2)) if step == 32 else signal
        (tmp_path / name).mkdir()
        x = np.stack([long[step * k : step * k + 32] for k in range(60)])
        np.savez(tmp_path / name / "a.npz", x=x, y=rng.integers(0, 2, 60))
        notes = " ".join(load(f"folder:{tmp_path / name}").notes)
        assert ("Neighbouring windows overlap by 50" in notes) is (step == 16)
