"""Decisions of ``bpfed predict``: by costs, by a threshold chosen on calibration examples, and how good they were."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from command import Command

import bpfed
from bpfed import data
from bpfed.methods import FedAvg


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> Path:
    """A run on a table of which one row in five is positive."""
    place = tmp_path_factory.mktemp("decide")
    rng = np.random.default_rng(0)
    for client in ("a", "b"):
        y = rng.random(240) < 0.2
        x = rng.normal(1.2 * y, 1.0)
        rows = [f"{value:.4f},{'yes' if label else 'no'}\n" for value, label in zip(x, y, strict=True)]
        (place / "sites").mkdir(exist_ok=True)
        (place / "sites" / f"{client}.csv").write_text("x,y\n" + "".join(rows))
    sites = data.load(f"folder:{place / 'sites'}")
    some = {"rounds": 4, "epochs": 2, "eval_draws": 1, "compile": "off", "baselines": "off", "network": "linear"}
    bpfed.fit(FedAvg(lr=0.3), sites, out=place / "r", calibration=0.3, eval_every=4, **some)
    return place / "r"


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_costs_decide_and_the_test_rows_say_what_was_saved(trained: Path, command: Command) -> None:
    found = command("predict", str(trained), "--test", "--costs", "yes:no=10")
    for row in rows(found.out):
        p = float(row["p(yes)"])
        assert row["decision"] == ("yes" if p > 1 / 11 else "no")
        assert float(row["expected cost"]) == pytest.approx(min(10 * p, 1 - p), abs=1e-5)
    said = found.err[found.err.index("The decisions cost") :].split()
    assert float(said[3]) < float(said[-1].rstrip("."))


def test_a_threshold_is_chosen_on_calibration_examples(trained: Path, command: Command) -> None:
    found = command("predict", str(trained), "--test", "--threshold", "auto")
    assert "Decided for 'yes' from a probability of" in found.err
    at = float(found.err.split("from a probability of ")[1].split()[0])
    decided = rows(found.out)
    assert all(
        (row["decision"] == "yes") == (float(row["p(yes)"]) >= at)
        for row in decided
        if abs(float(row["p(yes)"]) - at) > 1e-3
    )
    assert 0.05 < at < 0.4  # of a class of one in five
    assert "by the most probable label" in found.err
    fixed = command("predict", str(trained), "--test", "--threshold", "no=0.5")
    assert all(row["decision"] == row["label"] for row in rows(fixed.out))


def test_balanced_costs_find_more_of_the_rare_class(trained: Path, command: Command) -> None:
    decided = rows(command("predict", str(trained), "--test", "--costs", "balanced").out)
    rare = [row for row in decided if row["truth"] == "yes"]
    assert sum(r["decision"] == "yes" for r in rare) > sum(r["label"] == "yes" for r in rare)


def test_balanced_costs_need_calibration_examples_but_not_many_of_each_class(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    sites = data.load(f"folder:{trained.parent / 'sites'}")
    some = {"rounds": 1, "epochs": 1, "eval_draws": 1, "compile": "off", "baselines": "off", "network": "linear"}
    bpfed.fit(FedAvg(lr=0.3), sites, out=tmp_path / "few", calibration=0.1, eval_every=1, **some)
    kept = bpfed.Run.load(tmp_path / "few").calibration
    assert kept is not None
    assert kept.classes is None  # there are too few of the rare class for sets by class
    assert kept.truth is not None
    shares = kept.truth.bincount().double()
    found = command("predict", str(tmp_path / "few"), "--test", "--costs", "balanced")
    for row in rows(found.out):
        if abs(float(row["p(yes)"]) - float(shares[1] / shares.sum())) > 1e-3:
            assert (row["decision"] == "yes") == (float(row["p(yes)"]) > float(shares[1] / shares.sum()))


def test_class_weights_are_refused_with_what_to_use_instead(command: Command) -> None:
    for name in ("run", "compare"):
        assert "say what mistakes cost" in command(name, "--class-weight", "balanced").sentence
