"""Baselines: their figures are scikit-learn's, and what is said of them is so."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, as_before_manifests
from scenarios import classification, images, regression
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, LeaveOneOut

import bpfed
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.methods import FedAvg
from bpfed.report import RunRecord, render
from bpfed.report.manifest import Manifest
from bpfed.report.record import Rival, verdict
from bpfed.runs import baselines as module
from bpfed.runs.baselines import baselines

TINY = {"epochs": 1, "batch": 5, "eval_draws": 2, "progress": False, "rounds": 2}

pytestmark = pytest.mark.usefixtures("untraced")


def found(data: FederatedData, **options: Any) -> dict[str, dict[str, Any]]:
    made = baselines(data, (data.test.sizes > 0).nonzero().flatten(), **options)
    return {row["name"]: row for row in made["rows"]}


def numpy(examples: Examples, client: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    x, y = (examples.x, examples.y) if client is None else examples.client(client)
    return x.double().numpy(), y.double().numpy() if y.is_floating_point() else y.numpy()


def gaussian(y: np.ndarray, mean: np.ndarray, sd: float) -> np.ndarray:
    return 0.5 * ((y - mean) / sd) ** 2 + math.log(sd) + 0.5 * math.log(2 * math.pi)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_logistic_regression_is_scikit_learns() -> None:
    data = classification(sizes=(30, 40, 25), classes=3)
    rows = found(data)
    x, y = numpy(data.train)
    new, truth = numpy(data.test)
    probs = LogisticRegression(max_iter=300).fit(x, y).predict_proba(new)
    assert rows["pooled-logistic"]["scores"]["nll"]["pooled"] == pytest.approx(log_loss(truth, probs), abs=1e-12)
    assert rows["pooled-logistic"]["scores"]["accuracy"]["pooled"] == pytest.approx((probs.argmax(1) == truth).mean())
    own = []
    for i in range(3):
        model = LogisticRegression(max_iter=300).fit(*numpy(data.train, i))
        new, truth = numpy(data.test, i)
        own.append(log_loss(truth, model.predict_proba(new), labels=[0, 1, 2]))
    assert rows["site-logistic"]["clients"]["nll"] == pytest.approx(own, abs=1e-12)
    assert rows["site-logistic"]["scores"]["nll"]["mean"] == pytest.approx(np.mean(own), abs=1e-12)


@pytest.mark.parametrize(("sizes", "divided"), [((40, 30), False), ((150, 100), True)])
def test_boosting_is_scikit_learns(sizes: tuple[int, ...], divided: bool) -> None:
    data = classification(sizes=sizes, classes=2)
    trees = 100
    if divided:  # chosen on a tenth of the rows, then fitted to all
        tried = HistGradientBoostingClassifier(early_stopping=True, random_state=0)
        trees = int(tried.fit(*numpy(data.train)).validation_score_.argmax())
        assert 1 < trees < 100
    model = HistGradientBoostingClassifier(max_iter=trees, early_stopping=False, random_state=0)
    probs = model.fit(*numpy(data.train)).predict_proba(numpy(data.test)[0])
    nll = found(data)["pooled-boosting"]["scores"]["nll"]["pooled"]
    assert nll == pytest.approx(log_loss(numpy(data.test)[1], probs), abs=1e-12)


def test_ridge_regression_is_scikit_learns_with_the_noise_of_rows_left_out() -> None:
    data = regression(sizes=(12, 7, 1))
    rows = found(data)
    spread = float(np.var(numpy(data.train)[1]))

    def nll(x: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray) -> np.ndarray:
        if len(y) == 1:
            return gaussian(truth, np.full(len(truth), y[0]), math.sqrt(spread))
        errors = [
            float((y[left] - Ridge().fit(x[kept], y[kept]).predict(x[left]))[0])
            for kept, left in LeaveOneOut().split(x)
        ]
        variance = (np.square(errors).sum() + spread) / (len(y) + 1)
        return gaussian(truth, Ridge().fit(x, y).predict(new), math.sqrt(variance))

    own = [nll(*numpy(data.train, i), *numpy(data.test, i)).mean() for i in range(3)]
    assert rows["site-ridge"]["clients"]["nll"] == pytest.approx(own, rel=1e-6)
    everyone = nll(*numpy(data.train), *numpy(data.test)).mean()
    assert rows["pooled-ridge"]["scores"]["nll"]["pooled"] == pytest.approx(everyone, rel=1e-6)


def test_boosting_of_numbers_takes_its_noise_from_rows_it_was_not_fitted_to() -> None:
    data = regression(sizes=(40, 30))
    x, y = numpy(data.train)

    def model() -> HistGradientBoostingRegressor:
        return HistGradientBoostingRegressor(early_stopping=False, random_state=0)

    errors = np.concatenate(
        [y[b] - model().fit(x[a], y[a]).predict(x[b]) for a, b in KFold(5, shuffle=True, random_state=0).split(x)]
    )
    sd = math.sqrt((np.square(errors).sum() + np.var(y)) / (len(y) + 1))
    new, truth = numpy(data.test)
    nll = gaussian(truth, model().fit(x, y).predict(new), sd).mean()
    assert found(data)["pooled-boosting"]["scores"]["nll"]["pooled"] == pytest.approx(nll, rel=1e-9)


def test_a_class_without_a_row_has_the_probability_of_the_rule_of_succession() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, generator=g)
    both = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1])
    train = Examples.of([(x[:4], torch.zeros(4, dtype=torch.long)), (x, both)])
    test = Examples.of([(x[:3], torch.tensor([0, 1, 2])), (x[:2], torch.tensor([2, 0]))])
    data = FederatedData("few", ("one", "two"), train, test, "classification", 3)
    rows = found(data)
    alone = -(math.log(5 / 7) + 2 * math.log(1 / 7)) / 3
    own = LogisticRegression().fit(x.double(), both).predict_proba(x[1:2].double())[0, 0]
    two = -(math.log(1 / 12) + math.log(11 / 12 * own)) / 2
    assert rows["site-logistic"]["clients"]["nll"] == pytest.approx([alone, two], abs=1e-6)


def test_rows_held_back_for_calibration_are_fitted_too() -> None:
    data = classification(sizes=(30, 40, 25))
    held = data.hold_out(0.3, 0)
    assert held.calibration is not None
    for name in ("site-logistic", "pooled-logistic"):
        there, here = (found(d)[name]["scores"]["nll"]["pooled"] for d in (held, data))
        assert there == pytest.approx(here, abs=1e-4)  # the rows are in another order


def test_nothing_is_warned_of_and_results_are_the_same_again() -> None:
    data = classification(sizes=(2, 1, 3, 40))
    data = replace(data, train=replace(data.train, x=1e4 * data.train.x), test=replace(data.test, x=1e4 * data.test.x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = found(data)
    assert first == found(data)
    assert all(math.isfinite(row["scores"]["nll"]["pooled"]) for row in first.values())


def test_clients_without_test_rows_are_left_out() -> None:
    data = classification(sizes=(20, 20, 20))
    test = Examples.of([data.test.client(0), (data.test.x[:0], data.test.y[:0]), data.test.client(2)])
    rows = found(replace(data, test=test))
    assert all(len(row["clients"]["nll"]) == 2 for row in rows.values())
    run = bpfed.fit(FedAvg(), replace(data, test=test), **TINY)
    assert [row["name"] for row in run.record().rows] == ["site a", "site c"]
    assert run.record().verdict


def test_large_data_are_skipped_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = classification()
    skipped = baselines(data, torch.arange(5), most_rows=52)
    assert skipped["rows"] == []
    assert skipped["skipped"] == [
        "Baselines were not fitted: there are 53 training rows, and above 52 they would take too long for a report."
    ]
    monkeypatch.setattr(module, "MOST_TREES", 200)
    part = baselines(data, torch.arange(5))
    assert [row["name"] for row in part["rows"]] == ["site-logistic", "pooled-logistic"]
    assert part["skipped"] == [
        "Pooled gradient boosting was not fitted: it would take too long with 53 rows, 4 columns and 3 classes."
    ]


# --- in runs ----------------------------------------------------------------------------------------------------------


def test_a_run_on_images_or_with_baselines_off_has_none() -> None:
    assert bpfed.fit(FedAvg(), images(), **TINY).baselines() == {}
    off = bpfed.fit(FedAvg(), classification(), baselines="off", **TINY)
    assert off.baselines() == {}
    assert off.record().verdict == ""
    assert "<h2>Baselines" not in render(off.record())


def linear(rows: int) -> FederatedData:
    """Clients with the same logistic regression, which that knows best."""
    g = torch.Generator().manual_seed(1)
    slope = torch.tensor([2.0, -1.0, 0.5, 0.0])

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=g)
        return x, torch.bernoulli(torch.sigmoid(x @ slope), generator=g).long()

    train, test = (Examples.of([part(n) for _ in range(4)]) for n in (rows, 100))
    return FederatedData("linear", ("a", "b", "c", "d"), train, test, "classification", 2)


def ring() -> FederatedData:
    """Clients whose classes are inside and outside a circle, every other one the other way round."""
    g = torch.Generator().manual_seed(1)

    def part(turned: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(200, 2, generator=g)
        return x, ((x.square().sum(1) > 1.4).long() + turned) % 2

    train, test = (Examples.of([part(i % 2) for i in range(4)]) for _ in range(2))
    return FederatedData("ring", ("a", "b", "c", "d"), train, test, "classification", 2)


def test_the_verdict_goes_to_logistic_regression_where_that_is_better() -> None:
    run = bpfed.fit(FedAvg(), linear(60), **TINY)  # two rounds are too few for a network
    record = run.record()
    best = min(record.rivals, key=lambda rival: rival.nll)
    assert best.title == "Pooled logistic regression"
    assert best.nll < record.last("nll")
    end = f" If all rows may be in one place, use pooled logistic regression: it is better (NLL {best.nll:.3f})."
    assert record.verdict.endswith(end)
    gain = record.diagnostics["overall"]["pooled-logistic"]
    assert gain["gain"] == pytest.approx(best.nll - record.last("nll"), rel=1e-3)
    assert -gain["gain"] > 2 * gain["gain_se"] > 0
    assert record.verdict in render(record).replace("&#39;", "'").replace("&#x27;", "'")


def test_the_verdict_goes_to_the_run_where_baselines_are_worse() -> None:
    run = bpfed.fit("local", ring(), rounds=30, epochs=10, batch=50, progress=False)
    record = run.record()
    best = min(record.rivals, key=lambda rival: rival.nll)
    assert record.last("nll") < best.nll
    assert record.verdict == (
        f"Local training is better than every baseline: NLL {record.last('nll'):.3f} against {best.nll:.3f} of "
        f"{best.in_words}, lower at 4 of 4 clients."
    )


def test_the_verdict_in_all_cases() -> None:
    site, pooled = Rival("Per-site X", False, 0.41, 3, 1, 4), Rival("Pooled X", True, 0.43, 2, 2, 4)
    instead = (
        "Per-site X is better (NLL 0.410 against 0.450, lower at 3 of 4 clients); use it instead of M, or look for a "
        "better setting with 'bpfed tune'."
    )
    together = " If all rows may be in one place, use pooled X: it is better (NLL 0.430)."
    assert verdict("M", 0.45, [site, pooled]) == instead + together
    alike = " Pooled X, which needs all rows in one place, is about as good (NLL 0.430, within chance)."
    assert verdict("M", 0.45, [site, pooled._replace(clear=False)]) == instead + alike
    better = pooled._replace(nll=0.40)
    assert verdict("M", 0.405, [site, better]).startswith(
        "M is better than per-site X (NLL 0.405 against 0.410, lower at 1 "
    )
    within = "M is about as good as per-site X (NLL 0.450 against 0.410, within chance)."
    assert verdict("M", 0.45, [site._replace(clear=False)]) == within
    assert verdict("M", 0.4101, [site]) == within.replace("0.450", "0.410")
    # A difference within chance is called neither better nor worse, whichever way it points.
    assert "better" not in verdict("M", 0.2, [site._replace(clear=False), pooled._replace(clear=False)])
    assert verdict("M", 0.2, [site._replace(pairs=1)]) == (
        "M is better than the baseline: NLL 0.200 against 0.410 of per-site X."
    )
    assert verdict("M", math.nan, [site]) == ""
    assert verdict("M", 0.2, []) == ""


def test_numbers_have_ridge_regression_in_the_report() -> None:
    record = bpfed.fit(FedAvg(), regression(), **TINY).record()
    page = render(record)
    for title in ("Per-site ridge regression", "Pooled ridge regression", "Pooled gradient boosting"):
        assert f'<th scope="row">{title}</th>' in page


def test_a_report_is_made_again_without_fitting(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bpfed.fit(FedAvg(), classification(), out=tmp_path / "a", **TINY)
    kept = json.loads((tmp_path / "a/evaluation.json").read_text())["baselines"]
    assert kept == run.baselines()
    assert kept["version"] == 1

    def refuse(*_: Any) -> None:
        raise AssertionError("fitted again")

    monkeypatch.setattr("bpfed.runs.baselines.baselines", refuse)
    page = (tmp_path / "a/report.html").read_text()
    assert '<th scope="row">Pooled gradient boosting</th>' in page
    monkeypatch.setenv("COLUMNS", "80")
    said = command.ok("report", tmp_path / "a", "--out", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page
    assert run.record().verdict in " ".join(said.out.split())
    assert max(len(line) for line in said.out.splitlines() if not line.startswith("Report: ")) <= 80
    loaded = bpfed.Run.load(tmp_path / "a")
    assert loaded.baselines() == kept
    assert loaded.record().verdict == run.record().verdict


def test_run_folders_of_earlier_versions_are_shown_without(command: Command, tmp_path: Path) -> None:
    bpfed.fit(FedAvg(), classification(), out=tmp_path / "a", **TINY)
    path = tmp_path / "a/evaluation.json"
    old = json.loads(path.read_text())
    del old["baselines"]
    path.write_text(json.dumps(old))
    as_before_manifests(tmp_path / "a")
    command.ok("report", tmp_path / "a")
    assert "<h2>Baselines" not in (tmp_path / "a/report.html").read_text()
    assert RunRecord.read(tmp_path / "a").verdict == ""


def test_turning_them_off_is_no_other_run(tmp_path: Path) -> None:
    bpfed.fit(FedAvg(), classification(), out=tmp_path / "a", baselines="off", **TINY)
    assert "baselines" not in json.loads((tmp_path / "a/evaluation.json").read_text())
    bpfed.fit(FedAvg(), classification(), out=tmp_path / "a", resume=True, **TINY)
    assert json.loads((tmp_path / "a/evaluation.json").read_text())["baselines"]["rows"]
    manifest = Manifest.read(tmp_path / "a")
    assert manifest is not None
    manifest.check(tmp_path / "a", ["evaluation.json", "summary.json"])


def test_a_deployed_run_says_that_there_are_none() -> None:
    record = bpfed.fit(FedAvg(), replace(classification(), protocol="deployed"), **TINY).record()
    assert record.baselines == []
    assert "Baselines are not fitted in a deployment" in render(record)


def test_settings_say_which_values_there_are() -> None:
    with pytest.raises(bpfed.UserError, match="baselines"):
        Settings(baselines="on").check(3)  # type: ignore[arg-type]


# --- in comparisons ---------------------------------------------------------------------------------------------------


def test_a_comparison_has_rows_for_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    real = baselines

    def counted(*args: Any, **more: Any) -> dict[str, Any]:
        fitted.append(1)
        return real(*args, **more)

    monkeypatch.setattr("bpfed.runs.baselines.baselines", counted)

    def deal(seed: int) -> FederatedData:
        return classification(seed=seed)

    out = tmp_path / "a"
    made = bpfed.compare(["fedavg", "local"], deal, 2, out=out, **TINY)
    assert len(fitted) == 2  # once for each seed
    assert list(made.baselines) == ["baseline:site-logistic", "baseline:pooled-logistic", "baseline:pooled-boosting"]
    assert made.names == ["fedavg", "local"]
    first = found(deal(0))["pooled-logistic"]
    assert made.over_seeds("baseline:pooled-logistic", "nll")[0] == first["scores"]["nll"]["pooled"]
    apart = made.difference("baseline:pooled-logistic")
    ours = [row["nll"] for row in made.records["fedavg"][0].rows]
    assert apart.seeds[0] == pytest.approx(np.mean(np.subtract(first["clients"]["nll"], ours)))
    assert apart.pairs == 10
    assert "[logistic, per site]" in made.summary()
    assert made.verdict in made.summary()
    page = (out / "report.html").read_text()
    assert '<th scope="row">[boosting, pooled]</th>' in page
    result = json.loads((out / "comparison.json").read_text())
    assert list(result["methods"]) == made.ranking
    assert result["baselines"]["baseline:site-logistic"]["nll"]["seeds"] == made.over_seeds(
        "baseline:site-logistic", "nll"
    )
    assert "baseline:pooled-boosting,1," in (out / "comparison.csv").read_text()

    for seed in (0, 1):  # as an earlier version left them
        for method in ("fedavg", "local"):
            folder = as_before_manifests(out / method / f"seed-{seed}")
            old = json.loads((folder / "evaluation.json").read_text())
            del old["baselines"]
            (folder / "evaluation.json").write_text(json.dumps(old))
    again = bpfed.compare(["fedavg", "local"], deal, 2, out=out, **TINY)
    assert len(fitted) == 4
    assert again.verdict == made.verdict
    shutil.rmtree(out)
    off = bpfed.compare(["fedavg", "local"], deal, 2, out=out, baselines="off", **TINY)
    assert off.baselines == {}
    assert off.verdict == ""
    assert "[" not in off.summary()
