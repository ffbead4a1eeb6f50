"""What may be done around the rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.metrics import Score
    from bpfed.runs.run import Run


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def start(self, run: Run) -> None:
        """Before the first round (or the first after a resume)."""

    def metrics(self, run: Run) -> Mapping[str, float | Score]:
        """Further metrics of a round that was just evaluated, by name: a number, or the scores of the tested clients.

        They are in ``metrics.jsonl`` and the report like all others. How they are called and printed there, and which
        way is good, is said by `bpfed.metrics.register_metric`.
        """
        return {}

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        """After a round; ``record`` is its line of metrics, if it was evaluated."""

    def end(self, run: Run) -> None:
        """After the last round."""

    def stop(self, run: Run) -> None:
        """Whatever happened, even if `start` was not reached: the run is over or was broken off."""


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics under flat names, ``accuracy/pooled`` or ``train_nll``."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    flat.pop("round", None)
    return {name: float(v) for name, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}
