"""What plain models of scikit-learn predict on the same test rows, for data whose inputs are flat vectors.

Each baseline is fitted to the same prepared inputs that a run trains on and is scored by the same code:

- per-site logistic regression (ridge regression for numbers): each client alone, from its own rows;
- pooled logistic (ridge) regression and pooled gradient boosting: one model of all clients' rows together. These need
  all rows in one place, which is so in a simulation and not in a deployment;
- for times to an event, the Kaplan-Meier curve and Cox's model with a ridge penalty, per site and pooled. Scikit-learn has
  neither, so they are fitted here.

Settings are fixed, seeded and scikit-learn's own. Only the number of trees is chosen, on a tenth of the training rows
where there are enough, and then that many are fitted to all rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed._util import text
from bpfed.data.federated import Examples, FederatedData
from bpfed.inference.survival import edges, time_grid
from bpfed.metrics import Evaluation, evaluate, evaluate_regression
from bpfed.metrics.diagnostics import losses_of_classes, losses_of_numbers
from bpfed.metrics.registry import shown_at
from bpfed.metrics.survival import evaluate_survival, left_at, product_limit

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
T = TypeVar("T")

#: Of the record in ``evaluation.json``.
VERSION = 1
#: With more training rows than this, baselines are not fitted by themselves.
MOST_ROWS = 50_000
#: And none whose rows times columns times classes are more than this, which takes some ten seconds on one core.
MOST_WORK = {"linear": 200_000_000, "boosting": 10_000_000}
#: For trees fewer rows than this are no less work.
FEW_ROWS = 2_000
#: Iterations of boosting at most, and trees, one for each class in each iteration.
ITERATIONS, MOST_TREES = 100, 2_000
#: Fewer rows than this are not divided to choose the number of trees.
DIVIDED = 200
#: Parts of a cross-validation.
FOLDS = 5


class Baseline(NamedTuple):
    """One of the plain models.

    Attributes:
        name: Its key in the records.
        title: Its heading.
        short: Its heading where there is little room.
        pooled: Whether it needs all clients' rows in one place.
        kind: ``linear`` or ``boosting``.
    """

    name: str
    title: str
    short: str
    pooled: bool
    kind: str


class Losses(NamedTuple):
    """Losses of test rows under a baseline, ``[E]`` each: that of the task (None: it has none), and the NLL."""

    loss: Tensor | None
    nll: Tensor


_CLASSES = (
    Baseline("site-logistic", "Per-site logistic regression", "logistic, per site", False, "linear"),
    Baseline("pooled-logistic", "Pooled logistic regression", "logistic, pooled", True, "linear"),
    Baseline("pooled-boosting", "Pooled gradient boosting", "boosting, pooled", True, "boosting"),
)
_NUMBERS = (
    Baseline("site-ridge", "Per-site ridge regression", "ridge, per site", False, "linear"),
    Baseline("pooled-ridge", "Pooled ridge regression", "ridge, pooled", True, "linear"),
    Baseline("pooled-boosting", "Pooled gradient boosting", "boosting, pooled", True, "boosting"),
)
_TIMES = (
    Baseline("site-kaplan-meier", "Per-site Kaplan-Meier curve", "Kaplan-Meier, per site", False, "curve"),
    Baseline("pooled-kaplan-meier", "Pooled Kaplan-Meier curve", "Kaplan-Meier, pooled", True, "curve"),
    Baseline("site-cox", "Per-site Cox regression", "Cox, per site", False, "linear"),
    Baseline("pooled-cox", "Pooled Cox regression", "Cox, pooled", True, "linear"),
)

#: By the name of the task; others have none.
BASELINES = {
    "classification": _CLASSES,
    "ordinal": _CLASSES,
    "regression": _NUMBERS,
    "heteroscedastic": _NUMBERS,
    "survival": _TIMES,
}


def wanted(data: FederatedData) -> bool:
    """Whether baselines can be fitted to data of this kind: inputs are flat vectors and there are any."""
    return data.flat and data.input_shape[0] > 0


def baselines(
    data: FederatedData,
    clients: Tensor,
    bins: int = 10,
    most_rows: int = MOST_ROWS,
    losses: dict[str, Losses] | None = None,
) -> dict[str, Any]:
    """Fit the baselines to the training and calibration rows, and score them on the test rows, ready for JSON.

    Args:
        data: Of which `wanted` is true.
        clients: Indices of the clients that are tested, ``[C]``, each with a test row.
        bins: Bins of the ECE.
        most_rows: With more training rows than this nothing is fitted.
        losses: Is given the losses of each test row under each baseline, by name.

    Returns:
        ``version``; ``rows``, one for each baseline with ``scores``, ``clients`` (each metric of each client, in the
        order of ``clients``), ``ece_floor`` and ``reliability``; and ``skipped``, sentences on those that were not
        fitted.
    """
    parts = [data.train] if data.calibration is None else [data.train, data.calibration]
    rows, columns = sum(len(part.y) for part in parts), data.train.x.shape[1]
    found: dict[str, Any] = {"version": VERSION, "rows": [], "skipped": []}
    if rows > most_rows:
        found["skipped"].append(
            f"Baselines were not fitted: there are {text.many(rows, 'training row')}, and above {most_rows} they would "
            "take too long for a report."
        )
        return found
    test, kept = data.test.select(clients), tuple(shown_at("progress", "comparison"))
    if data.task not in BASELINES:
        found["skipped"].append(f"Baselines were not fitted: there are none for {data.task_type.targets} yet.")
    for baseline in BASELINES.get(data.task, ()):
        if _too_much(baseline.kind, rows, columns, data.classes):
            size = f"{rows} rows, {columns} columns" + (f" and {data.classes} classes" if data.classes else "")
            found["skipped"].append(f"{baseline.title} was not fitted: it would take too long with {size}.")
            continue
        with _quietly():
            scored = _scored(baseline, data, parts, test, clients, bins)
        if losses is not None and scored.example_nll is not None:
            own = scored.losses() if scored.losses is not None else None
            losses[baseline.name] = Losses(own, scored.example_nll())
        found["rows"].append(
            {
                "name": baseline.name,
                "title": baseline.title,
                "short": baseline.short,
                "pooled": baseline.pooled,
                "scores": {name: s for name, s in scored.record().items() if name in kept},
                "clients": {name: _listed(scored[name].clients) for name in kept if name in scored.scores},
                "ece_floor": _listed(np.array([scored.ece_floor.pooled]))[0],
                "reliability": scored.reliability.record(),
            }
        )
    return found


def _too_much(kind: str, rows: int, columns: int, classes: int) -> bool:
    """Whether a fit would take too long for a report."""
    outputs = classes if classes > 2 else 1
    if kind in ("linear", "curve"):
        return rows * columns * outputs > MOST_WORK["linear"]
    fits = 1 if classes else FOLDS + 1
    return max(rows, FEW_ROWS) * columns * outputs * fits > MOST_WORK[kind] or ITERATIONS * outputs > MOST_TREES


def _scored(
    baseline: Baseline, data: FederatedData, parts: list[Examples], test: Examples, clients: Tensor, bins: int
) -> Evaluation:
    """The metrics of one baseline on the test rows of these clients."""
    if data.task == "survival":
        return _scored_times(baseline, parts, test, clients, bins)
    if data.task_type.has_classes:
        probs = np.concatenate(
            _predicted(
                baseline, parts, test, clients, lambda x, y, new: class_probs(baseline.kind, x, y, new, data.classes)
            )
        )
        scored = evaluate(torch.from_numpy(probs), test.y.cpu(), test.offsets.cpu(), bins)
        each = partial(losses_of_classes, torch.from_numpy(probs), test.y.cpu())
        return replace(scored, losses=each, example_nll=each)
    spread = float(np.var(np.concatenate([_floats(part.y) for part in parts]))) or 1e-12
    found = _predicted(baseline, parts, test, clients, lambda x, y, new: number(baseline.kind, x, y, new, spread))
    mean, scale = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
    y = test.y.cpu().double()
    nll = 0.5 * ((y - mean) / scale).square() + scale.log() + 0.5 * math.log(2 * math.pi)
    scored = evaluate_regression(mean=mean, scale=scale, nll=nll, y=y, offsets=test.offsets.cpu(), bins=bins)
    return replace(scored, losses=partial(losses_of_numbers, mean, y), example_nll=nll.double)


def _scored_times(baseline: Baseline, parts: list[Examples], test: Examples, clients: Tensor, bins: int) -> Evaluation:
    y = np.concatenate([part.y.cpu().double().numpy() for part in parts])
    rate = (float((~np.signbit(y)).sum()) + 0.5) / max(float(np.abs(y).sum()), 1e-12)
    grid = time_grid()
    found = _predicted(
        baseline, parts, test, clients, lambda x, y, new: times(baseline.kind, x, y, new, rate, grid.numpy())
    )
    risk, survival, hazard = (torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True))
    truth = test.y.cpu().double()
    at = truth.abs().clamp(max=float(grid[-1]))
    place = torch.searchsorted(grid, at, right=True).clamp(1, len(grid) - 1)[:, None]
    low, high = survival.gather(1, place - 1)[:, 0], survival.gather(1, place)[:, 0]
    part = ((at - grid[place[:, 0] - 1]) / (grid[place[:, 0]] - grid[place[:, 0] - 1])).clamp(0.0, 1.0)
    left = low + part * (high - low)
    logs = hazard.gather(1, place - 1)[:, 0].clamp(min=1e-30).log()
    # The Kaplan-Meier curve falls in steps, so no time between them has a density.
    nll = -left.clamp(min=1e-30).log() - torch.where(torch.signbit(truth), 0.0, logs)
    nll = torch.full_like(nll, math.nan) if baseline.kind == "curve" else nll
    reference = [parts[0].client(client)[1] for client in clients.tolist()]
    reference = [own if len(own) else parts[0].y for own in reference]
    scored = evaluate_survival(risk, nll, left, survival, test.y.cpu(), test.offsets.cpu(), bins, grid, reference)
    return replace(scored, example_nll=nll.double)


def _predicted(
    baseline: Baseline,
    parts: list[Examples],
    test: Examples,
    clients: Tensor,
    fit: Callable[[Floats, NDArray[Any], Floats], T],
) -> list[T]:
    """What ``fit`` predicts for the test rows: of all rows at once, or of each client's own in turn."""
    if baseline.pooled:
        x, y = (
            np.concatenate(column) for column in zip(*((_floats(p.x), p.y.cpu().numpy()) for p in parts), strict=True)
        )
        return [fit(x, y, _floats(test.x))]
    found = []
    for place, client in enumerate(clients.tolist()):
        own = [part.client(client) for part in parts]
        inputs, targets = (torch.cat(column).cpu() for column in zip(*own, strict=True))
        found.append(fit(_floats(inputs), targets.numpy(), _floats(test.client(place)[0])))
    return found


