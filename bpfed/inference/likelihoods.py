"""How likely a target is, given the network's outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bpfed._util.errors import UserError
from bpfed.config import registry


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

    def check(self, outputs: Tensor) -> None:
        check_one_output(outputs, "regression needs")


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
