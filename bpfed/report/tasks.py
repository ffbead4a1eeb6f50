"""What pages say of a task beyond its metrics, by the task's name; no torch is needed to write a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bpfed._util import text

if TYPE_CHECKING:
    from bpfed.report.record import RunRecord


@dataclass(frozen=True)
class TaskReport:
    """What pages say of a task.

    Attributes:
        regions: What calibration examples give, as `bpfed.inference.tasks.Task.regions`; calibration without them is
            that of class probabilities, or of central intervals.
        metric: The metric that shows whether a model is of use.
        without: The same metric without a model.
        useless: What is said of clients at which the first is not below the second.
        standardised: Whether targets of tables are brought to mean 0 and standard deviation 1.
        sections: Further sections of a run's page, each a function from the run to HTML.
    """

    regions: Literal["sets", "intervals"] = "intervals"
    metric: str = "nll"
    without: str = ""
    useless: str = ""
    standardised: bool = False
    sections: tuple[Callable[[RunRecord], str], ...] = ()


#: How far a dispersion is from 1, as a factor, before it is worth a word.
NOTICED = 1.2


def dispersion(run: RunRecord) -> str:
    """Whether counts vary as much as a Poisson distribution says."""
    found = run.last("dispersion")
    if not math.isfinite(found):
        return ""
    said = "about as much as predicted"
    if found > NOTICED:
        said = (
            "more than predicted (overdispersion): intervals that are not calibrated are too narrow, so train with "
            "calibration examples (--calibration 0.2)"
        )
    elif found < 1.0 / NOTICED:
        said = "less than predicted (underdispersion): intervals that are not calibrated are too wide"
    return (
        f"<section><h2>Dispersion</h2><p>The squared errors are {text.decimal(found, 2)} times the predicted variance: "
        f"counts vary {said}.</p></section>"
    )


#: By the name of the task; a task that is not here has what is said of any.
REPORTS = {
    "classification": TaskReport(
        "sets", "nll", "shares_nll", "NLL is not below that of always predicting its own class shares"
    ),
    "regression": TaskReport(
        "intervals", "rmse", "baseline", "RMSE is not below that of always predicting its own training mean", True
    ),
    "counts": TaskReport(
        "intervals",
        "deviance",
        "mean_deviance",
        "deviance is not below that of always predicting its own training mean",
        sections=(dispersion,),
    ),
}

#: The metric by which runs of a task are known that say no more of it.
KNOWN_BY = {"rmse": "regression", "accuracy": "classification"}


def task_of(metrics: Collection[str], noted: str = "") -> str:
    """The task of a run: what its records note, or else what the metrics it is scored with tell."""
    return noted or next((task for metric, task in KNOWN_BY.items() if metric in metrics), "")
