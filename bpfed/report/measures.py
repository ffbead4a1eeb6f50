"""The metrics as a reader meets them: what they are called, how they are printed, which way is good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bpfed.report import text


@dataclass(frozen=True)
class Measure:
    """One metric on the page.

    Attributes:
        name: Its key in the records.
        label: Its short heading.
        show: Number to text.
        explain: What it is, in one sentence.
        high_is_good: Whether more is better.
    """

    name: str
    label: str
    show: Callable[[float], str]
    explain: str
    high_is_good: bool = False

    def typed(self, x: float) -> str:
        """Number to text as a keyboard has it, for terminals and logs."""
        return self.show(x).replace("\u202f", " ").replace("−", "-")

    @property
    def in_words(self) -> str:
        """Its label inside a sentence: abbreviations keep their capitals."""
        return self.label if self.label.isupper() else self.label.lower()


_ALL = (
    Measure("accuracy", "Accuracy", text.percent, "Share of test examples whose most probable class is right.", True),
    Measure("rmse", "RMSE", text.decimal, "Root of the mean squared error, in the target's own unit."),
    Measure("nll", "NLL", text.decimal, "Negative log-likelihood of the truth, nats per example; low is good."),
    Measure(
        "brier", "Brier", text.decimal, "Squared distance of the probabilities from the truth, 0 to 2; low is good."
    ),
    Measure(
        "ece", "ECE", text.percent, "Expected calibration error: mean gap between claimed and observed; low is good."
    ),
    Measure("mce", "MCE", text.percent, "Maximum calibration error: the largest gap of any bin; low is good."),
    Measure(
        "aurc", "AURC", text.decimal, "Error rate if only the surest are answered, mean over how many; low is good."
    ),
    Measure("abstained", "Abstains", text.percent, "Share of test examples that the model is less than 90 % sure of."),
    Measure(
        "answered_accuracy", "Accuracy if sure", text.percent, "Accuracy on the test examples it is 90 % sure of.", True
    ),
    Measure("coverage", "Coverage", text.percent, "Share of 90 % prediction sets that hold the truth.", True),
    Measure("set_size", "Set size", text.decimal, "Mean number of labels in a 90 % prediction set; low is good."),
)

#: Those that have no tile of their own and no best round.
DETAILS = frozenset({"mce", "aurc", "abstained", "answered_accuracy", "coverage", "set_size"})

#: By name, in the order of the page; the first that a run has is its main one.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _ALL}
