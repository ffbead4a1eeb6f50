"""Prediction sets and intervals at 133 small clients, one class of which is rare: how often they hold the truth.

    python -m experiments honest-sets                    # 20 seeds, about ten minutes on one core
    python -m experiments honest-sets --render

Made-up tables: 20 to 60 training rows at each client; where targets are classes, about one in ten is positive. Effects,
base rates and spreads differ between clients, mildly or strongly. Each client has 40 further rows for the test, so that
coverage can be measured.

A client is in its band if its number of held rows is in the central 95 % of a binomial at the level: at least the 2.5 %
quantile and at most the 97.5 % quantile, both inclusive. That is so if its Clopper-Pearson interval holds the level.
Beside what was found, three shares say what could be:

- *exact*: every client's coverage is exactly the level, which needs its distribution to be known.
- *informed*: an oracle that knows how clients differ, but of a client only what the client's training rows tell. Of
  numbers it knows the regression besides, so that only the spread is left to find; its interval is the Bayes predictive
  one. Of classes it knows the mean effects; its probabilities are Bayes predictive, and it bounds each class at the level.
  For that bound it sees 2 000 further inputs of the client, which is more than its training rows tell.
- *alone*: the same model's split-conformal sets from the client's own calibration examples (``sets = "client"``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import betabinom, binom, norm

import bpfed
from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.scores import mean, student
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, Table
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import Categorical, Column
from bpfed.inference.calibration import Conformal
from bpfed.inference.predictive import Classified, Prediction, Regressed
from bpfed.metrics.evaluation import within_band
from experiments.jobs import Job, records, run_jobs

RESULTS = Path("results/honest-sets")
CLIENTS, TESTED, LEVEL, FEATURES = 133, 40, 0.9, 6
#: Standard deviations between clients of effects, of base rates, and of the logarithm of the noise.
DIFFERENCES = {"mild": (0.1, 0.2, 0.1), "strong": (0.3, 0.5, 0.3)}
#: Of the latent value above which a row is positive.
CUT = 3.0
#: The first seed of the records. Nothing was chosen on these seeds.
FIRST, SEEDS = 300, 20
SETTINGS = Settings(rounds=10, calibration=0.3, baselines="off", eval_every=10)


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
            columns["y"] = Categorical.of(["yes" if v > CUT else "no" for v in noisy])
        else:
            columns["y"] = own + rng.normal(0.0, rng.lognormal(0.0, noise), rows)
        columns["split"] = Categorical.of(["train"] * (rows - TESTED) + ["test"] * TESTED)
        found[f"site{k:03d}"] = Table(f"site{k:03d}", rows, columns)
    return found


def in_band(held: Sequence[int]) -> float:
    """The share of clients with these numbers of held test rows that are in their band."""
    return float(within_band(np.array(held, float), np.full(len(held), float(TESTED)), LEVEL).mean())


def informed_numbers(seed: int, differ: str) -> float:
    """The share of clients in their band if an oracle makes the intervals of numbers; see the top of this file."""
    noise, rng = DIFFERENCES[differ][2], np.random.default_rng([seed, 1])
    logs = np.linspace(-4.0 * noise, 4.0 * noise, 161)
    halves = np.linspace(0.3, 8.0, 400)
    covered = 1.0 - 2.0 * norm.sf(halves[:, None] / np.exp(logs))
    held = []
    for rows in rng.integers(20, 61, CLIENTS):
        spread = rng.lognormal(0.0, noise)
        squares = float((rng.normal(0.0, spread, rows) ** 2).sum())
        log_weight = -0.5 * (logs / noise) ** 2 - rows * logs - 0.5 * squares * np.exp(-2.0 * logs)
        weight = np.exp(log_weight - log_weight.max())
        half = halves[np.searchsorted(covered @ (weight / weight.sum()), LEVEL)]
        held.append(int((np.abs(rng.normal(0.0, spread, TESTED)) <= half).sum()))
    return in_band(held)


def informed_classes(seed: int, differ: str, draws: int = 2000, places: int = 2000) -> float:
    """The same for sets of classes. The posterior is of draws from the population, weighted by the client's rows."""
    effects, base, _ = DIFFERENCES[differ]
    rng = np.random.default_rng([seed, 1])
    common, held = rng.normal(0.0, 0.8, FEATURES), []

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        return common + rng.normal(0.0, effects, (count, FEATURES)), rng.normal(0.0, base, count) - CUT

    for rows in rng.integers(20, 61, CLIENTS):
        centre, (own, level) = rng.normal(0.0, 0.3, FEATURES), drawn(1)
        x = rng.normal(centre, 1.0, (rows + TESTED + places, FEATURES))
        y = rng.random(rows + TESTED) < _positive(x[: rows + TESTED] @ own[0] + level[0])
        slopes, levels = drawn(draws)
        logits = x[:rows] @ slopes.T + levels
        log_weight = -np.logaddexp(0.0, np.where(y[:rows, None], -logits, logits)).sum(0)
        weight = np.exp(log_weight - log_weight.max())
        yes = _positive(x[rows:] @ slopes.T + levels) @ (weight / weight.sum())
        inside = np.zeros(TESTED, bool)
        for label, p in ((True, yes), (False, 1.0 - yes)):
            # New rows of a class have its probability p as their density, and the more probable ones are in the set.
            order = np.argsort(-p[TESTED:])
            kept = np.cumsum(p[TESTED:][order]) / p[TESTED:].sum()
            least = p[TESTED:][order][np.searchsorted(kept, LEVEL)]
            inside |= (y[rows:] == label) & (p[:TESTED] >= least)
        held.append(int(inside.sum()))
    return in_band(held)


