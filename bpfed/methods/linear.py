"""Linear: a hierarchical Bayesian linear model; logistic (softmax) regression for classes, linear for numbers.

Client i has coefficients w_i, one for each input and an intercept, for each output:

    w_i = θ + φ_i,    φ_i ~ N(0, Λ),    θ ~ N(0, s² I),    Λ = diag τ²,    τ ~ HalfNormal(u),                       (1)

with one τ for each input (or one for the intercept and one for all inputs), and y ~ N(x · w_i, σ²) for numbers. K
classes have K − 1 outputs: the logits are B W_i x with orthonormal contrasts B [K, K − 1], so that no direction is left
that the softmax does not see, and all classes are alike in the prior.

**Posterior.** q(θ, φ_1, φ_2, …) is one Gaussian with its full covariance. Client i's rows enter it through a site
exp(−½ w·A_i w + b_i·w) in place of p(D_i | w). With m, S the mean and covariance of w_i under q,

    A_i = −E_q ∇² log p(D_i | w),    b_i = A_i m + E_q ∇ log p(D_i | w)                                              (2)

For numbers this is A_i = XᵀX/σ² and b_i = Xᵀy/σ², whatever q, and the posterior is exact. For classes it is a fixed
point, the Gaussian that maximises the evidence lower bound (Khan, Lin 2017, conjugate-computation variational
inference); with values at m in place of expectations it would be Newton's method and the Laplace approximation. A pass
over the rows sums up (2) at the present q, and a solve makes a new q of it. For classes it goes a part of the way only,
which is halved when the slope of the bound turns round.

**Messages.** φ_i is integrated at the client, which leaves a Gaussian factor of θ with natural parameters

    Q_i = (A_i⁻¹ + Λ)⁻¹ = A_i − A_i Λ^½ (I + Λ^½ A_i Λ^½)⁻¹ Λ^½ A_i,    h_i = (I + A_i Λ)⁻¹ b_i                      (3)

The server's posterior of θ has precision I/s² + Σ Q_i and precision times mean Σ h_i. A client takes its own factor out
(the cavity, as in expectation propagation and partitioned variational inference), lets the deviation in by the same
formula (3), and has its prior of w_i. It uploads what has changed in its factor since it was last told, in units of Λ
and around the server's mean; so nothing is counted twice, and whoever is away counts with what was told before.

**Scales.** The evidence lower bound, with θ integrated, is stationary in log τ (with the prior of (1)) where

    Σ_i E[φ_i]² / τ² − Σ_i (Q_i Λ)_dd + 1 − τ²/u² = 0                                                               (4)

summed over the coefficients d with this τ; E[φ_i]² is a square of the mean, averaged over θ, and (Q_i Λ)_dd is how far
client i's own rows determine φ_i. A client uploads both sums, and the server solves (4) for τ with these sums held
(MacKay 1992), which takes a few rounds where EM takes many. The 1 in (4) is from the change to log τ: without it, few
clients would lead to τ = 0 (Chung et al. 2013). σ² is Σ E‖y_i − X_i w_i‖² / Σ n_i. Both are used as points.

**Privacy.** Q_i and h_i with Λ known give A_i and b_i: a client that uploads alone in a round tells the server, for
numbers, XᵀX and Xᵀy of its rows. These hold counts and sums of columns and of pairs of columns. With fewer rows than
coefficients they determine the rows up to a rotation, and one row entirely. ``least_rows`` says how many rows a client
must have to upload anything; a client with fewer still has a model of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bpfed._util.errors import UserError
from bpfed.inference.estimators import Batch
from bpfed.inference.laplace import Head
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.inference.predictive import CorrelatedPredictive
from bpfed.methods.base import ADAPT, Finished, Initial, Method, Network, Phase
from bpfed.nn.parameters import Personal as Split

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Name of the phase in which the sums of a pass become a new posterior.
SOLVE = "solve"
#: Passes of a round at most: further ones bring less than the next message of the server.
PASSES = 3
#: Coefficients at most; time and memory grow with their third and second power.
MOST = 600
#: Points of the Gauss-Hermite rule.
POINTS = 16
#: Share of a precision's diagonal that is added, times the number of coefficients, where it is not positive: states are
#: float32, and a difference of two of them (a cavity) may be negative by rounding.
ROUNDING = 1e-6
#: Slopes whose product is below this, in nats, are too small to tell whether they turned round.
LEAST_SLOPE = 1e-6
#: Changes of a message below this, in its units, are not told: they are rounding.
LEAST_CHANGE = 1e-5
#: τ grows by this factor in a round at most, so that no message is far beyond the ones before.
FASTEST = 2.0
#: τ, σ are at least this.
LEAST_SCALE = 1e-4


class Natural(NamedTuple):
    """A Gaussian factor exp(−½ w·P w + h·w) by its natural parameters.

    Attributes:
        precision: P, ``[..., C, C]``.
        shift: h, the precision times the mean, ``[..., C]``.
    """

    precision: Tensor
    shift: Tensor

    def plus(self, other: Natural) -> Natural:
        """The product of two factors."""
        return Natural(self.precision + other.precision, self.shift + other.shift)

    def minus(self, other: Natural) -> Natural:
        """This factor without the other."""
        return Natural(self.precision - other.precision, self.shift - other.shift)

    def times(self, factor: Tensor) -> Natural:
        """To the power of a factor, ``[...]``."""
        return Natural(factor[..., None, None] * self.precision, factor[..., None] * self.shift)

    def symmetric(self) -> Natural:
        """The same with a precision that is symmetric to the bit."""
        return self._replace(precision=0.5 * (self.precision + self.precision.mT))

    def root(self) -> Tensor:
        """L with L Lᵀ = P, ``[..., C, C]``; not a number where P is not positive beyond rounding."""
        diagonal = self.precision.diagonal(dim1=-2, dim2=-1)
        added = torch.diag_embed(ROUNDING * diagonal.shape[-1] * diagonal.abs())
        factor, failed = torch.linalg.cholesky_ex(self.precision)
        second, beyond = torch.linalg.cholesky_ex(self.precision + added)
        factor = torch.where((failed > 0)[..., None, None], second, factor)
        return torch.where(((failed > 0) & (beyond > 0))[..., None, None], torch.nan, factor)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean ``[..., C]``, and R with R Rᵀ the covariance, ``[..., C, C]``."""
        factor = self.root()
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        spread = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).mT
        return (spread @ (spread.mT @ self.shift[..., None]))[..., 0], spread

    def widened(self, deviation: Tensor) -> Natural:
        """Of w + φ, φ ~ N(0, diag τ²), where this is of w; Eq. 3. ``deviation``: τ, ``[..., C]``."""
        scaled = deviation[..., None] * self.precision
        eye = torch.eye(deviation.shape[-1], dtype=scaled.dtype, device=scaled.device)
        factor, _ = torch.linalg.cholesky_ex(eye + scaled * deviation[..., None, :])
        both = torch.cat([scaled, (deviation * self.shift)[..., None]], -1)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        taken = half[..., :-1].mT @ half
        return Natural(self.precision - taken[..., :-1], self.shift - taken[..., -1])


