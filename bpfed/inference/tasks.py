"""Tasks: what targets are, how likely they are, how they are predicted, and how predictions are scored and written.

Every other part of the library asks the task. A new one is a subclass of `Task` in a file of its own and an entry in
`bpfed.config.registry.TASKS`; its own metrics are entries in `bpfed.metrics`, and what a report says of it beyond those
is in `bpfed.report`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed._util.errors import UserError, unknown
from bpfed.config.registry import TASKS
from bpfed.inference import calibration
from bpfed.inference.calibration import HeldOutSlopes
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Categorical, Heteroscedastic, Likelihood, Normal
from bpfed.inference.predictive import Classified, How, Prediction, Predictive, Regressed, classify, regress, tempered
from bpfed.metrics import SMALLEST, Evaluation, Form, Sums, diagnostics, evaluate, evaluate_regression, evaluate_sums
from bpfed.metrics.evaluation import summed, with_means
from bpfed.metrics.registry import of_examples
from bpfed.metrics.scores import by_class, form_of_classes, form_of_numbers

if TYPE_CHECKING:
    from bpfed.data.federated import Examples
    from bpfed.nn.model import Model

#: How a set without a label is written; an empty cell would look like a missing value.
EMPTY_SET = "(empty)"


class Predicted(NamedTuple):
    """What C clients predict for their own examples, end to end.

    Attributes:
        parts: What the task's scores are made of, ``[E, ...]`` each; see `Task.parts`.
        y: Targets, ``[E]``.
        offsets: Client i owns rows ``offsets[i]`` to ``offsets[i + 1]``, ``[C + 1]``.
    """

    parts: tuple[Tensor, ...]
    y: Tensor
    offsets: Tensor


class Bounds(NamedTuple):
    """What calibration says of E examples.

    Attributes:
        bound: Of the conformal score, ``[E]``; of each class, ``[E, K]``, where the task has `Task.sets_by_class`.
        finite: Whether there are enough calibration examples for a finite bound, ``[E]`` bool.
        temperature: Of the example's client, ``[E]``.
    """

    bound: Tensor
    finite: Tensor
    temperature: Tensor


class Scoring(NamedTuple):
    """How predictions are scored.

    Attributes:
        train: Training examples of all clients; what would be predicted without a model is made of them.
        clients: Which of the clients are tested, ``[C]``.
        owner: The place of each example's client among these, ``[E]``.
        classes: How many there are; 0 where targets are no classes.
        bins: Of the calibration error.
        bounds: None: there are no calibration examples.
        scaling: Whether each client's temperature is applied.
    """

    train: Examples
    clients: Tensor
    owner: Tensor
    classes: int
    bins: int
    bounds: Bounds | None = None
    scaling: bool = False


class TargetColumn(NamedTuple):
    """What is known of the target where predictions are written.

    Attributes:
        labels: A word for each class.
        mean: Where 0 is in the target's own unit.
        unit: What 1 is in the target's own unit.
        times: At which survival is asked for, in that unit; empty: at usual ones.
    """

    labels: Sequence[str] = ()
    mean: float = 0.0
    unit: float = 1.0
    times: tuple[float, ...] = ()


class Task(ABC):
    """What the targets are, and all that follows from it.

    Attributes:
        name: In configurations and run folders.
        phrase: What a model of it is called in a sentence, such as ``a regression``.
        targets: What its targets are called, such as ``stackable``.
        has_classes: Whether a target is one of a list of classes.
        standardised: Whether targets of tables are brought to mean 0 and standard deviation 1.
        dtype: Of the targets, ``[E]``.
        regions: What calibration examples give: ``sets`` of classes, or ``intervals``.
        residual_scores: Whether `conformal_scores` are distances from the mean in predicted standard deviations.
        sets_by_class: Whether sets can have a bound for each class.
        tempered: Whether a common temperature can make predictions less sure, or surer.
        scalable: Whether a temperature can be fitted for each client.
        enough: Held-out examples below which a common temperature is uncertain by a tenth and more.
        likelihoods: The likelihoods that predictions can be made with: this class and its subclasses.
        target_axes: Axes of a target; 0: it is one number.
        labelled: Whether there is a list of labels, of which a target is one, or several.
        packed_from: Number of columns that a target is made of; 0: two or more.
        packed_hint: How these are given, where it is not one.
    """

    name: ClassVar[str]
    phrase: ClassVar[str]
    targets: ClassVar[str]
    has_classes: ClassVar[bool] = False
    standardised: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype] = torch.float32
    regions: ClassVar[Literal["sets", "intervals"]] = "intervals"
    residual_scores: ClassVar[bool] = False
    sets_by_class: ClassVar[bool] = False
    tempered: ClassVar[bool] = False
    scalable: ClassVar[bool] = False
    enough: ClassVar[int] = 1000
    likelihoods: ClassVar[type]
    target_axes: ClassVar[int] = 0
    labelled: ClassVar[bool] = False
    packed_from: ClassVar[int] = 1
    packed_hint: ClassVar[str] = "--target COLUMN"

    @abstractmethod
    def likelihood(self, classes: int) -> Likelihood:
        """The likelihood where none is given."""

    def outputs(self, classes: int) -> int:
        """Numbers that a network gives for each example."""
        return max(1, classes)

    def label_fault(self, labels: Sequence[str]) -> str:
        """Why these cannot be its labels, in a sentence; empty: they can."""
        return ""

    def packed(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Targets that are made of several columns of numbers, ``[n, C]``, as one number each, ``[n]``."""
        raise NotImplementedError(f"the targets of '{self.name}' are one column")

    def packing_fault(self, names: tuple[str, ...], parts: NDArray[np.float64]) -> str:
        """Why columns of these names cannot be `packed`, in words that follow "has"; empty: they can."""
        return ""

    def scaling(self, mean: float, scale: float) -> tuple[float, float]:
        """Where 0 is and what 1 is, in the unit of targets of tables with this mean and standard deviation."""
        return (mean, scale) if self.standardised else (0.0, 1.0)

    def fault(self, y: Tensor, classes: int, where: str) -> str:
        """Why these cannot be targets, ``[E]`` of at least one, in words that follow "has"; empty: they can.

        ``where`` says of which part of the data they are, such as "in its training data".
        """
        return ""

    def doubt(self, y: Tensor) -> str:
        """What whoever trains on these targets, ``[E]``, should know, in a sentence; empty: nothing."""
        return ""

    @abstractmethod
    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Prediction:
        """Predictions of S clients, ``[S, B, ...]``, before any temperature; for the arguments see `classify`."""

    @abstractmethod
    def parts(
        self,
        model: Model,
        predictive: Predictive,
        x: Inputs,
        y: Tensor,
        key: Tensor,
        draws: int,
        how: How,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """What scores are made of, ``[S, B, ...]`` each.

        Args:
            model: On the device of the rest.
            predictive: Of S clients.
            x: ``[S, B, ...]``.
            y: Targets, ``[S, B]``.
            key: ``[S, 2]``.
            draws: Weight draws.
            how: As `classify`.
            temperature: The common one.
        """

    @abstractmethod
    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        """`parts` of no example, ``[0, ...]`` each."""

    @abstractmethod
    def conformal_scores(self, found: Predicted) -> Tensor:
        """How strange each target is to its prediction, ``[E]``."""

    def temperatures(self, found: Predicted) -> Tensor:
        """A temperature for each client, ``[C]`` float64; asked only of a task that is `scalable`."""
        raise NotImplementedError(f"'{self.name}' has no temperature of a client")

    @abstractmethod
    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """The task's own metrics of these predictions."""

    def example_nll(self, found: Predicted) -> Tensor | None:
        """The NLL of each example, ``[E]``; None: it is not the mean over these, so nothing is said of single columns."""
        return None

    @abstractmethod
    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        """What the sums of its own metrics look like, with calibration examples or without."""

    @abstractmethod
    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        """Its own metrics of clients that never meet, from their sums."""

    def evaluate(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """All metrics of these predictions: the task's own, and those that are registered for it."""
        scored = self.score(found, scoring)
        if not (more := list(of_examples(self.name, scored.sums.further))):
            return scored
        values = [metric.each(found.parts, found.y).double() for metric in more if metric.each is not None]
        added = summed(values, scoring.owner, len(scoring.clients))
        further = scored.sums.further | {metric.name: part for metric, part in zip(more, added, strict=True)}
        return with_means(scored, more, scored.sums._replace(further=further))

    def sums_form(self, classes: int, bins: int, calibrated: bool) -> Form:
        """What the sums of all metrics look like."""
        own = self.form(classes, bins, calibrated)
        return own._replace(further=(*own.further, *(m.name for m in of_examples(self.name, own.further))))

    def evaluate_sums(self, sums: Sums, bins: int) -> Evaluation:
        """All metrics of clients that never meet, from their sums."""
        more = [metric for metric in of_examples(self.name) if metric.name in sums.further]
        found = self.from_sums(sums, bins)
        return with_means(found, more, sums) if more else found

    @property
    def nll_range(self) -> tuple[float, float]:
        """Between which numbers the NLL of an example is: −∞ to ∞ for densities; what a site tells is held against it."""
        return -math.inf, math.inf

    def slopes_fault(self, told: HeldOutSlopes) -> str:
        """Why these cannot be what a client tells of its held-out examples; asked only of a task that is `tempered`."""
        raise NotImplementedError(f"'{self.name}' has no temperature")

    @abstractmethod
    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        """Predictions as columns of a table, by name.

        Args:
            found: Of one client, ``[B, ...]``.
            target: Its names and unit.
            level: Of sets and intervals.
            abstain: Probability of the label below which a row is marked; None: none is.
        """

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        """What `columns` says in numbers, by name, ``[B, ...]`` each: the outputs of an exported model.

        Only operations on tensors may be used, since they are recorded.
        """
        raise UserError(
            f"The task '{self.name}' does not say what its predictions are as tensors (Task.tensors), so its models cannot "
            "be exported; use format safetensors."
        )


# --- What a client would predict without a model, from its own training targets alone ---------------------------------


def mean_targets(train: Examples) -> Tensor:
    """The mean target of each client's training examples, ``[N]`` float64; that of all where a client has none."""
    sizes, y = train.sizes, train.y.cpu().double()
    sums = torch.cat([y.new_zeros(1), y.cumsum(0)])[train.offsets].diff()
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), y.sum() / max(1, len(y)))


