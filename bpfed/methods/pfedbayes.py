"""pFedBayes: every client has a Gaussian network of its own, tied to a common one through its prior alone.

Zhang et al.: Personalized Federated Learning via Variational Bayesian Inference, 2022, Algorithm 1. The client's
posterior q is never overwritten by the server. In a round the client takes the server's w as its prior, and every
mini-batch moves q, to lower −(n/b) Σ log p + ζ · KL(q ‖ w), and then its copy of w, to lower KL(q ‖ w). The copy is
uploaded, and the server moves w towards the mean of the uploads, in v = (μ, ρ) with σ = softplus(ρ), as the paper
writes it. Noise is N(0, I). Steps are Adam's.

Of BPFed it is the case of nothing personal in the network, with q kept where BPFed restarts it from the server's
distribution; the first round of both is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference.estimators import Batch, check_estimator, data_term
from bpfed.inference.gaussian import Gaussian, either, kl, kl_gradients_p, kl_gradients_q, softplus, softplus_inverse
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import ADAPT, Finished, Initial, Method
from bpfed.methods.variational import Memory, Variational
from bpfed.nn.parameters import Personal as Parameters

if TYPE_CHECKING:
    from bpfed.nn.model import Model


class Local(NamedTuple):
    """A client during a round: posterior q, its copy of w, number of steps taken ``[S]``."""

    q: Variational
    w: Variational
    steps: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        q: Its posterior over all weights, ``[S, P]``.
        memory: Adam's memory of q and of its copy of w, where it is kept from round to round.
        steps: Local steps taken so far (in the last round, where that memory is not kept), ``[S, 1]``.
    """

    q: Gaussian
    memory: tuple[Memory, ...]
    steps: Tensor


@dataclass(frozen=True)
class PFedBayes(Method[Gaussian, Personal, Local, Gaussian]):
    """pFedBayes: every client has a Gaussian network of its own, with a prior common to all.

    A client that has not trained yet predicts with the server's w, and its first q is a copy of it.

    Attributes:
        personal: Always ``none``: the upload is a prior of all weights.
        zeta: ζ, weight of KL(q ‖ w) relative to the data term over all examples of a client; 1 is the ELBO. Of 0.1,
            0.3, 1 and 3, the default had the best NLL on held-out training data of digits.
        sigma: σ of every weight at the start.
        draws: Weight draws per step.
        estimator: How the data term is estimated, as in BPFed.
        beta: β, how far the server moves w towards the mean of the uploads; 1 is all the way.
        keep_adam: Whether a client keeps Adam's state from round to round.
    """

    name: ClassVar[str] = "pfedbayes"
    title: ClassVar[str] = "pFedBayes"
    paper: ClassVar[str] = "Zhang et al. 2022, arXiv 2206.07977"
    shared_words: ClassVar[str] = "a common prior of all weights"
    personal_words: ClassVar[str] = "distribution of all weights"
    random_words: ClassVar[str] = "every weight"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "zeta", "sigma", "beta")

    personal: Parameters = "none"
    zeta: float = 1.0
    sigma: float = 0.07
    draws: int = 2
    estimator: str = "weights"
    beta: float = 1.0
    keep_adam: bool = True

    def check(self) -> None:
        super().check()
        if self.personal != "none":
            raise UserError(
                f"personal is '{self.personal}', but pFedBayes uploads a prior of all weights; leave it at 'none'."
            )
        check_estimator(self.estimator)
        self.require(zeta="0 or more", sigma="above 0", draws="at least 1", beta="above 0 and at most 1")

    def init(self, model: Model) -> Initial[Gaussian, Personal]:
        start = Gaussian(model.initial, torch.full_like(model.initial, self.sigma))
        memory = Variational.at(start).memory
        kept = (memory, memory) if self.keep_adam else ()
        return Initial(start, Personal(start, kept, model.initial.new_zeros(1)))

    def adapting(self) -> Self:
        """A newcomer's Adam starts without memory."""
        return replace(self, keep_adam=False)

    def newcomer(self, model: Model, shared: Gaussian) -> Personal:
        return self.init(model).personal._replace(q=shared)

    def begin(self, model: Model, shared: Gaussian, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        memory = personal.memory or (None, None)
        q, w = Variational.at(_own(shared, personal), memory[0]), Variational.at(shared, memory[1])
        steps = personal.steps[:, 0]
        return Local(q, w, steps if self.keep_adam else torch.zeros_like(steps))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps = local.steps + 1
        q, w = local.q.gaussian, local.w.gaussian
        data = data_term(self.estimator, self.draws, model, q, batch)
        zeta = hparams["zeta"][:, None]
        mean, sigma = kl_gradients_q(q, w)
        new_q = local.q.moved(data.mean + zeta * mean, data.sigma + zeta * sigma, steps, hparams["lr"])
        new_w = local.w
        if phase != ADAPT:
            new_w = local.w.moved(*kl_gradients_p(new_q.gaussian, w), steps, hparams["lr"])
        return Local(new_q, new_w, steps), data.nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Gaussian, Personal]:
        q, w = local.q.gaussian, local.w.gaussian
        kept = (local.q.memory, local.w.memory) if self.keep_adam else ()
        return Finished(w, Personal(q, kept, local.steps[:, None]), {"kl": kl(q, w)})

    def aggregate(self, shared: Gaussian, uploads: Gaussian, weights: Tensor, clients: int) -> Gaussian:
        mean = weighted_mean(uploads.mean, weights)
        rho = weighted_mean(softplus_inverse(uploads.sigma), weights)
        old = softplus_inverse(shared.sigma)
        return Gaussian(torch.lerp(shared.mean, mean, self.beta), softplus(torch.lerp(old, rho, self.beta)))

    def predictive(self, model: Model, shared: Gaussian, personal: Personal) -> GaussianPredictive:
        return GaussianPredictive(_own(shared, personal))


def _own(shared: Gaussian, personal: Personal) -> Gaussian:
    """A client's q; where it has taken no step yet, the server's w."""
    return either(personal.steps > 0, personal.q, shared)