class Sums(NamedTuple):
    """What the scales are learnt from.

    Attributes:
        squares: Σ E[φ]² of the coefficients of an input, Eq. 4, ``[..., F]``.
        determined: Σ (Q Λ)_dd of them, ``[..., F]``.
        residual: Σ E‖y − X w‖², ``[..., 1]``; 0 where the noise is not learnt.
        rows: n, ``[..., 1]``; likewise.
    """

    squares: Tensor
    determined: Tensor
    residual: Tensor
    rows: Tensor


class Message(NamedTuple):
    """What the server has of a client (of all clients): its factor of θ, Eq. 3, and its sums."""

    factor: Natural
    sums: Sums

    def in_units(self, deviation: Tensor, noise: Tensor, centre: Tensor) -> Message:
        """As it travels: in units of the deviations and the noise, and around a mean of θ.

        So the numbers of clients of any size are alike: Λ^½ Q Λ^½ is at most I.

        Args:
            deviation: τ of each input, ``[..., F]``.
            noise: σ, ``[..., 1]``.
            centre: The server's mean of θ, ``[..., C]``.
        """
        tau = _each(deviation, centre)
        (precision, shift), (squares, determined, residual, rows) = self
        around = shift - (precision @ centre[..., None])[..., 0]
        return Message(
            Natural(tau[..., None] * precision * tau[..., None, :], tau * around),
            Sums(squares / deviation.square(), determined, residual / noise.square(), rows),
        )

    def from_units(self, deviation: Tensor, noise: Tensor, centre: Tensor) -> Message:
        """Back from `in_units`."""
        tau = _each(deviation, centre)
        (precision, shift), (squares, determined, residual, rows) = self
        precision = precision / (tau[..., None] * tau[..., None, :])
        return Message(
            Natural(precision, shift / tau + (precision @ centre[..., None])[..., 0]),
            Sums(squares * deviation.square(), determined, residual * noise.square(), rows),
        )


