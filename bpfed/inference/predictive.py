"""The posterior predictive: what a distribution over weights predicts for new inputs, and how sure it is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, get_args

import torch
from torch import Tensor
from torch.func import vmap

from bpfed._util.errors import UserError, unknown
from bpfed.inference import inputs, rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Heteroscedastic, Normal, Ordinal
from bpfed.inference.moment_propagation import Propagation
from bpfed.metrics.evaluation import SMALLEST
from bpfed.nn.kernels.conv import Convolutions

if TYPE_CHECKING:
    from bpfed.inference.calibration import Conformal
    from bpfed.nn.model import Model


class Predictive(Protocol):
    """A distribution over weights to predict with."""

    def draws(self, wanted: int) -> int:
        """How many draws there are to average when ``wanted`` are asked for."""
        ...

    def draw(self, key: Tensor, index: int) -> Tensor:
        """The weights of one draw, ``[S, P]``, from keys ``[S, 2]``."""
        ...


class GaussianPredictive(NamedTuple):
    """Independent Gaussian weights, ``[S, P]``."""

    weights: Gaussian

    def draws(self, wanted: int) -> int:
        return wanted

    def draw(self, key: Tensor, index: int | Tensor) -> Tensor:
        """One draw; of several at once, with ``index`` ``[D]`` int32, ``[D, S, P]``."""
        word = index if isinstance(index, int) else index[:, None]
        return self.weights.draw(rng.normal(rng.fold(key, word), self.weights.mean.shape[-1]))


class CorrelatedPredictive(NamedTuple):
    """Gaussian weights with all their correlations, w = mean + directions · ε with ε ~ N(0, I).

    Draws come in pairs of ε and −ε, so that their mean is the mean's.

    Attributes:
        mean: ``[S, P]``.
        directions: A root of the covariance, ``[S, P, R]``.
    """

    mean: Tensor
    directions: Tensor

    def draws(self, wanted: int) -> int:
        return wanted

    def draw(self, key: Tensor, index: int) -> Tensor:
        eps = rng.normal(rng.fold(key, index // 2), self.directions.shape[-1])
        moved = (self.directions @ eps[..., None])[..., 0]
        return self.mean - moved if index % 2 else self.mean + moved


class PointPredictive(NamedTuple):
    """One weight vector for each client, ``[S, P]``."""

    weights: Tensor

    def draws(self, wanted: int) -> int:
        return 1

    def draw(self, key: Tensor, index: int) -> Tensor:
        return self.weights


class FixedDraws(NamedTuple):
    """Draws that were made before, of one network; a prediction averages all of them.

    Attributes:
        weights: ``[D, S, P]``.
        looped: Whether the network runs for one draw after the other; else for all at once.
    """

    weights: Tensor
    looped: bool = False

    def draws(self, wanted: int) -> int:
        return len(self.weights)

    def draw(self, key: Tensor, index: int) -> Tensor:
        return self.weights[index]


class Mixture(NamedTuple):
    """What each member of a model has, as `members` gives it."""

    parts: tuple[Predictive, ...]

    def draws(self, wanted: int) -> int:
        return self.parts[0].draws(wanted)

    def draw(self, key: Tensor, index: int) -> Tensor:
        raise TypeError("A mixture is drawn from by its parts.")


def mean_weights(predictive: Predictive) -> Tensor | None:
    """The mean of the weights, ``[S, P]``; None where it is not known."""
    if isinstance(predictive, GaussianPredictive):
        return predictive.weights.mean
    if isinstance(predictive, CorrelatedPredictive):
        return predictive.mean
    return predictive.weights if isinstance(predictive, PointPredictive) else None


# --- Prediction in a single pass --------------------------------------------------------------------------------------
#
# Mean and covariance of the outputs under Gaussian weights, and their softmax.
#
# No weight is drawn: mean and variance of every unit are carried through the module
# (`bpfed.inference.moment_propagation`), with different
# units of a layer taken as independent. At the last linear layer the whole covariance of the outputs is kept. So the
# first two moments are exact for a network whose head alone is random (whatever its body does) and for one with one
# hidden ReLU layer; beyond that correlations between the units of a layer are lost.

#: Points at which the softmax of Gaussian outputs is averaged (a power of two).
POINTS = 64
#: Softmaxes held at a time, in numbers.
BLOCK = 1 << 17


class Moments(NamedTuple):
    """Gaussian outputs of S clients for B examples.

    Attributes:
        mean: ``[S, B, K]``.
        covariance: Between the outputs for one example, ``[S, B, K, K]``; None where nothing is random.
    """

    mean: Tensor
    covariance: Tensor | None


def moments(model: Model, predictive: Predictive, x: Inputs) -> Moments:
    """Mean and covariance of the network's outputs under Gaussian weights, in one pass.

    Args:
        model: On the device of the rest.
        predictive: Of S clients.
        x: ``[S, B, ...]``.

    Raises:
        UserError: The module does something there is no rule for, or the weights are not Gaussian.
    """
    if isinstance(predictive, PointPredictive):
        return Moments(model.stacked_outputs(predictive.weights, x), None)
    if isinstance(predictive, CorrelatedPredictive):  # of a network that is linear in its weights
        along = vmap(model.stacked_outputs, (2, None))(predictive.directions, x)  # [R, S, B, K]
        along = along.reshape(*along.shape[:3], -1).movedim(0, -1)
        return Moments(model.stacked_outputs(predictive.mean, x).flatten(2), along @ along.mT)
    if not isinstance(predictive, GaussianPredictive):
        raise UserError("The weights of this method are not Gaussian, so there is no single pass; use how='sample'.")
    mean, sigma = predictive.weights
    own = [n for n in model.layout.names if n not in model.likelihood.parameters()]
    random = model.random_names(sigma)
    if not random:
        return Moments(model.stacked_outputs(mean, x), None)

    def one(mean: Tensor, sigma: Tensor, x: Inputs) -> Moments:
        means, sigmas = model.layout.unflatten(mean), model.layout.unflatten(sigma)
        with Convolutions(), Propagation([(means[n], sigmas[n].square()) for n in random]) as propagation:
            outputs = model.call({n: means[n] for n in own}, x)
        return Moments(outputs.reshape(inputs.first(x).shape[0], -1), propagation.covariance(outputs))

    return Moments(*vmap(one)(mean, sigma, x))


def gaussian_softmax(found: Moments) -> tuple[Tensor, Tensor]:
    """Mean softmax of Gaussian outputs, and the mean entropy of the single softmaxes: ``[S, B, K]`` and ``[S, B]``.

    There is no closed form. A drawn output costs K numbers, not a pass through the network, so the mean is taken over
    `POINTS` points of a fixed low-discrepancy set, turned into N(mean, covariance) by a Cholesky factor.
    """
    if found.covariance is None:
        logp = torch.log_softmax(found.mean, -1)
        return logp.exp(), -(logp.exp() * logp).sum(-1)
    classes = found.mean.shape[-1]
    means, covariances = found.mean.reshape(-1, classes), found.covariance.reshape(-1, classes, classes)
    points = _points(classes).to(means.device).T
    probs, entropies = [], []
    rows = max(1, BLOCK // (POINTS * classes))
    blocks = [(means, covariances)]  # of any number of rows, where a graph is recorded
    if not torch.compiler.is_exporting():
        blocks = list(zip(means.split(rows), covariances.split(rows), strict=True))
    for mean, covariance in blocks:
        # A softmax does not see what all outputs have in common, and rounding may leave an eigenvalue just below zero.
        jitter = 1e-5 * covariance.diagonal(dim1=-2, dim2=-1).amax(-1) + 1e-12
        factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag_embed(jitter[:, None].expand_as(mean)))
        # [rows, K, POINTS]: one matrix product, and every later operation runs along the points.
        logits = (factor.reshape(-1, classes) @ points).unflatten(0, (-1, classes)).add_(mean[..., None])
        logits -= logits.amax(1, keepdim=True)
        weights = logits.exp()
        total = weights.sum(1)
        probs.append((weights / total[:, None]).mean(-1))
        entropies.append((total.log() - (weights * logits).sum(1) / total).mean(-1))
    return torch.cat(probs).reshape(found.mean.shape), torch.cat(entropies).reshape(found.mean.shape[:-1])


@cache
def _points(dimensions: int) -> Tensor:
    """Evenly spread points of a standard normal: scrambled Sobol points and their mirror images, ``[POINTS, K]``."""
    uniform = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=1).draw(POINTS // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform.clamp(1e-6, 1.0 - 1e-6))
    points = torch.cat([half, -half])
    return (points / points.square().mean(0).sqrt()).float()


#: ``sample``: averages over draws of all weights; ``single-pass``: Gaussian outputs, no draws (see
#: `bpfed.inference.predictive`).
How = Literal["sample", "single-pass"]
#: Draws are stacked into one call as long as their weights and inputs are at most this many numbers: on a CPU as many
#: as its caches hold, on a GPU enough to keep it busy.
STACKED = {"cpu": 1_000_000, "cuda": 100_000_000}


@dataclass(frozen=True)
class Prediction:
    """What is predicted for B examples (with a leading client axis where there is one), whatever the task.

    A subclass is a frozen dataclass of tensors.

    Attributes:
        scores: What bounds the conformal scores of the client; None if nothing does.
        unscored: Why it can have none, in words, if training with other settings would not help.
    """

    scores: Conformal | None = field(default=None, kw_only=True)
    unscored: str | None = field(default=None, kw_only=True)

    def with_scores(self, scores: Conformal | None, unscored: str | None) -> Self:
        """The same with conformal scores, or with the reason why there are none."""
        return replace(self, scores=scores, unscored=unscored)

    def with_temperature(self, temperature: float) -> Prediction:
        """The same with the run's common temperature."""
        raise NotImplementedError(f"{type(self).__name__} has no temperature")

    def with_client_temperature(self, temperature: float) -> Prediction:
        """The same with the client's own temperature, which conformal sets leave out; most tasks have none."""
        return self

    @property
    @abstractmethod
    def numbers(self) -> tuple[Tensor, ...]:
        """What must be finite, ``[..., B]`` each."""


