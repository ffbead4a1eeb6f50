"""The estimators follow scikit-learn's contract, and predict what the clients of their run do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from bpfed import BPFedClassifier, BPFedRegressor, UserError
from bpfed.sklearn import EXEMPT

QUICK: dict[str, Any] = {"method": "fedavg", "rounds": 1, "settings": {"epochs": 1}}
#: Checks that train at most twice; ``check_estimator`` has more, which take minutes.
CHECKED = {
    "check_estimator_cloneable", "check_no_attributes_set_in_init", "check_estimators_unfitted", "check_set_params",
    "check_do_not_raise_errors_in_init_or_set_params", "check_n_features_in_after_fitting", "check_complex_data",
    "check_all_zero_sample_weights_error", "check_estimators_empty_data_messages", "check_estimator_sparse_array",
    "check_classifiers_one_label", "check_classifiers_regression_target", "check_supervised_y_no_nan",
    "check_parameters_default_constructible", "check_get_params_invariance", "check_fit2d_1sample", "check_fit1d",
    "check_fit_check_is_fitted", "check_requires_y_none", "check_fit_idempotent", "check_sample_weights_list",
}  # fmt: skip


def named(check: Any) -> str:
    return getattr(check, "func", check).__name__


@pytest.mark.parametrize("kind", [BPFedClassifier, BPFedRegressor])
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn(kind: type) -> None:
    checks = list(estimator_checks_generator(kind(**QUICK), mark=None))
    # The pairs of sparse data and of classifiers are not generated for every estimator.
    assert {n for n in EXEMPT if "sparse" not in n and "classif" not in n} <= {named(check) for _, check in checks}
    ran = [check(estimator) for estimator, check in checks if named(check) in CHECKED]
    assert len(ran) >= len(CHECKED) - 2


def table(rows: int = 60) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({"dose": g.normal(size=rows), "ward": g.choice(["east", "west"], rows)})
    y = np.where(frame.dose + (frame.ward == "east") > 0.5, "ill", "well")
    frame.loc[::7, "dose"] = np.nan
    return frame, y, np.arange(rows) % 3


def test_each_group_is_predicted_by_its_client_and_others_as_a_newcomer() -> None:
    X, y, site = table()
    model = BPFedClassifier("fedper", rounds=2, calibration=0.3).fit(X, y, groups=site)
    assert model.classes_.tolist() == ["ill", "well"]
    assert model.groups_.tolist() == ["0", "1", "2"]
    assert int(model.run_.data.train.sizes.sum()) + len(model.run_.data.calibration.y) == len(X)
    new, who = X[:8], np.array([2, 0, 9, 1, 2, 8, 0, 0])
    found = model.predict_proba(new, who)
    for name in "012":
        rows = np.flatnonzero(who == int(name))
        wanted = model.run_.client(name).predict(new.iloc[rows]).probs
        np.testing.assert_allclose(found[rows], wanted, atol=1e-6)
    wanted = model.run_.adapt(name="newcomer").predict(new.iloc[[2, 5]]).probs
    np.testing.assert_allclose(found[[2, 5]], wanted, atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(new)[[2, 5]], wanted, atol=1e-6)
    assert (model.predict(new, who) == model.classes_[found.argmax(1)]).all()
    sets = model.predict_set(new.iloc[[0, 4]], [2, 2], level=0.8)
    assert torch.equal(torch.from_numpy(sets), model.run_.client("2").predict(new.iloc[[0, 4]]).prediction_set(0.8))
    with pytest.raises(UserError, match="There are no prediction sets, since a newcomer"):
        model.predict_set(new, who)
    with pytest.raises(ValueError, match="Rows cannot be weighted, but sample_weight has different weights; omit it"):
        clone(model).fit(X, y, sample_weight=np.arange(len(X)))
    with pytest.raises(ValueError, match="groups contains NaN, first in row 1"):
        clone(model).fit(X, y, groups=np.where(site == 0, np.nan, site))
    with pytest.raises(ValueError, match="X has a column 'split'"):
        clone(model).fit(X.assign(split=1), y)


def test_numbers_are_predicted_in_their_own_unit() -> None:
    g = np.random.default_rng(0)
    X = g.normal(size=(80, 2))
    y = 5000.0 + 300.0 * X[:, 0] + g.normal(size=80)
    model = BPFedRegressor("bpfed-linear", rounds=3, calibration=0.2).fit(X, y)
    mean, deviation = model.predict(X, return_std=True)
    assert model.score(X, y) > 0.95
    assert 0 < deviation.max() < 300
    low, high = model.predict_interval(X).T
    assert np.mean((low <= y) & (y <= high)) > 0.8
    np.testing.assert_allclose((low + high) / 2, mean, rtol=1e-5)


def test_the_example_scores_sites_that_were_left_out() -> None:
    path = Path(__file__).parents[2] / "examples" / "cross_validation.py"
    spec = importlib.util.spec_from_file_location("cross_validation", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    scores = example.main(rounds=1, folds=2)
    assert scores.shape == (2,)
    assert scores.min() > 0.8
