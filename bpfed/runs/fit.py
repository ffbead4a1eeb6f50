"""Ways to make a run: `fit` trains one, `fit_seeds` several side by side; `train_runs` is what all commands call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bpfed import methods
from bpfed._util import text
from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError, quoted
from bpfed.callbacks import Callback
from bpfed.callbacks.progress import Progress
from bpfed.config.registry import PREFIX
from bpfed.config.schema import changed
from bpfed.config.settings import Settings
from bpfed.data.checks.clients import unscaled
from bpfed.data.datasets import load
from bpfed.data.federated import HELD, FederatedData, held_out, untested
from bpfed.data.tabular.frames import is_named, is_partitioned
from bpfed.engine.evaluate import sets_of
from bpfed.engine.federation import Federation, check_data
from bpfed.inference.calibration import fewest
from bpfed.inference.likelihoods import Likelihood, named
from bpfed.methods.base import Method
from bpfed.metrics import SURE
from bpfed.runs.folder import Folder
from bpfed.runs.pilot import check_selection, choose, choose_method, offers_choice, run_calibration_pilots
from bpfed.runs.run import Run, once, train_together


def fit(
    method: Method | str | None = None,
    data: FederatedData | str | Any = "digits",
    *,
    target: str | None = None,
    client_column: str | None = None,
    model: nn.Module | None = None,
    likelihood: Likelihood | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    back_to: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    settings: Settings | None = None,
    **changes: Any,
) -> Run:
    """Train a federation.

    Args:
        method: E.g. ``bpfed.methods.BPFed()``, the paper's, or the name of one, such as ``"fedavg"``, with its usual
            settings; None: ``bpfed.methods.Adaptive()`` for tables, with settings chosen from the data, and else that or
            ``bpfed.methods.Recipe()``, whichever is better on held-out training examples.
        data: A federated dataset, the name of one, or what else `bpfed.data.load` takes: ``folder:PATH``, a data frame, a
            dataset of Hugging Face, or a ``FederatedDataset`` of Flower Datasets.
        target: The column to predict, where the data are tables that are still to be loaded.
        client_column: The column that identifies the client, likewise.
        model: Any module; None: a network that suits the data. With ``members`` its weights are the first member's, and
            the others' are drawn by its layers' ``reset_parameters``.
        likelihood: None: that of the task, such as categorical for classes and Gaussian with learnt noise for numbers;
            an object or the name of one, also of another package.
        out: Run folder to keep everything in; None: nothing is written.
        resume: Resume the run in ``out``.
        overwrite: Replace the run in ``out``.
        back_to: With ``resume``, go on from the state after this round; those of the newest rounds are kept.
        callbacks: See `bpfed.callbacks`.
        progress: Whether to show it on stderr; None: on a terminal, if the run takes more than two seconds.
        say: Called with each message for the user; None: these go to stderr.
        settings: See `Settings`; single ones can be given by name, e.g. ``rounds=50, seed=0``.
    """
    settings = changed(settings or Settings(), changes)
    if back_to is not None and out is None:
        raise UserError("back_to needs the run folder, out, with resume=True.")
    folder = Folder(Path(out), resume, overwrite, back_to) if out is not None else None
    if isinstance(data, str) or is_named(data) or is_partitioned(data):
        data = load(data, target=target, client_column=client_column, seed=settings.seed)
    elif target is not None or client_column is not None:
        raise UserError("The data are loaded already; give target and client_column to bpfed.data.load.")
    display = (
        Progress(delay=0.0 if progress else 2.0) if progress or (progress is None and sys.stderr.isatty()) else None
    )
    own = [*([display] if display is not None else []), *callbacks]
    request = RunRequest(method, data, settings, model, likelihood, folder, own)
    try:
        return train_runs([request], say or to_stderr, display)[0]
    finally:
        if display is not None:
            display.close()


def fit_seeds(
    method: Method | str | None = None,
    data: FederatedData | str = "digits",
    seeds: int | Sequence[int] = 3,
    *,
    model: nn.Module | None = None,
    likelihood: Likelihood | str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    settings: Settings | None = None,
    say: Callable[[str], None] | None = None,
    **changes: Any,
) -> list[Run]:
    """Train the same federation with several seeds side by side, all their clients stacked along one axis.

    A named dataset is distributed again for each seed; a given one is the same for all. Each run is what `fit` would
    give for its seed, and its folder is ``out/seed-0`` and so on.

    Args:
        seeds: Which, or how many: 3 is 0, 1 and 2.

    For the other arguments see `fit`.
    """
    base = changed(settings or Settings(), changes)
    requests = []
    for seed in seeds_of(seeds):
        folder = Folder(Path(out) / f"seed-{seed}", resume, overwrite) if out is not None else None
        dealt = load(data, seed=seed) if isinstance(data, str) else data
        requests.append(RunRequest(method, dealt, replace(base, seed=seed), model, likelihood, folder))
    return train_runs(requests, once(say or to_stderr))


@dataclass(frozen=True)
class RunRequest:
    """A request to train a run; for attributes that are not listed see `fit`.

    Attributes:
        method: None: the usual one for these data.
        data: Loaded already.
        folder: Where the run is kept; None: nowhere.
        callbacks: Of this run, beside its folder.
        choose: Whether selection pilots choose what the method offers, if the settings do not turn that off.
    """

    method: Method | str | None
    data: FederatedData
    settings: Settings
    model: nn.Module | None = None
    likelihood: Likelihood | str | None = None
    folder: Folder | None = None
    callbacks: Sequence[Callback] = ()
    choose: bool = True


def train_runs(
    requests: Sequence[RunRequest],
    say: Callable[[str], None] = lambda sentence: None,
    display: Progress | None = None,
    **pilots: Any,
) -> list[Run]:
    """Prepare runs and train them side by side; `fit`, commands and comparisons all call this.

    Args:
        requests: Of one method, or of methods that can be stacked.
        say: Called with each message for the user.
        display: Shows the progress of pilots.
        pilots: How calibration pilots differ from the runs (see `run_calibration_pilots`).
    """
    return train_ready([get_ready(request, say, display) for request in requests], requests, display, **pilots)


def get_ready(
    request: RunRequest, say: Callable[[str], None] = lambda sentence: None, display: Progress | None = None
) -> Run:
    """A run before its first round: settings are chosen, everything is checked, nothing is written.

    For the arguments see `train_runs`.
    """
    data, folder = request.data, request.folder
    likelihood = likelihood_of(request.likelihood, data)
    method, settings = method_of(request.method, data), request.settings
    if request.choose:
        given = None if request.method is None else method
        method, settings = decided(given, data, settings, request.model, likelihood, folder, say, display)
    return prepare(method, data, settings, request.model, likelihood, folder, say)


def train_ready(
    runs: Sequence[Run],
    requests: Sequence[RunRequest],
    display: Progress | None = None,
    calibrated: Callable[[Run], None] = lambda run: None,
    **pilots: Any,
) -> list[Run]:
    """Train runs of `get_ready` side by side, calibration pilots first.

    Args:
        runs: One for each of ``requests``.
        calibrated: Called with each run after the calibration pilots.

    For the other arguments see `train_runs`.
    """
    # Seeds may have chosen different methods, which cannot be stacked.
    for kind in dict.fromkeys(type(run.federation.method) for run in runs):
        pairs = [(r, of) for r, of in zip(runs, requests, strict=True) if type(r.federation.method) is kind]
        alike = [run for run, _ in pairs]
        run_calibration_pilots(alike, [of.folder for _, of in pairs], display, **pilots)
        for run in alike:
            calibrated(run)
        train_together(alike, [[*([of.folder] if of.folder is not None else []), *of.callbacks] for _, of in pairs])
    return list(runs)


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """The seeds that are asked for; a number is how many, from 0."""
    try:
        chosen = [index(seed) for seed in (range(seeds) if isinstance(seeds, int) else seeds)]
    except TypeError:
        chosen = []
    if not chosen or len(set(chosen)) != len(chosen) or min(chosen) < 0:
        raise UserError(f"seeds is {seeds!r}, but must be at least one whole number, none below 0 and none twice.")
    return chosen


def method_of(method: Method | str | None, data: FederatedData | None = None) -> Method:
    """The method itself, or the one of that name with its usual settings.

    Where none is given it is `methods.Adaptive` for tables and other files of flat inputs, and else `methods.Recipe`, if
    pilots choose no other (`decided`).
    """
    if method is not None:
        return methods.as_method(method)
    if not isinstance(data, FederatedData):
        return methods.Recipe()
    return methods.Adaptive() if is_flat_file(data) else methods.Recipe()


def is_flat_file(data: FederatedData) -> bool:
    """Whether data are tables or other files of flat inputs, for which the method is always the same."""
    files = data.preprocessor is not None or data.name.startswith(PREFIX)
    return files and len(data.input_shape) == 1


def likelihood_of(likelihood: Likelihood | str | None, data: FederatedData) -> Likelihood | None:
    """The likelihood itself, or the one of that name; None: the usual one."""
    return named(likelihood, data.classes) if isinstance(likelihood, str) else likelihood


def decided(
    method: Method | None,
    data: FederatedData,
    settings: Settings,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    folder: Folder | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    display: Progress | None = None,
) -> tuple[Method, Settings]:
    """The method and settings of a run, after a choice on held-out data (`bpfed.runs.pilot`).

    The choice is between the settings that a method offers and, where no method is given and the data are no tables,
    between methods. A resumed run keeps its choice. For the arguments see `fit`.
    """
    usual = method_of(method, data)
    between = method is None and isinstance(data, FederatedData) and not is_flat_file(data) and settings.adapt == "auto"
    if not isinstance(usual, Method) or not (between or offers_choice(usual, settings)):
        return usual, settings  # what is no method is refused by `prepare`
    if folder is not None and folder.begun is not None:
        from bpfed.config.reader import read

        return read(folder.begun).method, replace(settings, adapt="off")
    check_selection(usual, settings)
    # Refuse what cannot be run before any pilot; only the run itself has a folder for states.
    prepare(usual, data, replace(settings, store="memory"), model, likelihood)
    chosen = replace(settings, adapt="off")
    if not between:
        choice = choose(usual, data, settings, model, likelihood, say, display)
        say(choice.words)
        return choice.method, chosen
    if why := _unchoosable(data, settings, model, likelihood):
        say(f"The method is {usual.name}, without a choice: {why}")
        return usual, chosen
    found = choose_method(data, settings, model, likelihood, say, display)
    say(found.words)
    return found.method, replace(chosen, members=settings.members or 1)  # as in the pilots, whichever it is


def _unchoosable(
    data: FederatedData, settings: Settings, model: nn.Module | None, likelihood: Likelihood | None
) -> str:
    """Why no method can be chosen on held-out training examples, in a sentence; empty: it can."""
    if settings.noise > 0.0:
        return "pilot runs on the same clients' data would not be counted in ε."
    if settings.rounds < 2:
        return "one round is too short for pilot runs."
    try:
        held_out(data, HELD, settings.seed)
        prepare(methods.Adaptive(), data, replace(settings, store="memory"), model, likelihood)
    except UserError as error:
        return str(error)
    return ""


def prepare(
    method: Method,
    data: FederatedData,
    settings: Settings,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    folder: Folder | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """A run before its first round: everything is checked, nothing is written. For the arguments see `fit`."""
    check_data(data)
    states = folder.states if folder is not None else None
    if not len(data.test.y):
        raise untested(data)
    run = Run(Federation.start(method, data, settings, model, likelihood, states), say)
    run.federation.learnt_temperature = folder.learnt if folder is not None else None
    if folder is not None:
        folder.check_pilots(run)
    network = run.federation.model
    scale = unscaled(data) if network.looked_up else ()  # the ids of words have no scale
    for note in (*network.notes, *(note for note in data.notes if note not in scale)):
        say(note)
    if doubt := data.task_type.doubt(data.train.y):
        say(doubt)
    for note in (*_participation_notes(run), *_calibration_notes(run)):
        say(note)
    return run


def _participation_notes(run: Run) -> list[str]:
    """A message on clients that no round will draw, which follows from the seed."""
    never = run.federation.never_drawn()
    if never is None or not len(never):
        return []
    names = quoted([run.data.clients[k] for k in never.tolist()])
    drawn = (
        f"{run.settings.per_round(len(run.data))} of {len(run.data)} clients in each of {run.settings.rounds} rounds"
    )
    verb = "is never drawn and keeps" if len(never) == 1 else "are never drawn and keep"
    return [
        f"With {drawn}, {text.many(len(never), 'client')} {verb} the first personal weights ({names}); raise --participants "
        "or --rounds."
    ]


def _calibration_notes(run: Run) -> list[str]:
    """What is to be known of the sets or intervals before training, in sentences."""
    held, least, kind = run.data.calibration, fewest(SURE), run.data.task_type.regions
    if held is None:
        return []
    sets, short = sets_of(run.settings, run.data), int((held.sizes < least).sum())
    few = text.few_calibration(short, len(run.data), least, kind) if short else ""
    if sets == "client":
        more = f"raise the setting calibration, use sets = 'pooled', or ask for {kind} at a lower level"
        return [f"{few}; {more}."] if short else []
    if sets == "pooled":
        borrow = f"{few}; their {kind} are calibrated with those of all clients too, and hold the truth as often on average over clients"
        return [f"{borrow}."] if short and len(run.data) > 1 else []
    counts = torch.bincount(held.y.cpu(), minlength=run.data.classes).tolist()
    rare = [name for name, n in zip(run.data.class_names, counts, strict=True) if n < least]
    if not rare:
        return []
    return [
        f"There are fewer than {least} calibration examples of {quoted(rare)}, so 90 % sets hold it always; raise the setting calibration."
    ]
