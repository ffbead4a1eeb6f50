"""Figures that set methods side by side: curves with their names at the ends, and charts with a row for each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bpfed._util import text
from bpfed.metrics.registry import Metric
from bpfed.report import svg
from bpfed.report.charts import BOTTOM, LEFT, TOP, last, settled
from bpfed.report.svg import Scale

WIDE, TALL = 960, 400
#: Room for names at least: at the ends of curves, and left of rows; a letter takes some `LETTER`, and longer names than
#: `LONGEST` are cut.
NAMES_RIGHT, NAMES_LEFT = 176, 150
LETTER, LONGEST = 7, 40
#: Height of a row, and width of what is right of its name.
ROW, ROWS_WIDTH = 25, 410
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


@dataclass(frozen=True)
class Row:
    """A method in a chart of rows.

    Attributes:
        label: Its name.
        centre: Its value, where the mark is.
        low: Lower end of its interval; NaN: none.
        high: Upper end of its interval.
        dots: Single values, each with what is said under the pointer.
        floor: A second mark; NaN: none.
        note: What is said under the pointer.
        chief: Whether it is the reference.
    """

    label: str
    centre: float
    low: float = math.nan
    high: float = math.nan
    dots: Sequence[tuple[float, str]] = field(default=())
    floor: float = math.nan
    note: str = ""
    chief: bool = False


def convergence(lines: Sequence[Line], measure: Metric) -> str:
    """A line for each method, told apart by dash and colour and named at its end."""
    per_cent = measure.show is text.percent
    rounds = sorted({r for line in lines for r in line.rounds})
    names = [f"{text.short(line.label, LONGEST)} {measure.show(last(line.values))}" for line in lines]
    stop = WIDE - _room(names, NAMES_RIGHT)
    x = Scale(rounds[0], rounds[-1], LEFT, stop) if len(rounds) > 1 else svg.fit(rounds, LEFT, stop)
    y, cut = settled([line.values for line in lines], per_cent, TALL - BOTTOM)
    notes = [note for note, true in (("values on a log scale", y.log), ("first rounds off the scale", cut)) if true]
    label = "round" + (f" ({', '.join(notes)})" if notes else "")
    ticks = y.ticks(6)
    shapes = [svg.axes(x, y, label, text.count, svg.tick_text(ticks, per_cent), x_whole=True, x_about=10)]
    ends = [y(min(max(last(line.values), y.low), y.high)) for line in lines]
    places = svg.apart(ends, 17.0, TOP, TALL - BOTTOM + 6)
    for k, (line, end, place) in enumerate(zip(lines, ends, places, strict=True)):
        points = [(x(r), y(v)) for r, v in zip(line.rounds, line.values, strict=True) if math.isfinite(v)]
        inside = svg.window(x, y, [svg.line(points, "curve")])
        edge = points[-1][0] if points else x.stop
        leader = svg.line([(edge + 4, end), (x.stop + 16, place)], "leader")
        name = svg.words(x.stop + 20, place + 4.5, names[k])
        dot = svg.dot((edge, end), 3, "") if points else ""
        chief = " chief" if line.chief else ""
        shapes.append(f'<g class="method c{k % COLOURS} d{k % DASHES}{chief}">{inside}{leader}{dot}{name}</g>')
    told = "; ".join(f"{line.label} {measure.show(last(line.values))} at the end" for line in lines)
    return svg.drawing(WIDE, TALL, f"{measure.label} over rounds: {told}", shapes, "plot wide")


def bars(rows: Sequence[Row], measure: Metric) -> str:
    """A bar from zero for each method, with its interval and its floor."""
    ends = [v for row in rows for v in (row.centre, row.high, row.floor, 0.0)]
    x = svg.fit(ends, *_beside(rows), floor=0)

    def body(row: Row, y: float) -> list[str]:
        drawn = [svg.box(x(0), y - 7, max(0.5, x(row.centre) - x(0)), 14, "bar", row.note)]
        if math.isfinite(row.low):
            drawn.append(_across(x, max(row.low, 0.0), row.high, y, "whisker"))
        if math.isfinite(row.floor):
            drawn.append(svg.line([(x(row.floor), y - 9), (x(row.floor), y + 9)], "floor"))
        return drawn

    return _rows(rows, x, measure, measure.label, body, lambda row: measure.show(row.centre))


def strips(rows: Sequence[Row], measure: Metric) -> str:
    """A dot for each client of each seed, and a stroke at their mean."""
    per_cent = measure.show is text.percent
    every = [v for row in rows for v, _ in row.dots]
    if per_cent:
        x = svg.fit(every, *_beside(rows), floor=0, ceiling=1, least=0.04)
    else:
        x = svg.fit(every, *_beside(rows), log=True)

    def body(row: Row, y: float) -> list[str]:
        drawn = []
        for k, (v, note) in enumerate(row.dots):
            lifted = y + (k * 5 % 9 - 4) * 1.5  # side by side, so that equal values can be told from one
            drawn.append(svg.dot((x(v), lifted), 2.8, "bead", note if len(row.dots) <= NAMED else ""))
        return [*drawn, svg.line([(x(row.centre), y - 9), (x(row.centre), y + 9)], "centre")]

    label = f"{measure.label}{' (log scale)' if x.log else ''}"
    return _rows(rows, x, measure, label, body, lambda row: measure.show(row.centre))


def forest(rows: Sequence[Row], measure: Metric, reference: str, show: Callable[[float], str]) -> str:
    """A difference for each method, with its interval and its seeds; filled where the interval leaves out zero."""
    ends = [v for row in rows for v in (row.centre, row.low, row.high, *(d for d, _ in row.dots), 0.0)]
    x = svg.fit(ends, *_beside(rows))

    def body(row: Row, y: float) -> list[str]:
        drawn = [svg.dot((x(v), y), 2.6, "seed", note) for v, note in row.dots]
        if math.isfinite(row.low):
            drawn.append(_across(x, row.low, row.high, y, "whisker"))
        clear = row.low > 0 or row.high < 0
        return [*drawn, svg.dot((x(row.centre), y), 5, "mark clear" if clear else "mark open", row.note)]

    side = "left" if not measure.high_is_good else "right"
    unit = " in points" if measure.show is text.percent else ""
    label = f"{measure.label} minus {reference}’s{unit}; {side} of the line is better"
    height = TOP + ROW * len(rows)
    zero = svg.line([(x(0), TOP - 4), (x(0), height + 2)], "zero")
    factor = 100.0 if measure.show is text.percent else 1.0
    plain = svg.tick_text([factor * tick for tick in x.ticks(6)])
    return _rows(rows, x, measure, label, body, lambda row: show(row.centre), [zero], lambda v: plain(factor * v))


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


def _rows(
    rows: Sequence[Row],
    x: Scale,
    measure: Metric,
    label: str,
    body: Callable[[Row, float], list[str]],
    beside: Callable[[Row], str],
    behind: Sequence[str] = (),
    show: Callable[[float], str] | None = None,
) -> str:
    """Rows over a common scale, named on the left, with a number on the right; ``show`` writes the scale's numbers."""
    height = TOP + ROW * len(rows)
    ticks = x.ticks(6)
    show = show or svg.tick_text(ticks, measure.show is text.percent)
    shapes = []
    for tick in ticks:
        shapes.append(svg.line([(x(tick), TOP - 4), (x(tick), height + 2)], "grid"))
        shapes.append(svg.words(x(tick), height + 18, show(tick), "mid"))
    shapes += behind
    for k, row in enumerate(rows):
        y, style = TOP + ROW * (k + 0.5), " chief" if row.chief else ""
        shapes.append(svg.words(x.start - 10, y + 4.5, text.short(row.label, LONGEST), f"end{style}"))
        if math.isfinite(row.centre):
            shapes += body(row, y)
        shapes.append(svg.words(x.stop + 66, y + 4.5, beside(row), f"end{style}"))
    shapes.append(svg.words((x.start + x.stop) / 2, height + 37, label, "mid name"))
    told = "; ".join(f"{row.label} {row.note or measure.show(row.centre)}" for row in rows)
    return svg.drawing(round(x.stop) + 70, height + 44, f"{label}: {told}", shapes, "plot rowed")


def _room(names: Sequence[str], least: int) -> int:
    """How wide the longest of these names is."""
    return max(least, LETTER * max(len(name) for name in names) + 24)


def _beside(rows: Sequence[Row]) -> tuple[float, float]:
    """Where the scale begins and ends, right of the names and left of the numbers."""
    start = _room([text.short(row.label, LONGEST) for row in rows], NAMES_LEFT) if rows else NAMES_LEFT
    return start, start + ROWS_WIDTH - 70


def _across(x: Scale, low: float, high: float, y: float, style: str) -> str:
    """A level interval with small caps."""
    a, b = svg.px(x(low)), svg.px(x(high))
    top = svg.px(y - 3)
    return f'<path class="{style}" d="M{a} {svg.px(y)}H{b}M{a} {top}v6M{b} {top}v6"/>'
