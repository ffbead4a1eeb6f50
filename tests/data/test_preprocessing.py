"""Preprocessing: federated sums are the pooled statistics, order does not matter, and new rows are treated as the old."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpfed._util.errors import UserError
from bpfed.data import Preprocessor, Table, load, read_table
from bpfed.data.tabular.combine import combine
from bpfed.data.tabular.federate import federate, held_out
from bpfed.data.tabular.preprocessing import Standardise, meant
from bpfed.data.tabular.recode import Recoding
from bpfed.data.tabular.rows import read_rows
from bpfed.data.tabular.statistics import ColumnStatistics, client_summary
from bpfed.data.tabular.table import Categorical

NUMBER = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))
WORD = st.sampled_from(["", "red", "green", "blue"])


@st.composite
def clients(draw: st.DrawFn) -> dict[str, Table]:
    """Two to four clients with gaps in numbers and words, columns in any order, some without a column."""
    found = {}
    for k in range(draw(st.integers(2, 4))):
        n = draw(st.integers(3, 12))
        columns: dict[str, np.ndarray | Categorical] = {
            "a": np.array([np.nan if v is None else v for v in draw(st.lists(NUMBER, min_size=n, max_size=n))]),
            "b": np.array(draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))) + 1e9,
            "w": Categorical.of(draw(st.lists(WORD, min_size=n, max_size=n))),
            "y": Categorical.of(["no", "yes"] * (n // 2) + ["no"] * (n % 2)),
        }
        if draw(st.booleans()):
            del columns[draw(st.sampled_from(["a", "b", "w"]))]
        order = draw(st.permutations(list(columns)))
        found[f"c{k}"] = Table(f"c{k}", n, {name: columns[name] for name in order})
    return found


def combined(tables: dict[str, Table], standardise: Standardise = "federated") -> Preprocessor:
    summaries = [client_summary(table, "y", client=client) for client, table in tables.items()]
    return combine(summaries, "y", standardise=standardise)


def prepared(tables: dict[str, Table], standardise: Standardise = "federated") -> Preprocessor:
    """The preprocessing, of tables that have one: some column varies, and each client has one that is used."""
    try:
        made = combined(tables, standardise)
    except UserError as error:
        if "No column other than 'y' has values that differ" not in str(error):
            raise
        assume(False)
    used = {feature.name for feature in made.features}
    assume(all(used & table.columns.keys() for table in tables.values()))
    return made


def pooled(tables: dict[str, Table], name: str) -> np.ndarray:
    parts = [t.columns[name] if name in t.columns else np.full(t.rows, np.nan) for t in tables.values()]
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(clients())
def test_federated_sums_are_the_pooled_statistics(tables: dict[str, Table]) -> None:
    made = prepared(tables)
    for feature in made.features:
        if feature.kind == "number" and feature.scale:
            values = pooled(tables, feature.name)
            assert feature.mean == pytest.approx(np.nanmean(values), rel=1e-12, abs=1e-9)
            assert feature.scale == pytest.approx(np.nanstd(values), rel=1e-6)
            assert feature.indicator == bool(np.isnan(values).any())
    rows = torch.cat([made.inputs(t) for t in tables.values()])
    for k, name in enumerate(made.input_names):
        if name in ("a", "b"):
            known = ~np.isnan(pooled(tables, name))
            assert float(rows[known, k].double().mean()) == pytest.approx(0, abs=1e-4)
            assert float(rows[known, k].double().std(correction=0)) == pytest.approx(1, abs=1e-4)
            assert (rows[~known, k] == 0).all()
        elif name.endswith("missing"):
            column = name.removesuffix(" missing")
            assert torch.equal(
                rows[:, k] > 0, torch.from_numpy(np.concatenate([t.missing(column) for t in tables.values()]))
            )


@settings(max_examples=30, deadline=None)
@given(clients(), st.randoms(use_true_random=False))
def test_order_of_columns_and_of_clients_does_not_matter(tables: dict[str, Table], random: object) -> None:
    made = prepared(tables)
    shuffled = {}
    for client in random.sample(sorted(tables), len(tables)):  # type: ignore[attr-defined]
        table = tables[client]
        names = random.sample(sorted(table.columns), len(table.columns))  # type: ignore[attr-defined]
        shuffled[client] = Table(client, table.rows, {name: table.columns[name] for name in names})
    again = combined(shuffled)
    assert made.input_names == again.input_names
    for client, table in tables.items():
        assert torch.allclose(made.inputs(table), again.inputs(shuffled[client]), atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(clients(), st.sampled_from(["federated", "local", "none"]))
def test_records_through_json_give_the_same(tables: dict[str, Table], standardise: Standardise) -> None:
    summaries = [client_summary(t, "y", client=c) for c, t in tables.items()]
    assert [ColumnStatistics.from_record(json.loads(json.dumps(s.record()))) for s in summaries] == summaries
    made = prepared(tables, standardise)
    assert Preprocessor.from_record(json.loads(json.dumps(made.record()))) == made


def test_a_summary_holds_no_rows() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for n in (100, 10_000):
        table = Table(
            "c",
            n,
            {"a": rng.standard_normal(n), "w": Categorical.of(["x", "z"] * (n // 2)), "y": rng.standard_normal(n)},
        )
        sizes.append(len(json.dumps(client_summary(table, "y").record())))
    assert abs(sizes[0] - sizes[1]) < 20


def test_test_rows_are_in_no_summary() -> None:
    y = Categorical.of(["no", "yes"] * 20)
    values = np.arange(40.0)
    tables = {"c": Table("c", 40, {"a": values, "y": y})}
    test = held_out(tables["c"], "y", "c", seed=3)
    wild = np.where(test, 1e6, values)
    first, second = (federate("t", {"c": Table("c", 40, {"a": v, "y": y})}, "y", seed=3) for v in (values, wild))
    assert first.preprocessor == second.preprocessor
    assert torch.equal(first.train.x, second.train.x)
    assert not torch.equal(first.test.x, second.test.x)


def test_a_clients_split_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    tables = {
        c: Table(c, 30, {"a": rng.standard_normal(30), "y": Categorical.of(["no", "yes", "no"] * 10)})
        for c in ("a", "b", "c")
    }
    alone = federate("t", {"b": tables["b"]}, "y", seed=5, standardise="none")
    together = federate("t", tables, "y", seed=5, standardise="none")
    assert torch.equal(alone.test.client(0)[0], together.test.client(1)[0])
    assert not torch.equal(alone.test.x, federate("t", {"b": tables["b"]}, "y", seed=6, standardise="none").test.x)


def stays(n: int, seed: int) -> Table:
    """Lengths of stay: whole days, most of them few, some many."""
    rng = np.random.default_rng(seed)
    days = np.floor(rng.exponential(8.0, n))
    return Table(f"s{seed}", n, {"a": rng.standard_normal(n), "y": days})


def test_the_split_of_a_regression_is_drawn_from_all_rows_also_where_a_client_has_few() -> None:
    # All clients together have more than 20 lengths of stay, each small one fewer, several of which occur once.
    tables = {"big": stays(400, 0), **{f"s{k}": stays(40, k) for k in range(1, 40)}}
    tables["rome"] = Table("rome", 12, {"a": np.arange(12.0), "y": 100_000.0 + 3_517 * np.arange(12)})
    data = federate("t", tables, "y", seed=1)
    assert data.task == "regression"
    train, test = ({c: e.client(i)[1] for i, c in enumerate(data.clients)} for e in (data.train, data.test))
    assert [len(test["big"]), len(test["s1"]), len(test["rome"])] == [120, 12, 4]
    small = [c for c in data.clients if c.startswith("s")]
    tested = torch.cat([test[c] for c in small]).numpy()
    trained = torch.cat([train[c] for c in small]).numpy()
    far = np.quantile(np.concatenate([tested, trained]), 0.95)
    assert 0.03 < (tested > far).mean() < 0.08  # as many long stays as there are, not one in a thousand
    # The same as if the task had been given.
    given = federate("t", tables, "y", seed=1, task="regression")
    assert torch.equal(given.test.y, data.test.y)
    assert given.preprocessor == data.preprocessor


def test_a_client_alone_takes_numbers_for_classes_only_where_they_must_be() -> None:
    def split_of(y: list[int], task: str | None = None) -> np.ndarray:
        return held_out(
            Table("c", len(y), {"a": np.arange(float(len(y))), "y": np.array(y, float)}), "y", "c", task=task
        )

    for classes in ([0] * 30 + [1] * 20 + [2] * 2, [0, 0, 0, 1], [0] * 5 + [1] * 4 + [2], list(range(10)) * 4):
        assert (split_of(classes) == split_of(classes, "classification")).all()
    prices = [1000 * k for k in range(12)]
    assert split_of(prices).sum() == 4
    long = [0] * 8 + [1, 1, 2, 2, 2, 2, 5, 5, 5, 6, 6, 7, 7] + [12, 15, 16, 30, 37, 46]
    assert (split_of(long) == split_of(long, "regression")).all()
    assert not (split_of(long) == split_of(long, "classification")).all()


def test_the_split_of_classes_is_as_it_was() -> None:
    y = np.array([0, 0, 1, 1, 2, 3, 0, 1, 4, 5, 6, 2.0])
    tables = {"c": Table("c", 12, {"a": np.arange(12.0), "y": y}), "d": Table("d", 2, {"a": np.ones(2), "y": y[:2]})}
    data = federate("t", tables, "y", seed=3, standardise="none")
    assert data.task == "classification"
    assert sorted(data.test.client(0)[0][:, 0].tolist()) == [1.0, 2.0, 4.0]


def test_a_client_with_one_row_of_each_class_has_rows_to_test_on() -> None:
    columns = {"a": np.arange(12.0), "y": Categorical.of([f"v{k:02}" for k in range(12)])}
    tables = {name: Table(name, 12, dict(columns)) for name in "abcdefgh"}  # each class is in some client's training
    data = federate("t", tables, "y", test_fraction=0.3, seed=3)
    assert data.test.sizes.tolist() == 8 * [4]
    assert data.train.sizes.tolist() == 8 * [8]


def test_local_standardisation_is_each_clients_own_and_newcomers_join() -> None:
    tables = {
        c: Table(c, 20, {"a": m + np.arange(20.0), "y": Categorical.of(["no", "yes"] * 10)})
        for c, m in (("a", 0), ("b", 500))
    }
    data = federate("t", tables, "y", standardise="local", test_fraction=0.5)
    for client in range(2):
        assert float(data.train.client(client)[0].mean()) == pytest.approx(0, abs=1e-5)
    made = data.preprocessor
    assert made is not None
    new = Table("n", 2, {"a": np.array([7.0, 9.0])})
    with pytest.raises(UserError, match="pass client= to name whose rows these are"):
        made.inputs(new)
    with pytest.raises(UserError, match="Unknown client 'n'"):
        made.inputs(new, "n")
    assert made.joined("n", new).inputs(new, "n").flatten().tolist() == pytest.approx([-1, 1])
    # One value has no spread: everybody's is taken.
    one = Table("n", 1, {"a": np.array([7.0])})
    assert made.joined("o", one).inputs(Table("n", 1, {"a": np.array([8.0])}), "o").item() == pytest.approx(
        1 / made.features[0].scale
    )


@pytest.fixture
def made() -> Preprocessor:
    table = Table(
        "c",
        6,
        {
            "a": np.array([1.0, 2, 3, 4, 5, np.nan]),
            "w": Categorical.of(["red", "blue", "red", "", "blue", "red"]),
            "y": Categorical.of(["no", "yes"] * 3),
        },
    )
    return combine([client_summary(table, "y")], "y")


def test_new_rows(made: Preprocessor) -> None:
    assert made.input_names == ("a", "a missing", "w = blue", "w = red", "w missing")
    new = Table(
        "new",
        3,
        {"other": np.zeros(3), "w": Categorical.of(["green", "", "red"]), "a": np.array([3.0, np.nan, 3 + 2**0.5])},
    )
    assert made.inputs(new).tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]
    without = Table("new", 1, {"w": Categorical.of(["red"])})
    assert made.inputs(without).tolist() == [[0, 1, 0, 1, 0]]
    assert made.targets(Table("new", 2, {"y": Categorical.of(["yes", "no"])})).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"z": np.zeros(1)}, r"none of the columns that training used \('a', 'w'\)"),
        ({"a": Categorical.of(["old"])}, "'a' of 'new' must be numeric, but has 'old'"),
    ],
)
def test_new_rows_that_cannot_be(made: Preprocessor, columns: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        made.inputs(Table("new", 1, columns))


def test_targets_that_cannot_be(made: Preprocessor) -> None:
    for column, words in (
        (Categorical.of(["maybe"]), "has the 'y' 'maybe', which no training row has; it must be one of 'no', 'yes'"),
        (Categorical.of([""]), "1 of the 1 rows of 'new' has no 'y', first in row 1; fill it in or remove the row"),
    ):
        with pytest.raises(UserError, match=words):
            made.targets(Table("new", 1, {"y": column}))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"features": 3},
        {"shape": 5},
        {"shape": [1, 2]},
        {"shape": [1, 2, 2.5]},
        {"more": 1},
        {"holdout": {"a": 1}},
        {"client_column": 3},
        {"target": None},
        {"labels": ["no", 1]},
        {"ignore": [None]},
        {"missing": [3]},
        {"standardise": "all"},
        {"codes": True},
        {"resized": 1},
        {"recoding": {"dates": [3]}},
        {"recoding": {"rename": ["age"]}},
        {"features": [{"name": 3, "kind": "number", "levels": []}]},
        {"features": [{"name": "a", "kind": "poem", "levels": []}]},
        {"features": [{"name": "a", "kind": "words", "levels": [1]}]},
        {"features": [{"name": "a", "kind": "number", "levels": ["old"]}]},
        {"features": [{"name": "a", "kind": "number", "levels": [], "indicator": "yes"}]},
    ],
)
def test_a_record_that_cannot_be(made: Preprocessor, change: dict) -> None:
    with pytest.raises(UserError, match=r"version|damaged|renames no column"):
        Preprocessor.from_record({**made.record(), **change})


def test_a_number_of_columns_with_thousands_of_digits_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"asks for 999999999 columns of a text; choose 1 to 4096\."):
        Recoding.of(text=f"note:{'9' * 5000}")


@pytest.mark.parametrize(
    ("values", "task", "labels"),
    [
        ([0, 1, 2, 1], None, ("0", "1", "2")),
        ([10, 9, 100, 9], None, ("9", "10", "100")),
        ([0.5, 1, 2, 1], None, ()),
        ([0, 1, 2, 1], "regression", ()),
        (list(range(30)), None, ()),
        (list(range(30)), "classification", tuple(map(str, range(30)))),
    ],
)
def test_what_is_a_class(values: list[float], task: str | None, labels: tuple[str, ...]) -> None:
    table = Table("c", len(values), {"a": np.arange(float(len(values))), "y": np.array(values, dtype=float)})
    assert combine([client_summary(table, "y", task=task)], "y", task=task).labels == labels  # type: ignore[arg-type]


def test_regression_in_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, mean in (("a", 100.0), ("b", 300.0)):
        np.savez(tmp_path / f"{name}.npz", x=rng.standard_normal((40, 2)), y=mean + 10 * rng.standard_normal(40))
    data = load(f"folder:{tmp_path}")
    made = data.preprocessor
    assert made is not None
    assert (data.task, data.classes, made.task) == ("regression", 0, "regression")
    assert float(data.train.y.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train.y.std(correction=0)) == pytest.approx(1, abs=1e-4)
    table = read_table(tmp_path / "b.npz")
    assert np.allclose(made.in_units(made.targets(table)), table.columns["y"], rtol=1e-5)


@pytest.mark.parametrize(("shape", "expected"), [((4, 5), (1, 4, 5)), ((4, 5, 3), (3, 4, 5)), ((3, 8, 8), (3, 8, 8))])
def test_images(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        np.savez(
            tmp_path / f"{name}.npz",
            x=rng.integers(0, 256, (20, *shape), dtype=np.uint8),
            y=np.array(["cat", "dog"] * 10),
        )
    data = load(f"folder:{tmp_path}")
    assert (data.input_shape, data.labels) == (expected, ("cat", "dog"))
    per_channel = data.train.x.transpose(0, 1).flatten(1)
    assert per_channel.mean(1).tolist() == pytest.approx([0] * expected[0], abs=1e-4)
    assert per_channel.std(1).tolist() == pytest.approx([1] * expected[0], abs=1e-3)
    plain = load(f"folder:{tmp_path}", standardise="none").train.x
    assert (float(plain.min()), float(plain.max())) == (-1, 1)
    assert data.preprocessor is not None
    assert data.preprocessor.inputs(read_table(tmp_path / "a.npz"), "a").shape == (20, *expected)
    np.savez(tmp_path / "c.npz", x=np.zeros((4, 6, 6)), y=np.array(["cat", "dog"] * 2))
    with pytest.raises(UserError, match="Clients have different kinds of inputs"):
        load(f"folder:{tmp_path}")


def images(folder: Path, **scales: float) -> None:
    """A file of images for each client, bytes times a scale; 1 leaves them bytes."""
    rng = np.random.default_rng(0)
    for client, scale in scales.items():
        x = rng.integers(0, 256, (8, 4, 4)).astype(np.uint8)
        np.savez(folder / f"{client}.npz", x=x if scale == 1 else x * scale, y=np.arange(8) % 2)


def test_bytes_and_fractions_are_not_mixed(tmp_path: Path) -> None:
    images(tmp_path, a=1, b=1 / 255, c=1)
    with pytest.raises(
        UserError, match=r"channel 0 has a standard deviation of 0\.\d+ at 'b' and of \d\d\.?\d* at '[ac]'; save"
    ):
        load(f"folder:{tmp_path}")
    assert load(f"folder:{tmp_path}", standardise="local").train.x.std() < 2
    images(tmp_path, b=1)
    load(f"folder:{tmp_path}")


@pytest.mark.parametrize("standardise", ["federated", "local"])
def test_new_images_in_another_unit_are_said(tmp_path: Path, standardise: Standardise) -> None:
    (tmp_path / "seen").mkdir()
    images(tmp_path / "seen", a=1, b=1)
    data = load(f"folder:{tmp_path / 'seen'}", standardise=standardise)
    images(tmp_path, same=1, brighter=1.5, fractions=1 / 255)
    for name, wrong in (("same", False), ("brighter", False), ("fractions", True)):
        said: list[str] = []
        read_rows(data, tmp_path / f"{name}.npz", "a", said.append)
        assert bool(said) == wrong
        assert not wrong or "in the same unit" in said[0]


def test_a_class_that_is_a_number_in_one_file_and_a_word_in_another_is_one(tmp_path: Path) -> None:
    files = {"a": ("250.00", "I10", "J45"), "b": ("250.00", "007", "250.00")}
    for client, targets in files.items():
        rows = [f"{i},{word}" for i, word in enumerate(targets * 4)]
        (tmp_path / f"{client}.csv").write_text("\n".join(["x,dx", *rows]) + "\n")
    data = load(f"folder:{tmp_path}", target="dx", task="classification")
    assert data.labels == ("250.00", "7", "I10", "J45")
    of_b = data.train.y[data.train.offsets[1] :]
    assert sorted({data.labels[k] for k in of_b}) == ["250.00", "7"]
    table = Table("new", 2, {"x": np.zeros(2), "dx": np.array([250.0, 7.0])})
    assert [data.labels[k] for k in data.preprocessor.targets(table)] == ["250.00", "7"]


def test_a_number_that_two_words_could_be_is_neither() -> None:
    assert meant(["7", "8"], ["007", "7.0", "08", "x"]) == {"8": "08"}
