"""How right the predictions are, and how rightly sure: per client, on average, at worst, and pooled.

Everything is computed where the predictions are, for all clients at once and without a synchronisation; one small
tensor travels at the end. Sums are float64, so the order of the examples does not show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

#: Scores of which more is better; of the others less is.
BEST_IS_HIGH = frozenset({"accuracy", "answered_accuracy", "coverage"})

#: Scores that a client with test examples may lack: it answered nothing, or has too few calibration examples.
LACKING = frozenset({"answered_accuracy", "coverage", "set_size", "interval_width"})

#: A prediction that is less sure than this counts as an abstention, and sets are tested at this level.
SURE = 0.9
#: A lower probability counts as this one, so that one wrong certainty costs 27.6 nats, not infinity. float32 holds it.
SMALLEST = 1e-12


@dataclass(frozen=True)
class Reliability:
    """What was claimed against what happened, over all clients' examples.

    For classification there is one entry per bin of the top-label confidence; a bin without examples has ``None`` for
    both. For regression there is one entry per nominal level of a central interval: ``confidence`` is that level and
    ``accuracy`` the share of targets that fell inside.

    Attributes:
        count: Examples behind each entry, ``[B]``.
        confidence: Mean confidence, ``[B]``.
        accuracy: Share that was right, ``[B]``.
    """

    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"count": self.count, "confidence": self.confidence, "accuracy": self.accuracy}


@dataclass(frozen=True, eq=False)
class Score:
    """One metric. A client without test examples is NaN in ``clients`` and counts nowhere else.

    Attributes:
        pooled: Over all examples together.
        mean: Unweighted mean over clients.
        worst: The worst client's (the lowest accuracy, the highest of anything else).
        clients: Each client's, ``[N]``.
    """

    pooled: float
    mean: float
    worst: float
    clients: Floats

    def record(self) -> dict[str, float | None]:
        """As JSON holds it: a value that is not finite is ``None``."""
        return {"pooled": _json(self.pooled), "mean": _json(self.mean), "worst": _json(self.worst)}


class Sums(NamedTuple):
    """Sums over the test examples of N clients, float64; nothing more is known of an example than these add up.

    Attributes:
        cells: ``[M, N, B]``. For classification, of each bin of the confidence: examples, confidences, hits, variances
            c (1 - c). For regression, the examples whose central interval just holds the target, by nominal level.
        losses: ``[2, N]``. NLL and Brier score, or squared error and NLL.
        further: ``[N]`` each, by name. For classification ``sure``, the examples that it is 90 % sure of, ``sure_right``,
            those of them that are right, and ``risk``, the summed error rates behind `aurc`. For regression ``baseline``,
            the squared error of a constant. Where predictions are calibrated, ``counted``, the examples whose set or
            interval counts, and of these what ``coverage`` and ``set_size`` or ``interval_width`` are the mean of.
    """

    cells: Tensor
    losses: Tensor
    further: dict[str, Tensor]

    @classmethod
    def join(cls, parts: Sequence[Sums]) -> Sums:
        """The clients of several, in that order."""
        further = {name: torch.cat([p.further[name] for p in parts]) for name in parts[0].further}
        return cls(torch.cat([p.cells for p in parts], 1), torch.cat([p.losses for p in parts], 1), further)

    def cpu(self) -> Sums:
        """The same in main memory."""
        return Sums(self.cells.cpu(), self.losses.cpu(), {name: part.cpu() for name, part in self.further.items()})


class Form(NamedTuple):
    """What `Sums` of a run look like.

    Attributes:
        rows: M of ``cells``.
        bins: B of ``cells``.
        further: Names of ``further``.
    """

    rows: int
    bins: int
    further: tuple[str, ...]

    @classmethod
    def of(cls, classification: bool, bins: int, calibrated: bool) -> Form:
        """Of a run with so many bins, and with calibration examples or without."""
        size = "set_size" if classification else "interval_width"
        held = ("counted", "coverage", size) if calibrated else ()
        if classification:
            return cls(4, bins, ("sure", "sure_right", "risk", *held))
        return cls(1, len(_levels(bins)) + 1, ("baseline", *held))


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of one moment in training.

    Attributes:
        scores: By name; classification has accuracy, nll, brier, ece and mce, regression rmse, nll and ece.
        ece_floor: The ECE that perfectly calibrated predictions with the same confidences would show on average, by
            chance alone. An ECE near its floor says nothing against the calibration.
        reliability: Over all clients.
        sizes: Test examples of each client, ``[N]``.
        bins: Number of bins behind ECE and MCE, without which neither can be compared.
        sums: What all of it is made of. Clients that never meet can have theirs put together by `evaluate_sums`.
        more: What further scores there are, by name; see `evaluate`.
    """

    scores: dict[str, Score]
    ece_floor: Score
    reliability: Reliability
    sizes: NDArray[np.int64]
    bins: int
    sums: Sums
    more: dict[str, Score] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Score:
        return self.scores[metric] if metric in self.scores else self.more[metric]

    def record(self) -> dict[str, dict[str, float | None]]:
        """``{"accuracy": {"pooled": .., "mean": .., "worst": ..}, "nll": ..}``, ready for JSON."""
        return {name: score.record() for name, score in {**self.scores, **self.more}.items()}

    def clients(
        self, names: Sequence[str], train_sizes: Sequence[int], calibration_sizes: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """One row per client: name, sizes, each metric and ``ece_floor`` (``None`` where untested).

        The sizes are ``train`` and ``test`` and, where examples were held back, ``calibration``.
        """
        columns = {name: score.clients.tolist() for name, score in self.scores.items()}
        columns["ece_floor"] = self.ece_floor.clients.tolist()
        columns |= {name: score.clients.tolist() for name, score in self.more.items()}
        held = (
            [{"calibration": int(n)} for n in calibration_sizes] if calibration_sizes is not None else [{}] * len(names)
        )
        return [
            {"name": name, "train": int(train), "test": int(test)}
            | held[i]
            | {metric: _json(values[i]) for metric, values in columns.items()}
            for i, (name, train, test) in enumerate(zip(names, train_sizes, self.sizes, strict=True))
        ]

    def detail(
        self,
        round_: int,
        names: Sequence[str],
        train_sizes: Sequence[int],
        calibration_sizes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Everything the report needs beyond the curves, ready for JSON."""
        return {
            "round": round_,
            "bins": self.bins,
            "clients": self.clients(names, train_sizes, calibration_sizes),
            "reliability": self.reliability.record(),
            "ece_floor": _json(self.ece_floor.pooled),
        }


def evaluate(
    probs: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int = 10,
    sets: Tensor | None = None,
    bounded: Tensor | None = None,
) -> Evaluation:
    """Score predicted class probabilities.

    - accuracy: share of examples whose most probable class is the right one;
    - nll: nats per example;
    - brier: sum over classes of (p - one hot)², mean over examples, 0 to 2;
    - ece, mce: mean (by examples) and largest gap between confidence and accuracy over equal-width bins [a, b) of the
      top-label confidence, the last one closed; empty bins are skipped.

    And as ``more``, for who acts on the predictions:

    - aurc: see `aurc`;
    - abstained: share of examples whose confidence is below 0.9; answered_accuracy: accuracy on the others, NaN without;
    - coverage, set_size: share of prediction sets that hold the right class, and their mean size, if they are given.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Number of bins.
        sets: Prediction sets, ``[E, K]`` bool.
        bounded: Which of the sets could leave out a label, ``[E]`` bool; the others count neither in coverage nor in
            set_size, and a client with none of them has neither. None: all.
    """
    if probs.ndim != 2 or y.shape != probs.shape[:1]:
        raise ValueError(f"probs must be [E, K] and y [E], not {list(probs.shape)} and {list(y.shape)}.")
    if probs.dtype != torch.float64:
        probs = probs.float()
    owner, n_clients = _owner(offsets, y)
    confidence, guess = probs.max(1)
    confidence = confidence.clamp(0, 1)  # a mean over draws may come to 1.0000001
    right = (guess == y) & confidence.isfinite()
    likelihood = probs.gather(1, y[:, None]).squeeze(1)
    nll = -likelihood.clamp(SMALLEST, 1).double().log()
    brier = probs.scatter_add(1, y[:, None], probs.new_full((len(y), 1), -1)).double().square().sum(1)

    # Edges in the confidences' own precision, so that a float32 0.7 lies in the bin that begins at 0.7.
    edges = torch.arange(1, bins, device=probs.device, dtype=torch.float64).div(bins).to(confidence.dtype)
    cell = owner * bins + torch.bucketize(confidence, edges, right=True)
    confidence = confidence.double()
    cells = _sums(
        [torch.ones_like(confidence), confidence, right.double(), confidence * (1 - confidence)], cell, n_clients * bins
    )
    sure = confidence >= torch.tensor(SURE, dtype=probs.dtype)  # rounded as the confidences were
    parts = {"sure": sure.double(), "sure_right": (sure & right).double()}
    if sets is not None:
        found = {"coverage": sets.gather(1, y[:, None]).squeeze(1), "set_size": sets.sum(1)}
        parts |= _counted(found, bounded)
    further = dict(zip(parts, _sums(list(parts.values()), owner, n_clients), strict=True))
    further["risk"] = _risk(confidence, ~right, owner, n_clients)
    sums = Sums(cells.view(4, n_clients, bins), _sums([nll, brier], owner, n_clients), further)
    return _classified(sums, bins, _risk(confidence, ~right, torch.zeros_like(owner), 1))


def evaluate_regression(
    mean: Tensor,
    scale: Tensor,
    nll: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int = 10,
    inside: Tensor | None = None,
    width: Tensor | None = None,
    bounded: Tensor | None = None,
    baseline: Tensor | None = None,
) -> Evaluation:
    """Score predicted real values.

    ``ece`` is the quantile calibration error: with the predictive taken as Gaussian, the mean over nominal levels of
    |share of targets inside the central interval - level|. The levels are 1/bins, 2/bins, ... below 1, and 0.95.

    Args:
        mean: Predicted mean, ``[E]``.
        scale: Predictive standard deviation, ``[E]``.
        nll: Negative log density of the target, nats, ``[E]`` (the predictive may be a mixture, so it is given).
        y: Targets, ``[E]``.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Sets the levels.
        inside: Whether the target is in its prediction interval, ``[E]`` bool; their share is ``coverage`` of ``more``.
        width: Width of that interval, ``[E]``; the mean is ``interval_width`` of ``more``.
        bounded: Which of the intervals are finite by right, ``[E]`` bool; the others count in neither, and a client with
            none of them has neither. None: all.
        baseline: What would be predicted without a model, ``[E]``; its RMSE is ``baseline`` of ``more``.
    """
    if not mean.shape == scale.shape == nll.shape == y.shape or y.ndim != 1:
        raise ValueError("mean, scale, nll and y must all be [E].")
    owner, n_clients = _owner(offsets, y)
    residual = (y.double() - mean.double()).abs()
    # The smallest central interval that holds the target; a point prediction that is exactly right is inside any.
    needed = torch.erf(residual / scale.double() / math.sqrt(2)).where(residual != 0, 0)
    levels = _levels(bins).to(y.device, non_blocking=True)
    groups = len(levels) + 1  # the last one is what no level holds
    cells = _sums([torch.ones_like(residual)], owner * groups + torch.bucketize(needed, levels), n_clients * groups)
    losses = _sums([residual.square(), nll.double()], owner, n_clients)
    given = {name: part for name, part in (("coverage", inside), ("interval_width", width)) if part is not None}
    parts = {"baseline": (y.double() - baseline.double()).square()} if baseline is not None else {}
    parts |= _counted(given, bounded) if given else {}
    further = dict(zip(parts, _sums(list(parts.values()), owner, n_clients), strict=True)) if parts else {}
    return _regressed(Sums(cells.view(1, n_clients, groups), losses, further), bins)


def evaluate_sums(sums: Sums, bins: int = 10) -> Evaluation:
    """What `evaluate` or `evaluate_regression` would give for all these clients' examples together.

    But for the pooled ``aurc`` of several clients, which is NaN: it needs all confidences in one order.
    """
    if len(sums.cells) != 4:
        return _regressed(sums, bins)
    risk = sums.further["risk"]
    return _classified(sums, bins, risk if len(risk) == 1 else torch.full_like(risk[:1], math.nan))


def _counted(found: Mapping[str, Tensor], bounded: Tensor | None) -> dict[str, Tensor]:
    """Which examples' sets or intervals count, and what is found of these, ``[E]`` each."""
    counted = torch.ones_like(next(iter(found.values())), dtype=torch.bool) if bounded is None else bounded
    return {"counted": counted.double()} | {n: part.double().where(counted, 0.0) for n, part in found.items()}


def _shares(sums: Sums, total: Tensor, risk: Tensor | None = None) -> dict[str, Tensor]:
    """What the further sums say, ``[N + 1]`` each; ``risk`` is that of all clients together, ``[1]``."""
    parts = {name: torch.cat([part, part.sum(0, keepdim=True)]) for name, part in sums.further.items()}
    found: dict[str, Tensor] = {}
    if risk is not None:
        found["aurc"] = torch.cat([sums.further["risk"], risk]) / total
        found["abstained"] = 1 - parts["sure"] / total
        found["answered_accuracy"] = parts["sure_right"] / parts["sure"]
    if "baseline" in parts:
        found["baseline"] = (parts["baseline"] / total).sqrt()
    held = [name for name in ("coverage", "set_size", "interval_width") if name in parts]
    return found | {name: parts[name] / parts["counted"] for name in held}


def _classified(sums: Sums, bins: int, risk: Tensor) -> Evaluation:
    count, claimed, hit, variance = _with_pool(sums.cells)
    total = count.sum(-1)
    loss = _with_pool(sums.losses) / total
    gap = (hit - claimed).abs()
    worst_gap = (gap / count.clamp(min=1)).amax(-1).where(total > 0, math.nan)

    # Chance alone: each bin's hits as a binomial at the bin's mean confidence, widened or narrowed to the variance that
    # the single confidences imply. Exact for bins of one example and for equal confidences.
    mean = (claimed / count.clamp(min=1)).clamp(0, 1)
    binomial = count * mean * (1 - mean)
    spread = (variance / binomial).sqrt().where(binomial > 0, 1)
    floor = (_binomial_deviation(count, mean) * spread).sum(-1) / total

    values = {
        "accuracy": hit.sum(-1) / total,
        "nll": loss[0],
        "brier": loss[1],
        "ece": gap.sum(-1) / total,
        "mce": worst_gap,
    }
    pooled = torch.stack([count[-1], claimed[-1] / count[-1], hit[-1] / count[-1]])
    return _evaluation(values, floor, total, pooled, bins, sums, _shares(sums, total, risk))


def _regressed(sums: Sums, bins: int) -> Evaluation:
    count = _with_pool(sums.cells)[0]
    levels = _levels(bins).to(count.device, non_blocking=True)
    total = count.sum(-1)
    observed = count.cumsum(-1)[:, :-1] / total[:, None]
    square, loss = _with_pool(sums.losses) / total
    floor = _binomial_deviation(total[:, None], levels).mean(-1) / total

    values = {"rmse": square.sqrt(), "nll": loss, "ece": (observed - levels).abs().mean(-1)}
    pooled = torch.stack([total[-1].expand_as(levels), levels, observed[-1]])
    return _evaluation(values, floor, total, pooled, bins, sums, _shares(sums, total))


def _levels(bins: int) -> Tensor:
    """Nominal levels of central intervals."""
    return torch.tensor(sorted({k / bins for k in range(1, bins)} | {0.95}), dtype=torch.float64)


def aurc(probs: Tensor, y: Tensor) -> Tensor:
    """Area under the risk-coverage curve: the error rate if only the surest k of E examples are answered, mean over k.

    Equally sure examples are answered in any order, so each carries the mean error of its tie.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.

    Returns:
        A scalar, 0 (no error) to 1.
    """
    confidence, guess = probs.max(1)
    return _risk(confidence, guess != y, torch.zeros_like(y), 1)[0] / len(y)


def _risk(confidence: Tensor, wrong: Tensor, owner: Tensor, n_clients: int) -> Tensor:
    """`aurc` of each client times its number of examples, ``[N]`` float64."""
    order = confidence.argsort(descending=True)
    order = order[owner[order].argsort(stable=True)]
    confidence, owner, errors = confidence[order], owner[order], wrong.double()[order]
    ones = torch.ones_like(errors)
    tie = torch.ones_like(order)
    tie[1:] = (confidence.diff() != 0) | (owner.diff() != 0)
    tie = tie.cumsum(0) - 1
    tied, size = _sums([errors, ones], tie, len(order))
    expected = (tied / size)[tie].cumsum(0)
    total, everyone = _sums([errors, ones], owner, n_clients)
    before = torch.stack([total, everyone]).cumsum(1) - torch.stack([total, everyone])
    errors, place = expected - before[0][owner], torch.arange(1, len(order) + 1, device=order.device) - before[1][owner]
    return _sums([errors / place], owner, n_clients)[0]


def ood_auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """How well a score (entropy, epistemic uncertainty) tells examples of another distribution from familiar ones.

    Args:
        inside: Scores of familiar examples, ``[A]``.
        outside: Scores of the others, ``[B]``.

    Returns:
        The chance that one of the others has the higher score (a tie counts half), a scalar: 1 is perfect, 0.5 is no use.
    """
    familiar = inside.double().sort().values
    below, upto = (torch.searchsorted(familiar, outside.double(), right=side) for side in (False, True))
    return (below + upto).double().mean() / (2 * len(familiar))


def _owner(offsets: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Which client each example belongs to, ``[E]``, and the number of clients."""
    offsets = offsets.to(y.device, non_blocking=True)
    rows = torch.arange(len(y), device=y.device)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True), len(offsets) - 1


def _sums(columns: list[Tensor], index: Tensor, size: int) -> Tensor:
    """Sum each column ``[E]`` by index, ``[columns, size]``."""
    zeros = torch.zeros(len(columns), size, dtype=torch.float64, device=index.device)
    return zeros.scatter_add_(1, index.expand(len(columns), -1), torch.stack(columns))


def _with_pool(sums: Tensor) -> Tensor:
    """Append to the clients' sums ``[M, N, ...]`` those of all clients together, ``[M, N + 1, ...]``."""
    return torch.cat([sums, sums.sum(1, keepdim=True)], 1)


def _binomial_deviation(n: Tensor, p: Tensor) -> Tensor:
    """E|X - n p| of a binomial X, by De Moivre: 2 v C(n, v) p^v (1 - p)^(n - v + 1) with v = floor(n p) + 1."""
    v = torch.minimum((n * p).floor() + 1, n)
    choose = torch.lgamma(n + 1) - torch.lgamma(v + 1) - torch.lgamma(n - v + 1)
    return 2 * (v.log() + choose + torch.xlogy(v, p) + torch.xlogy(n - v + 1, 1 - p)).exp()


def _evaluation(
    values: dict[str, Tensor],
    floor: Tensor,
    total: Tensor,
    pooled: Tensor,
    bins: int,
    sums: Sums,
    more: Mapping[str, Tensor],
) -> Evaluation:
    """Fetch what was computed (rows ``[N + 1]``, the last of them pooled; ``pooled`` ``[3, B]``) in one transfer."""
    rows = torch.stack([*values.values(), *more.values(), floor, total])
    flat = torch.cat([rows.flatten(), pooled.flatten()]).cpu().numpy()
    table = flat[: rows.numel()].reshape(rows.shape)
    count, confidence, accuracy = flat[rows.numel() :].reshape(pooled.shape)
    sizes = table[-1, :-1].astype(np.int64)

    def score(row: Floats, name: str = "") -> Score:
        counts = sizes > 0
        if name in LACKING:
            counts &= ~np.isnan(row[:-1])
        tested = row[:-1][counts]
        if not len(tested):
            return Score(float(row[-1]), math.nan, math.nan, row[:-1])
        worst = tested.min() if name in BEST_IS_HIGH else tested.max()
        return Score(float(row[-1]), float(tested.mean()), float(worst), row[:-1])

    names = [*values, *more]
    found = {name: score(row, name) for name, row in zip(names, table, strict=False)}
    reliability = Reliability([int(c) for c in count], [_json(c) for c in confidence], [_json(a) for a in accuracy])
    scores, further = ({name: found[name] for name in part} for part in (values, more))
    return Evaluation(scores, score(table[-2]), reliability, sizes, bins, sums, further)


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
