"""How sure to be: the calibration temperature that suits given predictions, of classes and of numbers, and what it changes."""

from __future__ import annotations

import math

import pytest
import torch
from scenarios import classification, regression
from scipy.optimize import minimize_scalar

import bpfed
from bpfed.engine.evaluate import evaluate_clients
from bpfed.inference.calibration import common_scale_factor, common_temperature, squared_errors
from bpfed.inference.predictive import tempered
from bpfed.methods import BPFed, FedAvg
from bpfed.runs.pilot import common

pytestmark = pytest.mark.usefixtures("untraced")
TINY = {"rounds": 2, "epochs": 1, "batch": 5, "eval_draws": 3, "progress": False}


def labels_at(calibration_temperature: float, seed: int = 0, examples: int = 4000):
    """Probabilities, and labels that are drawn from what they are at a calibration temperature."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(examples, 4, generator=g).mul(2.0).softmax(1)
    return probs, torch.multinomial(tempered(probs, calibration_temperature), 1, generator=g).squeeze(1)


@pytest.mark.parametrize("calibration_temperature", [0.5, 1.0, 1.7])
def test_the_calibration_temperature_behind_labels_is_found(calibration_temperature):
    probs, y = labels_at(calibration_temperature)
    found = common_temperature(probs, y)
    assert found == pytest.approx(calibration_temperature, rel=0.08)
    nll = minimize_scalar(
        lambda t: -tempered(probs, t).gather(1, y[:, None]).log().mean().item(), bounds=(0.2, 4), method="bounded"
    )
    assert found == pytest.approx(nll.x, rel=0.01)


def test_a_calibration_temperature_is_that_of_every_prediction():
    data = classification(sizes=(30, 40))
    hard, soft = (bpfed.fit(BPFed(), data, calibration_temperature=s, **TINY) for s in (1.0, 2.0))
    x, y = data.test.client(0)
    at_one, at_two = (run.client(data.clients[0]).predict(x) for run in (hard, soft))
    assert torch.allclose(at_two.probs, tempered(at_one.probs, 2.0))
    assert torch.allclose(at_two.entropy, torch.special.entr(at_two.probs).sum(-1), atol=1e-6)
    assert at_two.raw is None
    own = -at_two.probs.gather(1, y[:, None]).log().mean().item()
    assert soft.evaluation[0]["nll"].clients[0] == pytest.approx(own, rel=1e-5)
    with_labels = [run.adapt(x, y, steps=3).predict(x).probs for run in (hard, soft)]
    assert torch.allclose(with_labels[1], tempered(with_labels[0], 2.0), atol=1e-6)


def test_sets_are_calibrated_at_the_calibration_temperature_they_are_made_with():
    data = classification(sizes=(60, 60))
    run = bpfed.fit(BPFed(), data, calibration_temperature=0.6, calibration=0.4, **TINY)
    x, y = run.data.calibration.client(0)
    made = run.client(data.clients[0]).predict(x)
    right = 1.0 - made.probs.gather(1, y[:, None]).squeeze(1)
    assert torch.allclose(made.scores.scores, right.sort().values, atol=1e-6)


def test_what_a_test_would_prefer_is_told_and_not_used():
    run = bpfed.fit(FedAvg(), classification(sizes=(30, 40)), **TINY)
    told = run.detail()["fitted_temperature"]
    assert told > 0.0
    assert run.federation.calibration_temperature == 1.0
    run.federation.learnt_temperature = told
    better = evaluate_clients(run.federation)[0]["nll"].pooled
    assert better <= run.evaluation[0]["nll"].pooled


@pytest.mark.parametrize(
    ("calibration_temperature", "way"),
    [
        (1.19, "1.19 (above 1: less sure than the model was trained to be)"),
        (0.8, "0.80 (below 1: surer than the model was trained to be)"),
        (0.998, "1.00 (1: as sure as the model was trained to be)"),
    ],
)
def test_which_way_a_calibration_temperature_goes_is_said(calibration_temperature, way):
    run = bpfed.fit(FedAvg(), classification(), calibration_temperature=calibration_temperature, **TINY)
    number, words = way.split(" ", 1)
    assert run.summary().splitlines()[-1].split(None, 3) == ["calibration", "temperature", number, words]
    assert run.record().calibration_words == f"Predictions are given with a calibration temperature of {way}."


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_the_calibration_temperature_behind_numbers_is_found(factor):
    g = torch.Generator().manual_seed(0)
    mean, scale = torch.randn(4000, generator=g), torch.rand(4000, generator=g) + 0.1
    y = mean + factor * scale * torch.randn(4000, generator=g)
    squares = squared_errors(mean, scale, y)
    found = common_scale_factor(squares)
    assert found == pytest.approx(factor, rel=0.05)

    def loss(width):
        return (squares / (2.0 * width**2) + math.log(width)).sum().item() + 5.0 * (1.0 / width + math.log(width))

    assert found == pytest.approx(minimize_scalar(loss, bounds=(0.1, 9), method="bounded").x, rel=1e-4)


def test_few_numbers_hardly_move_a_calibration_temperature_and_one_far_off_is_one_example():
    assert common_scale_factor(torch.zeros(0)) == 1.0
    assert common_scale_factor(torch.zeros(2)) == pytest.approx(5 / 7)  # a prior of five examples
    at = torch.zeros(100)
    wild = at.index_fill(0, torch.tensor([0]), 1e12)
    assert common_scale_factor(squared_errors(at, at + 1.0, wild)) == common_scale_factor(
        squared_errors(at, at + 1.0, wild.sqrt())
    )


def test_a_calibration_temperature_is_the_factor_of_every_predicted_deviation():
    data = regression(sizes=(30, 40))
    hard, soft = (bpfed.fit(BPFed(), data, calibration_temperature=s, **TINY) for s in (1.0, 2.0))
    x, _ = data.test.client(0)
    at_one, at_two = (run.client(data.clients[0]).predict(x) for run in (hard, soft))
    torch.testing.assert_close(at_two.mean, at_one.mean)
    torch.testing.assert_close(at_two.scale, 2.0 * at_one.scale)
    torch.testing.assert_close(at_two.epistemic, 4.0 * at_one.epistemic)
    scores = [run.evaluation[0] for run in (hard, soft)]
    assert scores[0]["rmse"].pooled == scores[1]["rmse"].pooled
    assert scores[0]["nll"].pooled != scores[1]["nll"].pooled


def test_what_several_cuts_agree_on_is_a_calibration_temperature_that_may_be() -> None:
    assert common([0.5, 2.0]) == pytest.approx(1.0)
    assert common([1e-6]) == 0.01
    assert common([1e9, 1e9]) == 100.0
