"""Few whole numbers in a column may be codes: the number and one input per value are used, everywhere alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command import Command, as_before_manifests, metrics
from hypothesis import given
from hypothesis import strategies as st

import bpfed as library
from bpfed._util.errors import UserError
from bpfed._util.files import from_toml, to_toml
from bpfed.config.reader import Override, read
from bpfed.data import Preprocessor, Table, load
from bpfed.data.checks.column_types import coded, columns
from bpfed.data.checks.new_rows import check_new_rows, unusual
from bpfed.data.tabular.combine import CODED, PER_CODE, combine
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.preprocessing import Feature, read_preprocessor, whole, write_preprocessor
from bpfed.data.tabular.statistics import FIRST, client_summary, whole_numbers
from bpfed.data.tabular.table import Categorical

N = 60


def table(name: str = "a", **values: list[float] | np.ndarray) -> Table:
    """Rows with these columns, each repeated to fill `N` rows, a quantity ``age`` and the target ``y``."""
    made: dict[str, np.ndarray | Categorical] = {
        key: np.resize(np.array(v, dtype=float), N) for key, v in values.items()
    }
    made |= {"age": np.linspace(20.5, 80.5, N), "y": Categorical.of(["no", "yes"] * (N // 2))}
    return Table(name, N, made)


def prepared(*tables: Table, **options: str) -> Preprocessor:
    summaries = [client_summary(t, "y", client=t.name) for t in tables]
    return combine(summaries, "y", **options)  # type: ignore[arg-type]


def feature(made: Preprocessor, name: str) -> Feature:
    return next(f for f in made.features if f.name == name)


# --- which columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "categories"),
    [
        ([1, 2, 3, 4], ("1", "2", "3", "4")),
        ([0, 1, 2, np.nan], ("0", "1", "2")),
        ([9, 10, -1], ("-1", "9", "10")),  # by size
        ([0, 1], ()),
        ([1, 2, 2.5], ()),
        (list(range(10)), ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")),
        (list(range(11)), ()),
        ([1e20, 2, 3], ("2", "3", "1e+20")),
    ],
)
def test_three_to_ten_whole_numbers_may_be_codes(values: list[float], categories: tuple[str, ...]) -> None:
    made = prepared(table(code=values), table("b", code=values))
    assert feature(made, "code").categories == categories
    assert feature(made, "code").kind == "number"
    assert feature(made, "age").categories == ()


def test_values_are_those_of_all_clients_together() -> None:
    assert feature(prepared(table(code=[1, 2]), table("b", code=[2, 3])), "code").categories == ("1", "2", "3")
    assert feature(prepared(table(code=[1, 2, 3]), table("b", code=[1.5])), "code").categories == ()
    assert feature(prepared(table(code=range(6)), table("b", code=range(6, 12))), "code").categories == ()
    assert feature(prepared(table(code=[1, 2, 3]), table("b", code=[np.nan])), "code").categories == ("1", "2", "3")
    assert feature(prepared(table(code=[1, 2, 3]), table("b")), "code").categories == ("1", "2", "3")


def test_values_of_which_there_are_few_are_no_codes() -> None:
    """As many as would give each of them ten rows, on average."""
    enough = np.arange(float(N))
    enough[:] = np.nan
    enough[: 4 * PER_CODE] = np.arange(4 * PER_CODE) % 4
    assert feature(prepared(table(code=enough)), "code").categories == ("0", "1", "2", "3")
    enough[0] = np.nan
    assert feature(prepared(table(code=enough)), "code").categories == ()


def test_where_very_many_columns_are_such_they_are_counts() -> None:
    some = {f"word {k}": [0.0, 1.0, 2.0] for k in range(CODED)}
    assert sum(f.coded for f in prepared(table(**some)).features) == CODED
    assert not any(f.coded for f in prepared(table(**some, more=[0.0, 1.0, 2.0])).features)


def test_a_fraction_far_below_the_first_rows_is_seen() -> None:
    values = np.resize([1.0, 2.0, 3.0], 3 * FIRST)
    assert whole_numbers(values, 10) == ("1", "2", "3")
    values[-1] = 2.5
    assert whole_numbers(values, 10) is None


def test_it_can_be_switched_off() -> None:
    tables = {"a": table(code=[1, 2, 3]), "b": table("b", code=[1, 2, 3])}
    off, on = (federate("t", tables, "y", codes=how) for how in ("number", "both"))  # type: ignore[arg-type]
    assert off.preprocessor is not None
    assert on.preprocessor is not None
    assert off.preprocessor.input_names == ("age", "code")
    assert on.preprocessor.input_names == ("age", "code", "code = 1", "code = 2", "code = 3")
    assert torch.equal(off.train.x, on.train.x[:, :2])
    with pytest.raises(UserError, match="Unknown way to use codes 'words'"):
        federate("t", tables, "y", codes="words")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'digits' is not a table, so 'codes' does not apply"):
        load("digits", codes="number")


def test_the_number_to_predict_is_not_prepared_as_codes() -> None:
    scores = np.resize(np.arange(4.0), N)
    told = client_summary(Table("a", N, {"x": scores, "y": scores}), "y", task="regression")
    assert told.target.categories is None
    assert told.columns["x"].categories == ("0", "1", "2", "3")


# --- what becomes of them ---------------------------------------------------------------------------------------------


def test_rows_with_seen_unseen_and_missing_values() -> None:
    made = prepared(table(code=[1, 2, 4, np.nan]))
    of = feature(made, "code")
    new = Table("new", 5, {"age": np.full(5, 50.0), "code": np.array([1.0, 4.0, 3.0, np.nan, 2.0])})
    places = [made.input_names.index(name) for name in of.inputs]
    assert of.inputs == ("code", "code = 1", "code = 2", "code = 4", "code missing")
    x = made.inputs(new)[:, places]
    assert x[:, 1:].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    wanted = (np.array([1.0, 4.0, 3.0, of.mean, 2.0]) - of.mean) / of.scale
    assert torch.allclose(x[:, 0], torch.tensor(wanted, dtype=torch.float32))


@given(
    st.lists(
        st.lists(st.sampled_from([np.nan, 0.0, 1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=30), min_size=1, max_size=4
    )
)
def test_clients_summaries_give_what_pooled_rows_give(parts: list[list[float]]) -> None:
    tables = [table(f"c{k}", code=values) for k, values in enumerate(parts)]
    pooled = np.concatenate([t.columns["code"] for t in tables])  # type: ignore[arg-type]
    known = pooled[~np.isnan(pooled)]
    wanted = np.unique(known).tolist()
    wanted = wanted if len(wanted) >= 3 and len(known) >= PER_CODE * len(wanted) else []
    made = prepared(*tables)
    categories = [float(category) for f in made.features if f.name == "code" for category in f.categories]
    assert categories == wanted
    x = torch.cat([made.inputs(t) for t in tables])
    for level in wanted:
        at = made.input_names.index(f"code = {level:g}")
        assert x[:, at].tolist() == (pooled == level).astype(float).tolist()


@pytest.mark.parametrize("standardise", ["federated", "local", "none"])
def test_indicators_are_0_and_1_however_numbers_are_scaled(standardise: str) -> None:
    made = prepared(table(code=[1, 2, 3]), table("b", code=[1, 2, 3, 3]), standardise=standardise)
    x = made.inputs(table("b", code=[1, 2, 3, 3]), "b")
    at = made.input_names.index("code = 1")
    assert set(x[:, at : at + 3].flatten().tolist()) == {0.0, 1.0}
    assert (x[:, at : at + 3].sum(1) == 1).all()


def test_it_is_said_in_one_sentence() -> None:
    tables = {"a": table(pain=[1, 2, 3, 4], ecg=[0, 1, 2, np.nan]), "b": table("b", pain=[1, 2])}
    data = federate("t", tables, "y")
    assert data.preprocessor is not None
    said = (
        "'ecg', 'pain' have few whole numbers, which may be codes, so the number and one input per value are used; "
        "--codes number uses the number alone."
    )
    assert coded(data.preprocessor) == (said,)
    assert data.notes == (said,)
    listed = {row.name: row for row in columns(tables, data.preprocessor)}
    assert listed["pain"][1:] == ("numbers, and 4 categories", 5)
    assert listed["ecg"][1:] == ("numbers, and 3 categories, some missing", 5)
    assert coded(federate("t", tables, "y", codes="number").preprocessor) == ()  # type: ignore[arg-type]


def test_ten_codes_are_not_numbers_written_as_text_and_may_still_name_clients() -> None:
    """As words, ten numbers would be a category of numbers; and one code for each client tells the client."""
    tables = {f"c{k}": table(f"c{k}", grade=range(10), ward=[k]) for k in range(10)}
    data = federate("t", tables, "y")
    assert data.preprocessor is not None
    assert [len(feature(data.preprocessor, name).categories) for name in ("grade", "ward")] == [10, 10]
    assert not [note for note in data.notes if "look like numbers" in note]
    assert [note for note in data.notes if "client names" in note and "in 'ward'" in note]


def test_new_values_are_said_and_numbers_far_off_are_said_once() -> None:
    made = prepared(table(code=[1, 2, 4]))
    new = Table("new", 4, {"age": np.full(4, 50.0), "code": np.array([1.0, 3.0, 1e6, np.nan])})
    found = unusual(made, new, "a")
    assert found.codes["code"].tolist() == [False, True, False, False]
    assert found.numbers["code"].tolist() == [False, False, True, False]
    assert found.names() == [[], ["code"], ["code"], ["code"]]
    assert (
        "numbers that were not seen in training in 'code' (1 of 4 rows, such as 3); the model"
        in check_new_rows(made, new, "a")[1]
    )


# --- kept -------------------------------------------------------------------------------------------------------------


def test_records_keep_it_and_those_of_earlier_versions_have_none() -> None:
    made = prepared(table(code=[1, 2, 3]))
    record = json.loads(json.dumps(made.record()))
    assert Preprocessor.from_record(record) == made
    assert made.settings()["codes"] == "both"
    before = json.loads(json.dumps(prepared(table(code=[1, 2, 3]), codes="number").record()))
    del before["codes"]
    old = Preprocessor.from_record(before)
    assert old.settings()["codes"] == "number"
    assert old.input_names == ("age", "code")


def test_preprocessing_file_has_it(tmp_path: Path) -> None:
    made = prepared(table(code=[1, 2, 3]))
    write_preprocessor(tmp_path / "p.json", made)
    assert read_preprocessor(tmp_path / "p.json")[0] == made
    record = json.loads((tmp_path / "p.json").read_text())
    assert [f["levels"] for f in record["features"]] == [[], ["1", "2", "3"]]
    for categories in (["a", "b"], ["1.5", "2"], ["01", "2"], [str(k) for k in range(11)], ["1", "1"]):
        record["features"][1]["levels"] = categories
        (tmp_path / "p.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match="is not a preprocessing file: the levels of 'code' are not up to"):
            read_preprocessor(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("word", "is_one"), [("3", True), ("-3", True), ("1e+20", True), ("3.0", False), ("inf", False)]
)
def test_whole_numbers_are_written_in_one_way(word: str, is_one: bool) -> None:
    assert whole(word) is is_one
    assert not whole("nan")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites whose outcome depends on a code, not on its size; one lacks a value and has gaps."""
    place = tmp_path_factory.mktemp("hospitals")
    rng = np.random.default_rng(0)
    for name, kinds in (("bern", [1, 2, 3, 4]), ("genf", [2, 3, 4])):
        pain, age = rng.choice(kinds, 80), rng.normal(60, 10, 80).round(1)
        cells = [str(p) if k % 9 or name == "bern" else "" for k, p in enumerate(pain)]
        ill = (pain == 2) | (age > 70)
        pd.DataFrame({"pain": cells, "age": age, "ill": np.where(ill, "y", "n")}).to_csv(
            place / f"{name}.csv", index=False
        )
    return place


