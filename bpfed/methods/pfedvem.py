"""pFedVEM: one body for all, as a point; a Gaussian head for each client, and a common head weighted by confidence.

Zhu, Ma, Blaschko: Confidence-aware Personalized Federated Learning via Variational Expectation Maximization, CVPR 2023.
The model of the heads is w_i ~ N(w, ρ_i² I), with a width ρ_i of each client's own, and p(D_i | body, w_i) for the
data. With posteriors q_i = N(μ_i, diag σ_i²) and d personal weights:

    E step, client i:  q_i lowers −(n/b) Σ E_q log p + KL(q_i ‖ N(w, ρ_i² I))
    M step, client i:  ρ_i² = (Σ σ_i² + ‖μ_i − w‖²)/d, uncertainty plus deviation
    server:            w = Σ_i μ_i/ρ_i² / Σ_i 1/ρ_i²

1/ρ_i² is the client's confidence: it weights the client at the server, and ties its head to w. A round is the E step
with the body held, the M step, and then steps of the body under draws of the head; the server takes the plain mean of
the bodies. Steps are Adam's.

Beyond the paper the server keeps the mean of ρ_i², for clients that have not trained yet: their head is N(w, ρ² I).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import precision, weighted_mean
from bpfed.inference.estimators import Batch, data_term
from bpfed.inference.gaussian import Gaussian, either, kl, kl_gradients_q
from bpfed.inference.optim import ADAM, Adam
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import Finished, Initial, Method, Phase
from bpfed.methods.variational import Memory, Variational

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Name of the phase in which the body is learnt; in any other the head is.
BODY = "body"


class Shared(NamedTuple):
    """What the server holds, and what is uploaded.

    Attributes:
        body: ``[P_shared]``.
        head: w and ρ, the latter repeated for every weight, ``[P_personal]``; as upload, μ_i and ρ_i.
    """

    body: Tensor
    head: Gaussian


class Kept(NamedTuple):
    """Adam's memory of a client: of its head, of the body, and the steps taken of each, ``[S, 1]``."""

    head: Memory
    body: Adam
    head_steps: Tensor
    body_steps: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        q: Posterior of its head, ``[S, P_personal]``.
        rho: ρ_i, ``[S, 1]``; 0 before its first step.
        memory: Adam's, where it is kept from round to round.
    """

    q: Gaussian
    rho: Tensor
    memory: tuple[Kept, ...]


class Local(NamedTuple):
    """A client during a round: its head's posterior, the body, the head's prior N(w, ρ_i² I), steps ``[S]`` of each."""

    q: Variational
    body: Tensor
    memory: Adam
    prior: Gaussian
    head_steps: Tensor
    body_steps: Tensor


@dataclass(frozen=True)
class PFedVEM(Method[Shared, Personal, Local, Shared]):
    """pFedVEM: a point body, Gaussian heads around a common one that the confident clients determine most.

    Attributes:
        rho: ρ of every client at the start, the width of the prior of heads.
        sigma: σ of a client's posterior at its first step, where its mean is the common head w.
        head_rate: Step size of the head in units of ``lr``. The M step assumes that the E step has converged: after a
            few small steps heads are still near w, so ρ is estimated too small and holds them there.
        draws: Draws of the head per step.
        body_share: Share of a round's epochs in which the body is learnt; the head is learnt in the others, before.
        keep_adam: Whether a client keeps Adam's state from round to round.
    """

    name: ClassVar[str] = "pfedvem"
    title: ClassVar[str] = "pFedVEM"
    paper: ClassVar[str] = "Zhu, Ma, Blaschko 2023, arXiv 2305.12557"
    shared_words: ClassVar[str] = "all but the last layer; the centre of last layers"
    personal_words: ClassVar[str] = "distribution of the last layer; its distance from the centre"
    random_words: ClassVar[str] = "the last layer"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "rho", "sigma", "head_rate")
    population: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("personal",)

    rho: float = 1.0
    sigma: float = 0.1
    head_rate: float = 10.0
    draws: int = 2
    body_share: float = 0.5
    keep_adam: bool = True

    def check(self) -> None:
        super().check()
        if self.personal == "none":
            raise UserError("personal is 'none', but pFedVEM has a head for each client; choose some, such as 'head'.")
        self.require(
            rho="above 0",
            sigma="above 0",
            head_rate="above 0",
            draws="at least 1",
            body_share="between 0 and 1",
        )

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        body = max(1, round(self.body_share * epochs))
        return Phase("head", max(1, epochs - body)), Phase(BODY, body)

    def init(self, model: Model) -> Initial[Shared, Personal]:
        body, head = model.layout.split(model.initial)
        prior = Gaussian(head, torch.full_like(head, self.rho))
        none = head.new_zeros(1)
        kept = (Kept(Variational.at(prior).memory, ADAM.init(body), none, none),) if self.keep_adam else ()
        return Initial(Shared(body, prior), Personal(prior, none, kept))

    def adapting(self) -> Self:
        """A newcomer's Adam starts without memory."""
        return replace(self, keep_adam=False)

    def begin(self, model: Model, shared: Shared, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        none = torch.zeros_like(personal.rho)
        kept = Kept(Variational.at(personal.q).memory, ADAM.init(shared.body), none, none)
        kept = personal.memory[0] if personal.memory else kept
        trained = personal.rho > 0
        start = Gaussian(shared.head.mean, hparams["sigma"][:, None])
        width = torch.where(trained, personal.rho, shared.head.sigma)
        return Local(
            q=Variational.at(either(trained, personal.q, start), kept.head),
            body=shared.body,
            memory=kept.body,
            prior=Gaussian(shared.head.mean, width),
            head_steps=kept.head_steps[:, 0],
            body_steps=kept.body_steps[:, 0],
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        q = local.q.gaussian
        data = data_term("weights", self.draws, model, _whole(local.body, q), batch)
        (on_body, mean), (_, sigma) = model.layout.split(data.mean), model.layout.split(data.sigma)
        if phase == BODY:
            steps = local.body_steps + 1
            body, memory = ADAM.update(local.body, on_body / batch.size[:, None], local.memory, steps, hparams["lr"])
            return local._replace(body=body, memory=memory, body_steps=steps), data.nll
        steps = local.head_steps + 1
        kl_mean, kl_sigma = kl_gradients_q(q, local.prior)
        new = local.q.moved(mean + kl_mean, sigma + kl_sigma, steps, hparams["lr"] * hparams["head_rate"])
        return local._replace(q=new, head_steps=steps), data.nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Shared, Personal]:
        q = local.q.gaussian
        squared = (q.sigma.square() + (q.mean - local.prior.mean).square()).mean(-1, keepdim=True)  # M step
        rho = squared.sqrt()
        kept = Kept(local.q.memory, local.memory, local.head_steps[:, None], local.body_steps[:, None])
        upload = Shared(local.body, Gaussian(q.mean, rho.expand_as(q.mean)))
        return Finished(upload, Personal(q, rho, (kept,) if self.keep_adam else ()), {"kl": kl(q, local.prior)})

    def aggregate(self, shared: Shared, uploads: Shared, weights: Tensor, clients: int) -> Shared:
        centre = precision(uploads.head, weights).mean
        width = weighted_mean(uploads.head.sigma.square(), weights).sqrt()
        return Shared(weighted_mean(uploads.body, weights), Gaussian(centre, width))

    def predictive(self, model: Model, shared: Shared, personal: Personal) -> GaussianPredictive:
        # Before a client's first step its head is the prior's, N(w, ρ² I).
        return GaussianPredictive(_whole(shared.body, either(personal.rho > 0, personal.q, shared.head)))


def _whole(body: Tensor, head: Gaussian) -> Gaussian:
    """All weights: the body as points, ``[S, P]``."""
    return Gaussian(torch.cat([body, head.mean], -1), torch.cat([torch.zeros_like(body), head.sigma], -1))
