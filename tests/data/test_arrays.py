"""A user's own arrays: ids become clients, and what is wrong with them is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import from_arrays, inspect, load, synthetic
from bpfed.data.checks.clients import unscaled
from bpfed.methods import FedAvg


class Gap:
    """A missing value as tables of objects have it: a comparison with it is itself, and neither true nor false."""

    def __ne__(self, other: object) -> Gap:  # type: ignore[override]
        return self

    def __eq__(self, other: object) -> Gap:  # type: ignore[override]
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


DATES = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]")


def test_ids_become_clients_and_no_example_is_lost() -> None:
    x = np.arange(40.0).reshape(20, 2)
    y, ids = np.arange(20) % 2, np.array(["ward b", "ward a", "ward c", "ward a"] * 5)
    data = from_arrays(x, y, ids, name="wards", labels=("well", "ill"))
    assert data.clients == ("ward a", "ward b", "ward c")
    assert (data.task, data.classes, data.labels, data.partition) == ("classification", 2, ("well", "ill"), "natural")
    for number, client in enumerate(data.clients):
        mine = torch.cat([data.train.client(number)[0], data.test.client(number)[0]])
        assert sorted(mine[:, 0].tolist()) == x[ids == client, 0].tolist()
    assert [row.train + row.test for row in inspect(data)] == [10, 5, 5]


def test_numbers_with_fractions_are_a_regression() -> None:
    data = from_arrays(torch.linspace(0, 1, 10), [0.5] * 10, [7, 7, 7, 7, 7, 30, 30, 30, 30, 30])
    assert (data.task, data.classes, data.input_shape, data.clients) == ("regression", 0, (1,), ("7", "30"))
    assert data.train.y.dtype == torch.float32
    assert inspect(data)[0].train_labels == ()


def test_words_and_gaps_become_classes_in_order() -> None:
    words = from_arrays(np.zeros((4, 1)), ["walk", "sit", "walk", "run"], [1, 1, 2, 2], test_fraction=0)
    assert words.labels == ("run", "sit", "walk")
    assert sorted(words.train.y.tolist()) == [0, 1, 2, 2]
    gaps = from_arrays(np.zeros((3, 1)), [10, 30, 20], [0, 0, 0], test_fraction=0)
    assert (gaps.labels, sorted(gaps.train.y.tolist())) == (("10", "20", "30"), [0, 1, 2])
    named = from_arrays(np.zeros((2, 1)), ["sit", "run"], [0, 0], labels=("run", "walk", "sit"), test_fraction=0)
    assert (named.classes, sorted(named.train.y.tolist())) == (3, [0, 2])


def test_a_column_of_floats_or_objects_names_clients_by_whole_numbers() -> None:
    for ids in (np.array([3.0, 3.0, 12.0]), np.array([3, 3, 12], dtype=object)):
        assert from_arrays(np.zeros((3, 1)), [0, 1, 0], ids, test_fraction=0).clients == ("3", "12")


def test_tensors_of_half_the_bits_are_numbers() -> None:
    x = torch.arange(4.0)
    data = from_arrays(x.bfloat16(), x.bfloat16() / 2, [0] * 4, test_fraction=0)
    assert (data.task, sorted(data.train.y.tolist())) == ("regression", [0, 0.5, 1, 1.5])


def test_a_given_split_is_kept() -> None:
    x, test = np.arange(6.0), np.array([True, False, False, True, False, False])
    data = from_arrays(x, x, [0, 0, 0, 1, 1, 1], test=test)
    assert sorted(data.test.x.flatten().tolist()) == [0, 3]
    assert sorted(data.train.x.flatten().tolist()) == [1, 2, 4, 5]


def test_the_seed_decides() -> None:
    x, ids = np.arange(100.0), np.arange(100) % 5
    first, again, other = (from_arrays(x, x, ids, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, other.train.x)


@pytest.mark.parametrize(
    ("x", "y", "ids", "more", "words"),
    [
        ([[1.0], [2.0]], [0], [0, 0], {}, "one target and one id per input"),
        ([[1.0], [2.0]], [[0], [1]], [0, 0], {}, "one target and one id per input"),
        ([[1.0], [2.0]], 3, [0, 0], {}, "one target and one id per input"),
        ([], [], [], {}, "no examples"),
        ([["a"], ["b"]], [0, 1], [0, 0], {}, "not all numbers"),
        ([[1.0, 2.0], [2.0]], [0, 1], [0, 0], {}, "not all have the same shape"),
        ([[1.0], [None]], [0, 1], [0, 0], {}, "missing values"),
        ([[1.0], [Gap()]], [0, 1], [0, 0], {}, "The inputs of 'own' have missing values"),
        ([[1.0], [2.0]], [0, Gap()], [0, 0], {}, "The targets of 'own' have missing values"),
        ([[1.0], [2.0]], [0, 1], ["a", Gap()], {}, "The ids of 'own' have missing values"),
        (np.ma.masked_equal([[1.0], [9.0]], 9.0), [0, 1], [0, 0], {}, "The inputs of 'own' have missing values"),
        ([[1.0], [2 + 1j]], [0, 1], [0, 0], {}, "The inputs of 'own' are complex numbers"),
        ([[1.0], [2.0]], [0.5, 1j], [0, 0], {}, "The targets of 'own' are complex numbers"),
        ([[1.0], [2.0]], np.array([0.5, 1j], dtype=object), [0, 0], {}, "The targets of 'own' are complex numbers"),
        (DATES, [0, 1], [0, 0], {}, "The inputs of 'own' are not all numbers"),
        ([[1.0], [2.0]], [0, 1], [0, 0], {"task": "classify"}, "Unknown task 'classify'; did you mean 'classific"),
        ([[1.0], [1e300]], [0, 1], [0, 0], {}, r"NaN or infinite values in its .* data, in x\[:, 0\] of 1 of its 1 ex"),
        (
            [[1.0], [2.0]],
            [0.5, float("nan")],
            [0, 0],
            {},
            "NaN or infinite values in its .* data, in y of 1 of its 1 ex",
        ),
        ([[1.0], [2.0]], [0, 1], ["a", None], {}, "missing values"),
        ([[1.0], [2.0]], [0, 1], [1.0, float("nan")], {}, "has no id"),
        ([[1.0], [2.0]], [0.5, 1.0], [0, 0], {"task": "classification"}, "cannot be classes"),
        ([[1.0], [2.0]], [0, 2], [0, 0], {"labels": ("a", "b")}, "labels must run from 0 to 1"),
        ([[1.0], [2.0]], ["a", "z"], [0, 0], {"labels": ("a", "b")}, "the class 'z'"),
        ([[1.0], [2.0]], [0, 1], [0, 0], {"test": [0, 1]}, "one True or False"),
        ([[1.0], [2.0]], [0, 1], [0, 1], {"test": [True, False]}, "Client '0' of 'own' has no training example"),
    ],
)
def test_what_is_wrong_is_one_sentence(x, y, ids, more: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_arrays(x, y, ids, **more)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def off(column: int, mean: float, factor: float) -> np.ndarray:
    """Five columns of inputs, one of them moved and stretched."""
    x = normal(60, 5)
    x[:, column] = mean + factor * x[:, column]
    return x


X, IDS, CLASSES = normal(60, 5), np.arange(60) % 2, np.arange(60) // 2 % 2


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X, CLASSES, ()),
        (X, X[:, 0], ()),
        (X, X[:, 0] * 2 + 2, ()),
        (off(3, 9, 9), CLASSES, ()),
        (off(3, 0, 100), CLASSES, ("x[:, 3] has mean",)),
        (off(2, -11, 0), CLASSES, ("x[:, 2] has mean -11 and standard deviation 0,",)),
        (X * 100, CLASSES, ("(and 4 more like it)",)),
        (X / 1000, CLASSES, ("x[:, 0] has mean",)),
        (np.concatenate([X[:, :2] / 1000, X[:, 2:]], 1), CLASSES, ()),  # some are small, not most
        (np.zeros((60, 1)), CLASSES, ()),
        (X, 3 + 10 * X[:, 0], ("The targets of 'own' are not scaled, with mean",)),
        (X, 4 + X[:, 0], ("convert predictions back",)),
        (X, X[:, 0] / 100, ("The targets",)),
        (X, np.full(60, 0.5), ()),
        (X * 100, 100 * X[:, 0], ("The inputs", "The targets")),
        (normal(60, 1, 4, 4), CLASSES, ()),
        (np.abs(normal(60, 1, 4, 4)) * 255, CLASSES, ("go up to",)),
        (-255 - normal(60, 1, 4, 4), CLASSES, ("go up to 25",)),
    ],
)
def test_what_is_far_from_a_networks_size_is_said_and_left_as_it_is(x, y, said: tuple[str, ...]) -> None:
    data = from_arrays(x, y, IDS)
    assert len(data.notes) == len(said)
    assert all(part in note for part, note in zip(said, data.notes, strict=True))
    both = torch.cat([data.train.x, data.test.x]).flatten()
    assert torch.equal(both.sort().values, torch.tensor(x, dtype=torch.float32).flatten().sort().values)


def test_only_training_examples_are_looked_at_for_it() -> None:
    x, test = X.copy(), np.arange(60) >= 40
    x[test] *= 1000
    assert from_arrays(x, CLASSES, IDS, test=test).notes == ()
    assert from_arrays(x, CLASSES, IDS, test=~test).notes != ()


def test_training_says_it_once() -> None:
    said: list[str] = []
    data = from_arrays(X * 100, X[:, 0] * 100, IDS)
    bpfed.fit_seeds(FedAvg(), data, (0, 1), rounds=1, epochs=1, compile="off", device="cpu", say=said.append)
    assert said == list(data.notes)
    assert len(said) == 2


def test_datasets_here_are_of_a_networks_size() -> None:
    assert unscaled(load("digits")) == unscaled(synthetic()) == ()


@pytest.mark.parametrize("name", ["mnist", "fmnist", "heart-disease", "wisdm"])
def test_datasets_of_files_are_of_a_networks_size(name: str, real_data: str) -> None:
    assert unscaled(load(name, data_dir=real_data, download=False)) == ()


def test_whole_numbers_of_a_real_type_are_a_regression_and_said_to_be() -> None:
    x, ids = np.arange(8.0)[:, None], ["a"] * 4 + ["b"] * 4
    data = from_arrays(x, np.array([0.0, 1.0] * 4), ids)
    assert data.task == "regression"
    assert data.notes == (
        "The targets of 'own' are real numbers by type and so a regression, but all are whole (2 different ones); if "
        'they are classes, pass task="classification".',
    )
    for y, task in (([0.0, 1.0] * 4, "classification"), ([0.0, 1.0] * 4, "regression"), ([0.5, 1.0] * 4, None)):
        assert not any("by type" in note for note in from_arrays(x, np.array(y), ids, task=task).notes)  # type: ignore[arg-type]


def test_clients_of_one_example_each_cannot_be_tested() -> None:
    data = from_arrays(np.arange(4.0), [0, 1, 0, 1], [1, 2, 3, 4])
    with pytest.raises(UserError, match=r"No client of 'own' has a test example, because each has a single one, .*\.$"):
        bpfed.fit(data=data, rounds=1)
    data = from_arrays(np.arange(4.0), [0, 1, 0, 1], [1, 1, 2, 2], test_fraction=0.0)
    with pytest.raises(UserError, match=r"has a test example; give them some, e.g. with --test-fraction 0.3 "):
        bpfed.fit(data=data, rounds=1)
