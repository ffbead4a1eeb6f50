"""The recipe beside others: four datasets on the README; and, with what the paper prints, the six cells in one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bpfed._util.scores import deviation
from bpfed.metrics.registry import BEST_IS_HIGH
from experiments import lineup
from experiments.markdown import PRINTED, Cells
from experiments.paired import RECIPE, nearest
from experiments.published import CELLS, TABLES, published
from experiments.records import read
from experiments.results import Results
from experiments.typeset import NOTHING, figures, signed, strong, table

#: The parts' names on their pages.
PART, README_PART = "headline", "measured"
#: The rows of the README: of `results/other`, a file; of the cells, a name. With words for the data.
ROWS = {
    "heart-disease": "4 hospitals, heart disease",
    "wisdm-later": "36 phone users, activity",
    "cifar10-small": "20 clients, CIFAR-10 small",
    "digits": "10 clients, digits",
}
#: Records of comparisons, by the pages of results that show them.
COMPARISONS = {"digits": "digits", "hospitals": "heart-disease", "accelerometers": "wisdm-later"}
#: Its columns: one network each, no calibration, on the seeds that all of them have.
COLUMNS = {RECIPE: "bpfed-recipe", "fedper": "FedPer", "fedavg": "FedAvg", "local": "alone"}
#: Ours, by what they are called in this table.
OURS = {"recipe": RECIPE, "recipe, two members, calibrated": f"{RECIPE}+members+calibrated"}

#: Of a cell and a measure, a number; NaN where there is none.
Number = Callable[[str, str], float]


def markdown(found: Results) -> str:
    """Accuracy, ECE and NLL of partition `groups`, a row each; the best of a measure in a cell is bold.

    Ours are means over the seeds that the best of the others has too.
    """
    cells = found.of("paper", "groups")
    rows: list[list[str]] = []
    for measure, word in (("accuracy", "accuracy %"), ("ece", "ECE %"), ("nll", "NLL")):
        numbers: dict[str, Number] = {title: _of(cells, name) for title, name in OURS.items()}
        if measure in TABLES:
            numbers["best that the paper prints"] = best_printed
        else:
            numbers["BPFed as written"] = _of(cells, "bpfed")
        numbers["best of the other methods here"] = lambda cell, measure: _best_other(cells, cell, measure)
        columns = []
        for cell in CELLS:
            values = [number(cell, measure) for number in numbers.values()]
            columns.append(strong(values, [_shown(value, measure) for value in values], measure))
        rows += [[f"{word}: {title}", *(column[i] for column in columns)] for i, title in enumerate(numbers)]
    return table(["last round", *map(lineup.cell_title, CELLS)], rows)


def readme(found: Results, results: Path) -> str:
    """NLL on four datasets, mean ± standard deviation over seeds; the lowest of a row is bold."""
    rows = []
    for name, words in ROWS.items():
        seeds, version, rounds = _scores(found, results, name)
        if not seeds:
            continue
        means = [float(np.mean(values)) for values in seeds]
        texts = [figures(m, "nll", deviation(list(v))) for m, v in zip(means, seeds, strict=True)]
        rows.append([words, *strong(means, texts, "nll"), f"{rounds}, {len(seeds[0])}", version])
    return table(["test NLL", *COLUMNS.values(), "rounds, seeds", "version"], rows) if rows else ""


def comparison(path: Path) -> str:
    """The table of a comparison from its record: the lowest NLL first, with paired differences, and what made it."""
    told = read(path)
    order = sorted(told["methods"], key=lambda name: float(told["methods"][name]["nll"]["mean"]))
    methods = [told["methods"][name] for name in order]
    columns = []
    for measure in ("accuracy", "nll", "brier", "ece"):
        means = [float(method[measure]["mean"]) for method in methods]
        texts = [figures(m, measure, method[measure]["sd"]) for m, method in zip(means, methods, strict=True)]
        columns.append(strong(means, texts, measure))
    pairs = [told["differences"]["nll"].get(name) for name in order]
    columns.append([_interval(pair) if pair else NOTHING for pair in pairs])
    reference = told["methods"][told["reference"]]["title"]
    head = ["method", "accuracy %", "NLL", "Brier", "ECE %", f"NLL minus that of {reference}, mean over clients"]
    rows = [[method["title"], *(column[i] for column in columns)] for i, method in enumerate(methods)]
    made = f"Version {told['bpfed']}, {told['rounds']} rounds, {len(told['seeds'])} seeds, {told['clients']} clients"
    return f"{table(head, rows)}\n\n{made}. Mean ± standard deviation over seeds; differences with 95 % intervals over seeds."


def _interval(pair: Mapping[str, float]) -> str:
    return f"{signed(pair['mean'], 3)} ({signed(pair['low'], 3)} to {signed(pair['high'], 3)})"


def _scores(found: Results, results: Path, name: str) -> tuple[list[list[float]], str, int]:
    """The NLL of each seed for each column, the versions and the rounds of a row; no columns: it was not run."""
    path = results / "other" / f"{name}.json"
    if path.exists():
        told = read(path)
        return [told["methods"][method]["nll"]["seeds"] for method in COLUMNS], told["bpfed"], told["rounds"]
    cell = found.of("paper", "groups").get(name, {})
    if not all(method in cell for method in COLUMNS):
        return [], "", 0
    records = [cell[method] for method in COLUMNS]
    common = sorted(set.intersection(*(set(record.seeds) for record in records)))
    values = [record.only(common).last("nll").tolist() for record in records]
    return values, ", ".join(sorted({r.version for r in records if r.version})), records[0].rounds


def _of(cells: Cells, name: str) -> Number:
    def number(cell: str, measure: str) -> float:
        record, best = cells.get(cell, {}).get(name), nearest(cells.get(cell, {}), measure)
        if record is not None and best is not None:
            record = record.only(best.seeds)
        return math.nan if record is None or not record.runs else record.mean(measure)

    return number


def best_printed(cell: str, measure: str) -> float:
    """The best number of a measure that the paper prints for a cell, as a fraction."""
    return _best([v for name in TABLES[measure] if (v := published(measure, name, cell)) is not None], measure)


def _best_other(cells: Cells, cell: str, measure: str) -> float:
    """The best that is not the recipe and learns from no moments of personal factors, with or without variants."""
    best = nearest(cells.get(cell, {}), measure)
    return math.nan if best is None else float(best.theirs.mean())


def _shown(value: float, measure: str) -> str:
    """With the decimals that the paper has, where it has the measure."""
    shown = math.isfinite(value) and measure in PRINTED
    return f"{100 * value:.{PRINTED[measure]}f}" if shown else figures(value, measure)


def _best(values: list[float], measure: str) -> float:
    return (max if measure in BEST_IS_HIGH else min)(filter(math.isfinite, values), default=math.nan)
