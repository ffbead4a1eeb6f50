"""A site's own model: a run folder of this client alone, so that it can be used where its data is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from bpfed.callbacks.folder import Folder
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import RoundInfo
from bpfed.files import PART, lock, sync_folder, writing
from bpfed.metrics import Evaluation
from bpfed.run import Run


def keep(
    folder: Path, federation: Federation, evaluated: tuple[Evaluation, Tensor], say: Callable[[str], None]
) -> None:
    """Write the finished model of one client, as a finished run is written; the one that was there is kept beside it.

    The old one is in `previous` then, where it replaces an older one. At any moment one of them is whole on the disk.

    Args:
        folder: Where, in the site's own folder: nothing of it is sent.
        federation: Of this client alone, after the last round.
        evaluated: Its test in that round.
        say: Told what the user should know.
    """
    run = Run(federation, say)
    run.deployed = True
    run.evaluation = evaluated
    run.history = [{"round": federation.round, **evaluated[0].record()}]
    Folder(folder, overwrite=True)  # says why, if that is no place for a run
    new = folder.with_name(f".{folder.name}{PART}")
    _remove(new)
    kept = Folder(new)
    try:
        kept.start(run)
        kept.round(run, RoundInfo(0, {}), run.history[0])
        kept.end(run)
        if folder.exists():
            held = lock(folder)
            try:
                _remove(previous(folder))
                with writing(folder):
                    folder.rename(previous(folder))
            finally:
                os.close(held)
        with writing(folder):
            new.rename(folder)
            sync_folder(folder.parent)
    finally:
        kept.stop(run)
        _remove(new)


def previous(folder: Path) -> Path:
    """Where the model is that was in this folder before."""
    return folder.with_name(f"{folder.name}-previous")


def _remove(folder: Path) -> None:
    if folder.exists():
        with writing(folder):
            shutil.rmtree(folder)
