"""SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378) for bpfed, and a partition with clients of unequal size.

The entry points in ``pyproject.toml`` give both a name; bpfed finds them once this package is installed.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bpfed.aggregation.rules import weighted_mean
from bpfed.inference.estimators import mean_gradient
from bpfed.methods.base import Finished, Initial, Method, PointPredictive


class Shared(NamedTuple):  # [P] at the server, [S, P] as uploads
    weights: Tensor  # x
    control: Tensor  # c


class Personal(NamedTuple):  # what a client keeps between rounds, [S, P]
    control: Tensor  # c_i


class Local(NamedTuple):  # a client during a round
    weights: Tensor  # y_i, [S, P]
    server: Shared
    control: Tensor  # c_i
    steps: Tensor  # K so far, [S]


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg whose local steps are corrected by control variates, so that clients do not drift apart."""

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    paper: ClassVar[str] = "Karimireddy et al. 2020, arXiv 1910.06378"
    shared_words: ClassVar[str] = "all weights and a control variate"
    personal_words: ClassVar[str] = "a control variate"
    random_words: ClassVar[str] = "nothing"
    sampled: ClassVar[bool] = False
    personal: str = "none"
    lr: float = 0.05

    def init(self, model):
        zero = torch.zeros_like(model.initial)
        return Initial(Shared(model.initial, zero), Personal(zero))

    def begin(self, model, shared, personal, hparams):
        return Local(shared.weights, shared, personal.control, torch.zeros_like(hparams["lr"]))

    def step(self, model, local, batch, hparams, phase):
        nll, gradient = mean_gradient(model, local.weights, batch)
        corrected = gradient - local.control + local.server.control
        weights = local.weights - hparams["lr"][:, None] * corrected  # Eq. 3
        return local._replace(weights=weights, steps=local.steps + 1), nll

    def finish(self, model, local, hparams):
        server, length = local.server, (local.steps * hparams["lr"])[:, None]  # K η
        mean = (server.weights - local.weights) / length.clamp(min=1e-12)
        new = local.control - server.control + mean  # Eq. 4, option II
        new = torch.where(length > 0, new, local.control)
        change = new - local.control
        # An upload is the server's state as this client would have it, so that what it changed can be clipped.
        return Finished(Shared(local.weights, server.control + change), Personal(new), {})

    def aggregate(self, shared, uploads, weights, clients):
        share = len(weights) / clients  # S / N
        change = uploads.control.mean(0) - shared.control
        return Shared(weighted_mean(uploads.weights, weights), shared.control + share * change)  # Eq. 5 with η_g = 1

    def predictive(self, model, shared, personal):
        return PointPredictive(shared.weights)


def quantity(y, clients, rng, number=1.0):
    """Clients of unequal size, whatever the labels: client k has a share of examples in proportion to 1 / (k + 1)^number.

    Args:
        y: Class of each example, ``[E]``.
        clients: How many there are, N.
        rng: A numpy generator, the only source of randomness.
        number: What stands after the colon in ``--partition quantity:1.5``.

    Returns:
        The client of each example, ``[E]``, from 0 to N - 1; -1 would be nobody.
    """
    shares = 1.0 / np.arange(1, clients + 1) ** number
    drawn = rng.choice(clients, size=len(y) - clients, p=shares / shares.sum())
    return rng.permutation(np.concatenate([np.arange(clients), drawn]))  # everybody has one example at least