class Shared(NamedTuple):
    """What the server holds.

    Attributes:
        precision: Of θ, in units of the prior's, 1/s²; at first I, ``[C, C]``.
        shift: Precision times mean of θ, in units of 1/s, ``[C]``.
        sums: Of what clients told last.
        deviation: τ of each input, the intercept last, ``[F]``.
        noise: σ, ``[1]``; 1 for classes.
    """

    precision: Tensor
    shift: Tensor
    sums: Sums
    deviation: Tensor
    noise: Tensor


class Upload(NamedTuple):
    """What a client uploads: the change of what it told, `Told.in_units` of the server's state."""

    added: Message


class Personal(NamedTuple):
    """What a client keeps.

    Attributes:
        site: A_i and b_i where σ = 1, ``[S, C, C]`` and ``[S, C]``; 0 before its first pass.
        told: What the server has of it; 0 before its first upload.
        slope: Of the evidence lower bound in m, as the last solve found it, ``[S, C]``.
        rate: Share of the way to a new site that a solve goes, ``[S, 1]``.
    """

    site: Natural
    told: Message
    slope: Tensor
    rate: Tensor


class Local(NamedTuple):
    """A client during a round; all in float64.

    Attributes:
        site: A_i and b_i where σ = 1.
        told: What the server has of it.
        server: The posterior of θ.
        deviation: τ of each input, ``[S, F]``.
        noise: σ, ``[S, 1]``.
        mean: m, at which a pass is taken, ``[S, C]``.
        spread: R with R Rᵀ = S, likewise, ``[S, C, C]``; 0 in a client's first pass.
        curvature: Σ −E ∇² log p of the rows of this pass, where σ = 1, ``[S, C, C]``.
        gradient: Σ E ∇ log p of them, ``[S, C]``.
        residual: Σ (y − x·m)² of them, ``[S, 1]``; of classes 0.
        seen: How many rows these are, ``[S]``; 0 after a solve, with which the next pass begins.
        size: The client's rows, ``[S]``; 0 before its first step.
        telling: 1 for a client that takes part, 0 for a newcomer, ``[S]``.
        slope: As the client keeps it.
        rate: Likewise.
    """

    site: Natural
    told: Message
    server: Natural
    deviation: Tensor
    noise: Tensor
    mean: Tensor
    spread: Tensor
    curvature: Tensor
    gradient: Tensor
    residual: Tensor
    seen: Tensor
    size: Tensor
    telling: Tensor
    slope: Tensor
    rate: Tensor

    def posterior(self) -> Natural:
        """q of w_i: the prior that the cavity makes, and the site."""
        return self.cavity().widened(_each(self.deviation, self.mean)).plus(self.evidence())

    def cavity(self) -> Natural:
        """What all others and the prior say of θ."""
        return self.server.minus(self.told.factor)

    def evidence(self) -> Natural:
        """The site at the noise as it is."""
        return self.site.times(self.noise[..., 0].pow(-2))


