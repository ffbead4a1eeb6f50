"""Clients: what whoever trains on a federation should know of its examples, in sentences; none where all is well."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from bpfed._util.errors import quoted
from bpfed.data.federated import FederatedData
from bpfed.data.tabular.statistics import ColumnStatistics

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
    if not len(data.train.y):
        return ()
    found = _unscaled_inputs(data) if isinstance(data.train.x, torch.Tensor) and data.train.x.numel() else []
    if data.task_type.standardised:
        y = data.train.y.double()
        mean, spread = float(y.mean()), float(y.std(correction=0))
        if abs(mean) > TARGET_FAR or spread > TARGET_WIDE or 0.0 < spread < TARGET_NARROW:
            found.append(
                f"The targets of '{data.name}' are not scaled, with mean {mean:.4g} and standard deviation "
                f"{spread:.4g}, so training may fail; scale them to mean 0 and standard deviation 1 by the training "
                "examples, and convert predictions back."
            )
    return tuple(found)


def _unscaled_inputs(data: FederatedData) -> list[str]:
    """The same of inputs that are one tensor."""
    x = data.train.x.numpy()
    if x.ndim > 2:
        if (largest := max(abs(float(x.min())), abs(float(x.max())))) <= BRIGHT:
            return []
        return [
            f"The inputs of '{data.name}' are not scaled and go up to {largest:.4g}, so training may fail; scale "
            "them to mean 0 and standard deviation 1 by the training examples (pixels: per channel), and new "
            "inputs too."
        ]
    if not (columns := _odd(x)):
        return []
    return [
        f"The inputs of '{data.name}' are not scaled, and {columns}, so training may fail; scale each column to "
        "mean 0 and standard deviation 1 by the training examples, and new inputs too."
    ]


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
    if not data.task_type.has_classes or not len(data.train.y):
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
    if not data.task_type.has_classes or not len(data.train.y) or bool((data.train.y == data.train.y[0]).all()):
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


# --- Hints ------------------------------------------------------------------------------------------------------------
#
# What clients' tables may mean otherwise than it is taken, told from what the federation knows of them anyway.

#: Whole numbers from which on a target may be a count.
COUNTED = 6
#: How often the largest of them occurs at most, beside the most frequent one.
RARE = 0.1
#: How many times as wide as another's the targets of a client are, from which on one scale does not suit both.
WIDER = 5.0


def check_clients(data: FederatedData, summaries: Sequence[ColumnStatistics], guessed: bool) -> tuple[str, ...]:
    """A sentence each for a lone client, counts taken as classes, and labels that nobody shares.

    Args:
        data: Of tables.
        summaries: What its clients told.
        guessed: Whether nobody has said what the task is.
    """
    found = []
    if len(data) == 1:
        found.append(
            f"There is only one client, '{data.clients[0]}', so nobody learns from others; give one file per client, or "
            "one file for all with --client-column."
        )
    if guessed and (sentence := _counts(data)):
        found.append(sentence)
    if sentence := unshared_labels(summaries):
        found.append(sentence)
    made = data.preprocessor
    if data.task_type.standardised and made is not None and (sentence := uneven_targets(summaries, made.target)):
        found.append(sentence)
    return tuple(found)


def _counts(data: FederatedData) -> str:
    """What to say of classes that are small whole numbers, ever rarer after the most frequent one; else nothing."""
    made = data.preprocessor
    if made is None or made.shape is not None or not data.task_type.has_classes or data.classes < COUNTED:
        return ""
    if not all(label.isdecimal() for label in data.labels) or int(data.labels[0]) > 1:
        return ""
    counts = torch.bincount(data.train.y, minlength=data.classes).tolist()
    top = counts.index(max(counts))
    rising = all(a <= b for a, b in pairwise(counts[: top + 1]))
    falling = all(a >= b for a, b in pairwise(counts[top:]))
    if not (rising and falling) or 2 * top >= data.classes or counts[-1] > RARE * counts[top]:
        return ""
    return (
        f"The target '{made.target}' is treated as {data.classes} classes without an order, but its whole numbers from "
        f"{data.labels[0]} to {data.labels[-1]} look like counts; if they are, use --task counts."
    )


def unshared_labels(summaries: Sequence[ColumnStatistics]) -> str:
    """What to say of clients with two or more labels none of which any other client has; empty where there are none."""
    own = {s.client: set(s.target.categories or ()) for s in summaries}
    owners: dict[str, int] = {}
    for labels in own.values():
        for label in labels:
            owners[label] = owners.get(label, 0) + 1
    alone = [c for c, labels in own.items() if len(labels) > 1 and all(owners[label] == 1 for label in labels)]
    if not alone or len(own) < 2:
        return ""
    here = sorted(own[alone[0]])
    others = sorted(set(owners) - set(here))
    who = f"Client {quoted(alone)} shares" if len(alone) == 1 else f"Clients {quoted(alone)} share"
    return (
        f"{who} no label with any other; if {quoted(here, 3)} at '{alone[0]}' mean the same as {quoted(others, 3)}, "
        "spell them alike in all files."
    )


def uneven_targets(summaries: Sequence[ColumnStatistics], target: str) -> str:
    """What to say of a number that varies far more at one client than at another; empty where it does not."""
    spreads = {s.client: s.target.scale for s in summaries if s.target.count >= COUNTED and s.target.scale > 0.0}
    if not spreads:
        return ""
    least, most = min(spreads, key=spreads.__getitem__), max(spreads, key=spreads.__getitem__)
    if spreads[most] < WIDER * spreads[least]:
        return ""
    return (
        f"The standard deviation of '{target}' is {spreads[most]:.4g} at '{most}' but {spreads[least]:.4g} at '{least}', "
        "and one scale serves all, so small clients are predicted poorly; consider a ratio as target, such as "
        f"'{target}' over each client's own mean."
    )
