"""The figures, one function each: from what is in the results to a matplotlib figure, or None where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments import lineup, panel
from experiments.published import CELLS
from experiments.records import CellRecord, Reliability
from experiments.results import Results
from experiments.sweeps import Shift, Sweep, Theory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZES = ("small", "large")
#: Whose reliability is shown side by side.
SHOWN = ("bpfed-recipe", "bpfed", "fedper")

#: What is on a horizontal axis.
AXES = {
    "n": "examples of each client, n",
    "alpha": "Dirichlet α (smaller: clients differ more)",
    "clients": "clients",
    "steps": "local steps of the newcomer (all its examples)",
    "examples": "examples per class of the newcomer",
    "rotation": "rotation of the test images, degrees",
    "noise": "standard deviation of noise on test images from -1 to 1",
}
#: Those that are logarithmic, with room for 0.
LOGARITHMIC = ("n", "alpha", "clients", "steps", "examples")

Cells = Mapping[str, Mapping[str, CellRecord]]


def convergence(cells: Cells, dataset: str) -> Figure | None:
    """Figures 3 to 5: test accuracy and NLL over rounds, all methods, the dataset's small and large cell."""
    shown = [cell for size in SIZES if cells.get(cell := f"{dataset}-{size}")]
    if not shown:
        return None
    figure = _sheet(10.2, 7.4)
    panels = figure.subplots(2, len(shown), squeeze=False)
    drawn: list[panel.Line] = []
    for column, cell in enumerate(shown):
        for row, measure in enumerate(("accuracy", "nll")):
            axes = panels[row][column]
            models = [r for name, r in cells[cell].items() if not name.endswith(lineup.CALIBRATED)]
            found = [line for record in models if (line := _curve(record, measure)) is not None]
            if not found:
                axes.set_axis_off()
                continue
            drawn += found
            panel.lines(axes, found, panel.MEASURES[measure])
            axes.set_xlim(0, max(line.x.max() for line in found))
            axes.set_xlabel("communication round")
            panel.name_ends(axes, found)
        panels[0][column].set_title(lineup.cell_title(cell))
    if not drawn:
        return None
    panel.legend(figure, drawn)
    return figure


def reliability(cells: Cells, dataset: str) -> Figure | None:
    """Figure 6: reliability diagrams above histograms of confidence, small and large cell, ours beside two others."""
    shown = [
        (cell, method, cells[cell][method])
        for size in SIZES
        for method in SHOWN
        if method in cells.get(cell := f"{dataset}-{size}", {}) and cells[cell][method].reliability() is not None
    ]
    if not shown:
        return None
    rows = [cell for size in SIZES if any((cell := f"{dataset}-{size}") == s[0] for s in shown)]
    columns = [method for method in SHOWN if any(method == s[1] for s in shown)]
    figure = _sheet(2.9 * len(columns) + 0.4, 4.1 * len(rows))
    heights = [2.2, 1.0] * len(rows)
    panels = figure.subplots(2 * len(rows), len(columns), squeeze=False, height_ratios=heights)
    for axes in panels.flat:
        axes.set_axis_off()
    for cell, method, record in shown:
        row, column = 2 * rows.index(cell), columns.index(method)
        found = record.reliability()
        assert found is not None
        _diagram(panels[row][column], found, record)
        _histogram(panels[row + 1][column], found)
        panels[row][column].set_title(f"{record.title}, {lineup.cell_title(cell)}")
        if column == 0:
            panels[row][column].set_ylabel("accuracy, %")
            panels[row + 1][column].set_ylabel("test examples, %")
    return figure


def novel(cells: Mapping[str, Mapping[str, Sweep]], dataset: str) -> Figure | None:
    """Figures 7 to 9: a newcomer's accuracy over its local steps, and over its examples per class."""
    shown = [cell for size in SIZES if cells.get(cell := f"{dataset}-{size}")]
    if not shown:
        return None
    figure = _sheet(10.2, 7.0)
    panels = figure.subplots(2, len(shown), squeeze=False)
    for column, cell in enumerate(shown):
        for row, axis in enumerate(("steps", "examples")):
            _sweep(panels[row][column], cells[cell][axis], "accuracy", settled=0.005 if axis == "steps" else 0.0)
        panels[0][column].set_title(lineup.cell_title(cell))
    panel.legend(figure, [line for cell in shown for s in cells[cell].values() for line in s.lines["accuracy"]])
    return figure


