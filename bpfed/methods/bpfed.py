"""BPFed: shared and personal factors, both Gaussian; last round's posterior is the next round's prior.

Chen, Liu, Cao, Zhang: Bayesian Personalized Federated Learning with Shared and Personalized Uncertainty Representations,
2023. Algorithm 1, Eq. 7-10. Implemented as written: ε ~ N(0, I), the data term scaled by n/b, KL(q ‖ π), q restarted from
(η_i, ζ) in every round, and the mean of σ (not of its pre-image ρ) at the server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bpfed.aggregate import rule
from bpfed.errors import UserError, unknown
from bpfed.estimators import ESTIMATORS, Batch, data_term
from bpfed.gaussian import (
    Gaussian,
    discounted,
    kl,
    kl_gradients_p,
    kl_gradients_q,
    softplus,
    softplus_inverse,
)
from bpfed.methods.base import ADAPT, Finished, GaussianPredictive, Initial, Method, frozen
from bpfed.model import Model
from bpfed.optim import Adam, adam

Predict = Literal["own", "aggregated"]


class Memory(NamedTuple):
    """Adam's memory of a Gaussian's mean and ρ."""

    mean: Adam
    rho: Adam


class Variational(NamedTuple):
    """A Gaussian as it is optimised: mean and ρ with σ = softplus(ρ), and Adam's memory of both. ``[S, P]`` each."""

    mean: Tensor
    rho: Tensor
    adam_mean: Adam
    adam_rho: Adam

    @classmethod
    def at(cls, g: Gaussian, memory: Memory | None = None) -> Variational:
        mean, rho = memory or Memory(Adam.like(g.mean), Adam.like(g.mean))
        return cls(g.mean, softplus_inverse(g.sigma), mean, rho)

    @property
    def memory(self) -> Memory:
        return Memory(self.adam_mean, self.adam_rho)

    @property
    def gaussian(self) -> Gaussian:
        return Gaussian(self.mean, softplus(self.rho))

    def moved(self, mean: Tensor, sigma: Tensor, step: Tensor, rate: Tensor) -> Variational:
        """One step of Adam along gradients with respect to mean and σ; dσ/dρ = sigmoid(ρ)."""
        new_mean, adam_mean = adam(self.mean, mean, self.adam_mean, step, rate)
        new_rho, adam_rho = adam(self.rho, sigma * torch.sigmoid(self.rho), self.adam_rho, step, rate)
        return Variational(new_mean, new_rho, adam_mean, adam_rho)


