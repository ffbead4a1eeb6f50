"""Hints: what clients' tables may mean otherwise than it is taken, told from what the federation knows of them anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from bpfed.data.federated import FederatedData
from bpfed.data.summary import Summary
from bpfed.errors import quoted

#: Whole numbers from which on a target may be a count.
COUNTED = 6
#: How often the largest of them occurs at most, beside the most frequent one.
RARE = 0.1
#: How many times as wide as another's the targets of a client are, from which on one scale does not suit both.
WIDER = 5.0
#: How many times as large a column's mean is where its unit is another one, and how many times its deviation at least.
UNIT, SPREAD = 100.0, 10.0


def hints(data: FederatedData, summaries: Sequence[Summary], guessed: bool) -> tuple[str, ...]:
    """A sentence each for a lone client, counts taken as classes, labels that nobody shares, and units that differ.

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
    made = data.preparation
    if made is not None and made.shape is None and made.standardise != "local":
        found += other_units(summaries)
    if data.task == "regression" and made is not None and (sentence := uneven_targets(summaries, made.target)):
        found.append(sentence)
    return tuple(found)


def _counts(data: FederatedData) -> str:
    """What to say of classes that are small whole numbers, ever rarer after the most frequent one; else nothing."""
    made = data.preparation
    if made is None or made.shape is not None or data.task != "classification" or data.classes < COUNTED:
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
        f"{data.labels[0]} to {data.labels[-1]} look like counts; if they are, use --task regression."
    )


def unshared_labels(summaries: Sequence[Summary]) -> str:
    """What to say of clients with two or more labels none of which any other client has; empty where there are none."""
    own = {s.client: set(s.target.levels or ()) for s in summaries}
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


def uneven_targets(summaries: Sequence[Summary], target: str) -> str:
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


def other_units(summaries: Sequence[Summary]) -> list[str]:
    """What to say of numbers that are far larger or smaller at one client than at all others; a sentence per column."""
    found = []
    for name in sorted({name for s in summaries for name in s.columns}):
        told = {s.client: s.columns[name] for s in summaries if name in s.columns}
        sizes = {c: (abs(t.mean), t.scale) for c, t in told.items() if t.count > 1 and not t.words and t.scale}
        for client, here in sizes.items():
            others = {c: size for c, size in sizes.items() if c != client}
            if others and (_apart(here, others) or _apart(here, others, smaller=True)):
                nearest = min(others, key=lambda c: abs(others[c][0] - here[0]))
                found.append(
                    f"The mean of '{name}' is {told[client].mean:.3g} at '{client}' but {told[nearest].mean:.3g} at "
                    f"'{nearest}'{', the nearest of the others' if len(others) > 1 else ''}; if the unit is another one, "
                    "convert it."
                )
                break
    return found


def _apart(here: tuple[float, float], others: Mapping[str, tuple[float, float]], smaller: bool = False) -> bool:
    """Whether mean and deviation are that much larger (or smaller) than all others'."""

    def factors(there: tuple[float, float]) -> tuple[float, float]:
        low, high = (here, there) if smaller else (there, here)
        return (high[0] / low[0] if low[0] else 0.0), high[1] / low[1]

    return all(mean >= UNIT and spread >= SPREAD for mean, spread in map(factors, others.values()))
