"""BPFed's recipe: the model of BPFed with priors that stay put, so that calibration does not depend on when one stops.

BPFed takes last round's posterior for this round's prior, and refits the same data: every round counts the data once
more, and in the end the model is far too sure. Here the priors are bounded; the personal weights never leave the client
either way. With ζ = (m, σ̄) from the server and q = (q_w, q_h) over shared and personal weights a client minimises

    −E_q log p(D | w, h) + T · KL(q_w ‖ N(m, s²)) + T · KL(q_h ‖ N(g h0, s_h²)) + λ/2 ‖μ_w‖²

1. The scale of the shared prior is discounted, 1/s² = a/σ̄² + (1 − a)/s0², so that the precision stays bounded. s0 of a
   layer is ``prior_sigma`` over the root of its number of inputs: the sums of wide and narrow layers are then equally
   noisy.
2. Its mean m follows the posterior. That alone would be an estimate of m without a prior, and leave the size of the
   weights unbounded. The last term is each client's part of such a prior, N(0, s_m²) with K clients and λ = T/(K s_m²).
   It acts in every step, so it fades with the step size as the data's pull does.
3. The prior of the personal weights is fixed, N(g h0, s_h²), where h0 is the head that every client starts with: drawn
   once for the run, the same for all, and never learnt. Heads that stay near a common one make features that mean the
   same everywhere, which is what a population of heads is for; but nothing of a head is uploaded for it. A bias says
   how frequent a class is here, not what it looks like: its prior is wide, and around what the client's own labels say
   (`bpfed.methods.variational`).
4. T < 1, noise drawn per example (the ``local`` estimator), and a step size that falls along a cosine.
5. The step size is bounded: with more rounds the steps are smaller, and training ends in the same place. (The prior of 2
   alone bounds networks with enough data; a convolutional one keeps growing for longer than anyone trains, with 125
   images as with 2 250.) A client with many steps in a round takes smaller ones too: one that goes far alone leaves the
   others behind, and averages of such clients are poor.

The settings were chosen with 10 clients, all of them in every round, and with 20, half of them. In a federation that is
``client_ratio`` times as large as that, a client carries that much less of λ, and the precision counts that many more
clients' data (for a conjugate model it tends to 1/s0² + n/(T (1 − a)) after many rounds, n being one client's). A method
with ``max_temperature_factor`` has a higher T for clients with few examples; λ and T (1 − a) stay as they are. Where
clients take part less often than in every other round, the bounds of whole runs are larger by the same factor. A client
that cannot get far in the whole run starts with a head nearer to its prior.

A class that a client has never seen is predicted about as rarely as its labels say (`bpfed.methods.variational`). There is
no step on π (Eq. 10): η_i and the upload are taken from q. Settings were chosen on validation data cut from the
training data of the three small cells, one set for all (docs/lab/recipe-search.md).

With ``sigma`` off all weights are points: the data term is at the means, widths are 0 and not updated, and the prior of
the shared weights has the fixed scale s0. That is MAP with the same priors, the control that shows what the weight noise
adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpfed.aggregation.rules import mean
from bpfed.config.migrations import refuses_constants
from bpfed.inference.estimators import Batch, DataTerm, data_term, mean_gradient
from bpfed.inference.gaussian import Gaussian, discounted, kl, kl_gradients_q
from bpfed.inference.likelihoods import Categorical
from bpfed.inference.predictive import GaussianPredictive, PointPredictive
from bpfed.methods.base import ADAPT, Finished, Initial, Method, RunShape, frozen
from bpfed.methods.variational import (
    NOISE_SIGMA,
    Memory,
    Variational,
    biases,
    class_biases,
    class_log_prior,
    corrections,
    join,
    noted,
    of_likelihood,
    per_head,
    split,
)

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: The most clients, and the smallest share of rounds they took part in, where the settings were chosen.
CHOSEN_WITH, CHOSEN_AT = 20, 0.5

#: Most steps of a client in a round for which ``max_round_lr_steps`` holds as it is; with more of them it grows as
#: their root, and so does ``max_total_lr_steps``.
NEAR = 500

#: Examples of a client from which on T is as it is, where it is higher for clients with fewer.
MANY = 2000

#: Features of a head for each class where the settings were chosen (84 for 10), and how many classes that were.
FEATURES_PER_CLASS, CHOSEN_CLASSES = 8.4, 10

#: σ of a head's prior in a regression, times the root of the number of its weights.
REGRESSION_SIGMA = 0.6


class Local(NamedTuple):
    """A client during a round.

    Attributes:
        q: Its posterior.
        prior: Fixed during the round, ``[S, P]``.
        first: h0, ``[S, P_personal]``.
        steps: Taken so far, ``[S]``.
        noted: Running mean of the biases' gradients in this round (`bpfed.methods.variational.noted`), ``[S, M K +
            1]``; ``[S, 1]`` where none is kept.
    """

    q: Variational
    prior: Gaussian
    first: Tensor
    steps: Tensor
    noted: Tensor


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        head: Its head's posterior, ``[S, P_personal]``.
        first: h0, the head that all clients of the run started with, ``[S, P_personal]``.
        memory: Adam's.
        steps: Local steps so far, ``[S, 1]``.
        lowered: What is added to the biases of classes for prediction, ``[S, M K]``; ``[S, 0]`` where nothing is added.
    """

    head: Gaussian
    first: Tensor
    memory: Memory
    steps: Tensor
    lowered: Tensor


