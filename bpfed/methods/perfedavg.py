"""Per-FedAvg: weights from which a step or a few of gradient descent make a good network for each client.

Fallah, Mokhtari and Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, 2020. The clients minimise f(w − α ∇f(w)), the loss after one step. A local step of their
Algorithm 1 takes three batches D, D', D'':

    w̃ ← w − α ∇f(w; D)
    w ← w − β (I − α ∇²f(w; D'')) ∇f(w̃; D')

and the first-order variant leaves the Hessian out. The three batches are the mini-batch dealt out in turn (see
`parts`), so that a round sees no more data than that of another method. The outer step, β above, is Adam's, as for
every method here, so that methods differ in what they share and not in their optimiser; the inner step is plain
descent, since the Hessian above is the derivative of such a step.

Before a client predicts, it takes passes of plain descent with the inner step size over its own training examples. It
never sees a label of an example that it is tested on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bpfed.inference import inputs, rng
from bpfed.inference.estimators import Batch, mean_gradient
from bpfed.inference.optim import ADAM, Adam
from bpfed.methods.base import TUNE, Finished, Phase, Weights
from bpfed.methods.point import FullNetworkMethod, PersonalNetwork

if TYPE_CHECKING:
    from bpfed.nn.model import Model

Order = Literal["first", "full"]


class Local(NamedTuple):
    """A client during a round: weights ``[S, P]``, Adam's memory, steps taken ``[S]``, 1 once tuned ``[S, 1]``."""

    weights: Tensor
    memory: Adam
    steps: Tensor
    tuned: Tensor


@dataclass(frozen=True)
class PerFedAvg(FullNetworkMethod[Local]):
    """Per-FedAvg: one network for all, trained to be good after each client's own steps of gradient descent.

    The inner step size was chosen on training examples that were held out.

    Attributes:
        inner_lr: α, step size of a client's own steps, in training and before it predicts.
        order: ``full``: with the Hessian of the inner step; ``first``: without it, a third cheaper.
        tuning_epochs: Passes of such steps over a client's training examples before it predicts.
    """

    name: ClassVar[str] = "perfedavg"
    title: ClassVar[str] = "Per-FedAvg"
    paper: ClassVar[str] = "Fallah et al. 2020, arXiv 2002.07948"
    shared_words: ClassVar[str] = "all weights, as a start for the personal ones"
    personal_words: ClassVar[str] = "all weights, after steps of its own"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "inner_lr")

    inner_lr: float = 0.03
    order: Order = "full"
    tuning_epochs: int = 1

    def check(self) -> None:
        super().check()
        self.require(inner_lr="0 or more", tuning_epochs="at least 1")

    def tuning(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(TUNE, self.tuning_epochs),)

    def begin(self, model: Model, shared: Weights, personal: PersonalNetwork, hparams: dict[str, Tensor]) -> Local:
        weights = shared.weights
        return Local(weights, ADAM.init(weights), weights.new_zeros(len(weights)), weights.new_zeros(len(weights), 1))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        rate = hparams["inner_lr"][:, None]
        if phase == TUNE:
            nll, gradient = mean_gradient(model, local.weights, batch)
            return local._replace(weights=local.weights - rate * gradient, tuned=torch.ones_like(local.tuned)), nll

        steps = local.steps + 1
        inner, outer, *third = parts(batch, 3 if self.order == "full" else 2)
        _, gradient = mean_gradient(model, local.weights, inner)
        nll, gradient = mean_gradient(model, local.weights - rate * gradient, outer)
        if self.order == "full":
            part = third[0]
            product = model.hessian_product(local.weights, gradient, part.x, part.y, part.mask, part.key)
            gradient = gradient - rate * product / part.examples[:, None]
        weights, memory = ADAM.update(local.weights, gradient, local.memory, steps, hparams["lr"])
        return local._replace(weights=weights, memory=memory, steps=steps), nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Weights, PersonalNetwork]:
        # The shared weights that a client has trained are not its own network: that comes from the server's, by tuning.
        return Finished(Weights(local.weights), PersonalNetwork(local.weights * local.tuned, local.tuned), {})


def parts(batch: Batch, count: int) -> list[Batch]:
    """The examples of a mini-batch dealt out in turn to ``count`` batches.

    They are disjoint where there are that many examples. Where there are fewer, the first ones are used again, one in
    each batch; a single example is in all of them.
    """
    used = batch.mask.sum(-1).long()[:, None]
    order = batch.mask.argsort(dim=-1, descending=True, stable=True)  # padding last
    stride = used.clamp(1, count)
    slot = torch.arange(-(-order.shape[1] // count), device=used.device)
    client = torch.arange(len(used), device=used.device)[:, None]
    found = []
    for part in range(count):
        at = part % stride + slot * stride
        rows = order.gather(1, at.clamp(max=order.shape[1] - 1))
        key = rng.fold(batch.key, part) if part else batch.key
        mask = (at < used).to(batch.mask.dtype)
        found.append(Batch(inputs.take(batch.x, (client, rows)), batch.y[client, rows], mask, batch.size, key))
    return found
