"""A clean folder of five hospitals, and the same patients as hospitals send them: with every fault that is usual."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

SITES = ("aarau", "bern", "chur", "davos", "emmen")
ROWS = 160
#: What is planted: (file, column) of each fault.
PLANTED = (
    ("bern.csv", ""),  # semicolons and decimal commas
    ("bern.csv", "creatinine"),  # µmol/L instead of mg/dL
    ("bern.csv", "sex"),  # female and male instead of F and M
    ("chur.xlsx", "temperature"),  # °F instead of °C
    ("chur.xlsx", "smoker"),  # 1 and 0 instead of yes and no
    ("davos.csv", "glucose"),  # mg/dL instead of mmol/L
    ("davos.csv", "smoker"),  # ja and nein
    ("davos.csv", "pressure"),  # -999 where it was not measured
    ("davos.csv", "height"),  # m instead of cm
    ("emmen.csv", "Heart Rate"),  # instead of heart_rate
    ("emmen.csv", "weight"),  # lb instead of kg
    ("emmen.csv", "age"),  # the word 'unknown' among numbers
    ("emmen.csv", "ward"),  # a column that nobody else has
    ("emmen.csv", "pressure"),  # a column that is lacking
    ("(all)", "admitted"),  # dates
    ("(all)", "patient_id"),  # identifiers
    ("aarau.csv", "died"),  # 0 and 1 instead of no and yes
)


def patients(seed: int) -> dict[str, list[Any]]:
    """The rows of one hospital, clean: by column."""
    rng = np.random.default_rng(seed)
    age = rng.normal(62, 12, ROWS)
    creatinine = np.exp(rng.normal(0.05, 0.3, ROWS))
    glucose = np.exp(rng.normal(1.75, 0.22, ROWS))
    temperature = rng.normal(37.0, 0.6, ROWS)
    pressure = rng.normal(130, 16, ROWS)
    smoker = rng.random(ROWS) < 0.35
    female = rng.random(ROWS) < 0.5
    risk = (age - 62) / 12 + 3 * np.log(creatinine) + 1.1 * smoker - 0.6 * female + (glucose - 6) / 2 - 0.4
    risk += (temperature - 37) + (seed - 2) / 3
    died = rng.random(ROWS) < 1 / (1 + np.exp(-2 * risk))
    gone = rng.random(ROWS) < (0.1 if seed == 3 else 0.0)
    unknown = rng.random(ROWS) < (0.04 if seed == 4 else 0.0)
    days = rng.integers(0, 700, ROWS)
    return {
        "patient_id": [f"{SITES[seed][0]}{k:05d}" for k in rng.permutation(10 * ROWS)[:ROWS]],
        "admitted": [str(np.datetime64("2022-01-01") + int(day)) for day in days],
        "age": ["" if lost else round(v, 1) for v, lost in zip(age, unknown, strict=True)],
        "sex": ["F" if f else "M" for f in female],
        "smoker": ["yes" if s else "no" for s in smoker],
        "creatinine": [round(v, 2) for v in creatinine],
        "glucose": [round(v, 2) for v in glucose],
        "temperature": [round(v, 2) for v in temperature],
        "pressure": ["" if lost or seed == 4 else round(v) for v, lost in zip(pressure, gone, strict=True)],
        "height": [round(v) for v in rng.normal(171, 9, ROWS)],
        "weight": [round(v, 1) for v in rng.normal(77, 11, ROWS)],
        "heart_rate": [round(v) for v in rng.normal(78, 11, ROWS)],
        "died": ["yes" if d else "no" for d in died],
    }


def write(path: Path, columns: dict[str, list[Any]], delimiter: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(zip(*columns.values(), strict=True))
    if path.suffix == ".xlsx":
        from openpyxl import Workbook

        book = Workbook()
        book.active.append(list(columns))
        for row in rows:
            book.active.append([None if cell == "" else cell for cell in row])
        book.save(path)
        return
    with path.open("w", newline="") as file:
        out = csv.writer(file, delimiter=delimiter)
        out.writerows([list(columns), *rows])


def clean(folder: Path) -> Path:
    """A file for each hospital, all alike; what is no input is not there."""
    for k, site in enumerate(SITES):
        write(folder / f"{site}.csv", {name: c for name, c in patients(k).items() if name != "patient_id"})
    return folder


def nasty(folder: Path) -> Path:
    """The same patients with the faults of `PLANTED`."""
    sites = {site: patients(k) for k, site in enumerate(SITES)}
    sites["aarau"]["died"] = [int(d == "yes") for d in sites["aarau"]["died"]]
    bern = sites["bern"]
    bern["creatinine"] = [round(v * 88.4, 1) for v in bern["creatinine"]]
    bern["sex"] = ["female" if s == "F" else "male" for s in bern["sex"]]
    sites["bern"] = {n: [str(v).replace(".", ",") if isinstance(v, float) else v for v in c] for n, c in bern.items()}
    chur = sites["chur"]
    chur["temperature"] = [round(v * 1.8 + 32, 2) for v in chur["temperature"]]
    chur["smoker"] = [int(s == "yes") for s in chur["smoker"]]
    davos = sites["davos"]
    davos["glucose"] = [round(v * 18.02, 1) for v in davos["glucose"]]
    davos["smoker"] = ["ja" if s == "yes" else "nein" for s in davos["smoker"]]
    davos["pressure"] = [-999 if v == "" else v for v in davos["pressure"]]
    davos["height"] = [v / 100 for v in davos["height"]]
    emmen = sites["emmen"]
    emmen["weight"] = [round(v * 2.20462, 1) for v in emmen["weight"]]
    emmen["age"] = ["unknown" if v == "" else v for v in emmen["age"]]
    del emmen["pressure"]
    emmen["ward"] = ["ABC"[k % 3] for k in range(ROWS)]
    sites["emmen"] = {"Heart Rate" if name == "heart_rate" else name: column for name, column in emmen.items()}
    for site, columns in sites.items():
        ending = ".xlsx" if site == "chur" else ".csv"
        write(folder / f"{site}{ending}", columns, ";" if site == "bern" else ",")
    return folder
