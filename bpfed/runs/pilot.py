"""Pilot runs: trainings on a part of every client's training examples before the run, scored on the rest.

There are two kinds, and no test example takes part in either.

- *Selection pilots* choose settings of the method (``adapt = "auto"``, `choose`), such as how much clients share. They
  are shorter than the run.
- *Calibration pilots* fit the calibration temperature (``calibrate = "pilot:3"``, `run_calibration_pilots`). How
  confident a model should be depends on how noisy its targets are, which nobody knows before. A calibration pilot holds
  out a fifth of each client's training examples, trains on the others as the run will, and fits one number for all
  clients to its predictions of those held out: a temperature of class probabilities, or in regression a scale factor of
  predicted standard deviations (`bpfed.config.settings`). The run then trains on all examples and predicts with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bpfed._util.errors import Diverged, UserError
from bpfed._util.scores import student
from bpfed.callbacks.base import Callback
from bpfed.callbacks.progress import Progress
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE, Settings
from bpfed.data import FederatedData
from bpfed.data.federated import HELD, held_out
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Likelihood
from bpfed.inference.tasks import get_task
from bpfed.methods.base import Method
from bpfed.nn.networks import members_of
from bpfed.report.record import temperature_name
from bpfed.runs.folder import Folder
from bpfed.runs.run import Run, train_together

#: Between the seeds of two calibration pilots of a run, so that they are none of another run's.
APART = 1_000_000


class PilotFolder(Folder):
    """Keeps a calibration pilot as long as it may have to go on; there is nothing to report of one."""

    def end(self, run: Run) -> None:
        """Nothing."""


class CalibrationPilot(NamedTuple):
    """A calibration pilot that is to be: of which run, whose folder is where, and its number, from 1."""

    run: Run
    folder: Folder | None
    number: int


def run_calibration_pilots(
    runs: Sequence[Run],
    folders: Sequence[Folder | None] | None = None,
    display: Progress | None = None,
    *,
    held: float = HELD,
    **changes: Any,
) -> None:
    """Learn the calibration temperature of the runs that ask for it and have none yet; none of them has begun.

    Args:
        runs: Of one method. On a GPU all their calibration pilots are trained side by side, elsewhere in turn.
        folders: The runs' own, where calibration pilots are kept until a run begins, so that one that was broken off goes on.
            They are this process's own until their runs end, or something is raised here.
        display: Shows how far they are.
        held: Part of each client's training examples that is held out.
        changes: Settings of calibration pilots that differ from the run's.
    """
    waiting = [pair for pair in zip(runs, folders or [None] * len(runs), strict=True) if pending(pair[0].federation)]
    try:
        _run_calibration_pilots(waiting, display, held, changes)
    except BaseException:
        for _, folder in waiting:
            if folder is not None:
                folder.release()
        raise


def _run_calibration_pilots(
    waiting: Sequence[tuple[Run, Folder | None]], display: Progress | None, held: float, changes: dict[str, Any]
) -> None:
    for run, folder in waiting:
        if folder is not None:
            folder.begin_pilots(run)
    found: dict[int, list[float]] = {id(run): [] for run, _ in waiting}
    seen = dict.fromkeys(found, 0)
    planned = [
        CalibrationPilot(run, folder, n)
        for run, folder in waiting
        for n in range(1, run.settings.calibration_pilots + 1)
    ]
    stacked = bool(planned) and planned[0].run.federation.device.type == "cuda"
    for together in [planned] if stacked else [[one] for one in planned]:
        for of, trial in zip(together, _train(together, display, held, changes), strict=True):
            of.run.seconds += trial.seconds
            found[id(of.run)].append(trial.detail()["fitted_temperature"])
            assert trial.evaluation is not None
            seen[id(of.run)] += trial.evaluation[0].sums.examples  # of those clients that are tested
    for run, _ in waiting:
        run.federation.learnt_temperature = common(found[id(run)])
        if sentence := uncertain(
            run.calibration_temperature, seen[id(run)], run.settings.calibration_pilots, run.data.task
        ):
            run.say(sentence)


def pending(federation: Federation) -> bool:
    """Whether a calibration temperature is still to be learnt."""
    return federation.settings.calibration_pilots > 0 and federation.learnt_temperature is None


def common(fitted: Iterable[float]) -> float:
    """The calibration temperature that several cuts of the data agree on: their geometric mean, to four digits, and within bounds."""
    logs = [math.log(min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)) for temperature in fitted]
    return float(f"{math.exp(sum(logs) / len(logs)):.4g}")


def uncertain(temperature: float, examples: int, pilots: int, task: str) -> str:
    """A sentence on a temperature that calibration pilots learnt from few held-out examples; empty: there are enough."""
    enough = get_task(task).enough
    if examples >= enough:
        return ""
    better = math.ceil(enough * pilots / examples)
    return (
        f"The {temperature_name(task)} of {temperature:.2f} is learnt from {examples} held-out examples, so it is uncertain; "
        f"calibrate = pilot:{better} would learn it from {enough}."
    )


def as_pilot(settings: Settings, number: int) -> Settings:
    """How a calibration pilot is run: as the run, but nothing is calibrated, and it is tested as seldom as can be."""
    plain = replace(settings, calibrate="none", scaling="none", calibration=0.0, baselines="off")
    return replace(plain, seed=settings.seed + APART * number, eval_every=settings.rounds)


def _train(
    planned: Sequence[CalibrationPilot], display: Progress | None, held: float, changes: dict[str, Any]
) -> list[Run]:
    """Calibration pilots, side by side."""
    trials, callbacks = [], []
    for each in planned:
        of, pilot_folder = each.run.federation, None
        if each.folder is not None:
            pilot_folder = PilotFolder(each.folder.pilots / str(each.number), resume=True)
        settings = replace(as_pilot(of.settings, each.number), **changes)
        data = replace(held_out(of.data, held, settings.seed), name=of.data.name)  # the display has little room
        states = pilot_folder.states if pilot_folder is not None else None
        trials.append(Run(Federation.of(of.method, data, settings, of.model, states)))
        own: list[Callback] = [pilot_folder] if pilot_folder is not None else []
        callbacks.append(own)
    stage = f"calibration pilot {', '.join(str(n) for n in sorted({each.number for each in planned}))}"
    if display is not None:
        display.stage = f"{stage} of {planned[0].run.settings.calibration_pilots}"
        callbacks[0].append(display)
    try:
        return train_together(trials, callbacks)
    except UserError as error:
        raise type(error)(f"In {stage}: {error}") from error
    finally:
        if display is not None:
            display.stage = ""


# --- Selection pilots -------------------------------------------------------------------------------------------------
#
# A method's settings chosen on held-out training examples before the run, in one command.
#
# Some methods offer candidates (`Method.candidates`): settings between which only the data can decide, such as how
# strong the prior is and how much clients share. A pilot run trains all candidates side by side, as rows of one batch,
# on four fifths of each client's training examples and for half the rounds, and scores each on the rest. No test
# example takes part. Of a federation only sums of held-out log scores per client are used.
#
# The choice is made in stages, so that it costs little. In each stage the candidates are in order, the plain Bayesian one
# or partial pooling first, and the first one is chosen that the data do not tell from the best: 0 is in the 95 %
# interval of the paired difference, with clients as units. So few clients keep what is usual, and many clients, or a
# large difference, can choose anything, FedAvg and training alone included.

#: Training examples of all clients together up to which several parts are held out in turn, and how many.
FEW, FOLDS = 1_000, 3
#: A pilot has this share of the run's rounds, and at least so many.
SHARE, LEAST = 0.5, 10


class Unscored(UserError):
    """No client has scored all candidates."""


class Scores(NamedTuple):
    """Held-out −log p of each client, summed over its held-out examples of all folds, ``[N]``; and how many those are."""

    sums: NDArray[np.float64]
    examples: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate and how it did.

    Attributes:
        method: With the settings of the candidate.
        changed: Those that make it one.
        sums: Held-out −log p of each client, summed over its held-out examples of all folds, ``[N]``.
        examples: How many those are, ``[N]``.
    """

    method: Method
    changed: dict[str, Any]
    sums: NDArray[np.float64]
    examples: NDArray[np.float64]

    @property
    def nll(self) -> float:
        """Per held-out example, in nats."""
        return float(self.sums.sum() / self.examples.sum())


