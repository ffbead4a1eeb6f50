"""Scores of predicted times to an event, where some times are censored; these have a minus sign."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
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

#: Points over which a Brier score is integrated.
POINTS = 101
#: Share of a client's test times up to which it is: beyond, too few are left to say anything.
FOLLOWED = 0.9
#: Pairs of examples that are compared at a time.
BLOCK = 4_000_000

Floats = NDArray[np.float64]


def product_limit(times: Floats, happens: NDArray[np.bool_], first: bool = True) -> tuple[Floats, Floats]:
    """The Kaplan-Meier estimate: different times in rising order, ``[k]``, and the share that is left after each.

    Args:
        times: ``[n]``.
        happens: Whether what is estimated happens then, or the row is merely lost, ``[n]``.
        first: At equal times, whether what is estimated comes before the losses (as events do before censoring).
    """
    at, place = np.unique(times, return_inverse=True)
    gone = np.bincount(place, happens, len(at))
    lost = np.bincount(place, ~happens, len(at))
    present = len(times) - np.concatenate([[0.0], np.cumsum(gone + lost)[:-1]])
    risk = present if first else present - lost
    return at, np.cumprod(1.0 - gone / np.maximum(risk, 1.0))


def left_at(curve: tuple[Floats, Floats], when: Floats, before: bool = False) -> Floats:
    """The share that is left at times ``[m]``; ``before``: just before them."""
    at, share = curve
    place = np.searchsorted(at, when, side="left" if before else "right")
    return np.concatenate([[1.0], share])[place]


def concordance(risk: Floats, y: Floats) -> tuple[float, float]:
    """Harrell's pairs: how many are in order (equal risks count half), and how many can be compared.

    A pair can be compared if the earlier time is that of an event; of two equal times, if one alone is an event.
    """
    time, event = np.abs(y), ~np.signbit(y)
    ordered = compared = 0.0
    earlier = np.flatnonzero(event)
    for block in np.array_split(earlier, max(1, len(earlier) * len(y) // BLOCK + 1)):
        later = (time[block, None] < time) | ((time[block, None] == time) & ~event)
        apart = risk[block, None] - risk
        compared += float(later.sum())
        ordered += float((later & (apart > 0)).sum()) + 0.5 * float((later & (apart == 0)).sum())
    return ordered, compared


def brier_curves(survival: Floats, y: Floats, when: Floats) -> Floats:
    """The censoring-weighted squared error of survival at some times (Graf et al. 1999), ``[n, m]``.

    The weights are one over the Kaplan-Meier estimate that a row of ``y`` is not yet censored.

    Args:
        survival: Predicted, ``[n, m]``.
        y: Targets, ``[n]``.
        when: The times, ``[m]``.
    """
    time, event = np.abs(y), ~np.signbit(y)
    kept = product_limit(time, ~event, first=False)
    own, then = left_at(kept, time, before=True), left_at(kept, when)
    happened = (time[:, None] <= when) & event[:, None]
    ahead = time[:, None] > when
    weight = happened / np.maximum(own, 1e-12)[:, None] + ahead / np.maximum(then, 1e-12)
    return weight * np.square(ahead - survival)


def integrated_brier(survival: Floats, grid: Floats, y: Floats, reference: Floats) -> tuple[Floats, Floats]:
    """The mean over time of `brier_curves` for each row, predicted and by Kaplan and Meier, ``[n]`` each.

    Args:
        survival: Predicted at the times of ``grid``, ``[n, G]``.
        grid: ``[G]`` from 0.
        y: Targets, ``[n]``.
        reference: Targets that the Kaplan-Meier estimate is made of, ``[k]``.
    """
    end = max(float(np.quantile(np.abs(y), FOLLOWED)), 1e-6)
    when = np.linspace(0.0, min(end, float(grid[-1])), POINTS)
    place = np.searchsorted(grid, when, side="right").clip(1, len(grid) - 1)
    part = (when - grid[place - 1]) / (grid[place] - grid[place - 1])
    ours = survival[:, place - 1] * (1.0 - part) + survival[:, place] * part
    plain = left_at(product_limit(np.abs(reference), ~np.signbit(reference)), when)
    found = (brier_curves(s, y, when) for s in (ours, np.broadcast_to(plain, ours.shape)))
    one, two = (np.trapezoid(curve, when, axis=1) / when[-1] for curve in found)
    return one, two


def evaluate_survival(
    risk: Tensor,
    nll: Tensor,
    at_time: Tensor,
    survival: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int,
    grid: Tensor,
    reference: list[Tensor],
    inside: Tensor | None = None,
    bounded: Tensor | None = None,
) -> Evaluation:
    """Score predicted times to an event.

    - c_index: the share of pairs of a client's examples that are in order (`concordance`);
    - ibs: the integrated Brier score (`integrated_brier`), up to the time that a tenth of a client's test rows outlast;
      km_ibs: the same of the Kaplan-Meier curve of a client's own training examples;
    - nll: nats per example, of times in units of training;
    - ece: the mean over levels u of |share of examples whose survival at their time is at most u − u|. An example that
      is censored where survival is s counts as min(1, u / s) (Haider et al. 2020).

    Args:
        risk: High is early, ``[E]``.
        nll: −log p of the target, ``[E]``.
        at_time: Predicted survival at the target's time, ``[E]``.
        survival: Predicted survival at the times of ``grid``, ``[E, G]``.
        y: Targets, ``[E]``.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Sets the levels, as in `bpfed.metrics.evaluate_regression`.
        grid: ``[G]`` from 0.
        reference: Training targets of each client, ``[n]`` each.
        inside: Whether the target is not below its calibrated lower bound, ``[E]`` bool; None: there are none.
        bounded: Which of these bounds count, ``[E]`` bool.
    """
    risk, nll, at_time, survival, y = (part.detach().cpu().double() for part in (risk, nll, at_time, survival, y))
    owner, clients = owners(offsets.cpu(), y)
    pairs = np.zeros((2, clients))
    ours, plain = np.zeros(len(y)), np.zeros(len(y))
    for i in range(clients):
        own = slice(int(offsets[i]), int(offsets[i + 1]))
        targets = y[own].numpy()
        if len(targets):
            pairs[:, i] = concordance(risk[own].numpy(), targets)
            known = reference[i].detach().cpu().double().numpy()
            ours[own], plain[own] = integrated_brier(survival[own].numpy(), grid.cpu().numpy(), targets, known)
    parts = {"km_ibs": torch.from_numpy(plain), "events": (~torch.signbit(y)).double()}
    for k, level in enumerate(nominal_levels(bins)):
        happened = (at_time <= level).double()
        parts[f"inside_{k}"] = torch.where(
            torch.signbit(y), (level / at_time.clamp(min=1e-12)).clamp(max=1.0), happened
        )
    if inside is not None:
        parts |= counting({"coverage": inside.cpu()}, None if bounded is None else bounded.cpu())
    added = dict(zip(parts, summed(list(parts.values()), owner, clients), strict=True))
    added |= {name: torch.from_numpy(row) for name, row in zip(("in_order_pairs", "pairs"), pairs, strict=True)}
    cells = summed([torch.ones_like(y)], owner, clients).view(1, clients, 1)
    return from_sums(Sums(cells, summed([torch.from_numpy(ours), nll], owner, clients), added), bins)


def form_of_times(bins: int, calibrated: bool) -> Form:
    """What the sums of a time to event look like, with calibration examples or without."""
    held = ("counted", "coverage") if calibrated else ()
    inside = tuple(f"inside_{k}" for k in range(len(nominal_levels(bins))))
    return Form(1, 1, ("km_ibs", "events", *inside, *held, "in_order_pairs", "pairs"), ("events", *inside))


def from_sums(sums: Sums, bins: int) -> Evaluation:
    """The metrics that these sums give; the pooled c-index is of pairs within clients."""
    total = with_pool(sums.cells)[0, :, 0]
    nominal = nominal_levels(bins).to(total.device)
    brier, loss = with_pool(sums.losses) / total
    observed = torch.stack([sums.pooled(f"inside_{k}") for k in range(len(nominal))], -1) / total[:, None]
    values = {
        "c_index": sums.pooled("in_order_pairs") / sums.pooled("pairs"),
        "ibs": brier,
        "nll": loss,
        "ece": (observed - nominal).abs().mean(-1),
    }
    more = {"km_ibs": sums.pooled("km_ibs") / total, "event_share": sums.pooled("events") / total}
    floor = binomial_deviation(total[:, None], nominal).mean(-1) / total
    pooled = torch.stack([total[-1].expand_as(nominal), nominal, observed[-1]])
    return evaluation(values, floor, total, pooled, bins, sums, more | sums.shares())
