"""Labels in other forms than one of several classes: in an order, several at once, or one for each token.

All are scored by the metrics of classes: several labels as one yes or no for each of them, tokens as one example each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import IGNORED, Bernoulli, Likelihood, Ordinal, Tokens
from bpfed.inference.predictive import How, Prediction, Predictive, Probabilities, posterior_outputs, uncalibrated
from bpfed.inference.tasks import (
    EMPTY_SET,
    Classification,
    Predicted,
    Scoring,
    TargetColumn,
    Task,
    no_label,
    written,
)
from bpfed.metrics import SMALLEST, Evaluation, Form, Sums, evaluate, evaluate_sums
from bpfed.metrics.evaluation import counting, summed
from bpfed.metrics.scores import form_of_classes

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Labels that a target can hold.
MOST_LABELS = 50


class OrderedClasses(Classification):
    """One of several classes in an order, such as grades; the cumulative logit model (`Ordinal`)."""

    name = "ordinal"
    phrase = "an ordinal regression"
    targets = "classes in an order"
    likelihoods = Ordinal

    def likelihood(self, classes: int) -> Likelihood:
        return Ordinal(classes)

    def outputs(self, classes: int) -> int:
        return 1

    def label_fault(self, labels: Sequence[str]) -> str:
        try:
            [float(label) for label in labels]
        except ValueError as error:
            word = str(error).rpartition(": ")[2]
            return (
                f"has the class {word}, whose place in the order is not known; write classes as numbers in their order, "
                "or say the numbers with --map, as in --map 'COLUMN:low=1,high=2'."
            )
        return ""


@dataclass(frozen=True)
class Labelled(Probabilities):
    """Predicted labels of B examples, each present or not: ``probs`` are ``[..., B, L]``, entropies sums over labels."""

    @property
    def labels(self) -> Tensor:
        """Labels that are more probable than not, ``[..., B, L]`` bool."""
        return self.probs > 0.5

    def prediction_set(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Labels that are surely and that are possibly present, ``[B, L]`` bool each, for all labels of a row at once.

        With probability of at least ``level`` the labels of a row are between the two (split-conformal, see
        `Classified.prediction_set`).
        """
        if self.scores is None:
            raise uncalibrated("sets of labels", self.unscored)
        bound = self.scores.bound(level)
        return self.probs > bound, 1.0 - self.probs <= bound


def _entropies(probs: Tensor) -> Tensor:
    """Σ over labels of the entropy of a yes or no in nats, ``[..., L]`` to ``[...]``."""
    return -(torch.xlogy(probs, probs) + torch.xlogy(1.0 - probs, 1.0 - probs)).sum(-1)


# --- Scores of rows that hold several examples of a class ---------------------------------------------------------------


def _with_rows(scored: Evaluation, parts: dict[str, Tensor], scoring: Scoring) -> Evaluation:
    """The metrics with those of whole rows: ``parts`` are ``[E]`` each, among them ``rows`` (ones) and ``exact``."""
    added = dict(zip(parts, summed(list(parts.values()), scoring.owner, len(scoring.clients)), strict=True))
    found = _from_sums_with_rows(scored.sums._replace(further=scored.sums.further | added), scoring.bins)
    kept = {name: scored.more[name] for name in ("aurc", "auroc") if name in scored.more}  # of all clients in one order
    return replace(found, more=found.more | kept)


def _form_with_rows(classes: int, bins: int, calibrated: bool) -> Form:
    own = form_of_classes(classes, bins, calibrated)
    return own._replace(further=(*own.further, "rows", "exact"), shares=("rows", "exact"))


def _from_sums_with_rows(sums: Sums, bins: int) -> Evaluation:
    rows = sums.pooled("rows")
    sizes = rows[:-1].cpu().numpy().astype(np.int64)
    return evaluate_sums(sums, bins).with_shares({"exact": sums.pooled("exact") / rows}, sizes)