@dataclass(frozen=True)
class Linear(Method[Shared, Personal, Local, Upload]):
    """A hierarchical Bayesian linear model; for tables with up to 600 coefficients, in few rounds.

    Attributes:
        personal: Always ``none``: every coefficient has a shared part.
        lr: Share of the way to a new solution that a pass goes at most, where 1 is a whole Newton step. Below 1 it takes
            more rounds; classes begin with half a step and adapt by themselves.
        prior_scale: s, prior standard deviation of the shared coefficients.
        deviation: τ at the start: how far the coefficients of clients deviate.
        deviation_scale: u, scale of the prior of τ.
        deviations: ``input``: one τ for each input; ``two``: one for the intercept and one for all inputs.
        learn: Whether τ and, for numbers, σ are learnt.
        least_rows: A client with fewer training rows uploads nothing.
    """

    name: ClassVar[str] = "bpfed-linear"
    title: ClassVar[str] = "BPFed linear"
    paper: ClassVar[str] = "bpfed; hierarchical linear models with federated messages"
    shared_words: ClassVar[str] = "one part of every coefficient; how far clients deviate"
    personal_words: ClassVar[str] = "a deviation of every coefficient"
    random_words: ClassVar[str] = "all coefficients, with their correlations"
    stackable: ClassVar[tuple[str, ...]] = ("lr", "prior_scale", "deviation", "deviation_scale")
    scales: ClassVar[tuple[str, ...]] = ("deviation", "noise")
    counts: ClassVar[tuple[str, ...]] = ("squares", "residual", "rows")
    network: ClassVar[Network] = "linear"
    everyone: ClassVar[bool] = True
    adds: ClassVar[bool] = True
    recordable: ClassVar[bool] = False

    personal: Split = "none"
    lr: float = 1.0
    prior_scale: float = 3.0
    deviation: float = 0.3
    deviation_scale: float = 1.0
    deviations: Literal["input", "two"] = "input"
    learn: bool = True
    least_rows: int = 1

    def check(self) -> None:
        super().check()
        self.require(
            lr="above 0 and at most 1",
            prior_scale="above 0",
            deviation="above 0",
            deviation_scale="above 0",
            least_rows="at least 1",
        )
        if self.personal != "none":
            raise UserError(
                f"personal is '{self.personal}', but in {self.title} every coefficient has a shared part; leave it at "
                "'none'."
            )

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """A pass and a solve for each epoch, up to `PASSES`."""
        return (Phase("pass", 1), Phase(SOLVE, 1, batches=1)) * min(epochs, PASSES)

    def adaptation(self, epochs: int) -> tuple[Phase, ...]:
        """No server answers a newcomer, so it makes as many passes as it takes."""
        return (Phase(ADAPT, 1), Phase(SOLVE, 1, batches=1)) * max(PASSES, min(epochs, 10))

    def init(self, model: Model) -> Initial[Shared, Personal]:
        form, new = Form.of(model), model.initial.new_zeros
        none = Natural(new(form.width, form.width), new(form.width))
        sums = Sums(new(form.inputs), new(form.inputs), new(1), new(1))
        shared = Shared(
            torch.eye(form.width, device=model.initial.device),
            new(form.width),
            sums,
            torch.full_like(sums.squares, self.deviation),
            torch.full_like(sums.rows, form.noise),
        )
        return Initial(shared, Personal(none, Message(none, sums), none.shift, torch.full_like(sums.rows, form.rate)))

    def begin(self, model: Model, shared: Shared, personal: Personal, hparams: dict[str, Tensor]) -> Local:
        shared, personal = _double(shared), _double(personal)
        scale = hparams["prior_scale"].double()
        none = torch.zeros_like(scale)
        local = Local(
            site=personal.site,
            told=personal.told,
            server=Natural(shared.precision / scale[:, None, None].square(), shared.shift / scale[:, None]),
            deviation=shared.deviation,
            noise=shared.noise,
            mean=torch.zeros_like(shared.shift),
            spread=torch.zeros_like(shared.precision),
            curvature=torch.zeros_like(shared.precision),
            gradient=torch.zeros_like(shared.shift),
            residual=torch.zeros_like(shared.noise),
            seen=none,
            size=none,
            telling=torch.ones_like(none),
            slope=personal.slope,
            rate=personal.rate,
        )
        mean, spread = local.posterior().moments()
        # Before the first pass q is the prior, which may be so wide that no rule integrates over it.
        first = (local.site.precision == 0.0).flatten(1).all(1)
        return local._replace(mean=mean, spread=torch.where(first[:, None, None], 0.0, spread))

    def step(
        self, model: Model, local: Local, batch: Batch, hparams: dict[str, Tensor], phase: str
    ) -> tuple[Local, Tensor]:
        found = Form.of(model).expected(local.mean, local.spread, local.noise, batch)
        if phase == SOLVE:
            return _solved(local, hparams["lr"]), found.nll
        new = local._replace(
            curvature=_kept(local.seen > 0.0, local.curvature) + found.curvature,
            gradient=_kept(local.seen > 0.0, local.gradient) + found.gradient,
            residual=_kept(local.seen > 0.0, local.residual) + found.residual,
            seen=local.seen + batch.mask.sum(-1).double(),
            size=batch.size.double(),
            telling=torch.zeros_like(local.telling) if phase == ADAPT else local.telling,
        )
        return new, found.nll

    def finish(self, model: Model, local: Local, hparams: dict[str, Tensor]) -> Finished[Upload, Personal]:
        local = _solved(local, hparams["lr"])
        told = self._told(local, learnt=Form.of(model).noise_at is not None)
        change: Message = tree_map(torch.sub, told, local.told)
        added = change.in_units(local.deviation, local.noise, local.server.moments()[0])
        largest = torch.stack([leaf.flatten(1).abs().amax(1) for leaf in tree_leaves(added)]).amax(0)
        tells = (local.telling > 0.0) & (local.size >= self.least_rows) & (largest >= LEAST_CHANGE)
        upload = tree_map(lambda leaf: _kept(tells, leaf).float(), Upload(added))
        known = tree_map(lambda old, more: (old + _kept(tells, more)).float(), local.told, change)
        return Finished(upload, Personal(*_float((local.site, known, local.slope, local.rate))), {})

    def _told(self, local: Local, learnt: bool) -> Message:
        """The client's factor of θ, Eq. 3, and its sums, under the server's scales; ``learnt``: whether σ is."""
        tau, inputs = _each(local.deviation, local.mean), local.deviation.shape[-1]
        factor = local.evidence().widened(tau)
        centre, spread = local.cavity().plus(factor).moments()
        pull = factor.shift - (factor.precision @ centre[..., None])[..., 0]  # E φ = Λ (h − Q θ)
        squares = tau.pow(4) * (pull.square() + (factor.precision @ spread).square().sum(-1))
        determined = tau.square() * factor.precision.diagonal(dim1=-2, dim2=-1)
        residual, rows = torch.zeros_like(local.residual), torch.zeros_like(local.residual)
        if learnt:
            explained = (local.spread.mT @ local.curvature @ local.spread).diagonal(dim1=-2, dim2=-1).sum(-1)
            residual, rows = local.residual + explained[:, None], local.size[:, None]
        squares, determined = (t.unflatten(-1, (-1, inputs)).sum(-2) for t in (squares, determined))
        return Message(factor, Sums(squares, determined, residual, rows))

    def aggregate(self, shared: Shared, uploads: Upload, weights: Tensor, clients: int) -> Shared:
        """The sum of what clients add. Every row counts once, so ``weights`` have no part in it."""
        before: Shared = _double(shared)
        theta = Natural(before.precision / self.prior_scale**2, before.shift / self.prior_scale)
        added: Message = tree_map(lambda leaf: leaf.double().sum(0), uploads.added)
        added = added.from_units(before.deviation, before.noise, theta.moments()[0])
        theta = theta.plus(added.factor.symmetric())
        sums: Sums = tree_map(torch.add, before.sums, added.sums)
        # A sum that is not positive (of lies, say) has no mean, and the engine refuses what is not finite.
        valid = torch.where(theta.moments()[0].isfinite().all(), 1.0, torch.nan)
        return _float(
            Shared(
                valid * self.prior_scale**2 * theta.precision,
                self.prior_scale * theta.shift,
                sums,
                self._deviation(before.deviation, sums) if self.learn else before.deviation,
                _noise(before.noise, sums) if self.learn else before.noise,
            )
        )

    def _deviation(self, old: Tensor, sums: Sums) -> Tensor:
        """τ of Eq. 4 with its sums held. The 1 counts with the old τ: so the step is small where little is known."""
        squares, determined = sums.squares.clamp(min=0.0), sums.determined.clamp(min=0.0)
        if self.deviations == "two":  # the intercept is last
            squares, determined = (torch.cat([t[:-1].sum(0, keepdim=True), t[-1:]]) for t in (squares, determined))
            old = torch.cat([old[:1], old[-1:]])
        known = squares + old.square()
        found = 2.0 * known / (determined + (determined.square() + 4.0 * known / self.deviation_scale**2).sqrt())
        found = torch.where(determined > 0.0, found.sqrt(), old).clamp(min=LEAST_SCALE)
        found = torch.minimum(found, FASTEST * old)
        return torch.cat([found[:1].expand(len(sums.squares) - 1), found[-1:]]) if self.deviations == "two" else found

    def predictive(self, model: Model, shared: Shared, personal: Personal) -> CorrelatedPredictive:
        form, hparams = Form.of(model), self.hparam_rows(len(shared.shift), shared.shift.device)
        local = self.begin(model, shared, personal, hparams)
        mean, spread = local.posterior().moments()
        directions = form.weights(model, spread.mT.flatten(0, 1)).unflatten(0, spread.shape[:2]).mT
        return CorrelatedPredictive(form.weights(model, mean, local.noise).float(), directions.float())

    def guarded(self, minimum: int) -> Self:
        """It uploads nothing of fewer rows: its sums would tell of each."""
        return replace(self, least_rows=max(self.least_rows, minimum))

    def held(self, model: Model) -> int:
        return 2 * Form.of(model).width ** 2