@dataclass(frozen=True)
class Probabilities(Prediction):
    """Predicted probabilities of B examples, and how sure they are (with a leading client axis where there is one).

    Attributes:
        probs: Probabilities averaged over the weight draws, ``[..., B, K]``.
        entropy: Total uncertainty, the entropy of ``probs`` in nats, ``[..., B]``.
        aleatoric: What more data would not remove: the mean entropy of the single draws, ``[..., B]``.
    """

    probs: Tensor
    entropy: Tensor
    aleatoric: Tensor

    @property
    def epistemic(self) -> Tensor:
        """What more data would remove: the mutual information of target and weights, ``[..., B]``."""
        return (self.entropy - self.aleatoric).clamp(min=0.0)

    @property
    def uncertainties(self) -> dict[str, Tensor]:
        """The total uncertainty and its parts, by the name of their column, ``[..., B]`` each."""
        return {"total": self.entropy, "epistemic": self.epistemic, "aleatoric": self.aleatoric}

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.probs.sum(-1), self.entropy, self.aleatoric


@dataclass(frozen=True)
class Classified(Probabilities):
    """Predicted classes of B examples (with a leading client axis where there is one).

    Attributes:
        raw: ``probs`` before a temperature was applied; None if none was.
    """

    raw: Tensor | None = None

    @property
    def label(self) -> Tensor:
        """The most probable class, ``[..., B]``."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Its probability, ``[..., B]``."""
        return self.probs.amax(-1)

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Split-conformal sets: each holds the right label with probability of at least ``level``.

        That is so whether or not the model is any good, as long as new examples come from the same source as the
        calibration examples. For which examples it is so on average, the run's setting ``sets`` says:

        - ``client``: for those of the client. With too few calibration examples for the level (8 or fewer for 0.9) a
          set is every label.
        - ``pooled``: for those of all clients together. A client with many calibration examples comes near to its own.
        - ``class``: likewise for those of each class, by ranks, which are alike at clients where the model is right
          (`bpfed.inference.calibration.Ranks`). A class with too few calibration examples is in every set.

        A set may be empty: a model that is right more often than ``level`` reaches it without an answer to the strangest
        examples. Then no label is as probable as it usually is when it is right; leave such rows to a person.

        Returns:
            ``[B, K]`` bool.
        """
        if self.scores is None:
            raise uncalibrated("prediction sets", self.unscored)
        return (1.0 - (self.probs if self.raw is None else self.raw)).double() <= self.scores.bounds(level)

    def at(self, temperature: Tensor | float) -> Classified:
        """The same at a temperature (see `bpfed.inference.calibration`), with the same share of aleatoric uncertainty."""
        probs = tempered(self.probs, temperature)
        entropy = _entropy(probs)
        share = (self.aleatoric / self.entropy.clamp(min=1e-30)).clamp(0.0, 1.0)
        return replace(self, probs=probs, entropy=entropy, aleatoric=entropy * share, raw=self.probs)

    def with_temperature(self, temperature: float) -> Classified:
        return replace(self.at(temperature), raw=None)

    def with_client_temperature(self, temperature: float) -> Classified:
        return self.at(temperature)


@dataclass(frozen=True)
class Regressed(Prediction):
    """Predicted targets of B examples.

    Attributes:
        mean: ``[..., B]``.
        epistemic: Variance of the mean over the weight draws, ``[..., B]``.
        aleatoric: Variance of the noise, averaged over the weight draws, ``[..., B]``.
        nll: −log of the predictive density at the targets, if they were given, ``[..., B]``.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    nll: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """Predictive standard deviation, ``[..., B]``."""
        return (self.epistemic + self.aleatoric).sqrt()

    @property
    def deviations(self) -> dict[str, Tensor]:
        """The standard deviation and its parts, by the name of their column, ``[..., B]`` each."""
        return {"sd": self.scale, "epistemic": self.epistemic.sqrt(), "aleatoric": self.aleatoric.sqrt()}

    def at(self, scale_factor: float) -> Regressed:
        """The same with distributions that are wider by this factor, around the same means."""
        return replace(
            self, epistemic=scale_factor**2 * self.epistemic, aleatoric=scale_factor**2 * self.aleatoric, nll=None
        )

    def with_temperature(self, temperature: float) -> Regressed:
        return self.at(temperature)

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return self.mean, self.epistemic, self.aleatoric

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Split-conformal intervals, ``[B]`` and ``[B]``: see `Classified.prediction_set`.

        They are mean ± q · scale with one q for the client; with too few calibration examples they are infinite.
        """
        if self.scores is None:
            raise uncalibrated("intervals", self.unscored)
        half = self.scores.bound(level) * self.scale
        return self.mean - half, self.mean + half


def tempered(probs: Tensor, temperature: Tensor | float) -> Tensor:
    """p^(1/T) / Z, ``[..., K]``; a tensor of temperatures broadcasts against ``probs`` without its last axis."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        return probs
    t = torch.as_tensor(temperature, dtype=torch.float64, device=probs.device)
    logits = probs.double().clamp(min=SMALLEST).log() / t[..., None]
    return torch.where((t == 1.0)[..., None], probs, torch.softmax(logits, -1).to(probs.dtype))


