"""BPFed and pFedBayes as the public reference code computes them, which is where the published numbers come from.

A round of client i, which keeps q and π of all weights, and Adam's memory of both, from round to round:

    the server's ζ overwrites the shared part of π; q stays as it is
    for each of 20 mini-batches, in the examples' own order and going round:
        5 times:  w = μ_q + σ_q ⊙ ε with ε ~ N(0, 0.001² I)
                  a step of Adam on q, along the gradient of  −mean log p(batch | w) + 5e-5 · KL(π ‖ q)
        once:     a step of Adam on π, along that of          5e-5 · KL(π ‖ q)
    the shared part of π is uploaded; the server averages μ and ρ, where σ = softplus(ρ)

The paper's Algorithm 1 has ε ~ N(0, I), shuffled epochs, a step on either in turn, n times the mean −log p, KL(q ‖ π),
q = π = (η_i, ζ) at the start of a round, and the mean of σ. Each difference is a setting of its own, so that its effect
can be measured (`experiments.audit`); with all of them as the paper has them the method is BPFed.

The reference tests q at the start of a round, after the server has sent ζ. q is then as the round before has left it,
so a test at the end of a round is the same, counted one round earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import mean, weighted_mean
from bpfed.inference import rng
from bpfed.inference.estimators import Batch, DataTerm, data_term
from bpfed.inference.gaussian import Gaussian, kl, kl_gradients_p, kl_gradients_q, softplus, softplus_inverse
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import Finished, Initial, Method, Phase
from bpfed.methods.variational import Memory, Variational, join, split
from bpfed.nn.model import Model
from bpfed.nn.parameters import Personal as Parameters

Divergence = Literal["prior-posterior", "posterior-prior"]
Overwritten = Literal["prior", "both"]
Averaged = Literal["rho", "sigma"]
Start = Literal["normal", "network"]


class Local(NamedTuple):
    """A client during a round: posterior q, prior π, number of steps on q so far ``[S]``."""

    q: Variational
    prior: Variational
    steps: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        q: Its posterior over all weights, ``[S, P]``; nothing where every round restarts it.
        eta: π of its personal factors, ``[S, P_personal]``.
        memory: Adam's memory of q and of π.
        steps: Steps on q so far, ``[S, 1]``.
    """

    q: tuple[Gaussian, ...]
    eta: Gaussian
    memory: tuple[Memory, Memory]
    steps: Tensor


