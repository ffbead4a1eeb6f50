"""Counts: whole numbers from 0, with a Poisson likelihood whose rate is the exponential of the network's output.

A prediction is a mixture of Poisson distributions, one for each draw of the weights (or for each point of a quadrature,
in a single pass). Its variance is the mean rate, which more data would not remove, and the variance of the rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Likelihood, check_one_output
from bpfed.inference.predictive import (
    How,
    Prediction,
    Predictive,
    Regressed,
    drawn,
    members,
    moments,
    posterior_outputs,
)
from bpfed.inference.tasks import Predicted, Scoring, TargetColumn, Task, mean_targets, no_label, written
from bpfed.metrics import Evaluation, Form, Sums
from bpfed.metrics.evaluation import binomial_deviation, counting, evaluation, nominal_levels, owners, summed, with_pool

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Outputs are held below this, a rate of some hundred million, so that no first step is infinite.
HIGHEST = 18.0
#: Counts above this are no whole numbers in float32.
LARGEST = 1 << 24
#: Mean of counts above which training, which starts at a rate of 1, comes near it slowly.
LARGE = 10.0
#: Points of the quadrature over Gaussian outputs.
POINTS = 32
#: The smallest mean that a deviance is computed at, so that none is infinite.
SMALLEST_RATE = 1e-6


@dataclass(frozen=True)
class Poisson:
    """A count; outputs are logarithms of its rate, ``[B, 1]`` (or ``[B]``)."""

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        log_rate = outputs.reshape(y.shape).clamp(max=HIGHEST)
        return torch.exp(log_rate) - y * log_rate + torch.lgamma(y + 1.0)

    def curvature(self, level: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.exp(level[..., 0].clamp(max=HIGHEST))

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "counts need")


#: Name of the parameter of `NegativeBinomial`.
DISPERSION = "likelihood.log_dispersion"


@dataclass(frozen=True)
class NegativeBinomial:
    """A count that varies more than a Poisson one: its variance is m + a m² for the mean m.

    Outputs are logarithms of the mean, ``[B, 1]`` (or ``[B]``); the logarithm of a is learnt,
    ``likelihood.log_dispersion``.

    Attributes:
        dispersion: a at the start.
    """

    dispersion: float = 0.5

    def parameters(self) -> dict[str, Tensor]:
        return {DISPERSION: torch.tensor([math.log(self.dispersion)])}

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        log_rate = outputs.reshape(y.shape).clamp(max=HIGHEST)
        return -_log_negative_binomial(y, log_rate, torch.exp(-parameters[DISPERSION].clamp(-12.0, 12.0)))

    def curvature(self, level: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        rate = torch.exp(level[..., 0].clamp(max=HIGHEST))
        return rate / (1.0 + rate * torch.exp(parameters[DISPERSION][..., 0].clamp(-12.0, 12.0)))

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "counts need")


def _log_negative_binomial(y: Tensor, log_rate: Tensor, size: Tensor) -> Tensor:
    """log p of counts with this mean and size (1/a): all broadcast."""
    log_size = size.log()
    total = torch.logaddexp(log_rate, log_size)
    start = torch.lgamma(y + size) - torch.lgamma(size) - torch.lgamma(y + 1.0)
    return start + size * (log_size - total) + y * (log_rate - total)


@dataclass(frozen=True)
class Counted(Regressed):
    """Predicted counts of B examples: a mixture of D Poisson distributions each.

    Attributes:
        rates: ``[..., B, D]`` float64.
        weights: Of the mixture, ``[..., B, D]`` float64; they sum to 1.
    """

    rates: Tensor = field(default_factory=lambda: torch.zeros(0))
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def of(cls, rates: Tensor, weights: Tensor) -> Counted:
        """The mixture with these rates and weights, ``[..., B, D]``."""
        mean = (weights * rates).sum(-1)
        spread = (weights * (rates - mean[..., None]).square()).sum(-1)
        return cls(mean.float(), spread.float(), mean.float(), rates=rates, weights=weights)

    def with_temperature(self, temperature: float) -> Self:
        raise UserError("Counts have no temperature; leave calibration temperature at 1.")

    def log_prob(self, y: Tensor) -> Tensor:
        """Logarithm of the probability of counts ``[..., B]``, float64."""
        y = y.double()[..., None]
        each = torch.xlogy(y, self.rates) - self.rates - torch.lgamma(y + 1.0)
        return torch.logsumexp(each + self.weights.log(), -1)

    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a count of at most ``y``, whole numbers ``[..., B]``, float64; 0 below 0."""
        y = y.double()[..., None]
        each = torch.special.gammaincc(y.clamp(min=0.0) + 1.0, self.rates)
        return torch.where(y[..., 0] < 0.0, 0.0, (self.weights * each).sum(-1).clamp(max=1.0))

    def quantile(self, level: float) -> Tensor:
        """The smallest count whose `cdf` is at least ``level``, above 0 and below 1, ``[..., B]`` float64."""
        low = torch.full_like(self.rates[..., 0], -1.0)
        high = self.rates.amax(-1).ceil() + 1.0
        while bool((short := self.cdf(high) < level).any()):
            high = torch.where(short, 2.0 * high, high)
        while bool((high - low > 1.0).any()):
            middle = ((low + high) / 2.0).floor()
            reached = self.cdf(middle) >= level
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Split-conformal intervals of whole numbers, ``[B]`` and ``[B]``, ends included; see `Regressed.interval`."""
        low, high = super().interval(level)
        return low.floor().clamp(min=0.0), high.ceil()


def predict_counts(
    model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
) -> Counted:
    """The mixture over weight draws; for the arguments see `bpfed.inference.predictive.classify`."""
    if how == "single-pass":
        nodes, shares = (torch.from_numpy(part).to(x.device) for part in np.polynomial.hermite_e.hermegauss(POINTS))
        parts = []
        for member in members(model, predictive):
            found = moments(model.one, member, x)
            mean = found.mean.reshape(inputs.first(x).shape[:2]).double()
            variance = torch.zeros_like(mean) if found.covariance is None else found.covariance.reshape(mean.shape)
            parts.append(mean[..., None] + variance.double().clamp(min=0.0).sqrt()[..., None] * nodes)
        outputs, weights = torch.cat(parts, -1), (shares / shares.sum() / len(parts)).repeat(len(parts))
    else:
        some = [out.reshape(len(out), *inputs.first(x).shape[:2]) for _, out in drawn(model, predictive, x, key, draws)]
        outputs = torch.cat(some).movedim(0, -1).double()
        weights = torch.full_like(outputs[0, 0], 1.0 / outputs.shape[-1])
    return Counted.of(outputs.clamp(max=HIGHEST).exp(), weights.expand_as(outputs))


def deviance(y: Tensor, mean: Tensor) -> Tensor:
    """Poisson deviance of counts at predicted means, ``[E]`` each: twice the log-likelihood that is lost to y = mean."""
    return 2.0 * (torch.xlogy(y, y / mean) - (y - mean))


@dataclass(frozen=True)
class Dispersed(Counted):
    """Predicted counts of B examples: a mixture of D negative binomial distributions each.

    Attributes:
        sizes: 1/a of each, ``[..., B, D]`` float64.
    """

    sizes: Tensor = field(default_factory=lambda: torch.zeros(0))

    @classmethod
    def mixed(cls, rates: Tensor, sizes: Tensor) -> Dispersed:
        """The mixture with these means and sizes, ``[..., B, D]``, all equally likely."""
        mean = rates.mean(-1)
        within = (rates + rates.square() / sizes).mean(-1)
        weights = torch.full_like(rates, 1.0 / rates.shape[-1])
        spread = rates.var(-1, correction=0)
        return cls(mean.float(), spread.float(), within.float(), rates=rates, weights=weights, sizes=sizes)

    def log_prob(self, y: Tensor) -> Tensor:
        each = _log_negative_binomial(y.double()[..., None], self.rates.log(), self.sizes)
        return torch.logsumexp(each + self.weights.log(), -1)

    def cdf(self, y: Tensor) -> Tensor:
        from scipy.special import betainc

        at = y.double()[..., None].clamp(min=0.0).cpu()
        sizes, rates = self.sizes.cpu(), self.rates.cpu()
        each = torch.as_tensor(betainc(sizes.numpy(), (at + 1.0).numpy(), (sizes / (sizes + rates)).numpy()))
        return torch.where(y < 0.0, 0.0, (self.weights * each.to(y.device)).sum(-1).clamp(max=1.0))


class Counts(Task):
    """Whole numbers from 0, such as events in a period."""

    name = "counts"
    residual_scores = True
    phrase = "counts"
    targets = "counts"
    likelihoods: ClassVar[type] = Poisson

    def likelihood(self, classes: int) -> Likelihood:
        return Poisson()

    def fault(self, y: Tensor, classes: int, where: str) -> str:
        bad = (y < 0) | (y != y.trunc()) | (y > LARGEST)
        if not bool(bad.any()):
            return ""
        return f"the target {float(y[bad][0]):g} {where}, but counts are whole numbers from 0 to {LARGEST}"

    def doubt(self, y: Tensor) -> str:
        mean = float(y.double().mean()) if len(y) else 0.0
        if mean <= LARGE:
            return ""
        return (
            f"The counts have a mean of {mean:.4g}, and training starts at a rate of 1, so it needs many rounds to come "
            "near; counts as large as these are better predicted with --task regression."
        )

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Counted:
        return predict_counts(model, predictive, x, key, draws, how)

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
        """Mean, predictive standard deviation, −log p, probability of fewer and of at most ``y``, ``[S, B]`` each."""
        found = self.predict(model, predictive, x, key, draws, how)
        return found.mean, found.scale, -found.log_prob(y), found.cdf(y - 1.0), found.cdf(y)

    def no_parts(self, classes: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(0, device=device),) * 5

    def conformal_scores(self, found: Predicted) -> Tensor:
        mean, scale, *_ = found.parts
        return (found.y - mean).abs() / scale

    @property
    def nll_range(self) -> tuple[float, float]:
        return 0.0, math.inf

    def example_nll(self, found: Predicted) -> Tensor | None:
        return found.parts[2]

    def score(self, found: Predicted, scoring: Scoring) -> Evaluation:
        """See `evaluate_counts`; without a model, the mean of a client's counts with half an event more."""
        mean, scale, nll, below, upto = found.parts
        train = scoring.train
        own = mean_targets(train) + 0.5 / train.sizes.clamp(min=1)  # so that no count is impossible
        baseline = own[scoring.clients].to(mean.device)[scoring.owner]
        interval: dict[str, Tensor] = {}
        if (bounds := scoring.bounds) is not None:
            half = bounds.bound * scale
            low, high = (mean - half).floor().clamp(min=0.0), (mean + half).ceil()
            interval = counting(
                {"coverage": (low <= found.y) & (found.y <= high), "interval_width": high - low}, bounds.finite
            )
        return evaluate_counts(
            mean, scale, nll, below, upto, found.y, found.offsets.to(mean.device), scoring.bins, baseline, interval
        )

    def form(self, classes: int, bins: int, calibrated: bool) -> Form:
        held = ("counted", "coverage", "interval_width") if calibrated else ()
        inside = tuple(f"inside_{k}" for k in range(len(nominal_levels(bins))))
        return Form(1, 1, ("deviance", "mean_deviance", "dispersion", *inside, *held), inside)

    def from_sums(self, sums: Sums, bins: int) -> Evaluation:
        """The metrics that these sums give."""
        total = with_pool(sums.cells)[0, :, 0]
        nominal = nominal_levels(bins).to(total.device)
        error, loss = with_pool(sums.losses) / total
        observed = torch.stack([sums.pooled(f"inside_{k}") for k in range(len(nominal))], -1) / total[:, None]
        values = {
            "deviance": sums.pooled("deviance") / total,
            "mae": error,
            "nll": loss,
            "ece": (observed - nominal).abs().mean(-1),
        }
        more = {name: sums.pooled(name) / total for name in ("mean_deviance", "dispersion")}
        floor = binomial_deviation(total[:, None], nominal).mean(-1) / total
        pooled = torch.stack([total[-1].expand_as(nominal), nominal, observed[-1]])
        return evaluation(values, floor, total, pooled, bins, sums, more | sums.shares())

    def columns(
        self, found: Prediction, target: TargetColumn, level: float, abstain: float | None
    ) -> dict[str, list[str]]:
        """Mean, standard deviation and its parts, quantiles of the model's interval, and the calibrated interval."""
        assert isinstance(found, Counted)
        no_label(abstain, self)
        columns = {name: written(part) for name, part in {"mean": found.mean, **found.deviations}.items()}
        for end in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
            columns[f"q({end:g})"] = [f"{count:.0f}" for count in found.quantile(end).tolist()]
        if found.scores is not None:
            ends = zip(("low", "high"), found.interval(level), strict=True)
            columns |= {f"{name}({level:g})": [f"{v:.0f}" for v in values.tolist()] for name, values in ends}
        return columns

    def tensors(self, found: Prediction, target: TargetColumn, level: float) -> dict[str, Tensor]:
        """Instead of quantiles, the mixture itself: rates (of a negative binomial also sizes) and weights, ``[B, D]``."""
        assert isinstance(found, Counted)
        made = {"mean": found.mean, **found.deviations, "rates": found.rates, "weights": found.weights}
        made |= {"sizes": found.sizes} if isinstance(found, Dispersed) else {}
        return made if found.scores is None else made | dict(zip(("low", "high"), found.interval(level), strict=True))


