"""Scales, ticks and intervals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from bpfed._util import text
from bpfed.report import svg
from bpfed.report.charts import settled, wilson
from bpfed.report.svg import Scale

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=8), st.booleans())
def test_a_fitted_scale_holds_its_values_and_has_ticks(values: list[float], log: bool) -> None:
    scale = svg.fit(values, 0, 100, log=log)
    for v in values:
        assert -1e-6 <= scale(v) <= 100 + 1e-6
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert all(-1e-6 <= scale(t) <= 100 + 1e-6 for t in ticks)


def test_ticks_are_round_and_told_apart() -> None:
    scale = Scale(0.902, 0.983, 0, 100)
    show = svg.tick_text(scale.ticks(), per_cent=True)
    assert [show(t).replace("\u202f", " ") for t in scale.ticks()] == ["92 %", "94 %", "96 %", "98 %"]
    assert Scale(1, 30, 0, 1).ticks(6, whole=True) == [5, 10, 15, 20, 25, 30]
    assert Scale(1, 3, 0, 1).ticks(6, whole=True) == [1, 2, 3]
    assert Scale(0.08, 12, 0, 1, log=True).ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])


def test_ticks_far_below_one_are_not_shown_as_zero() -> None:
    scale = svg.fit([1e-9, 2.0], 0, 100, log=True)
    show = svg.tick_text(scale.ticks())
    assert len({show(t) for t in scale.ticks()}) == len(scale.ticks())


def test_labels_are_pushed_apart_in_their_order() -> None:
    assert svg.apart([10, 12, 50], 15) == [3.5, 18.5, 50]
    assert svg.apart([12, 10], 15) == [18.5, 3.5]
    assert svg.apart([10, 12, 50], 15, low=5) == [5, 20, 50]
    assert svg.apart([10, 12, 50], 15, high=40) == [3.5, 18.5, 40]


#: Room for labels that are 0.1 apart, from 0 to 1.
CROWDS = [
    [0.5, 0.5, 0.5],
    [0.5, 0.505, 0.51],
    [0.0, 0.01, 0.99, 1.0],
    [0.94, 0.95, 0.96, 1.2],
    [0.99, 0.98, 0.97, 0.02],
    [0.125 + 0.0025 * k for k in range(9)],
    [0.2, 0.6],
    [],
]


@pytest.mark.parametrize("places", CROWDS)
def test_labels_stand_apart_in_their_order_and_within_limits(places: list[float]) -> None:
    moved = svg.apart(places, 0.1, 0.0, 1.0)
    order = sorted(range(len(places)), key=places.__getitem__)
    assert all(moved[b] - moved[a] >= 0.1 - 1e-12 for a, b in pairwise(order))
    assert all(-1e-12 <= place <= 1 + 1e-12 for place in moved)


def test_labels_stay_near() -> None:
    """What is apart already does not move, and a crowd with room on either side keeps its centre."""
    assert svg.apart([0.2, 0.6], 0.1, 0.0, 1.0) == [0.2, 0.6]
    assert svg.apart([0.0, 300.0], 17, 0, 400) == [0.0, 300.0]
    assert svg.apart([150.0, 152.0, 154.0], 17, 0, 400) == pytest.approx([135.0, 152.0, 169.0])
    many_clients = [150.0 + k for k in range(15)]
    assert math.isclose(sum(svg.apart(many_clients, 17, 0, 400)), sum(many_clients))


def test_a_line_is_interrupted_by_what_is_missing() -> None:
    drawn = svg.line([(0, 0), (1, 1), (2, math.nan), (3, 3), (4, 4)], "x")
    assert 'd="M0 0L1 1M3 3L4 4"' in drawn


def test_a_wild_start_does_not_hide_the_rest() -> None:
    scale, cut = settled([[9.0, 3.0] + [0.10, 0.12] * 10], per_cent=False, bottom=200)
    assert cut
    assert scale.high < 0.2
    scale, cut = settled([[0.9, 0.8, 0.7, 0.6, 0.5]], per_cent=True, bottom=200)
    assert not cut
    assert scale.low < 0.5 < 0.9 < scale.high


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (5, 5), (3, 7), (450, 500)])
def test_wilson_agrees_with_scipy(hits: int, n: int) -> None:
    theirs = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(hits / n, n) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.percent(0.9534), "95.3 %"),
        (text.percent(-0.012), "−1.2 %"),
        (text.decimal(0.12345), "0.123"),
        (text.decimal(-1234.5), "−1234"),
        (text.decimal(12345.6), "12 346"),
        (text.decimal(-0.0004), "0.000"),
        (text.percent(-0.0004), "0.0 %"),
        (text.decimal(math.nan), "–"),
        (text.decimal(3.2e9), "3.20e+09"),
        (text.count(65328), "65 328"),
        (text.plural(1, "client"), "1 client"),
        (text.plural(2, "client"), "2 clients"),
        (text.duration(4.21), "4.2 s"),
        (text.duration(59.6), "1 min 0 s"),
        (text.duration(4330), "1 h 12 min"),
        (text.short("a long name indeed", 8), "a long …"),
    ],
)
def test_numbers_as_text(shown: str, expected: str) -> None:
    assert shown.replace("\u202f", " ") == expected


def test_values_off_a_scale_that_are_below_zero_are_drawn_too() -> None:
    """A regression's NLL may begin below zero and end above it."""
    scale, cut = settled([[-6.0, -2.0, 0.02, 0.1, 0.3, 0.5]], per_cent=False, bottom=200)
    assert cut
    assert math.isfinite(scale(-6.0))
