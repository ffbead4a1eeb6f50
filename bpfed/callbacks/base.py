"""What may be done around the rounds of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bpfed.engine.simulator import RoundInfo

if TYPE_CHECKING:
    from bpfed.run import Run


class Callback:
    """Hooks of a run; each does nothing unless overridden."""

    def start(self, run: Run) -> None:
        """Before the first round (or the first after a resume)."""

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        """After a round; ``record`` is its line of metrics, if it was evaluated."""

    def end(self, run: Run) -> None:
        """After the last round."""

    def stop(self, run: Run) -> None:
        """Whatever happened: the run is over or was broken off."""
