"""BPFed: shared and personal weights, both Gaussian; last round's posterior is the next round's prior.

Chen, Liu, Cao, Zhang: Bayesian Personalized Federated Learning with Shared and Personalized Uncertainty
Representations, 2023. Algorithm 1, Eq. 7-10: a round of client i, with ζ from the server and its own η_i,

    begin      q = π = (η_i, ζ)
    step       w = μ + σ ⊙ ε, ε ~ N(0, I), M draws (Eq. 7, 8)
               q: lower −(n/b) (1/M) Σ log p + T · KL(q ‖ π), π held (Eq. 9)
               π: lower KL(q ‖ π), q held (Eq. 10)
    finish     η_i is π's personal half, the upload its shared half
    aggregate  ζ: the mean of the uploads' μ and of their σ (not of its pre-image ρ)

The paper has T = 1. Further settings go beyond it: a discounted prior, no step on π, other server rules, shared
factors that are points, the two halves in turn (`bpfed.methods.bpfed`), and IVON's steps for Eq. 9
(`bpfed.inference.optim`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import rule
from bpfed.inference.estimators import Batch, DataTerm, check_estimator, data_term
from bpfed.inference.gaussian import Gaussian, discounted, either, kl, kl_gradients_p
from bpfed.inference.optim import IVON, FreeEnergyGradient, Momentum, Newton
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import Finished, Initial, Method, Phase, StateT, frozen
from bpfed.methods.variational import (
    NOISE_SIGMA,
    Memory,
    Variational,
    beyond,
    join,
    kl_gradients_beyond,
    of_likelihood,
    per_head,
    split,
)

if TYPE_CHECKING:
    from bpfed.nn.model import Model

# --- Alternating phases -----------------------------------------------------------------------------------------------
#
# Which part of a client's state a phase moves, and how many steps that part has taken.


def counted(steps: Tensor, phase: str) -> tuple[Tensor, Tensor]:
    """The numbers of steps after one more, and that of the weights which move, ``[S]``.

    Args:
        steps: Taken so far, ``[S]``; of shared and of personal weights where these alternate, ``[S, 2]``.
        phase: ``shared`` where those move.
    """
    if steps.ndim == 1:
        return steps + 1, steps + 1
    shared, personal = steps.unbind(-1)
    if phase == "shared":
        return torch.stack([shared + 1, personal], -1), shared + 1
    return torch.stack([shared, personal + 1], -1), personal + 1


def held(model: Model, before: StateT, after: StateT, phase: str) -> StateT:
    """The state after a step of this phase, tensors ``[S, P]``, with the part that it does not move as before.

    In the phase ``all`` everything moves, in ``shared`` the shared weights, in any other the personal ones.
    """
    if phase == "all":
        return after

    def part(old: Tensor, new: Tensor) -> Tensor:
        return frozen(model, new, old) if phase == "shared" else frozen(model, old, new)

    return tree_map(part, before, after)


Predict = Literal["own", "aggregated"]
Optimiser = Literal["adam", "ivon"]
Order = Literal["joint", "alternating"]


class Local(NamedTuple):
    """A client during a round: posterior q, prior π, steps taken ``[S]`` (``[S, 2]`` where the two parts alternate)."""

    q: Variational | Newton
    prior: Variational | Gaussian
    steps: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        eta: η_i, the distribution of its personal weights, ``[S, P_personal]``.
        own: q of its last round, to predict with, ``[S, P]``; empty if it predicts with (η_i, ζ).
        memory: The optimisers' memory of q and of π, where it is kept from round to round.
        steps: Local steps taken so far (in this round, where that memory is not kept), ``[S, 1]``; of the shared and of
            the personal weights where they move in turn, ``[S, 2]``.
    """

    eta: Gaussian
    own: tuple[Gaussian, ...]
    memory: tuple[Memory | Momentum, ...]
    steps: Tensor


