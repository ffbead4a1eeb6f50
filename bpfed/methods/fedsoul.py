"""FedSOUL: one body for all, as a point; each client's head is sampled by Langevin steps with a prior common to all.

Kotelevskii et al.: FedPop: A Bayesian Approach for Personalised Federated Learning, 2022 (FedSOUL is its algorithm).
The model is z_i ~ N(m, s² I) for the personal factors of client i, and p(D_i | φ, z_i) for its data. The shared φ and
the prior's m and s are estimated by maximum marginal likelihood, and z_i is sampled from p(z_i | D_i, φ, m, s):

    z ← z − γ ∇U(z) + √(2γ) ξ,  ξ ~ N(0, I),  U(z) = −(n/b) Σ_j log p(d_j | φ, z) + ‖z − m‖²/(2 s²)

The chain continues where it was last time. Every ``thin``-th state is kept, the newest ``samples`` of them, so that
states from before the chain had settled are forgotten; prediction averages over those.

Where this differs from the paper. (1) There a client sends gradients for φ, m and s, averaged over its samples, and the
server takes one step a round. Here φ moves with the chain, by a step of Adam at the current z in every mini-batch, and
the server averages, as for every method here. (2) m and s have a closed-form maximiser given the samples' moments (the
M step of EM): m = mean of E z_i, s² = mean over clients and weights of Var z_i + (E z_i − m)². The server moves towards
it by ``prior_rate``. A client uploads E z_i and E z_i² of its kept states, whose means over clients are all that the
server needs; so noise for privacy and robust rules, which leave one upload of all, keep what clients differ by. (3) γ =
``gamma`` / (n + 1/s²), so that one setting suits clients of all sizes.

What the defaults cost. 20 states that are 5 steps apart are the chain's last 100 steps: two rounds of a client with 250
examples, but a ninth of one round with 4 500. Steps of this size forget slowly, so those states are alike: with 250
examples their variance is 0.07 to 0.19 of the posterior's, and s is learnt too low by what is missing. Larger ``thin``
and ``gamma`` are better there (docs/results/index.md); the defaults are those that the tables were measured with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference import rng
from bpfed.inference.estimators import Batch
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.optim import ADAM, Adam
from bpfed.methods.base import ADAPT, Finished, Initial, Method

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Word that sets the noise of Langevin steps apart from that of dropout.
LANGEVIN = 0x50
#: Least variance of the common prior.
SMALLEST = 1e-8


class Shared(NamedTuple):
    """What the server holds, and what is uploaded.

    Attributes:
        first: m of the common prior N(m, s²) of the personal factors, ``[P_personal]``; as upload, E z_i.
        second: m² + s², with one s for all of them, ``[P_personal]``; as upload, E z_i².
        body: φ, ``[P_shared]``.
    """

    # The body comes last, so that a state as it was kept earlier (body, m, s) has other shapes and is not mistaken.
    first: Tensor
    second: Tensor
    body: Tensor

    @classmethod
    def of(cls, body: Tensor, heads: Gaussian) -> Shared:
        """Of the body and a distribution of the personal factors."""
        return cls(heads.mean, heads.mean.square() + heads.sigma.square(), body)

    @property
    def variance(self) -> Tensor:
        """The mean over weights of E z² − (E z)², ``[..., 1]``."""
        return (self.second - self.first.square()).mean(-1, keepdim=True)

    @property
    def heads(self) -> Gaussian:
        """The common prior, N(m, s²)."""
        return Gaussian(self.first, self.variance.clamp(min=SMALLEST).sqrt().expand_as(self.first).contiguous())


class Chain(NamedTuple):
    """The Langevin chain of a client.

    Attributes:
        state: z, ``[S, P_personal]``.
        samples: States kept, ``[S, K, P_personal]``.
        number: How many have been kept so far, ``[S, 1]``; the newest K of them are there.
    """

    state: Tensor
    samples: Tensor
    number: Tensor

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """E z and E z² of the states kept, ``[S, P_personal]``."""
        slots = torch.arange(self.samples.shape[1], device=self.samples.device)
        share = (slots < self.number) / self.number.clamp(min=1.0, max=float(len(slots)))  # [S, K]
        return (share[:, :, None] * self.samples).sum(1), (share[:, :, None] * self.samples.square()).sum(1)


class Personal(NamedTuple):
    """What a client keeps: its chain, Adam's memory of the body where it is kept, local steps so far ``[S, 1]``."""

    chain: Chain
    memory: tuple[Adam, ...]
    steps: Tensor


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        body: φ, ``[S, P_shared]``.
        memory: Adam's, of φ.
        chain: Of z.
        taken: Steps of this round, ``[S]``.
        steps: Steps that Adam's memory is of, ``[S]``.
        prior: The common prior, held.
    """

    body: Tensor
    memory: Adam
    chain: Chain
    taken: Tensor
    steps: Tensor
    prior: Gaussian


class SampledPredictive(NamedTuple):
    """Sampled heads on one body; where there is no sample yet, draws of the prior.

    Attributes:
        body: ``[S, P_shared]``.
        chain: Of the heads.
        prior: Of the heads, ``[S, P_personal]``.
    """

    body: Tensor
    chain: Chain
    prior: Gaussian

    def draws(self, wanted: int) -> int:
        return min(wanted, self.chain.samples.shape[1])

    def draw(self, key: Tensor, index: int) -> Tensor:
        rows, kept, width = self.chain.samples.shape
        number = self.chain.number
        # The newest first; where fewer are kept than asked for, they are gone through again.
        back = torch.remainder(torch.full_like(number, float(index)), number.clamp(min=1.0, max=float(kept)))
        slot = torch.remainder(number - 1.0 - back, float(kept)).long()
        sample = self.chain.samples.gather(1, slot[:, :, None].expand(rows, 1, width)).squeeze(1)
        unseen = self.prior.draw(rng.normal(rng.fold(key, index), width))
        return torch.cat([self.body, torch.where(number > 0, sample, unseen)], -1)


@dataclass(frozen=True)
class FedSOUL(Method[Shared, Personal, Local, Shared]):
    """FedSOUL (FedPop): a point body, heads sampled by Langevin steps with a learnt common prior.

    Attributes:
        gamma: Langevin step size, before it is divided by n + 1/s², n being the client's number of examples.
        samples: Sampled heads that a client keeps and averages over.
        thin: Langevin steps from one kept head to the next.
        prior_sigma: s of the common prior at the start; its mean starts at 0.
        prior_rate: How far the server moves the prior towards its maximum-likelihood estimate per round; 1 is all the
            way.
        keep_adam: Whether a client keeps Adam's state for the body from round to round.
    """

    name: ClassVar[str] = "fedsoul"
    title: ClassVar[str] = "FedSOUL"
    paper: ClassVar[str] = "Kotelevskii et al. 2022, arXiv 2206.03611"
    shared_words: ClassVar[str] = "all but the last layer; the prior of last layers"
    personal_words: ClassVar[str] = "samples of the last layer"
    random_words: ClassVar[str] = "the last layer"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "gamma", "prior_sigma", "prior_rate")
    population: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("personal",)
    #: φ must come to rest: as it grows, chains of a fixed step size get ever less stable.
    schedule: ClassVar[str] = "cosine"

    gamma: float = 0.05
    samples: int = 20
    thin: int = 5
    prior_sigma: float = 0.3
    prior_rate: float = 1.0
    keep_adam: bool = True

    def check(self) -> None:
        super().check()
        if self.personal == "none":
            raise UserError("personal is 'none', but FedSOUL samples personal factors; choose some, such as 'head'.")
        self.require(
            gamma="above 0",
            samples="at least 1",
            thin="at least 1",
            prior_sigma="above 0",
            prior_rate="from 0 to 1",
        )

    def init(self, model: Model) -> Initial[Shared, Personal]:
        body, head = model.layout.split(model.initial)
        prior = Gaussian(torch.zeros_like(head), torch.full_like(head, self.prior_sigma))
        chain = Chain(prior.mean, head.new_zeros(self.samples, len(head)), head.new_zeros(1))
        memory = (ADAM.init(body),) if self.keep_adam else ()
        return Initial(Shared.of(body, prior), Personal(chain, memory, head.new_zeros(1)))

    def adapting(self) -> Self:
        """A newcomer's body is held, so there is nothing that Adam could remember."""
        return replace(self, keep_adam=False)

    def begin(self, model: Model, shared: Shared, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        chain = personal.chain
        state = torch.where(chain.number > 0, chain.state, shared.heads.mean)
        steps = personal.steps[:, 0]
        none = torch.zeros_like(steps)
        return Local(
            body=shared.body,
            memory=personal.memory[0] if self.keep_adam else ADAM.init(shared.body),
            chain=chain._replace(state=state),
            taken=none,
            steps=steps if self.keep_adam else none,
            prior=shared.heads,
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps, taken = local.steps + 1, local.taken + 1
        weights = torch.cat([local.body, local.chain.state], -1)
        total, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
        on_body, on_head = model.layout.split(gradient * batch.scale[:, None])

        precision = local.prior.sigma.square().reciprocal()
        gamma = hparams["gamma"][:, None] / (batch.size[:, None] + precision)
        drift = on_head + precision * (local.chain.state - local.prior.mean)
        xi = rng.normal(rng.fold(batch.key, LANGEVIN), drift.shape[-1])
        state = local.chain.state - gamma * drift + torch.sqrt(2.0 * gamma) * xi
        chain = self._kept(local.chain, state, taken)

        body, memory = local.body, local.memory
        if phase != ADAPT:
            body, memory = ADAM.update(body, on_body / batch.size[:, None], memory, steps, hparams["lr"])
        return Local(body, memory, chain, taken, steps, local.prior), total * batch.scale / batch.size

    def _kept(self, chain: Chain, state: Tensor, taken: Tensor) -> Chain:
        """The chain at its new state, which replaces the oldest sample if it is its turn."""
        turn = torch.remainder(taken - 1.0, float(self.thin)) == 0.0  # [S]
        slots = torch.arange(self.samples, device=state.device)
        here = turn[:, None] & (slots == torch.remainder(chain.number, float(self.samples)))  # [S, K]
        samples = torch.where(here[:, :, None], state[:, None], chain.samples)
        return Chain(state, samples, chain.number + turn[:, None].float())

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Shared, Personal]:
        memory = (local.memory,) if self.keep_adam else ()
        upload = Shared(*local.chain.moments, local.body)
        return Finished(upload, Personal(local.chain, memory, local.steps[:, None]), {})

    def aggregate(self, shared: Shared, uploads: Shared, weights: Tensor, clients: int) -> Shared:
        likeliest = Shared(*(weighted_mean(part, weights) for part in uploads))
        mean = torch.lerp(shared.first, likeliest.first, self.prior_rate)
        variance = torch.lerp(shared.variance, likeliest.variance, self.prior_rate).clamp(min=SMALLEST)
        return Shared.of(likeliest.body, Gaussian(mean, variance.sqrt().expand_as(mean)))

    def predictive(self, model: Model, shared: Shared, personal: Personal) -> SampledPredictive:
        return SampledPredictive(shared.body, personal.chain, shared.heads)
