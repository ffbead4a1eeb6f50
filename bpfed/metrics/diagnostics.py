"""What a report says of predictions beyond their metrics: confusions, thresholds, abstention, and each client by itself.

Everything is a count or a mean over test examples, ready for JSON, and a few kilobytes in all. It needs the examples
themselves, so a server that is told sums alone has none of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bpfed.metrics.evaluation import SMALLEST, owners, summed

#: Of the record in ``evaluation.json``.
VERSION = 1
#: More classes than this have no confusion matrix, and more clients than this nothing by client.
MOST_CLASSES, MOST_CLIENTS = 20, 200
#: Entries of all clients' confusion matrices together, up to which each client's is kept.
MOST_CELLS = 2_000
#: Thresholds of the probability of the second class.
THRESHOLDS = tuple(k / 20 for k in range(1, 20))
#: Shares of examples that are answered, the surest first.
SHARES = tuple(k / 20 for k in range(1, 21))
#: Groups of equal size by predicted number.
GROUPS = 10


def losses_of_classes(probs: Tensor, y: Tensor) -> Tensor:
    """The NLL of each example in nats, ``[E]`` float64; as in `bpfed.metrics.evaluate`."""
    return -probs.gather(1, y[:, None]).squeeze(1).clamp(SMALLEST, 1).double().log()


def losses_of_numbers(mean: Tensor, y: Tensor) -> Tensor:
    """The squared error of each example, ``[E]`` float64."""
    return (y.double() - mean.double()).square()


def of_classes(
    probs: Tensor,
    y: Tensor,
    offsets: Tensor,
    shares: Tensor,
    sets: Tensor | None = None,
    bounded: Tensor | None = None,
) -> dict[str, Any]:
    """What is to be said of predicted classes.

    Args:
        probs: ``[E, K]``.
        y: Classes, ``[E]``.
        offsets: ``[N + 1]``.
        shares: What each client would predict without a model, ``[N, K]``.
        sets: Prediction sets, ``[E, K]`` bool.
        bounded: Which of them count, ``[E]`` bool; None: all.
    """
    owner, clients = owners(offsets, y)
    classes, (confidence, guess) = probs.shape[1], probs.max(1)
    confidence, right = confidence.double().clamp(0, 1), guess == y
    found: dict[str, Any] = {"version": VERSION, "loss": "nll", "risk": _risk(confidence, (~right).double())}
    by_client: dict[str, Any] = {}
    if clients <= MOST_CLIENTS:
        own = losses_of_classes(probs, y)
        without = -shares[owner, y].double().log()
        by_client = gains(own, without, owner, clients) | {"claimed": _means(confidence, owner, clients)}
    if classes <= MOST_CLASSES:
        cells = torch.bincount((owner * classes + y) * classes + guess, minlength=clients * classes**2)
        each = cells.view(clients, classes, classes).cpu()
        found["confusion"] = each.sum(0).tolist()
        if clients * classes**2 <= MOST_CELLS:
            by_client["confusion"] = each.tolist()
        elif by_client:
            by_client["recall"] = [
                [[int(one[k, k]), int(one[k].sum())] for k in range(classes)] if clients * classes <= MOST_CELLS else []
                for one in each
            ]
    if by_client:
        found["clients"] = by_client
    if classes == 2:
        found["thresholds"] = _thresholds(probs[:, 1], y)
    if sets is not None:
        known = torch.ones_like(right) if bounded is None else bounded
        sizes = torch.bincount(sets.sum(1)[known].cpu())
        found["set_sizes"] = sizes.tolist() if len(sizes) <= MOST_CLASSES + 1 else []
    return found


def of_numbers(mean: Tensor, scale: Tensor, y: Tensor, offsets: Tensor, baseline: Tensor) -> dict[str, Any]:
    """What is to be said of predicted numbers, ``[E]`` each; ``baseline`` is what is predicted without a model."""
    owner, clients = owners(offsets, y)
    own = losses_of_numbers(mean, y)
    found: dict[str, Any] = {
        "version": VERSION,
        "loss": "square",
        "risk": _risk(-scale.double(), own),
        "groups": _groups(mean.double(), y.double()),
    }
    if clients <= MOST_CLIENTS:
        found["clients"] = gains(own, losses_of_numbers(baseline, y), owner, clients)
    return found


def gains(own: Tensor, other: Tensor, owner: Tensor, clients: int) -> dict[str, list[float | None]]:
    """By how much a loss is lower than another, ``[E]`` each: the mean of each client and its standard error.

    ``se`` is the standard error of the first loss itself.
    """
    gain, spread = _mean_and_error(other - own, owner, clients)
    return {"gain": gain, "gain_se": spread, "se": _mean_and_error(own, owner, clients)[1]}


def _mean_and_error(values: Tensor, owner: Tensor, clients: int) -> tuple[list[float | None], list[float | None]]:
    count, total, square = summed(
        [torch.ones_like(values), values.double(), values.double().square()], owner.to(values.device), clients
    )
    mean = total / count
    variance = (square / count - mean.square()).clamp(min=0) * count / (count - 1)
    return _listed(mean), _listed((variance / count).sqrt())


def _means(values: Tensor, owner: Tensor, clients: int) -> list[float | None]:
    return _mean_and_error(values, owner, clients)[0]


def _listed(values: Tensor) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def _thresholds(probability: Tensor, y: Tensor) -> dict[str, Any]:
    """Of each threshold, how many examples of the second class and of the first are at or above it."""
    positive = y == 1
    above = [probability >= t for t in THRESHOLDS]
    return {
        "at": list(THRESHOLDS),
        "true": [int((a & positive).sum()) for a in above],
        "false": [int((a & ~positive).sum()) for a in above],
        "positive": int(positive.sum()),
        "examples": len(y),
    }


def _risk(confidence: Tensor, loss: Tensor) -> dict[str, Any]:
    """The mean loss of the surest examples, for several shares of them; examples that are equally sure share theirs."""
    if not len(loss):
        return {"share": [], "loss": []}
    order = confidence.argsort(descending=True, stable=True)
    ranked, values = confidence[order], loss[order]
    tie = torch.ones_like(order)
    tie[1:] = ranked.diff() != 0
    place = tie.cumsum(0) - 1
    total, size = summed([values, torch.ones_like(values)], place, len(order))
    running = (total / size)[place].cumsum(0).cpu()
    counts = [max(1, round(share * len(loss))) for share in SHARES]
    return {"share": list(SHARES), "loss": [float(f"{float(running[n - 1]) / n:.5g}") for n in counts]}


def _groups(mean: Tensor, y: Tensor) -> list[list[float]]:
    """Of groups of equal size by predicted number: examples, mean predicted, mean observed and its standard error."""
    order = mean.argsort(stable=True)
    found = []
    for part in order.tensor_split(min(GROUPS, max(1, len(order) // 5))):
        if len(part) > 1:
            own = y[part]
            numbers = (mean[part].mean(), own.mean(), own.std() / math.sqrt(len(part)))
            found.append([float(len(part)), *(float(f"{float(n):.5g}") for n in numbers)])
    return found
