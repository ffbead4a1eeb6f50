"""The metrics there are: what each is called, which way is good, how it is printed, and where it is shown.

Every list of metrics in the library is made from this one. No torch is needed to read it. A metric of your own is made
known by `register_metric`. If it has `Metric.each`, runs compute it from sums over examples, as they do the others; if
not, a callback gives its values (`bpfed.callbacks.Callback.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bpfed._util import text
from bpfed._util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

#: Where a metric is shown. ``progress``: everywhere, also while a run trains; ``comparison``: not while it trains;
#: ``summary``: in the summary, but without a figure of its own on the page; ``detail``: in tables of all metrics alone.
Place = Literal["progress", "comparison", "summary", "detail"]
FORMATS: dict[str, Callable[[float], str]] = {"decimal": text.decimal, "percent": text.percent}

#: What the unit of a regression's targets is called where nothing more is known.
AS_GIVEN = "of the targets as given"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Its key in the records.
        label: Its short heading.
        show: Number to text.
        explain: What it is, in one sentence.
        title: Its heading where there is room for all that it needs; by default the label.
        high_is_good: Whether more is better.
        place: Where it is shown.
        tasks: Names of the tasks it is for; empty: all.
        lacking: Whether a client with test examples may lack it: it answered nothing, was tested on one class, or has
            too few calibration examples.
        calibrates: Whether it is a calibration error, which on few examples is mostly chance, and whose best round says
            nothing: an untrained model that says so is calibrated.
        in_units: Whether it is in the unit of a regression's targets.
        proportion: Whether it is a share of test examples that a binomial interval can be given for.
        without: Name of the same metric without a model, and what that is called where there is little room.
        each: What the metric is the mean of: from the parts of predictions, ``[E, ...]`` each, and targets, ``[E]``, to
            ``[E]`` (`bpfed.inference.tasks.Task.parts`); None: the task's own code or a callback computes it.
    """

    name: str
    label: str
    show: Callable[[float], str] = text.decimal
    explain: str = ""
    title: str = ""
    high_is_good: bool = False
    place: Place = "detail"
    tasks: tuple[str, ...] = ()
    lacking: bool = False
    calibrates: bool = False
    in_units: bool = False
    proportion: bool = False
    without: tuple[str, str] = ("", "")
    each: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None

    @property
    def full(self) -> str:
        """Its heading where there is room."""
        return self.title or self.label

    @property
    def prominent(self) -> bool:
        """Whether it has a figure of its own on the page, and is compared."""
        return self.place in ("progress", "comparison")

    @property
    def has_best_round(self) -> bool:
        """Whether it means something in which round it was best."""
        return self.prominent and not self.calibrates

    def typed(self, x: float) -> str:
        """Number to text as a keyboard has it, for terminals and logs."""
        return text.typed(self.show(x))

    @property
    def in_words(self) -> str:
        """Its label inside a sentence, without a unit: abbreviations keep their capitals."""
        label = self.label.partition(",")[0]
        return label if label.isupper() else label.lower()

    def record(self) -> dict[str, Any]:
        """As JSON holds it, so that a page can be made where nobody has registered it."""
        shown = next((name for name, show in FORMATS.items() if show is self.show), "decimal")
        plain = {name: getattr(self, name) for name in ("label", "explain", "title", "high_is_good", "place")}
        return {**plain, "format": shown}

    @classmethod
    def from_record(cls, name: str, record: Mapping[str, Any]) -> Metric:
        """What `record` gave."""
        plain = {key: value for key, value in record.items() if key != "format"}
        return cls(name, show=FORMATS.get(str(record.get("format")), text.decimal), **plain)