def class_shares(train: Examples, classes: int) -> Tensor:
    """The share of each class in each client's training examples, with one more example of each, ``[N, K]`` float64."""
    owner = torch.repeat_interleave(torch.arange(len(train.sizes)), train.sizes)
    cells = torch.bincount(owner * classes + train.y.cpu(), minlength=len(train.sizes) * classes)
    counts = cells.view(-1, classes).double() + 1.0
    return counts / counts.sum(1, keepdim=True)


# --- Classification ---------------------------------------------------------------------------------------------------


class Classification(Task):
    """One of several classes."""

    name = "classification"
    phrase = "a classification"
    targets = "classes"
    has_classes = True
    labelled = True
    dtype = torch.int64
    regions = "sets"
    sets_by_class = True
    tempered = True
    scalable = True
    likelihoods: ClassVar[type] = Categorical

    def likelihood(self, classes: int) -> Likelihood:
        return Categorical(classes)

    def fault(self, y: Tensor, classes: int, where: str) -> str:
        low, high = int(y.min()), int(y.max())
        if low >= 0 and high < classes:
            return ""
        return f"labels from {low} to {high} {where} but {classes} classes; labels must run from 0 to {classes - 1}"

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Classified:
        return classify(model, predictive, x, key, draws, how)

    def parts(
        self,
        model: Model,
        predictive: Predictive,
        x: Inputs,
        y: Tensor,
        key: Tensor,
        draws: int,
        how: How,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """Probabilities, ``[S, B, K]``."""
        return (tempered(classify(model, predictive, x, key, draws, how).probs, temperature),)

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, classes, device=device),)

    def conformal_scores(self, found: Predicted) -> Tensor:
        return 1.0 - found.parts[0].gather(1, found.y[:, None]).squeeze(1)

    def temperatures(self, found: Predicted) -> Tensor:
        (probs,) = found.parts
        return calibration.temperatures(probs, found.y, found.offsets.to(probs.device)).cpu()

    def example_nll(self, found: Predicted) -> Tensor | None:
        return diagnostics.losses_of_classes(found.parts[0], found.y)

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        (probs,) = found.parts
        sets = bounded = None
        if (bounds := scoring.bounds) is not None:
            sets = (1.0 - probs).double() <= bounds.bound.reshape(len(probs), -1)
            bounded = bounds.finite
            if scoring.scaling:
                probs = tempered(probs, bounds.temperature)
        shares = class_shares(scoring.train, scoring.classes)[scoring.clients].to(probs.device)
        offsets = found.offsets.to(probs.device)
        scored = evaluate(probs, found.y, offsets, scoring.bins, sets, bounded, shares)
        return replace(
            scored,
            losses=partial(diagnostics.losses_of_classes, probs, found.y),
            example_nll=partial(diagnostics.losses_of_classes, probs, found.y),
            diagnose=partial(diagnostics.of_classes, probs, found.y, offsets, shares, sets, bounded),
            fitted_temperature=partial(calibration.common_temperature, probs, found.y),
            by_class=partial(by_class, probs, found.y, sets, bounded),
            slopes=partial(calibration.slopes, probs, found.y),
        )

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        return form_of_classes(classes, bins, calibrated)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        return evaluate_sums(sums, bins)

    @property
    def nll_range(self) -> tuple[float, float]:
        return 0.0, -math.log(SMALLEST)

    def slopes_fault(self, told: HeldOutSlopes) -> str:
        return calibration.fault(told)

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        assert isinstance(found, Classified)
        columns = {"label": [target.labels[k] for k in found.label.tolist()]}
        columns |= {f"p({label})": written(found.probs[:, k]) for k, label in enumerate(target.labels)}
        columns |= {name: written(part) for name, part in found.uncertainties.items()}
        if found.scores is not None:
            sets = found.prediction_set(level).tolist()
            columns[f"set({level:g})"] = [
                " | ".join(label for label, held in zip(target.labels, row, strict=True) if held) or EMPTY_SET
                for row in sets
            ]
        if abstain is not None:
            columns["abstain"] = ["yes" if p < abstain else "no" for p in found.confidence.tolist()]
        return columns

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        assert isinstance(found, Classified)
        made = {"label": found.label, "probabilities": found.probs, **found.uncertainties}
        return made if found.scores is None else {**made, "set": found.prediction_set(level)}


