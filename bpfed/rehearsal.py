"""Rehearsals: before a run, train on a part of every client's examples to learn how sure to be of the rest.

How sure a model should be depends on how noisy its labels are, which nobody knows before. A rehearsal holds out a fifth of each
client's training examples, trains on the others as the run will, and fits one temperature for all clients, the *softness*, to what it
says of those held out. The run then trains on all examples and predicts at this softness. No test example takes part.
"""

from __future__ import annotations

import math
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from bpfed.callbacks.base import Callback
from bpfed.callbacks.folder import Folder
from bpfed.callbacks.progress import Progress
from bpfed.data.held import HELD, held_out
from bpfed.engine.federation import Federation
from bpfed.engine.settings import Settings
from bpfed.report.record import CONFIG
from bpfed.run import Run


def rehearse(run: Run, folder: Folder | None = None, display: Progress | None = None) -> None:
    """Learn the softness of a run that has not begun, if it asks for that and has none yet.

    Args:
        run: Its settings have the softness afterwards.
        folder: The run's. Rehearsals are kept beside it, so that one that was broken off goes on; see `forget`.
        display: Shows how far they are.
    """
    if not pending(run.settings):
        return
    if run.settings.noise > 0.0:
        run.say("Rehearsals spend privacy as well: the ε of the run leaves that out.")
    found = []
    for number in range(1, run.settings.rehearsals + 1):
        path = beside(folder.path) / str(number) if folder is not None else None
        keeper = Folder(path, resume=(path / CONFIG).exists()) if path is not None else None
        trial = Run(_federation(run.federation, number, keeper))
        callbacks: list[Callback] = [keeper] if keeper is not None else []
        if display is not None:
            display.stage = f"rehearsal {number} of {run.settings.rehearsals}"
            callbacks.append(display)
        trial.train(callbacks)
        run.seconds += trial.seconds
        found.append(trial.detail()["softness"])
    if display is not None:
        display.stage = ""
    run.federation.settings = replace(run.settings, softness=common(found))


def pending(settings: Settings) -> bool:
    """Whether a softness is still to be learnt."""
    return settings.rehearsals > 0 and settings.softness == 1.0


def recalled(settings: Settings, folder: Folder | None) -> Settings:
    """The settings with the softness that the run in a folder has learnt, if it is to go on and has."""
    if folder is None or not folder.resume or not pending(settings) or not (folder.path / CONFIG).exists():
        return settings
    try:
        known = float(tomllib.loads((folder.path / CONFIG).read_text())["run"]["softness"])
    except (OSError, ValueError, KeyError, TypeError):
        return settings  # whoever opens the folder says what is wrong with it
    return replace(settings, softness=known)


def as_rehearsal(settings: Settings, number: int) -> Settings:
    """How a rehearsal is run: as the run, but nothing is calibrated, and only its end is tested."""
    plain = replace(settings, rehearsals=0, softness=1.0, scaling="none", calibration=0.0)
    return replace(plain, seed=settings.seed + number - 1, eval_every=settings.rounds)


def common(fitted: Iterable[float]) -> float:
    """The softness that several cuts of the data agree on: their geometric mean, to four digits."""
    return float(f"{math.exp(mean(map(math.log, fitted))):.4g}")


def beside(out: Path) -> Path:
    """Where the rehearsals of the run in a folder are kept."""
    return out.with_name(f"{out.name}-rehearsals")


def forget(folder: Folder | None) -> None:
    """Take the rehearsals of a finished run away."""
    if folder is not None:
        shutil.rmtree(beside(folder.path), ignore_errors=True)


def _federation(of: Federation, number: int, keeper: Folder | None) -> Federation:
    """A federation that is trained on a part of another's examples and tested on the rest."""
    settings = as_rehearsal(of.settings, number)
    data = held_out(of.data, HELD, settings.seed)
    return Federation.of(of.method, data, settings, of.model, keeper.states if keeper is not None else None)