class Expected(NamedTuple):
    """Of the rows of a batch, summed: what `Local` says of these names; and the mean −log p of a row, ``[S]``."""

    curvature: Tensor
    gradient: Tensor
    residual: Tensor
    nll: Tensor


@dataclass(frozen=True)
class Form:
    """The coefficients of a network that is one linear layer.

    Attributes:
        head: Where the layer is in the weight vector; its bias is the intercept.
        classes: 0: the targets are numbers.
        noise: σ at the start.
        noise_at: Where log σ is in the weight vector; None: it is not learnt.
    """

    head: Head
    classes: int
    noise: float
    noise_at: int | None

    @classmethod
    def of(cls, model: Model) -> Form:
        """A `UserError` if the network is another one, or has too many coefficients."""
        plain = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear)
        layers = [m for m in model.module.modules() if isinstance(m, nn.Linear)]
        if model.members > 1 or len(layers) != 1 or not all(isinstance(m, plain) for m in model.module.modules()):
            raise UserError(
                "bpfed-linear is for a network that is one linear layer; set network = 'linear' and members = 1, or "
                "choose another method."
            )
        head, likelihood = Head.of(model), model.likelihood
        if not isinstance(likelihood, Categorical | Normal):
            raise UserError(
                f"bpfed-linear is for classes and for numbers with Gaussian noise, but the likelihood is "
                f"{type(likelihood).__name__}; choose another method."
            )
        places = dict(zip(model.layout.names, np.cumsum([0, *model.layout.sizes]).tolist(), strict=False))
        noise, noise_at = 1.0, None
        if isinstance(likelihood, Normal):
            noise, noise_at = likelihood.scale, places[likelihood.names[0]] if likelihood.learnt else None
        form = cls(head, likelihood.classes if isinstance(likelihood, Categorical) else 0, noise, noise_at)
        if form.width > MOST:
            raise UserError(
                f"bpfed-linear is for up to {MOST} coefficients, but {form.inputs} inputs (with the intercept) times "
                f"{form.outputs} outputs are {form.width}; leave columns out with --ignore, or choose another method."
            )
        return form

    @property
    def rate(self) -> float:
        """Share of the way that the first solve goes: what it finds is exact for numbers."""
        return 0.5 if self.classes else 1.0

    @property
    def outputs(self) -> int:
        """K − 1 for K classes, 1 for numbers."""
        return max(1, self.classes - 1)

    @property
    def inputs(self) -> int:
        """F, with the intercept."""
        return self.head.shape[1]

    @property
    def width(self) -> int:
        """C, the number of coefficients: those of the first output, then of the next."""
        return self.outputs * self.inputs

    def weights(self, model: Model, coefficients: Tensor, noise: Tensor | None = None) -> Tensor:
        """Weight vectors ``[S, P]`` of coefficients ``[S, C]``, with log σ of noise ``[S, 1]`` in its place."""
        contrasts = torch.from_numpy(_contrasts(self.classes)).to(coefficients)
        made = coefficients.new_zeros(len(coefficients), model.layout.total)
        made = self.head.put(made, contrasts @ coefficients.unflatten(-1, (self.outputs, self.inputs)))
        if noise is not None and self.noise_at is not None:
            made[:, self.noise_at] = noise[:, 0].log()
        return made

    def expected(self, mean: Tensor, spread: Tensor, noise: Tensor, batch: Batch) -> Expected:
        """The sums of Eq. 2 over a batch, under N(mean, R Rᵀ)."""
        x, mask = batch.x.flatten(2).double(), batch.mask.double()
        if self.head.bias is not None:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        eta = x @ mean.unflatten(-1, (self.outputs, self.inputs)).mT  # [S, B, k]
        # R of the outputs of a row, [S, B, k, C]
        spread = torch.einsum("sbf,skfc->sbkc", x, spread.unflatten(1, (self.outputs, self.inputs)))
        if self.classes:
            slope, curve, nll = self._classes(eta, spread @ spread.mT, batch.y)
            residual = torch.zeros_like(noise)
        else:
            error = batch.y.double() - eta[..., 0]
            slope, curve = error[..., None], torch.ones_like(error)[..., None, None]
            nll = 0.5 * ((error.square() + spread.square().sum((-2, -1))) / noise.square() + math.log(2.0 * math.pi))
            nll, residual = nll + noise.log(), (mask * error.square()).sum(-1, keepdim=True)
        gradient = torch.einsum("sbk,sbf->skf", mask[..., None] * slope, x).flatten(1)
        curved = torch.einsum("sbkl,sbf->sbklf", mask[..., None, None] * curve, x)
        curvature = torch.einsum("sbklf,sbg->skglf", curved, x).flatten(1, 2).flatten(2)
        total = (mask * nll).sum(-1) / mask.sum(-1).clamp(min=1.0)
        return Expected(curvature, gradient, residual, total.float())

    def _classes(self, eta: Tensor, covariance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expected slope ``[S, B, k]`` and curvature ``[S, B, k, k]`` of −log p in the outputs, and −log p itself."""
        contrasts, nodes, shares = (
            torch.from_numpy(array).to(eta) for array in (_contrasts(self.classes), *_rule(self.outputs))
        )
        tiny = 1e-12 * torch.eye(self.outputs, dtype=eta.dtype, device=eta.device)
        root = torch.linalg.cholesky_ex(covariance + tiny).L
        logp = torch.log_softmax((eta[..., None, :] + nodes @ root.mT) @ contrasts.T, -1)  # [S, B, points, K]
        probs = logp.exp()
        mean = shares @ probs
        right = (y[..., None] == torch.arange(self.classes, device=y.device)).to(eta)
        turned = probs @ contrasts
        curve = contrasts.T @ (mean[..., None] * contrasts) - turned.mT @ (shares[:, None] * turned)
        return (right - mean) @ contrasts, curve, -((shares @ logp) * right).sum(-1)


def _solved(local: Local, most: Tensor) -> Local:
    """The new site and posterior from the sums of a pass, with the sums as they are at the new mean; else as it was."""
    new = local.seen > 0.0
    full = (local.size / local.seen.clamp(min=1.0))[:, None]  # a pass that was cut short counts for all rows
    curvature, gradient = full[..., None] * local.curvature, full * local.gradient
    found = Natural(curvature, gradient + (curvature @ local.mean[..., None])[..., 0])  # Eq. 2
    # Eq. 2 is a step along the natural gradient. Where the slope turns round it went too far.
    slope = gradient - local.site.shift + (local.site.precision @ local.mean[..., None])[..., 0]
    now, then = ((local.spread.mT @ t[..., None])[..., 0] / local.noise for t in (slope, local.slope))
    turned = (now * then).sum(-1, keepdim=True)
    rate = torch.where(
        turned < -LEAST_SLOPE, 0.5 * local.rate, torch.where(turned > LEAST_SLOPE, 1.25 * local.rate, local.rate)
    )
    rate = rate.clamp(max=1.0)
    share = torch.minimum(rate[:, 0], most.double())
    site = local.site.times(1.0 - share).plus(found.times(share))
    solved = local._replace(site=site)
    mean, spread = solved.posterior().moments()
    moved = mean - local.mean
    bent = (curvature @ moved[..., None])[..., 0]
    residual = full * local.residual + ((bent - 2.0 * gradient) * moved).sum(-1, keepdim=True)
    solved = solved._replace(
        mean=mean,
        spread=spread,
        curvature=curvature,
        gradient=gradient - bent,
        residual=residual,
        slope=slope,
        rate=rate,
        seen=torch.zeros_like(local.seen),
    )
    return tree_map(lambda then, now: torch.where(new.view(-1, *(1,) * (now.ndim - 1)), now, then), local, solved)


def _noise(old: Tensor, sums: Sums) -> Tensor:
    """σ² = Σ E‖y − X w‖² / n; as it was where nothing is known."""
    found = (sums.residual / sums.rows.clamp(min=1.0)).clamp(min=0.0).sqrt()
    return torch.where(sums.rows > 0.0, found, old).clamp(min=LEAST_SCALE)


@cache
def _contrasts(classes: int) -> NDArray[np.float64]:
    """B, orthonormal: each class against the mean of those before it, ``[K, K - 1]``; of numbers 1."""
    if not classes:
        return np.ones((1, 1))
    made = np.zeros((classes, classes - 1))
    for k in range(1, classes):
        made[:k, k - 1], made[k, k - 1] = -1.0, k
        made[:, k - 1] /= math.sqrt(k * (k + 1.0))
    return made


@cache
def _rule(outputs: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points ``[T, k]`` and their shares ``[T]`` for means under N(0, I).

    Of one output Gauss and Hermite's; of more the points ± √k on each axis, exact for polynomials of degree 3.
    """
    if outputs == 1:
        points, shares = np.polynomial.hermite_e.hermegauss(POINTS)
        return points[:, None], shares / shares.sum()
    axes = math.sqrt(outputs) * np.eye(outputs)
    return np.concatenate([axes, -axes]), np.full(2 * outputs, 0.5 / outputs)


def _each(by_input: Tensor, like: Tensor) -> Tensor:
    """A value for each input as one for each coefficient: ``[..., F]`` to ``[..., C]``."""
    return by_input.repeat((1,) * (by_input.ndim - 1) + (like.shape[-1] // by_input.shape[-1],))


def _kept(which: Tensor, values: Tensor) -> Tensor:
    """Values ``[S, ...]`` where ``which``, ``[S]``, else 0."""
    return torch.where(which.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)


def _double(state: Any) -> Any:
    return tree_map(torch.Tensor.double, state)


def _float(state: Any) -> Any:
    return tree_map(torch.Tensor.float, state)