class MultiLabel(Task):
    """Any of several labels, one column of 0 and 1 each; a target is the sum of 2^k over the labels that are present."""

    name = "multilabel"
    phrase = "a multi-label classification"
    targets = "sets of labels"
    labelled = True
    dtype = torch.int64
    regions = "sets"
    likelihoods = Bernoulli
    packed_from = 0
    packed_hint = "--target LABEL1,LABEL2"

    def likelihood(self, classes: int) -> Likelihood:
        return Bernoulli(classes)

    def packed(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.nan_to_num(parts) @ np.exp2(np.arange(parts.shape[1]))
        return found

    def packing_fault(self, names: tuple[str, ...], parts: NDArray[np.float64]) -> str:
        return f"{len(names)} labels; at most {MOST_LABELS} can be predicted" if len(names) > MOST_LABELS else ""

    def fault(self, y: Tensor, classes: int, where: str) -> str:
        if classes and bool(((y < 0) | (y >= 2**classes)).any()):
            return f"a set of labels {where} that is not of {classes} labels"
        return ""

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Labelled:
        each = torch.sigmoid(posterior_outputs(model, predictive, x, key, draws, how).values)
        probs = each.mean(0)
        return Labelled(probs, _entropies(probs), _entropies(each).mean(0))

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
        """Probabilities, ``[S, B, L]``."""
        return (self.predict(model, predictive, x, key, draws, how).probs,)

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, classes, device=device),)

    def conformal_scores(self, found: Predicted) -> Tensor:
        """1 − p of what is so of the label that is the greatest surprise."""
        (probs,) = found.parts
        present = Bernoulli(probs.shape[-1]).bits(found.y)
        return (present - probs).abs().amax(-1)

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """`bpfed.metrics.evaluate` of each label as a yes or no, and ``exact``, the rows whose labels are all right.

        Without a model, the share of rows of a client with each label, with one more row of each kind.
        """
        (probs,) = found.parts
        labels, owner = probs.shape[-1], scoring.owner
        present = Bernoulli(labels).bits(found.y)
        of_two = torch.stack([1.0 - probs, probs], -1).flatten(0, 1)
        offsets = found.offsets.to(probs.device) * labels
        scored = evaluate(of_two, present.flatten(), offsets, scoring.bins)
        train = Bernoulli(labels).bits(scoring.train.y.cpu()).double()
        counts = torch.zeros(len(scoring.train.sizes), labels, dtype=torch.float64)
        counts = counts.index_add_(0, scoring.train.owner.cpu(), train)
        shares = ((counts + 1.0) / (scoring.train.sizes.cpu()[:, None] + 2.0))[scoring.clients].to(probs.device)[owner]
        so = torch.where(present.bool(), shares, 1.0 - shares)
        parts = {
            "rows": torch.ones_like(owner, dtype=torch.float64),
            "exact": ((probs > 0.5) == present.bool()).all(-1).double(),
            "majority": (so > 0.5).double().sum(-1),
            "shares_nll": -so.clamp(min=SMALLEST).log().sum(-1),
        }
        if (bounds := scoring.bounds) is not None:
            inside = self.conformal_scores(found) <= bounds.bound
            size = (1.0 - probs <= bounds.bound[:, None]).sum(-1)
            parts |= counting({"coverage": inside, "set_size": size}, bounds.finite)
        return _with_rows(scored, parts, scoring)

    @property
    def nll_range(self) -> tuple[float, float]:
        return 0.0, -math.log(SMALLEST)

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        return _form_with_rows(2, bins, calibrated)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        return _from_sums_with_rows(sums, bins)

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        """The labels that are more probable than not, all probabilities, uncertainties, and calibrated sets."""
        assert isinstance(found, Labelled)
        no_label(abstain, self)

        def listed(chosen: Tensor) -> list[str]:
            rows = chosen.tolist()
            return [" | ".join(n for n, c in zip(target.labels, row, strict=True) if c) or EMPTY_SET for row in rows]

        columns = {"labels": listed(found.labels)}
        columns |= {f"p({label})": written(found.probs[:, k]) for k, label in enumerate(target.labels)}
        columns |= {name: written(part) for name, part in found.uncertainties.items()}
        if found.scores is not None:
            surely, possibly = found.prediction_set(level)
            columns |= {f"surely({level:g})": listed(surely), f"possibly({level:g})": listed(possibly)}
        return columns

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        assert isinstance(found, Labelled)
        made = {"labels": found.labels, "probabilities": found.probs, **found.uncertainties}
        if found.scores is None:
            return made
        return made | dict(zip(("surely", "possibly"), found.prediction_set(level), strict=True))


