"""Ditto: a network of each client's own, pulled towards the one that all clients train.

Li, Hu, Beirami and Smith: Ditto: Fair and Robust Federated Learning Through Personalization, 2021. In its Algorithm 1 a
client that is sent w_t does two things that do not depend on each other:

    w ← w − η ∇f(w)                      from w_t, uploaded: the shared problem, here FedAvg
    v ← v − η (∇f(v) + λ (v − w_t))      from its own v, kept: the personal problem

The method makes both steps on each mini-batch. Steps are Adam's, as for every method here, so that methods differ in
what they share and not in their optimiser; a stationary point of the personal problem is the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from bpfed.inference.estimators import Batch, mean_gradient
from bpfed.inference.optim import ADAM, Adam
from bpfed.methods.base import ADAPT, Finished, Weights
from bpfed.methods.point import FullNetworkMethod, PersonalNetwork

if TYPE_CHECKING:
    from bpfed.nn.model import Model


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        weights: w, its copy of the shared network, ``[S, P]``.
        memory: Adam's, of w.
        own: v, its own network, ``[S, P]``.
        own_memory: Adam's, of v.
        centre: w_t, what the server sent, ``[S, P]``.
        steps: Number of steps taken, ``[S]``.
    """

    weights: Tensor
    memory: Adam
    own: Tensor
    own_memory: Adam
    centre: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Ditto(FullNetworkMethod[Local]):
    """Ditto: FedAvg, and for each client a network of its own that is pulled towards the shared one.

    A client's own network starts as the shared one that it is first sent. Until then it predicts with the shared one.
    The default of λ was chosen on training examples that were held out.

    Attributes:
        pull: λ, how strongly a client's own weights are pulled towards the shared ones; 0 is training alone.
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2012.04221"
    shared_words: ClassVar[str] = "all weights, as the centre of the personal ones"
    personal_words: ClassVar[str] = "a second copy of all weights"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "pull")

    pull: float = 0.1

    def check(self) -> None:
        super().check()
        self.require(pull="0 or more")

    def begin(self, model: Model, shared: Weights, personal: PersonalNetwork, hparams: dict[str, Tensor]) -> Local:
        weights = shared.weights
        memory = ADAM.init(weights)
        return Local(weights, memory, personal.over(weights), memory, weights, weights.new_zeros(len(weights)))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps = local.steps + 1
        nll, gradient = mean_gradient(model, local.own, batch)
        pulled = gradient + hparams["pull"][:, None] * (local.own - local.centre)
        own, own_memory = ADAM.update(local.own, pulled, local.own_memory, steps, hparams["lr"])
        new = local._replace(own=own, own_memory=own_memory, steps=steps)
        if phase == ADAPT:
            return new, nll

        nll, gradient = mean_gradient(model, local.weights, batch)
        weights, memory = ADAM.update(local.weights, gradient, local.memory, steps, hparams["lr"])
        return new._replace(weights=weights, memory=memory), nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Weights, PersonalNetwork]:
        return Finished(Weights(local.weights), PersonalNetwork.of(local.own), {})