def class_probs(kind: str, x: Floats, y: Whole, new: Floats, classes: int, strength: float = 1.0) -> Floats:
    """Class probabilities for new rows, ``[E, K]``.

    A class without a training row has the probability 1 / (n + K) of the rule of succession, and the others share the
    rest as the model says. So one class alone has (n + 1) / (n + K).

    Args:
        kind: ``linear`` or ``boosting``.
        x: Inputs, ``[n, D]``.
        y: Classes, ``[n]``.
        new: Inputs to predict for, ``[E, D]``.
        classes: K.
        strength: C of logistic regression, one over the strength of its penalty.
    """
    seen = np.unique(y)
    probs = np.full((len(new), classes), 1.0 / (len(y) + classes))
    rest = 1.0 - (classes - len(seen)) / (len(y) + classes)
    if len(seen) == 1:
        probs[:, seen[0]] = rest
        return probs
    probs[:, seen] = rest * _classifier(kind, x, y, strength).predict_proba(new)
    return probs


def number(kind: str, x: Floats, y: NDArray[Any], new: Floats, spread: float) -> tuple[Floats, Floats]:
    """Predictive mean and standard deviation for new rows, ``[E]`` each.

    The variance is the mean squared error on rows that the model was not fitted to (leave-one-out for ridge regression,
    cross-validation for boosting), with one more row of the variance ``spread``, so that a client with a row or two is
    not sure without a reason.

    Args:
        kind: ``linear`` or ``boosting``.
        x: Inputs, ``[n, D]``.
        y: Targets, ``[n]``.
        new: Inputs to predict for, ``[E, D]``.
        spread: Variance of the targets of all clients.
    """
    y = y.astype(np.float64)
    if len(y) == 1:
        return np.full(len(new), y[0]), np.full(len(new), math.sqrt(spread))
    model, errors = _regressor(kind, x, y)
    variance = (float(np.square(errors).sum()) + spread) / (len(y) + 1)
    return model.predict(new), np.full(len(new), math.sqrt(variance))


