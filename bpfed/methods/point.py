"""Point-estimate weights, split into shared and personal: what FedAvg, FedPer, FedRep and their kin have in common.

A local step is one of Adam's, or of descent with momentum, on the mean −log p of the batch. The methods differ in which
weights are personal (`personal`) and in which of the two parts moves in which phase of a round (`phases`). With Adam
each is a Dirac case of BPFed, σ = 0 and no KL term together (``BPFed.dirac``): BPFed then follows n times the mean, and
Adam, which divides by the gradient's own size, sees no difference but for its ε of 1e-8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference.estimators import Batch, mean_gradient
from bpfed.inference.laplace import CURVATURE, Curvature, laplace
from bpfed.inference.optim import Adam, Optimizer, Velocity, get_optimizer
from bpfed.inference.predictive import PointPredictive, Predictive
from bpfed.methods.base import ADAPT, TUNE, Finished, Initial, LocalT, Method, Phase, Weights
from bpfed.nn.parameters import Personal

if TYPE_CHECKING:
    from bpfed.nn.model import Model


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
class FullNetworkMethod(Method[Weights, PersonalNetwork, LocalT, Weights]):
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

    def init(self, model: Model) -> Initial[Weights, PersonalNetwork]:
        return Initial(Weights(model.initial), PersonalNetwork.none(model.initial))

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor, clients: int) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: PersonalNetwork) -> PointPredictive:
        return PointPredictive(personal.over(shared.weights))


# --- Shared and personal weights --------------------------------------------------------------------------------------


Optimiser = Literal["adam", "sgd"]
#: Whether the shared and whether the personal weights move, by phase.
MOVES = {
    "all": (True, True),
    "shared": (True, False),
    "personal": (False, True),
    ADAPT: (False, True),
    TUNE: (True, True),
}
#: What a method that does not split the network does, by its ``personal``; and the name of that method.
WHOLE = {"none": ("shares all weights", "fedavg"), "all": ("keeps all weights with the client", "local")}


class Part(NamedTuple):
    """Shared or personal weights in training, ``[S, P_part]``, the optimiser's memory and the steps taken ``[S]``."""

    weights: Tensor
    memory: Adam | Velocity
    steps: Tensor

    def moved(self, optimizer: Optimizer[Tensor, Tensor, Any], gradient: Tensor, hparams: dict[str, Tensor]) -> Part:
        """After one step of the optimiser whose memory it has."""
        steps = self.steps + 1
        return Part(*optimizer.update(self.weights, gradient, self.memory, steps, hparams["lr"], hparams), steps)


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        shared: Its copy of the shared weights.
        personal: Its personal weights.
        tuned: Whether all weights have been fine-tuned, 0 or 1, ``[S]``.
        curvature: Of the last layer, where the Laplace approximation is asked for.
        first: As in `Kept`.
    """

    shared: Part
    personal: Part
    tuned: Tensor
    curvature: tuple[Curvature, ...]
    first: tuple[Tensor, ...]

    @property
    def weights(self) -> Tensor:
        """All weights, ``[S, P]``."""
        return _join(self.shared.weights, self.personal.weights)


class Memory(NamedTuple):
    """The optimiser's memory of both parts, and the steps that each has taken so far, ``[S, 2]``."""

    shared: Adam | Velocity
    personal: Adam | Velocity
    steps: Tensor


class Kept(NamedTuple):
    """What a client keeps.

    Attributes:
        weights: Its personal weights, ``[S, P_personal]``.
        memory: The optimiser's, where it is kept from round to round.
        own: The fine-tuned network, where all weights are fine-tuned.
        curvature: Of the last layer, where the Laplace approximation is asked for.
        first: The personal weights that all clients of the run were given at the start, where rounds begin with these.
    """

    weights: Tensor
    memory: tuple[Memory, ...]
    own: tuple[PersonalNetwork, ...]
    curvature: tuple[Curvature, ...]
    first: tuple[Tensor, ...]