@dataclass(frozen=True)
class PublishedBPFed(Method):
    """BPFed as the reference code has it. Every setting but ``draws`` is a difference from the paper.

    Attributes:
        noise_scale: Standard deviation of ε, in training and in prediction; the paper's is 1.
        divergence: ``prior-posterior``: KL(π ‖ q) in both steps; ``posterior-prior``: KL(q ‖ π), the paper's Eq. 9 and
            10.
        kl_weight: Weight of the KL term relative to the mean −log p of a batch. None: 1/n, which is Eq. 9 divided by
            the client's number of examples n; a common factor makes no difference to Adam.
        overwritten: What the server's ζ replaces at the start of a round: ``prior``, the shared part of π alone;
            ``both``: q is set to π = (η_i, ζ), as Algorithm 1 has it, and a client predicts with (η_i, ζ).
        averaged: What the server takes the mean of beside μ: ``rho`` or ``sigma``.
        batches: Mini-batches of a round, in the examples' own order, again from the first after the last; 0: shuffled
            epochs, as many as the run's settings say.
        inner: Steps on q with each of those mini-batches, before the one on π; Algorithm 1 has one.
        start: ``normal``: μ ~ N(0, 0.1²) and ρ ~ N(−3, 0.1²); ``network``: μ is the network's own start, with
            ``sigma``.
        sigma: With ``network``, σ of every weight at the start.
        draws: Weight draws in a step.
    """

    name: ClassVar[str] = "bpfed-published"
    title: ClassVar[str] = "BPFed, published settings"
    paper: ClassVar[str] = "Chen et al. 2023, arXiv 2309.15499, public code"
    shared_words: ClassVar[str] = "distribution of all but the last layer"
    personal_words: ClassVar[str] = "distribution of all weights"
    random_words: ClassVar[str] = "every weight, with noise a thousandth of its σ"

    noise_scale: float = 0.001
    divergence: Divergence = "prior-posterior"
    kl_weight: float | None = 5e-5
    overwritten: Overwritten = "prior"
    averaged: Averaged = "rho"
    batches: int = 20
    inner: int = 5
    start: Start = "normal"
    sigma: float = 0.07
    draws: int = 1

    def check(self) -> None:
        super().check()
        self.require(
            noise_scale="0 or more", batches="0 or more", inner="at least 1", sigma="above 0", draws="at least 1"
        )
        if self.kl_weight is not None and not self.kl_weight >= 0.0:
            raise UserError(f"kl_weight is {self.kl_weight}, but must be 0 or more, or left out for 1/n.")
        if self.inner > 1 and not self.batches:
            raise UserError(f"inner is {self.inner}, but repeats a mini-batch of 'batches', which is 0; set that too.")

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase("all", epochs, self.batches, self.inner),)

    def adapting(self) -> PublishedBPFed:
        """The reference code leaves the body of a newcomer's q as it was drawn, so there is nothing to join."""
        raise UserError(f"{self.title}: no client can join such a run; train with 'bpfed' for that.")

    def init(self, model: Model) -> Initial:
        first = Gaussian(model.initial, torch.full_like(model.initial, self.sigma))
        if self.start == "normal":
            # A method draws nothing by itself: the network's first two weights, which are random, are the key.
            key, count = model.initial[:2].view(torch.int32), len(model.initial)
            mu, rho = (rng.normal(rng.fold(key, word), count) for word in range(2))
            first = Gaussian(0.1 * mu, softplus(-3.0 + 0.1 * rho))
        shared, personal = split(model, first)
        memory = Variational.at(first).memory
        kept = (first,) if self.overwritten == "prior" else ()
        return Initial(shared, Personal(kept, personal, (memory, memory), model.initial.new_zeros(1)))

    def begin(self, model: Model, shared: Gaussian, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        prior = join(shared, personal.eta)  # the server's ζ goes to π's shared part
        q = personal.q[0] if personal.q else prior
        return Local(
            Variational.at(q, personal.memory[0]),
            Variational.at(prior, personal.memory[1]),
            personal.steps.squeeze(-1),
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        taken, weight = local.steps + 1, self._weight(batch)
        q, prior = local.q.gaussian, local.prior.gaussian

        # Eq. 9 on q, π held.
        data = self._data_term(model, q, batch)
        mean_, sigma = self._gradients_q(q, prior)
        new_q = local.q.moved(data.mean + weight * mean_, data.sigma + weight * sigma, taken, hparams["lr"])

        # Eq. 10 on π, q held, after the last step with a mini-batch.
        mean_, sigma = self._gradients_prior(new_q.gaussian, prior)
        number = (taken / self.inner).floor().clamp(min=1.0)
        moved = local.prior.moved(weight * mean_, weight * sigma, number, hparams["lr"])
        if self.inner > 1:
            last = (taken % self.inner == 0)[:, None]
            moved = tree_map(lambda new, old: torch.where(last, new, old), moved, local.prior)
        return Local(new_q, moved, taken), data.nll

    def _weight(self, batch: Batch) -> Tensor:
        """Of the KL term beside the mean −log p, ``[S, 1]``."""
        fixed = torch.full_like(batch.size, self.kl_weight or 0.0)
        return (batch.size.reciprocal() if self.kl_weight is None else fixed)[:, None]

    def _data_term(self, model: Model, q: Gaussian, batch: Batch) -> DataTerm:
        """The *mean* −log p of the batch with noise of the given scale, and its gradients in μ and σ."""
        data = data_term("weights", self.draws, model, Gaussian(q.mean, self.noise_scale * q.sigma), batch)
        n = batch.size[:, None]
        return DataTerm(data.nll, data.mean / n, self.noise_scale * data.sigma / n)

    def _gradients_q(self, q: Gaussian, prior: Gaussian) -> tuple[Tensor, Tensor]:
        return kl_gradients_p(prior, q) if self.divergence == "prior-posterior" else kl_gradients_q(q, prior)

    def _gradients_prior(self, q: Gaussian, prior: Gaussian) -> tuple[Tensor, Tensor]:
        return kl_gradients_q(prior, q) if self.divergence == "prior-posterior" else kl_gradients_p(q, prior)

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished:
        q, prior = local.q.gaussian, local.prior.gaussian
        shared, personal = split(model, prior)
        kept = (q,) if self.overwritten == "prior" else ()
        state = Personal(kept, personal, (local.q.memory, local.prior.memory), local.steps[:, None])
        return Finished(shared, state, {"kl": kl(q, prior)})

    def aggregate(self, shared: Gaussian, uploads: Gaussian, weights: Tensor) -> Gaussian:
        if self.averaged == "sigma":
            return mean(uploads, weights)
        rho = weighted_mean(softplus_inverse(uploads.sigma), weights)
        return Gaussian(weighted_mean(uploads.mean, weights), softplus(rho))

    def predictive(self, model: Model, shared: Gaussian, personal: Personal) -> GaussianPredictive:
        weights = personal.q[0] if personal.q else join(shared, personal.eta)
        return GaussianPredictive(Gaussian(weights.mean, self.noise_scale * weights.sigma))


@dataclass(frozen=True)
class PublishedPFedBayes(PublishedBPFed):
    """pFedBayes as the same code has it: π is uploaded whole, and the KL term weighs 0.5 beside the mean −log p."""

    name: ClassVar[str] = "pfedbayes-published"
    title: ClassVar[str] = "pFedBayes, published settings"
    paper: ClassVar[str] = "Zhang et al. 2022, arXiv 2206.07977, as in the public code of arXiv 2309.15499"
    shared_words: ClassVar[str] = "a common prior of all weights"

    personal: Parameters = "none"
    kl_weight: float | None = 0.5


#: Methods of the published protocol, by the name of the row they fill.
PUBLISHED: dict[str, type[PublishedBPFed]] = {"bpfed": PublishedBPFed, "pfedbayes": PublishedPFedBayes}
