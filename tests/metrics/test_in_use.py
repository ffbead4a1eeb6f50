"""What tells who acts on predictions: when to abstain, which sets to trust, whom to rank first."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import federations, made, offsets_of
from sklearn.metrics import recall_score, roc_auc_score

from bpfed.metrics import aurc, evaluate, evaluate_regression, ood_auroc


@settings(max_examples=40, deadline=None)
@given(federations, st.booleans())
def test_risk_coverage_of_each_client_is_that_of_its_examples_alone(case, coarse) -> None:
    seed, sizes, classes, sharpness = case
    probs, y, offsets = made(seed, sizes, classes, sharpness)
    if coarse:  # many ties
        probs = (probs * 4).round() / 4
    result = evaluate(probs, y, offsets)
    for i, n in enumerate(sizes):
        own = slice(int(offsets[i]), int(offsets[i + 1]))
        assert result["aurc"].clients[i] == pytest.approx(
            aurc(probs[own], y[own]).item() if n else math.nan, nan_ok=True
        )
    if sum(sizes):
        assert result["aurc"].pooled == pytest.approx(aurc(probs, y).item())


@given(st.integers(0, 2**31), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.booleans())
def test_two_classes_have_an_auroc_and_it_is_scikit_learns(seed, sizes, coarse) -> None:
    probs, y, offsets = made(seed, sizes, 2, 1.0)
    if coarse:  # many ties
        probs = torch.stack([1 - (probs[:, 1] * 4).round() / 4, (probs[:, 1] * 4).round() / 4], 1)
    found = evaluate(probs, y, offsets)["auroc"]
    parts = [slice(a, b) for a, b in itertools.pairwise(offsets.tolist())]
    for own, part in zip([*found.clients, found.pooled], [*parts, slice(None)], strict=True):
        if len(y[part].unique()) < 2:
            assert math.isnan(own)
        else:
            assert own == pytest.approx(roc_auc_score(y[part], probs[part, 1]))


@given(st.integers(0, 2**31), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_two_classes_have_a_sensitivity_and_a_specificity_and_they_are_scikit_learns(seed, sizes) -> None:
    probs, y, offsets = made(seed, sizes, 2, 1.0)
    result = evaluate(probs, y, offsets)
    parts = [slice(a, b) for a, b in itertools.pairwise(offsets.tolist())]
    for name, label in (("sensitivity", 1), ("specificity", 0)):
        found = result[name]
        for own, part in zip([*found.clients, found.pooled], [*parts, slice(None)], strict=True):
            if (y[part] == label).any():
                assert own == pytest.approx(recall_score(y[part], probs[part].argmax(1), pos_label=label))
            else:
                assert math.isnan(own)
        assert found.worst == pytest.approx(
            np.nanmin([*found.clients, 2.0]) if (y == label).any() else math.nan, nan_ok=True
        )
    assert "sensitivity" not in evaluate(*made(seed, sizes, 3, 1.0)).more


def test_without_a_model_the_classes_own_shares_are_predicted() -> None:
    probs, y = torch.full((5, 2), 0.5), torch.tensor([0, 0, 1, 1, 1])
    shares = torch.tensor([[0.75, 0.25], [0.4, 0.6]])
    found = evaluate(probs, y, offsets_of(3, 2), shares=shares)
    assert found["majority"].clients.tolist() == pytest.approx([2 / 3, 1.0])
    assert found["majority"].worst == pytest.approx(2 / 3)
    nll = [-(2 * math.log(0.75) + math.log(0.25)) / 3, -math.log(0.6)]
    assert found["shares_nll"].clients.tolist() == pytest.approx(nll)
    assert found["shares_nll"].pooled == pytest.approx((3 * nll[0] + 2 * nll[1]) / 5)
    assert "majority" not in evaluate(probs, y, offsets_of(3, 2)).more


def test_abstention_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.95, 0.05], [0.3, 0.7], [0.89, 0.11], [0.6, 0.4]])
    result = evaluate(probs, torch.tensor([0, 1, 1, 0, 0]), offsets_of(3, 1, 1))
    assert result["abstained"].clients == pytest.approx([1 / 3, 1.0, 1.0])
    assert result["abstained"].pooled == pytest.approx(3 / 5)
    assert result["answered_accuracy"].clients == pytest.approx([0.5, math.nan, math.nan], nan_ok=True)
    assert result["answered_accuracy"].record() == {"pooled": 0.5, "mean": 0.5, "worst": 0.5}
    assert evaluate(probs.double(), torch.tensor([0, 1, 1, 0, 0]), offsets_of(5))["abstained"].pooled < 1


def test_sets_and_intervals_are_counted() -> None:
    probs, y, offsets = made(0, [4, 6], 3)
    sets = torch.zeros(10, 3, dtype=torch.bool)
    sets[torch.arange(8), y[:8]] = True
    sets[:4] = True
    result = evaluate(probs, y, offsets, sets=sets)
    assert result["coverage"].clients == pytest.approx([1.0, 4 / 6])
    assert result["coverage"].worst == pytest.approx(4 / 6)
    assert result["coverage"].pooled == pytest.approx(0.8)
    assert result["set_size"].clients == pytest.approx([3.0, 4 / 6])
    assert "coverage" not in evaluate(probs, y, offsets).record()
    numbers = torch.randn(10)
    inside = torch.arange(10) < 7
    result = evaluate_regression(numbers, numbers.abs(), numbers, numbers, offsets, inside=inside)
    assert result["coverage"].clients == pytest.approx([1.0, 0.5])
    assert "interval_width" not in result.record()


def test_sets_and_intervals_without_bounds_count_nowhere() -> None:
    probs, y, offsets = made(0, [4, 6, 5], 3)
    bounded = (torch.arange(15) >= 4) & (torch.arange(15) < 10)
    sets = torch.ones(15, 3, dtype=torch.bool)
    sets[torch.arange(8, 10), y[8:10]] = False
    result = evaluate(probs, y, offsets, sets=sets, bounded=bounded)
    assert result["coverage"].clients == pytest.approx([math.nan, 4 / 6, math.nan], nan_ok=True)
    assert result["coverage"].record() == pytest.approx({"pooled": 4 / 6, "mean": 4 / 6, "worst": 4 / 6})
    assert result["set_size"].record() == pytest.approx({"pooled": 16 / 6, "mean": 16 / 6, "worst": 16 / 6})
    numbers = torch.randn(15)
    width = torch.where(bounded, 2.0, math.inf)
    inside = torch.arange(15) != 5
    result = evaluate_regression(
        numbers, numbers.abs(), numbers, numbers, offsets, inside=inside, width=width, bounded=bounded
    )
    assert result["coverage"].clients == pytest.approx([math.nan, 5 / 6, math.nan], nan_ok=True)
    assert result["interval_width"].record() == {"pooled": 2.0, "mean": 2.0, "worst": 2.0}
    none = evaluate(probs, y, offsets, sets=sets, bounded=torch.zeros(15, dtype=torch.bool))
    assert none["coverage"].record() == {"pooled": None, "mean": None, "worst": None}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 6) | st.floats(0, 6), min_size=1, max_size=40),
    st.lists(st.integers(0, 6) | st.floats(0, 6), min_size=1, max_size=40),
)
def test_auroc_is_scikit_learns(inside, outside) -> None:
    expected = roc_auc_score([0] * len(inside) + [1] * len(outside), [*inside, *outside])
    found = ood_auroc(torch.tensor(inside, dtype=torch.float64), torch.tensor(outside, dtype=torch.float64))
    assert found.item() == pytest.approx(expected)