def test_file_frame_and_array_give_the_same_probabilities(hospitals: Path, tmp_path: Path) -> None:
    run = library.fit(
        "fedavg",
        load(f"folder:{hospitals}", target="ill"),
        out=tmp_path / "run",
        rounds=2,
        epochs=2,
        progress=False,
        say=str,
    )
    (tmp_path / "new.csv").write_text("age,pain\n61.5,1\n70.5,3.0\n52.25,\n48,9\n")
    frame = pd.DataFrame({"pain": pd.array([1, 3, None, 9], dtype="Int64"), "age": [61.5, 70.5, 52.25, 48]})
    array = np.array([[1, 61.5], [3, 70.5], [np.nan, 52.25], [9, 48]])
    again = library.Run.load(tmp_path / "run", say=str)
    wanted = run.client("genf").predict(tmp_path / "new.csv").probs
    for who in (run, again):
        client = who.client("genf")
        assert torch.equal(client.predict(tmp_path / "new.csv").probs, wanted)
        assert torch.equal(client.predict(frame).probs, wanted)
        assert torch.equal(client.predict(array, columns=["pain", "age"]).probs, wanted)
        assert torch.equal(client.predict(torch.from_numpy(array), columns=["pain", "age"]).probs, wanted)
    assert again.data.preprocessor == run.data.preprocessor


