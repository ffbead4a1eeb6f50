"""Splits: of each client and class alike, and something left to train on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpfed._util.errors import UserError
from bpfed.data.holdout import split


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 5)), max_size=120),
    fraction=st.one_of(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9]), st.floats(0, 1, exclude_max=True)),
    seed=st.integers(0, 2**32),
)
def test_every_client_and_class_alike(rows: list[tuple[int, int]], fraction: float, seed: int) -> None:
    y, owners = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    test = split(y, owners, fraction, np.random.default_rng(seed))
    assert not test[owners < 0].any()
    for client in np.unique(owners[owners >= 0]):
        mine = owners == client
        number = int(mine.sum())
        all_would_go = math.floor(round(number * fraction + 0.5, 9)) == number
        assert test[mine].sum() == math.floor(round(number * fraction + 0.5, 9)) - all_would_go
        for label in np.unique(y[mine]):
            cell = mine & (y == label)
            exact = cell.sum() * fraction
            assert math.floor(exact + 1e-6) - all_would_go <= test[cell].sum() <= math.ceil(exact - 1e-6)


def test_a_single_example_is_for_training() -> None:
    assert not split(np.zeros(3, int), np.arange(3), 0.9, np.random.default_rng(0)).any()


def test_odd_examples_fall_on_classes_at_random() -> None:
    # Clients with one example per class: half is tested, and over clients no class more than another.
    y, owners = np.tile(np.arange(4), 2000), np.repeat(np.arange(2000), 4)
    test = split(y, owners, 0.5, np.random.default_rng(0))
    share = [test[y == label].mean() for label in range(4)]
    np.testing.assert_allclose(share, 0.5, atol=0.05)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_impossible_fraction_is_one_sentence(fraction: float) -> None:
    with pytest.raises(UserError, match="test fraction"):
        split(np.zeros(3, int), np.zeros(3, int), fraction, np.random.default_rng(0))


@pytest.mark.parametrize(("number", "fraction", "tested"), [(45, 0.7, 32), (90, 0.35, 32), (50, 0.29, 15)])
def test_halves_are_rounded_up_whatever_the_last_bit_says(number: int, fraction: float, tested: int) -> None:
    # In floating point 45 * 0.7 falls short of 31.5.
    assert split(np.zeros(number, int), np.zeros(number, int), fraction, np.random.default_rng(0)).sum() == tested
