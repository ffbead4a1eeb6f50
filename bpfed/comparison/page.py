"""What the combined report of a comparison says; ``report/templates/comparison.html.j2`` lays it out."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpfed._util import text
from bpfed._util.files import to_toml
from bpfed.comparison import charts
from bpfed.comparison.charts import Line, Row
from bpfed.comparison.tables import caption, gap, pairing, pairs, signed
from bpfed.metrics.registry import METRICS, Metric
from bpfed.report import html, page
from bpfed.report.html import Figure
from bpfed.report.page import Cell, Column

if TYPE_CHECKING:
    from bpfed.comparison.record import Comparison


def render(comparison: Comparison) -> str:
    """The whole page as text. The same comparison gives the same page, byte for byte."""
    columns = _columns(comparison)
    return html.page(
        "comparison.html.j2",
        title=comparison.title,
        details=_details(comparison),
        verdict=comparison.verdict,
        columns=columns,
        rows=[_row(comparison, name) for name in comparison.shown],
        caption=f"{caption(comparison)} The reference, {_title(comparison)}, is shaded. Click a column’s head to sort.",
        definitions=[(column.title, column.explain) for column in columns if column.explain],
        reference=_title(comparison),
        convergence=_convergence(comparison),
        pairing=pairing(comparison) if len(comparison.shown) > 1 else "",
        differences=_differences(comparison),
        calibration=_calibration(comparison),
        clients=_clients(comparison),
        settings=_settings(comparison),
    )


def write(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all."""
    return html.write_page(render(comparison), path)


def _details(comparison: Comparison) -> list[str]:
    run = comparison.first.summary
    details = [f"{run['protocol']} protocol"] if run.get("protocol", "own") != "own" else []
    details += [text.dealt(run["partition"])] if run.get("partition") else []
    return [
        *details,
        f"{comparison.words.time}s {', '.join(map(str, comparison.seeds))}",
        f"on {run.get('device', 'an unknown device')}",
    ]


def _title(comparison: Comparison) -> str:
    return comparison.titles[comparison.reference]


def _columns(comparison: Comparison) -> list[Column]:
    columns = [Column("method", "Method")]
    for m in comparison.measures:
        title = f"ECE, {comparison.bins} bins" if m.name == "ece" else m.full
        columns.append(Column(m.name, title, m.show, m.explain, "ascending" if m.name == "nll" else ""))
    more = (
        ("ECE by chance", "What perfect calibration would show on so many examples, on average."),
        ("NLL, client mean", "Mean over clients, each counted once however many examples it has."),
        (
            f"Worst client’s {comparison.measures[0].in_words}",
            f"That of the worst client of each {comparison.words.time}, mean over {comparison.words.time}s.",
        ),
        ("Time", f"Of one run in seconds, mean over {comparison.words.time}s."),
    )
    return [*columns, *(Column(title, title, explain=explain) for title, explain in more)]


def _row(comparison: Comparison, name: str) -> page.Line:
    main = comparison.measures[0]
    cells = [_cell(m, *_spread(comparison, name, m.name), comparison.best(m.name) == name) for m in comparison.measures]
    cells.append(_cell(METRICS["ece"], comparison.floor(name), math.nan))
    cells.append(_cell(METRICS["nll"], comparison.mean(name, "nll", "mean"), math.nan))
    cells.append(_cell(main, comparison.mean(name, main.name, "worst"), math.nan))
    seconds = comparison.seconds(name)
    if math.isfinite(seconds):
        cells.append(Cell(f"{text.decimal(seconds, 1)} s", f"{seconds:.6g}"))
    else:
        cells.append(Cell(text.MISSING))  # nobody waits for a baseline
    return page.Line(comparison.label(name), cells, style="chief" if name == comparison.reference else "")


def _spread(comparison: Comparison, name: str, metric: str, part: str = "pooled") -> tuple[float, float]:
    return comparison.mean(name, metric, part), comparison.sd(name, metric, part)


def _cell(measure: Metric, centre: float, sd: float, top: bool = False) -> Cell:
    return Cell(
        measure.show(centre),
        f"{centre:.6g}" if math.isfinite(centre) else None,
        "top" if top else "",
        beside=f"± {measure.show(sd)}" if math.isfinite(sd) else "",
    )


def _convergence(comparison: Comparison) -> list[Figure]:
    figures = []
    for measure in dict.fromkeys((comparison.measures[0], METRICS["nll"])):
        lines = []
        for name in comparison.names:
            runs = list(comparison.records[name].values())
            over = [run.over(measure.name) for run in runs]
            values = [sum(column) / len(column) for column in zip(*over, strict=True)]
            lines.append(Line(comparison.titles[name], runs[0].rounds, values, name == comparison.reference))
        read = f"{measure.explain} Mean over {comparison.words.time}s. {_title(comparison)} is drawn thick."
        figures.append(Figure(_long(measure), charts.convergence(lines, measure), read))
    return figures