def times(kind: str, x: Floats, y: Floats, new: Floats, rate: float, grid: Floats) -> tuple[Floats, Floats, Floats]:
    """Log hazard ratios of new rows ``[E]``, and their survival and hazard at the times of ``grid``, ``[E, G]`` each.

    Args:
        kind: ``linear`` is Cox's model with hazards that are constant in each of some intervals, ``curve`` is the
            Kaplan-Meier curve.
        x: Inputs, ``[n, D]``.
        y: Times, with a minus sign where they are censored, ``[n]``.
        new: Inputs to predict for, ``[E, D]``.
        rate: Events of all clients over the time of all clients. One more event at this rate counts in each interval, so
            that no hazard is 0.
        grid: Times.
    """
    time, event = np.abs(y).astype(np.float64), ~np.signbit(y)
    if kind == "curve":
        plain = left_at(product_limit(time, event), grid)
        return np.zeros(len(new)), np.tile(plain, (len(new), 1)), np.zeros((len(new), len(grid)))
    beta = cox(x, time, event)
    centre = x.mean(0)
    ratio, ends = np.exp((x - centre) @ beta), np.append(edges(torch.zeros(1, dtype=torch.float64)).numpy(), np.inf)
    starts = np.append(0.0, ends[:-1])
    spent = (np.clip(time[:, None], starts, ends) - starts) * ratio[:, None]
    inside = ((time[:, None] > starts) & (time[:, None] <= ends) & event[:, None]).sum(0)
    hazard = (inside + 1.0) / (spent.sum(0) + 1.0 / rate)
    baseline = ((np.clip(grid[:, None], starts, ends) - starts) * hazard).sum(1)
    now = hazard[np.searchsorted(ends, grid, side="right").clip(max=len(hazard) - 1)]
    risk = (new - centre) @ beta
    each = np.exp(np.clip(risk, -30.0, 30.0))[:, None]
    return risk, np.exp(-each * baseline), each * now


