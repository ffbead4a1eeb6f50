"""The metrics of a run as its page words them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from bpfed._util import text
from bpfed.metrics.registry import METRICS as MEASURES
from bpfed.metrics.registry import Metric as Measure
from bpfed.metrics.registry import get_metric


def measures(
    present: Collection[str],
    standardised: bool = False,
    target: str = "",
    scale: float = math.nan,
    labels: Sequence[str] = (),
    noted: Mapping[str, Measure] | None = None,
) -> list[Measure]:
    """Those of these names in the order of the page, worded for the run.

    Args:
        present: Names that a run has.
        standardised: Whether a regression's targets were brought to mean 0 and standard deviation 1.
        target: What a regression predicts; empty: it has no name.
        scale: Its standard deviation before that; NaN: not known.
        labels: The two classes, where there are two and they have names.
        noted: Metrics that the run itself describes, by name.
    """
    found = {name: measure for name, measure in MEASURES.items() if name in present}
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