# --- Regression -------------------------------------------------------------------------------------------------------


class Regression(Task):
    """A number with Gaussian noise."""

    name = "regression"
    residual_scores = True
    phrase = "a regression"
    targets = "numbers"
    standardised = True
    tempered = True
    #: Each example tells of the scale of errors, not only those that surprise.
    enough = 100
    likelihoods: ClassVar[type] = Normal

    def likelihood(self, classes: int) -> Likelihood:
        return Normal()

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Regressed:
        return regress(model, predictive, x, key, draws, how=how)

    def parts(
        self,
        model: Model,
        predictive: Predictive,
        x: Inputs,
        y: Tensor,
        key: Tensor,
        draws: int,
        how: How,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """Mean, predictive standard deviation and −log p of the target, ``[S, B]`` each."""
        found = regress(model, predictive, x, key, draws, y, how, temperature)
        assert found.nll is not None
        return found.mean, found.scale, found.nll

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, device=device),) * 3

    def conformal_scores(self, found: Predicted) -> Tensor:
        mean, scale, _ = found.parts
        return (found.y - mean).abs() / scale

    def example_nll(self, found: Predicted) -> Tensor | None:
        return found.parts[2]

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        mean, scale, nll = found.parts
        inside = width = bounded = None
        if (bounds := scoring.bounds) is not None:
            half = bounds.bound * scale
            inside, width, bounded = (found.y - mean).abs() <= half, 2.0 * half, bounds.finite
        squares = calibration.squared_errors(mean, scale, found.y)
        offsets = found.offsets.to(mean.device)
        without = mean_targets(scoring.train)[scoring.clients].to(mean.device)[scoring.owner]
        scored = evaluate_regression(
            mean=mean,
            scale=scale,
            nll=nll,
            y=found.y,
            offsets=offsets,
            bins=scoring.bins,
            inside=inside,
            width=width,
            bounded=bounded,
            baseline=without,
        )
        return replace(
            scored,
            losses=partial(diagnostics.losses_of_numbers, mean, found.y),
            example_nll=nll.double,
            diagnose=partial(diagnostics.of_numbers, mean, scale, found.y, offsets, without),
            fitted_temperature=partial(calibration.common_scale_factor, squares),
            slopes=partial(calibration.slopes_of_numbers, squares),
        )

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        return form_of_numbers(bins, calibrated)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        return evaluate_sums(sums, bins)

    def slopes_fault(self, told: HeldOutSlopes) -> str:
        return calibration.fault_of_numbers(told)

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        assert isinstance(found, Regressed)
        no_label(abstain, self)
        unit = target.unit
        made = self.tensors(found, target, level)
        ends = {f"{name}({level:g})": written(made.pop(name), unit) for name in ("low", "high") if name in made}
        columns = {"mean": written(made.pop("mean"), unit)}
        return columns | {name: written(part) for name, part in made.items()} | ends

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        """In the target's own unit."""
        assert isinstance(found, Regressed)
        mean, unit = target.mean, target.unit
        made = {"mean": found.mean.double() * unit + mean}
        made |= {name: deviation * unit for name, deviation in found.deviations.items()}
        if found.scores is None:
            return made
        low, high = found.interval(level)
        return made | {"low": low.double() * unit + mean, "high": high.double() * unit + mean}


