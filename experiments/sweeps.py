"""The results beyond the tables, read back: every one is a measure over something, a line for each method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.errors import UserError
from experiments import lineup
from experiments.panel import Line
from experiments.records import numbers, read

MEASURES = ("accuracy", "nll", "ece")
#: The bound's terms that depend on n.
TERMS = {"epsilon_n2": "rate of ε²", "r_n": "rate of r"}
#: What is kept of a file beside its measurements.
METADATA = ("data", "other", "partition", "newcomers", "rounds", "seeds", "device")


@dataclass(frozen=True)
class Sweep:
    """Measures over the values of one axis.

    Args:
        axis: What was varied, as ``alpha`` or ``examples``.
        lines: For each measure that was taken a line for each method, in the order of the tables.
        metadata: What else the file says, as its ``rounds`` and ``seeds``; where methods differ, those of the one with the
            fewest seeds, and ``more_seeds``, how many the others have, by title.
    """

    axis: str
    lines: dict[str, list[Line]]
    metadata: dict[str, Any]

    @property
    def values(self) -> np.ndarray:
        """Every value of the axis at which any method was measured, rising."""
        return np.unique(np.concatenate([line.x for lines in self.lines.values() for line in lines]))


@dataclass(frozen=True)
class Shift:
    """Test inputs that are changed more and more, and inputs of a kind the client never trained on.

    Args:
        sweeps: By kind of change, as ``rotation``.
        strange: AUROC of telling strange inputs from the client's own by its uncertainty, ``[S]`` for each method, by
            what is strange and which uncertainty: ``("unseen", "total")``.
        metadata: What else the file says.
    """

    sweeps: dict[str, Sweep]
    strange: dict[tuple[str, str], dict[str, np.ndarray]]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Theory:
    """The error that the theorem bounds, over examples and over clients.

    Args:
        sweeps: ``n`` and ``clients``: the squared Hellinger error of each method.
        rates: The bound's terms over the same axis, scaled to begin where the first method does: their constants are
            unknown.
        slopes: By axis and title the slope on log scales, and its standard error; NaN for the bound's terms.
        metadata: The setting.
    """

    sweeps: dict[str, Sweep]
    rates: dict[str, list[Line]]
    slopes: dict[str, dict[str, tuple[float, float]]]
    metadata: dict[str, Any]


def read_sweep(path: Path) -> Sweep | None:
    """``heterogeneity.json`` or ``scale.json``; None if there is no such file."""
    if not path.is_file():
        return None
    found = read(path)
    try:
        return sweep(found["axis"], found["values"], found["methods"], _metadata(found))
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, error) from None


def read_shift(path: Path) -> Shift:
    """``shift.json``, or ``shift-CELL.json`` of another cell."""
    found = read(path)
    try:
        methods = found["methods"]
        sweeps = {
            kind: sweep(kind, values, {name: got[kind] for name, got in methods.items()})
            for kind, values in found["shifts"].items()
        }
        strange = {
            (what, which): {name: numbers(methods[name]["ood"][what][which]) for name in lineup.ordered(methods)}
            for what in ("unseen", "other")
            for which in ("total", "epistemic")
        }
        return Shift(sweeps, strange, _metadata(found))
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, error) from None


def read_shifts(folder: Path) -> dict[str, Shift]:
    """Every file of shifts in a folder, by cell."""
    found = [read_shift(path) for path in sorted(folder.glob("shift*.json"))]
    return {shift.metadata["data"]: shift for shift in found}


def read_theory(path: Path) -> Theory | None:
    """``theory.json``; None if there is no such file."""
    if not path.is_file():
        return None
    found = read(path)
    sweeps: dict[str, Sweep] = {}
    rates: dict[str, list[Line]] = {}
    slopes: dict[str, dict[str, tuple[float, float]]] = {}
    try:
        for axis in ("n", "clients"):
            got = found[f"by_{axis}"]
            names, x, bound = lineup.ordered(got["methods"]), got[axis], got["bound"]
            lines = [_line(name, x, got["methods"][name]["hellinger"]) for name in names]
            sweeps[axis] = Sweep(axis, {"hellinger": lines}, {})
            rates[axis] = []
            for term, title in TERMS.items():
                rate = numbers(bound[term])
                rates[axis].append(Line(term, title, numbers(x), (rate / rate[0] * lines[0].mean[0])[None]))
            slopes[axis] = {
                lineup.title(name): (got["methods"][name]["slope"], got["methods"][name]["slope_se"]) for name in names
            } | {TERMS["epsilon_n2"]: (bound["slope"], np.nan), TERMS["r_n"]: (bound["slope_r_n"], np.nan)}
        return Theory(sweeps, rates, slopes, found["setting"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _broken(path, error) from None


def read_novel(folder: Path) -> dict[str, dict[str, Sweep]]:
    """``novel/CELL/METHOD.json``: for each cell a sweep over ``steps`` and one over ``examples`` per class."""
    cells: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json")):
        cells.setdefault(path.parent.name, {})[path.stem] = (path, read(path))
    found: dict[str, dict[str, Sweep]] = {}
    for cell, methods in cells.items():
        lines: dict[str, dict[str, list[Line]]] = {"steps": {}, "examples": {}}
        for name in lineup.ordered(methods):
            path, got = methods[name]
            try:
                points, curve = got["points"], got["curve"]
                for measure in MEASURES:
                    across = [p["examples"] for p in points], [p[measure] for p in points]
                    lines["examples"].setdefault(measure, []).append(_line(name, *across))
                    if measure in curve:
                        lines["steps"].setdefault(measure, []).append(_line(name, curve["steps"], curve[measure]))
            except (KeyError, TypeError, ValueError) as error:
                raise _broken(path, error) from None
        counts = {name: len(methods[name][1].get("seeds", ())) for name in lineup.ordered(methods)}
        fewest = min(counts, key=counts.__getitem__)
        more = {lineup.title(name): count for name, count in counts.items() if count > counts[fewest]}
        metadata = _metadata(methods[fewest][1]) | {"more_seeds": more}
        found[cell] = {axis: Sweep(axis, taken, metadata) for axis, taken in lines.items()}
    return found


def sweep(axis: str, values: Any, methods: dict[str, Any], metadata: dict[str, Any] | None = None) -> Sweep:
    """A sweep of lists ``[V][S]`` for each measure of each method."""
    lines: dict[str, list[Line]] = {}
    for name in lineup.ordered(methods):
        for measure in MEASURES:
            if measure in methods[name]:
                lines.setdefault(measure, []).append(_line(name, values, methods[name][measure]))
    return Sweep(axis, lines, metadata or {})


def _line(name: str, values: Any, taken: Any) -> Line:
    x, y = numbers(values), numbers(taken)
    if y.shape[:1] != x.shape or y.ndim != 2:
        raise ValueError(f"{len(taken)} measurements of {name} at {len(x)} values")
    return Line(name, lineup.title(name), x, y.T)


def _metadata(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in METADATA if key in found}


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(f"'{path}' is not what the experiment writes ({error}); run it again.")
