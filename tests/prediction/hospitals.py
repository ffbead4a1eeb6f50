"""Hospitals' tables of patients, and runs on them."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import numpy as np

import bpfed as library
from bpfed.data import load


def write_hospital(path: Path, count: int, seed: int, number: bool = False) -> Path:
    """A table of patients: two numbers, a word, and an outcome that follows from them."""
    g = np.random.default_rng(seed)
    age, dose = g.normal(60, 10, count), g.normal(size=count)
    ward = g.choice(["east", "west"], count)
    score = (age - 60) / 10 + dose + (ward == "east")
    outcome = [f"{50 + 20 * s:.2f}" for s in score] if number else ["ill" if s > 0.5 else "well" for s in score]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "dose", "ward", "outcome"])
        writer.writerows(zip(age.round(1), dose.round(3), ward, outcome, strict=True))
    return path


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def trained(place: Path, number: bool, **settings: object) -> Path:
    """A run on three hospitals' tables, and tables of new patients beside it."""
    (place / "sites").mkdir()
    for i, name in enumerate(("bern", "genf", "zug")):
        write_hospital(place / "sites" / f"{name}.csv", 60, i, number)
    data = load(f"folder:{place / 'sites'}", target="outcome")
    method = library.methods.BPFed(lr=0.01)
    library.fit(method, data, out=place / "run", rounds=3, epochs=5, eval_draws=5, **settings)  # type: ignore[arg-type]
    write_hospital(place / "new.csv", 7, 9, number)
    shutil.rmtree(place / "sites")  # nothing below needs the training data
    return place
