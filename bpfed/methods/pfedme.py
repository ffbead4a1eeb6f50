"""pFedMe: every client's loss is replaced by its Moreau envelope, whose minimiser is the client's own network.

Dinh, Tran and Nguyen: Personalized Federated Learning with Moreau Envelopes, 2020. In its Algorithm 1 a client that is
sent w takes, for each mini-batch, K gradient steps on its own θ towards the minimum of

    h(θ) = f(θ) + λ/2 |θ − w|²

and then one step on w along the envelope's gradient, w ← w − η λ (w − θ). The server mixes the mean of the uploaded w
into its own: w ← (1 − β) w + β mean. Here θ starts a round at w, and each mini-batch where the one before left it; the
paper leaves that open. Both steps are plain gradient steps: the outer one follows λ (w − θ) alone, which needs no
scaling by Adam, and the inner problem is nearly a quadratic of curvature λ, which plain steps solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.inference import rng
from bpfed.inference.estimators import Batch, mean_gradient
from bpfed.methods.base import ADAPT, Finished, Weights
from bpfed.methods.point import FullNetworkMethod, PersonalNetwork

if TYPE_CHECKING:
    from bpfed.nn.model import Model


class Local(NamedTuple):
    """A client during a round: w, its copy of the shared network, and θ, its own; ``[S, P]`` each."""

    weights: Tensor
    own: Tensor


@dataclass(frozen=True)
class PFedMe(FullNetworkMethod[Local]):
    """pFedMe: Moreau envelopes. The shared network is the centre of the clients' own.

    Only the clients that take part in a round train in it. One that never did predicts with the shared network. K = 5
    and β = 1 are those of the authors' runs; λ (there 15) and the two step sizes were chosen on training examples that
    were held out.

    Attributes:
        lr: η, step size on the client's copy of the shared weights; each step goes a fraction η λ of the way to its
            own.
        inner_lr: Step size on the client's own weights.
        inner_steps: K, steps on the client's own weights per mini-batch.
        pull: λ, how strongly a client's own weights are pulled towards the shared ones.
        mixing: β, weight of the uploads' mean in the server's new weights; it may be above 1.
    """

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "Dinh et al. 2020, arXiv 2006.08848"
    shared_words: ClassVar[str] = "all weights, as the centre of the personal ones"
    personal_words: ClassVar[str] = "a second copy of all weights"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "inner_lr", "pull")

    lr: float = 0.15
    inner_lr: float = 0.1
    inner_steps: int = 5
    pull: float = 5.0
    mixing: float = 1.0

    def check(self) -> None:
        super().check()
        self.require(inner_lr="0 or more", inner_steps="at least 1", pull="0 or more", mixing="0 or more")
        for name in ("lr", "inner_lr"):
            if not getattr(self, name) * self.pull < 2.0:
                raise UserError(
                    f"{name} * pull is {getattr(self, name) * self.pull:g}, but steps diverge from 2 on; lower "
                    f"method.{name} or method.pull."
                )

    def begin(self, model: Model, shared: Weights, personal: PersonalNetwork, hparams: dict[str, Tensor]) -> Local:
        return Local(shared.weights, shared.weights)

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        rate, pull = hparams["inner_lr"][:, None], hparams["pull"][:, None]
        own, losses = local.own, []
        for k in range(self.inner_steps):
            key = rng.fold(batch.key, k) if k else batch.key
            nll, gradient = mean_gradient(model, own, batch._replace(key=key))
            own = own - rate * (gradient + pull * (own - local.weights))
            losses.append(nll)
        weights = local.weights
        if phase != ADAPT:
            weights = weights - hparams["lr"][:, None] * pull * (weights - own)
        return Local(weights, own), losses[0]  # before the client has fitted this batch, as other methods report it

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Weights, PersonalNetwork]:
        return Finished(Weights(local.weights), PersonalNetwork.of(local.own), {})

    def aggregate(self, shared: Weights, uploads: Weights, weights: Tensor, clients: int) -> Weights:
        mean = weighted_mean(uploads.weights, weights)
        return Weights((1.0 - self.mixing) * shared.weights + self.mixing * mean)