@dataclass(frozen=True)
class Tagged(Probabilities):
    """Predicted classes of the T tokens of B sequences: ``probs`` are ``[..., B, T, K]``, entropies ``[..., B, T]``."""

    @property
    def label(self) -> Tensor:
        """The most probable class of each token, ``[..., B, T]``."""
        return self.probs.argmax(-1)

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.probs.sum((-1, -2)), self.entropy.sum(-1), self.aleatoric.sum(-1)

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Classes of each token, ``[B, T, K]`` bool: with probability of at least ``level`` those of *all* tokens of a
        sequence are in their sets (see `Classified.prediction_set`)."""
        if self.scores is None:
            raise uncalibrated("prediction sets", self.unscored)
        return 1.0 - self.probs <= self.scores.bound(level)


class TokenClassification(Classification):
    """One of several classes for each token; targets are ``[E, T]``, `IGNORED` (-100) where a token does not count."""

    name = "tokens"
    phrase = "a token classification"
    targets = "classes of tokens"
    has_classes = False
    tempered = False
    scalable = False
    sets_by_class = False
    likelihoods = Tokens
    target_axes = 1

    def likelihood(self, classes: int) -> Likelihood:
        return Tokens(classes)

    def fault(self, y: Tensor, classes: int, where: str) -> str:
        kept = y[y != IGNORED]
        return super().fault(kept, classes, where) if len(kept) else f"no token that counts {where}"

    def predict(  # type: ignore[override]
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Tagged:
        assert isinstance(model.likelihood, Tokens)
        values = posterior_outputs(model, predictive, x, key, draws, how).values
        logp = torch.log_softmax(values.unflatten(-1, (-1, model.likelihood.classes)), -1)
        probs = logp.exp().mean(0)
        return Tagged(probs, -torch.xlogy(probs, probs).sum(-1), -(logp.exp() * logp).sum(-1).mean(0))

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
        """Probabilities, ``[S, B, T, K]``."""
        return (self.predict(model, predictive, x, key, draws, how).probs,)

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, 1, classes, device=device),)

    def conformal_scores(self, found: Predicted) -> Tensor:
        """1 − p of the right class of the token that is the greatest surprise."""
        (probs,) = found.parts
        right = probs.gather(-1, found.y.clamp(min=0)[..., None])[..., 0]
        return torch.where(found.y == IGNORED, 0.0, 1.0 - right).flatten(1).amax(-1)

    def example_nll(self, found: Predicted) -> Tensor | None:
        return None

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """`bpfed.metrics.evaluate` of the tokens that count, and ``exact``, the sequences whose tokens are all right."""
        (probs,) = found.parts
        counts = found.y != IGNORED
        owner, clients = scoring.owner, len(scoring.clients)
        per_client = summed([counts.sum(1).double()], owner, clients)[0].long()
        offsets = torch.cat([per_client.new_zeros(1), per_client.cumsum(0)])
        known = [y[y != IGNORED] for y in (scoring.train.client(c)[1] for c in scoring.clients.tolist())]
        shares = torch.stack([torch.bincount(y.cpu(), minlength=scoring.classes).double() + 1.0 for y in known])
        shares = (shares / shares.sum(1, keepdim=True)).to(probs.device)
        scored = evaluate(probs[counts], found.y[counts], offsets, scoring.bins, shares=shares)
        right = ((probs.argmax(-1) == found.y) | ~counts).all(-1)
        parts = {"rows": torch.ones_like(owner, dtype=torch.float64), "exact": right.double()}
        if (bounds := scoring.bounds) is not None:
            size = (1.0 - probs <= bounds.bound[:, None, None]).sum(-1) * counts
            mean = size.sum(-1) / counts.sum(-1).clamp(min=1)
            inside = self.conformal_scores(found) <= bounds.bound
            parts |= counting({"coverage": inside, "set_size": mean}, bounds.finite)
        return _with_rows(scored, parts, scoring)

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        return _form_with_rows(classes, bins, calibrated)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        return _from_sums_with_rows(sums, bins)

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        """The most probable class of each token, with spaces between them, and the probability of the least sure one."""
        assert isinstance(found, Tagged)
        no_label(abstain, self)
        labels = [" ".join(target.labels[k] for k in row) for row in found.label.tolist()]
        return {"labels": labels, "least": written(found.probs.amax(-1).amin(-1))}

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        assert isinstance(found, Tagged)
        made = {"label": found.label, "probabilities": found.probs, **found.uncertainties}
        return made if found.scores is None else {**made, "set": found.prediction_set(level)}