@dataclass(frozen=True)
class Choice:
    """What was chosen, and from what.

    Attributes:
        method: The method with the settings that were chosen.
        stages: The candidates of each stage, in their order.
        chosen: Which of them was chosen, in each stage.
    """

    method: Method
    stages: tuple[tuple[ScoredCandidate, ...], ...]
    chosen: tuple[int, ...]

    @property
    def words(self) -> str:
        """A sentence on it."""
        settings: dict[str, Any] = {}
        for stage, at in zip(self.stages, self.chosen, strict=True):
            settings |= stage[at].changed
        named = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        last = self.stages[-1][self.chosen[-1]]
        return (
            f"Chosen on held-out training examples: {named} (NLL {last.nll:.3f} on {last.examples.sum():.0f} of them). "
            "To repeat the run without choosing again, use its config.toml."
        )


def offers_choice(method: Method, settings: Settings) -> bool:
    """Whether settings of the method are to be chosen in selection pilots."""
    return settings.adapt == "auto" and bool(method.candidates())


def check_selection(method: Method, settings: Settings) -> None:
    """Raise a `UserError` if settings are to be chosen and cannot be."""
    if settings.noise > 0.0 and offers_choice(method, settings):
        raise UserError(
            f"Pilot runs choose the settings of {method.name} from the same clients' data and are not counted in ε; set "
            "adapt = 'off' when noise is on."
        )


