"""What may be done around the rounds of a run, one file each: keep it in a folder, show it, track it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bpfed._util.imports import lazily

if TYPE_CHECKING:
    from bpfed.callbacks.progress import Progress
    from bpfed.callbacks.trackers import MLflow, TensorBoard
    from bpfed.engine.simulator import RoundInfo
    from bpfed.metrics import Score
    from bpfed.runs.folder import Folder
    from bpfed.runs.run import Run

__all__ = ["Callback", "Folder", "MLflow", "Progress", "TensorBoard"]


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


# Imported when first asked for, so that a progress display can be up before torch is.
__getattr__ = lazily(
    __name__,
    {
        "Folder": "bpfed.runs.folder",
        "MLflow": "bpfed.callbacks.trackers",
        "Progress": "bpfed.callbacks.progress",
        "TensorBoard": "bpfed.callbacks.trackers",
    },
)
