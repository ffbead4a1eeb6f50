"""Settings chosen on training examples alone: each is trained on a part of them and scored on the rest.

No test example takes part.

Of every client's training examples a part is held out, several times, another part each time (*cuts*). All settings get
the same cuts, so that what they differ by is paired. Chosen is what has the lowest NLL on held-out examples, mean over
cuts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bpfed._util.errors import UserError, check_count, unknown
from bpfed.callbacks.progress import CellProgress
from bpfed.comparison.candidates import Candidate
from bpfed.comparison.record import Comparison, Difference, Vocabulary, difference
from bpfed.comparison.runner import displayed, run_cells
from bpfed.config.migrations import constant, recipe_with
from bpfed.config.schema import changed, fields_of
from bpfed.config.settings import HIDDEN, Settings
from bpfed.data.datasets import load
from bpfed.data.federated import HELD, FederatedData, held_out
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Likelihood
from bpfed.methods.base import Method
from bpfed.runs.fit import method_of
from bpfed.runs.pilot import common

#: How many cuts there are.
CUTS = 3
#: Temperatures that are tried where nothing is said. What is best depends on how noisy the labels are, and nobody knows
#: that before.
TEMPERATURES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
#: Settings of the run that can be tried, beside all of the method.
OF_RUN = ("hidden",)
#: The name of the method as it was given, which is always tried.
AS_IT_IS = "as-it-is"
#: What a tuning calls things.
WORDS = Vocabulary(
    kind="tuning",
    one="setting",
    time="cut",
    scored="held-out training examples",
    dealt="Cuts share most of their training examples and are not independent: the intervals are narrower than for "
    "data never seen.",
)

Grid = Mapping[str, Sequence[Any]]


class Trial(NamedTuple):
    """A method that is tried, and how it is run.

    Attributes:
        method: With the settings of the trial.
        settings: Of the run, likewise.
        changed: What differs from both as they were given.
        along: Those of them that only move along with another.
    """

    method: Method
    settings: Settings
    changed: dict[str, Any]
    along: tuple[str, ...] = ()

    @property
    def tried(self) -> dict[str, Any]:
        """What is tried."""
        return {name: value for name, value in self.changed.items() if name not in self.along}

    @property
    def title(self) -> str:
        """In words."""
        return worded(self.tried) or self.method.title


@dataclass(frozen=True, repr=False)
class Tuning:
    """What was tried, and what came of it.

    To train with what was best: ``bpfed.fit(found.method, data, calibration_temperature=found.calibration_temperature,
    hidden=found.hidden)``.

    Attributes:
        comparison: All trials, scored on held-out training examples; its seeds are the cuts.
        trials: By name; one that diverged is none of them.
    """

    comparison: Comparison
    trials: dict[str, Trial]

    def __repr__(self) -> str:
        return f"{repr(self.comparison)[:-1]}; best: {self.best}, calibration temperature {self.calibration_temperature:g}>"

    @property
    def best(self) -> str:
        """The name of the trial with the lowest NLL."""
        return self.comparison.ranking[0]

    @property
    def method(self) -> Method:
        """The method as it was best."""
        return self.trials[self.best].method

    @property
    def hidden(self) -> int | None:
        """Units in the hidden layer as it was best; None: nothing was said of them, and no other number was tried."""
        return self.trials[self.best].settings.hidden

    @property
    def calibration_temperature(self) -> float:
        """The calibration temperature at which its predictions suit the held-out targets best."""
        return common(
            run.evaluation.get("fitted_temperature", 1.0) for run in self.comparison.records[self.best].values()
        )

    @property
    def gain(self) -> float:
        """How much lower its NLL is than that of the method as it was given, in nats."""
        return self.comparison.mean(AS_IT_IS, "nll") - self.comparison.mean(self.best, "nll")

    def difference(self, name: str) -> Difference:
        """How the NLL that trials are ranked by, over all examples, differs from the method's as it is; paired by cut."""
        cuts = self.comparison.seeds
        ours, theirs = (
            {cut: {"all": nll} for cut, nll in zip(cuts, self.comparison.over_seeds(who, "nll"), strict=True)}
            for who in (name, AS_IT_IS)
        )
        return difference(ours, theirs)


def trials(method: Method, grid: Grid | None = None, settings: Settings | None = None) -> dict[str, Trial]:
    """What is tried, by name: the method as it is, and every combination in the grid, or temperatures without one.

    ``settings`` are those of the run as they are.

    Raises:
        UserError: The method has no such setting, or no temperature.
    """
    if not isinstance(method, Method):
        raise UserError(f"The method is {method!r}, but must be one such as bpfed.methods.Recipe().")
    own, how = fields_of(type(method)), settings or Settings()
    if grid is not None and "hidden" in grid and how.hidden is None:
        how = replace(how, hidden=HIDDEN)  # said, so that it is not tried twice
    found = {AS_IT_IS: Trial(method, how, {})}
    for values in _combinations(method, grid) if grid is not None else _ladder(method):
        of_method = {name: value for name, value in values.items() if name in own}
        of_run = {name: value for name, value in values.items() if name not in own}
        along = tuple(name for name in values if name != "temperature") if grid is None else ()
        trial = Trial(replace(method, **of_method), replace(how, **of_run), values, along)
        if all(trial[:2] != other[:2] for other in found.values()):
            found[_folder(values, found)] = trial
    return found