@dataclass(frozen=True)
class Point(Method[Weights, Kept, Local, Weights]):
    """Base of the methods with point-estimate weights.

    Attributes:
        optimiser: ``adam``, or ``sgd``, gradient descent with momentum.
        momentum: With ``sgd``, how much of each step carries over to the next.
        decay: a in the term a ‖w‖²/2 that is added to −log p summed over a client's examples: a prior N(0, 1/a) of its
            weights, which counts for less the more examples there are.
        keep_adam: Whether a client keeps the optimiser's state from round to round; if not, every round starts with a
            new one.
        laplace: Whether the last layer gets a Gaussian posterior after training, by the Laplace approximation.
        laplace_precision: With ``laplace``, precision of the prior; 0: chosen for each client by the marginal
            likelihood.
    """

    random_words: ClassVar[str] = "nothing (the last layer with laplace)"
    sampled: ClassVar[bool] = False
    #: Whether every round starts over with the first personal weights.
    starts_over: ClassVar[bool] = False
    stackable: ClassVar[tuple[str, ...]] = ("lr", "momentum", "decay")

    optimiser: Optimiser = "adam"
    momentum: float = 0.5
    decay: float = 0.0
    keep_adam: bool = True
    laplace: bool = False
    laplace_precision: float = 300.0

    def check(self) -> None:
        super().check()
        self.require(momentum="at least 0 and below 1", decay="0 or more", laplace_precision="0 or more")
        default = type(self).personal
        if default in tuple(WHOLE) and self.personal != default:
            raise UserError(
                f"personal is '{self.personal}', but {self.title} {WHOLE[str(default)][0]}; leave it at '{default}'."
            )
        if default not in tuple(WHOLE) and self.personal in tuple(WHOLE):
            what, name = WHOLE[str(self.personal)]
            raise UserError(
                f"personal is '{self.personal}', but {self.title} needs both shared and personal weights; the method "
                f"that {what} is '{name}'."
            )

    def trace_key(self) -> tuple[Any, ...]:
        return (*super().trace_key(), self.decay > 0.0)

    def finetuning(self, epochs: int) -> tuple[Phase, ...]:
        """The part of `tuning` in which weights move."""
        return ()

    def tuning(self, epochs: int) -> tuple[Phase, ...]:
        return self.finetuning(epochs) + self._measuring

    def adaptation(self, epochs: int) -> tuple[Phase, ...]:
        return (self.finetuning(epochs) or (Phase(ADAPT, epochs),)) + self._measuring

    @property
    def _measuring(self) -> tuple[Phase, ...]:
        return (Phase(CURVATURE, 1),) if self.laplace else ()

    @property
    def keeps_network(self) -> bool:
        """Whether all weights are fine-tuned, so that a client has a whole network of its own."""
        return any(phase.name == TUNE for phase in self.finetuning(1))

    def init(self, model: Model) -> Initial[Weights, Kept]:
        shared, personal = model.layout.split(model.initial)
        memory = self._fresh(shared, personal)
        kept = Kept(
            personal,
            (memory,) if self.keep_adam else (),
            (PersonalNetwork.none(model.initial),) if self.keeps_network else (),
            (Curvature.zero(model),) if self.laplace else (),
            (personal,) if self.starts_over else (),
        )
        return Initial(Weights(shared), kept)

    def _fresh(self, shared: Tensor, personal: Tensor) -> Memory:
        """Of no step yet, for weights ``[..., P_part]``."""
        optimizer = get_optimizer(self.optimiser)
        return Memory(optimizer.init(shared), optimizer.init(personal), shared.new_zeros(*shared.shape[:-1], 2))

    def begin(self, model: Model, shared: Weights, personal: Kept, hparams: dict[str, Tensor]) -> Local:
        mine, ours = personal.first[0] if personal.first else personal.weights, shared.weights
        memory = personal.memory[0] if personal.memory else self._fresh(ours, mine)
        return Local(
            Part(ours, memory.shared, memory.steps[:, 0]),
            Part(mine, memory.personal, memory.steps[:, 1]),
            ours.new_zeros(len(ours)),
            tuple(curvature.emptied() for curvature in personal.curvature),
            personal.first,
        )

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        if phase == CURVATURE:
            curvature, loss = local.curvature[0].plus(model, local.weights, batch)
            return local._replace(curvature=(curvature,)), loss
        nll, gradient = mean_gradient(model, local.weights, batch)
        if self.decay > 0.0:
            gradient = gradient + (hparams["decay"] / batch.size.clamp(min=1.0))[:, None] * local.weights
        gradients, optimizer = model.layout.split(gradient), get_optimizer(self.optimiser)
        shared, personal = (
            part.moved(optimizer, g, hparams) if moves else part
            for part, g, moves in zip(local[:2], gradients, MOVES[phase], strict=True)
        )
        tuned = torch.ones_like(local.tuned) if phase == TUNE else local.tuned
        return local._replace(shared=shared, personal=personal, tuned=tuned), nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Weights, Kept]:
        memory = Memory(
            local.shared.memory, local.personal.memory, torch.stack([local.shared.steps, local.personal.steps], -1)
        )
        kept = Kept(
            local.personal.weights,
            (memory,) if self.keep_adam else (),
            (PersonalNetwork(local.weights, local.tuned[:, None]),) if self.keeps_network else (),
            local.curvature,
            local.first,
        )
        return Finished(Weights(local.shared.weights), kept, {})

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor, clients: int) -> Weights:
        return Weights(weighted_mean(uploads.weights, weights))

    def predictive(self, model: Model, shared: Weights, personal: Kept) -> Predictive:
        weights = _join(shared.weights, personal.weights)
        if personal.own:
            weights = personal.own[0].over(weights)
        if personal.curvature:
            return laplace(model, weights, personal.curvature[0], self.laplace_precision)
        return PointPredictive(weights)


def _join(shared: Tensor, personal: Tensor) -> Tensor:
    whole = [t for t in (shared, personal) if t.shape[-1]]
    return torch.cat(whole, -1) if len(whole) == 2 else whole[0]