class NegativeBinomialCounts(Counts):
    """Whole numbers from 0 that vary more than Poisson counts do."""

    name = "negative-binomial"
    phrase = "overdispersed counts"
    likelihoods: ClassVar[type] = NegativeBinomial

    def likelihood(self, classes: int) -> Likelihood:
        return NegativeBinomial()

    def predict(
        self, model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
    ) -> Dispersed:
        values, parameters = posterior_outputs(model, predictive, x, key, draws, how)
        rates = values[..., 0].double().clamp(max=HIGHEST).exp().movedim(0, -1)
        sizes = torch.exp(-parameters[DISPERSION].double().clamp(-12.0, 12.0)).movedim(0, -1)  # [S, 1, D]
        return Dispersed.mixed(rates, sizes.expand_as(rates))


def evaluate_counts(
    mean: Tensor,
    scale: Tensor,
    nll: Tensor,
    below: Tensor,
    upto: Tensor,
    y: Tensor,
    offsets: Tensor,
    bins: int,
    baseline: Tensor,
    interval: dict[str, Tensor],
) -> Evaluation:
    """Score predicted counts.

    - deviance: the Poisson deviance at the predicted mean; mean_deviance: the same without a model;
    - mae: the mean absolute error of the predicted mean;
    - nll: nats per example;
    - dispersion: the mean of (y − mean)² over the predicted variance; above 1 counts vary more than predicted;
    - ece: the mean over nominal levels of |share of targets inside the central interval − level|. A count is spread
      evenly over the probability between that of fewer and that of at most as many, so that calibrated predictions have
      an ECE of 0 in expectation, though counts are discrete (Czado, Gneiting and Held 2009).

    Args:
        mean: Predicted mean, ``[E]``.
        scale: Predictive standard deviation, ``[E]``.
        nll: −log p of the target, ``[E]``.
        below: Predicted probability of fewer than ``y``, ``[E]``.
        upto: Predicted probability of at most ``y``, ``[E]``.
        y: Counts, ``[E]``.
        offsets: ``[N + 1]``; client i owns rows ``offsets[i]`` to ``offsets[i + 1]``.
        bins: Sets the levels, as in `bpfed.metrics.evaluate_regression`.
        baseline: Mean that would be predicted without a model, ``[E]``.
        interval: What `bpfed.metrics.evaluation.counting` gives of calibrated intervals; empty: there are none.
    """
    owner, clients = owners(offsets, y)
    y, mean, scale, below, upto = (part.double() for part in (y, mean, scale, below, upto))

    def share(u: Tensor) -> Tensor:
        """How much of a count's probability is below u, ``[E]``."""
        return ((u - below) / (upto - below).clamp(min=1e-300)).clamp(0.0, 1.0)

    further = {
        "deviance": deviance(y, mean.clamp(min=SMALLEST_RATE)),
        "mean_deviance": deviance(y, baseline.double()),
        "dispersion": ((y - mean) / scale).square(),
    }
    for k, level in enumerate(nominal_levels(bins).to(y.device)):
        further[f"inside_{k}"] = share((1.0 + level) / 2.0) - share((1.0 - level) / 2.0)
    further |= interval
    added = dict(zip(further, summed(list(further.values()), owner, clients), strict=True))
    cells = summed([torch.ones_like(y)], owner, clients).view(1, clients, 1)
    losses = summed([(y - mean).abs(), nll.double()], owner, clients)
    return Counts().from_sums(Sums(cells, losses, added), bins)
