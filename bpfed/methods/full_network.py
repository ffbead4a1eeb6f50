"""A whole network of each client's own, beside the one that all share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference.predictive import PointPredictive
from bpfed.methods.base import Initial, Method, Weights
from bpfed.nn.model import Model
from bpfed.nn.parameters import Personal


class PersonalNetwork(NamedTuple):
    """A network of the client's own, once it has one.

    Attributes:
        weights: ``[S, P]``.
        known: 1 once there are such weights, 0 before, ``[S, 1]``.
    """

    weights: Tensor
    known: Tensor

    @classmethod
    def none(cls, like: Tensor) -> PersonalNetwork:
        """No such network yet, for weights like these ``[P]``."""
        return cls(torch.zeros_like(like), like.new_zeros(1))

    @classmethod
    def of(cls, weights: Tensor) -> PersonalNetwork:
        """With these weights, ``[S, P]``."""
        return cls(weights, torch.ones_like(weights[:, :1]))

    def over(self, shared: Tensor) -> Tensor:
        """The client's own weights, or the shared ones if it has none, ``[S, P]``."""
        return torch.where(self.known > 0, self.weights, shared)


@dataclass(frozen=True)
class FullNetworkMethod(Method):
    """Base of Ditto, Per-FedAvg and pFedMe: all weights are shared, and a client predicts with a network of its own.

    A subclass says how both are trained: `begin`, `step` and `finish`. The server takes the mean of the uploads.

    Attributes:
        personal: Always ``none``: all weights are shared.
    """

    random_words: ClassVar[str] = "nothing"
    sampled: ClassVar[bool] = False

    personal: Personal = "none"

    def check(self) -> None:
        super().check()
        if self.personal != "none":
            raise UserError(f"personal is '{self.personal}', but {self.title} shares all weights; leave it at 'none'.")

    def init(self, model: Model) -> Initial:
        return Initial(Weights(model.initial), PersonalNetwork.none(model.initial))

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: PersonalNetwork) -> PointPredictive:
        return PointPredictive(personal.over(shared.weights))
