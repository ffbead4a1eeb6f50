"""Adaptive: every weight has a shared part and a personal deviation, and a scale says how far clients deviate.

The weights of client i are

    w_i = θ + φ_i,    φ_i ~ N(0, τ² s²/fan-in),    θ ~ N(θ₀, s²/fan-in).

θ is shared by all clients, φ_i is the client's own, and θ₀ are the first weights of the network. The paper splits the
weights once and for all, the last layer personal and the rest shared, and leaves open how to choose. Here the scale τ
chooses, one for the last layer (``head_deviation``) and one for all other layers (``deviation``). Every split is a
corner of this family: τ = 0 everywhere is FedAvg, τ = ∞ everywhere is training alone, and τ = ∞ in the last layer with 0
elsewhere is FedPer (100 stands for ∞). How frequent a class is, or how high a target, differs between clients more than
what it depends on: the biases of the outputs have s = 1, and their deviations the standard deviation √τ.

The posterior of w_i is Gaussian, q(w_i) = N(θ + m_i, σ_i²). A client minimises, at temperature T and over its n
examples,

    −E_q log p(D | w_i) + T ‖m_i‖² fan-in/(2 τ² s²) + (T/N) ‖θ_i − θ₀‖² fan-in/(2 s²)                       (means)
    + κ T c KL(σ_i ‖ s √(1 + τ²)/√fan-in),    c = (τ² + 1/N)/(τ² + 1)                                       (widths)
    + n (ρ/2 ‖θ_i − θ‖² − ⟨λ_i, θ_i⟩)                                                                       (consensus)

in its own copy θ_i of θ, in m_i and in σ_i; KL(σ ‖ v) = σ²/(2 v²) − log σ. A weight that all N clients share is known
from all their examples, so a client counts 1/N of the divergence of its width, and of a weight of its own all of it; c
is between the two. (With equal curvature at all clients, τ = 0 and κ = 1 this is the width of the pooled posterior.) A
posterior that takes weights for independent overstates the variance of predictions where there are more weights than
examples: each weight adds its own, though examples can only leave as many directions uncertain as they determine. In
regression the learnt noise then grows with it. So widths have a temperature of their own, κ T with κ < 1.

Weights of low-rank adapters (LoRA) are points, with a prior of their own: there are often more of them than examples,
draws of them add noise to every step, and a prior as narrow as that of other weights holds them at their first values.

The last line keeps copies from drifting apart. λ_i is the dual variable of the constraint θ_i = θ, which the client
updates after each round, λ_i ← λ_i − ρ (θ_i − θ), and the client uploads θ_i − λ_i/ρ. The server's mean of the uploads
is then the consensus step of ADMM (Boyd et al. 2011, section 7.1; FedDyn, Acar et al. 2021, in federated learning), and
the only fixed point is the optimum of the sum of all clients' problems, as if their rows had been pooled. That holds if
all clients take part in every round. Where they do not, ρ is 0, and copies are averaged as in FedAvg. How fast copies
agree depends on ρ alone. It has to be as large as the curvature of an example's loss, which for numbers is 1/noise² and
for counts their mean; θ says how large these are, so that ρ is the same at all clients (`Curved`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference import estimators
from bpfed.inference.estimators import Batch
from bpfed.inference.gaussian import Gaussian, softplus, softplus_inverse
from bpfed.inference.likelihoods import Curved
from bpfed.inference.optim import ADAM, Adam
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import ADAPT, Finished, Initial, Method, RunShape, Weights
from bpfed.methods.variational import NOISE_SIGMA, RHO_FLOOR, Memory
from bpfed.nn.parameters import Personal as Split

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Temperatures and prior scales to choose from, Bayes' rule with a unit prior first, those for targets with hardly any
#: noise last,
PRIORS = ((1.0, 1.0), (1.0, 0.5), (0.3, 2.0), (0.1, 4.0), (0.01, 4.0))
#: and deviations of the body and the head, partial pooling first; none is FedAvg, and ``ALONE`` is training alone.
ALONE = 100.0
DEVIATIONS = ((0.1, 0.3), (0.0, 0.1), (0.1, 1.0), (0.3, 3.0), (0.0, 0.0), (ALONE, ALONE))
#: σ of a weight at the start, in units of its prior's.
START = 0.2
#: Standard deviation of the prior of adapters' weights (`bpfed.nn.model.Model.adapters`), in units of that of others.
ADAPTERS = 4.0


class Prior(NamedTuple):
    """Standard deviations of the priors at a client, ``[S, P]`` each.

    Attributes:
        shared: Of θ around θ₀; infinite where nothing is shared, so that θ is not learnt there.
        deviation: Of φ_i around 0; 0 where clients do not deviate.
        width: Of w_i; 0 where weights are points.
        part: c, how much of the divergence of the widths a client counts.
    """

    shared: Tensor
    deviation: Tensor
    width: Tensor
    part: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        deviation: m_i and σ_i, ``[S, P]``.
        dual: λ_i per example, ``[S, P]``.
        centre: θ₀, the same for all clients of a run, ``[S, P]``.
        shared_memory: Adam's memory of θ_i.
        memory: Adam's memory of m_i and σ_i.
        steps: Number of steps taken, ``[S]``; without client axis a scalar.
    """

    deviation: Gaussian
    dual: Tensor
    centre: Tensor
    shared_memory: Adam
    memory: Memory
    steps: Tensor


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        shared: θ_i, ``[S, P]``.
        mean: m_i, ``[S, P]``.
        rho: σ_i is softplus of this; −∞ where weights are points, ``[S, P]``.
        server: θ as the server sent it, ``[S, P]``.
        dual: λ_i, ``[S, P]``.
        centre: θ₀, ``[S, P]``.
        prior: Standard deviations of the priors.
        hold: ρ, ``[S, 1]``.
        shared_memory: Adam's memory of θ_i.
        memory: Adam's memory of m_i and σ_i.
        steps: ``[S]``.
    """

    shared: Tensor
    mean: Tensor
    rho: Tensor
    server: Tensor
    dual: Tensor
    centre: Tensor
    prior: Prior
    hold: Tensor
    shared_memory: Adam
    memory: Memory
    steps: Tensor


@dataclass(frozen=True)
class Adaptive(Method[Weights, Personal, Local, Weights]):
    """BPFed with a shared part and a personal deviation of every weight; scales say how much is shared.

    Attributes:
        personal: Always ``none``: every weight has a shared part.
        temperature: T, the weight of all prior terms; 1 is Bayes' rule, lower trusts the labels more.
        prior_scale: s, the prior's standard deviation of a unit's input.
        deviation: τ of all layers but the last; 0: they are the same for all clients; 100 or more: nothing of them is
            shared.
        head_deviation: τ of the last layer.
        sigma_temperature: κ, the temperature of the standard deviations over that of the means; 1 is Bayes' rule for
            independent weights, lower makes them narrower.
        dual: ρ times s, how strongly a client's copy of the shared weights is held to the server's in a round, per
            example and per curvature of its loss (of numbers 1/noise², of counts their mean, of classes 1). 0 averages
            the copies as FedAvg does, and so does a run in which not all clients take part in every round.
        sigma: Whether weights are Gaussian; without, they are points (MAP).
    """

    name: ClassVar[str] = "bpfed-adaptive"
    title: ClassVar[str] = "BPFed adaptive"
    paper: ClassVar[str] = "bpfed; the split that Chen et al. 2023 leave open"
    shared_words: ClassVar[str] = "one part of every weight"
    personal_words: ClassVar[str] = "a deviation of every weight"
    random_words: ClassVar[str] = "every weight"
    schedule: ClassVar[str] = "cosine"
    weighting: ClassVar[str] = "size"
    flat_network: ClassVar[str] = "skip"
    flat_members: ClassVar[int] = 3
    stackable: ClassVar[tuple[str, ...]] = (
        "lr",
        "temperature",
        "prior_scale",
        "deviation",
        "head_deviation",
        "sigma_temperature",
        "dual",
    )

    personal: Split = "none"
    lr: float = 1e-2
    temperature: float = 0.3
    prior_scale: float = 1.0
    deviation: float = 0.1
    head_deviation: float = 0.3
    sigma_temperature: float = 0.1
    dual: float = 0.3
    sigma: bool = True

    def check(self) -> None:
        super().check()
        self.require(
            temperature="0 or more",
            prior_scale="above 0",
            deviation="0 or more",
            head_deviation="0 or more",
            sigma_temperature="0 or more",
            dual="0 or more",
        )
        if self.personal != "none":
            raise UserError(
                f"personal is '{self.personal}', but in {self.title} every weight has a shared part; leave it at "
                "'none' and say by deviation and head_deviation how far clients may deviate."
            )

    def candidates(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Priors, then how far clients deviate, from FedAvg to training alone; nothing where one of these is given."""
        usual, chosen = type(self)(), ("temperature", "prior_scale", "deviation", "head_deviation")
        if any(getattr(self, name) != getattr(usual, name) for name in chosen):
            return ()
        return (
            tuple({"temperature": t, "prior_scale": s} for t, s in PRIORS),
            tuple({"deviation": body, "head_deviation": head} for body, head in DEVIATIONS),
        )

    def hparams(self) -> dict[str, float]:
        return {**super().hparams(), "share": 1.0}

    def hparams_for_run(self, shape: RunShape, sizes: Tensor) -> dict[str, Tensor]:
        """The prior of θ is one for all clients: each has an equal share of it."""
        hparams = super().hparams_for_run(shape, sizes)
        hparams["share"] = torch.full((len(sizes),), 1.0 / shape.clients)
        if shape.participants < shape.clients:
            hparams["dual"] = torch.zeros_like(hparams["dual"])
        return hparams

    def init(self, model: Model) -> Initial[Weights, Personal]:
        prior = self._prior(model, self.hparam_rows(1, model.initial.device))
        nothing, empty = torch.zeros_like(model.initial), ADAM.init(model.initial)
        deviation = Gaussian(nothing, START * prior.width[0])
        kept = Personal(deviation, nothing, model.initial, empty, Memory(empty, empty), model.initial.new_zeros(()))
        return Initial(Weights(model.initial), kept)

    def newcomer(self, model: Model, shared: Weights) -> Personal:
        """It is at θ, as uncertain as its deviation."""
        prior = self._prior(model, self.hparam_rows(1, model.initial.device))
        sigma = torch.where(prior.width[0] > 0.0, prior.deviation[0], 0.0)
        return self.init(model).personal._replace(deviation=Gaussian(torch.zeros_like(sigma), sigma))

    def begin(self, model: Model, shared: Weights, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        return Local(
            shared.weights,
            personal.deviation.mean,
            softplus_inverse(personal.deviation.sigma),
            shared.weights,
            personal.dual,
            personal.centre,
            self._prior(model, hparams),
            self._hold(model, shared, hparams),
            personal.shared_memory,
            personal.memory,
            personal.steps,
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps, rate, temperature = local.steps + 1, hparams["lr"], hparams["temperature"][:, None]
        prior, sigma = local.prior, softplus(local.rho)
        q = Gaussian(local.shared + local.mean, sigma)
        data = estimators.local(model, q, batch, model.adapters) if self.sigma else estimators.weights(model, q, batch)

        deviates = prior.deviation > 0.0
        gradient = data.mean + temperature * _precision(prior.deviation) * local.mean
        mean, memory = ADAM.update(local.mean, torch.where(deviates, gradient, 0.0), local.memory.mean, steps, rate)
        rho, width_memory = local.rho, local.memory.rho
        if self.sigma:
            # A newcomer takes θ as known: only its deviation is uncertain.
            width, part = prior.width, prior.part
            if phase == ADAPT:
                width, part = torch.where(prior.width > 0.0, prior.deviation, 0.0), torch.ones_like(part)
            gradient = _precision(width) * sigma - torch.where(sigma > 0.0, sigma, 1.0).reciprocal()
            weight = hparams["sigma_temperature"][:, None] * temperature * part
            gradient = (data.sigma + weight * gradient) * torch.sigmoid(local.rho)
            rho, width_memory = ADAM.update(rho, torch.where(width > 0.0, gradient, 0.0), width_memory, steps, rate)
            rho = torch.maximum(rho, local.rho.clamp(max=RHO_FLOOR))
        new = local._replace(mean=mean, rho=rho, memory=Memory(memory, width_memory), steps=steps)
        if phase == ADAPT:
            return new, data.nll

        pull = temperature * hparams["share"][:, None] * _precision(prior.shared) * (local.shared - local.centre)
        consensus = local.hold * (local.shared - local.server) - local.dual
        gradient = torch.where(prior.shared.isfinite(), data.mean + pull + batch.size[:, None] * consensus, 0.0)
        shared, shared_memory = ADAM.update(local.shared, gradient, local.shared_memory, steps, rate)
        return new._replace(shared=shared, shared_memory=shared_memory), data.nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Weights, Personal]:
        hold = local.hold
        dual = local.dual - hold * (local.shared - local.server)
        upload = local.shared - torch.where(hold > 0.0, dual / hold.clamp(min=1e-30), 0.0)
        kept = Personal(
            Gaussian(local.mean, softplus(local.rho)),
            dual,
            local.centre,
            local.shared_memory,
            local.memory,
            local.steps,
        )
        return Finished(Weights(upload), kept, {})

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor, clients: int) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: Personal) -> GaussianPredictive:
        return GaussianPredictive(Gaussian(shared.weights + personal.deviation.mean, personal.deviation.sigma))

    def _hold(self, model: Model, shared: Weights, hparams: dict[str, Tensor]) -> Tensor:
        """ρ, ``[S, 1]``: where weights may be large, steps of a round are too; where noise is small, pulls of data are
        large.

        It is the same for all clients, who know θ.
        """
        hold = (hparams["dual"] / hparams["prior_scale"])[:, None]
        likelihood, layout, bias = model.likelihood, model.layout, model.output_bias
        if not isinstance(likelihood, Curved):
            return hold
        parts = zip(layout.names, torch.split(shared.weights, layout.sizes, -1), strict=True)
        named = {name: part.unflatten(-1, (layout.members, -1)) for name, part in parts}
        level = named[bias] if bias is not None else hold.new_zeros(*hold.shape, 2)
        return hold * likelihood.curvature(level, named).mean(-1, keepdim=True)

    def _prior(self, model: Model, hparams: dict[str, Tensor]) -> Prior:
        level = _those(model, {model.output_bias})
        unit = hparams["prior_scale"][:, None] * model.layout.fan_in().to(model.initial.device).rsqrt()
        unit = torch.where(_those(model, set(model.likelihood.parameters())), NOISE_SIGMA, unit)
        unit = torch.where(level, 1.0, unit)
        tau = torch.where(_head(model), hparams["head_deviation"][:, None], hparams["deviation"][:, None])
        tau = torch.where(level & (tau < ALONE), tau.sqrt(), tau)
        pooled, one = tau < ALONE, torch.ones_like(tau)
        tau = torch.where(pooled, tau, one)
        own = tau.square()
        part = torch.where(pooled, (own + hparams["share"][:, None]) / (own + 1.0), one)
        width = torch.where(pooled, (1.0 + own).sqrt(), one) * unit if self.sigma else torch.zeros_like(unit)
        adapters = _those(model, set(model.adapters))
        width, shared = torch.where(adapters, 0.0, width), torch.where(adapters, ADAPTERS, 1.0) * unit
        return Prior(torch.where(pooled, shared, math.inf), tau * unit, width, part)


def _precision(scale: Tensor) -> Tensor:
    """1/scale²; 1 where there is nothing to scale."""
    return torch.where(scale > 0.0, scale, 1.0).square().reciprocal()


def _head(model: Model) -> Tensor:
    """Which weights belong to the last layer or to the likelihood, ``[P]`` bool."""
    return _those(model, {*model.head, *model.likelihood.parameters()})


def _those(model: Model, names: set[Any]) -> Tensor:
    """Which weights are of parameters with these names, ``[P]`` bool."""
    chosen = torch.tensor([name in names for name in model.layout.names])
    return chosen.repeat_interleave(torch.tensor(model.layout.sizes)).to(model.initial.device)
