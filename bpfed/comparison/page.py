"""The combined report of a comparison: one HTML page that needs nothing beside itself."""

from __future__ import annotations

import math
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from bpfed._util import text
from bpfed._util.files import to_toml, write_whole
from bpfed.comparison import charts
from bpfed.comparison.charts import Line, Row
from bpfed.comparison.tables import caption, gap, pairing, pairs, signed
from bpfed.report.html import document, figure
from bpfed.report.measures import MEASURES, Measure

if TYPE_CHECKING:
    from bpfed.comparison.record import Comparison


def render(comparison: Comparison) -> str:
    """The whole page as text. The same comparison gives the same page, byte for byte."""
    parts = [
        _headline(comparison),
        _convergence(comparison),
        _differences(comparison),
        _calibration(comparison),
        _clients(comparison),
        _settings(comparison),
    ]
    parts.append("<footer>Made by bpfed from the runs’ own records.</footer>")
    return document(comparison.title, parts, charts.STYLE)


def write(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all."""
    target = Path(path)
    write_whole(target, render(comparison).encode("utf-8", "replace"))
    return target


def _headline(comparison: Comparison) -> str:
    run = comparison.first.summary
    facts = [f"{run['protocol']} protocol"] if run.get("protocol", "own") != "own" else []
    facts += [text.dealt(run["partition"])] if run.get("partition") else []
    facts += [
        f"{comparison.words.time}s {', '.join(map(str, comparison.seeds))}",
        f"on {run.get('device', 'an unknown device')}",
    ]
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<header><h1>{escape(comparison.title)}</h1><p class="facts">{line}</p></header>'
        f"{_table(comparison)}"
        f'<p class="note">{escape(caption(comparison))} The reference, {escape(_title(comparison))}, is shaded. '
        "Click a column’s head to sort.</p>"
        f"{_verdict(comparison)}"
    )


def _verdict(comparison: Comparison) -> str:
    return f"<p><strong>{escape(comparison.verdict)}</strong></p>" if comparison.verdict else ""


def _title(comparison: Comparison) -> str:
    return comparison.titles[comparison.reference]


def _table(comparison: Comparison) -> str:
    measures = comparison.measures
    heads = [("Method", "Who")]
    for m in measures:
        heads.append((f"ECE, {comparison.bins} bins" if m.name == "ece" else m.full, m.explain))
    main = measures[0]
    worst = f"Worst client’s {main.in_words}"
    heads += [
        ("ECE floor", "What perfect calibration would show on so many examples, on average"),
        ("NLL, client mean", "Mean over clients, each counted once however many examples it has"),
        (worst, f"Of the worst client of each {comparison.words.time}"),
        ("Time", f"Of one run in seconds, mean over {comparison.words.time}s"),
    ]
    head = "".join(
        f'<th scope="col"{_sorted(name)} title="{escape(about)}"><button type="button">{escape(name)}</button></th>'
        for name, about in heads
    )
    best = {m.name: comparison.best(m.name) for m in measures}
    body = ""
    for name in comparison.shown:
        cells = [_cell(m, *_spread(comparison, name, m.name), best[m.name] == name) for m in measures]
        cells.append(_cell(MEASURES["ece"], comparison.floor(name), math.nan))
        cells.append(_cell(MEASURES["nll"], comparison.mean(name, "nll", "mean"), math.nan))
        cells.append(_cell(main, comparison.mean(name, main.name, "worst"), math.nan))
        seconds = comparison.seconds(name)
        known = math.isfinite(seconds)  # nobody waits for a baseline
        cells.append(
            f'<td data-v="{seconds:.6g}">{text.decimal(seconds, 1)} s</td>' if known else f"<td>{text.MISSING}</td>"
        )
        chief = " class=chief" if name == comparison.reference else ""
        body += f'<tr{chief}><th scope="row">{escape(comparison.label(name))}</th>{"".join(cells)}</tr>'
    return (
        '<div class="scroll whole" tabindex="0" role="region" aria-label="Methods"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sorted(head: str) -> str:
    return ' aria-sort="ascending"' if head == "NLL" else ""


def _spread(comparison: Comparison, name: str, metric: str, part: str = "pooled") -> tuple[float, float]:
    return comparison.mean(name, metric, part), comparison.sd(name, metric, part)


def _cell(measure: Measure, centre: float, sd: float, top: bool = False) -> str:
    data = f' data-v="{centre:.6g}"' if math.isfinite(centre) else ""
    shown = f' <span class="sd">± {measure.show(sd)}</span>' if math.isfinite(sd) else ""
    return f"<td{data}{' class=top' if top else ''}>{measure.show(centre)}{shown}</td>"


def _convergence(comparison: Comparison) -> str:
    figures = []
    for measure in dict.fromkeys((comparison.measures[0], MEASURES["nll"])):
        lines = []
        for name in comparison.names:
            runs = list(comparison.records[name].values())
            over = [run.over(measure.name) for run in runs]
            values = [sum(column) / len(column) for column in zip(*over, strict=True)]
            lines.append(Line(comparison.titles[name], runs[0].rounds, values, name == comparison.reference))
        read = f"{measure.explain} Mean over {comparison.words.time}s. {_title(comparison)} is drawn thick."
        figures.append(figure(_long(measure), charts.convergence(lines, measure), read))
    return f"<section><h2>Convergence</h2>{''.join(figures)}</section>"


def _long(measure: Measure) -> str:
    return "Negative log-likelihood (nats per example)" if measure.name == "nll" else measure.full


def _differences(comparison: Comparison) -> str:
    if len(comparison.shown) < 2:
        return ""
    figures = []
    for measure in dict.fromkeys((MEASURES["nll"], comparison.measures[0])):
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
        figures.append(figure(f"{measure.full}, mean over clients", drawn, read))
    return (
        f"<section><h2>Differences from {escape(_title(comparison))}</h2><p>{escape(pairing(comparison))}</p>"
        f'<div class="panels rows">{"".join(figures)}</div></section>'
    )


def _calibration(comparison: Comparison) -> str:
    ece, intervals = MEASURES["ece"], comparison.first.task.regions == "intervals"
    rows, small = [], []
    for name in comparison.shown:
        centre, sd = _spread(comparison, name, "ece")
        floor, title = comparison.floor(name), comparison.label(name)
        note = f"{ece.show(centre)}, floor {ece.show(floor)}"
        rows.append(
            Row(title, centre, centre - sd, centre + sd, floor=floor, note=note, chief=name == comparison.reference)
        )
        found = charts.pooled([run.evaluation["reliability"] for run in comparison.runs(name).values()])
        drawn = charts.small_reliability(found, comparison.bins, intervals, title)
        small.append(f"<div><h4>{escape(title)}</h4>{drawn}<p>{_leaning(found, intervals)}</p></div>")
    over = f", mean over {comparison.words.time}s ± standard deviation" if len(comparison.seeds) > 1 else ""
    read = (
        f"Expected calibration error over {comparison.bins} bins{over}. The upright stroke is the floor: what chance "
        "alone gives perfectly calibrated predictions as sure as these. Bars that end near it are indistinguishable "
        "from perfect calibration."
    )
    axes = (
        "Across: nominal level of an interval; up: share of targets inside."
        if intervals
        else "Across: confidence; up: share that was right; a dot’s area is its share of examples."
    )
    return (
        f'<section><h2>Calibration</h2><div class="panels rows">'
        f"{figure('ECE and its floor', charts.bars(rows, ece), read)}</div>"
        f'<h3 style="margin-top:1.4rem">Claimed against observed</h3><div class="small">{"".join(small)}</div>'
        f'<p class="note">All clients and {comparison.words.time}s pooled. {axes} Below the dotted line is '
        "over-confident.</p></section>"
    )


def _leaning(found: dict[str, list[float]], intervals: bool) -> str:
    """How far claims are from what happened on average, in words."""
    entries = [e for e in zip(found["count"], found["confidence"], found["accuracy"], strict=True) if e[0]]
    total = sum(n for n, _, _ in entries)
    if not total or intervals:
        return ""
    apart = 100 * sum(n * (c - a) for n, c, a in entries) / total
    return f"{text.decimal(abs(apart), 1)} points {'over' if apart > 0 else 'under'}-confident"


def _clients(comparison: Comparison) -> str:
    figures = []
    for measure in dict.fromkeys((comparison.measures[0], MEASURES["nll"])):
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
        figures.append(figure(_long(measure), charts.strips(rows, measure), read))
    return f'<section><h2>Clients</h2><div class="panels rows">{"".join(figures)}</div></section>'


def _settings(comparison: Comparison) -> str:
    parts = []
    for name in comparison.names:
        run = comparison.records[name][comparison.seeds[0]]
        lines = escape(to_toml(run.config).strip())
        title = f"{comparison.titles[name]}, {comparison.words.time} {comparison.seeds[0]}"
        parts.append(f"<details><summary>{escape(title)}</summary><pre>{lines}</pre></details>")
    return f"<section><h2>Settings</h2>{''.join(parts)}</section>"
