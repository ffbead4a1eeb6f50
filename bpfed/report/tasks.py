"""What pages say of a task beyond its metrics, by the task's name; no torch is needed to write a page."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
        sections: Further sections of a run's page, each a function from the run to HTML.
    """

    regions: Literal["sets", "intervals"] = "intervals"
    metric: str = "nll"
    without: str = ""
    useless: str = ""
    sections: tuple[Callable[[RunRecord], str], ...] = ()


#: By the name of the task; a task that is not here has what is said of any.
REPORTS = {
    "classification": TaskReport(
        "sets", "nll", "shares_nll", "NLL is not below that of always predicting its own class shares"
    ),
    "regression": TaskReport(
        "intervals", "rmse", "baseline", "RMSE is not below that of always predicting its own training mean"
    ),
}

#: The metric by which runs of a task are known that say no more of it.
KNOWN_BY = {"rmse": "regression", "accuracy": "classification"}


def task_of(metrics: Collection[str], noted: str = "") -> str:
    """The task of a run: what its records note, or else what the metrics it is scored with tell."""
    return noted or next((task for metric, task in KNOWN_BY.items() if metric in metrics), "")
