"""The parts of the pages in ``docs/results/`` that are made from results: tables, and links to the figures.

What stands between ``<!-- name -->`` and ``<!-- /name -->`` is overwritten, all else is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.scores import deviation
from bpfed._util.text import plural
from bpfed.metrics.registry import BEST_IS_HIGH
from experiments import lineup, paired
from experiments.panel import Line
from experiments.published import CELLS, METHODS, TABLES, published
from experiments.records import CellRecord
from experiments.results import Results
from experiments.sweeps import Sweep
from experiments.typeset import NOTHING, figures, opens, placed, signed, strong, table, unit

MISSING = "Not run yet."
#: Decimals of the paper's own numbers.
PRINTED = {"accuracy": 2, "ece": 1}

Cells = Mapping[str, Mapping[str, CellRecord]]


def fill(pages: Mapping[Path, str], found: Results, pictures: Mapping[str, Sequence[str]]) -> dict[Path, str]:
    """Pages with all their parts written again; those without a part are left out.

    Args:
        pages: The pages, by any name.
        found: What there is.
        pictures: For each part the Markdown of its figures.

    Raises:
        UserError: A part has no place on the pages, or more than one.
    """
    filled: dict[Path, str] = {}
    for name, part in PARTS.items():
        text = "\n\n".join([t for t in (part(found), *pictures.get(name, ())) if t]) or MISSING
        homes = [path for path, page in pages.items() if opens(name) in page]
        page = filled.get(homes[0], pages[homes[0]]) if len(homes) == 1 else ""
        filled[homes[0] if homes else Path()] = placed(page, name, text)
    return filled


def blank() -> str:
    """A page with a place for every part and nothing else."""
    return "# Results\n\n" + "\n".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in PARTS)


def measure_table(cells: Cells, measure: str, beside: bool, value: Callable[[CellRecord], float] | None = None) -> str:
    """Methods by cells, last round, the best of a column bold; the best mean rank first, and under it who was made when.

    Args:
        cells: ``[cell][method]``.
        measure: Which.
        beside: Whether the paper's number stands in brackets beside ours.
        value: Another number than the mean of the last round, without a deviation.
    """
    if not cells:
        return ""
    names = {name for cell in cells.values() for name in cell} | (set(TABLES[measure]) if beside else set())
    titles = METHODS | {name: record.title for cell in cells.values() for name, record in cell.items()}
    number = value or (lambda record: record.mean(measure))
    order, columns = _by_rank(lineup.ordered(names), cells, number, measure), []
    for cell in CELLS:
        records = [cells.get(cell, {}).get(name) for name in order]
        if value is None:
            values = [math.nan if r is None else r.mean(measure) for r in records]
            spreads = [math.nan if r is None else r.sd(measure) for r in records]
        else:
            values, spreads = [math.nan if r is None else value(r) for r in records], [math.nan] * len(records)
        texts = [figures(v, measure, s) for v, s in zip(values, spreads, strict=True)]
        column = strong(values, texts, measure)
        if beside:
            beside_ours = [printed(measure, name, cell) for name in order]
            column = [f"{t} ({p})" if p else t for t, p in zip(column, beside_ours, strict=True)]
        columns.append(column)
    head = [unit(measure), *map(lineup.cell_title, CELLS)]
    made = table(head, [[titles[name], *(column[i] for column in columns)] for i, name in enumerate(order)])
    return "\n\n".join([made, *_made_by(cells, order)])


def _by_rank(names: list[str], cells: Cells, number: Callable[[CellRecord], float], measure: str) -> list[str]:
    """Names by their mean rank over the cells that they have, the best first; those without a number last."""
    ranks: dict[str, list[int]] = {name: [] for name in names}
    for cell in cells.values():
        found = {name: number(cell[name]) for name in names if name in cell}
        best = sorted((v for v in found.values() if math.isfinite(v)), reverse=measure in BEST_IS_HIGH)
        for name, v in found.items():
            if math.isfinite(v):
                ranks[name].append(best.index(v))
    return sorted(names, key=lambda name: sum(ranks[name]) / len(ranks[name]) if ranks[name] else math.inf)


def _made_by(cells: Cells, names: Sequence[str]) -> list[str]:
    """Rounds of each cell, and which versions made which rows; nothing where no file tells."""
    rounds = {cell: {record.rounds for record in cells[cell].values()} for cell in CELLS if cells.get(cell)}
    by_version: dict[str, list[str]] = {}
    for name in names:
        records = [cells[cell][name] for cell in CELLS if name in cells.get(cell, {})]
        told = ", ".join(sorted({record.version for record in records if record.version}))
        if told:
            by_version.setdefault(told, []).append(records[0].title)
    if not by_version:
        return []
    words = ", ".join(f"{lineup.cell_title(cell)} {'/'.join(map(str, sorted(n)))}" for cell, n in rounds.items())
    lines = [f"- bpfed {version}: {', '.join(titles)}" for version, titles in sorted(by_version.items())]
    return [f"Rounds: {words}. Settings are in the records. Versions that made the rows:", "\n".join(lines)]


def effort(found: Results) -> str:
    """Rounds, seeds and wall time of every cell, and the devices."""
    parts = []
    for protocol, partitions in found.cells.items():
        for partition, cells in partitions.items():
            records = [record for cell in cells.values() for record in cell.values()]
            usual = Counter(record.device for record in records).most_common(1)[0][0]
            titles = {record.method: record.title for record in records}
            rows = []
            for name in lineup.ordered(titles):
                row = [titles[name]]
                for cell in CELLS:
                    record = cells.get(cell, {}).get(name)
                    row.append(NOTHING if record is None else _effort(record, usual))
                rows.append(row)
            nine = [[r for r in cells.get(cell, {}).values() if r.method in METHODS] for cell in CELLS]
            totals = [sum(r.seconds for r in cells.get(cell, {}).values()) for cell in CELLS]
            for word, sums in (("the paper's nine", [sum(r.seconds for r in n) for n in nine]), ("all", totals)):
                rows.append([word, *(_time(t) if t else NOTHING for t in sums)])
            parts.append(
                f"Protocol `{protocol}`, partition `{partition}`: rounds x seeds, wall time of all seeds together on "
                f"{usual} where no other device is named; {_time(sum(totals))} in all, "
                f"{_time(sum(r.seconds for n in nine for r in n))} for the methods of the paper's table.\n\n"
                + table(["rounds x seeds, time", *map(lineup.cell_title, CELLS)], rows)
            )
    return "\n\n".join(parts)


def reference(found: Results) -> str:
    """The preset `published`: the best test round, as the paper has it, and the last."""
    cells = found.of("published", "groups")
    names = lineup.ordered({name for cell in cells.values() for name in cell})
    rows = []
    for name in names:
        records = [cells.get(cell, {}).get(name) for cell in CELLS]
        title = next(record.title for record in records if record is not None)
        for measure, word in (("accuracy", "accuracy %"), ("ece", "ECE %")):
            best = [math.nan if r is None else r.best(measure) for r in records]
            last = [math.nan if r is None else r.mean(measure) for r in records]
            rows.append([f"{title}, {word}, best round", *(figures(v, measure) for v in best)])
            rows.append([f"{title}, {word}, last round", *(figures(v, measure) for v in last)])
            rows.append([f"{title}, {word}, printed", *(printed(measure, name, cell) or NOTHING for cell in CELLS)])
    return table(["", *map(lineup.cell_title, CELLS)], rows) if rows else ""


def _longer(found: Results) -> list[tuple[CellRecord, CellRecord]]:
    """Runs of more rounds than the protocol's, each after the same seeds with the protocol's."""
    pairs = []
    for rounds, records in sorted(found.others.items()):
        for protocol, partitions in records.items():
            for partition, cells in partitions.items():
                for cell in [c for c in CELLS if c in cells]:
                    for name in lineup.ordered(cells[cell]):
                        first, then = found.of(protocol, partition).get(cell, {}).get(name), cells[cell][name]
                        if first is None or rounds <= first.rounds:
                            continue
                        first = first.only(then.seeds)
                        if first.seeds == then.seeds:
                            pairs.append((first, then))
    return pairs


def longer(found: Results, method: str | None = None) -> str:
    """Runs of more rounds than the protocol's, beside the same seeds with the protocol's; of one method, or of all."""
    rows = []
    for first, then in _longer(found):
        if method in (None, then.method):
            title = f"{then.title}, {lineup.cell_title(then.cell)}, `{then.partition}`"
            row = [title, f"{first.rounds} → {then.rounds}"]
            for measure in ("accuracy", "nll", "ece"):
                row.append(f"{figures(first.mean(measure), measure)} → {figures(then.mean(measure), measure)}")
            change = then.mean("nll") / first.mean("nll") - 1
            rows.append([*row, f"{signed(100 * change, 1)} %"])
    head = ["", "rounds", "accuracy %", "NLL", "ECE %", "change of NLL"]
    return table(head, rows) if rows else ""


def hundred(found: Results) -> str:
    """All methods on MNIST small after 100 rounds, the lowest NLL first."""
    cells = found.others.get(100, {}).get("paper", {}).get("groups", {}).get("mnist-small", {})
    records = sorted(cells.values(), key=lambda record: record.mean("nll"))
    columns = []
    for measure in ("accuracy", "nll", "brier", "ece"):
        means = [record.mean(measure) for record in records]
        spreads = [record.sd(measure) for record in records]
        texts = [figures(mean, measure, sd) for mean, sd in zip(means, spreads, strict=True)]
        columns.append(strong(means, texts, measure))
    rows = [
        [record.title, *(column[i] for column in columns), _halfway(record), str(len(record.runs)), record.device]
        for i, record in enumerate(records)
    ]
    head = ["100 rounds", "accuracy %", "NLL", "Brier", "ECE %", "NLL at round 50", "seeds", "device"]
    return table(head, rows) if rows else ""


def _halfway(record: CellRecord) -> str:
    """NLL after half of the rounds."""
    rounds, values = record.curve("nll")
    at = np.flatnonzero(rounds == record.rounds // 2)
    return figures(float(values[:, at[0]].mean()), "nll") if at.size else NOTHING


def novel(found: Results) -> str:
    """A newcomer with all its examples, after all its steps: accuracy and NLL in the six cells."""
    parts = []
    for cell in [cell for cell in CELLS if cell in found.novel]:
        if metadata := _metadata(found.novel[cell]["examples"].metadata):
            parts.append(f"- {lineup.cell_title(cell)}: {metadata}")
    parts = ["\n".join(parts)] if parts else []
    for measure in ("accuracy", "nll"):
        ends = {cell: _last(sweeps["examples"], measure) for cell, sweeps in found.novel.items()}
        names = lineup.ordered({name for end in ends.values() for name in end})
        columns = []
        for cell in CELLS:
            values = [ends.get(cell, {}).get(name, np.full(1, math.nan)) for name in names]
            means = [float(v.mean()) for v in values]
            texts = [figures(m, measure, deviation(v.tolist())) for m, v in zip(means, values, strict=True)]
            columns.append(strong(means, texts, measure))
        if names:
            head = [unit(measure), *map(lineup.cell_title, CELLS)]
            rows = [[lineup.title(name), *(column[i] for column in columns)] for i, name in enumerate(names)]
            parts.append(table(head, rows))
    return "\n\n".join(parts)


def sweep_table(found: Sweep | None) -> str:
    """Methods by the values of the axis: accuracy, NLL, ECE."""
    if found is None:
        return ""
    values = found.values
    rows = []
    for measure, lines in found.lines.items():
        columns = []
        for value in values:
            taken = [_at(line, value) for line in lines]
            means = [float(t.mean()) for t in taken]
            columns.append(strong(means, [figures(m, measure) for m in means], measure))
        rows += [[f"{line.title}, {unit(measure)}", *(c[i] for c in columns)] for i, line in enumerate(lines)]
    words = f"{_metadata(found.metadata)}.\n\n" if found.metadata else ""
    return words + table([AXES.get(found.axis, found.axis), *(f"{v:g}" for v in values)], rows)


def shift(found: Results) -> str:
    """NLL and ECE under each kind of change, and the AUROC of telling strange images from a client's own."""
    parts = []
    for cell in [cell for cell in CELLS if cell in found.shift]:
        shifted = found.shift[cell]
        parts.append(f"{lineup.cell_title(cell)}: {_metadata(shifted.metadata)}.")
        for changed in shifted.sweeps.values():
            only = {measure: lines for measure, lines in changed.lines.items() if measure in ("nll", "ece")}
            parts.append(sweep_table(Sweep(changed.axis, only, {})))
        names = list(next(iter(shifted.strange.values())))
        columns = []
        for got in shifted.strange.values():
            means = [float(values.mean()) for values in got.values()]
            texts = [figures(m, "auroc", deviation(v.tolist())) for m, v in zip(means, got.values(), strict=True)]
            columns.append(strong(means, texts, "auroc"))
        other = lineup.DATASETS.get(shifted.metadata.get("other", ""), "another dataset")
        words = {"unseen": "labels it never saw", "other": f"images of {other}"}
        head = ["AUROC % of uncertainty", *(f"{words[what]}, {which}" for what, which in shifted.strange)]
        parts.append(table(head, [[lineup.title(n), *(c[i] for c in columns)] for i, n in enumerate(names)]))
    return "\n\n".join(parts)


