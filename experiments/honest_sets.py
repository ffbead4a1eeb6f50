"""Prediction sets and intervals at 133 small clients, one class of which is rare: how often they hold the truth.

    python -m experiments.honest_sets 0 1 2

Made-up tables: 20 to 60 training rows at each client, of which one in ten is positive; effects, base rates and spreads
differ between clients, mildly or strongly. Each client has 40 further rows for the test, so that coverage can be
measured. Prints a line of Markdown for each seed, then means over seeds with 95 % intervals.

A client is in its band if its number of held rows is in the central 95 % of a binomial at the level: at least the 2.5 %
quantile and at most the 97.5 % quantile, both inclusive. That is so if its Clopper-Pearson interval holds the level.
Beside what was found, two shares say what could be:

- *exact*: every client's coverage is exactly the level, which needs its distribution to be known;
- *informed* (numbers): an oracle that knows the regression and the distribution of spreads over clients, but of a
  client's own spread only what the client's training rows tell. Its interval is the Bayes predictive one. No rule that
  sees the same rows can do much better.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binom, norm

import bpfed
from bpfed._util.scores import student
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, Table
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import Categorical, Column
from bpfed.inference.predictive import Classified, Regressed
from bpfed.metrics.evaluation import within_band

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


def informed(seed: int, differ: str, repeats: int = 20) -> float:
    """The share of clients in their band if an oracle makes the intervals of numbers (see above)."""
    noise, rng = DIFFERENCES[differ][2], np.random.default_rng([seed, 1])
    logs = np.linspace(-4.0 * noise, 4.0 * noise, 161)
    halves = np.linspace(0.3, 8.0, 400)
    covered = 1.0 - 2.0 * norm.sf(halves[:, None] / np.exp(logs))
    held = []
    for rows in rng.integers(20, 61, repeats * CLIENTS):
        spread = rng.lognormal(0.0, noise)
        squares = float((rng.normal(0.0, spread, rows) ** 2).sum())
        log_weight = -0.5 * (logs / noise) ** 2 - rows * logs - 0.5 * squares * np.exp(-2.0 * logs)
        weight = np.exp(log_weight - log_weight.max())
        half = halves[np.searchsorted(covered @ (weight / weight.sum()), LEVEL)]
        held.append(int((np.abs(rng.normal(0.0, spread, TESTED)) <= half).sum()))
    return float(within_band(np.array(held, float), np.full(len(held), float(TESTED)), LEVEL).mean())


def exact() -> float:
    """The share of clients in their band if each has exactly the level."""
    hits = np.arange(TESTED + 1.0)
    inside = within_band(hits, np.full(len(hits), float(TESTED)), LEVEL)
    return float(binom.pmf(hits, TESTED, LEVEL)[inside].sum())


class Found(NamedTuple):
    """What sets, or intervals, hold: shares in %, numbers, and their mean size."""

    overall: float
    no: float
    yes: float
    infinite: int
    size: float
    within: float


def measure(data: FederatedData, settings: Settings) -> Found:
    """Train, and see how often sets or intervals hold the truth."""
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
    shares = [100.0 * float(np.mean(inside_of[label])) if inside_of[label] else math.nan for label in (0, 1)]
    within = within_band(np.array(held, float), np.full(len(held), float(TESTED)), LEVEL)
    overall = 100.0 * sum(held) / (TESTED * len(held))
    return Found(overall, shares[0], shares[1], infinite, size, 100.0 * float(within.mean()))


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def interval(values: Sequence[float]) -> str:
    """Mean, 95 % interval of the mean over seeds, and the range."""
    if math.isnan(values[0]):
        return "–"
    half = student(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{np.mean(values):.1f} ± {half:.1f} ({min(values):.1f} to {max(values):.1f})"


def main(seeds: Sequence[int] = (0, 1, 2)) -> None:
    print(
        f"Version {bpfed.__version__}, {len(seeds)} seeds from {min(seeds)} to {max(seeds)}, exact {100 * exact():.1f} %"
    )
    print(line("target", "differences", "seed", "overall %", "no %", "yes %", "infinite", "size", "in their band %"))
    print("|---|---|---|---|---|---|---|---|---|")
    means = []
    for classes, differ in product((True, False), DIFFERENCES):
        target, found = "classes" if classes else "numbers", []
        for seed in seeds:
            data = federate("sites", tables(seed, classes, differ), "y", seed=seed)
            settings = Settings(rounds=10, calibration=0.3, baselines="off", eval_every=10, seed=seed)
            found.append(measure(data, settings))
            cells = ["–" if math.isnan(v) else f"{v:.1f}" for v in found[-1][:3]]
            last = found[-1]
            print(
                line(target, differ, seed, *cells, last.infinite, f"{last.size:.2f}", f"{last.within:.1f}"), flush=True
            )
        oracle = "–" if classes else f"{100 * np.mean([informed(seed, differ) for seed in seeds[:5]]):.1f}"
        parts = [interval([one[k] for one in found]) for k in (0, 1, 2, 5)]
        means.append(line(target, differ, *parts, oracle))
    print("\n" + line("target", "differences", "overall %", "no %", "yes %", "in their band %", "informed %"))
    print("|---|---|---|---|---|---|---|")
    print("\n".join(means))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or (0, 1, 2))
