"""What a server makes of a round's uploads: those beyond the bounds are refused, then options for privacy and
robustness, then the method's own rule.

An upload is bounded in two ways (`judged`). Standard deviations must be within a factor of the server's; and since a
client could use that factor in every round, those that are as far from the first ones must be near the round's median.
Weights and means must not have moved much further than is usual, which is the median of this round's uploads and of the
newest ones of earlier rounds. The size of the first weights is one more value of that median, and moving no further
than `ALWAYS` times that size is always allowed; so there is a bound in the first round too, and for one or two clients,
and clients that move a lot among many that hardly move are not refused. With one client in the first round, or one of
two that lies, the bound is no tighter than `Settings.max_update_ratio` times the size of the first weights: there is
nobody to compare with.

An upload of an earlier round that is sent again, and one that is a single number throughout, are refused as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bpfed.aggregation.privacy import Draw, private_mean
from bpfed.aggregation.rules import middle
from bpfed.aggregation.updates import clipped, distances, travelled
from bpfed.config.settings import Settings
from bpfed.methods.base import AnyMethod, State, rows

#: How many lengths of earlier updates are kept of each tensor,
REMEMBERED = 100
#: and how many norms of earlier uploads themselves, by which they are known again, under a name that no tensor has.
KNOWN, UPLOAD = 1000, "upload itself"

#: Moving so many times the size of the first weights is allowed, however little others move: of many clients with few
#: examples and one with many, the one may move fifty times as far.
ALWAYS = 3.0

#: By what factor a σ that is far from the first ones may be beyond the median of the round's uploads.
NEAR = 2.0

#: The lengths of the newest updates that were used, by name of the tensor, oldest first; and the norms of uploads.
Lengths = dict[str, list[float]]


class Judged(NamedTuple):
    """Uploads of a round, measured against the bounds.

    Attributes:
        why: For each upload a clause on why it is refused; empty: it is not.
        lengths: By name of a tensor, how far each upload moved it.
        usual: By name of a tensor, how far uploads usually move it.
        sizes: The norm of each upload itself.
    """

    why: list[str]
    lengths: dict[str, list[float]]
    usual: dict[str, float]
    sizes: list[float]

    @property
    def accepted(self) -> list[int]:
        """The uploads that are not refused."""
        return [i for i, why in enumerate(self.why) if not why]

    def furthest(self, names: list[str]) -> str:
        """In words whose upload moved the server's state furthest, as compared with what is usual."""

        def beyond(name: str, i: int) -> float:
            length = self.lengths[name][i]
            return length / max(self.usual[name], 1e-300) if math.isfinite(length) else math.inf

        tensor, i = max(((name, i) for name in self.lengths for i in range(len(self.why))), key=lambda at: beyond(*at))
        return f"'{names[i]}' moved it furthest, '{tensor}' by {self.lengths[tensor][i]:.3g} (usual: {self.usual[tensor]:.3g})"