_ALL = (
    Metric(
        "accuracy",
        "Accuracy",
        text.percent,
        "Share of test examples whose most probable class is right.",
        high_is_good=True,
        place="progress",
        tasks=("classification",),
        proportion=True,
        without=("majority", "guessing"),
    ),
    Metric(
        "exact",
        "All right",
        text.percent,
        "Share of test examples of which all labels (or tokens) are right.",
        high_is_good=True,
        place="comparison",
        tasks=("multilabel", "tokens"),
        proportion=True,
    ),
    Metric(
        "class_distance",
        "Class distance",
        text.decimal,
        "Mean distance of the median predicted class from the right one, in classes; low is good.",
        place="comparison",
        tasks=("ordinal",),
        each=lambda parts, y: ((parts[0].cumsum(-1) < 0.5).sum(-1) - y).abs(),
    ),
    Metric(
        "majority",
        "Guessing",
        text.percent,
        "Accuracy of always predicting the most frequent class of the client's own training examples: a model should "
        "beat this.",
        title="Accuracy of guessing",
        high_is_good=True,
        tasks=("classification",),
    ),
    Metric(
        "rmse",
        "RMSE",
        text.decimal,
        f"Root of the mean squared error, in the unit {AS_GIVEN}.",
        place="progress",
        tasks=("regression",),
        in_units=True,
        without=("baseline", "own training mean"),
    ),
    Metric(
        "baseline",
        "RMSE of mean",
        text.decimal,
        "RMSE of always predicting the mean of the client's own training targets: a model should beat this.",
        title="RMSE of own training mean",
        tasks=("regression",),
        in_units=True,
    ),
    Metric(
        "deviance",
        "Deviance",
        text.decimal,
        "Poisson deviance at the predicted mean, mean over examples; low is good.",
        place="progress",
        tasks=("counts",),
        without=("mean_deviance", "own training mean"),
    ),
    Metric(
        "mean_deviance",
        "Deviance of mean",
        text.decimal,
        "Poisson deviance of always predicting the mean of the client's own training counts: a model should beat this.",
        title="Deviance of own training mean",
        tasks=("counts",),
    ),
    Metric(
        "mae",
        "MAE",
        text.decimal,
        "Mean absolute error of the predicted mean, in counts; low is good.",
        place="progress",
        tasks=("counts",),
    ),
    Metric(
        "c_index",
        "C-index",
        text.decimal,
        "Share of pairs of a client's test examples of which the one with the higher predicted risk has its event first "
        "(Harrell); 0.5 is no better than guessing. Pairs of different clients are not compared.",
        title="Concordance index",
        high_is_good=True,
        place="progress",
        tasks=("survival",),
        lacking=True,
    ),
    Metric(
        "ibs",
        "IBS",
        text.decimal,
        "Integrated Brier score: squared error of predicted survival, weighted for censoring, mean over time up to that "
        "which a tenth of the client's test examples outlast; low is good.",
        title="Integrated Brier score",
        place="progress",
        tasks=("survival",),
        without=("km_ibs", "Kaplan-Meier"),
    ),
    Metric(
        "km_ibs",
        "IBS, Kaplan-Meier",
        text.decimal,
        "Integrated Brier score of the Kaplan-Meier curve of the client's own training examples: a model should beat "
        "this.",
        title="Integrated Brier score of Kaplan-Meier",
        tasks=("survival",),
    ),
    Metric(
        "event_share",
        "Events",
        text.percent,
        "Share of test examples whose event was observed; the others are censored.",
        tasks=("survival",),
    ),
    Metric(
        "nll",
        "NLL",
        text.decimal,
        "Negative log-likelihood of the truth, nats per example; low is good.",
        place="progress",
        without=("shares_nll", "guessing"),
    ),
    Metric(
        "shares_nll",
        "NLL, guessing",
        text.decimal,
        "NLL of always predicting the class shares of the client's own training examples: a model that does not beat "
        "this adds nothing.",
        title="NLL of guessing",
        tasks=("classification",),
    ),
    Metric(
        "auroc",
        "AUROC",
        text.decimal,
        "Chance that an example of the second class is given a higher probability of it than one of the first; 0.5 is "
        "no better than guessing. Computed for each client alone: with all examples pooled, differences between "
        "clients would count as skill.",
        title="AUROC, mean of clients",
        high_is_good=True,
        tasks=("classification",),
        lacking=True,
    ),
    Metric(
        "sensitivity",
        "Sensitivity",
        text.percent,
        "Accuracy on the second class, the true-positive rate: the share of positives correctly identified.",
        high_is_good=True,
        tasks=("classification",),
        lacking=True,
    ),
    Metric(
        "specificity",
        "Specificity",
        text.percent,
        "Accuracy on the first class, the true-negative rate: the share of negatives correctly identified.",
        high_is_good=True,
        tasks=("classification",),
        lacking=True,
    ),
    Metric(
        "brier",
        "Brier",
        text.decimal,
        "Squared distance of the probabilities from the truth, 0 to 2; low is good.",
        place="comparison",
        tasks=("classification",),
    ),
    Metric(
        "ece",
        "ECE",
        text.percent,
        "Expected calibration error: mean gap between claimed and observed; low is good.",
        place="progress",
        calibrates=True,
    ),
    Metric(
        "abstained",
        "Abstains",
        text.percent,
        "Share of test examples that the model is less than 90 % sure of.",
        tasks=("classification",),
    ),
    Metric(
        "answered_accuracy",
        "Accuracy if sure",
        text.percent,
        "Accuracy on the test examples it is 90 % sure of.",
        high_is_good=True,
        tasks=("classification",),
        lacking=True,
    ),
    Metric(
        "coverage",
        "Coverage",
        text.percent,
        "Share of the calibrated 90 % prediction sets that hold the truth.",
        title="Coverage of 90 % sets",
        high_is_good=True,
        lacking=True,
    ),
    Metric(
        "set_size",
        "Set size",
        text.decimal,
        "Mean number of labels in a calibrated 90 % prediction set; low is good.",
        title="Size of 90 % sets",
        tasks=("classification",),
        lacking=True,
    ),
    Metric(
        "interval_width",
        "Interval width",
        text.decimal,
        f"Mean width of a calibrated 90 % prediction interval, in the unit {AS_GIVEN}; low is good.",
        title="Width of 90 % intervals",
        tasks=("regression", "counts"),
        lacking=True,
        in_units=True,
    ),
    Metric(
        "mce",
        "MCE",
        text.percent,
        "Maximum calibration error: the largest gap of any bin; low is good.",
        place="summary",
        tasks=("classification",),
        calibrates=True,
    ),
    Metric(
        "dispersion",
        "Dispersion",
        text.decimal,
        "Mean squared error over the predicted variance; above 1 counts vary more than predicted, below 1 less.",
        tasks=("counts",),
    ),
    Metric(
        "aurc",
        "AURC",
        text.decimal,
        "Error rate when only the surest are answered, averaged over how many are; low is good.",
        tasks=("classification",),
    ),
)

