"""How likely a target is, given the network's outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bpfed._util.errors import UserError
from bpfed.config import registry

#: Name of the parameters of `Ordinal`.
CUTS = "likelihood.cuts"
#: Target of a token that does not count, such as padding; PyTorch's own.
IGNORED = -100


class Likelihood(Protocol):
    """What the engine asks of a likelihood. Parameters it has are factors like any weight.

    Predictions need more than −log p: a run takes `Categorical` for classes and `Normal` for numbers, or subclasses.
    """

    def parameters(self) -> dict[str, Tensor]:
        """Learnt parameters and their initial values, by name (may be empty)."""
        ...

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """−log p(y | outputs) of each example in nats: ``[B, K]``, ``[B]`` to ``[B]``."""
        ...

    def check(self, outputs: Tensor) -> None:
        """Raise a `UserError` if outputs ``[B, ...]`` of this shape do not fit the targets."""
        ...


@runtime_checkable
class Curved(Protocol):
    """A likelihood that says how sharply an example determines its output; without, some 1 or less, as for classes."""

    def curvature(self, level: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Mean second derivative of −log p by the output at outputs ``[..., K]`` that are the same for all examples,
        ``[...]``."""
        ...


@dataclass(frozen=True)
class Categorical:
    """One of ``classes`` labels; outputs are logits ``[B, classes]``."""

    classes: int

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        # As a sum over classes rather than a look-up: its gradient, softmax minus one-hot, then needs no scatter.
        chosen = y[:, None] == torch.arange(self.classes, device=y.device)
        return torch.logsumexp(outputs, -1) - torch.where(chosen, outputs, 0.0).sum(-1)

    def check(self, outputs: Tensor) -> None:
        _check_tensor(outputs)
        if outputs.ndim != 2 or outputs.shape[1] != self.classes:
            raise UserError(
                f"The module's output has shape {_shape(outputs)} for a batch of {outputs.shape[0]}, but the data has "
                f"{self.classes} classes; its last layer must give {self.classes} numbers per example."
            )


@dataclass(frozen=True)
class Normal:
    """A real target with Gaussian noise; outputs are means ``[B, 1]`` (or ``[B]``).

    Attributes:
        scale: Standard deviation of the noise (its initial value where it is learnt).
        learnt: Whether the noise is learnt; its logarithm is then a personal factor, ``likelihood.log_scale``.
    """

    scale: float = 1.0
    learnt: bool = True
    names: tuple[str, ...] = field(default=("likelihood.log_scale",), repr=False)

    def parameters(self) -> dict[str, Tensor]:
        return {self.names[0]: torch.tensor([math.log(self.scale)])} if self.learnt else {}

    def log_scale(self, parameters: dict[str, Tensor]) -> Tensor | float:
        """Logarithm of the noise's standard deviation."""
        return parameters[self.names[0]] if self.learnt else math.log(self.scale)

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        log_scale = self.log_scale(parameters)
        residual = y - outputs.reshape(y.shape)
        precision = torch.exp(-2.0 * log_scale) if isinstance(log_scale, Tensor) else math.exp(-2.0 * log_scale)
        return 0.5 * (residual.square() * precision + math.log(2.0 * math.pi)) + log_scale

    def curvature(self, level: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        log_scale = (
            parameters[self.names[0]][..., 0] if self.learnt else torch.full_like(level[..., 0], math.log(self.scale))
        )
        return torch.exp(-2.0 * log_scale)

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "regression needs")