class HeteroscedasticRegression(Regression):
    """A number with Gaussian noise whose size depends on the inputs."""

    name = "heteroscedastic"
    phrase = "a heteroscedastic regression"
    likelihoods: ClassVar[type] = Heteroscedastic

    def likelihood(self, classes: int) -> Likelihood:
        return Heteroscedastic()

    def outputs(self, classes: int) -> int:
        return 2


def no_label(abstain: float | None, task: Task) -> None:
    """Raise a `UserError` where rows are to be marked by the probability of a label and there is none."""
    if abstain is not None:
        raise UserError(f"--abstain needs the probability of a label, but this run predicts {task.targets}; omit it.")


def written(values: Tensor, unit: float = math.inf) -> list[str]:
    """Numbers ``[B]`` with six digits, and more where they are large beside the unit in which they differ."""
    ratios = [abs(value) / unit for value in values.tolist()]
    digits = [6 + math.ceil(math.log10(r)) if 1.0 < r < math.inf else 6 for r in ratios]
    return [f"{value:.{count}g}" for value, count in zip(values.tolist(), digits, strict=True)]


# --- By name ----------------------------------------------------------------------------------------------------------

_KNOWN: dict[str, Task] = {}


def get_task(name: str) -> Task:
    """The task of that name, or a `UserError` that lists those there are."""
    if name not in _KNOWN:
        if name not in TASKS:
            raise unknown("task", str(name), task_names())
        module, _, kind = TASKS[name].partition(":")
        _KNOWN[name] = getattr(import_module(module), kind)()
    return _KNOWN[name]


def inferred(classes: bool) -> Task:
    """The task where none is given: a classification if the targets look like classes, else a regression."""
    return get_task(Classification.name if classes else Regression.name)


def task_names() -> tuple[str, ...]:
    """Names of all tasks: those of the library, then those that were registered."""
    return tuple(dict.fromkeys([*TASKS, *_KNOWN]))


def is_task(name: Any) -> bool:
    """Whether there is a task of that name."""
    return isinstance(name, str) and (name in TASKS or name in _KNOWN)


def register_task(task: Task) -> Task:
    """Make a task of your own known by its name, and return it.

    Raises:
        UserError: There is another task of that name.
    """
    known = _KNOWN.get(task.name)
    if task.name in TASKS or (known is not None and type(known) is not type(task)):
        raise UserError(f"There is already a task '{task.name}'; give yours another name.")
    return _KNOWN.setdefault(task.name, task)
