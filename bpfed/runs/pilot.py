"""Pilot runs: trainings on a part of every client's training examples before the run, scored on the rest.

There are two kinds, and no test example takes part in either.

- *Selection pilots* choose settings of the method (``adapt = "auto"``, `choose`), such as how much clients share, and for
  images and arrays the method itself where none is given (`choose_method`). They are shorter than the run.
- *Calibration pilots* fit the calibration temperature (``calibrate = "pilot:3"``, `run_calibration_pilots`). How
  confident a model should be depends on how noisy its targets are, which nobody knows before. A calibration pilot holds
  out a fifth of each client's training examples, trains on the others as the run will, and fits one number for all
  clients to its predictions of those held out: a temperature of class probabilities, or in regression a scale factor of
  predicted standard deviations (`bpfed.config.settings`). The run then trains on all examples and predicts with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bpfed._util import text
from bpfed._util.errors import Diverged, UserError
from bpfed._util.scores import student
from bpfed.callbacks import Callback
from bpfed.callbacks.progress import Progress
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE, Settings
from bpfed.data.federated import HELD, FederatedData, held_out
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Likelihood
from bpfed.methods.adaptive import ALONE, Adaptive
from bpfed.methods.base import Method
from bpfed.methods.recipe import Recipe
from bpfed.nn.networks import members_of
from bpfed.runs.folder import Folder
from bpfed.runs.metadata import uncertain
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
        folders: The runs' own, where calibration pilots are kept until a run begins, so that one that was broken off
            goes on. They are this process's own until their runs end, or something is raised here.
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
    """The calibration temperature that several cuts of the data agree on: their geometric mean, to four digits, and
    within bounds."""
    logs = [math.log(min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)) for temperature in fitted]
    return float(f"{math.exp(sum(logs) / len(logs)):.4g}")


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
        pilots = planned[0].run.settings.calibration_pilots
        display.stage = f"{stage} of {pilots}"
        # Each takes as long as the run; those that are trained side by side take as long as all of them.
        display.ahead = (
            (pilots - max(each.number for each in planned) + 1) * planned[0].run.settings.rounds / len(planned)
        )
        callbacks[0].append(display)
    try:
        return train_together(trials, callbacks)
    except UserError as error:
        raise type(error)(f"In {stage}: {error}") from error
    finally:
        if display is not None:
            display.stage, display.ahead = "", 0.0


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
# interval of the paired difference, with clients as units, and the difference is small. So few clients keep what is
# usual, and many clients, or a large difference, can choose anything, FedAvg and training alone included.

#: Training examples of all clients together up to which several parts are held out in turn, and how many.
FEW, FOLDS = 1_000, 3
#: The most that the score of a candidate may be above the best one's, in nats per example, however wide the interval of
#: the difference is: where a candidate fails at some clients, the interval is wide because of that.
TOLERATED = 0.05
#: A pilot has this share of the run's rounds, and at least so many.
SHARE, LEAST = 0.5, 10
#: Training examples of all clients together above which pilots that choose the method are shorter: those of settings and,
#: after them, those of the two methods; and their shares of the run's rounds up to there and beyond.
MANY, SHARES, SHORT_SHARES = 20_000, (SHARE, 1.0), (0.2, 0.5)

#: Weights of all candidates and clients together above which candidates are trained one after the other, not to hold the
#: states of all of them at once.
STACKED = 100_000_000


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
    def changed(self) -> dict[str, Any]:
        """The settings that were chosen, by name."""
        found: dict[str, Any] = {}
        for stage, at in zip(self.stages, self.chosen, strict=True):
            found |= stage[at].changed
        return found

    @property
    def scored(self) -> ScoredCandidate:
        """What was chosen in the last stage."""
        return self.stages[-1][self.chosen[-1]]

    @property
    def words(self) -> str:
        """A sentence on it."""
        named = ", ".join(f"{name} {value:g}" for name, value in self.changed.items())
        last = self.scored
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
    display: Progress | None = None,
) -> Choice:
    """Choose the settings that a method offers; for the arguments see `bpfed.fit`. ``display`` shows how far it is."""
    by_time = data.holdout is not None and data.holdout.ordered
    folds = selection_folds(int(data.train.sizes.sum()), by_time)
    how = selection_settings(settings)
    held_out(data, HELD, how.seed)  # or a sentence, where nothing can be held out
    # Where clients have three examples or fewer, later folds may be empty.
    parts = [part for part in data.folds(folds, HELD, how.seed) if len(part.test.y)]
    folds = len(parts)
    members = members_of(method, settings, flat=model is None and data.flat)
    count = candidate_count(method)
    say(
        f"Choosing between {count} settings on held-out training examples first, in pilot runs of {how.rounds} rounds. They "
        f"need about {count * folds * how.rounds / settings.rounds / members:.1f} times the computation of the run; --adapt off skips "
        "them."
    )
    shown = _SelectionDisplay(display, count * folds, members, settings) if display is not None else None
    try:
        return select(
            method,
            lambda places: score_methods(
                [with_candidates(method, place) for place in places], parts, how, model, likelihood, shown
            ),
        )
    finally:
        if display is not None:
            display.stage, display.ahead = "", 0.0


# --- The method itself ------------------------------------------------------------------------------------------------
#
# Where no method is given and the data are images, sequences or arrays, the recipe is compared with `Adaptive`. First,
# short pilots choose settings of `Adaptive`, fewer than for tables. Then both methods train for as long as the run, so that
# neither is judged by how fast it learns, and the better score decides: neither of them is the more usual one. If the run
# is calibrated, each is scored with the temperature that suits it best. A class that a client has one training example of
# is new to it where that example is held out, so new classes count as often as they are to be expected.


@dataclass(frozen=True)
class ForImages(Adaptive):
    """`Adaptive` with the step size and those candidates that images and arrays may need."""

    lr: float = 3e-3
    sigma_temperature: float = 1.0

    def candidates(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Two prior scales at a low temperature, then how far clients deviate."""
        return (
            tuple({"temperature": 0.3, "prior_scale": scale} for scale in (2.0, 4.0)),
            tuple(
                {"deviation": body, "head_deviation": head}
                for body, head in ((0.1, 0.3), (0.0, 0.1), (0.1, 1.0), (ALONE, ALONE))
            ),
        )