@refuses_constants
@dataclass(frozen=True)
class Recipe(Method[Gaussian, Personal, Local, Gaussian]):
    """BPFed with bounded priors.

    Attributes:
        temperature: T, weight of both KL terms; 1 is the ELBO. At 0 there is no prior at all.
        discount: a, how much of the posterior's precision the next round's shared prior keeps, with up to 20 clients.
        prior_sigma: Scale of the rest of that prior, s0, times the square root of a unit's number of inputs.
        head_gain: g, prior mean of the personal weights, in units of the head that all clients start with; 0: the mean
            is 0. At most 1 is used where layers other than the head are personal.
        head_sigma: s_h, the fixed scale of the personal weights' prior. This and ``head_gain`` are for classification;
            in regression the prior has mean 0 and σ 0.6 over the square root of the head's number of weights, and the
            noise scale has its own.
        sigma: Whether weights are Gaussian; without, they are points: MAP with the same priors. A point has no width to
            discount, so ``discount`` is not used then.
    """

    name: ClassVar[str] = "bpfed-recipe"
    title: ClassVar[str] = "BPFed recipe"
    paper: ClassVar[str] = "after Chen et al. 2023, arXiv 2309.15499"
    shared_words: ClassVar[str] = "distribution of all but the last layer"
    personal_words: ClassVar[str] = "distribution of the last layer"
    random_words: ClassVar[str] = "every weight"
    stackable: ClassVar[tuple[str, ...]] = (
        "lr",
        "temperature",
        "discount",
        "prior_sigma",
        "head_gain",
        "head_sigma",
    )
    schedule: ClassVar[str] = "cosine"

    # Constants; a subclass may set others.
    #: σ of every weight at the start.
    start_sigma: ClassVar[float] = 0.05
    #: Prior σ of a head's biases, around those of the client's own class frequencies.
    bias_sigma: ClassVar[float] = 1.0
    #: Examples, divided among all classes, that the rule of succession adds to a client's own.
    unseen_pseudocount: ClassVar[float] = 1.0
    #: λ, the pull of the shared means towards 0 (of gains of normalisations towards 1) with up to 20 clients.
    weight_decay: ClassVar[float] = 0.5
    #: Upper bound of step size times rounds times local epochs.
    max_lr_epochs: ClassVar[float] = 3.0
    #: Upper bound of step size times a client's steps in one round.
    max_round_lr_steps: ClassVar[float] = 0.2
    #: Upper bound of step size times a client's steps in all rounds: 100 rounds of the one before.
    max_total_lr_steps: ClassVar[float] = 20.0
    #: How many times as high T may be for a client with n examples, fewer than 2 000: the root of 2 000/n, at most this.
    max_temperature_factor: ClassVar[float] = 1.0
    #: How the data term is estimated: with noise drawn per example.
    estimator: ClassVar[str] = "local"
    #: Weight draws in a step.
    draws: ClassVar[int] = 1
    #: Step size with which a client that joins later learns its head.
    newcomer_lr: ClassVar[float] = 0.01

    lr: float = 0.002
    temperature: float = 0.05
    discount: float = 0.9
    prior_sigma: float = 2.8
    head_gain: float = 5.0
    head_sigma: float = 0.05
    sigma: bool = True

    def check(self) -> None:
        super().check()
        self.require(
            temperature="0 or more",
            discount="from 0 to 1",
            prior_sigma="above 0",
            head_sigma="above 0",
        )

    def trace_key(self) -> tuple[Any, ...]:
        return (*super().trace_key(), type(self), self.head_gain > 1.0)

    @property
    def needs_class_counts(self) -> bool:
        return True

    def init(self, model: Model) -> Initial[Gaussian, Personal]:
        start = Gaussian(model.initial, torch.full_like(model.initial, self.start_sigma if self.sigma else 0.0))
        shared, head = split(model, start)
        untrained = head
        if self._grows(model):
            untrained = Gaussian(torch.where(biases(model), 0.0, self.head_gain * head.mean), head.sigma)
        none, lowered = model.initial.new_zeros(1), torch.zeros_like(head.mean[class_biases(model)])
        return Initial(shared, Personal(untrained, head.mean, Variational.at(start).memory, none, lowered))

    def _class_log_prior(self, model: Model, hparams: dict[str, Tensor]) -> Tensor | float:
        """What is added to personal weights to set class biases by the client's own labels, ``[S, P_personal]``."""
        where = class_biases(model) if self.personal == "head" else slice(0, 0)
        if "counts" not in hparams or where.start == where.stop:
            return 0.0
        all_ = model.layout.total - model.layout.shared
        return pad(class_log_prior(hparams["counts"]).repeat(1, model.members), (where.start, all_ - where.stop))

    def _grows(self, model: Model) -> bool:
        """Whether personal weights are heads, which grow from h0 to their prior mean; other layers must not."""
        return self.personal == "head" and self.head_gain > 1.0 and isinstance(model.likelihood, Categorical)

    def hparams(self) -> dict[str, float]:
        """With λ/T, and ``head_budget``, the most that a head may move; a client by itself starts where its head is."""
        mean_precision = self.weight_decay / self.temperature if self.temperature > 0.0 else 0.0
        return super().hparams() | {"mean_precision": mean_precision, "head_budget": 0.0}

    def hparams_for_run(self, shape: RunShape, sizes: Tensor) -> dict[str, Tensor]:
        hparams, batches = super().hparams_for_run(shape, sizes), shape.batches(sizes)
        temperature_factor = (MANY / sizes).sqrt().clamp(min=1.0, max=self.max_temperature_factor)
        client_ratio = max(1.0, shape.clients / CHOSEN_WITH) * temperature_factor
        participation_ratio = max(1.0, CHOSEN_AT * shape.clients / shape.participants)
        whole = participation_ratio * self.max_lr_epochs / (shape.rounds * shape.epochs)
        steps = shape.epochs * batches
        max_round_lr_steps = (
            min(self.max_round_lr_steps, participation_ratio * self.max_total_lr_steps / shape.rounds)
            * (steps / NEAR).clamp(min=1.0).sqrt()
        )
        hparams["lr"] = (max_round_lr_steps / steps).clamp(max=min(self.lr, whole))
        hparams["head_budget"] = hparams["lr"] * shape.passes * batches
        hparams["temperature"] = hparams["temperature"] * temperature_factor
        hparams["discount"] = 1.0 - (1.0 - hparams["discount"]) / client_ratio
        hparams["mean_precision"] = hparams["mean_precision"] / client_ratio
        return hparams

    def adapting(self) -> Self:
        return replace(self, lr=self.newcomer_lr)

    def newcomer(self, model: Model, shared: Gaussian) -> Personal:
        """A head without examples is its prior; so is its noise scale, without T."""
        start = self.init(model).personal
        prior = self._head_prior(model, start.first[None], self.hparam_rows(1, model.initial.device))
        sigma = torch.where(of_likelihood(model), NOISE_SIGMA, prior.sigma[0])
        return start._replace(head=Gaussian(prior.mean[0], sigma if self.sigma else torch.zeros_like(sigma)))

    def begin(self, model: Model, shared: Gaussian, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        if model.gains:
            _ = model.centre  # made here, so that a traced step finds a constant
        fan_in = model.layout.split(model.layout.fan_in())[0].to(shared.mean.device)
        scale = hparams["prior_sigma"][:, None] * fan_in.rsqrt()
        body = discounted(shared, hparams["discount"][:, None], scale) if self.sigma else Gaussian(shared.mean, scale)
        head = self._head_prior(model, personal.first, hparams)
        level = self._class_log_prior(model, hparams)
        head = head._replace(mean=head.mean + level)
        q = Variational.at(join(shared, self._start(model, personal, hparams, level)), personal.memory)
        return Local(
            q, join(body, head), personal.first, personal.steps[:, 0], pad(torch.zeros_like(personal.lowered), (0, 1))
        )

    def _start(self, model: Model, personal: Personal, hparams: dict[str, Tensor], level: Tensor | float) -> Gaussian:
        """Where heads start a round, ``[S, P_personal]``: where they were before.

        A client's first round starts at h0, or at most ``head_budget`` from the prior, with the biases of the client's own
        labels.

        A head that grows into its prior while the features are learnt makes better ones; but it has to get there.
        """
        first = personal.head.mean
        if self._grows(model):
            size = personal.first.square().mean(-1).sqrt().clamp(min=1e-12)
            # A wide prior has room for h0 itself.
            wider = hparams["head_sigma"] * (head_width(model).max() - 1.0)
            gain = (hparams["head_gain"] - (hparams["head_budget"] + wider) / size).clamp(min=1.0)
            grown = torch.where(biases(model), 1.0, gain[:, None]) * personal.first
            first = torch.where((hparams["head_budget"] > 0.0)[:, None], grown, first)
        return personal.head._replace(mean=torch.where(personal.steps == 0.0, first + level, personal.head.mean))

    def _head_prior(self, model: Model, first: Tensor, hparams: dict[str, Tensor]) -> Gaussian:
        """N(g h0, s_h²) of heads, ``[S, P_personal]``, and of their biases N(0, σ²), before labels are counted.

        Logits have no unit, so a common head can be asked for; targets have one.

        A noise scale's prior is around the likelihood's own, and is not tempered: few examples are fitted exactly by a
        head that T leaves free, and no noise would be left.
        """
        none, whole = torch.zeros_like(first), self.personal == "head"
        if isinstance(model.likelihood, Categorical):
            gain = hparams["head_gain"] if whole else hparams["head_gain"].clamp(max=1.0)
            free = biases(model) & whole
            mean = torch.where(free, none, gain[:, None] * first)
            width = hparams["head_sigma"][:, None] * (head_width(model) if whole else 1.0)
            return Gaussian(mean, torch.where(free, self.bias_sigma, width))
        noise = of_likelihood(model)
        untempered = NOISE_SIGMA * hparams["temperature"][:, None].clamp(min=1e-6).sqrt()
        weights = none + REGRESSION_SIGMA * (per_head(model) if whole else 1.0)
        return Gaussian(torch.where(noise, first, none), torch.where(noise, untempered, weights))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        steps, q = local.steps + 1, local.q.gaussian
        data = self._data_term(model, q, batch)
        kl_mean, kl_sigma = kl_gradients_q(q, local.prior)
        around = q.mean - model.centre if model.gains else q.mean
        shared = torch.arange(q.mean.shape[-1], device=q.mean.device) < model.layout.shared
        pull = torch.where(shared, hparams["mean_precision"][:, None] * around, 0.0)
        temperature = hparams["temperature"][:, None]
        on_mean = data.mean + temperature * (kl_mean + pull)
        on_sigma = data.sigma + temperature * kl_sigma if self.sigma else data.sigma
        new = local.q.moved(on_mean, on_sigma, steps, hparams["lr"])
        if phase == ADAPT:
            new = new._replace(mean=frozen(model, local.q.mean, new.mean), rho=frozen(model, local.q.rho, new.rho))
        on_biases = model.layout.split(data.mean)[1][:, class_biases(model)]
        return local._replace(q=new, steps=steps, noted=noted(local.noted, on_biases)), data.nll

    def _data_term(self, model: Model, q: Gaussian, batch: Batch) -> DataTerm:
        """Over the client's n examples; at the means, and 0 in σ, where weights are points."""
        if self.sigma:
            return data_term(self.estimator, self.draws, model, q, batch)
        nll, gradient = mean_gradient(model, q.mean, batch)
        return DataTerm(nll, batch.size[:, None] * gradient, torch.zeros_like(gradient))

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Gaussian, Personal]:
        q = local.q.gaussian
        shared, head = split(model, q)
        lowered = torch.zeros_like(local.noted[:, 1:])
        if lowered.shape[-1] and "counts" in hparams:
            lowered = corrections(local.noted, hparams["counts"], self.unseen_pseudocount)
        kept = Personal(head, local.first, local.q.memory, local.steps[:, None], lowered)
        return Finished(shared, kept, {"kl": kl(q, local.prior)} if self.sigma else {})

    def aggregate(self, shared: Gaussian, uploads: Gaussian, weights: Tensor, clients: int) -> Gaussian:
        return mean(uploads, weights)

    def predictive(self, model: Model, shared: Gaussian, personal: Personal) -> GaussianPredictive | PointPredictive:
        head, where = personal.head, class_biases(model)
        lowered = pad(personal.lowered, (where.start, head.mean.shape[-1] - where.stop))
        weights = join(shared, head._replace(mean=head.mean + lowered))
        return GaussianPredictive(weights) if self.sigma else PointPredictive(weights.mean)


def head_width(model: Model) -> Tensor:
    """What s_h of each personal weight is multiplied by because there are many classes, ``[P_personal]``; 1 for up to ten.

    A common head that nobody learns is K directions at random among d features. With few of them the shared layers can
    lay each class along its own. With many they overlap, and features that suit all of them need not exist: heads have
    to follow the features instead. So the prior is the wider, the fewer features there are for a class.
    """
    inputs = model.layout.split(model.layout.fan_in())[1].to(model.initial.device)
    classes = model.likelihood.classes if isinstance(model.likelihood, Categorical) else 0
    most = max(1.0, classes / CHOSEN_CLASSES)
    return (FEATURES_PER_CLASS * classes / inputs).clamp(min=1.0, max=most)
