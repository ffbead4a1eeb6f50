"""Remarks: what whoever trains on a federation should know of its examples, in sentences; none where all is well."""

from __future__ import annotations

import numpy as np
import torch

from bpfed.data.federated import FederatedData
from bpfed.errors import quoted

#: Mean (either sign) and deviation of a column of inputs up to which they suit a network; a deviation that is too low.
FAR, WIDE, NARROW = 10.0, 10.0, 0.01
#: The same of the targets of a regression.
TARGET_FAR, TARGET_WIDE, TARGET_NARROW = 3.0, 3.0, 0.1
#: The largest value, of either sign, of images and other inputs of several axes.
BRIGHT = 20.0
#: Training examples of a class, at all clients together, below which nothing can be learnt of it.
FEW = 5
#: Clients or classes that a sentence names.
NAMED = 3


def unscaled(data: FederatedData) -> tuple[str, ...]:
    """What to say of training inputs and targets that are far from the size that a network starts at."""
    if not len(data.train.y) or not data.train.x.numel():
        return ()
    x, found = data.train.x.numpy(), []
    if x.ndim > 2:
        if (largest := max(abs(float(x.min())), abs(float(x.max())))) > BRIGHT:
            found.append(
                f"The inputs of '{data.name}' are not scaled and go up to {largest:.4g}, so training may fail; scale "
                "them to mean 0 and standard deviation 1 by the training examples (pixels: per channel), and new "
                "inputs too."
            )
    elif columns := _odd(x):
        found.append(
            f"The inputs of '{data.name}' are not scaled, and {columns}, so training may fail; scale each column to "
            "mean 0 and standard deviation 1 by the training examples, and new inputs too."
        )
    if data.task == "regression":
        y = data.train.y.double()
        mean, spread = float(y.mean()), float(y.std(correction=0))
        if abs(mean) > TARGET_FAR or spread > TARGET_WIDE or 0.0 < spread < TARGET_NARROW:
            found.append(
                f"The targets of '{data.name}' are not scaled, with mean {mean:.4g} and standard deviation "
                f"{spread:.4g}, so training may fail; scale them to mean 0 and standard deviation 1 by the training "
                "examples, and convert predictions back."
            )
    return tuple(found)


def _odd(x: np.ndarray) -> str:
    """A clause on the columns ``[E, F]`` that are far off, or on most of them if almost constant; else empty."""
    mean, spread = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    far = np.flatnonzero((abs(mean) > FAR) | (spread > WIDE))
    if not len(far):
        far = np.flatnonzero((spread > 0) & (spread < NARROW))
        far = far if 2 * len(far) > x.shape[1] else far[:0]
    if not len(far):
        return ""
    others = f" (and {len(far) - 1} more like it)" if len(far) > 1 else ""
    k = far[0]
    return f"x[:, {k}] has mean {mean[k]:.4g} and standard deviation {spread[k]:.4g}{others}"


def rare_classes(data: FederatedData) -> tuple[str, ...]:
    """What to say of classes of which one client alone has training examples, or all together have hardly any."""
    if data.task != "classification" or not len(data.train.y):
        return ()
    counts = torch.zeros(len(data), data.classes, dtype=torch.long)
    counts.index_put_((data.train.owner, data.train.y), torch.tensor(1), accumulate=True)
    total, owners, found = counts.sum(0), (counts > 0).sum(0), []
    few = ((total > 0) & (total < FEW)).nonzero().flatten().tolist()
    if few and 2 * len(few) < data.classes:
        names = quoted([data.class_names[k] for k in few], NAMED)
        found.append(f"There are fewer than {FEW} training examples of {names}, too few to learn from.")
    lone = [k for k in (owners == 1).nonzero().flatten().tolist() if k not in few]
    if len(data) > 2 and lone and 2 * len(lone) < data.classes:
        who = data.clients[int(counts[:, lone[0]].argmax())]
        names = quoted([data.class_names[k] for k in lone], NAMED)
        where = f"'{who}' alone" if len(lone) == 1 else "one client each"
        found.append(f"Training examples of {names} are at {where}, so the others will hardly ever predict it.")
    return tuple(found)


def of_one_class(data: FederatedData) -> tuple[str, ...]:
    """What to say of clients that have two or more training examples, all of one class, where there are others."""
    if data.task != "classification" or not len(data.train.y) or bool((data.train.y == data.train.y[0]).all()):
        return ()
    owner = data.train.owner
    lowest = torch.full((len(data),), data.classes).scatter_reduce(0, owner, data.train.y, "amin")
    highest = torch.full((len(data),), -1).scatter_reduce(0, owner, data.train.y, "amax")
    such = ((lowest == highest) & (data.train.sizes > 1)).nonzero().flatten().tolist()
    if not such:
        return ()
    if len(such) == 1:
        who, only = quoted([data.clients[such[0]]]), quoted([data.class_names[int(lowest[such[0]])]])
        return (
            f"Client {who} has training examples of {only} only, so it will predict hardly anything else, and its "
            "scores make the overall scores look better than they are.",
        )
    if 2 * len(such) >= len(data):
        who = f"{len(such)} of {len(data)} clients"
    else:
        names = quoted([data.clients[i] for i in such], NAMED, " and " if len(such) == 2 else ", ")
        who = f"Clients {names}"
    return (
        f"{who} have training examples of one class only, so each will predict hardly anything else, and their scores "
        "make the overall scores look better than they are.",
    )