def cox(x: Floats, time: Floats, event: NDArray[np.bool_], penalty: float = 1.0) -> Floats:
    """Coefficients of Cox's model, ``[D]``: the partial likelihood (ties by Breslow) and half the penalty times ‖β‖²."""
    from scipy.optimize import minimize

    order = np.argsort(-time, kind="stable")
    x, time, event = x[order], time[order], event[order]
    last = np.searchsorted(-time, -time, side="right") - 1  # the last row that is at risk when this one has its event

    def loss(beta: Floats) -> tuple[float, Floats]:
        output = x @ beta
        top = output.max(initial=0.0)
        weight = np.exp(output - top)
        risk = np.cumsum(weight)[last]
        value = float((np.log(risk) + top - output)[event].sum()) + 0.5 * penalty * float(beta @ beta)
        # A row counts in the risk set of every event that is not later than its own time.
        counted = np.zeros(len(time) + 1)
        np.add.at(counted, last[event], 1.0 / risk[event])
        share = weight * counted[:-1][::-1].cumsum()[::-1]
        return value, x.T @ (share - event) + penalty * beta

    return np.asarray(minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x)


def _classifier(kind: str, x: Floats, y: Whole, strength: float) -> Any:
    """A fitted classifier."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # here, since importing scikit-learn takes a second
    from sklearn.linear_model import LogisticRegression

    if kind == "linear":
        return LogisticRegression(C=strength, max_iter=300).fit(x, y)
    counts = np.bincount(y)
    # The tenth that is held out has a row of each class, or scikit-learn refuses.
    divided = len(y) >= max(DIVIDED, 10 * len(counts)) and counts[counts > 0].min() >= 2
    trees = _trees(HistGradientBoostingClassifier, x, y) if divided else ITERATIONS
    return _boosting(HistGradientBoostingClassifier, trees).fit(x, y)


def _regressor(kind: str, x: Floats, y: Floats) -> tuple[Any, Floats]:
    """A fitted regressor, and its errors on rows that it was not fitted to, ``[n]``."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold

    if kind == "linear":
        return Ridge(solver="svd").fit(x, y), _left_out(x, y)
    trees = _trees(HistGradientBoostingRegressor, x, y) if len(y) >= DIVIDED else ITERATIONS
    model = _boosting(HistGradientBoostingRegressor, trees)
    errors = np.empty(len(y))
    for kept, left in KFold(min(FOLDS, len(y)), shuffle=True, random_state=0).split(x):
        errors[left] = y[left] - model.fit(x[kept], y[kept]).predict(x[left])
    return model.fit(x, y), errors


def _boosting(boosting: Any, trees: int, **options: Any) -> Any:
    options = {"early_stopping": False, **options}
    return boosting(max_iter=trees, random_state=0, **options)


def _trees(boosting: Any, x: Floats, y: NDArray[Any]) -> int:
    """How many iterations are best on a tenth of the rows when the model is fitted to the others."""
    scores = _boosting(boosting, ITERATIONS, early_stopping=True).fit(x, y).validation_score_
    return max(1, int(np.argmax(scores)))  # the first score is that of no tree


def _left_out(x: Floats, y: Floats) -> Floats:
    """Errors of ridge regression on each row when it is left out, ``[n]``: the residual over 1 minus its leverage."""
    centred = x - x.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    shrunk = u * (s**2 / (s**2 + 1.0))
    leverage = 1.0 / len(y) + (shrunk * u).sum(1)
    residual = y - y.mean() - shrunk @ (u.T @ (y - y.mean()))
    return residual / np.maximum(1.0 - leverage, 1e-9)


@contextmanager
def _quietly() -> Iterator[None]:
    """A baseline that has not converged is scored as it is: nobody can do anything about a warning here."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _floats(values: Tensor) -> Floats:
    return values.cpu().double().numpy()


def _listed(values: NDArray[Any]) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]