def selection_settings(settings: Settings, fold: int = 0) -> Settings:
    """How a selection pilot is run on a fold, from 0: as the run, but shorter and with one member."""
    rounds = min(settings.rounds, max(LEAST, math.ceil(SHARE * settings.rounds)))
    how = replace(as_pilot(settings, 1), rounds=rounds, eval_every=rounds, adapt="off", store="memory", members=1)
    return replace(how, seed=how.seed + fold)


def selection_folds(examples: int, by_time: bool) -> int:
    """On how many folds candidates are scored, given the training examples of all clients together."""
    return FOLDS if examples <= FEW and not by_time else 1  # by time all folds would be the same


def candidate_count(method: Method) -> int:
    """How many candidates are trained in all stages: of each further stage one is known already."""
    return sum(len(stage) for stage in method.candidates()) - len(method.candidates()) + 1


def with_candidates(method: Method, places: Sequence[int]) -> Method:
    """The method with a candidate of each of its first stages, given by its place in the stage."""
    made = method
    for offered, at in zip(method.candidates(), places, strict=False):
        made = replace(made, **dict[str, Any](offered[at]))
    return made


def choose(
    method: Method,
    data: FederatedData,
    settings: Settings,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Choice:
    """Choose the settings that a method offers; for the arguments see `bpfed.fit`."""
    by_time = data.holdout is not None and data.holdout.kind == "time"
    folds = selection_folds(int(data.train.sizes.sum()), by_time)
    how = selection_settings(settings)
    held_out(data, HELD, how.seed)  # or a sentence, where nothing can be held out
    parts = data.folds(folds, HELD, how.seed)
    members = members_of(method, settings, flat=model is None and data.flat)
    count = candidate_count(method)
    say(
        f"Choosing between {count} settings on held-out training examples first, in pilot runs of {how.rounds} rounds. They "
        f"need about {count * folds * how.rounds / settings.rounds / members:.1f} times the computation of the run; --adapt off skips "
        "them."
    )
    return select(
        method,
        lambda places: score_methods(
            [with_candidates(method, place) for place in places], parts, how, model, likelihood
        ),
    )


def select(method: Method, scored: Callable[[Sequence[tuple[int, ...]]], Sequence[Scores]]) -> Choice:
    """Choose stage by stage, the settings of earlier stages being as they were chosen.

    Args:
        method: Which offers candidates.
        scored: Trains candidates, given as in `with_candidates`, and scores them on what clients hold out.
    """
    base, stages, chosen = method, list[tuple[ScoredCandidate, ...]](), list[int]()
    known: dict[Method, Scores] = {}
    for offered in base.candidates():
        places = [(*chosen, at) for at in range(len(offered))]
        made = [with_candidates(base, place) for place in places]
        new = [at for at, one in enumerate(made) if one not in known]
        found = scored([places[at] for at in new])
        known |= dict(zip([made[at] for at in new], found, strict=True))
        tried = comparable(
            [ScoredCandidate(one, dict(own), *known[one]) for one, own in zip(made, offered, strict=True)]
        )
        at = first_not_worse(tried)
        if not math.isfinite(tried[at].nll):
            raise Diverged("All pilot runs diverged; lower the step size, method.lr, or look for extreme values.")
        method = tried[at].method
        stages.append(tried)
        chosen.append(at)
    return Choice(method, tuple(stages), tuple(chosen))


def comparable(tried: Sequence[ScoredCandidate]) -> tuple[ScoredCandidate, ...]:
    """The candidates by the clients that have scored each of them on the same number of examples; others count nothing.

    In a simulation these are all clients. In a deployment a site may be away when a candidate is scored. A candidate
    that diverged has no score of any client, and stays as it is.
    """
    sound = [one for one in tried if np.isfinite(one.sums).all()]
    if not sound:
        return tuple(tried)
    same = np.all([one.examples == sound[0].examples for one in sound], axis=0)
    if not (same & (sound[0].examples > 0)).any():
        raise Unscored(
            "No client has scored all candidates on held-out training examples, so nothing can be chosen; start again when "
            "all clients are there, or give the settings yourself and set adapt = 'off'."
        )
    return tuple(
        replace(one, sums=np.where(same, one.sums, 0.0), examples=np.where(same, one.examples, 0.0))
        if np.isfinite(one.sums).all()
        else one
        for one in tried
    )


def best(tried: Sequence[ScoredCandidate]) -> int:
    """The candidate with the best score."""
    return int(np.argmin([c.nll if math.isfinite(c.nll) else math.inf for c in tried]))


def first_not_worse(tried: Sequence[ScoredCandidate]) -> int:
    """The first candidate that the data do not tell from the best one.

    That is, 0 is in the 95 % interval of the difference of their scores, by Student's t with clients as units: the
    examples of a client are not independent, and of few clients a difference is often luck.
    """
    least = tried[best(tried)]
    within = (at for at, one in enumerate(tried) if one.nll <= least.nll + _half_width(one, least))
    return next(within, best(tried))


def _half_width(one: ScoredCandidate, other: ScoredCandidate) -> float:
    """Half the width of the 95 % interval of the difference of two scores."""
    difference = (one.sums - other.sums)[one.examples > 0]
    count = len(difference)
    if count < 2 or not np.isfinite(difference).all():
        return 0.0
    spread = math.sqrt(count / (count - 1) * float(((difference - difference.mean()) ** 2).sum()))
    return student(count - 1) * spread / float(one.examples.sum())


def score_methods(
    methods: Sequence[Method],
    parts: Sequence[FederatedData],
    settings: Settings,
    model: nn.Module | None,
    likelihood: Likelihood | None,
) -> list[Scores]:
    """How pilot runs of these methods did on each part of the data, all of them side by side.

    Should one of them diverge, they are run one by one, to know which; its score is then infinite.
    """
    starts = [
        Federation.start(methods[0], part, replace(settings, seed=settings.seed + at), model, likelihood)
        for at, part in enumerate(parts)
    ]
    try:
        return _trained(methods, starts)
    except Diverged:
        if len(methods) == 1:
            return [Scores(np.full(len(parts[0]), math.inf), np.ones(len(parts[0])))]
        return [score_methods([one], parts, settings, model, likelihood)[0] for one in methods]


def _trained(methods: Sequence[Method], starts: Sequence[Federation]) -> list[Scores]:
    runs = [Run(Federation.of(one, of.data, of.settings, of.model)) for one in methods for of in starts]
    train_together(runs, [[] for _ in runs])
    found = []
    for at in range(len(methods)):
        sums, sizes = np.zeros(len(starts[0])), np.zeros(len(starts[0]))
        for run in runs[at * len(starts) : (at + 1) * len(starts)]:
            assert run.evaluation is not None
            evaluation, clients = run.evaluation  # clients without a held-out example are not among them
            count = np.asarray(evaluation.sizes, dtype=np.float64)
            sums[clients.numpy()] += np.asarray(evaluation.scores["nll"].clients) * count
            sizes[clients.numpy()] += count
        found.append(Scores(sums, sizes))
    return found
