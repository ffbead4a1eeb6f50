"""Loading by name, the overview of names, and the look into a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import write_idx

from bpfed._util.errors import UserError
from bpfed.data import Examples, FederatedData, describe, fetch, inspect, load, names
from bpfed.data.partition import lay_out


def same(a: FederatedData, b: FederatedData) -> bool:
    return torch.equal(a.train.x, b.train.x) and torch.equal(a.test.x, b.test.x)


def test_digits_as_they_come() -> None:
    data = load()
    assert (data.name, len(data), data.partition, data.protocol) == ("digits", 10, "groups", "own")
    assert data.clients[0] == "client-00"
    assert (data.train.x.dtype, data.train.y.dtype) == (torch.float32, torch.int64)
    assert data.input_shape == (64,)
    assert len(data.train.x) + len(data.test.x) == 1797
    assert data.train.x.min() == -1
    assert data.train.x.max() == 1
    for number, row in enumerate(inspect(data)):
        held = [label for label, count in enumerate(row.train_labels) if count]
        assert held == (list(range(5)) if number % 2 == 0 else list(range(5, 10)))
        assert all(abs(a - b) <= 1 for a, b in zip(row.train_labels, row.test_labels, strict=True))
        assert (row.train, row.test) == (sum(row.train_labels), sum(row.test_labels))


@pytest.mark.parametrize("partition", ["groups", "random:2", "dirichlet:0.1", "shards:2", "iid"])
def test_the_same_seed_gives_the_same_federation(partition: str) -> None:
    first, again, other = (load(partition=partition, clients=7, seed=seed) for seed in (4, 4, 5))
    assert same(first, again)
    assert not same(first, other)
    assert len(first.train.x) + len(first.test.x) == 1797


def test_another_test_fraction_does_not_change_who_holds_what() -> None:
    a, b = load(partition="dirichlet:0.1", test_fraction=0.2), load(partition="dirichlet:0.1", test_fraction=0.7)
    assert torch.equal(a.train.sizes + a.test.sizes, b.train.sizes + b.test.sizes)


def test_a_clients_rows_are_not_sorted_by_class() -> None:
    y = np.repeat(np.arange(10), 100)
    rows, offsets = lay_out(np.arange(1000) % 4, np.ones(1000, dtype=bool), 4, np.random.default_rng(0))
    assert offsets.tolist() == [0, 250, 500, 750, 1000]
    for client, mine in enumerate(np.split(rows, 4)):
        assert (mine % 4 == client).all()
        assert len(np.unique(y[mine[:50]])) == 10


def test_as_many_clients_as_examples() -> None:
    data = load(clients=1797, partition="dirichlet:0.01")
    assert (data.train.sizes == 1).all()
    assert len(data.test.x) == 0
    assert data.clients[-1] == "client-1796"


def test_environment_and_argument_name_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "a/MNIST/raw", seed=0)
    write_idx(tmp_path / "b/MNIST/raw", seed=1)
    monkeypatch.setenv("BPFED_DATA", str(tmp_path / "a"))
    by_environment = load("mnist", clients=2, download=False)
    by_argument = load("mnist", clients=2, data_dir=tmp_path / "b", download=False)
    assert not same(by_environment, by_argument)
    assert fetch("mnist") == tmp_path / "a/MNIST/raw"
    assert by_argument.input_shape == (1, 28, 28)


@pytest.mark.parametrize("call", [load, fetch])
def test_an_unknown_name_has_a_hint(call: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match="Unknown dataset 'mnist-smal'; did you mean 'mnist-small'"):
        call("mnist-smal")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"clients": 2000, "partition": "iid"}, "2000 clients cannot share 1797"),
        ({"clients": 0}, "ask for at least 1"),
        ({"partition": "natural"}, "'natural' is only for data with its own clients"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"test_fraction": 1.0}, "below 1"),
        ({"partition": "group"}, "did you mean 'groups'"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load("digits", **wrong)


def test_the_overview_has_a_row_per_name_and_says_what_is_present(tmp_path: Path) -> None:
    write_idx(tmp_path / "fmnist")
    rows = {row.name: row for row in describe(tmp_path)}
    assert tuple(rows) == names()
    assert {name for name, row in rows.items() if row.present} == {
        "digits",
        "breast-cancer",
        "fmnist",
        "fmnist-small",
        "fmnist-large",
    }
    assert (rows["cifar10-large"].examples, rows["cifar10-large"].clients) == (60_000, 20)
    data = load()
    assert rows["digits"].examples == len(data.train.x) + len(data.test.x)
    assert rows["digits"].clients == len(data)


def test_examples_know_whose_they_are() -> None:
    examples = Examples(torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64), torch.tensor([0, 2, 2, 5]))
    assert examples.owner.tolist() == [0, 0, 2, 2, 2]


def test_selecting_clients_is_the_same_as_taking_them_one_by_one() -> None:
    examples = load(clients=9, partition="dirichlet:0.1", test_fraction=0.3).test
    for chosen in ([3, 0, 8, 3], [], [5]):
        picked = examples.select(torch.tensor(chosen, dtype=torch.int64))
        assert len(picked.offsets) == len(chosen) + 1
        for place, client in enumerate(chosen):
            for mine, theirs in zip(picked.client(place), examples.client(client), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_names_its_client(value: float) -> None:
    x = torch.zeros(5, 3)
    x[4, 1] = value
    examples = Examples(x, torch.zeros(5, dtype=torch.int64), torch.tensor([0, 2, 5]))
    with pytest.raises(UserError, match="Client 'b' of 't' has NaN"):
        FederatedData("t", ("a", "b"), examples, examples, "classification", 2).check()


def test_inputs_without_targets_are_refused() -> None:
    examples = Examples(torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 5]))
    with pytest.raises(UserError, match="5 inputs and 4 targets"):
        FederatedData("t", ("a", "b"), examples, examples, "classification", 2).check()


def test_mnist_from_the_real_files(real_data: str) -> None:
    data = load("mnist", clients=100, partition="dirichlet:0.1", data_dir=real_data, download=False)
    assert len(data.train.x) + len(data.test.x) == 70_000
    assert int(data.train.sizes.min()) >= 1
    counts = np.sum([np.add(row.train_labels, row.test_labels) for row in inspect(data)], axis=0)
    assert counts.tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
