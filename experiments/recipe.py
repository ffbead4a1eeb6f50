"""The tables of ``docs/lab/recipe-details.md`` that are made from the six cells of partition `groups`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments import lineup
from experiments.headline import best_printed
from experiments.markdown import Cells, longer, printed
from experiments.published import AIM_DECIMALS, AIMS, CELLS, reached
from experiments.records import CellRecord
from experiments.results import Results
from experiments.typeset import NOTHING, figures, strong, table

RECIPE, POPULATION = "bpfed-recipe", "bpfed-population"
CALIBRATED, BOTH = "+calibrated", "+members+calibrated"


def aims(found: Results) -> str:
    """Accuracy and ECE beside what the paper prints and what was aimed at; bold is what reaches its aim in both."""
    cells = found.of("paper", "groups")
    most = [figures(best_printed(cell, "accuracy"), "accuracy") for cell in CELLS]
    rows = [["best printed accuracy / ECE of BPFed as printed"]]
    rows[0] += [f"{top} / {printed('ece', 'bpfed', cell)}" for top, cell in zip(most, CELLS, strict=True)]
    for method, word, variants in (
        (RECIPE, "recipe", {"": "", CALIBRATED: " + calibrated", BOTH: " + 2 members + calibrated"}),
        (POPULATION, "population", {"": "", BOTH: " + 2 members + calibrated"}),
    ):
        pairs = [" / ".join(f"{value:.{AIM_DECIMALS}f}" for value in pair) for pair in AIMS[method]]
        rows.append([f"aim of the {word}", *pairs])
        for variant, words in variants.items():
            title = f"{word}{words}" if words else f"**{word}**"
            rows.append([title, *(_beside(cells, cell, method, variant) for cell in CELLS)])
    return table(["accuracy % / ECE %", *map(lineup.cell_title, CELLS)], rows)


def calibration(found: Results) -> str:
    """NLL and ECE of the recipe as it comes and with a learnt temperature; bold is the lower one of a measure."""
    rows = []
    for title, own in _recipes(found, ("", CALIBRATED)):
        learnt = [value for run in own[1].runs if (value := run.get("calibration_temperature")) is not None]
        mean = f"{sum(learnt) / len(learnt):.2f}" if learnt else NOTHING
        rows.append([title, *_best_of(own, ("nll", "ece")), mean])
    return table(["NLL, ECE %", "as it comes", "calibrated", "calibration temperature"], rows) if rows else ""


def members(found: Results) -> str:
    """Accuracy and NLL of the recipe with one member and with two; bold is the best of a measure."""
    own = _recipes(found, ("", CALIBRATED, BOTH))
    rows = [[title, *_best_of(records, ("accuracy", "nll"))] for title, records in own]
    return table(["accuracy %, NLL", "recipe", "+ calibrated", "+ 2 members + calibrated"], rows) if rows else ""


def rounds(found: Results) -> str:
    """The recipe with three times the rounds."""
    return longer(found, RECIPE)


#: Every part by its name on the page.
PARTS: dict[str, Callable[[Results], str]] = {
    "calibration": calibration,
    "members": members,
    "aims": aims,
    "rounds": rounds,
}


def _recipes(found: Results, variants: Sequence[str]) -> list[tuple[str, list[CellRecord]]]:
    """The recipe's records in each cell that has all these variants, under the cell's name and its number of seeds."""
    listed = []
    for cell in CELLS:
        own = [found.of("paper", "groups").get(cell, {}).get(RECIPE + variant) for variant in variants]
        records = [record for record in own if record is not None]
        if len(records) == len(variants):
            seeds = len(records[0].runs)
            listed.append((f"{lineup.cell_title(cell)}, {seeds} seed{'' if seeds == 1 else 's'}", records))
    return listed


def _best_of(records: Sequence[CellRecord], measures: Sequence[str]) -> list[str]:
    """The measures of each record; the best of each is bold, unless all look the same."""
    columns = []
    for measure in measures:
        means = [record.mean(measure) for record in records]
        texts = [figures(mean, measure) for mean in means]
        columns.append(strong(means, texts, measure) if len(set(texts)) > 1 else texts)
    return [", ".join(texts) for texts in zip(*columns, strict=True)]


def _beside(cells: Cells, cell: str, method: str, variant: str) -> str:
    record = cells.get(cell, {}).get(method + variant)
    if record is None:
        return NOTHING
    accuracy, ece = record.mean("accuracy"), record.mean("ece")
    text = f"{figures(accuracy, 'accuracy')} / {figures(ece, 'ece')}"
    return f"**{text}**" if reached(method, cell, accuracy, ece) else text