@dataclass(frozen=True)
class MethodChoice:
    """Which method was chosen, and from what.

    Attributes:
        tried: The recipe, and `Adaptive` with the settings chosen for it.
        chosen: Which of them.
        settings: How the settings of `Adaptive` were chosen; None: all its pilots diverged, and it is not among ``tried``.
    """

    tried: tuple[ScoredCandidate, ...]
    chosen: int
    settings: Choice | None

    @property
    def method(self) -> Method:
        """The method with the settings that were chosen."""
        return self.tried[self.chosen].method

    @property
    def words(self) -> str:
        """A sentence on it."""
        taken = self.tried[self.chosen]
        own = ", ".join(f"{name} {value:g}" for name, value in taken.changed.items())
        others = (one for at, one in enumerate(self.tried) if at != self.chosen and math.isfinite(one.nll))
        against = "".join(f" against {one.nll:.3f} of {one.method.name}" for one in others)
        return (
            f"Chosen on held-out training examples: {taken.method.name}{f' with {own}' if own else ''} (NLL {taken.nll:.3f}"
            f"{against}, on {taken.examples.sum():.0f} of them). To repeat the run without choosing again, use its "
            "config.toml."
        )


def choose_method(
    data: FederatedData,
    settings: Settings,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    display: Progress | None = None,
) -> MethodChoice:
    """Choose between the recipe and `Adaptive`, whose settings are chosen too; for the arguments see `choose`.

    One part of the examples is held out, however few there are: the run may have one network, and then each pilot costs
    as much.
    """
    plain, offering = Recipe(), ForImages()
    how = selection_settings(settings)
    short, long = (
        replace(how, rounds=rounds, eval_every=rounds)
        for rounds in method_rounds(int(data.train.sizes.sum()), settings.rounds)
    )
    parts, count = data.folds(1, HELD, short.seed), candidate_count(offering)
    cost = (count * short.rounds + 2 * long.rounds) / settings.rounds
    say(
        f"Choosing between {plain.name} and {offering.name} on held-out training examples first: {count} pilot runs of "
        f"{text.many(short.rounds, 'round')} for settings, then two of {long.rounds}. They need about {cost:.1f} times the computation "
        f"of a run with one network; --adapt off skips them and uses {plain.name}."
    )
    shown = _SelectionDisplay(display, count + 2, 1, settings) if display is not None else None

    def scored(methods: Sequence[Method], how: Settings, calibrated: bool = False) -> list[Scores]:
        return score_methods(methods, parts, how, model, likelihood, shown, calibrated)

    def final(method: Method, changed: dict[str, Any]) -> ScoredCandidate:
        return ScoredCandidate(method, changed, *scored([method], long, settings.calibration_pilots > 0)[0])

    try:
        choice = select(offering, lambda at: scored([with_candidates(offering, place) for place in at], short))
        flexible = Adaptive(**{field.name: getattr(choice.method, field.name) for field in fields(Adaptive)})
        tried = comparable([final(plain, {}), final(flexible, choice.changed)])
    except Diverged:
        return MethodChoice((ScoredCandidate(plain, {}, *scored([plain], long)[0]),), 0, None)
    finally:
        if display is not None:
            display.stage, display.ahead = "", 0.0
    return MethodChoice(tried, best(tried), choice)


def method_rounds(examples: int, rounds: int) -> tuple[int, int]:
    """Rounds of a pilot that chooses settings, and of one that chooses the method, before a run of at least two rounds.

    ``examples``: training examples of all clients together. All pilots need at most five times the computation of a run.
    """
    short, long = (int(share * rounds) for share in (SHARES if examples <= MANY else SHORT_SHARES))
    return max(1, short), max(1, long)


