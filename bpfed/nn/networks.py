"""The model of a run: networks chosen where none is given, and several of one kind as an ensemble."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bpfed._util.errors import UserError
from bpfed.config.registry import NETWORKS
from bpfed.config.settings import HIDDEN, Settings
from bpfed.inference import inputs, rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Likelihood
from bpfed.inference.rng import Purpose, words
from bpfed.nn.model import Model

if TYPE_CHECKING:
    from bpfed.inference.tasks import Task
    from bpfed.methods.base import AnyMethod


@dataclass(frozen=True)
class Ensemble(Model):
    """A model of M members; ``P`` counts the weights of all of them."""

    @cached_property
    def one(self) -> Model:
        first = self.layout.apart(self.initial)[0]
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return Model(**own | {"layout": self.layout.one, "initial": first})

    def outputs(self, weights: Tensor, x: Inputs, key: Tensor | None = None) -> Tensor:
        raise TypeError(
            "A mixture has no outputs of its own; call `one` with the weights that `ParameterLayout.apart` gives."
        )

    def gradient(self, weights: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The members' mean −log p, summed over the batch, ``[S]``; and each member's own gradient, ``[S, P]``."""
        value, gradient = self.one.gradient(self._rows(weights), *self._each(x, y, mask), self._keys(key))
        return self._mean(value), self._joined(gradient)

    def hessian_product(
        self, weights: Tensor, vector: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor
    ) -> Tensor:
        """Each member's own, ``[S, P]``."""
        rows, along = self._rows(weights), self._rows(vector)
        return self._joined(self.one.hessian_product(rows, along, *self._each(x, y, mask), self._keys(key)))

    def local_gradient(
        self, q: Gaussian, x: Inputs, y: Tensor, mask: Tensor, key: Tensor, points: frozenset[str] = frozenset()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `gradient`."""
        rows = Gaussian(*(self._rows(t) for t in q))
        value, mean, sigma = self.one.local_gradient(rows, *self._each(x, y, mask), self._keys(key), points)
        return self._mean(value), self._joined(mean), self._joined(sigma)

    def _rows(self, weights: Tensor) -> Tensor:
        """``[S, P]`` to a row for each member, ``[S M, P / M]``."""
        return self.layout.apart(weights).flatten(0, 1)

    def _joined(self, rows: Tensor) -> Tensor:
        return self.layout.together(rows.unflatten(0, (-1, self.members)))

    def _each(self, x: Inputs, y: Tensor, mask: Tensor) -> tuple[Inputs, Tensor, Tensor]:
        """The batch for every member, ``[S, ...]`` to ``[S M, ...]``."""
        each = self.members
        return (
            inputs.each(lambda t: t.repeat_interleave(each, 0), x),
            y.repeat_interleave(each, 0),
            mask.repeat_interleave(each, 0),
        )

    def _keys(self, key: Tensor) -> Tensor:
        """A key of its own for each member, ``[S M, 2]``."""
        member = torch.arange(self.members, dtype=torch.int32, device=key.device)
        return rng.fold(key[:, None], member).flatten(0, 1)

    def _mean(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (-1, self.members)).mean(1)


def make_ensemble(model: Model, members: int, seed: int) -> Model:
    """A model of that many networks like this one; all but the first start with newly drawn weights.

    Args:
        model: The first member.
        members: 1: the model itself.
        seed: Of the run.
    """
    if members == 1:
        return model
    like = model.layout.unflatten(model.initial)
    drawn = [like, *(like | _redrawn(model, seed, member) for member in range(1, members))]
    layout = replace(model.layout, shared=members * model.layout.shared, members=members)
    initial = layout.together(torch.stack([model.layout.flatten(weights) for weights in drawn]))
    own = {f.name: getattr(model, f.name) for f in fields(model)}
    return Ensemble(**own | {"layout": layout, "initial": initial})


def _redrawn(model: Model, seed: int, member: int) -> dict[str, Tensor]:
    """First weights as the module draws them, or where it does not say how, as its layers do, in order of use."""
    fresh = copy.deepcopy(model.module).cpu()
    place = {name: i for i, name in enumerate(model.order)}
    word = rng.words(seed, member, Purpose.INIT, np.zeros(1, dtype=np.uint64))[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(word >> np.uint64(1)))
        _redraw(fresh, "", place)
    drawn = {n: p.detach().float() for n, p in fresh.named_parameters()}
    if model.frozen:  # an adapter starts with a matrix of zeros, so that it changes nothing at first
        first = model.layout.unflatten(model.initial)
        drawn |= {n: p for n, p in first.items() if p.ndim > 1 and not p.any()}
    return drawn


def _redraw(module: nn.Module, name: str, place: dict[str, int]) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        return  # all members share what is frozen
    where = f"Layer '{name}' of the module" if name else "The module"
    if callable(again := getattr(module, "reset_parameters", None)):
        try:
            again()
        except Exception as error:
            raise UserError(
                f"{where} cannot draw its parameters again, which members above 1 need: reset_parameters() says "
                f"'{error}'; fix it, or leave members at 1."
            ) from error
        return
    if any(p.requires_grad for p in module.parameters(recurse=False)):
        raise UserError(
            f"{where} has parameters but no reset_parameters() to draw them again, which members above 1 need; "
            "give it one, or leave members at 1."
        )
    layers = [(f"{name}.{child}" if name else child, layer) for child, layer in module.named_children()]

    def first_use(called: tuple[str, nn.Module]) -> int:
        return min((place.get(f"{called[0]}.{n}", len(place)) for n, _ in called[1].named_parameters()), default=0)

    for called, layer in sorted(layers, key=first_use):
        _redraw(layer, called, place)


# --- Networks chosen where none is given ------------------------------------------------------------------------------


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


class SequenceNet(nn.Module):
    """For sequences: two convolutions along time with pooling between, the mean over time, and a linear layer.

    Where something happens in a sequence makes little difference. Inputs are ``[B, C, 1, T]``: as convolutions in two
    dimensions those along time run for many clients at once.
    """

    #: Units of both layers, and steps that a kernel spans.
    WIDTHS, SPAN = (16, 32), 9

    def __init__(self, channels: int, steps: int, outputs: int) -> None:
        super().__init__()
        first, second = self.WIDTHS
        around = (0, self.SPAN // 2)
        self.steps = steps
        self.conv1 = nn.Conv2d(channels, first, (1, self.SPAN), padding=around)
        self.conv2 = nn.Conv2d(first, second, (1, self.SPAN), padding=around)
        self.output = nn.Linear(second, outputs)

    def forward(self, x: Tensor) -> Tensor:
        pool = min(2, self.steps)
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), (1, pool))
        x = torch.relu(self.conv2(x))
        return self.output(nn.functional.avg_pool2d(x, (1, self.steps // pool)).flatten(1))


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
        network: ``auto``: LeNet for 32 x 32 images, `SequenceNet` for inputs of ``(C, 1, T)``, else an MLP; ``conv1d``: a
            `SequenceNet`; ``mlp``; ``skip``: see `SkipMLP`; ``linear``; or that of an installed package
            (`bpfed.config.registry.NETWORKS`).

    Raises:
        UserError: ``hidden`` is given, and there is no such layer; or inputs are no sequences.
    """
    if network not in NETWORKS.own and hidden is not None:
        raise UserError(f"hidden is for a network of bpfed itself, but network is '{network}'; leave one of them out.")
    sequences = len(input_shape) == 3 and input_shape[1] == 1
    if network == "conv1d" and not sequences:
        raise UserError(
            f"network is 'conv1d', which is for sequences, but inputs have shape {list(input_shape)}; leave it out, or if "
            "they are sequences [n, steps, channels] in a file, use --input sequence."
        )
    if sequences and network in ("auto", "conv1d"):
        if hidden is not None:
            raise UserError(
                "hidden is for a network with one hidden layer, but sequences get convolutions; leave it out."
            )
        network = "conv1d"
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
        if network not in NETWORKS.own:
            return _of_package(network, input_shape, outputs)
        if images:
            return LeNet(input_shape[0], outputs)
        if network == "conv1d":
            return SequenceNet(input_shape[0], input_shape[2], outputs)
        inputs, width = math.prod(input_shape), HIDDEN if hidden is None else hidden
        if network == "linear":
            return linear(inputs, outputs)
        return SkipMLP(inputs, outputs, width) if network == "skip" else mlp(inputs, outputs, (width,))


def _of_package(name: str, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The network that an installed package has under this name, for inputs of this shape."""
    make = NETWORKS.load(name)
    try:
        module = make(input_shape, outputs)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise NETWORKS.unfit(name, f"cannot be made for inputs of shape {list(input_shape)} ({words})") from error
    if not isinstance(module, nn.Module):
        raise NETWORKS.unfit(name, f"is a {type(module).__name__} and no torch.nn.Module")
    return module


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
        kind = task.likelihoods
        known = f"{kind.__module__}.{kind.__name__}"
        raise UserError(
            f"The likelihood is a {type(likelihood).__name__}, but the targets are {task.targets}, for which predictions "
            f"are made with {known} alone; use it or a subclass, or leave likelihood out."
        )
    if module is None and not isinstance(example, Tensor):
        raise UserError(
            f"The inputs are {inputs.shapes(example)}, which no network that is made here takes; give one as model."
        )
    ours = module is None
    members = members_of(method, settings, flat=ours and inputs.first(example).ndim == 2)
    if module is None:
        network = method.flat_network if settings.network == "auto" and example.ndim == 2 else settings.network
        module = default(tuple(example.shape[1:]), task.outputs(classes), settings.seed, settings.hidden, network)
    model = Model.of(module, likelihood, example, method.personal, settings.trainable, tried=ours)
    if settings.cache_features == "auto":
        model = model.on_features(example)
    return make_ensemble(model, members, settings.seed)
