"""Estimators of the data term of Eq. 9, −(n/b) (1/M) Σ_m Σ_j log p(d_j | w_m), and its gradients in μ and σ.

All are unbiased; they differ in where the noise is drawn, hence in variance and cost:

- ``weights``: one draw of the whole weight vector for the batch. Any module.
- ``antithetic``: the same draw with its noise once added and once subtracted, each for every other example of the
  batch. Any module, the cost of ``weights``; what is linear in the noise cancels.
- ``local``: local reparameterisation in linear layers, a weight draw per example in convolutions, ``weights`` for the
  rest. About twice the arithmetic, a fraction of the variance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bpfed._util.errors import unknown
from bpfed.inference import inputs, rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.inputs import Inputs

if TYPE_CHECKING:
    from bpfed.nn.model import Model


class Batch(NamedTuple):
    """One mini-batch of each of S clients.

    Attributes:
        x: Inputs, ``[S, B, ...]``, one tensor or a tree of them (`bpfed.inference.inputs`).
        y: Targets, ``[S, B]``.
        mask: 1 for an example, 0 for padding, ``[S, B]`` float32.
        size: The client's number of training examples n, ``[S]`` float32.
        key: Of this client's step, ``[S, 2]`` int32.
    """

    x: Inputs
    y: Tensor
    mask: Tensor
    size: Tensor
    key: Tensor

    @property
    def examples(self) -> Tensor:
        """b, the number of examples without padding, ``[S]``; 1 where all is padding (its gradients are 0)."""
        return self.mask.sum(-1).clamp(min=1.0)

    @property
    def scale(self) -> Tensor:
        """n/b, ``[S]``."""
        return self.size / self.examples


class DataTerm(NamedTuple):
    """The data term and its gradients.

    Attributes:
        nll: −log p per example, in nats, ``[S]``.
        mean: Gradient of the data term in μ, ``[S, P]``.
        sigma: Gradient of the data term in σ, ``[S, P]``.
    """

    nll: Tensor
    mean: Tensor
    sigma: Tensor


def mean_gradient(model: Model, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean −log p of a batch ``[S]``, and its gradient ``[S, P]``, at weights ``[S, P]`` that are points."""
    total, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
    return total / batch.examples, gradient / batch.examples[:, None]


Estimator = Callable[["Model", Gaussian, Batch], DataTerm]


def weights(model: Model, q: Gaussian, batch: Batch) -> DataTerm:
    """One draw w = μ + σ ⊙ ε of all weights (Eq. 7, 8); ∂/∂μ = g and ∂/∂σ = g ⊙ ε for the gradient g at w."""
    eps = rng.normal(batch.key, q.mean.shape[-1])
    total, gradient = model.gradient(q.draw(eps), batch.x, batch.y, batch.mask, batch.key)
    gradient = gradient * batch.scale[:, None]
    return DataTerm(total * batch.scale / batch.size, gradient, gradient * eps)


def antithetic(model: Model, q: Gaussian, batch: Batch) -> DataTerm:
    """w = μ + σ ⊙ ε for the even examples, μ − σ ⊙ ε for the odd ones; unbiased, since −ε is as likely as ε."""
    eps = rng.normal(batch.key, q.mean.shape[-1])
    padding = batch.mask.shape[1] % 2
    alone = isinstance(batch.x, Tensor)
    x = inputs.each(lambda t: _halves(t, padding, torch.zeros_like(t[:, :1]) if alone else t[:, :1]), batch.x)
    y, mask = (_halves(t, padding, torch.zeros_like(t[:, :1])) for t in (batch.y, batch.mask))
    drawn = torch.stack([q.draw(eps), q.draw(-eps)], 1).flatten(0, 1)  # [2 S, P]
    total, gradient = model.gradient(drawn, x, y, mask, batch.key.repeat_interleave(2, 0))
    plus, minus = (gradient.unflatten(0, (-1, 2)) * batch.scale[:, None, None]).unbind(1)
    return DataTerm(total.view(-1, 2).sum(1) * batch.scale / batch.size, plus + minus, (plus - minus) * eps)


def _halves(values: Tensor, padding: int, row: Tensor) -> Tensor:
    """Every other example: ``[S, B, ...]`` to ``[2 S, B / 2, ...]``; an odd batch gets one more ``row``.

    That of several tensors is an example, since a mask of zeros may leave nothing to compute with.
    """
    if padding:
        values = torch.cat([values, row], 1)
    return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 1)


def local(model: Model, q: Gaussian, batch: Batch, points: frozenset[str] = frozenset()) -> DataTerm:
    """Noise drawn per example, at the outputs of linear layers and the weights of convolutions; none of ``points``."""
    total, mean, sigma = model.local_gradient(q, batch.x, batch.y, batch.mask, batch.key, points)
    return DataTerm(total * batch.scale / batch.size, mean * batch.scale[:, None], sigma * batch.scale[:, None])


ESTIMATORS: dict[str, Estimator] = {"weights": weights, "antithetic": antithetic, "local": local}


def check_estimator(name: str) -> None:
    """Raise a `UserError` unless there is an estimator of that name."""
    if name not in ESTIMATORS:
        raise unknown("estimator", name, ESTIMATORS)


def data_term(name: str, draws: int, model: Model, q: Gaussian, batch: Batch) -> DataTerm:
    """The data term by the estimator of that name, averaged over M = ``draws`` draws."""
    check_estimator(name)
    estimate = ESTIMATORS[name]
    total = estimate(model, q, batch)
    for m in range(1, draws):
        further = estimate(model, q, batch._replace(key=rng.fold(batch.key, m)))
        total = DataTerm(*(a + b for a, b in zip(total, further, strict=True)))
    return total if draws == 1 else DataTerm(*(a / draws for a in total))
