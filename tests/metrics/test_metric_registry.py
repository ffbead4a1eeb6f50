"""A metric of one's own reaches metrics.jsonl, the summary and the report; all lists of metrics follow the registry."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scenarios

import bpfed
from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed.callbacks import Callback
from bpfed.engine.evaluate import evaluate_clients
from bpfed.inference.tasks import get_task
from bpfed.metrics import METRICS, Metric, Score, register_metric
from bpfed.report import RunRecord, page
from bpfed.runs.run import Run

QUICK = {"rounds": 1, "epochs": 1, "batch": 50, "hidden": 4, "eval_draws": 3, "compile": "off", "baselines": "off"}


@pytest.fixture
def registered():
    """Forget what a test has registered."""
    known = dict(METRICS)
    yield register_metric
    METRICS.clear()
    METRICS.update(known)


class Extra(Callback):
    def metrics(self, run):
        count = len(run.evaluation[1])
        return {"drift": 0.25, "fairness": Score(0.5, 0.6, 0.1, np.linspace(0.1, 1.0, count))}


def test_own_metrics_are_computed_from_sums_and_reach_file_and_page(registered, tmp_path) -> None:
    registered(
        Metric(
            "spread", "Spread", each=lambda parts, y: (parts[0] - y).abs(), place="comparison", tasks=("regression",)
        )
    )
    registered(
        Metric("fairness", "Fairness", text.percent, "Lowest over highest.", high_is_good=True, place="comparison")
    )
    data = scenarios.regression()
    quiet = {"progress": False, "say": lambda sentence: None}
    run = bpfed.fit("fedper", data, out=tmp_path / "run", callbacks=[Extra()], **quiet, **QUICK)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    errors = [
        (client.predict(x).mean - y).abs()
        for client, (x, y) in zip(run.clients(), map(data.test.client, range(len(data))), strict=True)
    ]
    assert line["spread"]["pooled"] == pytest.approx(float(np.concatenate(errors).mean()), rel=1e-5)
    assert line["spread"]["worst"] == pytest.approx(max(float(e.mean()) for e in errors), rel=1e-5)
    assert (line["drift"]["pooled"], line["fairness"]["worst"]) == (0.25, 0.1)
    found = run.evaluation[0]
    again = get_task("regression").evaluate_sums(found.sums, 10)
    assert again["spread"].pooled == pytest.approx(line["spread"]["pooled"])
    for name in ("spread", "fairness"):
        del METRICS[name]  # as where the page is made again by who has not registered them
    record = RunRecord.read(tmp_path / "run")
    shown = {m.name: m for m in record.measures}
    assert shown["fairness"].high_is_good
    assert shown["fairness"].show(0.5) == text.percent(0.5)
    html = page.render(record)
    assert all(word in html for word in ("Spread", "Fairness", "Lowest over highest."))
    assert record.last("drift") == 0.25


def test_names_that_are_taken_are_refused(registered) -> None:
    with pytest.raises(UserError, match="already a metric 'nll'"):
        registered(Metric("nll", "NLL"))

    class Taken(Callback):
        def metrics(self, run):
            return {"rmse": 1.0}

    run = Run(scenarios.start(bpfed.methods.FedPer(), scenarios.regression()))
    run.evaluation = evaluate_clients(run.federation)
    with pytest.raises(UserError, match="callback Taken gives the metric 'rmse', which there is already"):
        run._given(Taken())
