"""BPFed's recipe with a population of heads: the server learns a prior over personal weights from summed moments.

As `bpfed.methods.recipe`, with a T that rises for clients with few examples and settings of its own, but for the prior
of the personal weights, which is N(m_h, s_h²) weight by weight, with m_h and s_h estimated from all clients (empirical
Bayes; the moment matching of the paper's Eq. 22-25):

    m_h  ←  mean_i μ_i                       s_h²  ←  (1 − r) s_h² + r mean_i[σ_i² + (μ_i − m_h)²]

This has a price in privacy, which is why it is a method of its own and never a default: a client uploads the mean and
the second moment of its personal weights. The server needs nothing but their sums over clients, so secure summation
would hide each client's; without it the server sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import mean, weighted_mean
from bpfed.config.migrations import refuses_constants
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.predictive import GaussianPredictive, PointPredictive
from bpfed.methods.base import Finished, Initial
from bpfed.methods.recipe import Local, Personal, Recipe
from bpfed.methods.variational import biases, join

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Least variance of a head's prior.
SMALLEST = 1e-8


class Server(NamedTuple):
    """What the server holds, and what is uploaded.

    Attributes:
        zeta: Distribution of the shared weights, ``[P_shared]``.
        first: Mean of a personal factor, E h, ``[P_personal]``.
        second: Its second moment, E h², ``[P_personal]``.
    """

    zeta: Gaussian
    first: Tensor
    second: Tensor

    @property
    def heads(self) -> Gaussian:
        """The prior of heads, N(m_h, s_h²)."""
        return Gaussian(self.first, (self.second - self.first.square()).clamp(min=SMALLEST).sqrt())


@refuses_constants
@dataclass(frozen=True)
class Population(Recipe):
    """BPFed's recipe with a learnt prior of heads; clients upload the moments of their personal weights.

    Attributes:
        head_sigma: s_h at the start, for all head weights but biases.
        head_gain: m_h at the start, in units of the head that all clients start with.
        head_rate: r, how far s_h² moves in a round; 1 is all the way.
        sigma: Always true: the spread of heads is estimated from their widths too.
    """

    name: ClassVar[str] = "bpfed-population"
    title: ClassVar[str] = "BPFed population"
    shared_words: ClassVar[str] = "distribution of all but the last layer; a prior of last layers, from their moments"
    population: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("personal",)

    #: T is up to twice as high for clients with few examples.
    max_temperature_factor: ClassVar[float] = 2.0
    weight_decay: ClassVar[float] = 0.2
    #: s_h of biases at the start.
    bias_sigma: ClassVar[float] = 0.3
    max_lr_epochs: ClassVar[float] = 4.0

    temperature: float = 0.1
    head_gain: float = 0.0
    head_sigma: float = 0.3
    head_rate: float = 0.2

    def check(self) -> None:
        super().check()
        self.require(head_rate="from 0 to 1")
        if not self.sigma:
            raise UserError(
                "sigma is False, but bpfed-population estimates the prior of heads from their widths too; use bpfed-recipe "
                "for weights that are points."
            )
        if self.personal == "none":
            raise UserError("personal is 'none', but bpfed-population learns a prior of personal weights; choose some.")

    def init(self, model: Model) -> Initial[Server, Personal]:  # type: ignore[override]
        start = super().init(model)
        first = torch.where(biases(model), 0.0, self.head_gain * start.personal.first)
        sigma = torch.where(biases(model), self.bias_sigma, self.head_sigma)
        return Initial(Server(start.shared, first, first.square() + sigma.square()), start.personal)

    # The server holds more than Recipe's ζ: where Recipe's functions take ζ, these take a `Server` and pass its ζ on.

    def newcomer(self, model: Model, shared: Server) -> Personal:  # type: ignore[override]
        return self.init(model).personal._replace(head=shared.heads)

    def begin(  # type: ignore[override]
        self, model: Model, shared: Server, personal: Personal, hparams: dict[str, Tensor]
    ) -> Local:
        local = super().begin(model, shared.zeta, personal, hparams)
        body = Gaussian(*(model.layout.split(t)[0] for t in local.prior))
        return local._replace(prior=join(body, shared.heads))

    def finish(  # type: ignore[override]
        self, model: Model, local: Local, hparams: dict[str, Tensor]
    ) -> Finished[Server, Personal]:
        done = super().finish(model, local, hparams)
        head = done.personal.head
        upload = Server(done.upload, head.mean, head.mean.square() + head.sigma.square())
        return Finished(upload, done.personal, done.info)

    def aggregate(self, shared: Server, uploads: Server, weights: Tensor, clients: int) -> Server:  # type: ignore[override]
        first, second = weighted_mean(uploads.first, weights), weighted_mean(uploads.second, weights)
        variance = torch.lerp(shared.heads.sigma.square(), second - first.square(), self.head_rate)
        return Server(mean(uploads.zeta, weights), first, variance.clamp(min=SMALLEST) + first.square())

    def predictive(  # type: ignore[override]
        self, model: Model, shared: Server, personal: Personal
    ) -> GaussianPredictive | PointPredictive:
        return super().predictive(model, shared.zeta, personal)
