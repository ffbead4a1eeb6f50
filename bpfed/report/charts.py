"""The report's figures, each a function from plain numbers to an SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from bpfed._util import text
from bpfed.metrics.registry import Metric
from bpfed.report import svg
from bpfed.report.svg import Scale

WIDTH, HEIGHT = 460, 280
LEFT, TOP, BOTTOM = 58, 14, 48
#: More rounds than this have no values under the pointer.
NAMED_ROUNDS = 150


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its label, its values (one per round; NaN where there is none), its class of line."""

    label: str
    values: Sequence[float]
    style: str


def wilson(share: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share seen in n examples (Wilson's, which also holds near 0 and 1)."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def curves(
    rounds: Sequence[int],
    lines: Sequence[Curve],
    measure: Metric,
    best: tuple[int, float] | None = None,
    level: tuple[str, float] | None = None,
) -> Markup:
    """Values over rounds, each line named at its end; ``best`` is ringed, ``level`` a dotted horizontal line."""
    per_cent = measure.show is text.percent
    lines = [curve for curve in lines if any(math.isfinite(v) for v in curve.values)]
    x = _rounds_scale(rounds, WIDTH - 100)
    y, cut = settled([c.values for c in lines], per_cent, HEIGHT - BOTTOM, [level[1]] if level else [])
    notes = [note for note, true in (("values on a log scale", y.log), ("first rounds off the scale", cut)) if true]
    shapes = [_axes(x, y, "round" + (f" ({', '.join(notes)})" if notes else ""), per_cent, x_whole=True)]
    inside, ends = [], []
    if level:
        shapes.append(svg.line([(x.start, y(level[1])), (x.stop, y(level[1]))], "level"))
        ends.append((y(level[1]), level[0], "quiet"))
    for curve in lines:
        seen = [(r, v) for r, v in zip(rounds, curve.values, strict=True) if math.isfinite(v)]
        inside.append(svg.line([(x(r), y(v)) for r, v in seen], f"curve {curve.style}"))
        if len(seen) <= NAMED_ROUNDS:
            told = ((r, v, f"{curve.label}, round {r}: {measure.show(v)}") for r, v in seen)
            inside += [svg.dot((x(r), y(v)), 5, "hit", note) for r, v, note in told]
        end = (x(seen[-1][0]), y(seen[-1][1]))
        shapes.append(svg.dot(end, 3.2, f"mark {curve.style}"))
        ends.append((end[1], curve.label, curve.style))
    if best and y.low <= best[1] <= y.high:
        inside.append(svg.dot((x(best[0]), y(best[1])), 6, "ring", f"best: round {best[0]}, {measure.show(best[1])}"))
    shapes.append(svg.window(x, y, inside))
    for place, (_, label, style) in zip(svg.apart([e[0] for e in ends], 15, TOP, HEIGHT - BOTTOM), ends, strict=True):
        shapes.append(svg.words(x.stop + 9, place + 4.5, label, f"label {style}"))
    summary = "; ".join(f"{c.label} {measure.show(last(c.values))} at the end" for c in lines)
    return svg.drawing(WIDTH, HEIGHT, f"{measure.label} over rounds: {summary}", shapes)


def settled(
    series: Sequence[Sequence[float]], per_cent: bool, bottom: float, included: Sequence[float] = ()
) -> tuple[Scale, bool]:
    """A vertical scale for curves over rounds, and whether it leaves out how they began.

    The first rounds are often so far off that nothing could be told of the rest. Where what follows the first tenth
    (two at least) spans less than a third of the whole, the scale is that of the rest.

    Args:
        series: The values of each curve.
        per_cent: Whether they are shares.
        bottom: Where the scale begins, in pixels; it ends at `TOP`.
        included: Values that must be seen.
    """

    def scale(values: list[float]) -> Scale:
        if per_cent:
            return svg.fit(values, bottom, TOP, floor=0, ceiling=1, least=0.04)
        positive = min(every, default=0.0) > 0.0  # those that are off the scale are placed on it too
        return svg.fit(values, bottom, TOP, least=0.3 * max(map(abs, values), default=0), log=positive)

    def span(values: list[float]) -> float:
        return max(values) - min(values)

    every = [v for values in series for v in values if math.isfinite(v)]
    late = [v for values in series for v in values[max(2, len(values) // 10) :] if math.isfinite(v)]
    if late and 3 * span(late) < span(every):
        chosen = scale([*late, *included])
        return chosen, not chosen.low <= min(every) <= max(every) <= chosen.high
    return scale([*every, *included]), False


def reliability(reliability: dict[str, Any], bins: int, intervals: bool) -> Markup:
    """Observed against claimed with 95 % intervals; below it, for classification, how often each confidence occurs.

    Args:
        reliability: ``count``, ``confidence`` and ``accuracy``, one entry per bin (or per nominal interval level).
        bins: Number of equal-width bins.
        intervals: Whether the entries are levels of predictive intervals (regression) rather than bins.
    """
    plot, histogram = 330, 0 if intervals else 84
    x = Scale(0, 1, LEFT, WIDTH - 18)
    y = Scale(0, 1, TOP + plot, TOP)
    claimed, happened = ("nominal level", "inside") if intervals else ("confidence", "right")
    entries = [
        (b, int(n), float(c), float(a))
        for b, (n, c, a) in enumerate(zip(*(reliability[k] for k in ("count", "confidence", "accuracy")), strict=True))
        if n and c is not None and a is not None
    ]
    shapes = [_axes(x, y, claimed, True, x_per_cent=True)]
    notes = {}
    for b, n, confidence, accuracy in entries:
        low, high = wilson(accuracy, n)
        notes[b] = (
            f"{claimed} {text.percent(confidence)}, {happened} {text.percent(accuracy)} "
            f"({text.percent(low)} to {text.percent(high)}), {text.plural(n, 'example')}"
        )
        if not intervals:
            shapes.append(
                svg.box(x(b / bins) + 1, y(accuracy), x(1 / bins) - x(0) - 2, y(0) - y(accuracy), "bar", notes[b])
            )
    shapes.append(svg.line([(x(0), y(0)), (x(1), y(1))], "diagonal"))
    above, below = (
        ("intervals too wide", "intervals too narrow") if intervals else ("under-confident", "over-confident")
    )
    shapes += [svg.words(x(0.03), y(0.94), above, "quiet"), svg.words(x(0.985), y(0.03), below, "end quiet")]
    for b, n, confidence, accuracy in entries:
        low, high = wilson(accuracy, n)
        shapes.append(svg.whisker(x(confidence), y(high), y(low), "whisker"))
        shapes.append(svg.dot((x(confidence), y(accuracy)), 4, "mark first", notes[b]))
    if histogram:
        total = sum(n for _, n, _, _ in entries) or 1
        base = TOP + plot + 48 + histogram
        top = max((n / total for _, n, _, _ in entries), default=1.0)
        h = Scale(0, top * 1.08, base, base - histogram)
        shapes.append(_axes(x, h, "share of examples by confidence", True, x_per_cent=True, y_about=2))
        for b, n, _, _ in entries:
            left, width = x(b / bins) + 1, x(1 / bins) - x(0) - 2
            tall = max(1.0, base - h(n / total))
            shapes.append(svg.box(left, base - tall, width, tall, "column", notes[b]))
    height = TOP + plot + (48 + histogram if histogram else 0) + BOTTOM - 4
    told = "; ".join(notes.values()) or "no examples"
    return svg.drawing(WIDTH, height, f"Reliability diagram: {told}", shapes)


@dataclass(frozen=True)
class Path:
    """One line of a figure over any scale: its name, its points and its class of line."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str


def paths(
    lines: Sequence[Path],
    x_label: str,
    title: str,
    show: Callable[[float], str] = text.percent,
    x_share: bool = True,
    low: float = -math.inf,
) -> Markup:
    """Lines over a common scale, each named at its right end, with their values under the pointer.

    Args:
        lines: Of which one at least has a point.
        x_label: What is across.
        title: What is up, as it is read aloud.
        show: Value to text.
        x_share: Whether what is across are shares.
        low: Values below this are off the scale.
    """
    per_cent = show is text.percent
    xs = [x for line in lines for x, _ in line.points]
    ys = [max(y, low) for line in lines for _, y in line.points if math.isfinite(y)]
    room = min(120, 8 * max(len(line.label) for line in lines) + 16)
    x = Scale(min(xs), max(xs), LEFT, WIDTH - room) if max(xs) > min(xs) else svg.fit(xs, LEFT, WIDTH - room)
    if per_cent:
        y = svg.fit(ys, HEIGHT - BOTTOM, TOP, floor=0.0, ceiling=1.0, least=0.04)
    else:
        y = svg.fit(ys, HEIGHT - BOTTOM, TOP, least=0.3 * max(map(abs, ys), default=0.0))
    x_show = svg.tick_text(x.ticks(6), True) if x_share else text.decimal
    shapes = [svg.axes(x, y, x_label, x_show, svg.tick_text(y.ticks(6), per_cent))]
    inside, ends = [], []
    for line in lines:
        points = [(x(a), y(b)) for a, b in line.points if math.isfinite(b)]
        inside.append(svg.line(points, f"curve {line.style}"))
        for a, b in line.points:
            if math.isfinite(b) and b >= low:
                told = f"{line.label}: {show(b)} at {text.percent(a, 0) if x_share else text.decimal(a)}"
                inside.append(svg.dot((x(a), y(b)), 5, "hit", told))
        last_seen = [b for _, b in line.points if math.isfinite(b)][-1]
        ends.append((y(min(max(last_seen, y.low), y.high)), line.label, line.style))
    shapes.append(svg.window(x, y, inside))
    for place, (_, label, style) in zip(svg.apart([e[0] for e in ends], 15, TOP, HEIGHT - BOTTOM), ends, strict=True):
        shapes.append(svg.words(x.stop + 9, place + 4.5, label, f"label {style}"))
    told = "; ".join(f"{line.label} from {show(line.points[0][1])} to {show(line.points[-1][1])}" for line in lines)
    return svg.drawing(WIDTH, HEIGHT, f"{title}: {told}", shapes)


def groups(found: Sequence[Sequence[float]], show: Callable[[float], str], target: str) -> Markup:
    """Mean observed against mean predicted number, of groups of examples, with 95 % intervals.

    Args:
        found: Of each group its examples, mean predicted, mean observed and its standard error.
        show: Number to text.
        target: What is predicted.
    """
    ends = [v for _, p, o, e in found for v in (p, o - 1.96 * e, o + 1.96 * e)]
    x, y = svg.fit(ends, LEFT, WIDTH - 18), svg.fit(ends, TOP + 330, TOP)
    shapes = [svg.axes(x, y, f"predicted {target}", svg.tick_text(x.ticks(6)), svg.tick_text(y.ticks(6)))]
    shapes.append(svg.line([(x(x.low), y(y.low)), (x(x.high), y(y.high))], "diagonal"))
    notes = []
    for n, predicted, observed, error in found:
        note = f"predicted {show(predicted)}, observed {show(observed)} ({text.plural(int(n), 'example')})"
        notes.append(note)
        shapes.append(svg.whisker(x(predicted), y(observed + 1.96 * error), y(observed - 1.96 * error), "whisker"))
        shapes.append(svg.dot((x(predicted), y(observed)), 4, "mark first", note))
    return svg.drawing(WIDTH, TOP + 330 + BOTTOM - 4, f"Observed against predicted: {'; '.join(notes)}", shapes)


def _rounds_scale(rounds: Sequence[int], stop: float) -> Scale:
    return Scale(rounds[0], rounds[-1], LEFT, stop) if rounds[-1] > rounds[0] else svg.fit(rounds, LEFT, stop)


def _axes(
    x: Scale, y: Scale, x_label: str, per_cent: bool, x_whole: bool = False, x_per_cent: bool = False, y_about: int = 6
) -> str:
    x_show = svg.tick_text(x.ticks(6, x_whole), x_per_cent) if x_per_cent else text.count
    y_show = svg.tick_text(y.ticks(y_about), per_cent)
    return svg.axes(x, y, x_label, x_show, y_show, x_whole, y_about)


def last(values: Sequence[float]) -> float:
    """The last finite value; NaN where there is none."""
    return next((v for v in reversed(values) if math.isfinite(v)), math.nan)


# --- Charts with a row for each client, method or column, over one common scale -----------------------------------------
#
# Each is drawn twice: with the names left of the rows, and for a phone with the names above them. The page shows the one
# that fits.

#: Room for names at least; a letter takes up to `LETTER`, and longer names than `LONGEST` are cut, on a phone `SHORTER`.
NAMES, LETTER, LONGEST, SHORTER = 110, 8.3, 40, 29
#: Height of a row, with its name beside it and above it; width of what is right of the names.
ROW, TALL_ROW, SCALE = 25, 42, 410
#: Width of the drawing for a phone, and room for numbers at the right.
PHONE, NUMBERS = 360, 70


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
