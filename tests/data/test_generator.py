"""Synthetic federations: the shape asked for, clients that differ, and no waiting."""

from __future__ import annotations

import time

import pytest
import torch

from bpfed._util.errors import UserError
from bpfed.data import inspect, synthetic


def test_the_shape_asked_for() -> None:
    data = synthetic(clients=12, examples=20, features=3, classes=4, seed=1)
    assert (len(data), data.input_shape, data.classes) == (12, (3,), 4)
    assert all((row.train, row.test) == (15, 5) for row in inspect(data))
    assert all(
        sum(a + b > 0 for a, b in zip(row.train_labels, row.test_labels, strict=True)) <= 2 for row in inspect(data)
    )


def test_the_seed_decides() -> None:
    first, again, other = (synthetic(5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, other.train.x)


def test_classes_can_be_told_apart_and_clients_differ() -> None:
    data = synthetic(clients=50, examples=200, features=10, classes=5, seed=0)
    x, y = data.train.x, data.train.y
    centres = torch.stack([x[y == c].mean(0) for c in range(5)])
    guess = torch.cdist(data.test.x, centres).argmin(1)
    assert (guess == data.test.y).float().mean() > 0.9
    shift = torch.stack([(a - centres[b]).mean(0) for a, b in map(data.train.client, range(50))])
    assert 0.3 < shift.std() < 0.7


def test_one_example_each_is_for_training() -> None:
    data = synthetic(clients=3, examples=1, features=1, classes=1)
    assert (len(data.train.x), len(data.test.x)) == (3, 0)


@pytest.mark.parametrize("what", ["clients", "examples", "features", "classes"])
def test_none_of_something_is_one_sentence(what: str) -> None:
    with pytest.raises(UserError, match=f"{what} 0"):
        synthetic(**{what: 0})


def test_a_hundred_thousand_clients_take_seconds() -> None:
    start = time.perf_counter()
    data = synthetic(clients=100_000, examples=20, features=8, classes=10)
    assert len(data) == 100_000
    assert data.clients[7] == "client-00007"
    assert time.perf_counter() - start < 20  # about one second on two quiet cores
