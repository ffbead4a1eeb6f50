"""What a report says beyond metrics: counts that add up, thresholds and abstention as one would compute them by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from predictions import made

from bpfed.metrics import aurc
from bpfed.metrics.diagnostics import gains, losses_of_classes, of_classes, of_numbers


def test_confusions_add_up_and_agree_with_accuracy() -> None:
    probs, y, offsets = made(0, [30, 12, 25], 3)
    shares = torch.full((3, 3), 1 / 3)
    found = of_classes(probs, y, offsets, shares)
    each = np.array(found["clients"]["confusion"])
    assert (each.sum(0) == np.array(found["confusion"])).all()
    assert each.sum((1, 2)).tolist() == [30, 12, 25]
    assert np.trace(each.sum(0)) == int((probs.argmax(1) == y).sum())
    assert "thresholds" not in found  # of three classes there is no second one


def test_thresholds_count_what_is_at_or_above_them() -> None:
    probs, y, offsets = made(1, [40, 20], 2)
    found = of_classes(probs, y, offsets, torch.full((2, 2), 0.5))["thresholds"]
    for t, true, false in zip(found["at"], found["true"], found["false"], strict=True):
        above = probs[:, 1] >= t
        assert (true, false) == (int((above & (y == 1)).sum()), int((above & (y == 0)).sum()))
    assert found["positive"] == int(y.sum())


def test_all_answered_is_the_error_rate_and_the_curve_has_the_area_of_aurc() -> None:
    probs, y, offsets = made(2, [400], 3)
    found = of_classes(probs, y, offsets, torch.full((1, 3), 1 / 3))["risk"]
    assert found["loss"][-1] == pytest.approx(float((probs.argmax(1) != y).double().mean()), abs=1e-4)
    assert np.mean(found["loss"]) == pytest.approx(float(aurc(probs, y)), abs=0.03)


def test_equally_sure_examples_share_their_errors() -> None:
    probs = torch.tensor([[0.8, 0.2]] * 10)
    y = torch.tensor([0] * 6 + [1] * 4)
    orders = [torch.arange(10), torch.arange(9, -1, -1)]
    found = [of_classes(probs[o], y[o], torch.tensor([0, 10]), torch.full((1, 2), 0.5))["risk"]["loss"] for o in orders]
    assert found[0] == found[1] == [0.4] * 20


def test_gains_are_paired_means_with_their_standard_errors() -> None:
    probs, y, offsets = made(3, [50, 9], 2)
    own, other = losses_of_classes(probs, y), torch.full((59,), 0.7, dtype=torch.float64)
    owner = torch.tensor([0] * 50 + [1] * 9)
    found = gains(own, other, owner, 2)
    for client in (0, 1):
        apart = (other - own)[owner == client].numpy()
        assert found["gain"][client] == pytest.approx(apart.mean(), rel=1e-3)
        assert found["gain_se"][client] == pytest.approx(apart.std(ddof=1) / np.sqrt(len(apart)), rel=1e-3)
    assert offsets.tolist() == [0, 50, 59]


def test_one_example_has_no_standard_error() -> None:
    found = gains(torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1)
    assert found["gain"] == [-1.0]
    assert found["gain_se"] == [None]


def test_groups_of_numbers_hold_every_example_and_rise() -> None:
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(87, generator=g)
    y = mean + 0.1 * torch.randn(87, generator=g)
    found = of_numbers(mean, torch.ones(87), y, torch.tensor([0, 40, 87]), torch.zeros(87))
    assert sum(group[0] for group in found["groups"]) == 87
    predicted = [group[1] for group in found["groups"]]
    assert predicted == sorted(predicted)
    assert all(abs(group[2] - group[1]) < 5 * group[3] + 0.2 for group in found["groups"])
