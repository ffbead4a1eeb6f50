"""Scores of classes against hand-made cases, scikit-learn, torchmetrics and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import METRICS, federations, made, offsets_of
from scipy.stats import binom
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from bpfed.metrics import aurc, evaluate, evaluation


def test_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    result = evaluate(probs, torch.tensor([0, 1, 1]), offsets_of(2, 1))
    assert result["accuracy"].pooled == pytest.approx(2 / 3)
    assert result["accuracy"].mean == pytest.approx(0.75)
    assert result["accuracy"].worst == pytest.approx(0.5)
    assert result["accuracy"].clients.tolist() == [0.5, 1.0]
    assert result["nll"].pooled == pytest.approx(-(math.log(0.9) + math.log(0.2) + math.log(0.7)) / 3)
    assert result["nll"].worst == pytest.approx(-(math.log(0.9) + math.log(0.2)) / 2)
    assert result["brier"].clients == pytest.approx([(0.02 + 1.28) / 2, 0.18])
    assert result["ece"].pooled == pytest.approx((0.1 + 0.8 + 0.3) / 3)
    assert result["ece"].clients == pytest.approx([0.45, 0.3])
    assert result["mce"].pooled == pytest.approx(0.8)
    assert result["mce"].clients == pytest.approx([0.8, 0.3])
    # One example of confidence c is off by 1 - c with chance c and by c with chance 1 - c.
    assert result.ece_floor.clients == pytest.approx([(0.18 + 0.32) / 2, 0.42])
    assert result.reliability.count == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert result.reliability.confidence[7:] == pytest.approx([0.7, 0.8, 0.9])
    assert result.reliability.accuracy[7:] == [1.0, 0.0, 1.0]
    assert result.reliability.accuracy[0] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [10, 15])
def test_a_confidence_on_an_edge_is_in_the_bin_above_and_one_is_in_the_last(dtype: torch.dtype, bins: int) -> None:
    tops = [k / bins for k in range(bins // 2 + 1, bins + 1)]
    probs = torch.tensor([[t, 1 - t] for t in tops], dtype=torch.float64).to(dtype)
    count = evaluate(probs, torch.zeros(len(tops), dtype=torch.long), offsets_of(len(tops)), bins).reliability.count
    assert count == [0] * (bins // 2 + 1) + [1] * (bins - bins // 2 - 2) + [2]


def test_certain_and_wrong_is_finite_in_float32() -> None:
    result = evaluate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), offsets_of(1))
    assert result["nll"].pooled == pytest.approx(12 * math.log(10))
    assert result["brier"].pooled == 2
    assert result["ece"].pooled == result["mce"].pooled == 1
    assert result.ece_floor.pooled == 0


@settings(max_examples=30, deadline=None)
@given(federations, st.sampled_from([5, 10, 15]))
def test_every_client_alone_agrees_with_scikit_learn_and_torchmetrics(
    federation: tuple[int, list[int], int, float], bins: int
) -> None:
    seed, sizes, classes, sharpness = federation
    probs, y, offsets = made(seed, sizes, classes, sharpness)
    # Above: torchmetrics has a hidden bin for 1.0. Below: scikit-learn clips a probability elsewhere than we do.
    probs = probs.clamp(1e-9, 1 - 1e-6)
    result = evaluate(probs, y, offsets, bins)
    parts = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
    for i, part in [*enumerate(parts), (-1, slice(None))]:
        mine = {m: result[m].pooled if i < 0 else result[m].clients[i] for m in METRICS}
        p, t = probs[part], y[part]
        if not len(t):
            assert all(math.isnan(v) for v in mine.values())
            continue
        labels = list(range(classes))
        rows = p.double().numpy() / p.double().sum(1, keepdim=True).numpy()
        assert mine["accuracy"] == pytest.approx(accuracy_score(t, p.argmax(1)))
        assert mine["nll"] == pytest.approx(log_loss(t, rows, labels=labels), abs=2e-5)
        one = {"scale_by_half": False, "labels": labels}
        target = rows[:, 1] if classes == 2 else rows
        assert mine["brier"] == pytest.approx(brier_score_loss(t, target, **one), abs=2e-5)
        for mine_is, norm in (("ece", "l1"), ("mce", "max")):
            theirs = multiclass_calibration_error(p, t, classes, n_bins=bins, norm=norm)
            assert mine[mine_is] == pytest.approx(float(theirs), abs=2e-5)


@settings(max_examples=40, deadline=None)
@given(federations)
def test_the_order_of_examples_within_a_client_does_not_matter(federation: tuple[int, list[int], int, float]) -> None:
    seed, sizes, classes, sharpness = federation
    probs, y, offsets = made(seed, sizes, classes, sharpness)
    g = torch.Generator().manual_seed(seed)
    order = torch.cat([int(offsets[i]) + torch.randperm(n, generator=g) for i, n in enumerate(sizes)])
    before, after = evaluate(probs, y, offsets), evaluate(probs[order], y[order], offsets)
    for metric in METRICS:
        np.testing.assert_allclose(after[metric].clients, before[metric].clients, atol=1e-12)
        assert after[metric].pooled == pytest.approx(before[metric].pooled, abs=1e-12, nan_ok=True)
    np.testing.assert_allclose(after.ece_floor.clients, before.ece_floor.clients, atol=1e-12)


def test_the_order_of_clients_only_reorders() -> None:
    probs, y, _ = made(3, [30], 4)
    one = evaluate(probs, y, offsets_of(5, 0, 24, 1))
    index = torch.cat([torch.arange(29, 30), torch.arange(5, 29), torch.arange(0, 5)])
    two = evaluate(probs[index], y[index], offsets_of(1, 24, 5, 0))
    for metric in METRICS:
        np.testing.assert_allclose(two[metric].clients, one[metric].clients[[3, 2, 0, 1]], atol=1e-12)
        for part in ("pooled", "mean", "worst"):
            assert getattr(two[metric], part) == pytest.approx(getattr(one[metric], part), abs=1e-12)


def test_clients_without_test_examples_count_nowhere() -> None:
    probs, y, offsets = made(5, [0, 20, 0, 7, 1, 0], 3)
    with_empty = evaluate(probs, y, offsets)
    without = evaluate(probs, y, offsets_of(20, 7, 1))
    assert with_empty.record() == without.record()
    assert with_empty.sizes.tolist() == [0, 20, 0, 7, 1, 0]
    assert with_empty.ece_floor.record() == without.ece_floor.record()


def test_pooled_is_weighted_by_examples_and_mean_is_not() -> None:
    probs, y, offsets = made(6, [90, 10], 3, 0.5)
    for metric in ("accuracy", "nll", "brier"):
        score = evaluate(probs, y, offsets)[metric]
        assert score.pooled == pytest.approx(np.average(score.clients, weights=[90, 10]))
        assert score.mean == pytest.approx(score.clients.mean())
    assert evaluate(probs, y, offsets)["accuracy"].worst == evaluate(probs, y, offsets)["accuracy"].clients.min()
    assert evaluate(probs, y, offsets)["brier"].worst == evaluate(probs, y, offsets)["brier"].clients.max()


def test_nothing_to_test_gives_no_numbers() -> None:
    result = evaluate(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), offsets_of(0, 0))
    assert result.record()["ece"] == {"pooled": None, "mean": None, "worst": None}
    assert result.reliability.count == [0] * 10


def test_a_client_that_diverged_shows_and_does_not_spoil_the_others() -> None:
    probs, y, offsets = made(1, [4, 4], 3)
    probs[:4] = math.nan
    result = evaluate(probs, y, offsets)
    assert math.isnan(result["nll"].clients[0])
    assert result["accuracy"].clients[0] == 0
    assert math.isfinite(result["nll"].clients[1])
    assert result.record()["nll"] == {"pooled": None, "mean": None, "worst": None}


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[E, K\]"):
        evaluate(torch.rand(3, 2), torch.zeros(4, dtype=torch.long), offsets_of(3))


# --- the floor of ECE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bins", "n", "per_cent"),
    [(10, 25, 11.6), (10, 50, 8.1), (10, 250, 3.8), (10, 1000, 1.9), (10, 10_000, 0.6), (15, 50, 10.0), (15, 500, 3.2)],
)
def test_floor_agrees_with_the_published_simulation(bins: int, n: int, per_cent: float) -> None:
    """400 repeats of perfectly calibrated predictions with confidence 1 - Beta(1, 2.2)/2, as in the survey."""
    repeats = 400 if n < 1000 else 40
    top = 1 - 0.5 * torch.from_numpy(np.random.default_rng(0).beta(1, 2.2, n * repeats))
    probs = torch.stack([top, 1 - top], 1)
    result = evaluate(probs, torch.zeros(n * repeats, dtype=torch.long), offsets_of(*[n] * repeats), bins)
    # The survey's own standard error is 2 % of its value, and it gives one decimal.
    assert 100 * result.ece_floor.mean == pytest.approx(per_cent, rel=0.04, abs=0.06)


@pytest.mark.parametrize("n", [1, 5, 50, 400])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 6.0])
def test_floor_agrees_with_labels_drawn_from_the_confidences(n: int, sharpness: float) -> None:
    probs, _, _ = made(n, [n], 4, sharpness)
    repeats = 2000
    drawn = torch.multinomial(probs, repeats, replacement=True, generator=torch.Generator().manual_seed(0)).T.flatten()
    result = evaluate(probs.repeat(repeats, 1), drawn, offsets_of(*[n] * repeats))
    error = result["ece"].clients.std() / math.sqrt(repeats)
    assert result.ece_floor.clients[0] == pytest.approx(result["ece"].mean, rel=0.015, abs=4 * error)


def test_binomial_deviation_is_exact() -> None:
    for n in (0, 1, 2, 7, 50, 3000):
        for p in (0.0, 1e-9, 0.2, 0.5, 0.95, 1 - 1e-12, 1.0):
            exact = float(np.sum(np.abs(np.arange(n + 1) - n * p) * binom.pmf(np.arange(n + 1), n, p)))
            mine = evaluation.binomial_deviation(*torch.tensor([n, p], dtype=torch.float64))
            assert float(mine) == pytest.approx(exact, rel=1e-6, abs=1e-12)


# --- risk and coverage ------------------------------------------------------------------------------------------------


def test_aurc_by_hand_and_with_ties() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    assert float(aurc(probs, torch.tensor([0, 1, 0]))) == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)
    tied = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.7, 0.3]])
    assert float(aurc(tied, torch.tensor([0, 1, 0]))) == pytest.approx((0 + 0.25 + 1 / 3) / 3)
    assert float(aurc(tied, torch.tensor([0, 0, 1]))) == pytest.approx((0 + 0.25 + 1 / 3) / 3)
