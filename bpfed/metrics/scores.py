"""Scores of predicted class probabilities and of predicted numbers, also from the sums of clients that never meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bpfed.metrics.evaluation import (
    SMALLEST,
    SURE,
    Evaluation,
    Form,
    Sums,
    binomial_deviation,
    counting,
    cumulative,
    evaluation,
    nominal_levels,
    owners,
    summed,
    with_pool,
)

# --- Scores that are made of an order of examples, within each client -------------------------------------------------


def risk(confidence: Tensor, wrong: Tensor, owner: Tensor, n_clients: int) -> Tensor:
    """The area under the risk-coverage curve of each client times its number of examples, ``[N]`` float64.

    Args:
        confidence: ``[E]``.
        wrong: Which are wrong, ``[E]`` bool.
        owner: Whose they are, ``[E]``.
        n_clients: N.
    """
    order, tie, place = _ranked(-confidence, owner, n_clients)
    owner, errors = owner[order], wrong.double()[order]
    tied, size = summed([errors, torch.ones_like(errors)], tie, len(order))
    expected = cumulative((tied / size)[tie])
    total = summed([errors], owner, n_clients)[0]
    errors = expected - (total.cumsum(0) - total)[owner]
    return summed([errors / place], owner, n_clients)[0]


def in_order(score: Tensor, positive: Tensor, owner: Tensor, n_clients: int) -> Tensor:
    """Of each client, how many pairs of a positive and a negative have the higher score at the positive; a tie is half
    a pair.

    Args:
        score: ``[E]``.
        positive: ``[E]`` bool.
        owner: Whose they are, ``[E]``.
        n_clients: N.

    Returns:
        ``[N]`` float64.
    """
    order, tie, place = _ranked(score, owner, n_clients)
    owner, found = owner[order], positive.double()[order]
    ranks, size = summed([place, torch.ones_like(place)], tie, len(order))
    total, count = summed([(ranks / size)[tie] * found, found], owner, n_clients)
    pairs: Tensor = total - count * (count + 1) / 2
    return pairs


def _ranked(score: Tensor, owner: Tensor, n_clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """Examples client by client with rising scores, the number of each one's tie, and its place in its client, from 1."""
    order = score.argsort()
    order = order[owner[order].argsort(stable=True)]
    score, owner = score[order], owner[order]
    tie = torch.ones_like(order)
    tie[1:] = (score.diff() != 0) | (owner.diff() != 0)
    place = torch.arange(1, len(order) + 1, device=order.device, dtype=torch.float64)
    sizes = summed([torch.ones_like(place)], owner, n_clients)[0]
    return order, tie.cumsum(0) - 1, place - (sizes.cumsum(0) - sizes)[owner]


def evaluate(
    probs: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int = 10,
    sets: Tensor | None = None,
    bounded: Tensor | None = None,
    shares: Tensor | None = None,
) -> Evaluation:
    """Score predicted class probabilities.

    - accuracy: share of examples whose most probable class is the right one;
    - nll: nats per example;
    - brier: sum over classes of (p - one hot)², mean over examples, 0 to 2;
    - ece, mce: mean (by examples) and largest gap between confidence and accuracy over equal-width bins [a, b) of the
      top-label confidence, the last one closed; empty bins are skipped.

    And as ``more``, for who acts on the predictions:

    - aurc: see `aurc`;
    - abstained: share of examples whose confidence is below 0.9; answered_accuracy: accuracy on the others, NaN
      without;
    - auroc, of two classes: the chance that an example of the second has a higher probability of it than one of the
      first, a tie counting half; NaN where a class is missing;
    - sensitivity, specificity, of two classes: accuracy on the examples of the second and of the first; NaN without
      any;
    - majority, shares_nll: accuracy and NLL without a model, if ``shares`` are given;
    - coverage, set_size: share of prediction sets that hold the right class, and their mean size, if they are given.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Number of bins.
        sets: Prediction sets, ``[E, K]`` bool.
        bounded: Which of the sets could leave out a label, ``[E]`` bool; the others count neither in coverage nor in
            set_size, and a client with none of them has neither. None: all.
        shares: What would be predicted without a model, each client's class shares, ``[N, K]`` above 0.
    """
    if probs.ndim != 2 or y.shape != probs.shape[:1]:
        raise ValueError(f"probs must be [E, K] and y [E], not {list(probs.shape)} and {list(y.shape)}.")
    if probs.dtype != torch.float64:
        probs = probs.float()
    owner, n_clients = owners(offsets, y)
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
    cells = summed(
        [torch.ones_like(confidence), confidence, right.double(), confidence * (1 - confidence)], cell, n_clients * bins
    )
    sure = confidence >= torch.tensor(SURE, dtype=probs.dtype)  # rounded as the confidences were
    parts = {"sure": sure.double(), "sure_right": (sure & right).double()}
    if sets is not None:
        found = {"coverage": sets.gather(1, y[:, None]).squeeze(1), "set_size": sets.sum(1)}
        parts |= counting(found, bounded)
    if shares is not None:
        parts["majority"] = (shares.argmax(1)[owner] == y).double()
        parts["shares_nll"] = -shares[owner, y].double().log()
    if probs.shape[1] == 2:
        parts |= {"positive": y.double(), "positive_right": (right & (y == 1)).double()}
    further = dict(zip(parts, summed(list(parts.values()), owner, n_clients), strict=True))
    everyone = torch.zeros_like(owner)
    further["risk"] = risk(confidence, ~right, owner, n_clients)
    ordered = {"risk": risk(confidence, ~right, everyone, 1)}
    if probs.shape[1] == 2:
        further["in_order"] = in_order(probs[:, 1], y == 1, owner, n_clients)
        ordered["in_order"] = in_order(probs[:, 1], y == 1, everyone, 1)
    sums = Sums(cells.view(4, n_clients, bins), summed([nll, brier], owner, n_clients), further)
    return classified(sums, bins, ordered)