def judged(
    method: AnyMethod,
    settings: Settings,
    shared: State,
    uploads: State,
    earlier: Mapping[str, list[float]],
    size: float,
    first: Mapping[str, tuple[float, float]] | None = None,
) -> Judged:
    """Which of S uploads are used, and why the others are not.

    With noise for privacy none is refused: what becomes of one client's upload may not depend on the others', and every
    update is cut to the same norm before it counts.

    Args:
        method: Whose uploads they are.
        settings: The bounds.
        shared: The server's state.
        uploads: ``[S, ...]``, one at least.
        earlier: How far uploads of earlier rounds moved each tensor.
        size: The norm of the weights and means of the server's first state.
        first: By name of a tensor of standard deviations, the least and the greatest of the server's first state.
    """
    found = distances(method, shared, uploads)
    lengths = {name: values.tolist() for name, values in found.lengths.items()}
    usual = {name: _usual([*earlier.get(name, ()), *values, size]) for name, values in lengths.items()}
    sizes, constant, known = found.sizes.tolist(), found.constant.tolist(), set(earlier.get(UPLOAD, ()))
    why = [""] * len(sizes)
    if settings.noise > 0.0:
        return Judged(why, lengths, usual, sizes)
    for i in range(len(sizes)) if settings.max_update_ratio else ():
        if constant[i]:
            why[i] = "all its weights are the same number."
        elif sizes[i] in known and any(values[i] > 0.0 for values in lengths.values()):
            why[i] = "it is an upload of an earlier round."
    for name, values in lengths.items():
        limit = max(settings.max_update_ratio * usual[name], ALWAYS * size) if settings.max_update_ratio else math.inf
        limit = math.inf if name.rpartition(".")[2] in method.counts else limit
        for i, length in enumerate(values):
            if not math.isfinite(length):
                why[i] = why[i] or f"'{name}' is not finite or too large."
            elif length > limit:
                why[i] = why[i] or (
                    f"it moved '{name}' by {length:.3g}, where {usual[name]:.3g} is usual and {limit:.3g} the limit; if "
                    f"it can be trusted, raise max_update_ratio, now {settings.max_update_ratio:g} (0: no limit)."
                )
    for name, ratios in found.scales.items():
        most = settings.max_sigma_ratio or math.inf
        for i, (least, greatest) in enumerate(ratios.tolist()):
            if not (math.isfinite(least) and math.isfinite(greatest)):
                why[i] = why[i] or f"'{name}' is not finite, too large, or above 0 where the server's is 0."
            elif not (1.0 / most <= least and greatest <= most):
                why[i] = why[i] or (
                    f"'{name}' is {least:.3g} to {greatest:.3g} times the server's; if it can be trusted, raise "
                    f"max_sigma_ratio, now {settings.max_sigma_ratio:g} (0: no limit)."
                )
        if name not in (first or {}) or not settings.max_sigma_ratio:
            continue
        low, high = _far(found.sigmas[name].tolist(), *(first or {})[name], most)
        for i, (least, greatest) in enumerate(found.sigmas[name].tolist()):
            if not (low <= least and greatest <= high):
                why[i] = why[i] or (
                    f"'{name}' is {least:.3g} to {greatest:.3g}, far from what the run began with and from other uploads "
                    f"({low:.3g} to {high:.3g}); if it can be trusted, raise max_sigma_ratio, now "
                    f"{settings.max_sigma_ratio:g} (0: no limit)."
                )
    return Judged(why, lengths, usual, sizes)


def remembered(earlier: Mapping[str, list[float]], found: Judged) -> Lengths:
    """The lengths to compare the next round's uploads with."""
    every = {**found.lengths, UPLOAD: found.sizes}
    kept = {name: [values[i] for i in found.accepted] for name, values in every.items()}
    most = {UPLOAD: KNOWN}
    return {n: [*earlier.get(n, ()), *values][-most.get(n, REMEMBERED) :] for n, values in kept.items()}


def _far(sigmas: list[list[float]], least: float, greatest: float, most: float) -> tuple[float, float]:
    """The range that each σ of a tensor must be in: that of the first state, made wider, and what is usual this round.

    Without it a client that multiplies every σ by nearly ``most`` in each round ends any run.
    """
    # Of an even number, the median that is nearer to the first state.
    usual = _usual([1.0 / max(low, 1e-300) for low, _ in sigmas]), _usual([high for _, high in sigmas])
    return min(least / most, 1.0 / (NEAR * usual[0])), max(greatest * most, NEAR * usual[1])


def _usual(values: list[float]) -> float:
    """The median, of an even number the lower one; whatever is not finite counts as the greatest."""
    return sorted(v if math.isfinite(v) else math.inf for v in values)[(len(values) - 1) // 2]


def combined(
    method: AnyMethod, settings: Settings, shared: State, uploads: State, weights: Tensor, clients: int, draw: Draw
) -> State:
    """The server's new state.

    Where noise or a robust rule makes one upload of all, the method's own rule gets it as often as uploads were
    expected (received); so a rule that depends on their number still does, and one that looks for disagreement finds
    none.

    Args:
        method: Whose rule it is.
        settings: Which options.
        shared: The server's old state.
        uploads: ``[S, ...]``; none at all changes nothing, unless there is noise to be added or the first state, which
            alone is in full, travels compressed from now on.
        weights: Of the uploads, ``[S]``.
        clients: Number of clients in the federation.
        draw: Where the noise for privacy comes from.
    """
    count = len(weights)
    if not count and settings.noise == 0.0:
        return travelled(method, shared) if settings.compression == "half" else shared
    if settings.compression == "half" and count:
        uploads = travelled(method, uploads)
    if settings.noise > 0.0:
        count = settings.per_round(clients)
        one = private_mean(method, shared, uploads, settings.clip, settings.noise, count, draw)
        uploads, weights = rows(one, count), torch.ones(count, device=tree_leaves(shared)[0].device)
    else:
        if settings.clip > 0.0:
            uploads = clipped(method, shared, uploads, settings.clip)
        if settings.trim is not None:
            uploads, weights = rows(middle(uploads, settings.trim), count), torch.ones_like(weights)
    new = method.aggregate(shared, uploads, weights, clients=clients)
    return travelled(method, new) if settings.compression == "half" else new
