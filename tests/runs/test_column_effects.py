"""The effects of columns at each client, and how a run does against a plain model of the client's own rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import bpfed
from bpfed.report import RunRecord, render
from bpfed.report.verdicts import verdicts
from bpfed.runs import diagnostics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> bpfed.Run:
    """Two sites whose outcome follows one column; the others are noise, and a word that says nothing."""
    place = tmp_path_factory.mktemp("sites")
    (place / "sites").mkdir()
    for seed, name in enumerate(("north", "south")):
        g = np.random.default_rng(seed)
        dose, noise = g.normal(size=90), g.normal(size=90)
        outcome = np.where(dose + 0.3 * g.normal(size=90) > 0, "ill", "well")
        with (place / "sites" / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["dose", "noise", "ward", "outcome"])
            writer.writerows(zip(dose.round(3), noise.round(3), g.choice(["a", "b"], 90), outcome, strict=True))
    data = bpfed.data.load(f"folder:{place / 'sites'}", target="outcome")
    asked = {"rounds": 4, "epochs": 2, "batch": 10, "eval_draws": 8, "device": "cpu", "progress": False}
    return bpfed.fit(bpfed.methods.FedPer(lr=0.01), data, out=place / "run", **asked)


def test_the_column_that_matters_is_first_at_every_client(run: bpfed.Run) -> None:
    found = run.diagnostics()["effects"]
    assert found["columns"][0] == "dose"
    assert found["clients"] == ["north", "south"]
    assert all(row[0] > 5 * max(map(abs, row[1:])) for row in found["rises"])
    assert found["rows"] == len(run.data.test.y)


def test_effects_are_the_same_every_time(run: bpfed.Run) -> None:
    clients = run.evaluation[1]
    assert diagnostics.column_effects(run.federation, clients) == run.diagnostics()["effects"]


def test_of_many_columns_the_first_by_a_short_look_are_kept(run: bpfed.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "COLUMNS", 1)
    found = diagnostics.column_effects(run.federation, run.evaluation[1])
    assert found["columns"] == ["dose"]
    assert found["of"] == 3


def test_what_would_take_too_long_is_left_out_with_a_sentence(run: bpfed.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "MOST_WORK", 1)
    assert "too long" in diagnostics.column_effects(run.federation, run.evaluation[1])["skipped"]


def test_the_record_is_small_and_makes_the_same_page(run: bpfed.Run) -> None:
    folder = Path(run.data.name.removeprefix("folder:")).parent / "run"
    record = RunRecord.read(folder)
    assert len(json.dumps(record.diagnostics)) < 5_000
    assert render(record) == (folder / "report.html").read_text()


def test_the_page_says_of_each_client_whether_it_is_of_use(run: bpfed.Run) -> None:
    found = verdicts(run.record())
    assert {one.name for one in found} == {"north", "south"}
    for one in found:
        assert one.said[0].startswith("Better than guessing (NLL ")
        assert "its own logistic regression" in one.said[1]
    page = render(run.record())
    for section in ("Can it be used?", "Errors by class", "Acting on predictions", "Columns that matter", "Model card"):
        assert f"<h2>{section}</h2>" in page