#: By name, in the order of the page; the first that a run has is its main one.
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
#: Those of the library itself.
BUILT_IN = frozenset(METRICS)
#: Metrics of the library of which more is better; of the others less is.
BEST_IS_HIGH = frozenset(metric.name for metric in _ALL if metric.high_is_good)


def register_metric(metric: Metric) -> Metric:
    """Make a metric of your own known by its name, and return it.

    Raises:
        UserError: The library has one of that name.
    """
    if metric.name in BUILT_IN:
        raise UserError(f"There is already a metric '{metric.name}'; give yours another name.")
    METRICS[metric.name] = metric
    return metric


def get_metric(name: str) -> Metric:
    """The metric of that name; one that nobody has registered is printed under its own name."""
    return METRICS.get(name) or Metric(name, name, explain=f"The metric '{name}' of a callback.")


def shown_at(*places: Place) -> Iterator[str]:
    """Names of the metrics that are shown at one of these places, in the order of the page."""
    return (metric.name for metric in METRICS.values() if metric.place in places)


def of_examples(task: str, taken: Collection[str] = ()) -> Iterator[Metric]:
    """Registered metrics of a task that are means over examples, without those that are computed already."""
    for metric in METRICS.values():
        if metric.each is not None and task in (metric.tasks or (task,)) and metric.name not in taken:
            yield metric
