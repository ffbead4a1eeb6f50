"""Decisions: what to do, given probabilities of classes and what mistakes cost.

They are made after the fact. Training and probabilities know nothing of costs, so that the probabilities stay those of the
data, and other costs need no other run.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bpfed._util.errors import UserError, quoted, unknown
from bpfed._util.text import percent
from bpfed.inference.predictive import Classified, Prediction
from bpfed.inference.tasks import written

#: Calibration examples that both classes must have for a threshold to be chosen on them.
FEWEST = 10
BALANCED, AUTO = "balanced", "auto"


@dataclass(frozen=True, eq=False)
class Costs:
    """What each decision costs, given the true class.

    Attributes:
        labels: The classes, ``[K]``.
        decisions: What can be decided, ``[D]``: the classes first, then others, such as to ask a person.
        matrix: ``[K, D]`` float64.
    """

    labels: tuple[str, ...]
    decisions: tuple[str, ...]
    matrix: Tensor

    def expected(self, probs: Tensor) -> Tensor:
        """The expected cost of each decision for these probabilities ``[B, K]``, ``[B, D]``."""
        return probs.double() @ self.matrix

    def decide(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The decision of least expected cost, ``[B]``, and that cost, ``[B]``; of several, the first."""
        least = self.expected(probs).min(1)
        return least.indices, least.values

    @classmethod
    def read(cls, said: str, labels: Sequence[str], shares: Tensor | None = None) -> Costs:
        """What ``--costs`` says.

        Args:
            said: A CSV file with a row for each true class and a column for each decision; or ``TRUTH:DECISION=COST`` with
                commas between several; ``TRUTH=COST``, of any mistake there; or ``balanced``, mistakes cost as much more
                as a class is rarer. What is not said costs 1, and a right label 0.
            labels: The classes.
            shares: How frequent each is, ``[K]``, for ``balanced``.
        """
        labels = tuple(labels)
        if said == BALANCED:
            if shares is None:
                raise UserError(
                    "How frequent classes are is known from calibration examples, and this run kept none; train with "
                    "--calibration 0.2, or say what a mistake costs, such as --costs yes=10."
                )
            each = 1.0 / (shares.double() * len(labels))
            return cls(labels, labels, each[:, None] * (1.0 - torch.eye(len(labels), dtype=torch.float64)))
        if said.lower().endswith(".csv"):
            return cls._of_file(Path(said), labels)
        given: dict[tuple[str, str | None], float] = {}
        for item in said.split(","):
            key, equals, cost = item.rpartition("=")
            truth, colon, decision = (part.strip() for part in key.partition(":"))
            if not equals or not truth or (colon and not decision):
                raise UserError(
                    f"--costs has '{item.strip()}', but must be TRUTH:DECISION=COST, such as ill:healthy=10, or the name of "
                    "a .csv file."
                )
            given[truth, decision if colon else None] = _cost(cost, item)
        others = [decision for _, decision in given if decision is not None and decision not in labels]
        made = dict.fromkeys([*labels, *others])
        matrix = torch.full((len(labels), len(made)), math.nan, dtype=torch.float64)
        matrix[:, : len(labels)] = 1.0 - torch.eye(len(labels), dtype=torch.float64)
        place = {decision: k for k, decision in enumerate(made)}
        for (truth, chosen), value in sorted(given.items(), key=lambda entry: entry[0][1] is not None):
            if truth not in labels:
                raise unknown("class", truth, labels)
            k = labels.index(truth)
            if chosen is None:
                matrix[k, [j for j in range(len(labels)) if j != k]] = value
            else:
                matrix[k, place[chosen]] = value
        return cls(labels, tuple(made), matrix)._complete()

    @classmethod
    def _of_file(cls, path: Path, labels: tuple[str, ...]) -> Costs:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"'{path}' cannot be read ({error}); give a CSV file of costs.") from error
        if not rows or any(len(row) != len(rows[0]) for row in rows) or len(rows[0]) < 2:
            raise UserError(
                f"'{path}' must have a header with a column for each decision, and a row for each true class."
            )
        decisions = [cell.strip() for cell in rows[0][1:]]
        truths = [row[0].strip() for row in rows[1:]]
        if sorted(truths) != sorted(labels) or len(set(decisions)) < len(decisions):
            raise UserError(f"'{path}' must have one row for each class ({quoted(labels)}), and each decision once.")
        order = [d for d in labels if d in decisions] + [d for d in decisions if d not in labels]
        costs = {
            (truth, decision): _cost(cell, f"{truth}, {decision}")
            for truth, row in zip(truths, rows[1:], strict=True)
            for decision, cell in zip(decisions, row[1:], strict=True)
        }
        matrix = torch.tensor([[costs[truth, d] for d in order] for truth in labels], dtype=torch.float64)
        return cls(labels, tuple(order), matrix)

    def _complete(self) -> Costs:
        """Itself, if every cost is known."""
        lacking = self.matrix.isnan().nonzero().tolist()
        if lacking:
            k, d = lacking[0]
            raise UserError(
                f"--costs says what '{self.decisions[d]}' costs for some classes, but not for '{self.labels[k]}'; add "
                f"{self.labels[k]}:{self.decisions[d]}=COST."
            )
        return self


def _cost(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"The cost in '{where.strip()}' is '{text.strip()}', but must be a number.")
    return value


@dataclass(frozen=True)
class Threshold:
    """Two classes, told apart by the probability of one.

    Attributes:
        labels: Both.
        positive: Which of them it is the probability of.
        value: From this probability on it is decided for.
    """

    labels: tuple[str, ...]
    positive: int
    value: float

    def decide(self, probs: Tensor) -> Tensor:
        """The class that is decided for, ``[B]``, given probabilities ``[B, 2]``."""
        yes = probs[:, self.positive].double() >= self.value
        return torch.where(yes, self.positive, 1 - self.positive)


