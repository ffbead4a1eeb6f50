"""The metrics of one moment in training: of each client, their mean, the worst, and of all examples together.

All are made of sums over test examples, by client (`Sums`), which are also all that a site tells of its examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed.metrics.registry import Metric, get_metric


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
        """Coverage and mean size of sets or intervals, where there are any, ``[N + 1]`` each; the last is of all clients."""
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
        shares: Those of them that are sums of what is at most 1 for an example, where the task has some of its own.
    """

    rows: int
    bins: int
    further: tuple[str, ...]
    shares: tuple[str, ...] = ()


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


# --- The evaluation that is made of them ------------------------------------------------------------------------------


Floats = NDArray[np.float64]

#: A prediction that is less sure than this counts as an abstention, and sets are tested at this level.
SURE = 0.9
#: A lower probability counts as this one, so that one wrong certainty costs 27.6 nats, not infinity. float32 holds it.
SMALLEST = 1e-12
#: What a calibration error would be by chance; it has no page of its own.
FLOOR = Metric("ece_floor", "ECE by chance", calibrates=True)


@dataclass(frozen=True)
class Reliability:
    """What was claimed against what happened, over all clients' examples.

    For classification there is one entry per bin of the top-label confidence; a bin without examples has ``None`` for
    both. For regression there is one entry per nominal level of a central interval: ``confidence`` is that level and
    ``accuracy`` the share of targets that fell inside.

    Attributes:
        count: Examples behind each entry, ``[B]``.
        confidence: Mean confidence, ``[B]``.
        accuracy: Share that was right, ``[B]``.
    """

    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"count": self.count, "confidence": self.confidence, "accuracy": self.accuracy}


@dataclass(frozen=True, eq=False)
class Score:
    """One metric. A client without test examples is NaN in ``clients`` and counts nowhere else.

    Attributes:
        pooled: Over all examples together.
        mean: Unweighted mean over clients.
        worst: The worst client's (the lowest accuracy, the highest of anything else).
        clients: Each client's, ``[N]``.
    """

    pooled: float
    mean: float
    worst: float
    clients: Floats

    def record(self) -> dict[str, float | None]:
        """As JSON holds it: a value that is not finite is ``None``."""
        return {"pooled": _json(self.pooled), "mean": _json(self.mean), "worst": _json(self.worst)}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of one moment in training.

    Attributes:
        scores: By name; classification has accuracy, nll, brier, ece and mce, regression rmse, nll and ece.
        ece_floor: The ECE that perfectly calibrated predictions with the same confidences would show on average, by
            chance alone. An ECE near its floor says nothing against the calibration.
        reliability: Over all clients.
        sizes: Test examples of each client, ``[N]``.
        bins: Number of bins behind ECE and MCE, without which neither can be compared.
        sums: What all of it is made of. Clients that never meet can have theirs put together by `evaluate_sums`.
        more: What further scores there are, by name; see `evaluate`.
        fitted_temperature: Finds the calibration temperature at which the predictions would suit these targets best:
            below 1 where they are not sure enough. None where only sums are known.
        by_class: Finds what is to be said of each class, ready for JSON; None where there are none, or only sums are known.
        slopes: Likewise, what is told of them to find it for clients that never meet (`bpfed.inference.calibration`).
        losses: Gives the loss of each example, ``[E]``: NLL of classes, squared error of numbers; None as above.
        example_nll: Gives the NLL of each example, ``[E]``; None as above.
        diagnose: Finds what a report says beyond metrics, ready for JSON (`bpfed.metrics.diagnostics`); None as above.
    """

    scores: dict[str, Score]
    ece_floor: Score
    reliability: Reliability
    sizes: NDArray[np.int64]
    bins: int
    sums: Sums
    more: dict[str, Score] = field(default_factory=dict)
    fitted_temperature: Callable[[], float] | None = None
    by_class: Callable[[], list[dict[str, Any]]] | None = None
    slopes: Callable[[], Tensor] | None = None
    losses: Callable[[], Tensor] | None = None
    example_nll: Callable[[], Tensor] | None = None
    diagnose: Callable[[], dict[str, Any]] | None = None

    def __getitem__(self, metric: str) -> Score:
        return self.scores[metric] if metric in self.scores else self.more[metric]

    def with_shares(self, more: Mapping[str, Tensor], sizes: NDArray[np.int64]) -> Evaluation:
        """The same with further scores ``[N + 1]``, the last of all clients, where so many rows ``[N]`` are an example."""
        added = {name: _score(row.cpu().numpy(), sizes, get_metric(name)) for name, row in more.items()}
        return replace(self, more=self.more | added, sizes=sizes)

    def record(self) -> dict[str, dict[str, float | None]]:
        """``{"accuracy": {"pooled": .., "mean": .., "worst": ..}, "nll": ..}``, ready for JSON."""
        return {name: score.record() for name, score in {**self.scores, **self.more}.items()}

    def clients(
        self, names: Sequence[str], train_sizes: Sequence[int], calibration_sizes: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """One row per client: name, sizes, each metric and ``ece_floor`` (``None`` where untested).

        The sizes are ``train`` and ``test`` and, where examples were held back, ``calibration``.
        """
        columns = {name: score.clients.tolist() for name, score in self.scores.items()}
        columns["ece_floor"] = self.ece_floor.clients.tolist()
        columns |= {name: score.clients.tolist() for name, score in self.more.items()}
        held = (
            [{"calibration": int(n)} for n in calibration_sizes] if calibration_sizes is not None else [{}] * len(names)
        )
        return [
            {"name": name, "train": int(train), "test": int(test)}
            | held[i]
            | {metric: _json(values[i]) for metric, values in columns.items()}
            for i, (name, train, test) in enumerate(zip(names, train_sizes, self.sizes, strict=True))
        ]

    def detail(
        self,
        round_: int,
        names: Sequence[str],
        train_sizes: Sequence[int],
        calibration_sizes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Everything the report needs beyond the curves, ready for JSON."""
        return {
            "round": round_,
            "bins": self.bins,
            "clients": self.clients(names, train_sizes, calibration_sizes),
            "reliability": self.reliability.record(),
            "ece_floor": _json(self.ece_floor.pooled),
            **({"fitted_temperature": self.fitted_temperature()} if self.fitted_temperature is not None else {}),
            **({"classes": self.by_class()} if self.by_class is not None else {}),
            **self._sets(),
        }

    def _sets(self) -> dict[str, Any]:
        """The number of clients with finite sets or intervals, and of those whose coverage is as it should be."""
        if "coverage" not in self.more or "counted" not in self.sums.further:
            return {}
        counted, held = (self.sums.further[name].cpu().numpy() for name in ("counted", "coverage"))
        whole = counted > 0
        within = within_band(held[whole], counted[whole], SURE)
        return {"sets": {"level": SURE, "clients": int(whole.sum()), "within": int(within.sum())}}