def sweep(found: Sweep | None) -> Figure | None:
    """Accuracy, NLL and ECE over heterogeneity or the number of clients."""
    if found is None or not found.lines:
        return None
    figure = _sheet(4.2 * len(found.lines), 3.7)
    for axes, measure in zip(figure.subplots(1, len(found.lines), squeeze=False)[0], found.lines, strict=True):
        _sweep(axes, found, measure)
    panel.legend(figure, next(iter(found.lines.values())), 8)
    return figure


def shift(found: Shift | None) -> Figure | None:
    """Accuracy, NLL and ECE over each kind of change of the test inputs."""
    if found is None or not found.sweeps:
        return None
    columns = max(len(s.lines) for s in found.sweeps.values())
    figure = _sheet(4.2 * columns, 3.3 * len(found.sweeps) + 0.4)
    panels = figure.subplots(len(found.sweeps), columns, squeeze=False)
    for row, changed in zip(panels, found.sweeps.values(), strict=True):
        for axes in row[len(changed.lines) :]:
            axes.set_axis_off()
        for axes, measure in zip(row, changed.lines, strict=False):
            _sweep(axes, changed, measure)
    panel.legend(figure, [line for s in found.sweeps.values() for line in next(iter(s.lines.values()))], 8)
    return figure


def theory(found: Theory | None) -> Figure | None:
    """The measured error beside the rates of the bound's terms, over examples and over clients."""
    if found is None:
        return None
    figure = _sheet(9.6, 3.9)
    for axes, (axis, measured) in zip(figure.subplots(1, len(found.sweeps)), found.sweeps.items(), strict=True):
        both = [*measured.lines["hellinger"], *found.rates[axis]]
        _sweep(axes, Sweep(axis, {"hellinger": both}, {}), "hellinger")
    panel.legend(figure, both)
    return figure


def _sweep(axes: Axes, found: Sweep, measure: str, settled: float = 0.0) -> None:
    panel.lines(axes, found.lines[measure], panel.MEASURES[measure], settled)
    values = found.values
    if found.axis in LOGARITHMIC:
        unit = values[values > 0].min(initial=values.max())
        if values.min() > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("function", functions=(lambda v: np.log1p(v / unit), lambda z: unit * np.expm1(z)))
            axes.set_xlim(-0.2 * unit, 1.15 * values.max())
        axes.set_xticks(values, [f"{v:g}" for v in values])
        axes.minorticks_off()
    axes.set_xlabel(AXES.get(found.axis, found.axis))
    panel.name_ends(axes, found.lines[measure])


