"""Charts with a row for each client, method or column, over one common scale.

Each is drawn twice: with the names left of the rows, and for a phone with the names above them. The page shows the one
that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from bpfed._util import text
from bpfed.metrics.registry import Metric
from bpfed.report import svg
from bpfed.report.svg import Scale

#: Room for names at least; a letter takes up to `LETTER`, and longer names than `LONGEST` are cut, on a phone `SHORTER`.
NAMES, LETTER, LONGEST, SHORTER = 110, 8.3, 40, 29
#: Height of a row, with its name beside it and above it; width of what is right of the names.
ROW, TALL_ROW, SCALE = 25, 42, 410
#: Width of the drawing for a phone, and room for numbers at the right.
PHONE, NUMBERS = 360, 70
TOP = 14


@dataclass(frozen=True)
class Row:
    """A row of such a chart.

    Attributes:
        label: Its name.
        centre: Its value, where the mark is.
        low: Lower end of its interval; NaN: none.
        high: Upper end of its interval.
        dots: Single values, each with what is said under the pointer.
        floor: A second mark; NaN: none.
        ring: A third mark; NaN: none.
        note: What is said under the pointer.
        chief: Whether it is the reference, or one to look at.
    """

    label: str
    centre: float
    low: float = math.nan
    high: float = math.nan
    dots: Sequence[tuple[float, str]] = field(default=())
    floor: float = math.nan
    ring: float = math.nan
    note: str = ""
    chief: bool = False


#: From a scale, a row and its height to its shapes.
Body = Callable[[Scale, Row, float], list[str]]


def chart(
    rows: Sequence[Row],
    fit: Callable[[float, float], Scale],
    label: Callable[[Scale], str],
    body: Body,
    beside: Callable[[Row], str],
    per_cent: bool = False,
    line: float = math.nan,
    show: Callable[[Sequence[float]], Callable[[float], str]] | None = None,
) -> Markup:
    """Rows over a common scale, with a name and a number each.

    Args:
        rows: From the top.
        fit: The scale between two places in pixels.
        label: What is on the scale.
        body: The shapes of a row.
        beside: The number at its right.
        per_cent: Whether the scale is of shares.
        line: Where an upright line is; NaN: nowhere.
        show: From the scale's ticks to how they are written; None: with just the decimals they need.
    """
    found = []
    for phone in (False, True):
        start = 8.0 if phone else float(_names(rows))
        stop = PHONE - 14.0 if phone else start + SCALE - NUMBERS
        x, step = fit(start, stop), TALL_ROW if phone else ROW
        height = TOP + step * len(rows)
        ticks = x.ticks(4 if phone else 6)
        written = show(ticks) if show is not None else svg.tick_text(ticks, per_cent)
        shapes = []
        for tick in ticks:
            shapes.append(svg.line([(x(tick), TOP - 4), (x(tick), height + 2)], "grid"))
            shapes.append(svg.words(x(tick), height + 18, written(tick), "mid"))
        if math.isfinite(line):
            shapes.append(svg.line([(x(line), TOP - 4), (x(line), height + 2)], "zero"))
        for k, row in enumerate(rows):
            top, style = TOP + step * k, " chief" if row.chief else ""
            y = top + (31 if phone else step / 2)
            if phone:
                shapes.append(svg.words(x.start, top + 14, text.short(row.label, SHORTER), f"halo{style}"))
                shapes.append(svg.words(PHONE - 4, top + 14, beside(row), f"halo end{style}"))
            else:
                shapes.append(svg.words(x.start - 10, y + 4.5, text.short(row.label, LONGEST), f"end{style}"))
                shapes.append(svg.words(x.stop + NUMBERS - 4, y + 4.5, beside(row), f"end{style}"))
            if math.isfinite(row.centre):
                shapes += body(x, row, y)
        words = label(x)
        lines = _wrapped(words, 46) if phone else [words]
        for k, part in enumerate(lines):
            shapes.append(svg.words((x.start + x.stop) / 2, height + 37 + 16 * k, part, "mid name"))
        told = "; ".join(f"{row.label} {row.note or beside(row)}" for row in rows)
        width = PHONE if phone else round(x.stop) + NUMBERS
        drawn = svg.drawing(width, height + 28 + 16 * len(lines), f"{words}: {told}", shapes, "plot rowed")
        found.append(f'<div class="{"phone" if phone else "roomy"}">{drawn}</div>')
    return Markup("".join(found))


def dots(rows: Sequence[Row], measure: Metric, label: str = "") -> Markup:
    """A dot with its interval for each row; a stroke for its ``floor``, a ring for its ``ring``."""
    per_cent = measure.show is text.percent
    ends = [v for row in rows for v in (row.centre, row.low, row.high, row.floor, row.ring) if math.isfinite(v)]

    def fit(start: float, stop: float) -> Scale:
        if per_cent:
            return svg.fit(ends, start, stop, floor=0, ceiling=1, least=0.04)
        return svg.fit(ends, start, stop, log=True)

    def body(x: Scale, row: Row, y: float) -> list[str]:
        drawn = []
        if math.isfinite(row.low):
            drawn.append(across(x, max(row.low, x.low), min(row.high, x.high), y, "whisker"))
        if math.isfinite(row.floor):
            drawn.append(svg.line([(x(row.floor), y - 8), (x(row.floor), y + 8)], "floor"))
        if math.isfinite(row.ring):
            drawn.append(svg.dot((x(row.ring), y), 5.6, "ring"))
        return [*drawn, svg.dot((x(row.centre), y), 4.6, "mark worst" if row.chief else "mark first", row.note)]

    def name(x: Scale) -> str:
        return f"{label or measure.label}{' (log scale)' if x.log else ''}"

    return chart(rows, fit, name, body, lambda row: measure.show(row.centre), per_cent)


def bars(rows: Sequence[Row], measure: Metric, label: str = "") -> Markup:
    """A bar from zero for each row, with its interval and its floor."""
    ends = [v for row in rows for v in (row.centre, row.high, row.low, row.floor, 0.0)]
    floor = 0.0 if min((v for v in ends if math.isfinite(v)), default=0.0) >= 0 else -math.inf

    def body(x: Scale, row: Row, y: float) -> list[str]:
        left, right = sorted((x(0), x(row.centre)))
        drawn = [svg.box(left, y - 7, max(0.5, right - left), 14, "bar", row.note)]
        if math.isfinite(row.low):
            drawn.append(across(x, max(row.low, floor), row.high, y, "whisker"))
        if math.isfinite(row.floor):
            drawn.append(svg.line([(x(row.floor), y - 9), (x(row.floor), y + 9)], "floor"))
        return drawn

    return chart(
        rows,
        lambda start, stop: svg.fit(ends, start, stop, floor=floor),
        lambda x: label or measure.label,
        body,
        lambda row: measure.show(row.centre),
        measure.show is text.percent,
        line=0.0 if floor else math.nan,
    )


def across(x: Scale, low: float, high: float, y: float, style: str) -> str:
    """A level interval with small caps."""
    a, b = svg.px(x(low)), svg.px(x(high))
    top = svg.px(y - 3)
    return f'<path class="{style}" d="M{a} {svg.px(y)}H{b}M{a} {top}v6M{b} {top}v6"/>'


def _names(rows: Iterable[Row]) -> int:
    """How much room the longest name takes."""
    return max((round(LETTER * len(text.short(row.label, LONGEST))) + 24 for row in rows), default=NAMES)


def _wrapped(words: str, most: int) -> list[str]:
    """Words in lines of so many letters."""
    lines = [""]
    for word in words.split(" "):
        if len(lines[-1]) + len(word) > most and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
