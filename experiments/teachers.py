"""Clients whose true functions are known: teacher networks, the data they make, and the experiment's setting.

Client i's function f_i is a random body that all clients share and a head of its own, f_i standardised to mean 0 and
variance 1 over the inputs, x uniform on [−1, 1]^e0. Its targets are f_i(x) + N(0, σ_ε²) with σ_ε known to all.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bpfed.data.federated import Examples, FederatedData
from bpfed.inference import rng
from bpfed.inference.rng import Purpose
from bpfed.methods import METHODS
from bpfed.methods.base import Method
from bpfed.methods.recipe import Recipe
from experiments.bounds import Shape

#: What a draw of the data is for; a word of its key.
_BODY, _HEAD, _STANDARD, _INPUTS, _NOISE, _FRESH = range(1, 7)
#: Inputs that the teachers' mean and variance are taken over.
_STANDARDISED = 20_000
#: Of step size times steps, where there is to be no bound.
NO_BOUND = 1e9


class Unbounded(Recipe):
    """The recipe with the step size that is given to it."""

    max_lr_epochs: ClassVar[float] = NO_BOUND
    max_round_lr_steps: ClassVar[float] = NO_BOUND
    max_total_lr_steps: ClassVar[float] = NO_BOUND


@dataclass(frozen=True)
class Setting:
    """What all points of the experiment have in common.

    Attributes:
        methods: Those compared, each with its own default settings but for ``lr``.
        examples: The n of the first sweep.
        clients: N of the first sweep.
        many: The N of the second sweep.
        fixed: n of the second sweep.
        inputs: e0.
        teacher: Width of the teachers.
        width: K of the students.
        hidden: L, of both.
        noise: σ_ε.
        rounds: Communication rounds; all clients take part in each.
        steps: Local steps in a round.
        batch: Mini-batch size; n where that is smaller.
        lr: Step size of all methods; it falls along a cosine.
        draws: Weight draws of the measurement.
        fresh: Fresh inputs of each client that d² is averaged over.
    """

    methods: tuple[str, ...] = ("bpfed", "bpfed-recipe")
    examples: tuple[int, ...] = (25, 50, 100, 200, 400, 800, 1600)
    clients: int = 10
    many: tuple[int, ...] = (2, 5, 10, 20, 50)
    fixed: int = 100
    inputs: int = 2
    teacher: int = 4
    width: int = 16
    hidden: int = 1
    noise: float = 0.3
    rounds: int = 24
    steps: int = 64
    batch: int = 100
    lr: float = 0.02
    draws: int = 64
    fresh: int = 500

    @property
    def shape(self) -> Shape:
        """The students' network, as the bound sees it."""
        return Shape(self.inputs, self.width, self.hidden)

    def grid(self) -> list[tuple[str, int, int]]:
        """All points (method, n, N), each once."""
        pairs = [(n, self.clients) for n in self.examples] + [(self.fixed, many) for many in self.many]
        return [(method, n, many) for n, many in dict.fromkeys(pairs) for method in self.methods]

    def method(self, name: str) -> Method:
        """A method with the experiment's step size; what else a method would make of it is switched off."""
        return (Unbounded if name == Recipe.name else METHODS[name])(lr=self.lr)

    def record(self) -> dict[str, Any]:
        """All of it in plain data, the number of weights T, each method's settings: a point is kept under the same."""
        settings = {name: self.method(name).settings() for name in self.methods}
        if Recipe.name in settings:
            settings[Recipe.name] |= dict.fromkeys(
                ("max_lr_epochs", "max_round_lr_steps", "max_total_lr_steps"), NO_BOUND
            )
        return json.loads(json.dumps(asdict(self) | {"weights": self.shape.weights, "settings": settings}))


@dataclass(frozen=True)
class Teachers:
    """The true functions of clients: one random ReLU body, a head for each client.

    Attributes:
        body: Weights and biases of each hidden layer.
        heads: ``[N, K]``.
        mean: Of each function over the inputs, ``[N]``; it is taken off.
        scale: Its standard deviation, ``[N]``; it is divided by.
    """

    body: tuple[tuple[Tensor, Tensor], ...]
    heads: Tensor
    mean: Tensor
    scale: Tensor

    @classmethod
    def draw(cls, setting: Setting, clients: int, seed: int) -> Teachers:
        """The first ``clients`` teachers of this seed; who else there is does not change them."""
        inputs, body = setting.inputs, []
        for layer in range(setting.hidden):
            key = rng.fold(_key(seed, _BODY), layer)
            weight = _symmetric(rng.fold(key, 0), setting.teacher, inputs) * math.sqrt(6.0 / inputs)
            body.append((weight, 0.5 * _symmetric(rng.fold(key, 1), setting.teacher)))
            inputs = setting.teacher
        heads = rng.normal(_client_keys(seed, _HEAD, clients), setting.teacher)
        zero = cls(tuple(body), heads, torch.zeros(clients), torch.ones(clients))
        at = zero(_symmetric(_key(seed, _STANDARD), _STANDARDISED, setting.inputs).expand(clients, -1, -1))
        return replace(zero, mean=at.mean(-1), scale=at.std(-1, correction=0))

    def __call__(self, x: Tensor) -> Tensor:
        """f_i of each client's own inputs: ``[N, B, e0]`` to ``[N, B]``."""
        for weight, bias in self.body:
            x = torch.relu(x @ weight.T + bias)
        return ((x @ self.heads[:, :, None]).squeeze(-1) - self.mean[:, None]) / self.scale[:, None]


class Task(NamedTuple):
    """A federation's data, and inputs ``[N, F, e0]`` with true values ``[N, F]`` that nobody trains on."""

    data: FederatedData
    x: Tensor
    true: Tensor


def task(setting: Setting, n: int, clients: int, seed: int) -> Task:
    """``clients`` clients with ``n`` examples each; fewer are the first of more, so points of a curve are paired."""
    teachers = Teachers.draw(setting, clients, seed)
    most = max(*setting.examples, setting.fixed, n)
    x = _symmetric(_client_keys(seed, _INPUTS, clients), most, setting.inputs)
    y = teachers(x) + setting.noise * rng.normal(_client_keys(seed, _NOISE, clients), most)
    fresh = _symmetric(_client_keys(seed, _FRESH, clients), setting.fresh, setting.inputs)
    true = teachers(fresh)
    data = FederatedData(
        name="teachers",
        clients=tuple(f"client {i}" for i in range(clients)),
        train=Examples.of(list(zip(x[:, :n], y[:, :n], strict=True))),
        test=Examples.of(list(zip(fresh, true, strict=True))),
        task="regression",
        seed=seed,
    )
    return Task(data, fresh, true)


def _key(seed: int, word: int) -> Tensor:
    return rng.key(seed, Purpose.SAMPLE, word)


def _client_keys(seed: int, word: int, clients: int) -> Tensor:
    return rng.fold(_key(seed, word), torch.arange(clients, dtype=torch.int32))


def _symmetric(key: Tensor, *shape: int) -> Tensor:
    """Uniform on [−1, 1], of this shape for each key."""
    return (2.0 * rng.uniform(key, math.prod(shape)) - 1.0).reshape(*key.shape[:-1], *shape)
