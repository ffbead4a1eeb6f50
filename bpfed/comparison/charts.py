"""Figures that set methods side by side: curves with their names at the ends, and charts with a row for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from bpfed._util import text
from bpfed.metrics.registry import Metric
from bpfed.report import svg
from bpfed.report.charts import BOTTOM, LEFT, LETTER, LONGEST, PHONE, TOP, Row, across, bars, chart, last, settled
from bpfed.report.svg import Scale

__all__ = ["Line", "Row", "bars", "convergence", "forest", "pooled", "small_reliability", "strips"]

WIDE, TALL = 960, 400
#: Height of a drawing for a phone.
SHORT = 300
#: Room for names at the ends of curves at least.
NAMES_RIGHT = 176
#: Side of a small reliability diagram.
SMALL = 150
#: More dots in a row than this carry no names under the pointer.
NAMED = 60
#: Colours and dashes; their numbers have no common divisor, so that they make 35 kinds of line.
COLOURS, DASHES = 7, 5


@dataclass(frozen=True)
class Line:
    """A method's way over the rounds.

    Attributes:
        label: Its name.
        rounds: The rounds it was tested at.
        values: A value for each.
        chief: Whether it is the reference.
    """

    label: str
    rounds: Sequence[int]
    values: Sequence[float]
    chief: bool = False


def convergence(lines: Sequence[Line], measure: Metric) -> Markup:
    """A line for each method, told apart by dash and colour; named at its end, or on a phone below the drawing."""
    roomy, phone = (_convergence(lines, measure, phone) for phone in (False, True))
    legend = "".join(_named(k, line, measure) for k, line in enumerate(lines))
    below = f'<ul class="legend">{legend}</ul>'
    return Markup(f'<div class="roomy">{roomy}</div><div class="phone">{phone}{below}</div>')


def _named(k: int, line: Line, measure: Metric) -> str:
    """An entry of a legend: a piece of the line, and its name."""
    piece = svg.drawing(34, 12, "", [_group(k, line.chief, [svg.line([(1, 6), (33, 6)], "curve")])], "plot sample")
    return f"<li>{piece} {escape(line.label)} {escape(measure.show(last(line.values)))}</li>"


def _group(k: int, chief: bool, shapes: Sequence[str]) -> str:
    return f'<g class="method c{k % COLOURS} d{k % DASHES}{" chief" if chief else ""}">{"".join(shapes)}</g>'


def _convergence(lines: Sequence[Line], measure: Metric, phone: bool) -> Markup:
    per_cent = measure.show is text.percent
    width, tall = (PHONE, SHORT) if phone else (WIDE, TALL)
    rounds = sorted({r for line in lines for r in line.rounds})
    names = [f"{text.short(line.label, LONGEST)} {measure.show(last(line.values))}" for line in lines]
    stop = width - 14 if phone else width - _room(names, NAMES_RIGHT)
    x = Scale(rounds[0], rounds[-1], LEFT, stop) if len(rounds) > 1 else svg.fit(rounds, LEFT, stop)
    y, cut = settled([line.values for line in lines], per_cent, tall - BOTTOM)
    notes = [note for note, true in (("values on a log scale", y.log), ("first rounds off the scale", cut)) if true]
    label = "round" + (f" ({', '.join(notes)})" if notes else "")
    ticks = y.ticks(6)
    about = 5 if phone else 10
    shapes = [svg.axes(x, y, label, text.count, svg.tick_text(ticks, per_cent), x_whole=True, x_about=about)]
    ends = [y(min(max(last(line.values), y.low), y.high)) for line in lines]
    places = svg.apart(ends, 17.0, TOP, tall - BOTTOM + 6)
    for k, (line, end, place) in enumerate(zip(lines, ends, places, strict=True)):
        points = [(x(r), y(v)) for r, v in zip(line.rounds, line.values, strict=True) if math.isfinite(v)]
        edge = points[-1][0] if points else x.stop
        drawn = [svg.window(x, y, [svg.line(points, "curve")])]
        if not phone:
            drawn.append(svg.line([(edge + 4, end), (x.stop + 16, place)], "leader"))
        drawn.append(svg.dot((edge, end), 3, "") if points else "")
        if not phone:
            drawn.append(svg.words(x.stop + 20, place + 4.5, names[k]))
        shapes.append(_group(k, line.chief, drawn))
    told = "; ".join(f"{line.label} {measure.show(last(line.values))} at the end" for line in lines)
    return svg.drawing(width, tall, f"{measure.label} over rounds: {told}", shapes, "plot wide")


def strips(rows: Sequence[Row], measure: Metric) -> Markup:
    """A dot for each client of each seed, and a stroke at their mean."""
    per_cent = measure.show is text.percent
    every = [v for row in rows for v, _ in row.dots]

    def fit(start: float, stop: float) -> Scale:
        if per_cent:
            return svg.fit(every, start, stop, floor=0, ceiling=1, least=0.04)
        return svg.fit(every, start, stop, log=True)

    def body(x: Scale, row: Row, y: float) -> list[str]:
        drawn = []
        for k, (v, note) in enumerate(row.dots):
            lifted = y + (k * 5 % 9 - 4) * 1.5  # side by side, so that equal values can be told from one
            drawn.append(svg.dot((x(v), lifted), 2.8, "bead", note if len(row.dots) <= NAMED else ""))
        return [*drawn, svg.line([(x(row.centre), y - 9), (x(row.centre), y + 9)], "centre")]

    def name(x: Scale) -> str:
        return f"{measure.label}{' (log scale)' if x.log else ''}"

    return chart(rows, fit, name, body, lambda row: measure.show(row.centre), per_cent)


def forest(rows: Sequence[Row], measure: Metric, reference: str, show: Callable[[float], str]) -> Markup:
    """A difference for each method, with its interval and its seeds; filled where the interval leaves out zero."""
    ends = [v for row in rows for v in (row.centre, row.low, row.high, *(d for d, _ in row.dots), 0.0)]

    def body(x: Scale, row: Row, y: float) -> list[str]:
        drawn = [svg.dot((x(v), y), 2.6, "seed", note) for v, note in row.dots]
        if math.isfinite(row.low):
            drawn.append(across(x, row.low, row.high, y, "whisker"))
        clear = row.low > 0 or row.high < 0
        return [*drawn, svg.dot((x(row.centre), y), 5, "mark clear" if clear else "mark open", row.note)]

    side = "left" if not measure.high_is_good else "right"
    unit = " in points" if measure.show is text.percent else ""
    label = f"{measure.label} minus {reference}’s{unit}; {side} of the line is better"
    factor = 100.0 if measure.show is text.percent else 1.0

    def written(ticks: Sequence[float]) -> Callable[[float], str]:
        plain = svg.tick_text([factor * tick for tick in ticks])
        return lambda v: plain(factor * v)

    return chart(
        rows,
        lambda start, stop: svg.fit(ends, start, stop),
        lambda x: label,
        body,
        lambda row: show(row.centre),
        line=0.0,
        show=written,
    )


def small_reliability(reliability: dict[str, Any], bins: int, intervals: bool, name: str) -> str:
    """A small reliability diagram: observed against claimed."""
    x, y = Scale(0, 1, 4, SMALL - 4), Scale(0, 1, SMALL - 4, 4)
    frame = [(x(0), y(0)), (x(1), y(0)), (x(1), y(1)), (x(0), y(1)), (x(0), y(0))]
    shapes, total = [], sum(reliability["count"]) or 1
    points = []
    for b, (n, claimed, seen) in enumerate(
        zip(*(reliability[k] for k in ("count", "confidence", "accuracy")), strict=True)
    ):
        if not n or claimed is None or seen is None:
            continue
        note = f"claimed {text.percent(claimed)}, observed {text.percent(seen)}, {text.plural(int(n), 'example')}"
        if not intervals:
            shapes.append(svg.box(x(b / bins) + 0.5, y(seen), x(1 / bins) - x(0) - 1, y(0) - y(seen), "bar", note))
        points.append((claimed, seen, n, note))
    shapes += [svg.line(frame, "grid"), svg.line([(x(0), y(0)), (x(1), y(1))], "diagonal")]
    for claimed, seen, n, note in points:
        size = 3.0 if intervals else 1.6 + 3.2 * math.sqrt(n / total)
        shapes.append(svg.dot((x(claimed), y(seen)), size, "mark first", note))
    told = "; ".join(note for *_, note in points) or "no examples"
    return svg.drawing(SMALL, SMALL, f"Reliability of {name}: {told}", shapes)


def pooled(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several reliability records as one, each bin weighted by its examples."""
    count, confidence, accuracy = [], [], []
    for cells in zip(*(zip(p["count"], p["confidence"], p["accuracy"], strict=True) for p in parts), strict=True):
        filled = [(n, c, a) for n, c, a in cells if n and c is not None and a is not None]
        n = sum(f[0] for f in filled)
        count.append(n)
        confidence.append(sum(f[0] * f[1] for f in filled) / n if n else None)
        accuracy.append(sum(f[0] * f[2] for f in filled) / n if n else None)
    return {"count": count, "confidence": confidence, "accuracy": accuracy}


def _room(names: Sequence[str], least: int) -> int:
    """How wide the longest of these names is."""
    return max(least, round(LETTER * max(len(name) for name in names)) + 24)
