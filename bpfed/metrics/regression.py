"""Scores of predicted real values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bpfed.metrics.evaluation import (
    Evaluation,
    Form,
    Sums,
    binomial_deviation,
    counting,
    evaluation,
    nominal_levels,
    owners,
    summed,
    with_pool,
)


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
