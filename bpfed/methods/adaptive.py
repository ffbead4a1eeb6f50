"""Adaptive: every weight has a shared part and a personal deviation, and a scale says how far clients deviate.

The weights of client i are

    w_i = θ + φ_i,    φ_i ~ N(0, τ² s²/fan-in),    θ ~ N(θ₀, s²/fan-in).

θ is shared by all clients and is a point; φ_i is personal and Gaussian. The paper splits the weights once and for all,
the last layer personal and the rest shared, and leaves open how to choose. Here the scale τ chooses, one for the last
layer (``head_deviation``) and one for all other layers (``deviation``). Every split is a corner of this family: τ = 0
everywhere is FedAvg, τ = ∞ everywhere is training alone, and τ = ∞ in the last layer with 0 elsewhere is FedPer.

A client minimises, at temperature T and over its n examples,

    −E log p(D | θ_i + φ_i) + T KL(q(φ_i) ‖ N(0, τ² s²/fan-in)) + (T/N) ‖θ_i − θ₀‖² fan-in/(2 s²)
    + n (ρ/2 ‖θ_i − θ‖² − ⟨λ_i, θ_i⟩)

in its own copy θ_i of θ and in the mean and σ of φ_i. The last line keeps copies from drifting apart. λ_i is the dual
variable of the constraint θ_i = θ, which the client updates after each round, λ_i ← λ_i − ρ (θ_i − θ), and the client
uploads θ_i − λ_i/ρ. The server's mean of the uploads is then the consensus step of ADMM (Boyd et al. 2011, section 7.1;
FedDyn, Acar et al. 2021, in federated learning), and the only fixed point is the optimum of the sum of all clients'
problems, as if their rows had been pooled. With ρ = 0 the copies are averaged as in FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bpfed.aggregate import weighted_mean
from bpfed.errors import UserError
from bpfed.estimators import Batch, check_estimator, data_term
from bpfed.factors import Personal as Split
from bpfed.gaussian import Gaussian, softplus, softplus_inverse
from bpfed.methods.base import ADAPT, Course, Finished, GaussianPredictive, Initial, Method, Weights
from bpfed.methods.variational import RHO_FLOOR, Memory
from bpfed.model import Model
from bpfed.optim import Adam, adam

#: Temperatures to choose from,
TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
#: and deviations of the body and the head: none is FedAvg, infinite ones are training alone.
DEVIATIONS = ((0.0, 0.0), (0.1, 0.1), (0.1, 0.3), (0.1, 1.0), (0.3, 3.0), (math.inf, math.inf))
#: σ of a deviation at the start, in units of its prior's.
START = 0.5


class Prior(NamedTuple):
    """Standard deviations of the priors at a client, ``[S, P]`` each.

    Attributes:
        shared: Of θ around θ₀; infinite where nothing is shared, so that θ is not learnt there.
        deviation: Of φ_i around 0; 0 where clients do not deviate.
        width: Of q(w_i), the width that its KL divergence pulls it to; 0 where weights are points.
    """

    shared: Tensor
    deviation: Tensor
    width: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        deviation: Mean of φ_i and σ of w_i, ``[S, P]``.
        dual: λ_i per example, ``[S, P]``.
        shared_memory: Adam's memory of θ_i.
        memory: Adam's memory of φ_i.
        steps: Number of steps taken, ``[S]``; without client axis a scalar.
    """

    deviation: Gaussian
    dual: Tensor
    shared_memory: Adam
    memory: Memory
    steps: Tensor


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        shared: θ_i, ``[S, P]``.
        mean: Of φ_i, ``[S, P]``.
        rho: σ of w_i is softplus ρ; −∞ where weights are points, ``[S, P]``.
        server: θ as the server sent it, ``[S, P]``.
        dual: λ_i, ``[S, P]``.
        centre: θ₀, ``[S, P]``.
        prior: Standard deviations of the priors.
        shared_memory: Adam's memory of θ_i.
        memory: Adam's memory of φ_i.
        steps: ``[S]``.
    """

    shared: Tensor
    mean: Tensor
    rho: Tensor
    server: Tensor
    dual: Tensor
    centre: Tensor
    prior: Prior
    shared_memory: Adam
    memory: Memory
    steps: Tensor


@dataclass(frozen=True)
class Adaptive(Method):
    """BPFed with a shared part and a personal deviation of every weight; scales say how much is shared.

    Attributes:
        personal: Always ``none``: every weight has a shared part.
        temperature: T, the weight of all prior terms; 1 is Bayes' rule, lower trusts the labels more.
        deviation: τ of all layers but the last; 0: they are the same for all clients, inf: nothing of them is shared.
        head_deviation: τ of the last layer.
        prior_scale: s, the prior's standard deviation of a unit's input.
        dual: ρ, how strongly a client's copy of the shared weights is held to the server's in a round, per example; 0
            averages the copies as FedAvg does.
        sigma: Whether deviations are Gaussian; without, they are points (MAP).
        estimator: See `bpfed.estimators`.
        draws: Weight draws in a step.
    """

    name: ClassVar[str] = "bpfed-adaptive"
    title: ClassVar[str] = "BPFed adaptive"
    paper: ClassVar[str] = "bpfed; the split that Chen et al. 2023 leave open"
    shared_words: ClassVar[str] = "one part of every weight"
    personal_words: ClassVar[str] = "a deviation of every weight"
    random_words: ClassVar[str] = "the deviations"
    schedule: ClassVar[str] = "cosine"
    numbers: ClassVar[tuple[str, ...]] = (
        "lr",
        "temperature",
        "deviation",
        "head_deviation",
        "prior_scale",
        "shared_width",
        "head_gain",
        "dual",
    )

    personal: Split = "none"
    lr: float = 3e-3
    temperature: float = 1.0
    deviation: float = 0.1
    head_deviation: float = 0.3
    prior_scale: float = 1.0
    shared_width: float = 0.0
    head_gain: float = 0.0
    dual: float = 1.0
    sigma: bool = True
    estimator: str = "local"
    draws: int = 1

    def check(self) -> None:
        super().check()
        check_estimator(self.estimator)
        self.require(
            temperature="0 or more",
            deviation="0 or more",
            head_deviation="0 or more",
            prior_scale="above 0",
            dual="0 or more",
            draws="at least 1",
        )
        if self.personal != "none":
            raise UserError(
                f"personal is '{self.personal}', but in {self.title} every weight has a shared part; leave it at "
                "'none' and say by deviation and head_deviation how far clients may deviate."
            )

    def candidates(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Temperatures, then how far clients deviate, from FedAvg to training alone; nothing where one of it is said."""
        usual = type(self)()
        if any(getattr(self, name) != getattr(usual, name) for name in ("temperature", "deviation", "head_deviation")):
            return ()
        return (
            tuple({"temperature": t} for t in TEMPERATURES),
            tuple({"deviation": body, "head_deviation": head} for body, head in DEVIATIONS),
        )

    def hyper(self) -> dict[str, float]:
        return {**super().hyper(), "share": 1.0}

    def hyper_in(self, course: Course, sizes: Tensor) -> dict[str, Tensor]:
        """The prior of θ is one for all clients: each has an equal share of it."""
        return {**super().hyper_in(course, sizes), "share": torch.full((len(sizes),), 1.0 / course.clients)}

    def init(self, model: Model) -> Initial:
        prior = self._prior(model, self.rows_of_numbers(1, model.initial.device))
        nothing, empty = torch.zeros_like(model.initial), Adam.like(model.initial)
        deviation = Gaussian(nothing, START * prior.width[0])
        kept = Personal(deviation, nothing, empty, Memory(empty, empty), model.initial.new_zeros(()))
        return Initial(Weights(model.initial), kept)

    def newcomer(self, model: Model, shared: Weights) -> Personal:
        """Its deviation is as the prior says."""
        start = self.init(model).personal
        return start._replace(deviation=start.deviation._replace(sigma=start.deviation.sigma / START))

    def begin(self, model: Model, shared: Weights, personal: Personal, hyper: dict[str, Tensor]) -> Local:
        return Local(
            shared.weights,
            personal.deviation.mean,
            softplus_inverse(personal.deviation.sigma),
            shared.weights,
            personal.dual,
            torch.where(_head(model), hyper["head_gain"][:, None], 1.0) * model.initial,
            self._prior(model, hyper),
            personal.shared_memory,
            personal.memory,
            personal.steps,
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hyper: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps, rate, size = local.steps + 1, hyper["lr"], batch.size[:, None]
        temperature, dual = hyper["temperature"][:, None], hyper["dual"][:, None]
        prior, sigma = local.prior, softplus(local.rho)
        data = data_term(self.estimator, self.draws, model, Gaussian(local.shared + local.mean, sigma), batch)

        deviates = prior.deviation > 0.0
        precision = torch.where(deviates, prior.deviation, 1.0).square().reciprocal()
        mean = torch.where(deviates, data.mean + temperature * precision * local.mean, 0.0)
        new_mean, mean_memory = adam(local.mean, mean, local.memory.mean, steps, rate)
        new_rho, rho_memory = local.rho, local.memory.rho
        if self.sigma:
            random = prior.width > 0.0
            precision = torch.where(random, prior.width, 1.0).square().reciprocal()
            width = data.sigma + temperature * (precision * sigma - torch.where(random, sigma, 1.0).reciprocal())
            width = torch.where(random, width * torch.sigmoid(local.rho), 0.0)
            new_rho, rho_memory = adam(local.rho, width, local.memory.rho, steps, rate)
            new_rho = torch.maximum(new_rho, local.rho.clamp(max=RHO_FLOOR))
        new = local._replace(mean=new_mean, rho=new_rho, memory=Memory(mean_memory, rho_memory), steps=steps)
        if phase == ADAPT:
            return new, data.nll

        pull = temperature * hyper["share"][:, None] * prior.shared.square().reciprocal() * (local.shared - local.centre)
        gradient = data.mean + pull + size * (dual * (local.shared - local.server) - local.dual)
        gradient = torch.where(prior.shared.isfinite(), gradient, 0.0)
        shared, memory = adam(local.shared, gradient, local.shared_memory, steps, rate)
        return new._replace(shared=shared, shared_memory=memory), data.nll

    def finish(self, model: Model, local: Local, hyper: dict[str, Tensor]) -> Finished:
        rho = hyper["dual"][:, None]
        dual = local.dual - rho * (local.shared - local.server)
        upload = local.shared - torch.where(rho > 0.0, dual / rho.clamp(min=1e-30), 0.0)
        kept = Personal(
            Gaussian(local.mean, softplus(local.rho)), dual, local.shared_memory, local.memory, local.steps
        )
        return Finished(Weights(upload), kept, {})

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: Personal) -> GaussianPredictive:
        return GaussianPredictive(Gaussian(shared.weights + personal.deviation.mean, personal.deviation.sigma))

    def _prior(self, model: Model, hyper: dict[str, Tensor]) -> Prior:
        """The priors' standard deviations; that of a unit's input is s, so that of a weight s/√fan-in."""
        unit = hyper["prior_scale"][:, None] * _fan_in(model).rsqrt()
        tau = torch.where(_head(model), hyper["head_deviation"][:, None], hyper["deviation"][:, None])
        pooled = tau.isfinite()
        tau = torch.where(pooled, tau, 1.0)
        spread = (tau.square() + torch.where(pooled, hyper["shared_width"][:, None], 0.0).square()).sqrt()
        width = spread * unit if self.sigma else torch.zeros_like(unit)
        return Prior(torch.where(pooled, unit, math.inf), tau * unit, width)


def _head(model: Model) -> Tensor:
    """Which weights belong to the last layer or to the likelihood, ``[P]`` bool."""
    head = {*model.head, *model.likelihood.parameters()}
    return _each(model, [float(name in head) for name in model.factors.names]) > 0.0


def _fan_in(model: Model) -> Tensor:
    """Inputs of a unit; 1 for a bias of the outputs and for what the likelihood learns, ``[P]``."""
    units = model.likelihood.parameters()
    ones = _each(model, [float(name == model.levels or name in units) for name in model.factors.names])
    return torch.where(ones > 0.0, 1.0, model.factors.fan_in().to(model.initial.device))


def _each(model: Model, values: list[Any]) -> Tensor:
    """A value for each parameter as one for each weight, ``[P]``."""
    sizes = torch.tensor(model.factors.sizes)
    return torch.tensor(values).repeat_interleave(sizes).to(model.initial.device)
