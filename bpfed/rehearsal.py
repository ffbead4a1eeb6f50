"""Rehearsals: before a run, train on a part of every client's examples to learn how sure to be of the rest.

How sure a model should be depends on how noisy its targets are, which nobody knows before. A rehearsal holds out a fifth
of each client's training examples, trains on the others as the run will, and fits one number for all clients, the
*softness* (`bpfed.softness`), to what it says of those held out. The run then trains on all examples and predicts at this softness. No
test example takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bpfed.callbacks.base import Callback
from bpfed.callbacks.folder import Folder
from bpfed.callbacks.progress import Progress
from bpfed.data.federated import Task
from bpfed.data.held import HELD, held_out
from bpfed.engine.federation import Federation
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.run import Run, train_together
from bpfed.softness import SOFTEST, SUREST

#: Held-out examples, in all rehearsals of a run together, below which a softness is uncertain by a tenth and more. That
#: of a regression is the scale of its errors, each of which tells of it, not only those that surprise.
ENOUGH: dict[Task, int] = {"classification": 1000, "regression": 100}
#: Between the seeds of two rehearsals of a run, so that they are none of another run's.
APART = 1_000_000


class Keeper(Folder):
    """Keeps a rehearsal as long as it may have to go on; there is nothing to report of one."""

    def end(self, run: Run) -> None:
        """Nothing."""


class Rehearsal(NamedTuple):
    """A rehearsal that is to be: of which run, whose folder is where, and its number, from 1."""

    run: Run
    folder: Folder | None
    number: int


def rehearse(
    runs: Sequence[Run],
    folders: Sequence[Folder | None] | None = None,
    display: Progress | None = None,
    *,
    held: float = HELD,
    **changes: Any,
) -> None:
    """Learn the softness of the runs that ask for it and have none yet; none of them has begun.

    Args:
        runs: Of one method. On a GPU all their rehearsals are trained side by side, elsewhere in turn.
        folders: The runs' own, where rehearsals are kept until a run begins, so that one that was broken off goes on.
            They are this process's own until their runs end, or something is raised here.
        display: Shows how far they are.
        held: Part of each client's training examples that is held out.
        changes: Settings of rehearsals that differ from the run's.
    """
    waiting = [pair for pair in zip(runs, folders or [None] * len(runs), strict=True) if pending(pair[0].federation)]
    try:
        _rehearse(waiting, display, held, changes)
    except BaseException:
        for _, folder in waiting:
            if folder is not None:
                folder.release()
        raise


def _rehearse(
    waiting: Sequence[tuple[Run, Folder | None]], display: Progress | None, held: float, changes: dict[str, Any]
) -> None:
    for run, folder in waiting:
        if folder is not None:
            folder.begin_rehearsals(run)
    found: dict[int, list[float]] = {id(run): [] for run, _ in waiting}
    seen = dict.fromkeys(found, 0)
    planned = [Rehearsal(run, folder, n) for run, folder in waiting for n in range(1, run.settings.rehearsals + 1)]
    stacked = bool(planned) and planned[0].run.federation.device.type == "cuda"
    for together in [planned] if stacked else [[one] for one in planned]:
        for of, trial in zip(together, _train(together, display, held, changes), strict=True):
            of.run.seconds += trial.seconds
            found[id(of.run)].append(trial.detail()["fitted_softness"])
            assert trial.evaluation is not None
            seen[id(of.run)] += trial.evaluation[0].sums.examples  # of those clients that are tested
    for run, _ in waiting:
        run.federation.learnt_softness = common(found[id(run)])
        if sentence := uncertain(run.softness, seen[id(run)], run.settings.rehearsals, run.data.task):
            run.say(sentence)


def pending(federation: Federation) -> bool:
    """Whether a softness is still to be learnt."""
    return federation.settings.rehearsals > 0 and federation.learnt_softness is None


def common(fitted: Iterable[float]) -> float:
    """The softness that several cuts of the data agree on: their geometric mean, to four digits, and within bounds."""
    logs = [math.log(min(max(softness, SUREST), SOFTEST)) for softness in fitted]
    return float(f"{math.exp(sum(logs) / len(logs)):.4g}")


def uncertain(softness: float, examples: int, rehearsals: int, task: Task) -> str:
    """A sentence on a softness that so many rehearsals learnt from few held-out examples; empty: there are enough."""
    enough = ENOUGH[task]
    if examples >= enough:
        return ""
    better = math.ceil(enough * rehearsals / examples)
    return (
        f"The softness of {softness:.2f} is learnt from {examples} held-out examples, so it is uncertain; "
        f"rehearsals = {better} would learn it from {enough}."
    )


def as_rehearsal(settings: Settings, number: int) -> Settings:
    """How a rehearsal is run: as the run, but nothing is calibrated, and it is tested as seldom as can be."""
    plain = replace(settings, rehearsals=0, scaling="none", calibration=0.0, baselines="off")
    return replace(plain, seed=settings.seed + APART * number, eval_every=settings.rounds)


def _train(planned: Sequence[Rehearsal], display: Progress | None, held: float, changes: dict[str, Any]) -> list[Run]:
    """Rehearsals, side by side."""
    trials, callbacks = [], []
    for each in planned:
        of, keeper = each.run.federation, None
        if each.folder is not None:
            keeper = Keeper(each.folder.rehearsals / str(each.number), resume=True)
        settings = replace(as_rehearsal(of.settings, each.number), **changes)
        data = replace(held_out(of.data, held, settings.seed), name=of.data.name)  # the display has little room
        states = keeper.states if keeper is not None else None
        trials.append(Run(Federation.of(of.method, data, settings, of.model, states)))
        own: list[Callback] = [keeper] if keeper is not None else []
        callbacks.append(own)
    stage = f"rehearsal {', '.join(str(n) for n in sorted({each.number for each in planned}))}"
    if display is not None:
        display.stage = f"{stage} of {planned[0].run.settings.rehearsals}"
        callbacks[0].append(display)
    try:
        return train_together(trials, callbacks)
    except UserError as error:
        raise type(error)(f"In {stage}: {error}") from error
    finally:
        if display is not None:
            display.stage = ""
