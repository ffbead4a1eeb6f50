"""The metrics as a reader meets them: what they are called, how they are printed, which way is good."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from bpfed._util import text
from bpfed._util.scores import BEST_IS_HIGH


@dataclass(frozen=True)
class Measure:
    """One metric on the page.

    Attributes:
        name: Its key in the records.
        label: Its short heading.
        show: Number to text.
        explain: What it is, in one sentence.
        title: Its heading where there is room for all that it needs; by default the label.
    """

    name: str
    label: str
    show: Callable[[float], str]
    explain: str
    title: str = ""

    @property
    def high_is_good(self) -> bool:
        """Whether more is better."""
        return self.name in BEST_IS_HIGH

    @property
    def full(self) -> str:
        """Its heading where there is room."""
        return self.title or self.label

    def typed(self, x: float) -> str:
        """Number to text as a keyboard has it, for terminals and logs."""
        return text.typed(self.show(x))

    @property
    def in_words(self) -> str:
        """Its label inside a sentence, without a unit: abbreviations keep their capitals."""
        label = self.label.partition(",")[0]
        return label if label.isupper() else label.lower()


#: Measures of a regression that are in the unit of its targets, and what that is called where nothing more is known.
IN_UNITS, AS_GIVEN = frozenset({"rmse", "baseline", "interval_width"}), "of the targets as given"

_ALL = (
    Measure("accuracy", "Accuracy", text.percent, "Share of test examples whose most probable class is right."),
    Measure(
        "majority",
        "Guessing",
        text.percent,
        "Accuracy of always predicting the most frequent class of the client's own training examples: a model should "
        "beat this.",
        title="Accuracy of guessing",
    ),
    Measure("rmse", "RMSE", text.decimal, f"Root of the mean squared error, in the unit {AS_GIVEN}."),
    Measure(
        "baseline",
        "RMSE of mean",
        text.decimal,
        "RMSE of always predicting the mean of the client's own training targets: a model should beat this.",
        title="RMSE of own training mean",
    ),
    Measure("nll", "NLL", text.decimal, "Negative log-likelihood of the truth, nats per example; low is good."),
    Measure(
        "shares_nll",
        "NLL, guessing",
        text.decimal,
        "NLL of always predicting the class shares of the client's own training examples: a model that does not beat "
        "this adds nothing.",
        title="NLL of guessing",
    ),
    Measure(
        "auroc",
        "AUROC",
        text.decimal,
        "Chance that an example of the second class is given a higher probability of it than one of the first; 0.5 is "
        "no better than guessing. Computed for each client alone: with all examples pooled, differences between "
        "clients would count as skill.",
        title="AUROC, mean of clients",
    ),
    Measure(
        "sensitivity",
        "Sensitivity",
        text.percent,
        "Accuracy on the second class, the true-positive rate: the share of positives correctly identified.",
    ),
    Measure(
        "specificity",
        "Specificity",
        text.percent,
        "Accuracy on the first class, the true-negative rate: the share of negatives correctly identified.",
    ),
    Measure(
        "brier", "Brier", text.decimal, "Squared distance of the probabilities from the truth, 0 to 2; low is good."
    ),
    Measure(
        "ece", "ECE", text.percent, "Expected calibration error: mean gap between claimed and observed; low is good."
    ),
    Measure("abstained", "Abstains", text.percent, "Share of test examples that the model is less than 90 % sure of."),
    Measure("answered_accuracy", "Accuracy if sure", text.percent, "Accuracy on the test examples it is 90 % sure of."),
    Measure(
        "coverage",
        "Coverage",
        text.percent,
        "Share of the calibrated 90 % prediction sets that hold the truth.",
        title="Coverage of 90 % sets",
    ),
    Measure(
        "set_size",
        "Set size",
        text.decimal,
        "Mean number of labels in a calibrated 90 % prediction set; low is good.",
        title="Size of 90 % sets",
    ),
    Measure(
        "interval_width",
        "Interval width",
        text.decimal,
        f"Mean width of a calibrated 90 % prediction interval, in the unit {AS_GIVEN}; low is good.",
        title="Width of 90 % intervals",
    ),
    Measure("mce", "MCE", text.percent, "Maximum calibration error: the largest gap of any bin; low is good."),
    Measure(
        "aurc",
        "AURC",
        text.decimal,
        "Error rate when only the surest are answered, averaged over how many are; low is good.",
    ),
)

#: Those that have no tile of their own and no best round.
DETAILS = frozenset(
    {"majority", "baseline", "shares_nll", "auroc", "sensitivity", "specificity", "mce", "aurc", "abstained"}
    | {"answered_accuracy", "coverage", "set_size", "interval_width"}
)

#: By name, in the order of the page; the first that a run has is its main one.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}


def measures(
    present: Collection[str],
    standardised: bool = False,
    target: str = "",
    scale: float = math.nan,
    labels: Sequence[str] = (),
) -> list[Measure]:
    """Those of these names in the order of the page, worded for the run.

    Args:
        present: Names that a run has.
        standardised: Whether a regression's targets were brought to mean 0 and standard deviation 1.
        target: What a regression predicts; empty: it has no name.
        scale: Its standard deviation before that; NaN: not known.
        labels: The two classes, where there are two and they have names.
    """
    found = {name: measure for name, measure in MEASURES.items() if name in present}
    for name, label in zip(("specificity", "sensitivity"), labels, strict=False):
        if name in found:
            word = f"'{label}'"
            explain = f"Share of the test examples that are {word} which are predicted so: a test for it has this sensitivity."
            found[name] = replace(found[name], label=f"Recall of {word}", explain=explain, title=f"Recall of {word}")
    if "rmse" in found:
        if standardised:
            name = f"'{target}'" if target else "the target"
            unit = f" (1 SD = {text.figure(scale)})" if math.isfinite(scale) else ""
            explain = f"Root of the mean squared error, in standard deviations of {name}{unit}."
            found["rmse"] = replace(
                found["rmse"], label="RMSE, SD", explain=explain, title=f"RMSE in SD of {name}{unit}"
            )
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
        if "coverage" in found:
            explain = "Share of targets inside their calibrated 90 % prediction interval."
            found["coverage"] = replace(found["coverage"], explain=explain, title="Coverage of 90 % intervals")
    return list(found.values())