def theory(found: Results) -> str:
    """The slopes of the measured error and of the bound's terms, and the error itself."""
    if found.theory is None:
        return ""
    axes = {"n": "over n", "clients": "over N"}
    titles = [title for slopes in found.theory.slopes.values() for title in slopes]
    rows = []
    for title in dict.fromkeys(titles):
        slopes = [found.theory.slopes[axis].get(title, (math.nan, math.nan)) for axis in axes]
        rows.append([title, *(signed(slope, 2) + (f" ± {se:.2f}" if se == se else "") for slope, se in slopes)])
    parts = [table(["slope on log scales", *axes.values()], rows)]
    return "\n\n".join([*parts, *(sweep_table(sweep) for sweep in found.theory.sweeps.values())])


def printed(measure: str, method: str, cell: str) -> str:
    """The paper's number as it prints it; empty where it has none."""
    value = published(measure, method, cell)
    return "" if value is None else f"{100 * value:.{PRINTED[measure]}f}"


def _effort(record: CellRecord, usual: str) -> str:
    where = "" if record.device == usual else f", {record.device}"
    return f"{record.rounds} x {len(record.runs)}, {_time(record.seconds)}{where}"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def _at(line: Line, value: float) -> np.ndarray:
    """The seeds' values there, ``[S]``; NaN where it was not measured."""
    where = np.flatnonzero(line.x == value)
    return line.values[:, where[0]] if where.size else np.full(1, math.nan)


