"""Time to event: how long until something happens, where for some only a time is known until which it has not.

The hazard at time t of an example with the network's output η is

    h(t) = exp(η + b(t)) · κ t^(κ − 1).

κ is a shape, and b is constant between the times `edges`: it starts at 0 and changes by a step at each of them. Shape and
steps are parameters of the likelihood. With all of them at 0 (κ = 1) the hazard is constant in time; with the shape
alone it is Weibull's. So all examples of a client have proportional hazards, as in Cox's model, and the baseline is
learnt with the weights: a batch is any set of rows, the likelihood is a sum over them, and nothing but weights is
exchanged. (Cox's partial likelihood compares each row with all others at risk, so it is no sum over rows.)

A target is one number: the time, with a minus sign where nothing had happened until then (censored). Times are in units
of their root mean square over all clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Likelihood, check_one_output
from bpfed.inference.predictive import How, Prediction, Predictive, posterior_outputs, uncalibrated
from bpfed.inference.tasks import Predicted, Scoring, TargetColumn, Task, no_label, written
from bpfed.metrics import Evaluation, Form, Sums
from bpfed.metrics.survival import evaluate_survival, form_of_times, from_sums

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Times at which the baseline hazard changes; as many as tenths of an exponential distribution, and one beyond.
STEPS = 10
#: Shorter times count as this one, so that no density is infinite.
SHORTEST = 1e-3
#: Outputs are held below this, so that no first step is infinite.
HIGHEST = 10.0
#: Names of the likelihood's parameters.
SHAPE, HAZARD_STEPS = "likelihood.log_shape", "likelihood.hazard_steps"


def edges(like: Tensor) -> Tensor:
    """Times at which the baseline hazard changes, ``[STEPS]``: the tenths of an exponential distribution, and 2.4."""
    tenths = torch.arange(1, STEPS, device=like.device, dtype=like.dtype) / STEPS
    return torch.cat([-torch.log1p(-tenths) / math.sqrt(2.0), torch.full_like(tenths[:1], 2.4)])


def time_grid(device: torch.device | str = "cpu") -> Tensor:
    """Times at which predicted survival is kept, ``[G]`` float64 from 0: closely up to 3, then up to 12."""
    near, far = torch.arange(0, 121) * 0.025, torch.arange(13, 49) * 0.25
    return torch.cat([near, far]).double().to(device)


def cumulative_baseline(t: Tensor, shape: Tensor, steps: Tensor) -> Tensor:
    """∫ exp(b) κ u^(κ − 1) du from 0 to times ``[..., B]``, given κ ``[...]`` and steps ``[..., STEPS]``."""
    ends = edges(steps)
    ends = torch.cat([torch.full_like(ends[:1], SHORTEST), ends])
    log_hazard = torch.cat([torch.zeros_like(steps[..., :1]), steps.cumsum(-1)], -1)
    after = torch.cat([ends[1:], torch.full_like(ends[:1], math.inf)])
    spent = torch.minimum(torch.maximum(t[..., None], ends), after)  # [..., B, STEPS + 1]
    power = shape[..., None, None]
    passed = torch.exp(power * spent.log()) - torch.exp(power * ends.log())
    # What is before the shortest time counts as if it were spent at the first hazard.
    first = torch.exp(power * torch.minimum(t, ends[0]).clamp(min=1e-12)[..., None].log())
    return (passed * log_hazard.exp()[..., None, :]).sum(-1) + first[..., 0]


def log_hazard_baseline(t: Tensor, shape: Tensor, steps: Tensor) -> Tensor:
    """log of the baseline hazard at times ``[..., B]``; as `cumulative_baseline`."""
    log_hazard = (steps[..., None, :] * (t[..., None] > edges(steps))).sum(-1)
    return log_hazard + shape[..., None].log() + (shape[..., None] - 1.0) * t.log()


@dataclass(frozen=True)
class ProportionalHazards:
    """A time to event; outputs are logarithms of the hazard relative to the baseline, ``[B, 1]`` (or ``[B]``)."""

    def parameters(self) -> dict[str, Tensor]:
        return {SHAPE: torch.zeros(1), HAZARD_STEPS: torch.zeros(STEPS)}

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        output = outputs.reshape(y.shape).clamp(max=HIGHEST)
        shape, steps = parameters[SHAPE][..., 0].exp(), parameters[HAZARD_STEPS]
        time, event = y.abs().clamp(min=SHORTEST), ~torch.signbit(y)
        hazard = output + log_hazard_baseline(time, shape, steps)
        return output.exp() * cumulative_baseline(time, shape, steps) - torch.where(event, hazard, 0.0)

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "time to event needs")


@dataclass(frozen=True)
class Survived(Prediction):
    """Predicted survival of B examples.

    Attributes:
        risk: Mean output, the logarithm of the hazard relative to the client's baseline, ``[..., B]``; high is early.
        spread: Its standard deviation over the weight draws, ``[..., B]``.
        survival: Probability that nothing has happened at each time of `time_grid`, ``[..., B, G]`` float32.
    """

    risk: Tensor
    spread: Tensor
    survival: Tensor

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.risk, self.spread, self.survival.sum(-1)

    def at(self, time: float) -> Tensor:
        """Survival at a time in units of training, ``[B]``, interpolated between those of the grid."""
        grid = time_grid().numpy()
        rows = self.survival.double().cpu().reshape(-1, len(grid)).numpy()
        found = np.array([np.interp(time, grid, row) for row in rows])
        return torch.from_numpy(found).reshape(self.survival.shape[:-1])

    def time_at(self, level: float) -> Tensor:
        """The time until which survival is above ``level``, in units of training, ``[B]``; infinite beyond the grid."""
        return crossing(self.survival, level)

    @property
    def median(self) -> Tensor:
        """The time that half of such examples outlast, ``[B]``; infinite where it is beyond the grid."""
        return self.time_at(0.5)

    def lower_bound(self, level: float = 0.9) -> Tensor:
        """A time that the observed one is not below with probability of at least ``level``, ``[B]``.

        Split-conformal (see `Classified.prediction_set`), for what is observed: the event, or the end of the follow-up
        if that is earlier. The event itself is later still, so the bound holds for it too. With too few calibration
        examples it is 0.
        """
        if self.scores is None:
            raise uncalibrated("lower bounds", self.unscored)
        return self.time_at(math.exp(-1.0 / max(self.scores.bound(level), 1e-12)))


def crossing(survival: Tensor, level: float) -> Tensor:
    """The first time at which survival ``[..., G]`` is at most ``level``, ``[...]`` float64, interpolated."""
    grid, falls = time_grid(survival.device), survival.double()
    below = falls <= level
    at = torch.where(below.any(-1), below.int().argmax(-1), 0).clamp(min=1)
    high, low = falls.gather(-1, at[..., None] - 1)[..., 0], falls.gather(-1, at[..., None])[..., 0]
    part = ((high - level) / (high - low).clamp(min=1e-12)).clamp(0.0, 1.0)
    found = grid[at - 1] + part * (grid[at] - grid[at - 1])
    return torch.where(below[..., 0], 0.0, torch.where(below.any(-1), found, math.inf))


class Survival(Task):
    """Time to event from two columns."""

    name = "survival"
    phrase = "a time to event"
    targets = "times to an event"
    likelihoods = ProportionalHazards
    packed_from = 2
    packed_hint = "--target TIME --event EVENT"

    def likelihood(self, classes: int) -> Likelihood:
        return ProportionalHazards()

    def packed(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Times and events (1) or their absence (0), ``[n, 2]``, as signed times."""
        return np.where(parts[:, 1] > 0.0, parts[:, 0], -parts[:, 0])

    def packing_fault(self, names: tuple[str, ...], parts: NDArray[np.float64]) -> str:
        if (parts[:, 0] < 0.0).any():
            row = int(np.flatnonzero(parts[:, 0] < 0.0)[0])
            return f"the time {parts[row, 0]:g} in row {row + 1} of its column '{names[0]}'; times must be 0 or more"
        return ""

    def scaling(self, mean: float, scale: float) -> tuple[float, float]:
        """Times are in units of their root mean square, which the signs do not change."""
        return 0.0, math.hypot(mean, scale)

    def doubt(self, y: Tensor) -> str:
        if not len(y) or not bool(torch.signbit(y).all()):
            return ""
        return "No training row has an event, so nothing can be learnt of when it happens; check the event column."

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Survived:
        return self._mixed(*self._drawn(model, predictive, x, key, draws, how))

    def _drawn(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs ``[D, S, B]``, shapes ``[D, S]`` and steps ``[D, S, STEPS]``, float64."""
        values, parameters = posterior_outputs(model, predictive, x, key, draws, how)
        return values[..., 0].double(), parameters[SHAPE][..., 0].double().exp(), parameters[HAZARD_STEPS].double()

    def _mixed(self, output: Tensor, shape: Tensor, steps: Tensor) -> Survived:
        grid = time_grid(output.device)
        baseline = cumulative_baseline(grid.expand(*shape.shape, -1), shape, steps)  # [D, S, G]
        total: Tensor | float = 0.0
        for hazard, own in zip(output.clamp(max=HIGHEST).exp(), baseline, strict=True):
            total = total + torch.exp(-hazard[..., None] * own[:, None])
        assert isinstance(total, Tensor)
        spread = output.var(0, correction=0).sqrt()
        return Survived(output.mean(0).float(), spread.float(), (total / len(output)).float())

    def parts(
        self,
        model: Model,
        predictive: Predictive,
        x: Inputs,
        y: Tensor,
        key: Tensor,
        draws: int,
        how: How,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """Risk, −log p of the target and survival at its time, ``[S, B]`` each; survival at `time_grid`, ``[S, B, G]``."""
        output, shape, steps = self._drawn(model, predictive, x, key, draws, how)
        found, output = self._mixed(output, shape, steps), output.clamp(max=HIGHEST)
        time = y.abs().double().clamp(min=SHORTEST).expand_as(output)
        spent = output.exp() * cumulative_baseline(time, shape, steps)
        hazard = torch.where(torch.signbit(y), 0.0, output + log_hazard_baseline(time, shape, steps))
        nll = math.log(len(output)) - torch.logsumexp(hazard - spent, 0)
        return found.risk, nll.float(), torch.exp(-spent).mean(0).float(), found.survival

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        empty = torch.zeros(0, device=device)
        return empty, empty, empty, torch.zeros(0, len(time_grid()), device=device)

    def conformal_scores(self, found: Predicted) -> Tensor:
        """One over the predicted cumulative hazard at the observed time: high for one that is early."""
        return _earliness(found.parts[2])

    def example_nll(self, found: Predicted) -> Tensor | None:
        return found.parts[1]

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """See `evaluate_survival`; without a model, the Kaplan-Meier curve of a client's own training examples."""
        train = scoring.train
        own = [train.client(c)[1] for c in scoring.clients.tolist()]
        reference = [part if len(part) else train.y for part in own]
        inside = finite = None
        risk, nll, at_time, survival = found.parts
        if (bounds := scoring.bounds) is not None:
            inside, finite = _earliness(at_time) <= bounds.bound, bounds.finite
        scored = evaluate_survival(
            risk,
            nll,
            at_time,
            survival,
            found.y,
            found.offsets,
            scoring.bins,
            time_grid(),
            reference,
            inside,
            finite,
        )
        return replace(scored, example_nll=nll.double)

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        return form_of_times(bins, calibrated)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        return from_sums(sums, bins)

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        """Risk and its spread, median survival, survival at three times (or those asked for), and the lower bound."""
        assert isinstance(found, Survived)
        no_label(abstain, self)
        times = target.times or tuple(_round(part * target.unit) for part in (0.25, 0.5, 1.0))
        if min(times) < 0.0:
            raise UserError(f"--times has {min(times):g}, but times must be 0 or more.")
        columns = {
            "risk": written(found.risk),
            "epistemic": written(found.spread),
            "median": written(found.median * target.unit),
        }
        columns |= {f"survival({time:g})": written(found.at(time / target.unit)) for time in times}
        if found.scores is not None:
            columns[f"low({level:g})"] = written(found.lower_bound(level) * target.unit)
        return columns

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        """Survival is at the times of `time_grid`, ``[B, G]``; ``times``, ``[G]``, are these in the tables' unit."""
        assert isinstance(found, Survived)
        made = {
            "risk": found.risk,
            "epistemic": found.spread,
            "median": found.median * target.unit,
            "survival": found.survival,
            "times": time_grid(found.risk.device) * target.unit,
        }
        return made if found.scores is None else made | {"low": found.lower_bound(level) * target.unit}


def _earliness(at_time: Tensor) -> Tensor:
    """1 / H for the survival exp(−H) at an observed time."""
    return (-at_time.clamp(1e-30, 1.0).log()).clamp(min=1e-12).reciprocal()


def _round(value: float) -> float:
    """The number with two digits."""
    return float(f"{value:.2g}")