def uncalibrated(what: str, why: str | None) -> UserError:
    """A `UserError` for sets or intervals of a prediction that is not calibrated."""
    if why is not None:
        return UserError(f"There are no {what}, since {why}.")
    return UserError(
        f"There are no {what}, since no examples were kept from training to calibrate predictions made in this way; "
        "train with calibration=0.2, and leave draws and how as they are."
    )


def check_how(how: str) -> None:
    """Raise a `UserError` unless there is such a way to predict."""
    if how not in get_args(How):
        raise unknown("way to predict", how, get_args(How))


def _entropy(probs: Tensor) -> Tensor:
    """In nats, ``[..., K]`` to ``[...]``. (``torch.special.entr`` would first have its GPU kernel compiled.)"""
    return 0.0 - torch.xlogy(probs, probs).sum(-1)


def classify(
    model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
) -> Classified:
    """Average the softmax over weight draws, each draw one coherent function for all examples.

    Args:
        model: On the device of the rest.
        predictive: Of S clients.
        x: ``[S, B, ...]``.
        key: ``[S, 2]``.
        draws: Number of draws (a point estimate uses one).
        how: ``single-pass``: the average is over Gaussian outputs instead, and no weight is drawn.
    """
    if isinstance(model.likelihood, Ordinal):
        values, parameters = posterior_outputs(model, predictive, x, key, draws, how)
        logp = model.likelihood.log_probs(values, parameters)
        probs = logp.exp().mean(0)
        return Classified(probs, _entropy(probs), -(logp.exp() * logp).sum(-1).mean(0))
    if how == "single-pass":
        single = [gaussian_softmax(moments(model.one, member, x)) for member in members(model, predictive)]
        probs, aleatoric = (torch.stack(parts).mean(0) for parts in zip(*single, strict=True))
        return Classified(probs, _entropy(probs), aleatoric)
    total: Tensor | float = 0.0
    entropy: Tensor | float = 0.0
    count = 0
    for _, outputs in drawn(model, predictive, x, key, draws):
        logp = torch.log_softmax(outputs, -1)
        p = logp.exp()
        total = total + p.sum(0)
        entropy = entropy - (p * logp).sum(-1).sum(0)
        count += len(outputs)
    assert isinstance(total, Tensor)
    assert isinstance(entropy, Tensor)
    probs = total / count
    return Classified(probs, _entropy(probs), entropy / count)