def within_band(held: Floats, counted: Floats, level: float) -> NDArray[np.bool_]:
    """Whether so many hits, ``[N]``, of so many, ``[N]``, are in the central 95 % of a binomial at this level."""
    from scipy.stats import binom

    low, high = (binom.ppf(q, counted, level) for q in (0.025, 0.975))
    found: NDArray[np.bool_] = (low <= held) & (held <= high)
    return found


def evaluation(
    values: dict[str, Tensor],
    floor: Tensor,
    total: Tensor,
    pooled: Tensor,
    bins: int,
    sums: Sums,
    more: Mapping[str, Tensor],
) -> Evaluation:
    """Fetch what was computed (rows ``[N + 1]``, the last of them pooled; ``pooled`` ``[3, B]``) in one transfer."""
    rows = torch.stack([*values.values(), *more.values(), floor, total])
    flat = torch.cat([rows.flatten(), pooled.flatten()]).cpu().numpy()
    table = flat[: rows.numel()].reshape(rows.shape)
    count, confidence, accuracy = flat[rows.numel() :].reshape(pooled.shape)
    sizes = table[-1, :-1].astype(np.int64)

    names = [*values, *more]
    found = {name: _score(row, sizes, get_metric(name)) for name, row in zip(names, table, strict=False)}
    reliability = Reliability([int(c) for c in count], [_json(c) for c in confidence], [_json(a) for a in accuracy])
    scores, further = ({name: found[name] for name in part} for part in (values, more))
    return Evaluation(scores, _score(table[-2], sizes, FLOOR), reliability, sizes, bins, sums, further)


def _score(row: Floats, sizes: NDArray[np.int64], metric: Metric) -> Score:
    """A metric of N clients and, last, of all examples together, ``[N + 1]``; ``sizes`` are test examples, ``[N]``."""
    counts = sizes > 0
    if metric.lacking:
        counts &= ~np.isnan(row[:-1])
    tested = row[:-1][counts]
    if not len(tested):
        return Score(float(row[-1]), math.nan, math.nan, row[:-1])
    worst = tested.min() if metric.high_is_good else tested.max()
    return Score(float(row[-1]), float(tested.mean()), float(worst), row[:-1])


def with_means(found: Evaluation, metrics: Iterable[Metric], sums: Sums) -> Evaluation:
    """The same with these metrics, each the mean over examples of what a further sum of its name adds up."""
    more = dict(found.more)
    for metric in metrics:
        total = sums.pooled(metric.name).cpu().numpy()
        count = np.append(found.sizes, found.sizes.sum())
        with np.errstate(invalid="ignore"):
            more[metric.name] = _score(total / count, found.sizes, metric)
    return replace(found, more=more, sums=sums)


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