def split_threshold(said: str, labels: Sequence[str]) -> tuple[int, float | None]:
    """What ``--threshold`` says, ``auto`` or a probability, after ``LABEL=`` or not: which class, and from where on.

    The class is the last of both where none is named. None: the threshold is to be chosen.
    """
    if len(labels) != 2:
        raise UserError(f"--threshold is for two classes, but there are {len(labels)}; use --costs instead.")
    named, equals, text = said.rpartition("=")
    if equals and named.strip() not in labels:
        raise unknown("class", named.strip(), labels)
    positive = list(labels).index(named.strip()) if equals else 1
    if text.strip() == AUTO:
        return positive, None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise UserError(f"--threshold is '{said}', but must be auto or a probability, such as 0.3 or {labels[1]}=0.3.")
    return positive, value


def chosen_threshold(
    probs: Tensor, truth: Tensor, labels: Sequence[str], positive: int, costs: Costs | None
) -> Threshold:
    """The threshold that would have done best on held-out examples.

    Best is the largest sum of sensitivity and specificity (Youden's index), or the least cost where costs are given.
    It lies in the middle between two examples.

    Args:
        probs: Of the positive class, ``[E]``.
        truth: Whether it is right, ``[E]`` bool.
        labels: Both classes.
        positive: Which of them is the positive one.
        costs: Of both decisions.
    """
    p, order = probs.double().sort(descending=True)
    yes = truth[order].double()
    found = {labels[positive]: int(yes.sum()), labels[1 - positive]: int(len(yes) - yes.sum())}
    if few := [label for label, count in found.items() if count < FEWEST]:
        raise UserError(
            f"A threshold is chosen on calibration examples, of which '{few[0]}' has {found[few[0]]} and needs {FEWEST}; "
            "train with a larger --calibration, or give a probability."
        )
    if costs is not None and costs.matrix.shape[1] != 2:
        raise UserError("--threshold chooses between two classes, but --costs has another decision; omit one of them.")
    # With k examples decided for: true and false positives of the first k.
    hits = torch.cat([yes.new_zeros(1), yes.cumsum(0)])
    alarms = torch.arange(len(yes) + 1, dtype=torch.float64) - hits
    if costs is None:
        worth = hits / hits[-1] - alarms / alarms[-1]
    else:
        m, a, b = costs.matrix, positive, 1 - positive
        worth = -(m[a, a] * hits + m[a, b] * (hits[-1] - hits) + m[b, a] * alarms + m[b, b] * (alarms[-1] - alarms))
    ends = torch.cat([p.new_ones(1), p, p.new_zeros(1)])
    apart = ends[:-1] > ends[1:]
    apart[0] = apart[-1] = True  # all or none of them
    best = int(worth.masked_fill(~apart, -math.inf).argmax())
    return Threshold(tuple(labels), positive, float(ends[best] + ends[best + 1]) / 2.0)


@dataclass(frozen=True)
class Rule:
    """How to decide on new rows, given probabilities: by costs, or by a threshold, which may have been chosen by costs."""

    labels: tuple[str, ...]
    costs: Costs | None
    threshold: Threshold | None

    def decisions(self, found: Prediction) -> list[str]:
        """What is decided on each row."""
        assert isinstance(found, Classified)
        if self.threshold is not None:
            # The threshold is one of probabilities before a temperature of the client's own, as conformal scores are.
            raw = found.probs if found.raw is None else found.raw
            return [self.labels[k] for k in self.threshold.decide(raw).tolist()]
        assert self.costs is not None
        return [self.costs.decisions[k] for k in self.costs.decide(found.probs)[0].tolist()]

    def likeliest(self, found: Prediction) -> list[str]:
        """The most probable label of each row."""
        assert isinstance(found, Classified)
        return [self.labels[k] for k in found.label.tolist()]

    def columns(self, found: Prediction) -> dict[str, list[str]]:
        """What is decided, and at what expected cost, as columns."""
        made = self.decisions(found)
        if self.costs is None or not isinstance(found, Classified):
            return {"decision": made}
        place = [self.costs.decisions.index(decision) for decision in made]
        expected = self.costs.expected(found.probs)[range(len(place)), place]
        return {"decision": made, "expected cost": written(expected)}

    def judged(self, decided: Sequence[tuple[str, str, str]]) -> list[str]:
        """How good decisions were, given (truth, decision, most probable label) of each row, in a sentence."""
        known = [row for row in decided if row[0] in self.labels]
        if not known:
            return []
        if self.costs is not None:
            costs, place = self.costs, {d: k for k, d in enumerate(self.costs.decisions)}

            def mean(at: int) -> float:
                return sum(float(costs.matrix[self.labels.index(row[0]), place[row[at]]]) for row in known) / len(known)

            if all(label in place for label in self.labels):
                return [
                    f"The decisions cost {mean(1):.4g} per test row on average; the most probable label would cost "
                    f"{mean(2):.4g}."
                ]
            return [f"The decisions cost {mean(1):.4g} per test row on average."]
        shares = []
        for label in self.labels:
            own = [row for row in known if row[0] == label]
            right = [sum(row[at] == label for row in own) for at in (1, 2)]
            if own:
                shares.append(
                    f"{percent(right[0] / len(own))} of the {len(own)} rows of {label} ({percent(right[1] / len(own))} by "
                    "the most probable label)"
                )
        return [f"The decisions are right for {' and '.join(shares)}."]
