"""A site's own model: a run folder of this client alone, so that it can be used where its data is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bpfed.callbacks.folder import Folder
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import RoundInfo
from bpfed.metrics import Evaluation
from bpfed.run import Run


def keep(
    folder: Path, federation: Federation, evaluated: tuple[Evaluation, Tensor], say: Callable[[str], None]
) -> None:
    """Write the finished model of one client, as a finished run is written; what was there is replaced.

    Args:
        folder: Where, in the site's own folder: nothing of it is sent.
        federation: Of this client alone, after the last round.
        evaluated: Its test in that round.
        say: Told what the user should know.
    """
    run = Run(federation, say)
    run.evaluation = evaluated
    run.history = [{"round": federation.round, **evaluated[0].record()}]
    kept = Folder(folder, overwrite=True)
    try:
        kept.start(run)
        kept.round(run, RoundInfo(0, {}), run.history[0])
        kept.end(run)
    finally:
        kept.stop(run)
