"""Rows in memory are prepared as those of a file are, or refused; none is taken raw."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bpfed as library
from bpfed._util.errors import UserError
from bpfed.data import read_table
from bpfed.data.tabular.frames import table_of
from bpfed.data.tabular.table import Categorical

NAMES = ["age", "dose", "ward"]


@pytest.fixture(scope="module")
def rows(classes: Path) -> list[list[Any]]:
    """New patients, as a program has them."""
    with (classes / "new.csv").open() as file:
        return [[float(r["age"]), float(r["dose"]), r["ward"], r["outcome"]] for r in csv.DictReader(file)]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(classes: Path, said: list[str]) -> library.Run:
    return library.Run.load(classes / "run", say=said.append)


class Polars:
    """As much of a polars data frame as is used: its names are a list, and a column gives numpy what it holds."""

    def __init__(self, **columns: list[Any]) -> None:
        self._held = columns
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Any:
        return pd.Series(self._held[name], dtype=object if isinstance(self._held[name][0], str) else None)


WAYS: dict[str, Callable[[Path, list[list[Any]]], dict[str, Any]]] = {
    "data frame of the file": lambda path, rows: {"x": pd.read_csv(path, float_precision="round_trip")},
    "data frame": lambda path, rows: {"x": pd.DataFrame(rows, columns=[*NAMES, "outcome"]).drop(columns="outcome")},
    "data frame of text": lambda path, rows: {"x": pd.read_csv(path, dtype=str)},
    "categories and nullable numbers": lambda path, rows: {
        "x": pd.DataFrame(rows, columns=[*NAMES, "outcome"]).astype({"ward": "category", "age": "Float64"})
    },
    "columns in another order": lambda path, rows: {
        "x": pd.DataFrame(rows, columns=[*NAMES, "outcome"])[["ward", "age", "dose"]]
    },
    "another library's frame": lambda path, rows: {
        "x": Polars(**{name: [row[k] for row in rows] for k, name in enumerate(NAMES)})
    },
    "mapping": lambda path, rows: {"x": {name: [row[k] for row in rows] for k, name in enumerate(NAMES)}},
    "table": lambda path, rows: {"x": read_table(path)},
    "list of rows": lambda path, rows: {"x": [row[:3] for row in rows], "columns": NAMES},
    "array of objects": lambda path, rows: {"x": np.array([row[:3] for row in rows], dtype=object), "columns": NAMES},
    "array of text": lambda path, rows: {"x": np.array([row[:3] for row in rows]), "columns": NAMES},
    "array with fields": lambda path, rows: {
        "x": np.array([tuple(row[:3]) for row in rows], dtype=[("age", "f8"), ("dose", "f8"), ("ward", "U4")])
    },
    "rows that were read": lambda path, rows: {"x": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_give_the_same_probabilities(
    classes: Path, run: library.Run, rows: list[list[Any]], said: list[str], way: str
) -> None:
    client = run.client("genf")
    wanted = client.predict(classes / "new.csv").probs
    given = WAYS[way](classes / "new.csv", rows)
    if given["x"] is None:
        given["x"] = client.read(classes / "new.csv")
    assert torch.equal(client.predict(**given).probs, wanted)
    assert said == []


def test_a_table_of_numbers_alone_as_an_array_and_a_tensor(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    for name in "ab":
        x = g.normal((100.0, -3.0), (20.0, 0.1), (40, 2))
        pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "y": x[:, 0] > 100.0}).to_csv(tmp_path / f"{name}.csv", index=False)
    run = library.fit("fedavg", f"folder:{tmp_path}", rounds=2, epochs=5, progress=False, say=str)
    frame = pd.read_csv(tmp_path / "a.csv", float_precision="round_trip")
    array = frame[["v", "u"]].to_numpy()
    wanted = run.client("a").predict(tmp_path / "a.csv").probs
    assert torch.equal(run.client("a").predict(frame).probs, wanted)
    assert torch.equal(run.client("a").predict(array, columns=["v", "u"]).probs, wanted)
    assert torch.equal(run.client("a").predict(torch.from_numpy(array), columns=["v", "u"]).probs, wanted)
    for raw in (array, torch.from_numpy(array), array.tolist()):
        with pytest.raises(UserError, match=r"the inputs have no names; name them with columns=\['u', 'v'\], or give"):
            run.client("a").predict(raw)
    with pytest.raises(UserError, match="the inputs have no names"):
        run.adapt(array, np.zeros(40))


def test_columns_that_lack_are_refused_by_name_and_others_ignored_with_a_word(
    classes: Path, run: library.Run, said: list[str]
) -> None:
    client, frame = run.client("zug"), pd.read_csv(classes / "new.csv")
    with pytest.raises(UserError, match=r"The data frame has no column 'dose'; give every column .* NaN where"):
        client.predict(frame.drop(columns="dose"))
    with pytest.raises(UserError, match=r"The array has no columns 'dose', 'ward'; give every column"):
        client.predict(frame[["age"]].to_numpy(), columns=["age"])
    with pytest.raises(UserError, match=r"has no columns 'age', 'dose', 'ward'; give .* \('age', 'dose', 'ward'\)\."):
        client.predict(frame[["outcome"]])
    assert said == []
    wanted = client.predict(frame).probs
    assert torch.equal(client.predict(frame.assign(bed=1, when=pd.Timestamp("2026-01-01"))).probs, wanted)
    assert said == ["The data frame has columns 'bed', 'when', which training did not use; they are ignored."]


def test_what_is_not_known_is_missing_however_it_is_written(classes: Path, run: library.Run, tmp_path: Path) -> None:
    text = "age,dose,ward\n60,,east\n61,1,\n"
    (tmp_path / "gaps.csv").write_text(text)
    wanted = run.client("bern").predict(tmp_path / "gaps.csv").probs
    for blank in (None, np.nan, pd.NA):
        frame = pd.DataFrame({"age": [60, 61], "dose": [blank, 1], "ward": ["east", blank]}, dtype=object)
        assert torch.equal(run.client("bern").predict(frame).probs, wanted)
    assert torch.equal(run.client("bern").predict(pd.read_csv(tmp_path / "gaps.csv")).probs, wanted)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"x": [[1.0, 2.0, "east"]], "columns": ["age", "dose"]}, r"have shape \[1, 3\], but 2 columns are named"),
        ({"x": [[1.0, 2.0, "east"], [1.0]], "columns": NAMES}, r"but 3 columns are named|are not an array"),
        ({"x": [[1.0, 2.0, "east"]], "columns": "age"}, "columns must be a list"),
        ({"x": [[1.0, 2.0, "east"]], "columns": ["age", "age", "ward"]}, "names 'age' twice"),
        ({"x": {"age": [1], "dose": [1, 2], "ward": ["east"]}}, "differ in length"),
        (
            {"x": {"age": ["old"], "dose": [1], "ward": ["east"]}},
            "'age' of 'data frame' must be numeric, but has 'old'",
        ),
        ({"x": {"age": [10**400], "dose": [1], "ward": ["east"]}}, "a number that is too large"),
        ({"x": {"age": [1e300], "dose": [1], "ward": ["east"]}}, "the number 1e"),
        (
            {"x": {"age": [pd.Timestamp("2026")], "dose": [1], "ward": ["east"]}},
            "must be numeric, but has '2026-01-01'",
        ),
        ({"x": {"age": [b"1"], "dose": [1], "ward": ["east"]}}, "has a bytes, which is not read"),
        ({"x": pd.DataFrame([[1, 2, 3]], columns=["age", "age", "dose"])}, "two columns 'age'"),
        ({"x": pd.DataFrame(columns=NAMES), "columns": NAMES}, "have names of their own; omit columns"),
        ({"x": "new.csv", "columns": NAMES}, "is a file, whose columns have names there; omit columns"),
        ({"x": [[1.0]], "columns": NAMES, "prepared": True}, "omit prepared"),
        ({"x": 5.0}, "the inputs have no names"),
    ],
)
def test_what_cannot_be_read_is_refused(run: library.Run, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run.client("bern").predict(**given)


def test_a_run_on_arrays_takes_arrays_and_no_names() -> None:
    run = library.fit("fedavg", "digits", rounds=1, epochs=1, progress=False, say=str)
    x = run.data.test.x[:3]
    assert torch.equal(run.clients()[0].predict(x).probs, run.clients()[0].predict(x, prepared=True).probs)
    with pytest.raises(UserError, match="was trained on arrays, not on a table; give an array without column names"):
        run.clients()[0].predict(x.flatten(1), columns=[str(k) for k in range(64)])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_newcomer_learns_the_same_from_a_file_a_frame_and_an_array(kind: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(kind)
    run, path = library.Run.load(place / "run", say=str), place / "new.csv"
    frame = pd.read_csv(path, float_precision="round_trip")
    rows, y = frame[NAMES].to_numpy(dtype=object), frame["outcome"]
    ways = [
        run.adapt(path, steps=20),
        run.adapt(frame, steps=20),
        run.adapt(frame.drop(columns="outcome"), y, steps=20),
        run.adapt(rows, y.tolist(), columns=NAMES, steps=20),
    ]
    found = [client.predict(path) for client in ways]
    for one in found[1:]:
        assert torch.equal(getattr(one, "probs", one.aleatoric), getattr(found[0], "probs", found[0].aleatoric))
    prepared = run.data.preprocessor
    assert prepared is not None
    table = read_table(path)
    same = run.adapt(prepared.inputs(table), prepared.targets(table), steps=20, prepared=True).predict(frame)
    assert torch.equal(same.aleatoric, found[0].aleatoric)
    with pytest.raises(UserError, match="targets are given twice"):
        run.adapt(frame, y)
    with pytest.raises(UserError, match="7 rows and 2 targets"):
        run.adapt(frame.drop(columns="outcome"), y[:2])
    with pytest.raises(UserError, match="has no column 'outcome'"):
        run.adapt(frame.drop(columns="outcome"))


def test_predictions_that_are_not_numbers_are_refused(run: library.Run, classes: Path) -> None:
    run.federation.shared = torch.utils._pytree.tree_map(lambda t: t * float("nan"), run.federation.shared)
    with pytest.raises(UserError, match="'bern' predicts what is not a number in 7 of 7 rows, first in row 1; correct"):
        run.client("bern").predict(classes / "new.csv")


def test_words_stay_words_though_they_are_numbers() -> None:
    table = table_of(pd.DataFrame({"code": [7, 8], "other": [1, 2]}), words=["code"])
    assert isinstance(table.columns["code"], Categorical)
    assert table.words("code") == ["7", "8"]
    assert not isinstance(table.columns["other"], Categorical)
    with_blanks = table_of({"a": ["5", "unknown", "999"]}, missing=["unknown", "a=999"])
    assert np.array_equal(with_blanks.columns["a"], [5.0, np.nan, np.nan], equal_nan=True)


def test_dates_are_iso_text_and_never_numbers() -> None:
    moments = pd.to_datetime(["2026-01-01", None, "2026-01-02"])
    frame = pd.DataFrame({"day": moments, "hour": moments + pd.Timedelta("90min"), "zone": moments.tz_localize("UTC")})
    table = table_of(frame.assign(object=moments.to_numpy(dtype=object)))
    assert table.words("day") == table.words("object") == ["2026-01-01", "", "2026-01-02"]
    assert table.words("hour") == ["2026-01-01T01:30:00", "", "2026-01-02T01:30:00"]
    assert table.words("zone")[0] == "2026-01-01T00:00:00+00:00"
    with pytest.raises(UserError, match="Column 'stay' of the data frame has spans of time, which are not read"):
        table_of({"stay": np.array([1, 2]).astype("timedelta64[D]")})


def test_what_is_masked_is_missing() -> None:
    made = table_of({n: np.ma.array(values, mask=[0, 1]) for n, values in {"a": [1.0, 2.0], "b": [3, 4]}.items()})
    assert [type(column) for column in made.columns.values()] == [np.ndarray] * 2
    np.testing.assert_array_equal(made.column("a"), [1.0, np.nan])
    np.testing.assert_array_equal(made.column("b"), [3.0, np.nan])
    words = table_of({"a": np.ma.array(["x", "y"], mask=[0, 1])}).column("a")
    assert isinstance(words, Categorical)
    assert words.words() == ["x", ""]


SITES = {
    "7": "age,ward,seen,y\n" + "".join(f"{30 + 7 * k % 50},{'ab'[k % 2]},2024-05-{k + 1:02d},{k % 3}\n" for k in range(20)),
    "08": "age,ward,seen,y\n" + "".join(f"{k if k % 4 else ''},{'bc '[k % 3]},2024-06-{k + 1:02d},{k % 2}\n" for k in range(16)),
}  # fmt: skip


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_federation_of_frames_is_that_of_the_same_files(package: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": "y", "ignore": "note", "holdout": "time:seen", "missing": "age=30"}
    for name, text in SITES.items():
        (tmp_path / f"{name}.csv").write_text(
            text.replace(",y\n", ",y,note\n").replace("\n", ",-\n").replace("note,-", "note")
        )
    wanted = library.data.load(f"folder:{tmp_path}", **options)
    if package == "pandas":
        read = {name: pd.read_csv(tmp_path / f"{name}.csv", parse_dates=["seen"]) for name in SITES}
        whole = pd.concat([frame.assign(site=name) for name, frame in read.items()])
    else:
        polars = pytest.importorskip("polars")
        read = {name: polars.read_csv(tmp_path / f"{name}.csv", try_parse_dates=True) for name in SITES}
        whole = polars.concat([frame.with_columns(polars.lit(name).alias("site")) for name, frame in read.items()])
    for found in (
        library.data.from_frames(read, **options),
        library.data.load(whole, client_column="site", **options),
    ):
        assert found.clients == wanted.clients == ("08", "7")
        assert found.labels == wanted.labels
        for part, other in ((found.train, wanted.train), (found.test, wanted.test)):
            assert torch.equal(part.x, other.x)
            assert torch.equal(part.y, other.y)
            assert torch.equal(part.offsets, other.offsets)


def test_fit_takes_a_frame_and_its_clients_predict_and_adapt_with_frames() -> None:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"u": g.normal(size=60), "site": ["a", "b", "c"] * 20}).assign(y=lambda f: f.u > 0)
    run = library.fit("fedavg", frame, target="y", client_column="site", rounds=1, epochs=1, progress=False, say=str)
    assert run.data.clients == ("a", "b", "c")
    assert run.adapt(frame[:9], name="d", steps=1).predict(frame[["u"]]).probs.shape == (60, 2)
    with pytest.raises(UserError, match="The data are loaded already; give target and client_column to"):
        library.fit("fedavg", run.data, target="y")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (pd.DataFrame({"u": [1], "y": [1]}), "a single data frame; use client_column to name .* 'u', 'y'; or give"),
        ([[1, 2]], "The data are a list; give the name of a dataset"),
        (pd.DataFrame({"u": [], "y": []}), "'data frame' has no rows"),
        ({"u": ["1"] * 9 + ["old"], "y": [0] * 10}, "'u' of 'data frame' is numeric except for 'old' in row 10"),
    ],
)
def test_frames_that_cannot_be_learnt_from_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        library.data.load(given, target="y")
    with pytest.raises(UserError, match="named by text"):
        library.data.from_frames({5: given})
