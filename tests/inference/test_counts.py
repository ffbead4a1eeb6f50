"""Counts against closed forms and scipy's Poisson distribution, and on a user's path from a table to a report."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import scenarios
import torch
from command import Command
from scipy.stats import poisson
from sklearn.metrics import mean_poisson_deviance

import bpfed
from bpfed._util.errors import UserError
from bpfed.inference.counts import Counted, Counts, Poisson, deviance, evaluate_counts, predict_counts
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.predictive import GaussianPredictive
from bpfed.metrics.evaluation import nominal_levels
from bpfed.nn.model import Model

RATES, WEIGHTS = np.array([0.3, 2.0, 40.0]), np.array([0.5, 0.3, 0.2])
QUICK = {"rounds": 2, "epochs": 2, "batch": 50, "hidden": 4, "eval_draws": 3, "compile": "off", "device": "cpu"}


def mixture(examples: int) -> Counted:
    rates, weights = (torch.from_numpy(part).expand(examples, 3) for part in (RATES, WEIGHTS))
    return Counted.of(rates, weights)


def test_a_mixture_has_scipys_probabilities_and_quantiles() -> None:
    y = np.array([0, 1, 5, 38, 90])
    found = mixture(len(y))
    pmf = (WEIGHTS * poisson.pmf(y[:, None], RATES)).sum(1)
    cdf = (WEIGHTS * poisson.cdf(y[:, None], RATES)).sum(1)
    np.testing.assert_allclose(found.log_prob(torch.from_numpy(y)).exp(), pmf, rtol=1e-10)
    np.testing.assert_allclose(found.cdf(torch.from_numpy(y)), cdf, rtol=1e-10)
    assert float(found.cdf(torch.full((5,), -1.0))[0]) == 0.0
    mean = WEIGHTS @ RATES
    assert float(found.mean[0]) == pytest.approx(mean)
    assert float(found.scale[0] ** 2) == pytest.approx(mean + WEIGHTS @ (RATES - mean) ** 2)
    grid = (WEIGHTS * poisson.cdf(np.arange(200)[:, None], RATES)).sum(1)
    for level in (0.05, 0.31, 0.5, 0.95, 0.999):
        assert float(found.quantile(level)[0]) == np.argmax(grid >= level)


def test_likelihood_and_deviance_are_scipys_and_scikit_learns() -> None:
    y, outputs = torch.tensor([0.0, 1.0, 7.0, 30.0]), torch.tensor([[-2.0], [0.5], [2.0], [3.0]])
    rates = outputs[:, 0].exp().numpy()
    np.testing.assert_allclose(Poisson().nll(outputs, y, {}), -poisson.logpmf(y.numpy(), rates), rtol=1e-5)
    assert float(deviance(y, torch.from_numpy(rates)).mean()) == pytest.approx(mean_poisson_deviance(y, rates))


def test_a_single_pass_is_the_log_normal_mixture_and_draws_come_near_to_it() -> None:
    """A linear network with one input of 1: the output is N(m, s²), the mean rate exp(m + s²/2)."""
    model = Model.of(torch.nn.Linear(1, 1, bias=False), Poisson(), torch.ones(2, 1))
    m, s = 0.7, 0.4
    predictive = GaussianPredictive(Gaussian(torch.full((1, 1), m), torch.full((1, 1), s)))
    x, key = torch.ones(1, 1, 1), torch.tensor([[1, 2]], dtype=torch.int32)
    exact = predict_counts(model, predictive, x, key, 0, "single-pass")
    assert float(exact.mean) == pytest.approx(math.exp(m + s * s / 2), rel=1e-6)
    assert float(exact.epistemic) == pytest.approx(math.expm1(s * s) * math.exp(2 * m + s * s), rel=1e-5)
    drawn = predict_counts(model, predictive, x, key, 4000)
    assert float(drawn.mean) == pytest.approx(float(exact.mean), rel=0.03)
    assert float(drawn.cdf(torch.ones(1, 1))) == pytest.approx(float(exact.cdf(torch.ones(1, 1))), abs=0.01)


def test_calibrated_counts_have_no_calibration_error_and_a_dispersion_of_one() -> None:
    """Every count of a small rate, weighted by its probability: what is expected of calibrated predictions."""
    rate, y = 1.3, np.arange(60)
    shares = poisson.pmf(y, rate)

    def sums(k: int):
        part = torch.tensor([float(k)])
        parts = (poisson.logpmf(k, rate), poisson.cdf(k - 1, rate), poisson.cdf(k, rate))
        nll, below, upto = (torch.tensor([v]) for v in (-parts[0], *parts[1:]))
        mean = torch.tensor([rate])
        return evaluate_counts(mean, mean.sqrt(), nll, below, upto, part, torch.tensor([0, 1]), 10, mean, {}).sums

    found = [sums(k).further for k in y]
    for k, level in enumerate(nominal_levels(10)):
        held = sum(share * float(each[f"inside_{k}"]) for share, each in zip(shares, found, strict=True))
        assert held == pytest.approx(float(level), abs=1e-9)
    assert sum(w * float(each["dispersion"]) for w, each in zip(shares, found, strict=True)) == pytest.approx(1.0)


def test_what_is_no_count_or_cannot_be_done_with_counts_is_refused() -> None:
    x, ids = torch.randn(6, 2), [0, 1] * 3
    for wrong in (-1.0, 0.5):
        with pytest.raises(UserError, match=f"the target {wrong:g} in its training data, but counts are whole numbers"):
            bpfed.data.from_arrays(x, [wrong, wrong, 1, 2, 3, 4], ids, task="counts", test=[False, False] + [True] * 4)
    data = scenarios.counts()
    assert not Counts().doubt(torch.tensor([3.0, 9.0]))
    assert "mean of 60, and training starts at a rate of 1" in Counts().doubt(torch.tensor([20.0, 100.0]))
    with pytest.raises(UserError, match="which counts do not have"):
        bpfed.fit("fedper", data, calibrate="pilot:1", progress=False, **QUICK)
    with pytest.raises(UserError, match="bpfed-linear is for classes and for numbers"):
        bpfed.fit("bpfed-linear", data, progress=False, rounds=1)
    with pytest.raises(UserError, match="scaling fits a temperature"):
        bpfed.fit("fedper", data, scaling="client", calibration=0.2, progress=False, **QUICK)


def test_rates_are_learnt_and_intervals_hold_whole_numbers() -> None:
    data = scenarios.counts(sizes=(200, 200), test=100)
    settings = {**QUICK, "rounds": 8, "epochs": 3, "hidden": 20, "calibration": 0.2, "baselines": "off"}
    run = bpfed.fit(bpfed.methods.FedPer(lr=0.02), data, progress=False, **settings)
    last = run.history[-1]
    assert last["deviance"]["pooled"] < 0.7 * last["mean_deviance"]["pooled"]
    found = run.clients()[0].predict(data.test.client(0)[0])
    assert isinstance(found, Counted)
    low, high = found.interval(0.9)
    assert bool(((low == low.floor()) & (low >= 0) & (high > low)).all())
    assert last["coverage"]["pooled"] > 0.8


def test_a_table_of_counts_is_trained_reported_and_predicted(command: Command, tmp_path) -> None:
    data, tables, out = scenarios.counts(sizes=(60, 60, 60)), tmp_path / "tables", tmp_path / "run"
    tables.mkdir()
    for name, (x, y) in zip("abc", map(data.train.client, range(3)), strict=True):
        rows = [[*inputs, int(count)] for inputs, count in zip(x.tolist(), y, strict=True)]
        with (tables / f"{name}.csv").open("w") as file:
            csv.writer(file).writerows([["u", "v", "w", "visits"], *rows])
    quick = [
        "--rounds",
        "2",
        "--epochs",
        "2",
        "--hidden",
        "4",
        "--calibration",
        "0.3",
        "--method",
        "fedper",
        "--device",
        "cpu",
        "--quiet",
    ]
    asked = ("--data", f"folder:{tables}", "--target", "visits", "--task", "counts")
    assert "Deviance" in command.ok("run", *asked, *quick, "--out", out).out
    page = (out / "report.html").read_text()
    assert all(word in page for word in ("Deviance", "MAE", "Dispersion", "calibrated 90 % intervals"))
    assert "standard deviations" not in page
    told = command.ok("predict", out, "--client", "a", "--input", tables / "b.csv").out
    header, *rows = csv.reader(told.splitlines())
    assert header[:8] == ["mean", "sd", "epistemic", "aleatoric", "q(0.05)", "q(0.95)", "low(0.9)", "high(0.9)"]
    assert len(rows) == 60
    assert all(int(row[4]) <= int(row[5]) for row in rows)
    assert (
        "--abstain needs"
        in command("predict", out, "--client", "a", "--input", tables / "b.csv", "--abstain", "0.9").sentence
    )