def _last(found: Sweep, measure: str) -> dict[str, np.ndarray]:
    return {line.method: line.values[:, -1] for line in found.lines.get(measure, [])}


def _metadata(metadata: Mapping[str, Any]) -> str:
    """How a sweep was run, in words: ``100 rounds, 3 seeds, NVIDIA H200``."""
    words = [f"{metadata['rounds']} rounds"] if "rounds" in metadata else []
    if metadata.get("data") and metadata["data"] not in CELLS:
        words.insert(0, metadata["data"])
    if metadata.get("partition"):
        words.append(f"partition `{metadata['partition']}`")
    if metadata.get("newcomers"):
        words.append(plural(len(metadata["newcomers"]), "newcomer"))
    if metadata.get("seeds"):
        more = "".join(f", {title} {count}" for title, count in metadata.get("more_seeds", {}).items())
        words.append(plural(len(metadata["seeds"]), "seed") + (f" ({more[2:]})" if more else ""))
    return ", ".join([*words, *([metadata["device"]] if metadata.get("device") else [])])


AXES = {
    "n": "examples n",
    "alpha": "Dirichlet α",
    "clients": "clients N",
    "rotation": "rotation, degrees",
    "noise": "noise, standard deviation",
}


def _measured(measure: str, partition: str, beside: bool) -> Callable[[Results], str]:
    return lambda found: measure_table(found.of("paper", partition), measure, beside)


def _nothing(found: Results) -> str:
    return ""


#: Every part by its name on the page.
PARTS: dict[str, Callable[[Results], str]] = {
    "table1": _measured("accuracy", "groups", True),
    "table1-best": lambda found: measure_table(found.of("paper", "groups"), "accuracy", True, CellRecord.best),
    "table1-random": _measured("accuracy", "random", False),
    "reference": reference,
    "paired": paired.differences,
    "nll-stopped": lambda found: paired.stopped(found, "groups"),
    "nll-stopped-random": lambda found: paired.stopped(found, "random"),
    "table2": _measured("ece", "groups", True),
    **{measure: _measured(measure, "groups", False) for measure in ("nll", "brier", "mce")},
    "table2-random": _measured("ece", "random", False),
    **{f"{measure}-random": _measured(measure, "random", False) for measure in ("nll", "brier", "mce")},
    "longer": longer,
    "hundred": hundred,
    "effort": effort,
    "convergence": _nothing,
    "reliability": _nothing,
    "novel": novel,
    "theory": theory,
    "heterogeneity": lambda found: sweep_table(found.heterogeneity),
    "scale": lambda found: sweep_table(found.scale),
    "shift": shift,
}