class Local(NamedTuple):
    """A client during a round: posterior q, prior π, number of steps taken ``[S]``."""

    q: Variational
    prior: Variational | Gaussian
    steps: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        eta: η_i, the distribution of its personal factors, ``[S, P_personal]``.
        own: q of its last round, to predict with, ``[S, P]``; nothing if it predicts with (η_i, ζ).
        memory: Adam's memory of q and of π, where it is kept from round to round.
        steps: Local steps taken so far (in this round, where Adam's memory is not kept), ``[S, 1]``.
    """

    eta: Gaussian
    own: tuple[Gaussian, ...]
    memory: tuple[Memory, ...]
    steps: Tensor


@dataclass(frozen=True)
class BPFed(Method):
    """BPFed. The defaults are the paper's method; what it leaves open was chosen on validation data (docs/gotchas.md).

    η_i is the distribution of a client's personal factors, ζ that of the shared factors, q a client's posterior and π its
    prior during a round.

    Attributes:
        sigma: σ of every weight at the start. 0 is the Dirac case (a point): it needs ``temperature=0`` and
            ``prior_step=False``, and then the method is joint deterministic training of shared and personal weights.
        temperature: Weight T of the KL term in Eq. 9; 1 is the ELBO.
        discount: a in 1/s² = a/σ² + (1 − a)/s0², the prior's precision made of last round's; 1 is the continual prior.
        prior_sigma: s0 of that formula.
        prior_step: Whether π moves towards q in every step (Eq. 10) and gives η_i and the upload. If not, π is held for
            the round and η_i and the upload are taken from q.
        estimator: Of the data term: ``weights`` (a draw of all weights for the batch), ``antithetic`` (the draw mirrored for
            every other example) or ``local`` (noise per example in linear and convolution layers).
        draws: M, weight draws in a step.
        rule: Server rule: ``mean``, ``moments``, ``precision`` or ``product``.
        keep_adam: Whether a client keeps Adam's memory from round to round; if not, every round starts without.
        newcomer_sigma: σ of the head of a client that joins later and has seen no example; its mean is 0, so that no class
            is preferred.
        predict: ``own``: predict with the client's q of its last round; ``aggregated``: with (η_i, ζ).
    """

    name: ClassVar[str] = "bpfed"
    title: ClassVar[str] = "BPFed"
    paper: ClassVar[str] = "Chen et al. 2023, arXiv 2309.15499"
    shared_words: ClassVar[str] = "distribution of all but the last layer"
    personal_words: ClassVar[str] = "distribution of the last layer"
    random_words: ClassVar[str] = "every weight"
    numbers: ClassVar[tuple[str, ...]] = ("lr", "temperature", "discount", "prior_sigma", "sigma")

    sigma: float = 0.07
    temperature: float = 1.0
    discount: float = 1.0
    prior_sigma: float = 0.1
    prior_step: bool = True
    estimator: str = "weights"
    draws: int = 2
    rule: str = "mean"
    keep_adam: bool = True
    newcomer_sigma: float = 0.3
    predict: Predict = "aggregated"

    @classmethod
    def dirac(cls, **settings: object) -> BPFed:
        """The deterministic special case: σ = 0 and no KL term."""
        return cls(sigma=0.0, temperature=0.0, prior_step=False, **settings)  # type: ignore[arg-type]

    def check(self) -> None:
        super().check()
        if self.estimator not in ESTIMATORS:
            raise unknown("estimator", self.estimator, ESTIMATORS)
        if self.predict not in get_args(Predict):
            raise unknown("way to predict", self.predict, get_args(Predict))
        rule(self.rule)
        for name, fits, range_ in (
            ("draws", self.draws >= 1, "at least 1"),
            ("sigma", self.sigma >= 0.0, "0 or more"),
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("discount", 0.0 <= self.discount <= 1.0, "from 0 to 1"),
            ("prior_sigma", self.prior_sigma > 0.0, "above 0"),
            ("newcomer_sigma", self.newcomer_sigma > 0.0, "above 0"),
        ):
            if not fits:
                raise UserError(f"{name} is {getattr(self, name)}, but must be {range_}.")
        if self.sigma == 0.0 and (self.temperature != 0.0 or self.prior_step):
            raise UserError(
                "sigma = 0 (the Dirac case) has no finite KL term; set temperature = 0 and prior_step = false with it."
            )

    def structure(self) -> tuple[Any, ...]:
        return (*super().structure(), self.sigma > 0.0)

    def init(self, model: Model) -> Initial:
        start = Gaussian(model.initial, torch.full_like(model.initial, self.sigma))
        shared, personal = _split(model, start)
        own = (start,) if self.predict == "own" else ()
        memory = Variational.at(start).memory if self.keep_adam else None
        memories = () if memory is None else (memory, memory) if self.prior_step else (memory,)
        return Initial(shared, Personal(personal, own, memories, model.initial.new_zeros(1)))

    def adapting(self) -> BPFed:
        """A newcomer's prior is held: its few examples count once, however often they are passed over."""
        return replace(self, prior_step=False, keep_adam=False, predict="aggregated", discount=1.0)

    def newcomer(self, model: Model, shared: Gaussian) -> Personal:
        start = self.init(model).personal
        if self.personal != "head" or self.sigma == 0.0:
            return start
        eta = Gaussian(torch.zeros_like(start.eta.mean), torch.full_like(start.eta.sigma, self.newcomer_sigma))
        return start._replace(eta=eta)

    def begin(self, model: Model, shared: Gaussian, personal: Personal, hyper: dict[str, Tensor]) -> Local:
        start = _join(personal.eta, shared)  # q = π = (η_i, ζ)
        prior = discounted(start, hyper["discount"][:, None], hyper["prior_sigma"][:, None])
        memory = personal.memory or (None, None)
        held = Variational.at(prior, memory[1]) if self.prior_step else prior
        steps = personal.steps[:, 0]
        return Local(Variational.at(start, memory[0]), held, steps if self.keep_adam else torch.zeros_like(steps))

    def step(
        self, model: Model, local: Local, batch: Batch, hyper: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps = local.steps + 1
        q, prior = local.q.gaussian, _gaussian(local.prior)

        # Eq. 9: the data term, scaled by n/b, and T · KL(q ‖ π) with π held.
        data = data_term(self.estimator, self.draws, model, q, batch)
        mean, sigma = data.mean, data.sigma
        if self.sigma > 0.0:
            kl_mean, kl_sigma = kl_gradients_q(q, prior)
            mean = mean + hyper["temperature"][:, None] * kl_mean
            sigma = sigma + hyper["temperature"][:, None] * kl_sigma
        new_q = local.q.moved(mean, sigma, steps, hyper["lr"])
        if phase == ADAPT:
            mean, rho = frozen(model, local.q.mean, new_q.mean), frozen(model, local.q.rho, new_q.rho)
            new_q = new_q._replace(mean=mean, rho=rho)

        # Eq. 10: KL(q ‖ π) with q held.
        new_prior = local.prior
        if isinstance(local.prior, Variational):
            new_prior = local.prior.moved(*kl_gradients_p(new_q.gaussian, prior), steps, hyper["lr"])
        return Local(new_q, new_prior, steps), data.nll

    def finish(self, model: Model, local: Local, hyper: dict[str, Tensor]) -> Finished:
        q, prior = local.q.gaussian, _gaussian(local.prior)
        shared, personal = _split(model, prior if self.prior_step else q)
        own = (q,) if self.predict == "own" else ()
        info = {"kl": kl(q, prior)} if self.sigma > 0.0 else {}
        variational = [v for v in (local.q, local.prior) if isinstance(v, Variational)]
        memories = tuple(v.memory for v in variational) if self.keep_adam else ()
        return Finished(shared, Personal(personal, own, memories, local.steps[:, None]), info)

    def aggregate(self, shared: Gaussian, uploads: Gaussian, weights: Tensor) -> Gaussian:
        return rule(self.rule)(uploads, weights)

    def predictive(self, model: Model, shared: Gaussian, personal: Personal) -> GaussianPredictive:
        weights = _join(personal.eta, shared)
        if self.predict == "own" and personal.own:
            trained = personal.steps > 0
            weights = Gaussian(*(torch.where(trained, o, w) for o, w in zip(personal.own[0], weights, strict=True)))
        return GaussianPredictive(weights)


def _gaussian(prior: Variational | Gaussian) -> Gaussian:
    return prior.gaussian if isinstance(prior, Variational) else prior


def _join(personal: Gaussian, shared: Gaussian) -> Gaussian:
    return Gaussian(torch.cat([shared.mean, personal.mean], -1), torch.cat([shared.sigma, personal.sigma], -1))


def _split(model: Model, g: Gaussian) -> tuple[Gaussian, Gaussian]:
    parts = [model.factors.split(t) for t in g]
    return Gaussian(*(p[0] for p in parts)), Gaussian(*(p[1] for p in parts))
