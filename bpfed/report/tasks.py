"""What pages say of a task and its metrics, by the task's name; no torch is needed to write a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from bpfed._util import text
from bpfed.metrics.registry import METRICS, Metric, get_metric

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
        guess: What the prediction without a model is called in a sentence.
        standardised: Whether targets of tables are brought to mean 0 and standard deviation 1.
        sections: Further sections of a run's page, each a heading and a function from the run to its sentences; without
            any it is left out.
    """

    regions: Literal["sets", "intervals"] = "intervals"
    metric: str = "nll"
    without: str = ""
    useless: str = ""
    guess: str = "guessing"
    standardised: bool = False
    sections: tuple[tuple[str, Callable[[RunRecord], str]], ...] = ()


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
    return f"The squared errors are {text.decimal(found, 2)} times the predicted variance: counts vary {said}."


def each_label(run: RunRecord) -> str:
    """What the metrics of several labels are of."""
    return (
        "Each label of an example is a yes or no. Accuracy, NLL, Brier score and calibration are over all of these; "
        f"all labels are right in {text.percent(run.last('exact'))} of test examples."
    )


def each_token(run: RunRecord) -> str:
    """What the metrics of tokens are of."""
    return (
        "Accuracy, NLL, Brier score and calibration are over all tokens that count; all of them are right in "
        f"{text.percent(run.last('exact'))} of test sequences."
    )


#: What a number is guessed as.
MEAN = "its own training mean"

#: By the name of the task; a task that is not here has what is said of any.
REPORTS = {
    "classification": TaskReport(
        "sets", "nll", "shares_nll", "NLL is not below that of always predicting its own class shares"
    ),
    "regression": TaskReport(
        "intervals", "rmse", "baseline", "RMSE is not below that of always predicting its own training mean", MEAN, True
    ),
    "counts": TaskReport(
        "intervals",
        "deviance",
        "mean_deviance",
        "deviance is not below that of always predicting its own training mean",
        MEAN,
        sections=(("Dispersion", dispersion),),
    ),
    "ordinal": TaskReport(
        "sets", "nll", "shares_nll", "NLL is not below that of always predicting its own class shares"
    ),
    "multilabel": TaskReport(
        "sets",
        "nll",
        "shares_nll",
        "NLL is not below that of always predicting its own share of each label",
        sections=(("Labels", each_label),),
    ),
    "tokens": TaskReport(
        "sets",
        "nll",
        "shares_nll",
        "NLL is not below that of always predicting its own class shares",
        sections=(("Tokens", each_token),),
    ),
    "heteroscedastic": TaskReport(
        "intervals", "rmse", "baseline", "RMSE is not below that of always predicting its own training mean", MEAN, True
    ),
    "negative-binomial": TaskReport(
        "intervals",
        "deviance",
        "mean_deviance",
        "deviance is not below that of always predicting its own training mean",
        MEAN,
        sections=(("Dispersion", dispersion),),
    ),
    "survival": TaskReport(
        "intervals",
        "ibs",
        "km_ibs",
        "integrated Brier score is not below that of its own training rows' Kaplan-Meier curve",
        "its own Kaplan-Meier curve",
    ),
}

#: The metric by which runs of a task are known that say no more of it.
KNOWN_BY = {"rmse": "regression", "accuracy": "classification"}


def task_of(metrics: Collection[str], noted: str = "") -> str:
    """The task of a run: what its records note, or else what the metrics it is scored with tell."""
    return noted or next((task for metric, task in KNOWN_BY.items() if metric in metrics), "")


def measures(
    present: Collection[str],
    standardised: bool = False,
    target: str = "",
    scale: float = math.nan,
    labels: Sequence[str] = (),
    noted: Mapping[str, Metric] | None = None,
) -> list[Metric]:
    """Those of these names in the order of the page, worded for the run.

    Args:
        present: Names that a run has.
        standardised: Whether a regression's targets were brought to mean 0 and standard deviation 1.
        target: What a regression predicts; empty: it has no name.
        scale: Its standard deviation before that; NaN: not known.
        labels: The two classes, where there are two and they have names.
        noted: Metrics that the run itself describes, by name.
    """
    found = {name: measure for name, measure in METRICS.items() if name in present}
    found |= {name: (noted or {}).get(name) or get_metric(name) for name in sorted(present) if name not in found}
    for name, label in zip(("specificity", "sensitivity"), labels, strict=False):
        if name in found:
            word = f"'{label}'"
            explain = f"Share of the test examples that are {word} which are predicted so: a test for it has this sensitivity."
            found[name] = replace(found[name], label=f"Recall of {word}", explain=explain, title=f"Recall of {word}")
    if "rmse" in found and standardised:
        name = f"'{target}'" if target else "the target"
        unit = f" (1 SD = {text.figure(scale)})" if math.isfinite(scale) else ""
        explain = f"Root of the mean squared error, in standard deviations of {name}{unit}."
        found["rmse"] = replace(found["rmse"], label="RMSE, SD", explain=explain, title=f"RMSE in SD of {name}{unit}")
        if "nll" in found:
            explain = "Negative log-likelihood of the standardised target, nats per example; low is good."
            found["nll"] = replace(found["nll"], explain=explain)
        if "interval_width" in found:
            explain = "Mean width of a calibrated 90 % prediction interval, in standard deviations of the target."
            found["interval_width"] = replace(
                found["interval_width"],
                label="Interval width, SD",
                explain=explain,
                title="Width of 90 % intervals in SD",
            )
    if "coverage" in found and ("rmse" in found or "interval_width" in found):
        explain = "Share of targets inside their calibrated 90 % prediction interval."
        found["coverage"] = replace(found["coverage"], explain=explain, title="Coverage of 90 % intervals")
    return list(found.values())