def classified(sums: Sums, bins: int, ordered: Mapping[str, Tensor]) -> Evaluation:
    """The metrics that these sums give; ``ordered`` are ``risk`` and ``in_order`` of all clients together, ``[1]`` each."""
    count, claimed, hit, variance = with_pool(sums.cells)
    total = count.sum(-1)
    loss = with_pool(sums.losses) / total
    gap = (hit - claimed).abs()
    worst_gap = (gap / count.clamp(min=1)).amax(-1).where(total > 0, math.nan)

    # Chance alone: each bin's hits as a binomial at the bin's mean confidence, widened or narrowed to the variance that
    # the single confidences imply. Exact for bins of one example and for equal confidences.
    mean = (claimed / count.clamp(min=1)).clamp(0, 1)
    binomial = count * mean * (1 - mean)
    spread = (variance / binomial).sqrt().where(binomial > 0, 1)
    floor = (binomial_deviation(count, mean) * spread).sum(-1) / total

    values = {
        "accuracy": hit.sum(-1) / total,
        "nll": loss[0],
        "brier": loss[1],
        "ece": gap.sum(-1) / total,
        "mce": worst_gap,
    }
    pooled = torch.stack([count[-1], claimed[-1] / count[-1], hit[-1] / count[-1]])
    sure = sums.pooled("sure")
    more = {
        "aurc": torch.cat([sums.further["risk"], ordered["risk"]]) / total,
        "abstained": 1 - sure / total,
        "answered_accuracy": sums.pooled("sure_right") / sure,
    }
    if "in_order" in ordered:
        positive = sums.pooled("positive")
        pairs = positive * (total - positive)
        more["auroc"] = torch.cat([sums.further["in_order"], ordered["in_order"]]) / pairs
        found = sums.pooled("positive_right")
        more |= {"sensitivity": found / positive, "specificity": (hit.sum(-1) - found) / (total - positive)}
    more |= {name: sums.pooled(name) / total for name in ("majority", "shares_nll") if name in sums.further}
    return evaluation(values, floor, total, pooled, bins, sums, more | sums.shares())


def by_class(probs: Tensor, y: Tensor, sets: Tensor | None, bounded: Tensor | None = None) -> list[dict[str, Any]]:
    """Of each class: its examples, the share that is predicted as it, and where there are sets, how they do; ready for
    JSON.

    For the arguments see `evaluate`. ``coverage`` and ``set_size`` are those of the class's own examples, ``empty`` the
    share of them with an empty set; None without any.
    """
    classes = probs.shape[1]
    right = probs.argmax(1) == y
    columns = [torch.ones_like(y, dtype=torch.bool), right]
    if sets is not None:
        known = torch.ones_like(right) if bounded is None else bounded
        size = sets.sum(1)
        held = sets.gather(1, y[:, None]).squeeze(1)
        columns += [known, held & known, size.where(known, 0), (size == 0) & known]
    test, hit, *rest = summed([column.double() for column in columns], y, classes).cpu().tolist()

    def share(part: float, whole: float) -> float | None:
        return part / whole if whole else None

    found: list[dict[str, Any]] = [{"test": int(n), "recall": share(h, n)} for n, h in zip(test, hit, strict=True)]
    if rest:
        names = ("coverage", "set_size", "empty")
        for row, whole, *parts in zip(found, *rest, strict=True):
            row |= {name: share(part, whole) for name, part in zip(names, parts, strict=True)}
    return found


def form_of_classes(classes: int, bins: int, calibrated: bool) -> Form:
    """What the sums of so many classes and bins look like, with calibration examples or without."""
    pairs = ("positive", "positive_right", "in_order") if classes == 2 else ()
    held = ("counted", "coverage", "set_size") if calibrated else ()
    return Form(4, bins, ("sure", "sure_right", "risk", "majority", "shares_nll", *pairs, *held))


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
    return risk(confidence, guess != y, torch.zeros_like(y), 1)[0] / len(y)


# --- Telling examples of another distribution by how unsure the model is of them --------------------------------------


