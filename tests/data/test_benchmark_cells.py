"""The paper's cells: exact numbers per client and label, and no image in two places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bpfed._util.errors import UserError
from bpfed.data import inspect, load
from bpfed.data.partition import CELLS, deal_cell, parse_partition

# How many images of each class there are: MNIST's differ, the others' are equal.
SUPPLY = {
    "mnist": [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958],
    "fmnist": [7000] * 10,
    "cifar10": [6000] * 10,
}


@pytest.mark.parametrize("partition", ["groups", "random"])
@pytest.mark.parametrize("name", CELLS)
def test_every_client_has_its_exact_quota(name: str, partition: str) -> None:
    cell = CELLS[name]
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), SUPPLY[cell.source]))
    owners, test = deal_cell(cell, y, parse_partition(partition), np.random.default_rng(1))
    assert not test[owners < 0].any()
    count = np.zeros((2, cell.clients, 10), dtype=int)
    np.add.at(count, (test[owners >= 0].astype(int), owners[owners >= 0], y[owners >= 0]), 1)
    held = count[0] > 0
    assert (count[0] == np.where(held, cell.train, 0)).all()
    assert (count[1] == np.where(held, cell.test, 0)).all()
    assert (held.sum(1) == 5).all()
    assert (held.sum(0) == cell.clients // 2).all()
    if partition == "groups":
        assert {tuple(np.flatnonzero(row)) for row in held} == {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)}
    else:
        assert len({tuple(row) for row in held}) > 2


def test_files_that_are_not_whole_are_one_sentence() -> None:
    y = np.repeat(np.arange(10), 4999)
    for partition in ("groups", "random"):
        with pytest.raises(UserError, match="Label 0 of 'mnist' has 4999 examples, but this cell needs 5000"):
            deal_cell(CELLS["mnist-small"], y, parse_partition(partition), np.random.default_rng(0))


@pytest.mark.parametrize("partition", ["dirichlet:0.3", "random:3", "iid"])
def test_another_partition_is_refused(partition: str) -> None:
    with pytest.raises(UserError, match=f"not by '{partition}'; use 'mnist'"):
        deal_cell(CELLS["mnist-small"], np.arange(10), parse_partition(partition), np.random.default_rng(0))


def test_another_number_of_clients_or_test_fraction_is_refused() -> None:
    with pytest.raises(UserError, match="has 10 clients, not 12; use 'mnist'"):
        load("mnist-small", clients=12)
    with pytest.raises(UserError, match="use 'mnist' for another test fraction"):
        load("mnist-small", test_fraction=0.1)


@pytest.mark.parametrize("partition", ["groups", "random"])
def test_the_real_cell_holds_no_image_twice(real_data: str, partition: str) -> None:
    data = load("mnist-small", partition=partition, seed=3, data_dir=real_data, download=False)
    assert (data.protocol, data.partition, len(data)) == ("paper", partition, 10)
    for row in inspect(data):
        assert sorted(row.train_labels) == [0] * 5 + [50] * 5
        assert sorted(row.test_labels) == [0] * 5 + [950] * 5
        assert [n * 19 for n in row.train_labels] == list(row.test_labels)
    # Images themselves: MNIST has no two alike, so a hash of the pixels is an image's identity.
    pixels = torch.cat([data.train.x, data.test.x]).flatten(1).double()
    key = pixels @ torch.randn(784, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert len(torch.unique(key, dim=0)) == len(key) == 50_000
