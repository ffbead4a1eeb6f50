"""A few SVG shapes, scales and axes: all that the report's figures need.

The shapes carry class names and no colours. The page's style sheet colours them, so one drawing serves light, dark
and print, and the text is the page's own, selectable and sharp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` onto pixels from ``start`` to ``stop``, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        where = math.log(value) if self.log else value
        return self.start + (where - low) / (high - low) * (self.stop - self.start)

    def ticks(self, about: int = 5, whole: bool = False) -> list[float]:
        """Round values inside the scale, about this many; whole numbers only if asked."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps, stride in ((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4), ((1,), 50):
                found = [s * 10.0**p for p in powers if p % stride == 0 for s in steps]
                found = [t for t in found if self.low <= t <= self.high]
                if len(found) <= about + 2:
                    break
            if len(found) >= 2:
                return found
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
        if whole:
            step = max(1.0, round(step))
        first = math.ceil(self.low / step - 1e-9)
        if self.log:
            first = max(1, first)  # a logarithmic scale has no zero
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def fit(
    values: Iterable[float],
    start: float,
    stop: float,
    floor: float = -math.inf,
    ceiling: float = math.inf,
    least: float = 0.0,
    log: bool = False,
) -> Scale:
    """A scale that holds the finite values with some air.

    It does not pass ``floor`` or ``ceiling``, spans ``least`` or more (so that noise is not blown up), and is
    logarithmic if ``log`` allows it and the values differ enough.
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if log and low > 1e-300 and high > 20 * low:  # below that a scale would reach zero
        air = (high / low) ** 0.06
        return Scale(low / air, high * air, start, stop, log=True)
    air = max(0.07 * (high - low), (least - (high - low)) / 2)
    air = air or 0.05 * abs(high) or 0.5
    return Scale(max(low - air, floor), min(high + air, ceiling), start, stop)


def drawing(width: int, height: int, label: str, shapes: Iterable[str], style: str = "plot") -> Markup:
    """A figure of this size that scales with the page; ``label`` is read aloud in its place (empty: it is decoration)."""
    body, size = "".join(shapes), f"0 0 {width} {height}"
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return Markup(f'<svg class="{style}" viewBox="{size}" {role}>{body}</svg>')


def window(x: Scale, y: Scale, shapes: Iterable[str]) -> str:
    """Shapes of which only what lies between the axes is seen, give or take the width of a mark."""
    left, top, width, height = x.start - 7, y.stop - 7, x.stop - x.start + 14, y.start - y.stop + 7
    place = f'x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(height)}"'
    view = f'viewBox="{px(left)} {px(top)} {px(width)} {px(height)}"'
    return f'<svg class="window" {place} {view}>{"".join(shapes)}</svg>'


def line(points: Sequence[Point], style: str) -> str:
    """A line through the points; one that is not finite interrupts it."""
    path, pen_down = [], False
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            path.append(f"{'L' if pen_down else 'M'}{px(x)} {px(y)}")
            pen_down = True
        else:
            pen_down = False
    return f'<path class="{style}" d="{"".join(path)}"/>' if path else ""


def dot(at: Point, radius: float, style: str, title: str = "") -> str:
    """A disc; ``title`` appears under the pointer."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{style}" cx="{px(at[0])}" cy="{px(at[1])}" r="{px(radius)}">{inside}</circle>'


def box(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """A rectangle from its upper left corner; ``title`` appears under the pointer."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{px(width)}" height="{px(height)}"'
    return f'<rect class="{style}" x="{px(x)}" y="{px(y)}" {size}>{inside}</rect>'


def words(x: float, y: float, content: str, style: str = "") -> str:
    """Text whose baseline begins (or by its style: ends, is centred) at a point."""
    return f'<text class="{style}" x="{px(x)}" y="{px(y)}">{escape(content)}</text>'


def whisker(x: float, top: float, bottom: float, style: str) -> str:
    """An interval with small caps."""
    caps = f"M{px(x - 3)} {px(top)}h6M{px(x - 3)} {px(bottom)}h6"
    return f'<path class="{style}" d="M{px(x)} {px(top)}V{px(bottom)}{caps}"/>'


def axes(
    x: Scale,
    y: Scale,
    x_label: str,
    x_show: Callable[[float], str],
    y_show: Callable[[float], str],
    x_whole: bool = False,
    y_about: int = 6,
    x_about: int = 6,
) -> str:
    """Grid lines at round values of y, ticks at round values of x, and the name of x."""
    shapes = []
    for tick in y.ticks(y_about):
        shapes.append(line([(x.start, y(tick)), (x.stop, y(tick))], "grid"))
        shapes.append(words(x.start - 7, y(tick) + 4.5, y_show(tick), "end"))
    shapes.append(line([(x.start, y.start), (x.stop, y.start)], "axis"))
    for tick in x.ticks(x_about, x_whole):
        shapes.append(line([(x(tick), y.start), (x(tick), y.start + 4)], "axis"))
        shapes.append(words(x(tick), y.start + 18, x_show(tick), "mid"))
    shapes.append(words((x.start + x.stop) / 2, y.start + 36, x_label, "mid name"))
    return "".join(shapes)


def apart(places: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """The places nearest to these (by squares), in the same order, ``gap`` apart, within these limits if possible."""
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[list[float]] = []  # sum and number of places that move as one, their gaps taken off
    for rank, k in enumerate(order):
        groups.append([places[k] - rank * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, number = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + number]
    level = [total / number for total, number in groups for _ in range(int(number))]
    top = max(low, high - (len(places) - 1) * gap)
    moved = [0.0] * len(places)
    for rank, k in enumerate(order):
        moved[k] = min(max(level[rank], low), top) + rank * gap
    return moved


def tick_text(ticks: Sequence[float], per_cent: bool = False) -> Callable[[float], str]:
    """A format with just the decimals that tell these ticks apart."""
    factor = 100.0 if per_cent else 1.0
    unit = "\u202f%" if per_cent else ""

    def told_by(digits: int) -> bool:
        return all(abs(float(f"{factor * t:.{digits}f}") - factor * t) <= 1e-6 * abs(factor * t) for t in ticks)

    digits = next((d for d in range(6) if told_by(d)), None)
    pattern = "g" if digits is None else f".{digits}f"
    return lambda value: f"{factor * value:{pattern}}{unit}".replace("-", "−")


def px(x: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{x:.1f}".removesuffix(".0")
