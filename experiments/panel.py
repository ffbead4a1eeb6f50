"""A panel of lines, one for each method: legible without colour, the chief ones named at their ends.

Everything that needs matplotlib imports it inside, so that the tables are made without it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bpfed._util.files import write_whole
from bpfed.report.svg import apart
from experiments import lineup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What makes a drawing the same on every machine: a font that comes with matplotlib, and names inside an SVG that are
#: not random.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "bpfed",
    "svg.fonttype": "path",
}
DPI = 130
#: Up to so many lines have all their names at their ends.
FEW = 8


class Ink(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: Any
    marker: str
    filled: bool
    width: float


SOLID, DASHED, DOTTED, MIXED, LONG = "-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2.5))
TWO_DOTS = (0, (6, 1.5, 1, 1.5, 1, 1.5))

#: The chief methods: strong lines, their names at their ends. No two share dash and marker.
CHIEF = {
    "default": Ink("#c2570c", TWO_DOTS, "*", True, 2.2),
    "bpfed-recipe": Ink("#17599e", SOLID, "o", True, 2.2),
    "bpfed-population": Ink("#0b7a5b", LONG, "s", True, 1.9),
    "bpfed": Ink("#b0243f", DASHED, "D", True, 1.6),
    "pfedbayes": Ink("#8a2f8f", MIXED, "^", False, 1.5),
    "fedper": Ink("#1a1f26", DOTTED, "X", True, 1.5),
}
#: The others: thin greys; dashes and markers in turn, whose numbers have no common divisor.
GREYS = ("#5b626a", "#8e959c")
WORDS = "#3c444d"
DASHES = (SOLID, DASHED, MIXED, DOTTED)
MARKERS = ("v", "P", "o", "s", "<", "D", "*", "h", ">", "x", "1", "d", "+")


def ink(method: str) -> Ink:
    """A method's line, the same in every figure."""
    if method in CHIEF:
        return CHIEF[method]
    others = [name for name in lineup.ORDER if name not in CHIEF and not name.endswith(lineup.CALIBRATED)]
    k = others.index(method) if method in others else len(others) + sum(method.encode()) % 7
    return Ink(GREYS[k // 4 % 2], DASHES[k % 4], MARKERS[k % 13], k % 3 == 0, 0.9)


@dataclass(frozen=True)
class Line:
    """A method's values over something.

    Args:
        method: Its name, which decides its ink.
        title: Its name for people.
        x: Where it was measured, ``[T]``.
        values: ``[S, T]``, a row for each seed.
    """

    method: str
    title: str
    x: np.ndarray
    values: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds, ``[T]``."""
        return self.values.mean(0)

    @property
    def sd(self) -> np.ndarray:
        """Standard deviation over seeds, ``[T]``; zero for one seed."""
        return self.values.std(0, ddof=1) if len(self.values) > 1 else np.zeros_like(self.mean)


@dataclass(frozen=True)
class Measure:
    """What is on the vertical axis.

    Args:
        label: Its name and unit.
        per_cent: Whether fractions are shown in per cent.
        scale: Onto the axis: what is equally far apart there looks equally far apart.
        back: The inverse of ``scale``.
        steps: Round values for the ticks, the roundest first.
    """

    label: str
    per_cent: bool
    scale: Callable[[Any], Any]
    back: Callable[[Any], Any]
    steps: tuple[tuple[float, ...], ...]


def _decades(*mantissas: float) -> tuple[float, ...]:
    return tuple(m * 10.0**p for p in range(-7, 4) for m in mantissas)


#: Least share of errors, and least loss, that a log scale shows.
LEAST, LEAST_LOSS = 1e-4, 1e-7
LOGARITHM = (lambda v: np.log10(np.maximum(v, LEAST_LOSS)), lambda z: 10.0**z)
ROUND = (
    _decades(1),
    _decades(3),
    _decades(2, 5),
    _decades(1.5, 4, 7),
    _decades(1.2, 2.5, 3.5, 6, 8),
    _decades(*(k / 10 for k in range(10, 100))),
    _decades(*(k / 100 for k in range(100, 1000))),
)

#: Whole per cents in the order in which they make good ticks, then halves and tenths.
PARTS = (
    *(
        tuple(v / 100 for v in level)
        for level in ((50, 90, 95, 99), (80, 98), range(10, 90, 10), range(15, 90, 5), range(91, 99), range(1, 100))
    ),
    tuple(k / 200 for k in range(1, 200)),
    tuple(k / 1000 for k in range(1, 1000)),
)

#: The share of errors is what is on a log scale: 98 to 99 % is as far as 80 to 90 %.
ACCURACY = Measure(
    "test accuracy, %", True, lambda a: -np.log10(np.maximum(1 - a, LEAST)), lambda z: 1 - 10.0**-z, PARTS
)
NLL = Measure("test NLL", False, *LOGARITHM, ROUND)
ECE = Measure("ECE, %", True, *LOGARITHM, tuple(tuple(v / 100 for v in level) for level in ROUND))
HELLINGER = Measure("squared Hellinger error", False, *LOGARITHM, ROUND)
MEASURES = {"accuracy": ACCURACY, "nll": NLL, "ece": ECE, "hellinger": HELLINGER}


def lines(axes: Axes, drawn: Sequence[Line], measure: Measure, settled: float = 0.2) -> None:
    """Draw the methods' means, and a band of one deviation around the chief ones.

    Args:
        axes: Where; the scale of its horizontal axis is the caller's.
        drawn: The lines.
        measure: What is on the vertical axis.
        settled: The first part of the horizontal axis that the vertical one need not show.
    """
    axes.set_yscale("function", functions=(measure.scale, measure.back))
    order = sorted(drawn, key=lambda line: (line.method in CHIEF, -lineup.place(line.method)[0]))
    for level, line in enumerate(order):
        style, chief = ink(line.method), line.method in CHIEF
        every = math.ceil(len(line.x) / 12)
        axes.plot(
            line.x,
            line.mean,
            color=style.colour,
            linestyle=style.dash,
            linewidth=style.width,
            marker=style.marker,
            markersize=4.6 if chief else 3.2,
            markerfacecolor=style.colour if style.filled else "white",
            markeredgewidth=0.9 if chief else 0.6,
            markevery=(lineup.place(line.method)[0] % every, every),
            zorder=3 + level / 100,
            clip_on=True,
        )
        if chief and len(line.values) > 1:
            axes.fill_between(
                line.x, line.mean - line.sd, line.mean + line.sd, color=style.colour, alpha=0.13, linewidth=0, zorder=2
            )
    low, high = _limits(drawn, measure, settled)
    axes.set_ylim(low, high)
    axes.set_yticks(found := _ticks(low, high, measure), [_plain(100 * t if measure.per_cent else t) for t in found])
    axes.minorticks_off()
    axes.set_ylabel(measure.label)


def legend(figure: Figure, drawn: Iterable[Line], columns: int = 5) -> None:
    """One legend for the whole figure, under it."""
    from matplotlib.lines import Line2D

    titles = {line.method: line.title for line in drawn}
    handles = []
    for method in lineup.ordered(titles):
        style, chief = ink(method), method in CHIEF
        handles.append(
            Line2D(
                [],
                [],
                color=style.colour,
                linestyle=style.dash,
                linewidth=style.width,
                marker=style.marker,
                markersize=4.6 if chief else 3.6,
                markerfacecolor=style.colour if style.filled else "white",
                markeredgewidth=0.9 if chief else 0.6,
                label=titles[method],
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), handlelength=4)


@contextmanager
def style() -> Iterator[None]:
    """Draw with our style and nobody's own settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG, without date or versions: the same drawing is the same file."""
    written = []
    for ending, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=ending, dpi=DPI, metadata=metadata)
        figure.set_layout_engine("none")  # laid out once, for both files
        path = folder / f"{name}.{ending}"
        write_whole(path, buffer.getvalue())
        written.append(path)
    return written


def _limits(drawn: Sequence[Line], measure: Measure, settled: float) -> tuple[float, float]:
    """The lowest and highest value after the first part of the axis, with some air."""
    start = min(line.x.min() for line in drawn)
    stop = max(line.x.max() for line in drawn)
    seen = np.concatenate([line.mean[line.x >= start + settled * (stop - start)] for line in drawn])
    seen = measure.scale(seen[np.isfinite(seen)])
    if not seen.size:
        return measure.back(-1.0), measure.back(0.0)
    low, high = float(seen.min()), float(seen.max())
    air = 0.06 * (high - low) or 0.05
    return float(measure.back(low - air)), float(measure.back(high + air))


def _ticks(low: float, high: float, measure: Measure, about: int = 4, gap: float = 0.13) -> list[float]:
    """About so many round values between the limits, none near another."""
    bottom, top = float(measure.scale(low)), float(measure.scale(high))
    found: list[float] = []
    for level in measure.steps:
        for value in level:
            place = float(measure.scale(value))
            if bottom <= place <= top and all(abs(place - measure.scale(f)) >= gap * (top - bottom) for f in found):
                found.append(value)
        if len(found) >= about:
            break
    return sorted(found)


def name_ends(axes: Axes, drawn: Sequence[Line]) -> None:
    """Write names right of the lines' ends, apart from one another; both axes must have their scales and limits.

    Few methods are all named, of many the chief ones; the others are found by the legend.
    """
    fraction = axes.transScale + axes.transLimits
    ends = []
    for line in [line for line in drawn if line.method in CHIEF or len(drawn) <= FEW]:
        finite = np.flatnonzero(np.isfinite(line.mean))
        if finite.size:
            x, y = fraction.transform((line.x[finite[-1]], line.mean[finite[-1]]))
            ends.append((float(y), float(x), line))
    ends.sort(key=lambda end: end[0])
    for place, (y, x, line) in zip(apart([end[0] for end in ends], 0.075, 0.0, 1.0), ends, strict=True):
        colour = ink(line.method).colour if line.method in CHIEF else WORDS
        axes.annotate(
            line.title,
            xy=(x, y),
            xytext=(1.07, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontsize=8,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def _plain(value: float) -> str:
    return f"{value:.6g}"