def _diagram(axes: Axes, found: Reliability, record: CellRecord) -> None:
    """Accuracy in each bin as a bar, the gap to its mean confidence hatched, and the diagonal."""
    axes.set_axis_on()
    bins = len(found.count)
    middle, width = (np.arange(bins) + 0.5) / bins, 1 / bins
    seen = found.count > 0
    low, high = np.minimum(found.accuracy, found.confidence), np.maximum(found.accuracy, found.confidence)
    axes.bar(middle[seen], 100 * found.accuracy[seen], width, color="#c7dbf0", edgecolor="#17599e", linewidth=0.9)
    axes.bar(
        middle[seen],
        100 * (high - low)[seen],
        width,
        bottom=100 * low[seen],
        fill=False,
        hatch="////",
        edgecolor="#b8500b",
        linewidth=0.9,
    )
    axes.plot([0, 1], [0, 100], color="#1a1f26", linestyle=panel.DASHED, linewidth=1)
    axes.set(xlim=(0, 1), ylim=(0, 100), xticks=np.linspace(0, 1, 6), yticks=range(0, 101, 20))
    axes.tick_params(labelbottom=False)
    axes.text(
        0.04,
        0.95,
        f"ECE {100 * record.mean('ece'):.1f} %\nMCE {100 * record.mean('mce'):.1f} %",
        transform=axes.transAxes,
        va="top",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


def _histogram(axes: Axes, found: Reliability) -> None:
    """The share of test examples in each bin, and the means of accuracy and confidence."""
    axes.set_axis_on()
    bins = len(found.count)
    share = found.count / found.count.sum()
    accuracy, confidence = np.nansum(share * found.accuracy), np.nansum(share * found.confidence)
    seen = share > 0
    axes.bar((np.arange(bins)[seen] + 0.5) / bins, 100 * share[seen], 1 / bins, color="#dbe0e6", edgecolor="#586270")
    axes.set_yscale("log")
    axes.set(xlim=(0, 1), ylim=(0.01, 200), xticks=np.linspace(0, 1, 6), xlabel="confidence")
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.axvline(accuracy, color="#17599e", linewidth=1.4, label=f"accuracy {100 * accuracy:.1f} %")
    axes.axvline(
        confidence,
        color="#b8500b",
        linewidth=1.4,
        linestyle=panel.DASHED,
        label=f"mean confidence {100 * confidence:.1f} %",
    )
    axes.legend(loc="upper left", fontsize=7, handlelength=2.2, borderaxespad=0.2)


def _curve(record: CellRecord, measure: str) -> panel.Line | None:
    rounds, values = record.curve(measure)
    return panel.Line(record.method, record.title, rounds, values) if rounds.size else None


def _sheet(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


class Picture(NamedTuple):
    """A figure on the page of results.

    Attributes:
        name: Of its files.
        part: Which part of the page it belongs to.
        caption: What it shows.
        draw: From results to figure; None where there are none.
    """

    name: str
    part: str
    caption: str
    draw: Callable[[Results], Figure | None]


def _each(number: int, kind: str, caption: str, draw: Callable[[Results, str], Figure | None]) -> list[Picture]:
    """One picture for each dataset, numbered as in the paper."""
    return [
        Picture(
            f"figure-{number + k}-{kind}-{dataset}",
            kind,
            f"Figure {number + k}: {caption.format(title)}",
            lambda found, dataset=dataset: draw(found, dataset),  # type: ignore[misc]
        )
        for k, (dataset, title) in enumerate(lineup.DATASETS.items())
    ]


#: Every picture, in the page's order.
PICTURES = [
    *_each(
        3,
        "convergence",
        "test accuracy and NLL over rounds on {}, small (left) and large (right); mean over seeds, bands of one "
        "deviation",
        lambda found, dataset: convergence(found.of("paper", "groups"), dataset),
    ),
    Picture(
        "figure-6-reliability-mnist",
        "reliability",
        "Figure 6: reliability diagrams and histograms of confidence on MNIST small (above) and large (below); hatched "
        "is the gap between confidence and accuracy",
        lambda found: reliability(found.of("paper", "groups"), "mnist"),
    ),
    *_each(
        7,
        "novel",
        "clients that join a finished run, {}, small (left) and large (right): accuracy over their local steps, and "
        "over their examples per class",
        lambda found, dataset: novel(found.novel, dataset),
    ),
    Picture(
        "theory",
        "theory",
        "Mean squared Hellinger error of clients whose functions are known, over their examples (left) and their "
        "number (right), beside the rates of the bound's terms, which begin where the first method does: only "
        "slopes compare",
        lambda found: theory(found.theory),
    ),
    Picture(
        "heterogeneity",
        "heterogeneity",
        "Accuracy, NLL and ECE over Dirichlet α",
        lambda found: sweep(found.heterogeneity),
    ),
    Picture("scale", "scale", "Accuracy, NLL and ECE over the number of clients", lambda found: sweep(found.scale)),
    *(
        Picture(
            f"shift-{cell}",
            "shift",
            f"Accuracy, NLL and ECE on changed test images, {lineup.cell_title(cell)}",
            lambda found, cell=cell: shift(found.shift.get(cell)),  # type: ignore[misc]
        )
        for cell in CELLS
    ),
]