def _long(measure: Metric) -> str:
    return "Negative log-likelihood (nats per example)" if measure.name == "nll" else measure.full


def _differences(comparison: Comparison) -> list[Figure]:
    if len(comparison.shown) < 2:
        return []
    figures = []
    for measure in dict.fromkeys((METRICS["nll"], comparison.measures[0])):
        factor, digits = (100.0, 1) if measure.show is text.percent else (1.0, 3)
        rows = []
        for name, found in comparison.differences(measure.name, baselines=True).items():
            dots = [
                (d, f"{comparison.words.time} {seed}: {signed(factor * d, digits)}")
                for seed, d in zip(comparison.seeds, found.seeds, strict=False)
            ]
            lower = f"lower for {found.lower} of {found.pairs} {pairs(comparison)}"
            note = f"{gap(measure, found)}, {lower}"
            title = comparison.label(name)
            rows.append(Row(title, found.mean, found.low, found.high, dots if len(dots) > 1 else (), note=note))

        def show(x: float, factor: float = factor, digits: int = digits) -> str:
            return signed(factor * x, digits)

        drawn = charts.forest(rows, measure, _title(comparison), show)
        read = f"Filled: the interval leaves out zero. Small rings: the single {comparison.words.time}s."
        figures.append(Figure(f"{measure.full}, mean over clients", drawn, read))
    return figures


def _calibration(comparison: Comparison) -> dict[str, Any]:
    ece, intervals = METRICS["ece"], comparison.first.task.regions == "intervals"
    rows, small = [], []
    for name in comparison.shown:
        centre, sd = _spread(comparison, name, "ece")
        floor, title = comparison.floor(name), comparison.label(name)
        note = f"{ece.show(centre)}, by chance {ece.show(floor)}"
        rows.append(
            Row(title, centre, centre - sd, centre + sd, floor=floor, note=note, chief=name == comparison.reference)
        )
        found = charts.pooled([run.evaluation["reliability"] for run in comparison.runs(name).values()])
        drawn = charts.small_reliability(found, comparison.bins, intervals, title)
        small.append(Figure(title, drawn, _leaning(found, intervals)))
    over = f", mean over {comparison.words.time}s ± standard deviation" if len(comparison.seeds) > 1 else ""
    read = (
        f"Expected calibration error over {comparison.bins} bins{over}. The upright stroke is what perfectly "
        "calibrated predictions, as sure as these, would show by chance. Bars that end near it are indistinguishable "
        "from perfect calibration."
    )
    axes = (
        "Across: nominal level of an interval; up: share of targets inside."
        if intervals
        else "Across: confidence; up: share that was right; a dot’s area is its share of examples."
    )
    return {
        "bars": Figure("ECE, and what chance alone gives", charts.bars(rows, ece), read),
        "small": small,
        "note": f"All clients and {comparison.words.time}s pooled. {axes} Below the dotted line is over-confident.",
    }


def _leaning(found: dict[str, list[float]], intervals: bool) -> str:
    """How far claims are from what happened on average, in words."""
    entries = [e for e in zip(found["count"], found["confidence"], found["accuracy"], strict=True) if e[0]]
    total = sum(n for n, _, _ in entries)
    if not total or intervals:
        return ""
    apart = 100 * sum(n * (c - a) for n, c, a in entries) / total
    return f"{text.decimal(abs(apart), 1)} points {'over' if apart > 0 else 'under'}-confident"


def _clients(comparison: Comparison) -> list[Figure]:
    figures = []
    for measure in dict.fromkeys((comparison.measures[0], METRICS["nll"])):
        rows = []
        for name in comparison.shown:
            clients = comparison.clients(name, measure.name)
            dots = [
                (v, f"{client}, {comparison.words.time} {seed}: {measure.show(v)}")
                for seed, values in clients.items()
                for client, v in values.items()
            ]
            title, centre = comparison.label(name), comparison.mean(name, measure.name, "mean")
            values = [v for v, _ in dots]
            span = f"from {measure.show(min(values))} to {measure.show(max(values))}" if values else text.MISSING
            rows.append(Row(title, centre, dots=dots, note=span, chief=name == comparison.reference))
        read = f"One dot for each client of each {comparison.words.time}; the stroke, and the number, is their mean."
        figures.append(Figure(_long(measure), charts.strips(rows, measure), read))
    return figures


def _settings(comparison: Comparison) -> list[tuple[str, str]]:
    seed = comparison.seeds[0]
    return [
        (
            f"{comparison.titles[name]}, {comparison.words.time} {seed}",
            to_toml(comparison.records[name][seed].config).strip(),
        )
        for name in comparison.names
    ]
