"""The page of a regression: its unit, what guessing scores, and whether intervals are as wide as they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pages import Page, plain, record

from bpfed._util import text
from bpfed.report import render


def test_regression_has_its_own_figures_and_no_others() -> None:
    run = record(task="regression")
    words = plain(Page(render(run)).text)
    assert f"{run.history[-1]['rmse']['pooled']:.3f}" in words
    assert "The models’ own intervals hold" in words
    for absent in ("Accuracy", "Brier", "MCE"):
        assert absent not in words


@pytest.mark.parametrize("data", [{"name": "folder:sites"}, {"name": "heart", "target": "age"}, {"name": "arrays"}])
def test_the_unit_of_the_error_is_said(data: dict[str, str]) -> None:
    run = record(task="regression")
    words = Page(render(replace(run, config={"data": data}))).text
    name = f"'{data['target']}'" if "target" in data else "the target"
    assert (f"RMSE in SD of {name}" in words) == (data["name"] != "arrays")
    assert (f"in standard deviations of {name}" in words) == (data["name"] != "arrays")
    assert "with the worst RMSE is marked" in words
    assert ("in the unit of the targets as given" in words) == (data["name"] == "arrays")


@pytest.mark.parametrize(("scale", "shown"), [(51.776, "51.78"), (0.001234, "0.00123"), (12345.6, "12\u202f346")])
def test_the_unit_is_said_in_numbers_where_it_is_known(scale: float, shown: str) -> None:
    run = record(task="regression")
    run.evaluation["target"] = {"name": "chol", "scale": scale}
    assert f"RMSE in SD of 'chol' (1 SD = {shown})" in Page(render(run)).text


def test_the_error_is_given_in_the_targets_own_unit() -> None:
    run = record(task="regression")
    sd = run.history[-1]["rmse"]["pooled"]
    assert "in standard deviations</dt>" not in render(run)  # whose unit nobody knows
    run.evaluation["target"] = {"name": "chol", "scale": 1000.0}
    page = render(run)
    worst = max(row["rmse"] for row in run.evaluation["clients"] if row["rmse"] is not None)
    assert f'<h3>RMSE of &#39;chol&#39;</h3><p class="big">{text.figure(1000 * sd)}</p>' in page
    assert f"<dt>in standard deviations</dt><dd>{sd:.3f}</dd>" in page
    assert f'<h3>Worst client</h3><p class="big">{text.figure(1000 * worst)}</p>' in page


def test_the_error_stands_beside_that_of_the_training_mean() -> None:
    run = record(task="regression")
    assert "training mean" not in Page(render(run)).text
    for entry in run.history:
        entry["baseline"] = {"pooled": 1.234, "mean": 1.3, "worst": 2.345}
    for row in run.evaluation["clients"]:
        row["baseline"] = 1.567
    page = render(run)
    assert "<dt>own training mean</dt><dd>1.234</dd>" in page
    assert '<button type="button">RMSE of mean</button>' in page
    assert page.count("1.567") >= len(run.evaluation["clients"])
    assert "<h3>RMSE of own training mean</h3>" not in page  # it is no result of the run


@pytest.mark.parametrize(
    ("middle", "end", "verdict"),
    [
        (0.5, 0.95, "as wide as they should be, within chance"),
        (0.98, 0.99, "too wide"),  # at the end alone, where there is no room above, nobody would see it
        (0.3, 0.7, "too narrow"),
        (0.8, 0.8, "too wide in the middle and too narrow at the ends"),
    ],
)
def test_intervals_are_judged_in_the_middle_and_at_the_end(middle, end, verdict) -> None:
    run = record(task="regression")
    found = run.evaluation["reliability"]
    count = [200] * len(found["count"])
    inside = [middle if level == 0.5 else end for level in found["confidence"]]
    judged = replace(run, evaluation=run.evaluation | {"reliability": found | {"count": count, "accuracy": inside}})
    assert f"of the targets: they are {verdict}." in plain(Page(render(judged)).text)


def test_own_intervals_and_calibrated_ones_are_told_apart() -> None:
    run = record(task="regression")
    coverage = {"pooled": 0.875, "mean": 0.8, "worst": 0.5}
    words = plain(
        Page(render(replace(run, history=[*run.history[:-1], run.history[-1] | {"coverage": coverage}]))).text
    )
    assert "The models’ own intervals hold" in words
    assert "The calibrated 90 % intervals, widened or narrowed by what examples held back say, hold 87.5 %" in words
