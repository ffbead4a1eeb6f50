"""A run's own test rows, predicted: whoever reads the file gets the figures of the report."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from command import Command

ASKED = ("run", "--method", "fedavg", "--rounds", "3", "--quiet", "--out", "run", "--data")


@pytest.fixture
def wards(command: Command) -> Path:
    """Two wards' patients, who are ill where x and y are large, with a cost."""
    rng, folder = np.random.default_rng(0), Path("wards")
    folder.mkdir()
    for name in ("north", "south"):
        x, y, ill = rng.normal(size=60), rng.normal(size=60), []
        ill = ["yes" if a + b + e > 0 else "no" for a, b, e in zip(x, y, rng.normal(size=60), strict=True)]
        rows = (f"{a:.3f};{b:.3f};{w};{1000 * a + 5000:.2f}" for a, b, w in zip(x, y, ill, strict=True))
        (folder / f"{name}.csv").write_text("\n".join(["x;y;ill;cost", *rows]))
    return folder


def rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).open()))


def test_the_figures_of_the_report_can_be_computed_from_the_file(command: Command, wards: Path) -> None:
    command.ok(*ASKED, "folder:wards", "--target", "ill", "--ignore", "cost", "--calibration", "0.2")
    said = command.ok("predict", "run", "--test", "--out", "test.csv").out
    found = rows("test.csv")
    assert said.startswith(f"{len(found)} predictions of test rows: test.csv")
    assert list(found[0])[:4] == ["client", "row", "truth", "label"]
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    right = [row["truth"] == row["label"] for row in found]
    assert sum(right) / len(right) == pytest.approx(last["accuracy"]["pooled"])
    losses = [-math.log(float(row[f"p({row['truth']})"])) for row in found]
    assert sum(losses) / len(losses) == pytest.approx(last["nll"]["pooled"], rel=1e-4)
    for row in found:  # they are the rows that they say
        lines = (wards / f"{row['client']}.csv").read_text().splitlines()
        assert lines[int(row["row"])].split(";")[2] == row["truth"]
    own = command.ok("predict", "run", "--test", "--client", "south").out.splitlines()
    assert len(own) - 1 == sum(row["client"] == "south" for row in found)


def test_numbers_are_in_their_own_unit(command: Command, wards: Path) -> None:
    command.ok(*ASKED, "folder:wards", "--target", "cost", "--ignore", "ill")
    command.ok("predict", "run", "--test", "--out", "test.csv")
    found = rows("test.csv")
    error = np.sqrt(np.mean([(float(row["truth"]) - float(row["mean"])) ** 2 for row in found]))
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["rmse"]["pooled"]
    unit = json.loads(Path("run/evaluation.json").read_text())["target"]["scale"]
    assert error == pytest.approx(last * unit, rel=1e-3)


def test_what_cannot_be_is_said(command: Command, wards: Path) -> None:
    command.ok(*ASKED, "folder:wards", "--target", "ill", "--ignore", "cost")
    for options in ((), ("--test", "--input", "wards/north.csv"), ("--test", "--keep", "x")):
        assert command("predict", "run", *options).sentence.startswith("Give new rows with --input FILE, or predict")
    assert "Unknown client 'east'" in command("predict", "run", "--test", "--client", "east").sentence
    text = (wards / "north.csv").read_text()
    (wards / "north.csv").write_text(text + "\n9;9;yes;1")
    assert "has changed since the run in 'run'" in command("predict", "run", "--test").sentence


def test_only_tables_have_rows(command: Command) -> None:
    command.ok(*ASKED, "digits", "--clients", "3")
    assert "is not a run on tables" in command("predict", "run", "--test").sentence