def ood_auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """How well a score (entropy, epistemic uncertainty) tells examples of another distribution from familiar ones.

    Args:
        inside: Scores of familiar examples, ``[A]``.
        outside: Scores of the others, ``[B]``.

    Returns:
        The chance that one of the others has the higher score (a tie counts half), a scalar: 1 is perfect, 0.5 is no
        better than guessing.
    """
    familiar = inside.double().sort().values
    below, upto = (torch.searchsorted(familiar, outside.double(), right=side) for side in (False, True))
    return (below + upto).double().mean() / (2 * len(familiar))


# --- Predicted numbers ------------------------------------------------------------------------------------------------


def evaluate_regression(
    mean: Tensor,
    scale: Tensor,
    nll: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int = 10,
    *,
    inside: Tensor | None = None,
    width: Tensor | None = None,
    bounded: Tensor | None = None,
    baseline: Tensor | None = None,
) -> Evaluation:
    """Score predicted real values.

    ``ece`` is the quantile calibration error: with the predictive taken as Gaussian, the mean over nominal levels of
    ``|share of targets inside the central interval - level|``. The levels are 1/bins, 2/bins, ... below 1, and 0.95.

    Args:
        mean: Predicted mean, ``[E]``.
        scale: Predictive standard deviation, ``[E]``.
        nll: Negative log density of the target, nats, ``[E]`` (the predictive may be a mixture, so it is given).
        y: Targets, ``[E]``.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Sets the levels.
        inside: Whether the target is in its prediction interval, ``[E]`` bool; their share is ``coverage`` of ``more``.
        width: Width of that interval, ``[E]``; the mean is ``interval_width`` of ``more``.
        bounded: Which of the intervals are finite by right, ``[E]`` bool; the others count in neither, and a client
            with none of them has neither. None: all.
        baseline: What would be predicted without a model, ``[E]``; its RMSE is ``baseline`` of ``more``.
    """
    if not mean.shape == scale.shape == nll.shape == y.shape or y.ndim != 1:
        raise ValueError("mean, scale, nll and y must all be [E].")
    owner, n_clients = owners(offsets, y)
    residual = (y.double() - mean.double()).abs()
    # The smallest central interval that holds the target; a point prediction that is exactly right is inside any.
    needed = torch.erf(residual / scale.double() / math.sqrt(2)).where(residual != 0, 0)
    nominal = nominal_levels(bins).to(y.device, non_blocking=True)
    groups = len(nominal) + 1  # the last one is what no level holds
    cells = summed([torch.ones_like(residual)], owner * groups + torch.bucketize(needed, nominal), n_clients * groups)
    losses = summed([residual.square(), nll.double()], owner, n_clients)
    given = {name: part for name, part in (("coverage", inside), ("interval_width", width)) if part is not None}
    parts = {"baseline": (y.double() - baseline.double()).square()} if baseline is not None else {}
    parts |= counting(given, bounded) if given else {}
    further = dict(zip(parts, summed(list(parts.values()), owner, n_clients), strict=True)) if parts else {}
    return regressed(Sums(cells.view(1, n_clients, groups), losses, further), bins)


def regressed(sums: Sums, bins: int) -> Evaluation:
    """The metrics that these sums give."""
    count = with_pool(sums.cells)[0]
    nominal = nominal_levels(bins).to(count.device, non_blocking=True)
    total = count.sum(-1)
    observed = count.cumsum(-1)[:, :-1] / total[:, None]
    square, loss = with_pool(sums.losses) / total
    floor = binomial_deviation(total[:, None], nominal).mean(-1) / total

    values = {"rmse": square.sqrt(), "nll": loss, "ece": (observed - nominal).abs().mean(-1)}
    pooled = torch.stack([total[-1].expand_as(nominal), nominal, observed[-1]])
    more = {"baseline": (sums.pooled("baseline") / total).sqrt()} if "baseline" in sums.further else {}
    return evaluation(values, floor, total, pooled, bins, sums, more | sums.shares())


def form_of_numbers(bins: int, calibrated: bool) -> Form:
    """What the sums of a regression look like, with calibration examples or without."""
    held = ("counted", "coverage", "interval_width") if calibrated else ()
    return Form(1, len(nominal_levels(bins)) + 1, ("baseline", *held))


# --- Clients that never meet, scored together from their sums ---------------------------------------------------------


def evaluate_sums(sums: Sums, bins: int = 10) -> Evaluation:
    """What `evaluate` or `evaluate_regression` would give for all these clients' examples together.

    But for the pooled ``aurc`` and ``auroc`` of several clients, which are NaN: they need all examples in one order.
    """
    if len(sums.cells) != 4:
        return regressed(sums, bins)
    ordered = {name: part for name, part in sums.further.items() if name in ("risk", "in_order")}
    if sums.losses.shape[1] > 1:
        ordered = {name: torch.full_like(part[:1], math.nan) for name, part in ordered.items()}
    return classified(sums, bins, ordered)
