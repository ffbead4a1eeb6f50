"""Times to an event against closed forms and lifelines, and on a user's path from a table to predictions."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
import scenarios
import torch
from command import Command
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.utils import concordance_index

import bpfed
from bpfed._util.errors import UserError
from bpfed.inference.calibration import Conformal
from bpfed.inference.survival import (
    HAZARD_STEPS,
    SHAPE,
    STEPS,
    ProportionalHazards,
    Survived,
    crossing,
    cumulative_baseline,
    edges,
    log_hazard_baseline,
    time_grid,
)
from bpfed.metrics.survival import brier_curves, concordance, integrated_brier, left_at, product_limit
from bpfed.runs.baselines import baselines, cox

RNG = np.random.default_rng(0)
QUICK = ["--rounds", "3", "--epochs", "2", "--hidden", "4", "--method", "fedper", "--device", "cpu", "--quiet"]


def signed(n: int, ties: bool = True) -> np.ndarray:
    time = np.ceil(RNG.exponential(5.0, n)) if ties else RNG.exponential(5.0, n)
    return np.where(RNG.random(n) < 0.5, time, -time)


def test_with_parameters_at_zero_times_are_exponential_and_with_the_shape_alone_weibull() -> None:
    y, outputs = torch.tensor([0.5, -0.5, 2.0, -3.0]), torch.tensor([[0.3], [0.3], [-1.0], [0.0]])
    eta, time = outputs[:, 0], y.abs()
    found = ProportionalHazards().nll(outputs, y, ProportionalHazards().parameters())
    torch.testing.assert_close(found, eta.exp() * time - torch.where(y > 0, eta, 0.0))
    for shape in (0.6, 1.7):
        parameters = {SHAPE: torch.tensor([math.log(shape)]), HAZARD_STEPS: torch.zeros(STEPS)}
        density = eta + math.log(shape) + (shape - 1.0) * time.log()
        wanted = eta.exp() * time**shape - torch.where(y > 0, density, 0.0)
        torch.testing.assert_close(ProportionalHazards().nll(outputs, y, parameters), wanted)


def test_the_cumulative_hazard_is_the_integral_of_the_hazard() -> None:
    shape, steps = torch.tensor(1.3, dtype=torch.float64), torch.from_numpy(RNG.normal(size=STEPS))
    fine = torch.linspace(2e-3, 4.0, 400_001, dtype=torch.float64)
    hazard = log_hazard_baseline(fine, shape, steps).exp()
    found = cumulative_baseline(fine, shape, steps)
    grown = torch.cumulative_trapezoid(hazard, fine)
    torch.testing.assert_close(found[1:] - found[0], grown, rtol=1e-3, atol=1e-4)
    assert len(edges(steps)) == STEPS


def test_kaplan_meier_and_concordance_are_those_of_lifelines() -> None:
    y = signed(60)
    fitted = KaplanMeierFitter().fit(np.abs(y), y > 0)
    when = np.linspace(0.0, 20.0, 50)
    np.testing.assert_allclose(left_at(product_limit(np.abs(y), y > 0), when), fitted.predict(when), atol=1e-9)
    for n in (2, 3, 40):
        y, risk = signed(n), RNG.integers(0, 8, n).astype(float)
        ordered, compared = concordance(risk, y)
        if compared:
            assert ordered / compared == pytest.approx(concordance_index(np.abs(y), -risk, y > 0))


def test_without_censoring_the_brier_score_is_the_squared_error_and_with_it_the_weights_add_up() -> None:
    when, y = np.linspace(0.0, 8.0, 9), RNG.exponential(5.0, 30)
    survival = RNG.random((30, 9))
    np.testing.assert_allclose(brier_curves(survival, y, when), np.square((y[:, None] > when) - survival))
    # Censored rows: one over the share not yet censored restores the whole sample, so constant errors of 1 average to 1.
    y = signed(4000, ties=False)
    wrong = np.broadcast_to((np.abs(y)[:, None] <= when).astype(float), (len(y), 9))
    np.testing.assert_allclose(brier_curves(wrong, y, when).mean(0), 1.0, atol=1e-6)
    # Ties: at 2 one event comes before one loss, so that the loss is one of the two rows that are left.
    at, share = product_limit(np.array([2.0, 2.0, 3.0]), np.array([False, True, True]), first=False)
    np.testing.assert_allclose(share, [0.5, 0.0])
    assert at.tolist() == [2.0, 3.0]


def test_the_true_curve_has_a_lower_integrated_brier_score_than_kaplan_meier() -> None:
    grid = time_grid().numpy()
    rate = np.exp(RNG.normal(size=500))
    happens, ends = RNG.exponential(1.0 / rate), RNG.exponential(2.0, 500)
    y = np.where(happens <= ends, happens, -ends)
    ours, plain = integrated_brier(np.exp(-rate[:, None] * grid), grid, y, y)
    assert ours.mean() < 0.85 * plain.mean()


def test_medians_and_bounds_are_read_off_the_curve() -> None:
    rate = torch.tensor([0.2, 1.0, 5.0])
    curve = torch.exp(-rate[:, None].double() * time_grid())
    earliness = 1.0 / -torch.linspace(0.005, 0.995, 100).log()
    found = Survived(rate.log(), torch.zeros(3), curve.float(), scores=Conformal(earliness))
    np.testing.assert_allclose(found.median, math.log(2.0) / rate, rtol=2e-2)
    np.testing.assert_allclose(found.at(0.3), torch.exp(-0.3 * rate), rtol=1e-2)
    np.testing.assert_allclose(found.lower_bound(0.9), -math.log(0.905) / rate, rtol=0.1)
    assert math.isinf(float(crossing(torch.ones(1, len(time_grid())), 0.5)))


def test_a_federation_finds_the_hazard_ratios_of_coxs_model() -> None:
    import pandas as pd

    data = scenarios.survival(sizes=(250, 250), test=60)
    method = bpfed.methods.METHODS["bpfed-adaptive"](
        temperature=0.05, prior_scale=5.0, deviation=0.0, head_deviation=0.0, lr=0.03, sigma=False
    )
    run = bpfed.fit(
        method, data, rounds=15, network="linear", members=1, progress=False, baselines="off", device="cpu", batch=50
    )
    x, y = data.train.x.numpy(), data.train.y.numpy()
    frame = pd.DataFrame(x).assign(T=np.abs(y), E=y > 0)
    cox = CoxPHFitter().fit(frame, "T", "E").params_.to_numpy()
    weights = run.federation.model.layout.unflatten(run.federation.shared.weights)
    found = next(v for n, v in weights.items() if n.endswith("weight"))[0].numpy()
    np.testing.assert_allclose(found, cox, atol=0.08)
    last = run.history[-1]
    assert last["ibs"]["pooled"] < last["km_ibs"]["pooled"]
    reference = concordance_index(
        np.abs(data.test.client(0)[1]), -data.test.client(0)[0] @ cox, data.test.client(0)[1] > 0
    )
    assert run.evaluation[0]["c_index"].clients[0] == pytest.approx(reference, abs=0.03)


def table(path, data, client: int) -> None:
    x, y = data.train.client(client)
    with path.open("w") as file:
        rows = [
            [*row, 1000.0 * abs(t), "yes" if t > 0 else "no"] for row, t in zip(x.tolist(), y.tolist(), strict=True)
        ]
        csv.writer(file).writerows([["u", "v", "w", "days", "died"], *rows])


def test_a_table_of_times_is_trained_reported_predicted_and_adapted_to(command: Command, tmp_path) -> None:
    data, tables, out = scenarios.survival(sizes=(80, 80, 40)), tmp_path / "tables", tmp_path / "run"
    tables.mkdir()
    for i, name in enumerate("ab"):
        table(tables / f"{name}.csv", data, i)
    table(tmp_path / "new.csv", data, 2)
    asked = ("--data", f"folder:{tables}", "--target", "days", "--event", "died", "--task", "survival")
    assert "Concordance" in command.ok("run", *asked, *QUICK, "--calibration", "0.3", "--out", out).out
    page = (out / "report.html").read_text()
    assert all(word in page for word in ("Concordance index", "Integrated Brier score", "Kaplan-Meier"))
    told = command.ok("predict", out, "--client", "a", "--input", tables / "b.csv", "--times", "100,2000").out
    header, *rows = csv.reader(told.splitlines())
    assert header[:6] == ["risk", "epistemic", "median", "survival(100)", "survival(2000)", "low(0.9)"]
    assert len(rows) == 80
    assert all(1.0 >= float(row[3]) > float(row[4]) > 0.0 for row in rows)
    assert 100.0 < float(rows[0][2]) < 50_000.0
    assert "client,row,truth" in command.ok("predict", out, "--test").out
    command.ok("adapt", out, "--input", tmp_path / "new.csv", "--name", "new")
    assert "survival(" in command.ok("predict", out, "--client", "new", "--input", tables / "a.csv").out
    for flags, said in (
        (("--target", "days", "--task", "survival"), "name them with --target TIME --event EVENT"),
        (("--target", "days", "--event", "died"), "one is predicted; name one as --target, or use --task survival"),
        (("--target", "days", "--event", "u", "--task", "survival"), "Column 'u' of"),
    ):
        assert said in command("run", "--data", f"folder:{tables}", *flags, *QUICK, "--out", tmp_path / "x").sentence


def test_arrays_of_times_and_events() -> None:
    x, y = torch.randn(8, 2), np.column_stack([np.arange(8.0), [0, 1] * 4])
    data = bpfed.data.from_arrays(x, y, [0, 1] * 4, task="survival", test=[False] * 8)
    assert sorted(data.train.y.tolist()) == [-6.0, -4.0, -2.0, -0.0, 1.0, 3.0, 5.0, 7.0]
    with pytest.raises(UserError, match="a time to event needs a time and 0 or 1"):
        bpfed.data.from_arrays(x, y[:, ::-1], [0, 1] * 4, task="survival")
    with pytest.raises(UserError, match="the time -1 in row 1"):
        bpfed.data.from_arrays(x, y - [1.0, 0.0], [0, 1] * 4, task="survival")


def test_the_baselines_are_lifelines_cox_model_and_kaplan_meier() -> None:
    import pandas as pd

    data = scenarios.survival(sizes=(150, 120), test=40)
    x, y = data.train.x.double().numpy(), data.train.y.double().numpy()
    frame = pd.DataFrame(x).assign(T=np.abs(y), E=y > 0)
    wanted = CoxPHFitter().fit(frame, "T", "E").params_.to_numpy()
    np.testing.assert_allclose(cox(x, np.abs(y), y > 0, penalty=0.0), wanted, atol=1e-3)
    rows = {row["name"]: row for row in baselines(data, torch.arange(2))["rows"]}
    assert list(rows) == ["site-kaplan-meier", "pooled-kaplan-meier", "site-cox", "pooled-cox"]
    assert rows["site-kaplan-meier"]["clients"]["c_index"] == [0.5, 0.5]
    new, truth = (part.double().numpy() for part in data.test.client(0))
    own = concordance_index(np.abs(truth), -new @ wanted, truth > 0)
    assert rows["pooled-cox"]["clients"]["c_index"][0] == pytest.approx(own, abs=0.02)
    assert rows["pooled-cox"]["scores"]["ibs"]["pooled"] < rows["pooled-kaplan-meier"]["scores"]["ibs"]["pooled"]
    assert rows["pooled-kaplan-meier"]["scores"]["nll"]["pooled"] is None
    exponential = data.test.y.abs().double() * 1.0
    assert rows["pooled-cox"]["scores"]["nll"]["pooled"] < float(exponential.mean())