def members(model: Model, predictive: Predictive) -> list[Predictive]:
    """What each member of the model has of it."""
    if isinstance(predictive, Mixture):
        return list(predictive.parts)
    if model.members == 1:
        return [predictive]
    if isinstance(predictive, GaussianPredictive):
        parts = zip(*(model.layout.apart(t).unbind(-2) for t in predictive.weights), strict=True)
        return [GaussianPredictive(Gaussian(*part)) for part in parts]
    if isinstance(predictive, PointPredictive):
        return [PointPredictive(weights) for weights in model.layout.apart(predictive.weights).unbind(-2)]
    return [predictive]


def drawn(model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights ``[D, S, P]`` and outputs ``[D, S, B, ...]`` of some draws at a time, all draws in turn.

    There are ``draws`` of them, or as many as the predictive has; a draw is of one member's weights, and all members
    have equally many.
    """
    if isinstance(predictive, FixedDraws):
        weights, run = predictive.weights, model.one.stacked_outputs
        yield (
            weights,
            torch.stack([run(w, x) for w in weights]) if predictive.looped else vmap(run, (0, None))(weights, x),
        )
        return
    each = len(inputs.first(x)) * model.layout.total + inputs.numbers(x) * model.members
    stack = max(1, STACKED.get(key.device.type, STACKED["cpu"]) // each)
    for weights in drawn_weights(model, predictive, key, draws, stack):
        yield weights, vmap(model.one.stacked_outputs, (0, None))(weights, x)


def drawn_weights(model: Model, predictive: Predictive, key: Tensor, draws: int, stack: int) -> Iterator[Tensor]:
    """The weights of `drawn`, ``[D, S, P]`` of one network each, ``stack`` draws of all members at a time."""
    count = predictive.draws(-(-draws // model.members))
    for start in range(0, count, stack):
        some = range(start, min(start + stack, count))
        if isinstance(predictive, GaussianPredictive):
            weights = predictive.draw(key, torch.tensor(some, dtype=torch.int32, device=key.device))
        else:
            weights = torch.stack([predictive.draw(key, m) for m in some])
        yield model.layout.apart(weights).movedim(-2, 1).flatten(0, 1) if model.members > 1 else weights


class Outputs(NamedTuple):
    """What the posterior says of a network's outputs for B examples of S clients: D equally likely draws.

    Attributes:
        values: ``[D, S, B, K]``.
        parameters: Those of the likelihood, by name, ``[D, S, ...]`` each.
    """

    values: Tensor
    parameters: dict[str, Tensor]


def posterior_outputs(
    model: Model, predictive: Predictive, x: Inputs, key: Tensor, draws: int, how: How = "sample"
) -> Outputs:
    """Outputs and the likelihood's parameters over weight draws; for the arguments see `classify`.

    In a single pass, outputs are `POINTS` points of their Gaussian distribution, and parameters are at their mean.
    """
    names = list(model.likelihood.parameters())
    values: list[Tensor] = []
    parameters: dict[str, list[Tensor]] = {name: [] for name in names}
    if how == "single-pass":
        for member in members(model, predictive):
            found, mean = moments(model.one, member, x), mean_weights(member)
            values.append(_spread(found))
            own = vmap(model.one.layout.unflatten)(member.draw(key, 0) if mean is None else mean)
            for name in names:
                parameters[name].append(own[name].expand(len(values[-1]), *own[name].shape))
    else:
        for weights, outputs in drawn(model, predictive, x, key, draws):
            values.append(outputs.reshape(*outputs.shape[:3], -1))
            own = vmap(vmap(model.one.layout.unflatten))(weights) if names else {}
            for name in names:
                parameters[name].append(own[name])
    return Outputs(torch.cat(values), {name: torch.cat(parts) for name, parts in parameters.items()})


def _spread(found: Moments) -> Tensor:
    """Equally likely points of Gaussian outputs, ``[D, S, B, K]``; one where nothing is random."""
    mean = found.mean.flatten(2)
    if found.covariance is None:
        return mean[None]
    covariance = found.covariance
    jitter = 1e-5 * covariance.diagonal(dim1=-2, dim2=-1).amax(-1) + 1e-12
    factor, _ = torch.linalg.cholesky_ex(covariance + torch.diag_embed(jitter[..., None].expand_as(mean)))
    return mean + torch.einsum("sbkl,dl->dsbk", factor, _points(mean.shape[-1]).to(mean.device))


def regress(
    model: Model,
    predictive: Predictive,
    x: Inputs,
    key: Tensor,
    draws: int,
    y: Tensor | None = None,
    how: How = "sample",
    scale_factor: float = 1.0,
) -> Regressed:
    """Mean and variance over weight draws; arguments as `classify`.

    Args:
        y: Targets, ``[S, B]``; their predictive density is given if they are.
        calibration_temperature: Factor by which the predictive distribution is stretched around its mean.
    """
    likelihood = model.likelihood
    if isinstance(likelihood, Heteroscedastic):
        values = posterior_outputs(model, predictive, x, key, draws, how).values
        return _regressed(*likelihood.moments(values), y, scale_factor)
    assert isinstance(likelihood, Normal)
    if how == "single-pass":
        return _regress_at_once(model, likelihood, predictive, x, key, y, scale_factor)
    means, log_scales = [], []
    for weights, outputs in drawn(model, predictive, x, key, draws):
        out = outputs.reshape(len(weights), *inputs.first(x).shape[:2])
        parameters = vmap(vmap(model.one.layout.unflatten))(weights)
        log_scale = torch.as_tensor(likelihood.log_scale(parameters), device=out.device).expand(*out.shape[:2], 1)
        means.append(out)
        log_scales.append(log_scale.expand_as(out))
    return _regressed(torch.cat(means), torch.cat(log_scales), y, scale_factor)


def _regressed(stacked: Tensor, log_scale: Tensor, y: Tensor | None, scale_factor: float) -> Regressed:
    """The mixture of Gaussians with these means and logarithms of standard deviations, ``[D, S, B]`` each."""
    mean, noise = stacked.mean(0), torch.exp(2.0 * log_scale)
    found = Regressed(mean, stacked.var(0, correction=0), noise.mean(0)).at(scale_factor)
    if y is None:
        return found
    # Where the target is in the distribution before it is stretched.
    inside = y if scale_factor == 1.0 else mean + (y - mean) / scale_factor
    densities = -0.5 * ((inside - stacked).square() / noise + math.log(2.0 * math.pi)) - log_scale
    return replace(found, nll=math.log(scale_factor * len(stacked)) - torch.logsumexp(densities, 0))


def _regress_at_once(
    model: Model,
    likelihood: Normal,
    predictive: Predictive,
    x: Inputs,
    key: Tensor,
    y: Tensor | None,
    scale_factor: float,
) -> Regressed:
    """By moments; the predictive density is taken as Gaussian."""
    single = [_one_at_once(model.one, likelihood, member, x, key) for member in members(model, predictive)]
    means, epistemics, aleatorics = (torch.stack(parts) for parts in zip(*single, strict=True))
    mean, aleatoric = means.mean(0), aleatorics.mean(0)
    epistemic = epistemics.mean(0) + means.var(0, correction=0)
    found = Regressed(mean, epistemic, aleatoric).at(scale_factor)
    if y is None:
        return found
    variance = found.scale.square()
    return replace(found, nll=0.5 * ((y - mean).square() / variance + torch.log(2.0 * math.pi * variance)))


def _one_at_once(
    model: Model, likelihood: Normal, predictive: Predictive, x: Inputs, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, epistemic and aleatoric variance of one network, ``[S, B]`` each."""
    found = moments(model, predictive, x)
    mean = found.mean.reshape(inputs.first(x).shape[:2])
    epistemic = torch.zeros_like(mean) if found.covariance is None else found.covariance.reshape(mean.shape)
    if isinstance(predictive, GaussianPredictive):
        means, sigmas = (vmap(model.layout.unflatten)(t) for t in predictive.weights)
    else:
        means = vmap(model.layout.unflatten)(predictive.draw(key, 0))
        sigmas = {name: torch.zeros_like(t) for name, t in means.items()}
    log_scale = torch.as_tensor(likelihood.log_scale(means), device=mean.device).expand(len(mean), 1)
    spread = torch.as_tensor(likelihood.log_scale(sigmas) if likelihood.learnt else 0.0, device=mean.device)
    aleatoric = torch.exp(2.0 * (log_scale + spread.square())).expand_as(mean)  # the mean of a log-normal
    return mean, epistemic, aleatoric
