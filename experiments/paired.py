"""The recipe against the other methods on the seeds that both have: a seed is the same split and noise for all methods.

The others are those that upload nothing about personal factors, with or without variants. The best of them is the one
that the recipe is least ahead of; it is chosen by what is shown, which favours the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bpfed._util.scores import deviation
from bpfed.methods import METHODS
from bpfed.metrics.registry import BEST_IS_HIGH
from experiments import lineup
from experiments.published import CELLS
from experiments.records import CellRecord
from experiments.results import Results
from experiments.typeset import MEASURES, NOTHING, figures, signed, strong, table

RECIPE = "bpfed-recipe"
#: Digits more than a table of means has: differences are smaller than what they are of.
FINER = 1


class Pair(NamedTuple):
    """The recipe and another method, seed by seed.

    Attributes:
        other: The other method's record, of these seeds alone.
        seeds: Those that both have.
        ours: A measure of the recipe's last test, ``[S]``, or of the one before.
        theirs: Of the other, ``[S]``.
    """

    other: CellRecord
    seeds: list[int]
    ours: np.ndarray
    theirs: np.ndarray

    @property
    def difference(self) -> float:
        """Ours less theirs, mean over seeds."""
        return float((self.ours - self.theirs).mean())

    @property
    def error(self) -> float:
        """Its standard error; NaN of one seed."""
        return deviation((self.ours - self.theirs).tolist()) / math.sqrt(len(self.seeds))

    @property
    def margin(self) -> float:
        """Ours over theirs less 1, of the means."""
        return float(self.ours.mean() / self.theirs.mean()) - 1.0


def is_other(name: str) -> bool:
    """Whether a method is neither the recipe nor one that learns from moments of personal factors."""
    base = name.partition("+")[0]
    return base != RECIPE and not (base in METHODS and METHODS[base].population)


def pairs(records: Mapping[str, CellRecord], measure: str, stopped: bool = False) -> dict[str, Pair]:
    """The recipe's last round beside each other method of a cell that has a seed in common with it.

    Args:
        records: By method.
        measure: Which.
        stopped: Take each seed's best tested round of the *others*, a choice made on test data. That test had fewer
            weight draws than the last one; where it had any, the recipe's is the one before its last, which had as few.
    """
    recipe, found = records.get(RECIPE), {}
    if recipe is None:
        return {}
    for name in lineup.ordered(filter(is_other, records)):
        seeds = [seed for seed in recipe.seeds if seed in records[name].seeds]
        if not seeds:
            continue
        own, other = recipe.only(seeds), records[name].only(seeds)
        ours = own.before_last(measure) if stopped and _draws(other) else own.last(measure)
        theirs = other.lowest(measure) if stopped else other.last(measure)
        pair = Pair(other, seeds, ours, theirs)
        if math.isfinite(pair.difference):
            found[name] = pair
    return found


def _draws(record: CellRecord) -> bool:
    """Whether a method's predictions are averages over draws of weights."""
    base = METHODS.get(record.method.partition("+")[0])
    return base is None or base.sampled or bool(record.settings.get("method", {}).get("laplace"))


def nearest(records: Mapping[str, CellRecord], measure: str, stopped: bool = False) -> Pair | None:
    """The other method that the recipe is least ahead of, or furthest behind."""
    sign = 1.0 if measure in BEST_IS_HIGH else -1.0
    return min(pairs(records, measure, stopped).values(), key=lambda pair: sign * pair.difference, default=None)


def differences(found: Results) -> str:
    """Recipe less the best other method, mean ± standard error over common seeds, for each cell of both partitions."""
    rows = []
    for partition in ("groups", "random"):
        cells = found.of("paper", partition)
        for cell in [cell for cell in CELLS if nearest(cells.get(cell, {}), "nll")]:
            row = [f"{lineup.cell_title(cell)}, `{partition}`"]
            for measure in ("accuracy", "nll"):
                pair = nearest(cells[cell], measure)
                row += [NOTHING] * 2 if pair is None else [_named(pair), _difference(pair, measure)]
            for stopped in (False, True):
                pair = nearest(cells[cell], "nll", stopped)
                name = f" ({pair.other.title})" if stopped and pair is not None else ""
                row.append(NOTHING if pair is None else f"{signed(100 * pair.margin, 1)} %{name}")
            rows.append(row)
    head = ["recipe less the best other", "best accuracy (seeds)", "points", "best NLL (seeds)", "NLL", "NLL in %"]
    return table([*head, "NLL in %, others at their best test round"], rows) if rows else ""


def stopped(found: Results, partition: str) -> str:
    """NLL of each other method at its best test round beside the recipe's; in brackets how far that is below."""
    cells = found.of("paper", partition)
    columns = {cell: pairs(cells.get(cell, {}), "nll", stopped=True) for cell in CELLS}
    names = lineup.ordered({name for column in columns.values() for name in column})
    rows = [["BPFed recipe, last round"], ["… the test before it"], *([lineup.title(name)] for name in names)]
    for cell, column in columns.items():
        best = nearest(cells.get(cell, {}), "nll", stopped=True)
        recipe = None if best is None else cells[cell][RECIPE].only(best.seeds)
        for row, test in zip(rows[:2], (CellRecord.last, CellRecord.before_last), strict=True):
            row.append(NOTHING if recipe is None else figures(float(test(recipe, "nll").mean()), "nll"))
        means = [float(column[name].theirs.mean()) if name in column else math.nan for name in names]
        texts = [
            f"{figures(mean, 'nll')} ({signed(100 * column[name].margin, 1)} %)" if name in column else NOTHING
            for name, mean in zip(names, means, strict=True)
        ]
        for row, text in zip(rows[2:], strong(means, texts, "nll"), strict=True):
            row.append(text)
    return table(["NLL", *map(lineup.cell_title, CELLS)], rows) if names else ""


def _named(pair: Pair) -> str:
    return f"{pair.other.title} ({len(pair.seeds)})"


def _difference(pair: Pair, measure: str) -> str:
    per_cent, digits = MEASURES[measure]
    factor, digits = (100.0, digits) if per_cent else (1.0, digits + FINER)
    error = f" ± {factor * pair.error:.{digits}f}" if math.isfinite(pair.error) else ""
    return signed(factor * pair.difference, digits) + error
