"""Scores of numbers against hand-made cases and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from predictions import offsets_of
from torch import Tensor

from bpfed.metrics import evaluate_regression


def gaussian_nll(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(mean, scale).log_prob(y)


def test_regression_by_hand() -> None:
    mean, scale, y = torch.zeros(4), torch.ones(4), torch.tensor([0.0, 0.5, 1.0, -3.0])
    result = evaluate_regression(mean, scale, gaussian_nll(mean, scale, y), y, offsets_of(2, 2))
    assert result["rmse"].pooled == pytest.approx(math.sqrt((0.25 + 1 + 9) / 4))
    assert result["rmse"].clients == pytest.approx([math.sqrt(0.125), math.sqrt(5)])
    assert result["nll"].pooled == pytest.approx(float(gaussian_nll(mean, scale, y).mean()))
    # Smallest intervals that hold the targets: 0, 0.383, 0.683 and 0.997.
    nominal_levels = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    observed = [0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75]
    assert result.reliability.confidence == pytest.approx(nominal_levels)
    assert result.reliability.accuracy == pytest.approx(observed)
    assert result.reliability.count == [4] * 10
    assert result["ece"].pooled == pytest.approx(np.mean(np.abs(np.subtract(nominal_levels, observed))))
    assert list(result.record()) == ["rmse", "nll", "ece"]
    baseline = torch.tensor([1.0, 1.0, 0.0, 0.0])
    result = evaluate_regression(mean, scale, gaussian_nll(mean, scale, y), y, offsets_of(2, 0, 2), baseline=baseline)
    assert result["baseline"].clients == pytest.approx([math.sqrt(0.625), math.nan, math.sqrt(5)], nan_ok=True)
    assert result["baseline"].pooled == pytest.approx(math.sqrt((1 + 0.25 + 1 + 9) / 4))
    assert result["baseline"].worst == pytest.approx(math.sqrt(5))


def test_regression_floor_is_the_mean_of_calibrated_predictions() -> None:
    n, repeats = 30, 3000
    g = torch.Generator().manual_seed(0)
    mean, scale = torch.randn(n * repeats, generator=g), torch.rand(n * repeats, generator=g) + 0.1
    y = mean + scale * torch.randn(n * repeats, generator=g)
    result = evaluate_regression(mean, scale, gaussian_nll(mean, scale, y), y, offsets_of(*[n] * repeats))
    assert result.ece_floor.mean == pytest.approx(result["ece"].mean, rel=0.02)
    assert result["ece"].pooled < 0.005
    tight = evaluate_regression(mean, scale / 3, gaussian_nll(mean, scale, y), y, offsets_of(*[n] * repeats))
    assert tight["ece"].pooled > 0.2


def test_regression_with_no_spread_and_empty_clients() -> None:
    y = torch.tensor([1.0, 2.0])
    result = evaluate_regression(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.zeros(2), y, offsets_of(0, 1, 1))
    assert math.isnan(result["rmse"].clients[0])
    assert result["rmse"].clients[1:].tolist() == [0, 2]
    assert result.reliability.accuracy == [0.5] * 10
