"""Paired differences: Student's interval over seeds, a bootstrap over clients, and who is left out; against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bpfed.comparison.record import difference


def made_up(seeds: int, clients: int, seed: int = 0) -> dict[int, dict[str, float]]:
    g = np.random.default_rng(seed)
    return {s: {f"c{i}": float(v) for i, v in enumerate(g.normal(size=clients))} for s in range(seeds)}


def test_over_seeds_it_is_the_paired_t_interval() -> None:
    ours, theirs = made_up(5, 7, 1), made_up(5, 7, 2)
    found = difference(ours, theirs)
    means = [[np.mean(list(side[s].values())) for s in range(5)] for side in (ours, theirs)]
    expected = stats.ttest_rel(*means).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(np.mean(means[0]) - np.mean(means[1]))
    assert found.lower == sum(ours[s][c] < theirs[s][c] for s in ours for c in ours[s])
    assert (found.lower + found.higher, found.pairs) == (35, 35)


def test_with_one_seed_it_is_a_bootstrap_over_clients() -> None:
    ours, theirs = made_up(1, 200, 1), made_up(1, 200, 2)
    found = difference(ours, theirs)
    apart = [ours[0][c] - theirs[0][c] for c in ours[0]]
    half = 1.96 * np.std(apart) / math.sqrt(200)  # what it comes to with so many clients
    assert (found.low, found.high) == pytest.approx((np.mean(apart) - half, np.mean(apart) + half), abs=0.1 * half)
    assert "bootstrap over 200 clients" in found.interval
    few = difference(made_up(1, 4, 1), made_up(1, 4, 2))
    assert math.isnan(few.low)
    assert not few.clear


def test_a_client_that_one_was_not_tested_on_is_left_out() -> None:
    ours, theirs = {0: {"a": 1.0, "b": 5.0, "c": math.nan}}, {0: {"a": 0.5, "c": 1.0}}
    assert difference(ours, theirs)[:1] == (0.5,)
    assert difference(ours, theirs).pairs == 1
    assert difference({0: {}}, {0: {}}).pairs == 0
