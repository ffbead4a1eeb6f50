"""Tasks by name, and what holds of every one."""

from __future__ import annotations

from functools import partial

import pytest
import scenarios
import torch

import bpfed
from bpfed._util.errors import UserError
from bpfed.config.registry import TASKS
from bpfed.inference.tasks import Regression, TargetColumn, get_task, register_task, task_names

QUICK = {
    "rounds": 1,
    "epochs": 1,
    "eval_draws": 3,
    "calibration": 0.4,
    "compile": "off",
    "baselines": "off",
    "device": "cpu",
}
DATA = {
    "classification": scenarios.classification,
    "regression": scenarios.regression,
    "counts": scenarios.counts,
    "survival": scenarios.survival,
    **{
        name: partial(scenarios.packed, name)
        for name in ("multilabel", "ordinal", "heteroscedastic", "negative-binomial")
    },
}


@pytest.mark.parametrize("name", [name for name in TASKS if name != "tokens"])  # which needs a module
def test_sums_of_a_run_have_the_form_of_its_task_and_give_its_metrics_again(name: str) -> None:
    task, data = get_task(name), DATA[name]()
    run = bpfed.fit("fedper", data, progress=False, say=lambda sentence: None, **QUICK)
    assert run.evaluation is not None
    found, _ = run.evaluation
    form, sums = task.sums_form(data.classes, run.settings.bins, calibrated=True), found.sums.cpu()
    assert (len(sums.cells), sums.cells.shape[-1], set(sums.further)) == (form.rows, form.bins, set(form.further))
    again = task.evaluate_sums(sums, run.settings.bins).record()
    for metric, score in found.record().items():
        if metric not in ("aurc", "auroc"):  # of all examples in one order
            assert again[metric]["pooled"] == pytest.approx(score["pooled"]), metric
    parts = task.no_parts(data.classes, torch.device("cpu"))
    assert all(len(part) == 0 for part in parts)
    assert data.train.y.dtype == task.dtype
    columns = task.columns(
        run.clients()[0].predict(data.test.x[:3], prepared=True), TargetColumn(data.class_names), 0.9, None
    )
    assert {len(cells) for cells in columns.values()} == {3}


def test_a_task_of_ones_own_is_known_by_its_name_and_takes_no_other_one() -> None:
    class Doubled(Regression):
        name = "doubled"
        targets = "doubled numbers"

    assert register_task(Doubled()) is get_task("doubled")
    assert "doubled" in task_names()
    data = bpfed.data.from_arrays(torch.randn(8, 2), torch.randn(8), [0, 1] * 4, task="doubled")
    assert "doubled numbers" in repr(data)
    with pytest.raises(UserError, match="already a task 'regression'"):
        register_task(type("Other", (Regression,), {})())
    with pytest.raises(UserError, match=r"[Tt]ask 'regresion'.*regression"):
        get_task("regresion")
