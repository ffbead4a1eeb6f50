"""Networks chosen where none is given, the paper's two and a small one for tables; and the model of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bpfed._util.errors import UserError
from bpfed.config.settings import HIDDEN, Settings
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Likelihood
from bpfed.inference.rng import Purpose, words
from bpfed.nn.ensemble import make_ensemble
from bpfed.nn.model import Model

if TYPE_CHECKING:
    from bpfed.inference.tasks import Task
    from bpfed.methods.base import AnyMethod


class LeNet(nn.Module):
    """The paper's network for CIFAR-10: conv 3-6 k5, pool, conv 6-16 k5, pool, fc 400-120-84-10. 62 006 weights."""

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def mlp(inputs: int, outputs: int, hidden: tuple[int, ...] = (HIDDEN,)) -> nn.Sequential:
    """Linear layers with ReLU between; the paper's network for MNIST is ``mlp(784, 10)``. 79 510 weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class ZeroLinear(nn.Linear):
    """A linear layer that starts at 0."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class SkipMLP(nn.Module):
    """One hidden layer, and a linear path from inputs to outputs beside it: linear(x) + output(relu(hidden(x))).

    Both last layers start at 0. So it starts as a logistic (or linear) regression, and stays one where the hidden layer
    brings nothing.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.linear = ZeroLinear(inputs, outputs, bias=False)
        self.hidden = nn.Linear(inputs, hidden)
        self.output = ZeroLinear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.linear(x) + self.output(torch.relu(self.hidden(x)))


def linear(inputs: int, outputs: int) -> nn.Sequential:
    """Logistic or linear regression; starts at 0."""
    return nn.Sequential(nn.Flatten(), ZeroLinear(inputs, outputs))


def default(
    input_shape: tuple[int, ...], outputs: int, seed: int = 0, hidden: int | None = None, network: str = "auto"
) -> nn.Module:
    """A network for inputs of this shape, with weights drawn from ``seed``.

    Args:
        input_shape: Of one example.
        outputs: Numbers for each example.
        seed: Of the first weights.
        hidden: Units in the hidden layer; None: 100.
        network: ``auto``: LeNet for 32 x 32 images, else an MLP; ``mlp``; ``skip``: see `SkipMLP`; ``linear``.

    Raises:
        UserError: ``hidden`` is given, and there is no such layer.
    """
    images = len(input_shape) == 3 and input_shape[1:] == (32, 32) and network == "auto"
    if network == "linear" and hidden is not None:
        raise UserError("hidden is for a network with a hidden layer, but network is 'linear'; leave one of them out.")
    if images and hidden is not None:
        raise UserError(
            "hidden is for a network with one hidden layer, but images of 32 x 32 get a LeNet; leave it out, or "
            "in Python give a network of your own as model."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words(seed, 0, Purpose.INIT, np.zeros(1, dtype=np.uint64))[0] >> np.uint64(1)))
        if images:
            return LeNet(input_shape[0], outputs)
        inputs, width = math.prod(input_shape), HIDDEN if hidden is None else hidden
        if network == "linear":
            return linear(inputs, outputs)
        return SkipMLP(inputs, outputs, width) if network == "skip" else mlp(inputs, outputs, (width,))


def members_of(method: AnyMethod, settings: Settings, flat: bool) -> int:
    """How many networks are trained; ``flat``: inputs are rows of numbers, and the network is made here."""
    return settings.members or (method.flat_members if flat else 1)


def make_model(
    example: Inputs,
    task: Task,
    classes: int,
    method: AnyMethod,
    settings: Settings,
    module: nn.Module | None = None,
    likelihood: Likelihood | None = None,
) -> Model:
    """The model of a run with its first weights.

    Simulation, server, sites and whoever loads a run all have it from here, and so the same to the bit.

    Args:
        example: A small batch of inputs, ``[B, ...]``; of the network that is made here only its shape matters.
        task: What the targets are.
        classes: How many there are; 0: the targets are no classes.
        method: Of which matter what is personal and which network it prefers for flat inputs.
        settings: Of which the seed, ``network``, ``hidden`` and ``members`` matter.
        module: A network; None: the `default` one.
        likelihood: None: that of the task.

    Raises:
        UserError: The likelihood is of another kind: nobody could predict with it (`bpfed.inference.predictive`).
    """
    if likelihood is None:
        likelihood = task.likelihood(classes)
    if not isinstance(likelihood, task.likelihoods):
        known = f"{task.likelihoods.__module__}.{task.likelihoods.__name__}"
        raise UserError(
            f"The likelihood is a {type(likelihood).__name__}, but the targets are {task.targets}, for which predictions "
            f"are made with {known} alone; use it or a subclass, or leave likelihood out."
        )
    if module is None and not isinstance(example, Tensor):
        raise UserError(
            f"The inputs are {inputs.shapes(example)}, which no network that is made here takes; give one as model."
        )
    members = members_of(method, settings, flat=module is None and inputs.first(example).ndim == 2)
    if module is None:
        network = method.flat_network if settings.network == "auto" and example.ndim == 2 else settings.network
        module = default(tuple(example.shape[1:]), task.outputs(classes), settings.seed, settings.hidden, network)
    model = Model.of(module, likelihood, example, method.personal, settings.trainable)
    if settings.cache_features == "auto":
        model = model.on_features(example)
    return make_ensemble(model, members, settings.seed)