class _SelectionDisplay:
    """Says which of the selection pilots are trained, and what is still to come."""

    def __init__(self, display: Progress, total: int, members: int, settings: Settings) -> None:
        self.display, self.total, self.done = display, total, 0
        # Rounds of one member after all pilots: of the run, and of the calibration pilots before it.
        self.after = members * settings.rounds * (1 + settings.calibration_pilots)

    def begin(self, pilots: int, rounds: int) -> Callback:
        """So many are trained side by side."""
        first, last = self.done + 1, min(self.total, self.done + pilots)
        numbers = f"{first}" if first == last else f"{first}-{last}"
        self.display.stage = f"pilot {numbers} of {self.total}"
        self.display.ahead = ((self.total - last) * rounds + self.after) / pilots
        self.done = last
        return self.display


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

    Where no candidate has a number at all clients, those without one for the candidate that most have scored count
    nothing either, unless they are more than half: so no client alone can end a run.
    """
    sound = [one for one in tried if np.isfinite(one.sums).all()]
    if not sound:
        lost = min((~np.isfinite(one.sums) for one in tried), key=np.count_nonzero)
        if 2 * np.count_nonzero(lost) > np.count_nonzero(np.any([one.examples > 0 for one in tried], axis=0)):
            return tuple(tried)
        tried = [
            replace(one, sums=np.where(lost, 0.0, one.sums), examples=np.where(lost, 0.0, one.examples))
            for one in tried
        ]
        sound = [one for one in tried if np.isfinite(one.sums).all()]
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
    examples of a client are not independent, and of few clients a difference is often luck. A difference above
    `TOLERATED` counts in any case.
    """
    least = tried[best(tried)]
    within = (at for at, one in enumerate(tried) if one.nll <= least.nll + min(TOLERATED, _half_width(one, least)))
    return next(within, best(tried))


def _half_width(one: ScoredCandidate, other: ScoredCandidate) -> float:
    """Half the width of the 95 % interval of the difference of two scores."""
    if not (np.isfinite(one.sums).all() and np.isfinite(other.sums).all()):
        return 0.0
    difference = (one.sums - other.sums)[one.examples > 0]
    count = len(difference)
    if count < 2:
        return 0.0
    spread = math.sqrt(count / (count - 1) * float(((difference - difference.mean()) ** 2).sum()))
    return student(count - 1) * spread / float(one.examples.sum())


def score_methods(
    methods: Sequence[Method],
    parts: Sequence[FederatedData],
    settings: Settings,
    model: nn.Module | None,
    likelihood: Likelihood | None,
    display: _SelectionDisplay | None = None,
    calibrated: bool = False,
) -> list[Scores]:
    """How pilot runs of these methods did on each part of the data, all of them side by side.

    With ``calibrated`` each is scored with the calibration temperature that suits it best. Should one of them diverge,
    they are run one by one, to know which; its score is then infinite.
    """
    starts = [
        Federation.start(methods[0], part, replace(settings, seed=settings.seed + at), model, likelihood)
        for at, part in enumerate(parts)
    ]
    if len(methods) > 1 and len(methods) * len(starts[0]) * starts[0].model.layout.total > STACKED:
        return [score_methods([one], parts, settings, model, likelihood, display, calibrated)[0] for one in methods]
    try:
        return _trained(methods, starts, display, calibrated)
    except Diverged:
        if len(methods) == 1:
            return [Scores(np.full(len(parts[0]), math.inf), np.ones(len(parts[0])))]
        return [score_methods([one], parts, settings, model, likelihood, None, calibrated)[0] for one in methods]


def _trained(
    methods: Sequence[Method],
    starts: Sequence[Federation],
    display: _SelectionDisplay | None = None,
    calibrated: bool = False,
) -> list[Scores]:
    runs = [Run(Federation.of(one, of.data, of.settings, of.model)) for one in methods for of in starts]
    callbacks: list[list[Callback]] = [[] for _ in runs]
    if display is not None:
        callbacks[0].append(display.begin(len(runs), starts[0].settings.rounds))
    train_together(runs, callbacks)
    found = []
    for at in range(len(methods)):
        sums, sizes = np.zeros(len(starts[0])), np.zeros(len(starts[0]))
        for run in runs[at * len(starts) : (at + 1) * len(starts)]:
            assert run.evaluation is not None
            if calibrated:
                run.federation.learnt_temperature = common([run.detail()["fitted_temperature"]])
                run.evaluation = evaluate_clients(run.federation)
            evaluation, clients = run.evaluation  # clients without a held-out example are not among them
            count = np.asarray(evaluation.sizes, dtype=np.float64)
            sums[clients.numpy()] += np.asarray(evaluation.scores["nll"].clients) * count
            sizes[clients.numpy()] += count
        found.append(Scores(sums, sizes))
    return found