@dataclass(frozen=True)
class BPFed(Method[Gaussian, Personal, Local, Gaussian]):
    """BPFed. The defaults are the paper's method; what it leaves open was chosen on validation data
    (docs/explanation/gotchas.md).

    η_i is the distribution of a client's personal weights, ζ that of the shared weights, q a client's posterior and π
    its prior during a round.

    Attributes:
        sigma: σ of every weight at the start. 0 is the Dirac case (a point): it needs ``temperature=0`` and
            ``prior_step=False``, and makes the method joint deterministic training of shared and personal weights.
        temperature: T, weight of the KL term in Eq. 9; 1 is the ELBO.
        discount: a in 1/s² = a/σ² + (1 − a)/s0², which gives the prior's scale s from last round's σ; 1 is the paper's
            prior, last round's posterior itself.
        prior_sigma: s0 in the formula of ``discount``.
        prior_step: Whether the prior π moves towards the posterior q in every step (Eq. 10), and gives the client's
            personal weights and its upload. If not, π is fixed during the round and q gives them.
        estimator: How the data term is estimated: ``weights`` (a draw of all weights for the batch), ``antithetic``
            (that draw, mirrored for every other example) or ``local`` (noise for each example in linear and convolution
            layers).
        draws: M, weight draws per step.
        rule: How the server combines uploads: ``mean``, ``moments``, ``precision`` or ``product``.
        shared_point: Whether the shared weights are points (σ = 0, no KL term) and only the personal ones are random;
            it needs ``prior_step=False`` and ``rule="mean"``.
        optimiser: For Eq. 9: ``adam``, or ``ivon``, natural-gradient steps (`bpfed.inference.optim`). Eq. 10 always
            uses Adam.
        newton: With ``ivon``, its step size in units of ``lr``; lr · newton = 1 is a full Newton step.
        curvature: With ``ivon``, β2, how much of the old curvature a step keeps.
        order: ``joint``: shared and personal weights move together; ``alternating``: the personal ones first, then the
            shared ones.
        body_epochs: With ``alternating``, passes over the data for the shared weights.
        keep_adam: Whether a client keeps the optimiser's state from round to round; if not, every round starts with a
            new one.
        newcomer_sigma: Prior σ of the head of a client that joins later; its prior mean is 0, so that no class is
            preferred. In regression σ is divided by the square root of the head's number of weights.
        newcomer_lr: Step size of such a client; it learns only its head, with a fixed prior.
        predict: What a client predicts with: ``own``, the posterior of its last round, or ``aggregated``, its personal
            factors and the server's shared ones.
    """

    name: ClassVar[str] = "bpfed"
    title: ClassVar[str] = "BPFed"
    paper: ClassVar[str] = "Chen et al. 2023, arXiv 2309.15499"
    shared_words: ClassVar[str] = "distribution of all but the last layer"
    personal_words: ClassVar[str] = "distribution of the last layer"
    random_words: ClassVar[str] = "every weight"
    stackable: ClassVar[tuple[str, ...]] = (
        "lr",
        "temperature",
        "discount",
        "prior_sigma",
        "sigma",
        "newton",
        "curvature",
    )

    sigma: float = 0.07
    temperature: float = 1.0
    discount: float = 1.0
    prior_sigma: float = 0.1
    prior_step: bool = True
    estimator: str = "weights"
    draws: int = 2
    rule: str = "mean"
    shared_point: bool = False
    optimiser: Optimiser = "adam"
    newton: float = 300.0
    curvature: float = 0.99
    order: Order = "joint"
    body_epochs: int = 5
    keep_adam: bool = True
    newcomer_sigma: float = 1.0
    newcomer_lr: float = 0.01
    predict: Predict = "aggregated"

    @classmethod
    def dirac(cls, **settings: object) -> BPFed:
        """The deterministic special case: σ = 0 and no KL term."""
        return cls(sigma=0.0, temperature=0.0, prior_step=False, **settings)  # type: ignore[arg-type]

    def check(self) -> None:
        super().check()
        check_estimator(self.estimator)
        rule(self.rule)
        self.require(
            draws="at least 1",
            body_epochs="at least 1",
            sigma="0 or more",
            temperature="0 or more",
            discount="from 0 to 1",
            prior_sigma="above 0",
            newcomer_sigma="above 0",
            newcomer_lr="0 or more",
            newton="above 0",
            curvature="at least 0 and below 1",
        )
        if self.sigma == 0.0 and (self.temperature != 0.0 or self.prior_step):
            raise UserError(
                "sigma = 0 (the Dirac case) has no finite KL term; set temperature = 0 and prior_step = false with it."
            )
        if self.shared_point and (self.prior_step or self.rule != "mean"):
            raise UserError(
                "shared_point is true, but points have no KL term to move a prior by and no precision to weight by; "
                "set prior_step = false and rule = 'mean'."
            )
        if self.optimiser == "ivon" and (self.temperature == 0.0 or self.sigma == 0.0 or self.shared_point):
            raise UserError(
                "optimiser is 'ivon', which needs a variance for every weight; set sigma and temperature above 0 and "
                "shared_point = false, or use 'adam'."
            )

    def trace_key(self) -> tuple[Any, ...]:
        return (*super().trace_key(), self.sigma > 0.0)

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        if self.order == "joint":
            return super().phases(epochs)
        return (Phase("personal", epochs), Phase("shared", self.body_epochs))

    def init(self, model: Model) -> Initial[Gaussian, Personal]:
        start = Gaussian(model.initial, torch.full_like(model.initial, self.sigma))
        start.sigma[: self._points(model)] = 0.0
        shared, personal = split(model, start)
        own = (start,) if self.predict == "own" else ()
        memories: tuple[Memory | Momentum, ...] = ()
        if self.keep_adam:
            memories = (self._optimised(start).memory, *((Variational.at(start).memory,) if self.prior_step else ()))
        return Initial(shared, Personal(personal, own, memories, model.initial.new_zeros(self._counts)))

    def begin(self, model: Model, shared: Gaussian, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        start = join(shared, personal.eta)  # q = π = (η_i, ζ), and with a discount π is wider
        discount, scale = hparams["discount"][:, None], hparams["prior_sigma"][:, None]
        before = shared if self.shared_point else discounted(shared, discount, scale)
        prior = join(before, discounted(personal.eta, discount, scale))
        memory = personal.memory or (None, None)
        moving = Variational.at(prior, memory[1]) if self.prior_step else prior  # type: ignore[arg-type]
        steps = personal.steps.squeeze(-1)
        return Local(self._optimised(start, memory[0]), moving, steps if self.keep_adam else torch.zeros_like(steps))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        taken, steps = counted(local.steps, phase)
        prior = _gaussian(local.prior)
        data = data_term(self.estimator, self.draws, model, local.q.gaussian, batch)  # Eq. 7, 8
        q = self._lowered(model, local.q, data, prior, steps, hparams)  # Eq. 9
        moved = local.prior
        if isinstance(local.prior, Variational):
            moved = local.prior.moved(*kl_gradients_p(q.gaussian, prior), steps, hparams["lr"])  # Eq. 10
        q = held(model, local.q, q, phase)
        return Local(q, held(model, local.prior, moved, phase), taken), data.nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Gaussian, Personal]:
        q, prior = local.q.gaussian, _gaussian(local.prior)
        shared, personal = split(model, prior if self.prior_step else q)
        own = (q,) if self.predict == "own" else ()
        points = self._points(model)
        info = {"kl": kl(beyond(points, q), beyond(points, prior))} if self.sigma > 0.0 else {}
        optimised = [v for v in (local.q, local.prior) if isinstance(v, Variational | Newton)]
        memories = tuple(v.memory for v in optimised) if self.keep_adam else ()
        return Finished(shared, Personal(personal, own, memories, local.steps.view(-1, self._counts)), info)

    def aggregate(self, shared: Gaussian, uploads: Gaussian, weights: Tensor, clients: int) -> Gaussian:
        return rule(self.rule)(uploads, weights)

    def predictive(self, model: Model, shared: Gaussian, personal: Personal) -> GaussianPredictive:
        weights = join(shared, personal.eta)
        if self.predict == "own" and personal.own:
            weights = either(personal.steps[:, :1] > 0, personal.own[0], weights)
        return GaussianPredictive(weights)

    def adapting(self) -> Self:
        """A newcomer's prior is held: its few examples count once, however often they are passed over."""
        lr = self.newcomer_lr if self.sigma > 0.0 and self.optimiser == "adam" else self.lr
        return replace(
            self, lr=lr, prior_step=False, keep_adam=False, predict="aggregated", discount=1.0, order="joint"
        )

    def newcomer(self, model: Model, shared: Gaussian) -> Personal:
        start = self.init(model).personal
        if self.personal != "head" or self.sigma == 0.0:
            return start
        noise = of_likelihood(model)
        mean = torch.where(noise, start.eta.mean, 0.0)
        return start._replace(
            eta=Gaussian(mean, torch.where(noise, NOISE_SIGMA, self.newcomer_sigma * per_head(model)))
        )

    def _lowered(
        self,
        model: Model,
        q: Variational | Newton,
        data: DataTerm,
        prior: Gaussian,
        steps: Tensor,
        hparams: dict[str, Tensor],
    ) -> Variational | Newton:
        """q after a step on Eq. 9: the data term, scaled by n/b, and T · KL(q ‖ π) with π held."""
        if isinstance(q, Newton):
            rate = hparams["lr"] * hparams["newton"]
            gradient = FreeEnergyGradient(data.mean, data.sigma, prior, hparams["temperature"])
            return Newton.at(*IVON.update(q.gaussian, gradient, q.memory, steps, rate, hparams))
        mean, sigma = kl_gradients_beyond(self._points(model), q.gaussian, prior)
        temperature = hparams["temperature"][:, None]
        return q.moved(data.mean + temperature * mean, data.sigma + temperature * sigma, steps, hparams["lr"])

    def _optimised(self, q: Gaussian, memory: Memory | Momentum | None = None) -> Variational | Newton:
        return (Newton if self.optimiser == "ivon" else Variational).at(q, memory)  # type: ignore[arg-type]

    @property
    def _counts(self) -> int:
        return 1 if self.order == "joint" else 2

    def _points(self, model: Model) -> int:
        """How many weights, from the first on, are points: σ = 0 and no KL term."""
        if self.sigma == 0.0:
            return model.layout.total
        return model.layout.shared if self.shared_point else 0


def _gaussian(prior: Variational | Gaussian) -> Gaussian:
    return prior.gaussian if isinstance(prior, Variational) else prior