@dataclass(frozen=True)
class Heteroscedastic:
    """A real target whose noise depends on the inputs; outputs are its mean and the logarithm of its variance, ``[B,
    2]``."""

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the standard deviation, ``[..., 2]`` to ``[...]`` each; held between e^-6 and e^6."""
        return outputs[..., 0], 0.5 * outputs[..., 1].clamp(-12.0, 12.0)

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        mean, log_scale = self.moments(outputs)
        return 0.5 * (((y - mean) * torch.exp(-log_scale)).square() + math.log(2.0 * math.pi)) + log_scale

    def curvature(self, level: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.exp(-2.0 * self.moments(level)[1])

    def check(self, outputs: Tensor) -> None:
        _check_outputs(outputs, 2, "noise that depends on the inputs needs a mean and a log-variance")


@dataclass(frozen=True)
class Ordinal:
    """One of ``classes`` labels in an order; the cumulative logit model, P(y ≤ k) = σ(c_k − output), outputs ``[B, 1]``.

    The cuts c_k are learnt: the first is ``likelihood.cuts[0]``, and each next one is higher by the exponential of the
    next number there. They start where all classes are equally probable.
    """

    classes: int

    def parameters(self) -> dict[str, Tensor]:
        shares = torch.arange(1, self.classes) / self.classes
        cuts = torch.logit(shares)
        return {CUTS: torch.cat([cuts[:1], cuts.diff().log()])}

    def log_probs(self, outputs: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Logarithms of the probabilities of all classes, ``[..., B, 1]`` and cuts ``[..., K - 1]`` to ``[..., B, K]``."""
        first, gaps = parameters[CUTS][..., :1], parameters[CUTS][..., 1:].exp().clamp(min=1e-6)
        cuts = torch.cat([first, first + gaps.cumsum(-1)], -1)
        at = cuts[..., None, :] - outputs.reshape(*outputs.shape[:-1], 1)
        below, above = nn.functional.logsigmoid(at), nn.functional.logsigmoid(-at)
        # σ(b) − σ(a) = σ(b) σ(−a) (1 − e^(a − b)), with which nothing cancels.
        between = below[..., 1:] + above[..., :-1] + torch.log(-torch.expm1(-gaps))[..., None, :]
        return torch.cat([below[..., :1], between, above[..., -1:]], -1)

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        chosen = y[:, None] == torch.arange(self.classes, device=y.device)
        return -torch.where(chosen, self.log_probs(outputs.reshape(len(y), 1), parameters), 0.0).sum(-1)

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "classes in an order need")


@dataclass(frozen=True)
class Bernoulli:
    """Any of ``labels`` labels, each present or not; outputs are logits ``[B, labels]``, targets bits of whole numbers."""

    labels: int

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def bits(self, y: Tensor) -> Tensor:
        """Which labels are present, ``[...]`` int64 to ``[..., labels]`` int64."""
        return (y[..., None] >> torch.arange(self.labels, device=y.device)) & 1

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return (nn.functional.softplus(outputs) - self.bits(y) * outputs).sum(-1)

    def check(self, outputs: Tensor) -> None:
        _check_outputs(outputs, self.labels, f"there are {self.labels} labels")


@dataclass(frozen=True)
class Tokens:
    """One of ``classes`` labels for each token of a sequence; outputs are logits ``[B, T, classes]``, targets ``[B, T]``.

    Tokens whose target is `IGNORED` do not count. −log p of a sequence is the sum over its tokens.
    """

    classes: int

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def nll(self, outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        chosen = y[..., None] == torch.arange(self.classes, device=y.device)
        each = torch.logsumexp(outputs, -1) - torch.where(chosen, outputs, 0.0).sum(-1)
        return torch.where(y == IGNORED, 0.0, each).sum(-1)

    def check(self, outputs: Tensor) -> None:
        _check_tensor(outputs)
        if outputs.ndim != 3 or outputs.shape[2] != self.classes:
            raise UserError(
                f"The module's output has shape {_shape(outputs)} for a batch of {outputs.shape[0]}, but each token has "
                f"one of {self.classes} classes; it must have the shape [batch, tokens, {self.classes}]."
            )


def _check_outputs(outputs: Tensor, count: int, why: str) -> None:
    _check_tensor(outputs)
    if outputs.ndim != 2 or outputs.shape[1] != count:
        raise UserError(
            f"The module's output has shape {_shape(outputs)} for a batch of {outputs.shape[0]}, but {why}; its last "
            f"layer must give {count} numbers per example."
        )


def check_one_output(outputs: Tensor, who: str) -> None:
    """Raise a `UserError` unless there is one number per example; ``who`` is what needs it, with the verb."""
    _check_tensor(outputs)
    if outputs.shape[1:] not in (torch.Size([]), torch.Size([1])):
        raise UserError(
            f"The module's output has shape {_shape(outputs)} for a batch of {outputs.shape[0]}, but {who} "
            "one number per example; make its last layer give one."
        )


def named(name: str, classes: int) -> Likelihood:
    """The likelihood of that name, of this module or of another package, with its usual settings.

    Args:
        name: See `bpfed.config.registry.LIKELIHOODS`.
        classes: How many there are; 0: the targets are numbers.
    """
    kind = registry.LIKELIHOODS.load(name)
    try:
        made: Likelihood = kind(classes) if isinstance(kind, type) and issubclass(kind, Categorical) else kind()
    except TypeError as error:
        raise registry.LIKELIHOODS.unfit(name, f"needs arguments ({error})") from error
    return made


def _check_tensor(outputs: object) -> None:
    if not isinstance(outputs, Tensor):
        raise UserError(f"The module returns a {type(outputs).__name__}, but must return one tensor of outputs.")


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"
