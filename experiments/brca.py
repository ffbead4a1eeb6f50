"""FLamby's Fed-TCGA-BRCA on its own split: times to an event in six regions.

    python -m experiments brca --out FILE     # with BPFED_DATA set

Settings are the defaults for tables with a linear network; priors and sharing are chosen on held-out training rows. It
prints c-index and integrated Brier score of each region, mean and range over seeds, beside the baselines.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import bpfed
from bpfed._util.files import write_whole

SEEDS = range(5)
ROUNDS = 30
METRICS = ("c_index", "ibs", "km_ibs")


def table(source: Path, out: Path) -> None:
    """Write the patients with their region and part of the split as one file."""
    with (source / "tcga-brca-split.csv").open(encoding="utf-8") as file:
        split = {row["pid"]: (row["fold"], f"region {row['fold2'][-1]}") for row in csv.DictReader(file)}
    with (source / "tcga-brca.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["pid"] in split]
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*rows[0], "split", "region"])
        writer.writerows([*row.values(), *split[row["pid"]]] for row in rows)


def record(clients: tuple[str, ...], found: list[Any], plain: list[dict[str, Any]], rows: list[int]) -> dict[str, Any]:
    """The figures of all seeds: of each region, and as the mean of regions."""
    return {
        "bpfed": bpfed.__version__,
        "settings": {"rounds": ROUNDS, "network": "linear"},
        "seeds": list(SEEDS)[: len(found)],
        "test rows": dict(zip(clients, rows, strict=True)),
        "clients": {name: {m: [e[m].clients[i] for e in found] for m in METRICS} for i, name in enumerate(clients)},
        "mean of clients": {m: [e[m].mean for e in found] for m in METRICS},
        "baselines": {row["short"]: {m: row["scores"][m]["mean"] for m in METRICS[:2]} for row in plain},
    }


def main(arguments: list[str] | None = None) -> None:
    """Train with each seed and print the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments brca", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    given = parser.parse_args(arguments)
    source = Path(os.environ["BPFED_DATA"]) / "flamby"
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "brca.csv"
        table(source, path)
        asked: dict[str, Any] = {"target": "T", "event": "E", "task": "survival", "client_column": "region"}
        data = bpfed.data.load(f"folder:{path}", ignore="pid", **asked)
        for seed in SEEDS:
            run = bpfed.fit(data=data, rounds=ROUNDS, seed=seed, network="linear", progress=False)
            assert run.evaluation is not None
            evaluation, _ = run.evaluation
            found.append(evaluation)
            print(f"seed {seed}: " + ", ".join(f"{m} {evaluation[m].mean:.4f}" for m in METRICS), flush=True)
        plain = run.baselines()["rows"]
    print(f"{'':24}{'c-index':>8}{'range':>16}{'IBS':>8}{'KM':>8}")
    for i, client in enumerate(data.clients):
        c, ibs, km = (np.array([e[m].clients[i] for e in found]) for m in ("c_index", "ibs", "km_ibs"))
        size = f"{client}, {len(data.test.client(i)[1])} rows"
        print(f"{size:24}{c.mean():8.3f}{f'{c.min():.3f}-{c.max():.3f}':>16}{ibs.mean():8.3f}{km.mean():8.3f}")
    means = np.array([[e[m].mean for m in ("c_index", "ibs", "km_ibs")] for e in found])
    of = f"{means[:, 0].min():.3f}-{means[:, 0].max():.3f}"
    print(f"{'mean of clients':24}{means[:, 0].mean():8.3f}{of:>16}{means[:, 1].mean():8.3f}{means[:, 2].mean():8.3f}")
    for row in plain:
        c, ibs = (row["scores"][m]["mean"] for m in ("c_index", "ibs"))
        print(f"{row['short']:24}{c:8.3f}{'':16}{ibs:8.3f}")

    if given.out is not None:
        rows = [len(data.test.client(i)[1]) for i in range(len(data))]
        write_whole(given.out, json.dumps(record(data.clients, found, plain, rows), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