def _positive(logit: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logit))


def exact() -> float:
    """The share of clients in their band if each has exactly the level."""
    hits = np.arange(TESTED + 1.0)
    inside = within_band(hits, np.full(len(hits), float(TESTED)), LEVEL)
    return float(binom.pmf(hits, TESTED, LEVEL)[inside].sum())


def split(examples: int) -> float:
    """The share in their band of split-conformal sets from so many calibration examples, whatever the model.

    With the k-th smallest of n scores as the bound, coverage has a Beta(k, n + 1 − k) distribution over calibration
    sets. So the number of held rows has a beta-binomial one.
    """
    rank = math.ceil(round((examples + 1) * LEVEL, 9))
    hits = np.arange(TESTED + 1.0)
    inside = within_band(hits, np.full(len(hits), float(TESTED)), LEVEL)
    return float(betabinom.pmf(hits, TESTED, rank, examples + 1 - rank)[inside].sum())


def fewest_examples(share: float) -> int:
    """The number of calibration examples of a client from which on `split` is at least this."""
    below = [n for n in range(9, 2000) if split(n) < share]
    return below[-1] + 1


def inside(found: Prediction, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Which targets are in their set or interval, ``[B]``, and the mean size of these."""
    if isinstance(found, Classified):
        sets = found.prediction_set(LEVEL)
        return sets[torch.arange(len(y)), y], float(sets.sum(1).double().mean())
    assert isinstance(found, Regressed)
    low, high = found.interval(LEVEL)
    return (low <= y) & (y <= high), float((high - low).mean())


def measure(data: FederatedData, settings: Settings) -> dict[str, Any]:
    """Train, and see how often sets or intervals hold the truth."""
    run = bpfed.fit("bpfed-linear", data, settings=settings, progress=False, say=lambda sentence: None)
    infinite, sizes, alone_infinite = 0, [], 0
    held: dict[str, list[int]] = {"as set": [], "alone": []}
    of_class: dict[int, list[bool]] = {0: [], 1: []}
    for k, client in enumerate(run.clients()):
        x, y = data.test.client(k)
        found = client.predict(x, prepared=True)
        assert found.scores is not None
        infinite += int((~found.scores.bounds(LEVEL).isfinite()).sum())
        holds, size = inside(found, y)
        sizes.append(size)
        held["as set"].append(int(holds.sum()))
        if isinstance(found, Classified):
            for label, hits in of_class.items():
                hits += holds[y == label].tolist()
        own = Conformal(found.scores.scores)
        alone_infinite += int(not math.isfinite(own.bound(LEVEL)))
        held["alone"].append(int(inside(found.with_scores(own, None), y)[0].sum()))
    shares = {("no", "yes")[label]: mean([float(hit) for hit in hits]) for label, hits in of_class.items() if hits}
    return {
        "overall": sum(held["as set"]) / (TESTED * len(data)),
        **shares,
        "infinite": infinite,
        "size": mean(sizes),
        "in_band": in_band(held["as set"]),
        "alone": {"in_band": in_band(held["alone"]), "infinite": alone_infinite},
    }


def seeds_of(
    target: str, differences: str, seeds: Sequence[int], device: Literal["auto", "cpu", "cuda"]
) -> dict[str, Any]:
    """The record of all seeds of one case."""
    classes, found = target == "classes", []
    oracle = informed_classes if classes else informed_numbers
    for seed in seeds:
        data = federate("sites", tables(seed, classes, differences), "y", seed=seed)
        measured = measure(data, replace(SETTINGS, seed=seed, device=device))
        found.append({"seed": seed, **measured, "informed": oracle(seed, differences)})
    settings = {name: getattr(SETTINGS, name) for name in ("rounds", "calibration", "sets")}
    words = f"in their band {100 * mean([one['in_band'] for one in found]):.1f} %"
    return {"method": "bpfed-linear", "settings": settings, "level": LEVEL, "runs": found, "words": words}


def interval(values: Sequence[float]) -> str:
    """Mean over seeds in %, its 95 % interval, and the range."""
    if not values:
        return "–"
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    half = student(len(values) - 1) * deviation / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{100 * mean(values):.1f} ± {100 * half:.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def render(results: Path) -> str:
    """The tables of all records as Markdown."""
    found = {(one["asked"]["target"], one["asked"]["differences"]): one for one in records(results, "*.json")}
    cases = [case for case in product(("classes", "numbers"), DIFFERENCES) if case in found]
    if not cases:
        raise UserError(f"'{results}' has no records; run the experiment first.")

    def of(case: tuple[str, str], name: str) -> str:
        return interval([run[name] for run in found[case]["runs"] if name in run])

    one = found[cases[0]]
    seeds = one["asked"]["seeds"]
    lines = [
        f"Version {one['bpfed']}, seeds {seeds[0]} to {seeds[-1]}. Mean ± its 95 % interval (least to most of a seed).",
        "",
        "| targets | clients differ | held % | of the frequent class | of the rare class | infinite |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        infinite = sum(run["infinite"] for run in found[case]["runs"])
        parts = [of(case, name) for name in ("overall", "no", "yes")]
        lines.append(f"| {' | '.join((*case, *parts))} | {infinite} |")
    lines += [
        "",
        "| targets | clients differ | in their band % | informed | alone | exact |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        alone = f"{100 * mean([run['alone']['in_band'] for run in found[case]['runs']]):.1f}"
        informed = f"{100 * mean([run['informed'] for run in found[case]['runs']]):.1f}"
        lines.append(f"| {' | '.join((*case, of(case, 'in_band')))} | {informed} | {alone} | {100 * exact():.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments honest-sets", description=about)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=FIRST, help="the first of them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="print the tables of the records, and run nothing")
    given = parser.parse_args(arguments)
    if given.render:
        print(render(given.results))
        return
    seeds = list(range(given.first, given.first + given.seeds))
    jobs = [
        Job(
            f"{target}-{differences}.json",
            seeds_of,
            {"target": target, "differences": differences, "seeds": seeds},
            where=given.device,
        )
        for target, differences in product(("classes", "numbers"), DIFFERENCES)
    ]
    run_jobs(jobs, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
