"""Calibration with examples held back from training: a temperature for each client, and sets that hold the truth.

Both are computed for each client from the part of its training data that `FederatedData.hold_out` keeps from local
training.

- *Temperature*: probabilities become p^(1/T) / Z, with T fitted to the labels held back (`temperatures`).
- *Split-conformal sets*: the k-th smallest score of n examples held back, k = ⌈(n + 1) · level⌉, bounds the score of a
  new example with probability of at least ``level``, whatever the model and however few the examples: those held back
  and the new one need only be exchangeable. Where k > n the bound is infinite and the set is every label (`threshold`).
- *Pooled sets*: a client with few examples borrows from the others. Each counts its scores on a fixed grid, by class if
  sets are to hold each class alike, and the counts of all clients are added. A client's bound is the quantile of its own
  counts and of the sum, which weighs as much as `POOLED` examples of its own (`pooled_bounds`).
- *Ranks*: how probable a class is where it is right differs between clients too, with their inputs and with how frequent
  the class is. So a score of a class first becomes its rank among those that the client's own model predicts for the
  class on training inputs (`Ranks`). A bound of the rank is a bound of its own for the score at each client.
- *Scales*: how far targets lie from their predictions differs between clients. So scores of numbers are first divided
  by their client's scale, which is shrunk to that of all clients (`Scales`). Training examples help to find it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE
from bpfed.metrics import SMALLEST
from bpfed.metrics.evaluation import owners, summed

#: Strength of the prior that holds a temperature near 1: it weighs as much as about this many examples.
PRIOR = 5.0
#: Steps of the root search; each at least halves a bracket, so that what is left of it is negligible.
STEPS = 60
#: Predicted standard deviations beyond which it makes no difference how far off a target is.
FARTHEST = 10.0
#: Cells of the grid on which scores are counted.
CELLS = 1000
#: Log odds of a score of sets or of a rank, and logarithm of a score of intervals, at the ends of the grid.
GRID = {"sets": 12.0, "ranks": 12.0, "intervals": 6.0}
#: The scores of all clients weigh as much in a client's bound as so many of its own. Scores of intervals are divided by
#: their client's scale first, and ranks are those of the client, so less is left there to differ between clients.
POOLED = {"sets": 50.0, "ranks": 100.0, "intervals": 200.0}
#: Places between the log odds −GRID["sets"] and GRID["sets"] at which ranks are computed.
STEPS_OF_RANKS = 257
#: The least standard deviation of a client's log odds; three steps between those places.
NARROWEST = 0.25
#: The part of a rank that is the score itself. Where a client's model expects no example, ranks still rise with it.
BLENDED = 0.01
#: The least and the most that the scale of all clients weighs in a client's, in examples of its own.
WEAKEST, STRONGEST = 1.0, 1e6
#: Counts of scores that are held at a time.
BLOCK = 20_000_000


class Scales(NamedTuple):
    """How the scale of a client's scores follows from its own and from those of all clients.

    Its square is (Σ s² + t + strength · square) / (n + m + strength), over the client's n scores s: the mean of its own
    squares, of those of its training examples as far as they tell (t, which weigh as m), and as many as ``strength`` of
    all clients'.

    Attributes:
        square: The mean square of all clients' scores.
        strength: The variance of the squares within clients, divided by that between clients.
        trained: t and m of each client, ``[N, 2]`` float64; None: they are 0.
    """

    square: float
    strength: float
    trained: Tensor | None = None

    @classmethod
    def of(cls, scores: Tensor, offsets: Tensor, trained: tuple[Tensor, Tensor] | None = None) -> Scales:
        """Estimated from sums over the scores of each client, ``[E]`` with ``[N + 1]`` offsets.

        Scores of training examples are too small, and how much so may differ between clients. So they are multiplied
        by what they lack on average. Each then weighs as the slope of a regression of the clients' squares on those
        of their training examples, at least 0 and at most 1.

        Args:
            scores: Of examples that were kept from training.
            offsets: Of these.
            trained: Scores and offsets of training examples of the same clients; None: they are not used.
        """
        kept = _Moments.of(scores, offsets)
        if not kept.total:
            return cls(1.0, STRONGEST)
        square, (within, between) = max(kept.mean, 1e-12), kept.variances()
        if trained is None:
            return cls(square, _strength(kept, within, between))
        fitted = _Moments.of(*trained)
        fitted = fitted.times(square / max(fitted.mean, 1e-12))
        slope = _slope(kept, fitted)
        # Variances of training examples count as far as these do.
        together = kept.plus(fitted).variances()
        within, between = ((1.0 - slope) * a + slope * b for a, b in zip((within, between), together, strict=True))
        told = slope * torch.stack([fitted.sums, fitted.sizes], 1)
        return cls(square, _strength(kept, within, between), told)

    def take(self, clients: slice) -> Scales:
        """Those of some of the clients."""
        return self if self.trained is None else self._replace(trained=self.trained[clients])

    def divided(self, scores: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Scores that are divided by their client's scale without themselves, ``[E]``; each client's scale, ``[N]``.

        A new example is not in the scale that its score is divided by, so those of calibration must not be either.
        """
        owner, clients = owners(offsets, scores)
        squares, sizes = _squares(scores), offsets.diff().double()
        (sums,) = summed([squares], owner, clients)
        told = torch.zeros(clients, 2, dtype=torch.float64) if self.trained is None else self.trained
        prior, weight = told[:, 0] + self.strength * self.square, told[:, 1] + self.strength
        others = torch.maximum(sums[owner] - squares + prior[owner], prior[owner]) / (sizes + weight - 1.0)[owner]
        return scores.double() / others.sqrt(), ((sums + prior) / (sizes + weight)).sqrt()


