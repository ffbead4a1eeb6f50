"""What a comparison found: the records of its runs, their means over seeds, and how methods differ from a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bpfed._util import text
from bpfed._util.errors import UserError, unknown
from bpfed._util.scores import deviation, mean, student
from bpfed._util.text import many
from bpfed.comparison import page, tables
from bpfed.metrics.registry import Metric, get_metric
from bpfed.report.record import Rival, RunRecord, value, verdict

#: Fewer clients than this say nothing about other clients.
FEWEST = 5
#: Resamples of the bootstrap.
RESAMPLES = 10_000


class Difference(NamedTuple):
    """A method's metric minus the reference's, mean over clients, then over seeds.

    Attributes:
        mean: The difference.
        low: Lower end of its 95 % interval; NaN where there is none.
        high: Upper end of it.
        interval: How the interval was made, in words.
        seeds: The mean over clients for each seed.
        lower: In how many pairs (a client of a seed) the method's value is the lower one.
        higher: In how many it is the higher one.
        pairs: How many pairs there are.
    """

    mean: float
    low: float
    high: float
    interval: str
    seeds: tuple[float, ...]
    lower: int
    higher: int
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def difference(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> Difference:
    """What two methods differ by; a client that one of them was not tested on is left out.

    With two seeds or more the interval is Student's over the seeds' means. With one it is a bootstrap over clients,
    which says how far the difference depends on who these clients are and nothing about other splits or other training.

    Args:
        ours: Metric by seed and client.
        theirs: The reference's.
    """
    pairs = [_apart(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    found = [d for d in pairs if len(d)]
    means = tuple(float(d.mean()) for d in found)
    if not means:
        return Difference(math.nan, math.nan, math.nan, "none: there is no pair", (), 0, 0, 0)
    every = np.concatenate(found)
    centre = sum(means) / len(means)
    if len(means) > 1:
        half = student(len(means) - 1) * deviation(means) / math.sqrt(len(means))
        low, high, how = centre - half, centre + half, f"paired t over {len(means)} seeds"
    elif len(every) >= FEWEST:
        low, high = _bootstrap(every)
        how = f"bootstrap over {len(every)} clients of one seed"
    else:
        low, high, how = math.nan, math.nan, f"none: one seed and {many(len(every), 'client')} are too few"
    return Difference(centre, low, high, how, means, int((every < 0).sum()), int((every > 0).sum()), len(every))


def _apart(ours: Mapping[str, float], theirs: Mapping[str, float]) -> np.ndarray:
    found = [ours[c] - theirs[c] for c in ours if c in theirs]
    return np.array([d for d in found if math.isfinite(d)])


def _bootstrap(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)


# --- The record -------------------------------------------------------------------------------------------------------


#: The metrics that are compared, as far as the runs have them.
#: The reference where none is named: the first of these that takes part.
REFERENCES = ("default", "bpfed-adaptive", "bpfed-recipe", "bpfed")


class Vocabulary(NamedTuple):
    """What a comparison calls things.

    Attributes:
        kind: Itself.
        one: One of those compared.
        time: One of the times that each is run.
        scored: What the figures are of.
        dealt: What is to be said of times that each deal the examples out again.
    """

    kind: str = "comparison"
    one: str = "method"
    time: str = "seed"
    scored: str = "test examples"
    dealt: str = (
        "Every seed splits the same examples anew, so seeds share examples and are not independent: the intervals are "
        "narrower than for data never seen."
    )


#: Of methods, with several seeds.
METHODS_AND_SEEDS = Vocabulary()


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods on the same data, each with the same seeds.

    Attributes:
        records: A run for each name and seed.
        titles: The heading of each name.
        reference: The name that the others' differences are taken from.
        words: What things are called.
        baselines: Plain models on the same test rows (`bpfed.runs.baselines`), likewise; none of them is a method.
    """

    records: dict[str, dict[int, RunRecord]]
    titles: dict[str, str]
    reference: str
    words: Vocabulary = METHODS_AND_SEEDS
    baselines: dict[str, dict[int, RunRecord]] = field(default_factory=dict)

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {self.mean(name, 'nll'):.3f}" for name in self.ranking)
        return f"<{self.title}; NLL: {scores}>"

    @property
    def names(self) -> list[str]:
        """Who takes part, in the order they were named."""
        return list(self.records)

    @property
    def ranking(self) -> list[str]:
        """Who takes part, the lowest mean NLL first."""
        return self._ranked(self.names)

    @property
    def shown(self) -> list[str]:
        """Methods and baselines, the lowest mean NLL first."""
        return self._ranked([*self.names, *self.baselines])

    def _ranked(self, names: list[str]) -> list[str]:
        nll = {name: self.mean(name, "nll") for name in names}
        return sorted(names, key=lambda name: (math.isnan(nll[name]), nll[name]))

    def runs(self, name: str) -> dict[int, RunRecord]:
        """The records of a method or baseline by seed."""
        return self.records[name] if name in self.records else self.baselines[name]

    def label(self, name: str) -> str:
        """The heading of a method, or of a baseline in brackets."""
        if name in self.records:
            return self.titles[name]
        return f"[{next(iter(self.baselines[name].values())).summary['short']}]"

    @property
    def verdict(self) -> str:
        """Whether a baseline is better than the reference, and which were not fitted; empty where none was asked for."""
        rivals = []
        for name, runs in self.baselines.items():
            summary, found = next(iter(runs.values())).summary, self.difference(name)
            mean = self.mean(name, "nll")
            known = math.isfinite(found.low)
            same = (found.mean > 0) == (mean > self.mean(self.reference, "nll"))  # over clients as over examples
            clear = found.clear and same if known else None
            rivals.append(
                Rival(summary["title"], summary["pooled"], mean, found.lower, found.higher, found.pairs, clear)
            )
        said = verdict(self.titles[self.reference], self.mean(self.reference, "nll"), rivals, tables.pairs(self))
        return " ".join(filter(None, (said, self.first.skipped_baselines)))

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order they were named."""
        return list(next(iter(self.records.values())))

    @property
    def first(self) -> RunRecord:
        """One of the runs, for what they have in common."""
        return self.records[self.names[0]][self.seeds[0]]

    @property
    def title(self) -> str:
        """The comparison in one line of plain words."""
        summary = self.first.summary
        counted = (
            (len(self.names), self.words.one),
            (len(self.seeds), self.words.time),
            (summary.get("clients", 0), "client"),
            (summary.get("rounds", 0), "round"),
        )
        words = ", ".join(text.many(n, one) for n, one in counted)
        return f"{self.words.kind.capitalize()} on {summary.get('data', 'unnamed data')}: {words}"

    @property
    def measures(self) -> list[Metric]:
        """The metrics that are compared, the main one first."""
        return [m for m in self.first.measures if m.prominent]

    @property
    def bins(self) -> int:
        """Bins of the ECE."""
        return int(self.first.evaluation["bins"])

    def over_seeds(self, name: str, metric: str, part: str = "pooled") -> list[float]:
        """A metric at the last round for each seed; ``part`` is ``pooled``, ``mean`` (over clients) or ``worst``."""
        return [run.last(metric, part) for run in self.runs(name).values()]

    def mean(self, name: str, metric: str, part: str = "pooled") -> float:
        """Mean of that over seeds."""
        return mean(self.over_seeds(name, metric, part))

    def sd(self, name: str, metric: str, part: str = "pooled") -> float:
        """Standard deviation of that over seeds; NaN with one seed."""
        return deviation(self.over_seeds(name, metric, part))

    def floor(self, name: str) -> float:
        """The ECE that perfectly calibrated predictions as sure as these would show, mean over seeds."""
        return mean([value(run.evaluation, "ece_floor") for run in self.runs(name).values()])

    def seconds(self, name: str) -> float:
        """Time of a run, mean over seeds."""
        return mean([value(run.summary, "seconds") for run in self.runs(name).values()])

    def best(self, metric: str) -> str:
        """Whose mean over seeds is best."""
        sign = -1 if get_metric(metric).high_is_good else 1
        values = {name: sign * self.mean(name, metric) for name in self.shown}
        return min(self.shown, key=lambda name: math.inf if math.isnan(values[name]) else values[name])

    def clients(self, name: str, metric: str) -> dict[int, dict[str, float]]:
        """A metric at the last round by seed and client; clients without test examples are left out."""
        return {
            seed: {row["name"]: v for row in run.rows if math.isfinite(v := value(row, metric))}
            for seed, run in self.runs(name).items()
        }

    def difference(self, name: str, metric: str = "nll", reference: str | None = None) -> Difference:
        """How a metric differs from the reference's, paired by client and by seed."""
        for known in (name, reference or self.reference):
            if known not in self.records and known not in self.baselines:
                raise unknown("method of this comparison", known, [*self.records, *self.baselines])
        return difference(self.clients(name, metric), self.clients(reference or self.reference, metric))

    def differences(self, metric: str = "nll", baselines: bool = False) -> dict[str, Difference]:
        """Differences in a metric from the reference, best NLL first; also of baselines if asked."""
        names = self.shown if baselines else self.ranking
        return {name: self.difference(name, metric) for name in names if name != self.reference}

    def summary(self) -> str:
        """Means over seeds and differences, as Markdown."""
        return tables.markdown(self)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the combined report, one self-contained HTML page."""
        return page.write(self, path)


def baselines_of(records: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, dict[int, RunRecord]]:
    """The baselines of these runs by name and seed, as if each were a run; only those that every seed has.

    All runs of a seed are on the same data, so the first that has baselines stands for all.
    """
    found: dict[str, dict[int, RunRecord]] = {}
    seeds = list(next(iter(records.values()), {}))
    for seed in seeds:
        run = next((own[seed] for own in records.values() if own[seed].baselines), None)
        for row in run.baselines if run is not None else []:
            found.setdefault(f"baseline:{row['name']}", {})[seed] = _as_run(run, row)
    return {name: runs for name, runs in found.items() if len(runs) == len(seeds)}


def _as_run(run: RunRecord | None, row: Mapping[str, Any]) -> RunRecord:
    assert run is not None
    clients = [
        {key: own.get(key) for key in ("name", "train", "test")}
        | {m: values[i] for m, values in row["clients"].items()}
        for i, own in enumerate(run.rows)
    ]
    evaluation = {"bins": run.evaluation["bins"], "clients": clients}
    evaluation |= {key: row[key] for key in ("reliability", "ece_floor")}
    summary = {key: row[key] for key in ("title", "short", "pooled")}
    return RunRecord({}, [{"round": run.history[-1]["round"], **row["scores"]}], evaluation, summary)


def chosen_reference(names: list[str], wanted: str | None) -> str:
    """The reference that is wanted; None: the recipe where it takes part, else BPFed, else whoever was named first."""
    if wanted is not None and wanted not in names:
        raise UserError(
            f"The reference '{wanted}' is not one of the methods; add it to them, or choose from: {', '.join(names)}."
        )
    return wanted or next((name for name in REFERENCES if name in names), names[0])