def test_a_run_of_before_is_repeated_and_predicts_as_it_did(hospitals: Path, command: Command) -> None:
    data = ("--data", f"folder:{hospitals}", "--target", "ill")
    small = ("--method", "fedavg", "--rounds", "1", "--epochs", "1", "--quiet")
    command.ok("run", *data, *small, "--codes", "number", "--out", "old")
    predict = ("predict", "old", "--client", "bern", "--input", hospitals / "bern.csv")
    before, tested = command.ok(*predict).out, command.ok("predict", "old", "--test").out
    folder = as_before_manifests(Path("old"))
    noted, card = from_toml((folder / "config.toml").read_bytes()), json.loads((folder / "data.json").read_text())
    assert noted["data"].pop("codes") == card["preparation"].pop("codes") == "number"
    (folder / "config.toml").write_text(to_toml(noted))
    (folder / "data.json").write_text(json.dumps(card))
    assert command.ok(*predict).out == before
    assert command.ok("predict", "old", "--test").out == tested
    assert read(folder / "config.toml", [Override("data.codes", "both")]).data.codes == "both"
    command.ok("run", folder / "config.toml", "--out", "again", "--quiet")  # whose fingerprint is another with codes
    assert metrics(folder) == metrics(Path("again"))


def test_a_run_folder_has_it(hospitals: Path, command: Command) -> None:
    data = ("--data", f"folder:{hospitals}", "--target", "ill", "--method", "fedavg", "--rounds", "1")
    command.ok("run", *data, "--epochs", "1", "--quiet", "--out", "new")
    assert from_toml(Path("new/config.toml").read_bytes())["data"]["codes"] == "both"
    features = json.loads(Path("new/data.json").read_text())["preparation"]["features"]
    assert [f["levels"] for f in features] == [[], ["1", "2", "3", "4"]]


def test_inspect_and_run_say_it(hospitals: Path, command: Command) -> None:
    said = command.ok("data", "inspect", f"folder:{hospitals}", "--target", "ill")
    assert "numbers, and 4 categories, some missing" in said.out
    sentence = "'pain' has few whole numbers, which may be codes"
    assert sentence in said.out + said.err
    assert sentence not in str(
        command.ok("data", "inspect", f"folder:{hospitals}", "--target", "ill", "--codes", "number")
    )


def test_a_linear_model_learns_what_a_code_means(hospitals: Path) -> None:
    """Of 1 to 4 only 2 is ill, which no slope can say."""
    accuracy = {}
    for codes in ("both", "number"):
        data = load(f"folder:{hospitals}", target="ill", codes=codes)  # type: ignore[arg-type]
        run = library.fit("fedavg", data, rounds=30, epochs=5, network="linear", progress=False, say=str)
        accuracy[codes] = run.summary_record()["accuracy"]["last"]
    assert accuracy["both"] > accuracy["number"] + 0.05
