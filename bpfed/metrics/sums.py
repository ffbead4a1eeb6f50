"""Sums over test examples, by client: what all metrics are made of, and all that a site tells of its examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """Sums over the test examples of N clients, float64; nothing more is known of an example than these add up.

    Attributes:
        cells: ``[M, N, B]``. For classification, of each bin of the confidence: examples, confidences, hits, variances
            c (1 - c). For regression, the examples whose central interval just holds the target, by nominal level.
        losses: ``[2, N]``. NLL and Brier score, or squared error and NLL.
        further: ``[N]`` each, by name. For classification ``sure``, the examples that it is 90 % sure of,
            ``sure_right``, those of them that are right, ``risk``, the summed error rates behind `aurc`, and
            ``majority`` and ``shares_nll``, the hits and the NLL without a model; of two classes ``positive``, the
            examples of the second, ``positive_right``, those of them that are right, and ``in_order``, the pairs behind
            the AUROC. For regression ``baseline``, the squared error of a constant. Where predictions are calibrated,
            ``counted``, the examples whose set or interval counts, and of these what ``coverage`` and ``set_size`` or
            ``interval_width`` are the mean of.
    """

    cells: Tensor
    losses: Tensor
    further: dict[str, Tensor]

    @classmethod
    def join(cls, parts: Sequence[Sums]) -> Sums:
        """The clients of several, in that order."""
        further = {name: torch.cat([p.further[name] for p in parts]) for name in parts[0].further}
        return cls(torch.cat([p.cells for p in parts], 1), torch.cat([p.losses for p in parts], 1), further)

    @classmethod
    def none(cls, form: Form) -> Sums:
        """Of a client without test examples."""
        losses, further = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        cells = torch.zeros(form.rows, 1, form.bins, dtype=torch.float64)
        return cls(cells, losses, dict.fromkeys(form.further, further))

    @property
    def examples(self) -> int:
        """Test examples behind these sums, of all clients together."""
        return int(self.cells[0].sum())

    def cpu(self) -> Sums:
        """The same in main memory."""
        return Sums(self.cells.cpu(), self.losses.cpu(), {name: part.cpu() for name, part in self.further.items()})

    def shares(self) -> dict[str, Tensor]:
        """Coverage and mean size of the sets or intervals, where there are any, ``[N + 1]`` each, the last of all clients."""
        held = [name for name in ("coverage", "set_size", "interval_width") if name in self.further]
        return {name: self.pooled(name) / self.pooled("counted") for name in held}

    def pooled(self, name: str) -> Tensor:
        """A further sum with that of all clients together, ``[N + 1]``."""
        part = self.further[name]
        return torch.cat([part, part.sum(0, keepdim=True)])


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

    @property
    def numbers(self) -> bool:
        """Whether they are of a regression."""
        return self.rows == 1

    @classmethod
    def of(cls, classes: int, bins: int, calibrated: bool) -> Form:
        """Of a run with so many classes (0: a regression) and bins, and with calibration examples or without."""
        size = "set_size" if classes else "interval_width"
        held = ("counted", "coverage", size) if calibrated else ()
        if classes:
            pairs = ("positive", "positive_right", "in_order") if classes == 2 else ()
            return cls(4, bins, ("sure", "sure_right", "risk", "majority", "shares_nll", *pairs, *held))
        return cls(1, len(nominal_levels(bins)) + 1, ("baseline", *held))


def nominal_levels(bins: int) -> Tensor:
    """Nominal levels of central intervals."""
    return torch.tensor(sorted({k / bins for k in range(1, bins)} | {0.95}), dtype=torch.float64)


def owners(offsets: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """Which client each example belongs to, ``[E]``, and the number of clients."""
    offsets = offsets.to(y.device, non_blocking=True)
    rows = torch.arange(len(y), device=y.device)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True), len(offsets) - 1


def summed(columns: list[Tensor], index: Tensor, size: int) -> Tensor:
    """Sum each column ``[E]`` by index, ``[columns, size]``."""
    if index.is_cuda:
        return _summed_in_order(torch.stack(columns).double(), index, size)
    zeros = torch.zeros(len(columns), size, dtype=torch.float64, device=index.device)
    return zeros.scatter_add_(1, index.expand(len(columns), -1), torch.stack(columns))


def _summed_in_order(columns: Tensor, index: Tensor, size: int) -> Tensor:
    """The same of ``[columns, E]``, in an order that is always the same; a GPU adds by atomic operations in any order."""
    index, order = index.sort(stable=True)
    ends = torch.searchsorted(index, torch.arange(size, device=index.device), right=True)
    if not len(index):
        return columns.new_zeros(len(columns), size)
    last = _running(columns[:, order], index)[:, (ends - 1).clamp(min=0)]
    return last.where(ends.diff(prepend=ends.new_zeros(1)) > 0, 0.0)


def _running(columns: Tensor, index: Tensor) -> Tensor:
    """Sums ``[columns, E]`` up to each place since the index ``[E]``, which rises, last changed."""
    step = 1
    while step < len(index):
        same = index[step:] == index[:-step]
        before = columns[:, :-step].where(same, 0.0)
        columns = torch.cat([columns[:, :step], columns[:, step:] + before], 1)
        step *= 2
    return columns


def cumulative(column: Tensor) -> Tensor:
    """Sums ``[E]`` up to each place; on a GPU in an order that is always the same, which is not so of ``cumsum``."""
    if not column.is_cuda:
        return column.cumsum(0)
    return _running(column[None], torch.zeros_like(column, dtype=torch.int64))[0]


def with_pool(sums: Tensor) -> Tensor:
    """Append to the clients' sums ``[M, N, ...]`` those of all clients together, ``[M, N + 1, ...]``."""
    return torch.cat([sums, sums.sum(1, keepdim=True)], 1)


def counting(found: Mapping[str, Tensor], bounded: Tensor | None) -> dict[str, Tensor]:
    """Which examples' sets or intervals count, and what is found of these, ``[E]`` each."""
    counted = torch.ones_like(next(iter(found.values())), dtype=torch.bool) if bounded is None else bounded
    return {"counted": counted.double()} | {n: part.double().where(counted, 0.0) for n, part in found.items()}


# --- What chance alone would do ---------------------------------------------------------------------------------------


def binomial_deviation(n: Tensor, p: Tensor) -> Tensor:
    """E|X - n p| of a binomial X, by De Moivre: 2 v C(n, v) p^v (1 - p)^(n - v + 1) with v = floor(n p) + 1."""
    v = torch.minimum((n * p).floor() + 1, n)
    choose = torch.lgamma(n + 1) - torch.lgamma(v + 1) - torch.lgamma(n - v + 1)
    return 2 * (v.log() + choose + torch.xlogy(v, p) + torch.xlogy(n - v + 1, 1 - p)).exp()