def _ladder(method: Method) -> list[dict[str, Any]]:
    """The temperatures, with what must move along."""
    if "temperature" not in fields_of(type(method)):
        raise UserError(
            f"{method.name} has no temperature, which is what is tried where nothing is said; name what to try, as in "
            "--grid lr=0.001,0.003,0.01."
        )
    return [method.at_temperature(t) for t in TEMPERATURES if t != method.settings()["temperature"]]


def _combinations(method: Method, grid: Grid) -> list[dict[str, Any]]:
    known = [*fields_of(type(method)), *OF_RUN]
    for name in grid:
        if name not in known and (why := constant(recipe_with(known), name)):
            raise UserError(why)
        if name not in known:
            raise unknown(f"setting of {method.name}", name, known)
        if isinstance(grid[name], str) or not isinstance(grid[name], Sequence):
            raise UserError(f"The grid has {grid[name]!r} for '{name}', but must have a list of values.")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def tune(
    method: Method | str | None = None,
    data: FederatedData | str = "digits",
    grid: Grid | None = None,
    *,
    cuts: int = CUTS,
    held: float = HELD,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    settings: Settings | None = None,
    **changes: Any,
) -> Tuning:
    """Choose settings of a method on held-out training examples.

    Args:
        method: Or the name of one; None: ``bpfed.methods.Recipe()``.
        data: A federated dataset or the name of one; its test examples take no part. Test what is chosen on this data,
            not on the same examples dealt out anew: those it was chosen on would be among the test examples.
        grid: Values to try by setting of the method, e.g. ``{"lr": [0.001, 0.01]}``, all combinations; None:
            temperatures. Of the run's settings ``hidden`` can be tried too.
        cuts: How often a part is held out.
        held: How large a part of each client's training examples.
        out: Folder to keep everything in; what is finished there is not run again. None: nothing is written.
        settings: See `Settings`; single ones can be given by name, e.g. ``rounds=30, seed=0``.

    For the other arguments see `bpfed.fit`.
    """
    how = changed(settings or Settings(), changes)
    tried = trials(method_of(method), grid, how)
    if isinstance(data, str):
        data = load(data, seed=how.seed)
    with displayed(progress, say) as (display, tell):
        return run_trials(
            tried,
            data,
            cuts,
            held,
            model=model,
            likelihood=likelihood,
            out=Path(out) if out is not None else None,
            display=display,
            say=tell,
        )


def run_trials(
    tried: Mapping[str, Trial],
    data: FederatedData,
    cuts: int,
    held: float,
    *,
    model: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    out: Path | None = None,
    display: CellProgress | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Tuning:
    """Run the trials of `trials` that are not finished; for the other arguments see `tune`."""
    check_count("cuts", cuts)
    if not 0.0 < held < 1.0:
        raise UserError(f"held is {held}, but must be between 0 and 1.")
    method, settings, *_ = tried[AS_IT_IS]
    # What cannot be trained is not tuned. (Each trial gets a folder of its own, if any; here there is none.)
    Federation.start(method, data, replace(settings, store="memory"), model, likelihood)
    if settings.noise > 0.0:
        say("Every trial spends privacy as well: the ε of a run with what is chosen leaves that out.")
    # What calibrates a finished model has no part in choosing it, and would need examples of its own.
    who = [
        Candidate(
            name,
            trial.title,
            trial.method,
            replace(
                trial.settings,
                calibration=0.0,
                scaling="none",
                calibration_temperature=1.0,
                calibrate="none",
                baselines="off",
            ),
        )
        for name, trial in tried.items()
    ]
    found = run_cells(
        who,
        lambda cut: held_out(data, held, cut),
        range(settings.seed, settings.seed + cuts),
        reference=AS_IT_IS,
        model=model,
        likelihood=likelihood,
        out=out,
        display=display,
        say=say,
        words=WORDS,
        spare=True,
    )
    return Tuning(found, {name: tried[name] for name in found.names})


def _folder(values: Mapping[str, Any], taken: Iterable[str]) -> str:
    """A name for a trial, also that of a folder, that is not taken."""
    name = re.sub(r"[^\w.,=+-]", "_", ",".join(f"{setting}={value}" for setting, value in values.items()))[:100]
    return next(free for n in itertools.count(1) if (free := name if n == 1 else f"{name}-{n}") not in taken)


def worded(settings: Mapping[str, Any]) -> str:
    """``lr 0.01, personal head``."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
