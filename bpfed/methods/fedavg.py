"""FedAvg: one point-estimate network for all, the mean of what the clients trained.

McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017. Local steps are Adam's, as
for every method here, so that methods differ in what they share and not in their optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from bpfed.aggregate import weighted_mean
from bpfed.errors import UserError
from bpfed.estimators import Batch
from bpfed.factors import Personal
from bpfed.methods.base import Finished, Initial, Method, PointPredictive
from bpfed.model import Model
from bpfed.optim import Adam, adam


class Local(NamedTuple):
    """A client during a round: weights ``[S, P]``, Adam's memory, number of steps taken ``[S]``."""

    weights: Tensor
    memory: Adam
    steps: Tensor


class Weights(NamedTuple):
    """The network's weights: ``[P]`` at the server, ``[S, P]`` as uploads."""

    weights: Tensor


class Nothing(NamedTuple):
    """A client keeps nothing between rounds."""


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    shared_words: ClassVar[str] = "all weights"
    personal_words: ClassVar[str] = "nothing"
    random_words: ClassVar[str] = "nothing"

    personal: Personal = "none"

    def check(self) -> None:
        super().check()
        if self.personal != "none":
            raise UserError(f"personal is '{self.personal}', but FedAvg shares all weights; leave it at 'none'.")

    def init(self, model: Model) -> Initial:
        return Initial(Weights(model.initial), Nothing())

    def begin(self, model: Model, shared: Weights, personal: Nothing, hyper: dict[str, Tensor]) -> Local:
        weights = shared.weights.clone()
        return Local(weights, Adam.like(weights), weights.new_zeros(len(weights)))

    def step(
        self, model: Model, local: Local, batch: Batch, hyper: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps = local.steps + 1
        total, gradient = model.gradient(local.weights, batch.x, batch.y, batch.mask, batch.key)
        count = batch.mask.sum(-1).clamp(min=1.0)
        weights, memory = adam(local.weights, gradient / count[:, None], local.memory, steps, hyper["lr"])
        return Local(weights, memory, steps), total / count

    def finish(self, model: Model, local: Local, hyper: dict[str, Tensor]) -> Finished:
        return Finished(Weights(local.weights), Nothing(), {})

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: Nothing) -> PointPredictive:
        return PointPredictive(shared.weights)
