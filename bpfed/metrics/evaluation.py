"""The metrics of one moment in training: of each client, their mean, the worst, and of all examples together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed._util.scores import BEST_IS_HIGH
from bpfed.metrics.sums import Sums

Floats = NDArray[np.float64]

#: Scores that a client with test examples may lack: it answered nothing, was tested on one class, or has too few
#: calibration examples.
LACKING = frozenset(
    {"answered_accuracy", "auroc", "sensitivity", "specificity", "coverage", "set_size", "interval_width"}
)


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
        fitted_temperature: Finds the calibration temperature at which the predictions would suit these targets best: below 1 where they
            are not sure enough. None where only sums are known.
        slopes: Likewise, what is told of them to find it for clients that never meet (`bpfed.inference.calibration`).
    """

    scores: dict[str, Score]
    ece_floor: Score
    reliability: Reliability
    sizes: NDArray[np.int64]
    bins: int
    sums: Sums
    more: dict[str, Score] = field(default_factory=dict)
    fitted_temperature: Callable[[], float] | None = None
    slopes: Callable[[], Tensor] | None = None

    def __getitem__(self, metric: str) -> Score:
        return self.scores[metric] if metric in self.scores else self.more[metric]

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
        }


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

    def score(row: Floats, name: str = "") -> Score:
        counts = sizes > 0
        if name in LACKING:
            counts &= ~np.isnan(row[:-1])
        tested = row[:-1][counts]
        if not len(tested):
            return Score(float(row[-1]), math.nan, math.nan, row[:-1])
        worst = tested.min() if name in BEST_IS_HIGH else tested.max()
        return Score(float(row[-1]), float(tested.mean()), float(worst), row[:-1])

    names = [*values, *more]
    found = {name: score(row, name) for name, row in zip(names, table, strict=False)}
    reliability = Reliability([int(c) for c in count], [_json(c) for c in confidence], [_json(a) for a in accuracy])
    scores, further = ({name: found[name] for name in part} for part in (values, more))
    return Evaluation(scores, score(table[-2]), reliability, sizes, bins, sums, further)


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
