"""The result file of one method in one cell, read back: means and deviations over seeds, curves, reliability."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.errors import UserError
from bpfed._util.scores import deviation
from experiments.protocol import PROTOCOLS

#: ``[protocol][partition][cell][method]``
Records = dict[str, dict[str, dict[str, dict[str, "CellRecord"]]]]


@dataclass(frozen=True)
class Reliability:
    """Counts, mean confidence and accuracy of each bin, pooled over seeds; NaN where a bin is empty. All ``[B]``."""

    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


@dataclass(frozen=True)
class CellRecord:
    """One method in one cell of the tables: all its seeds.

    Args:
        protocol: ``paper`` or ``published``.
        partition: ``groups`` or ``random``.
        cell: As in ``mnist-small``.
        method: The method's name, with its variant as in ``fedper+laplace``.
        title: The method's name for people.
        rounds: Communication rounds.
        bins: Bins of the calibration errors.
        device: What it ran on.
        seconds: Wall time of all seeds together.
        settings: What the method and the run were told.
        runs: For each seed its ``seed``, ``last``, ``curve`` and ``reliability``, as in the file.
        version: The version, or versions, of bpfed that made it; empty where the file does not tell.
    """

    protocol: str
    partition: str
    cell: str
    method: str
    title: str
    rounds: int
    bins: int
    device: str
    seconds: float
    settings: dict[str, Any]
    runs: tuple[dict[str, Any], ...]
    version: str = ""

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the file's order."""
        return [run["seed"] for run in self.runs]

    def only(self, seeds: list[int]) -> CellRecord:
        """The same with these seeds alone."""
        return replace(self, runs=tuple(run for run in self.runs if run["seed"] in seeds))

    def last(self, measure: str) -> np.ndarray:
        """A measure of the last round, ``[S]``; NaN where it is not in the file."""
        return numbers([run["last"].get(measure) for run in self.runs])

    def mean(self, measure: str) -> float:
        """Mean over seeds, last round."""
        return float(self.last(measure).mean())

    def sd(self, measure: str) -> float:
        """Standard deviation over seeds, last round; NaN for one seed."""
        return deviation(self.last(measure).tolist())

    def curve(self, measure: str) -> tuple[np.ndarray, np.ndarray]:
        """The rounds that were tested, ``[T]``, and a measure in each, ``[S, T]``; both empty without a curve."""
        curves = [run.get("curve") or {} for run in self.runs]
        if not all(measure in curve and curve["round"] == curves[0]["round"] for curve in curves):
            return np.zeros(0), np.zeros((len(curves), 0))
        return numbers(curves[0]["round"]), np.stack([numbers(curve[measure]) for curve in curves])

    def best(self, measure: str = "accuracy") -> float:
        """A measure in each seed's most accurate tested round, mean over seeds.

        That round is chosen on test data. The published numbers are; ours are given so only beside those of the last
        round.
        """
        rounds, accuracy = self.curve("accuracy")
        values = self.curve(measure)[1]
        if not rounds.size or values.shape != accuracy.shape or np.isnan(accuracy).all(1).any():
            return float("nan")
        return float(np.take_along_axis(values, np.nanargmax(accuracy, 1)[:, None], 1).mean())

    def before_last(self, measure: str) -> np.ndarray:
        """A measure in the tested round before the last, ``[S]``; NaN where there is none.

        It averages as few weight draws as all tests but the last.
        """
        values = self.curve(measure)[1]
        return values[:, -2] if values.shape[1] > 1 else np.full(len(self.runs), np.nan)

    def lowest(self, measure: str) -> np.ndarray:
        """A measure in the tested round of each seed where it is lowest, ``[S]``; NaN where no curve is in the file.

        As in `best`, that round is chosen on test data.
        """
        values = self.curve(measure)[1]
        if not values.size or np.isnan(values).all(1).any():
            return np.full(len(self.runs), np.nan)
        return np.nanmin(values, 1)

    def reliability(self) -> Reliability | None:
        """The reliability diagram of all seeds' test examples together."""
        if not all(run.get("reliability") for run in self.runs):
            return None
        count, confidence, accuracy = (
            np.stack([numbers(run["reliability"][key]) for run in self.runs])
            for key in ("count", "confidence", "accuracy")
        )
        whole = count.sum(0)
        with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin is its NaN
            return Reliability(
                whole,
                np.where(count > 0, count * confidence, 0.0).sum(0) / whole,
                np.where(count > 0, count * accuracy, 0.0).sum(0) / whole,
            )

    def row(self) -> dict[str, Any]:
        """The figures of a summary: fractions, last round, means over seeds."""
        return {
            "accuracy": self.mean("accuracy"),
            "accuracy_sd": self.sd("accuracy"),
            "accuracy_best_round": self.best(),
            "nll": self.mean("nll"),
            "brier": self.mean("brier"),
            "ece": self.mean("ece"),
            "ece_worst_client": self.mean("ece_worst_client"),
            "mce": self.mean("mce"),
            "seeds": len(self.runs),
            "rounds": self.rounds,
            "seconds": self.seconds,
        }


def read_cell(path: Path) -> CellRecord:
    """Read one file.

    Raises:
        UserError: It is not such a file.
    """
    found = read(path)
    try:
        record = CellRecord(
            **{
                key: found[key]
                for key in ("protocol", "partition", "cell", "method", "title", "rounds", "bins", "device", "seconds")
            },
            settings=found.get("settings", {}),
            runs=tuple(found["runs"]),
            version=str(found.get("bpfed", "")),
        )
        complete = bool(record.runs) and all("seed" in run and "last" in run for run in record.runs)
    except (KeyError, TypeError) as error:
        raise UserError(f"'{path}' is not a result of a cell ({error} is missing); run the cell again.") from None
    if not complete:
        raise UserError(f"'{path}' has no finished run; run the cell again.")
    return record


def read_cells(results: Path, tag: str = "") -> Records:
    """Every cell there is, ``RESULTS/protocol/partition/cell/method.json``, as ``[protocol][partition][cell][method]``.

    Args:
        results: The folder.
        tag: Of runs beside the protocol's, as ``rounds-600``: the folder inside the cell's that holds them.
    """
    records: Records = {}
    below = f"*/*/{tag}/*.json" if tag else "*/*/*.json"
    for path in [path for protocol in PROTOCOLS for path in sorted((results / protocol).glob(below))]:
        record = read_cell(path)
        place = (record.protocol, record.partition, record.cell, record.method)
        if place != (*path.relative_to(results).parts[:3], path.stem):
            raise UserError(f"'{path}' says that it is {'/'.join(place)}; move it there, or run the cell again.")
        cells = records.setdefault(record.protocol, {}).setdefault(record.partition, {})
        cells.setdefault(record.cell, {})[record.method] = record
    return records


def read(path: Path) -> Any:
    """Read a JSON file, or say in one sentence why not."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); check the folder of results.") from None
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON ({error}); run what wrote it again.") from None


def numbers(values: Any) -> np.ndarray:
    """Figures of a file as an array: null is NaN."""
    return np.array(values, dtype=float)  # None becomes NaN
