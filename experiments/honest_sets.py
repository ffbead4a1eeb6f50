"""Prediction sets and intervals at 133 small clients, one class of which is rare: how often they hold the truth.

    python -m experiments.honest_sets

Made-up tables: 20 to 60 training rows at each client, of which one in ten is positive; effects, base rates and spreads
differ between clients, mildly or strongly. Each client has 40 further rows for the test, so that coverage can be
measured. Prints a line of Markdown for each seed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from scipy.stats import binom

import bpfed
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, Table
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import Categorical, Column
from bpfed.inference.predictive import Classified, Regressed

CLIENTS, TESTED, LEVEL, FEATURES = 133, 40, 0.9, 6
#: Standard deviations between clients of effects, of base rates, and of the logarithm of the noise.
DIFFERENCES = {"mild": (0.1, 0.2, 0.1), "strong": (0.3, 0.5, 0.3)}


def tables(seed: int, classes: bool, differ: str) -> dict[str, Table]:
    """A table for each client, with its test rows marked."""
    effects, base, noise = DIFFERENCES[differ]
    rng = np.random.default_rng(seed)
    common, found = rng.normal(0.0, 0.8, FEATURES), {}
    for k in range(CLIENTS):
        rows = int(rng.integers(20, 61)) + TESTED
        x = rng.normal(rng.normal(0.0, 0.3, FEATURES), 1.0, (rows, FEATURES))
        own = x @ (common + rng.normal(0.0, effects, FEATURES)) + rng.normal(0.0, base)
        columns: dict[str, Column] = {f"x{j}": x[:, j] for j in range(FEATURES)}
        if classes:
            noisy = own + rng.logistic(0.0, 1.0, rows)
            columns["y"] = Categorical.of(["yes" if v > 3.0 else "no" for v in noisy])
        else:
            columns["y"] = own + rng.normal(0.0, rng.lognormal(0.0, noise), rows)
        columns["split"] = Categorical.of(["train"] * (rows - TESTED) + ["test"] * TESTED)
        found[f"site{k:03d}"] = Table(f"site{k:03d}", rows, columns)
    return found


def within(held: Sequence[int], count: int) -> float:
    """The share of clients whose number of held rows is in the central 95 % of a binomial of this level."""
    low, high = binom.ppf(0.025, count, LEVEL), binom.ppf(0.975, count, LEVEL)
    return float(np.mean([low <= number <= high for number in held]))


def measure(data: FederatedData, settings: Settings) -> str:
    """One line of what sets, or intervals, hold."""
    run = bpfed.fit("bpfed-linear", data, settings=settings, progress=False, say=lambda sentence: None)
    held, infinite, size = [], 0, 0.0
    inside_of: dict[int, list[bool]] = {0: [], 1: []}
    for k, client in enumerate(run.clients()):
        x, y = data.test.client(k)
        found = client.predict(x, prepared=True)
        assert found.scores is not None
        infinite += int((~found.scores.bounds(LEVEL).isfinite()).sum())
        if isinstance(found, Classified):
            sets = found.prediction_set(LEVEL)
            inside = sets[torch.arange(len(y)), y]
            size += float(sets.sum(1).double().mean()) / len(data)
            for label in (0, 1):
                inside_of[label] += inside[y == label].tolist()
        else:
            assert isinstance(found, Regressed)
            low, high = found.interval(LEVEL)
            inside = (low <= y) & (y <= high)
            size += float((high - low).mean()) / len(data)
        held.append(int(inside.sum()))
    shares = [f"{100 * np.mean(inside_of[label]):.1f}" if inside_of[label] else "–" for label in (0, 1)]
    overall = 100 * sum(held) / (TESTED * len(held))
    return f"{overall:.1f} | {shares[0]} | {shares[1]} | {infinite} | {size:.2f} | {100 * within(held, TESTED):.1f}"


def main(seeds: Sequence[int] = (0, 1, 2)) -> None:
    print("| target | differences | seed | overall % | no % | yes % | infinite | size | clients in their band % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for classes, differ in product((True, False), DIFFERENCES):
        for seed in seeds:
            data = federate("sites", tables(seed, classes, differ), "y", seed=seed)
            settings = Settings(rounds=10, calibration=0.3, baselines="off", eval_every=10, seed=seed)
            target = "classes" if classes else "numbers"
            print(f"| {target} | {differ} | {seed} | {measure(data, settings)} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or (0, 1, 2))