class Ranks(NamedTuple):
    """How a score of a class at a client becomes its rank among those that the client's model predicts for the class.

    The log odds z of class k over a client's inputs are taken as Gaussian, and an input with z is of class k with the
    predicted probability σ(z). So the predicted share of the client's examples of class k that are at least as probable is

        r(z) = ∫_z^∞ φ((t − m)/s) σ(t) dt / ∫ φ((t − m)/s) σ(t) dt,

    which rises with the score 1 − σ(z). It depends on nothing but the client's training inputs and its model, so ranks of
    calibration examples and of new ones are as exchangeable as their scores. `BLENDED` of it is the score itself.

    Attributes:
        mean: m of each client and class, ``[N, K]`` float64; sums over training inputs, shrunk to those of all clients.
        deviation: s of each client and class, ``[N, K]``, likewise.
        common: m and s of all clients, ``[2, K]``.
    """

    mean: Tensor
    deviation: Tensor
    common: Tensor

    @classmethod
    def of(cls, probs: Tensor, offsets: Tensor) -> Ranks:
        """From the predictions of each client for its training inputs, ``[E, K]`` with ``[N + 1]`` offsets.

        What differs between clients decides how far the mean and variance of one are shrunk to those of all: the variance
        within clients divided by that between them is the number of examples that all clients weigh.
        """
        owner, clients = owners(offsets, probs)
        odds = _log_odds(1.0 - probs)
        sums, squares = (torch.zeros(clients, odds.shape[1], dtype=torch.float64) for _ in range(2))
        sums, squares = sums.index_add_(0, owner, odds), squares.index_add_(0, owner, odds.square())
        sizes = offsets.diff().double()[:, None]
        total, some = sizes.sum().clamp(min=1.0), (sizes > 0).sum()
        mean, own = sums.sum(0) / total, (sums.square() / sizes.clamp(min=1.0)).sum(0)
        within = (squares.sum(0) - own).clamp(min=0.0) / (total - some).clamp(min=1.0)
        between = own - total * mean.square() - (some - 1.0) * within
        weight = _weights(within, between, sizes)
        means = (sums + weight * mean) / (sizes + weight)
        # A variance of n Gaussian numbers has twice its square, divided by n − 1, as its own variance.
        freedom, noise = (sizes - 1.0).clamp(min=0.0), 2.0 * within.square()
        each = (squares - sums.square() / sizes.clamp(min=1.0)).clamp(min=0.0) / freedom.clamp(min=1.0)
        between = (freedom * (each - within).square()).sum(0) - ((freedom > 0).sum() - 1.0) * noise
        weight = _weights(noise, between, freedom)
        around = (squares - 2.0 * means * sums + sizes * means.square()).clamp(min=0.0)
        variance = (around + weight * within) / (sizes + weight)
        common = torch.stack([mean, within.sqrt().clamp(min=NARROWEST)])
        # As few digits as make no difference, since a run keeps them for each client and class.
        return cls(*(torch.round(t, decimals=3) for t in (means, variance.sqrt().clamp(min=NARROWEST), common)))

    def take(self, clients: slice) -> Ranks:
        """Those of some of the clients."""
        return self._replace(mean=self.mean[clients], deviation=self.deviation[clients])

    @property
    def unknown(self) -> Ranks:
        """Those of one client of which nothing is known."""
        return self._replace(mean=self.common[:1], deviation=self.common[1:])

    def ranked(self, scores: Tensor, classes: Tensor, offsets: Tensor) -> Tensor:
        """The ranks of scores 1 − p of these classes, ``[E]``."""
        owner, _ = owners(offsets, scores)
        place, odds, found = owner * self.mean.shape[1] + classes, _log_odds(scores), []
        for some in torch.arange(len(scores)).split(BLOCK // CELLS):
            # Examples of one client and class have one table; neighbours are of few clients.
            pairs, own = torch.unique(place[some], return_inverse=True)
            table = _rank_table(self.mean.flatten()[pairs], self.deviation.flatten()[pairs])
            found.append(_ranked(odds[some], table, own))
        return torch.cat(found)

    def scores(self, ranks: Tensor) -> Tensor:
        """The scores of each client and class that have these ranks, ``[N, K]``; what is infinite stays so."""
        table = _rank_table(self.mean, self.deviation)
        odds = torch.logit(ranks.clamp(1e-300, 1.0)).clamp(max=1e6)
        # Log odds of ranks fall with the places; the one above and below, and a line between them.
        above = torch.searchsorted(-table, -odds[..., None].contiguous()).clamp(1, STEPS_OF_RANKS - 1)
        high, low = table.gather(-1, above - 1)[..., 0], table.gather(-1, above)[..., 0]
        step = 2.0 * GRID["sets"] / (STEPS_OF_RANKS - 1)
        at = (above[..., 0] - 1 + ((high - odds) / (high - low)).clamp(0.0, 1.0)) * step - GRID["sets"]
        # Log odds are clamped, so that those at the lower end may be any that are as low.
        found = torch.where(odds >= table[..., 0], 1.0, torch.sigmoid(-at))
        return found.masked_fill(ranks.isinf(), math.inf)


def _log_odds(scores: Tensor) -> Tensor:
    """Of the probability 1 − score; float64."""
    return torch.logit(1.0 - scores.double(), eps=1e-15).clamp(-GRID["sets"], GRID["sets"])


def _weights(within: Tensor, between: Tensor, sizes: Tensor) -> Tensor:
    """How many examples all clients weigh, ``[K]``, where a sum of squares between them is this much above chance."""
    total = sizes.sum()
    variance = between / (total - sizes.square().sum() / total.clamp(min=1.0)).clamp(min=1e-9)
    weight = torch.where(variance > 0.0, within / variance.clamp(min=1e-300), STRONGEST).clamp(WEAKEST, STRONGEST)
    return weight if int((sizes > 0).sum()) > 1 else torch.full_like(weight, STRONGEST)


def _rank_table(mean: Tensor, deviation: Tensor) -> Tensor:
    """Log odds of the rank at each of `STEPS_OF_RANKS` places from the least probable to the most, ``[..., STEPS_OF_RANKS]``."""
    places = torch.linspace(-GRID["sets"], GRID["sets"], STEPS_OF_RANKS, dtype=torch.float64)
    logs = -0.5 * ((places - mean[..., None]) / deviation[..., None]).square() + torch.nn.functional.logsigmoid(places)
    mass = torch.softmax(logs, -1)
    below = mass.cumsum(-1) - 0.5 * mass
    above = mass.flip(-1).cumsum(-1).flip(-1) - 0.5 * mass
    return torch.log(
        ((1.0 - BLENDED) * above + BLENDED * torch.sigmoid(-places))
        / ((1.0 - BLENDED) * below + BLENDED * torch.sigmoid(places))
    )


def _ranked(odds: Tensor, table: Tensor, own: Tensor) -> Tensor:
    """The ranks at these log odds, ``[E]``, by lines between the places of each one's table, ``table[own]``."""
    at = (odds + GRID["sets"]) * (STEPS_OF_RANKS - 1) / (2.0 * GRID["sets"])
    first = at.floor().clamp(0, STEPS_OF_RANKS - 2).long()
    low, high = table[own, first], table[own, first + 1]
    return torch.sigmoid(low + (at - first) * (high - low))


class _Moments(NamedTuple):
    """Sums over the squared scores of each client: their number, sum and sum of squares, ``[N]`` float64 each."""

    sizes: Tensor
    sums: Tensor
    fourths: Tensor

    @classmethod
    def of(cls, scores: Tensor, offsets: Tensor) -> _Moments:
        owner, clients = owners(offsets, scores)
        squares = _squares(scores)
        return cls(offsets.diff().double(), *summed([squares, squares.square()], owner, clients))

    @property
    def total(self) -> float:
        return float(self.sizes.sum())

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / max(self.total, 1.0)

    def times(self, factor: float) -> _Moments:
        return _Moments(self.sizes, factor * self.sums, factor**2 * self.fourths)

    def plus(self, other: _Moments) -> _Moments:
        return _Moments(*(a + b for a, b in zip(self, other, strict=True)))

    def variances(self) -> tuple[float, float]:
        """Within clients and between them, by an analysis of variance; the latter may be below 0."""
        total, parts = self.total, int((self.sizes > 0).sum())
        own = float((self.sums.square() / self.sizes.clamp(min=1.0)).sum())
        within = max(float(self.fourths.sum()) - own, 0.0) / max(total - parts, 1.0)
        between = own - total * self.mean**2 - (parts - 1) * within
        return within, between / max(total - float(self.sizes.square().sum()) / max(total, 1.0), 1e-9)


def _strength(kept: _Moments, within: float, between: float) -> float:
    alike = int((kept.sizes > 0).sum()) < 2 or between <= 0.0
    return STRONGEST if alike else min(max(within / between, WEAKEST), STRONGEST)


def _slope(kept: _Moments, fitted: _Moments) -> float:
    """By how much a client's mean square rises with that of its training examples, from 0 to 1.

    The errors of the two means are independent, so their covariance over clients is that of what they estimate.
    """
    a, b = kept.sizes, fitted.sizes
    weight = a * b / (a + b).clamp(min=1.0)
    weight = weight / weight.sum().clamp(min=1e-9)
    x, y = fitted.sums / b.clamp(min=1.0), kept.sums / a.clamp(min=1.0)
    products = (weight * x * y).sum() - (weight * x).sum() * (weight * y).sum()
    together = float(products / (1.0 - weight.square().sum()).clamp(min=1e-9))
    between = fitted.variances()[1]
    return min(max(together / between, 0.0), 1.0) if between > 0.0 else 0.0


def _squares(scores: Tensor) -> Tensor:
    return scores.double().clamp(max=FARTHEST).square()


@dataclass(frozen=True, eq=False)
class Conformal:
    """What bounds the scores of one client.

    Attributes:
        scores: Of its calibration examples, in rising order, ``[n]`` float32.
        classes: The class of each of these, ``[n]`` int64; None: bounds are not by class.
        pool: Scores of all clients counted on the grid, ``[R, CELLS]`` float64, R the number of classes or 1; None: the
            client's own scores alone count.
        regions: Which of the grids (`GRID`) it is.
        scales: By what scores are divided before they are counted; None: by nothing.
        ranks: How scores become ranks before they are counted; None: they are counted as they are.
    """

    scores: Tensor
    classes: Tensor | None = None
    pool: Tensor | None = None
    regions: str = "sets"
    scales: Scales | None = None
    ranks: Ranks | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def bounds(self, level: float) -> Tensor:
        """The scores that a new example's does not exceed at this level: of each class, ``[K]``, or one, ``[1]``;
        float64."""
        if self.pool is None:
            return torch.tensor([threshold(self.scores, level)], dtype=torch.float64)
        offsets = torch.tensor([0, len(self)])
        return _bounds(self.scores, self.classes, offsets, self.pool, self.regions, self.scales, self.ranks, level)[0]

    def bound(self, level: float) -> float:
        """The one of `bounds`, where they are not by class."""
        (bound,) = self.bounds(level).tolist()
        return float(bound)

    def fixed(self, level: float) -> FixedBounds:
        """The same at this level alone, as numbers."""
        values = tuple(self.bounds(level).tolist())
        return FixedBounds(self.scores, self.classes, None, self.regions, None, None, level, values)


@dataclass(frozen=True, eq=False)
class FixedBounds(Conformal):
    """Bounds that are known numbers, for a model that is handed over.

    Attributes:
        level: Theirs.
        values: Of each class, or one.
    """

    level: float = 0.9
    values: tuple[float, ...] = ()

    def bounds(self, level: float) -> Tensor:
        assert level == self.level, "there is one level"
        return torch.tensor(self.values, dtype=torch.float64)

    def bound(self, level: float) -> float:
        assert level == self.level, "there is one level"
        (bound,) = self.values
        return bound

    def shifted(self, by: float) -> FixedBounds:
        """With bounds that are higher by so much."""
        return replace(self, values=tuple(value + by for value in self.values))


@dataclass(frozen=True, eq=False)
class Calibration:
    """The temperatures and conformal scores of N clients, and how the predictions they belong to were made.

    Attributes:
        how: How those predictions were made, ``sample`` or ``single-pass``.
        draws: With how many weight draws.
        temperatures: T of each client, ``[N]`` float64; 1 where none was fitted.
        scores: Conformal scores end to end, each client's in rising order, ``[E]`` float32: 1 − p of the right label,
            or |target − mean| / predicted standard deviation.
        offsets: Client i owns ``scores[offsets[i]:offsets[i + 1]]``, ``[N + 1]``.
        classes: The class of each score, ``[E]`` int64, where bounds are by class.
        pool: Of all clients, where they borrow from each other; see `Conformal`.
        regions: See `Conformal`.
        scales: See `Conformal`.
        labels: The class of each score, ``[E]`` int64, where there are classes but bounds are not by class.
        ranks: See `Conformal`.
    """

    how: str
    draws: int
    temperatures: Tensor
    scores: Tensor
    offsets: Tensor
    classes: Tensor | None = None
    pool: Tensor | None = None
    regions: str = "sets"
    scales: Scales | None = None
    labels: Tensor | None = None
    ranks: Ranks | None = None

    @property
    def truth(self) -> Tensor | None:
        """The class of each score, ``[E]``; None: there are no classes, or a version before 0.12 did not keep them."""
        return self.labels if self.classes is None else self.classes

    def client(self, index: int) -> tuple[float, Conformal]:
        """One client's temperature and what bounds its scores."""
        own = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        classes = None if self.classes is None else self.classes[own]
        scales = None if self.scales is None else self.scales.take(slice(index, index + 1))
        ranks = None if self.ranks is None else self.ranks.take(slice(index, index + 1))
        bounding = Conformal(self.scores[own], classes, self.pool, self.regions, scales, ranks)
        return float(self.temperatures[index]), bounding

    @property
    def unknown(self) -> Conformal | None:
        """What bounds the scores of a client without calibration examples; None: nothing does."""
        none = None if self.classes is None else self.classes[:0]
        scales = None if self.scales is None else self.scales._replace(trained=None)
        ranks = None if self.ranks is None else self.ranks.unknown
        return None if self.pool is None else Conformal(self.scores[:0], none, self.pool, self.regions, scales, ranks)

    def thresholds(self, level: float) -> Tensor:
        """The bounds of each client's scores, ``[N, K]`` by class and else ``[N, 1]``."""
        if self.pool is not None:
            return torch.cat([self._pooled(self.pool, some, level) for some in self._blocks(len(self.pool))])
        sizes = self.offsets.diff()
        rank = _rank(sizes.double(), level).long()
        index = (self.offsets[:-1] + rank - 1).clamp(0, max(0, len(self.scores) - 1))
        found = self.scores[index] if len(self.scores) else self.scores.new_zeros(len(sizes))
        return found.masked_fill(rank > sizes, math.inf)[:, None].double()

    def _blocks(self, rows: int) -> list[Tensor]:
        """Indices of clients whose counts are held at a time, so that these are not too many numbers."""
        return list(torch.arange(len(self.temperatures)).split(max(1, BLOCK // (rows * CELLS))))

    def _pooled(self, pool: Tensor, some: Tensor, level: float) -> Tensor:
        """`pooled_bounds` of neighbouring clients, ``[S]``."""
        offsets = self.offsets[int(some[0]) : int(some[-1]) + 2]
        own = slice(int(offsets[0]), int(offsets[-1]))
        classes = None if self.classes is None else self.classes[own]
        clients = slice(int(some[0]), int(some[-1]) + 1)
        scales = None if self.scales is None else self.scales.take(clients)
        ranks = None if self.ranks is None else self.ranks.take(clients)
        return _bounds(self.scores[own], classes, offsets - offsets[0], pool, self.regions, scales, ranks, level)

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        more: dict[str, Any] = {}
        if self.pool is not None:
            row, cell = self.pool.nonzero(as_tuple=True)
            kept = {"row": row.tolist(), "cell": cell.tolist(), "count": self.pool[row, cell].long().tolist()}
            more = {"regions": self.regions, "pool": {"rows": len(self.pool), "cells": CELLS, **kept}}
            more |= {} if self.classes is None else {"classes": self.classes.tolist()}
            more |= {} if self.scales is None else {"scales": _scales_record(self.scales)}
            more |= {} if self.ranks is None else {"ranks": {k: t.tolist() for k, t in self.ranks._asdict().items()}}
        return {
            "how": self.how,
            "draws": self.draws,
            "temperatures": self.temperatures.tolist(),
            "scores": self.scores.tolist(),
            "offsets": self.offsets.tolist(),
            **({} if self.labels is None else {"labels": self.labels.tolist()}),
            **more,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], clients: int | None = None) -> Calibration:
        """What `record` gave, of so many clients; None: of as many as it says.

        Raises:
            ValueError: It cannot be such a calibration.
        """
        made = cls(
            str(record["how"]),
            int(record["draws"]),
            torch.tensor(record["temperatures"], dtype=torch.float64),
            torch.tensor(record["scores"], dtype=torch.float32),
            torch.tensor(record["offsets"], dtype=torch.int64),
            torch.tensor(record["classes"], dtype=torch.int64) if "classes" in record else None,
            _pool_of(record["pool"]) if "pool" in record else None,
            str(record.get("regions", "sets")),
            _scales_of(record["scales"], len(record["temperatures"])) if "scales" in record else None,
            torch.tensor(record["labels"], dtype=torch.int64) if "labels" in record else None,
            _ranks_of(record["ranks"], len(record["temperatures"])) if "ranks" in record else None,
        )
        if made.regions not in GRID:
            raise ValueError(f"it is of '{made.regions[:20]}'")
        rows = 1 if made.pool is None else len(made.pool)
        if (made.regions == "ranks") != (made.ranks is not None):
            raise ValueError("its ranks do not fit its pool")
        if made.ranks is not None and (made.classes is None or made.ranks.mean.shape[1] != rows):
            raise ValueError("its ranks are not those of its classes")
        if made.classes is not None and (
            made.classes.shape != made.scores.shape or not bool(((made.classes >= 0) & (made.classes < rows)).all())
        ):
            raise ValueError("its classes do not fit its scores")
        if made.labels is not None and (made.labels.shape != made.scores.shape or bool((made.labels < 0).any())):
            raise ValueError("its labels do not fit its scores")
        clients = len(record["temperatures"]) if clients is None else clients
        if made.temperatures.shape != (clients,) or made.offsets.shape != (clients + 1,) or made.scores.ndim != 1:
            raise ValueError(f"it is not of {clients} clients")
        if not bool((made.temperatures.isfinite() & (made.temperatures > 0.0)).all()):
            raise ValueError("a temperature is not a number above 0")
        ends = int(made.offsets[0]) == 0 and int(made.offsets[-1]) == len(made.scores)
        if not ends or bool((made.offsets.diff() < 0).any()):
            raise ValueError("its offsets do not fit its scores")
        owner, _ = owners(made.offsets, made.scores)
        falls = (made.scores.diff() < 0.0) & (owner.diff() == 0)
        if bool(made.scores.isnan().any()) or bool(falls.any()):
            raise ValueError("its scores are not numbers in rising order")
        return made


def _pool_of(record: Mapping[str, Any]) -> Tensor:
    """The counts in a `Calibration.record`, ``[R, CELLS]``."""
    rows, cells = int(record["rows"]), int(record["cells"])
    if cells != CELLS or not 1 <= rows <= 1_000_000:
        raise ValueError(f"its pool is {rows} x {cells} cells, not of {CELLS}")
    row, cell = (torch.tensor(record[name], dtype=torch.int64) for name in ("row", "cell"))
    count = torch.tensor(record["count"], dtype=torch.float64)
    if not row.shape == cell.shape == count.shape or not bool((count > 0).all()):
        raise ValueError("its pool is no table of counts")
    if not bool(((row >= 0) & (row < rows) & (cell >= 0) & (cell < CELLS)).all()):
        raise ValueError("its pool has a cell that there is not")
    return torch.zeros(rows, CELLS, dtype=torch.float64).index_put_((row, cell), count)


def _scales_record(scales: Scales) -> dict[str, Any]:
    told = {} if scales.trained is None else {"trained": scales.trained.tolist()}
    return {"square": scales.square, "strength": scales.strength, **told}


def _scales_of(record: Mapping[str, Any], clients: int) -> Scales:
    """What a `Calibration.record` holds of them."""
    told = torch.tensor(record["trained"], dtype=torch.float64) if "trained" in record else None
    made = Scales(float(record["square"]), float(record["strength"]), told)
    if not all(math.isfinite(value) and value > 0.0 for value in made[:2]):
        raise ValueError("its scales are not numbers above 0")
    if told is not None and (told.shape != (clients, 2) or not bool((told.isfinite() & (told >= 0.0)).all())):
        raise ValueError(f"its scales are not those of {clients} clients")
    return made


def _ranks_of(record: Mapping[str, Any], clients: int) -> Ranks:
    """What a `Calibration.record` holds of them."""
    made = Ranks(*(torch.tensor(record[name], dtype=torch.float64) for name in Ranks._fields))
    classes = made.common.shape[-1]
    if made.mean.shape != (clients, classes) or made.deviation.shape != (clients, classes) or made.common.ndim != 2:
        raise ValueError(f"its ranks are not those of {clients} clients")
    if not all(bool(t.isfinite().all()) for t in made) or not bool(
        (made.deviation > 0.0).all() and (made.common[1:] > 0.0).all() and len(made.common) == 2
    ):
        raise ValueError("its ranks are not made of means and deviations")
    return made


def ends(regions: str) -> Tensor:
    """The upper end of each cell of the grid, ``[CELLS]`` float64; the last is infinite, or 1, which no rank exceeds."""
    inner = torch.linspace(-GRID[regions], GRID[regions], CELLS - 1, dtype=torch.float64)
    return torch.cat(
        [
            inner.exp() if regions == "intervals" else inner.sigmoid(),
            torch.tensor([1.0 if regions == "ranks" else math.inf]).double(),
        ]
    )


def counted(scores: Tensor, classes: Tensor | None, offsets: Tensor, rows: int, regions: str) -> Tensor:
    """Scores counted on the grid by client and class, ``[N, rows, CELLS]`` float64.

    Args:
        scores: ``[E]``.
        classes: ``[E]``, each below ``rows``; None: there is one row.
        offsets: Client i owns scores ``offsets[i]`` to ``offsets[i + 1]``, ``[N + 1]``.
        rows: R.
        regions: Which of the grids it is.
    """
    owner, clients = owners(offsets, scores)
    cell = torch.bucketize(scores.double(), ends(regions)[:-1])
    row = owner * rows if classes is None else owner * rows + classes
    return torch.bincount(row * CELLS + cell, minlength=clients * rows * CELLS).view(clients, rows, CELLS).double()


def _bounds(
    scores: Tensor,
    classes: Tensor | None,
    offsets: Tensor,
    pool: Tensor,
    regions: str,
    scales: Scales | None,
    ranks: Ranks | None,
    level: float,
) -> Tensor:
    """`pooled_bounds` of clients with these scores, ``[N, R]``; multiplied by their scales, or of ranks, where there are such."""
    if ranks is not None and classes is not None:
        counts = counted(ranks.ranked(scores, classes, offsets), classes, offsets, len(pool), regions)
        return ranks.scores(pooled_bounds(counts, pool, level, regions))
    divided, scale = (scores, None) if scales is None else scales.divided(scores, offsets)
    found = pooled_bounds(counted(divided, classes, offsets, len(pool), regions), pool, level, regions)
    return found if scale is None else found * scale[:, None]


def pooled_bounds(own: Tensor, pool: Tensor, level: float, regions: str) -> Tensor:
    """Bounds of clients' scores from their own counts and from those of all clients.

    The n scores of a client weigh 1 each. The N of all clients, its own among them, weigh `POOLED` together, or N where
    there are fewer. The bound is the smallest end of a cell up to which a share of level · (1 + 1/n') of the weight
    lies. Here n' is the number of equally weighted scores that would be as precise, (Σ w)² / Σ w². So the bound of a
    client without scores is the split-conformal one of all clients, and that of a client with many scores, or of the only
    one, is its own. Ends of cells round up.

    Args:
        own: ``[N, R, CELLS]``.
        pool: ``[R, CELLS]``.
        level: Above 0 and below 1.
        regions: Which of the grids it is.

    Returns:
        ``[N, R]`` float64; infinite where there are too few scores for the level.
    """
    _check(level)
    size, total = own.sum(-1), pool.sum(-1)
    borrowed = total.clamp(max=POOLED[regions])
    each = borrowed / total.clamp(min=1.0)
    weight = size + borrowed
    squares = size * (1.0 + 2.0 * each) + borrowed * each
    wanted = torch.round(level * (1.0 + squares / weight.square().clamp(min=1e-300)), decimals=9)
    reached = ((own + each[:, None] * pool).cumsum(-1) / weight.clamp(min=1e-300)[..., None]).contiguous()
    cell = torch.searchsorted(reached, (wanted - 1e-9)[..., None])[..., 0]
    infinite = (wanted > 1.0) | (total == 0)
    return ends(regions)[cell.clamp(max=CELLS - 1)].masked_fill(infinite, math.inf)


def threshold(scores: Tensor, level: float) -> float:
    """The score that a new example's does not exceed with probability of at least ``level``.

    Args:
        scores: In rising order, ``[n]``.
        level: Above 0 and below 1.

    Returns:
        The ⌈(n + 1) · level⌉-th smallest score; infinity if there are fewer.
    """
    rank = int(_rank(torch.tensor(float(len(scores)), dtype=torch.float64), level))
    return float(scores[rank - 1]) if rank <= len(scores) else math.inf


def fewest(level: float) -> int:
    """The number of calibration examples below which every `threshold` at this level is infinite."""
    _check(level)
    return math.ceil(round(level / (1.0 - level), 9))


def _rank(size: Tensor, level: float) -> Tensor:
    _check(level)
    # Rounded first: (n + 1) · level that should be a whole number must not pass it by the last bit.
    return torch.round((size + 1.0) * level, decimals=9).ceil()


def _check(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise UserError(f"The level of a prediction set is {level}, but must be above 0 and below 1, such as 0.9.")


def by_client(scores: Tensor, offsets: Tensor) -> Tensor:
    """The order in which each client's scores rise, ``[E]``."""
    order = scores.argsort(stable=True)
    owner, _ = owners(offsets, scores)
    return order[owner[order].argsort(stable=True)]


def temperatures(probs: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The temperature of each client, for all clients at once.

    With β = 1/T this minimises

        Σ −log(p_y^β / Σ_k p_k^β)  +  PRIOR · (β − 1 − log β),

    the labels' negative log-likelihood and a Gamma prior whose mode is β = 1. Both are convex in β, so there is one
    minimum. The prior goes to infinity at β = 0 and β = ∞: a handful of examples, all right or all wrong, moves T but
    cannot send it to either end, and a client without examples has T = 1.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.

    Returns:
        ``[N]`` float64.
    """
    logp = probs.double().clamp(min=SMALLEST).log()
    owner, clients = owners(offsets, y)
    right = logp.gather(1, y[:, None]).squeeze(1)

    def slope(beta: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivative of the loss."""
        p = torch.softmax(beta[owner, None] * logp, 1)
        mean = (p * logp).sum(1)
        variance = (p * (logp - mean[:, None]).square()).sum(1)
        first, second = summed([mean - right, variance], owner, clients)
        return first + PRIOR * (1.0 - 1.0 / beta), second + PRIOR / beta.square()

    # |log p| is at most 27.6 (`SMALLEST`), so the root lies between these for any number of examples in memory.
    beta = torch.ones(clients, dtype=torch.float64, device=probs.device)
    low, high = torch.full_like(beta, 1e-9), torch.full_like(beta, 1e9)
    for _ in range(STEPS):
        first, second = slope(beta)
        low, high = torch.where(first < 0, beta, low), torch.where(first < 0, high, beta)
        newton = beta - first / second
        # Newton's step where it stays inside the bracket; else its middle on the scale of log β.
        inside = (newton > low) & (newton < high)
        beta = torch.where(first == 0, beta, torch.where(inside, newton, (low * high).sqrt()))
    return beta.reciprocal()


def common_temperature(probs: Tensor, y: Tensor) -> float:
    """The one temperature that suits all of these examples best, ``[E, K]`` and ``[E]``; see `temperatures`."""
    return float(temperatures(probs, y, torch.tensor([0, len(y)])))


def squared_errors(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """((y − mean) / scale)², at most `FARTHEST`²; all ``[E]``, the result float64."""
    return ((y.double() - mean.double()) / scale.double()).square().clamp(max=FARTHEST**2)


def common_scale_factor(squares: Tensor) -> float:
    """The factor of all predicted standard deviations that suits these targets best; their `squared_errors` z², ``[E]``.

    With β, one over the factor, it minimises the Gaussian negative log-likelihood and the prior of `temperatures`,

        Σ (β² z²/2 − log β)  +  PRIOR · (β − 1 − log β),

    so that β² Σ z² + PRIOR · β = E + PRIOR.
    """
    total, weight = float(squares.sum()), len(squares) + PRIOR
    return (PRIOR + math.sqrt(PRIOR**2 + 4.0 * total * weight)) / (2.0 * weight)


# --- One calibration temperature for the examples of clients that never meet, from sums over the examples of each --------------------
#
# `bpfed.inference.calibration.temperatures` and `common_scale_factor` find the calibration temperature 1/β at which the
# slope of a convex loss in β is zero. That slope is a sum over examples, so each client can send its part of it, at a
# few fixed β; the sum of all parts and of the prior's changes its sign at the calibration temperature of all examples
# together.

#: Places at which slopes are sent. With this many the calibration temperature is off by less than a ten-thousandth.
PLACES = 257
#: Steps of the root search, each of which halves a bracket.
BISECTIONS = 50


class HeldOutSlopes(NamedTuple):
    """What a client sends about the examples that it holds out.

    Attributes:
        examples: How many there are.
        slopes: Their `slopes`, ``[PLACES]``.
    """

    examples: int
    slopes: Tensor


def betas() -> Tensor:
    """The places β = 1/T, from that of the least confident predictions to that of the most confident, ``[PLACES]``, at
    equal ratios."""
    return torch.linspace(-math.log(MAX_TEMPERATURE), -math.log(MIN_TEMPERATURE), PLACES, dtype=torch.float64).exp()


def slopes(probs: Tensor, y: Tensor) -> Tensor:
    """Σ d/dβ of −log(p_y^β / Σ_k p_k^β) over these examples.

    Args:
        probs: ``[E, K]``, rows sum to 1.
        y: Classes, ``[E]`` int64.

    Returns:
        At each of `betas`, ``[PLACES]`` float64, rising.
    """
    logp = probs.double().clamp(min=SMALLEST).log()
    right = logp.gather(1, y[:, None]).sum()
    return torch.stack([(torch.softmax(beta * logp, 1) * logp).sum() - right for beta in betas().tolist()]).cpu()


def slopes_of_numbers(squares: Tensor) -> Tensor:
    """Σ d/dβ of β² z²/2 − log β over examples with these `squared_errors` z², ``[E]``; as `slopes`."""
    beta = betas()
    return beta * float(squares.sum()) - len(squares) / beta


def fault(told: HeldOutSlopes) -> str:
    """Why these cannot be `slopes` of so many examples; empty if they can."""
    examples, slopes = told
    if slopes.shape != (PLACES,):
        return f"its slopes are not {PLACES} numbers."
    most = -math.log(SMALLEST) * examples
    if not bool((slopes.abs() <= 1.000001 * most).all()):
        return f"its slopes are not those of {examples} examples."
    if not bool((slopes.diff() >= -1e-9 * most).all()):
        return "its slopes do not rise, as those of a loss with one minimum do."
    return ""


def fault_of_numbers(told: HeldOutSlopes) -> str:
    """Why these cannot be `slopes_of_numbers` of so many examples; empty if they can."""
    examples, slopes = told
    if slopes.shape != (PLACES,):
        return f"its slopes are not {PLACES} numbers."
    beta = betas()
    data, rest = float(slopes[-1] / beta[-1] + examples / beta[-1].square()), examples / beta  # data is Σ z²
    possible = -1e-6 * examples <= data <= 1.000001 * FARTHEST**2 * examples
    if not possible or not bool(((slopes - data * beta + rest).abs() <= 1e-6 * (data * beta + rest)).all()):
        return f"its slopes are not those of {examples} examples."
    return ""


def fitted(total: Tensor) -> float:
    """The calibration temperature of all examples whose slopes these are in sum, ``[PLACES]``.

    If it would be outside `betas`, the nearer end is returned.
    """
    beta = betas()
    full = total + PRIOR * (1.0 - 1.0 / beta)
    below = int((full < 0.0).sum())
    if below == 0:
        return MAX_TEMPERATURE
    if below == PLACES:
        return MIN_TEMPERATURE
    # A cubic in log β through the four places around the change of sign, and the prior as it is.
    first = min(max(below - 2, 0), PLACES - 4)
    near, start = total[first : first + 4].tolist(), math.log(float(beta[first]))
    ratio = math.log(float(beta[1] / beta[0]))

    def slope(place: float) -> float:
        return _cubic(near, place) + PRIOR * (1.0 - math.exp(-start - ratio * place))

    low, high = float(below - 1 - first), float(below - first)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return math.exp(-start - ratio * low)


def _cubic(values: list[float], at: float) -> float:
    """The cubic through these values at 0, 1, 2 and 3."""
    others = [[m for m in range(4) if m != j] for j in range(4)]
    return sum(v * math.prod((at - m) / (j - m) for m in others[j]) for j, v in enumerate(values))
