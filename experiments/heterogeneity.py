"""Beyond the paper: how unlike clients may be, and how many of them there may be.

Two sweeps on Fashion-MNIST, ten clients a round in both.

- ``alpha``: 20 clients, each class dealt out in Dirichlet(α) proportions. All clients together have about 3 500
  training examples, whatever α is; who has how many is part of what α says. α = 1 000 is as good as equal shares.
- ``clients``: 10 to 1 000 clients, five labels drawn at random for each and 35 training examples each, so that more
  clients have more data among them; the more there are, the less often each takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import unknown
from bpfed.config.settings import Device
from bpfed.data import Examples, FederatedData, load
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import pick_device
from bpfed.methods import method as method_of
from bpfed.methods.base import Method
from experiments.training import Measured, Shared, each, seeded, settings_of, tests_on, train

METHODS = ("bpfed-recipe", "bpfed", "fedper", "pfedbayes", "local", "fedavg-ft")
MEASURES = ("accuracy", "nll", "ece")
SOURCE = "fmnist"
#: Weight draws of a prediction.
DRAWS = 50
#: Of the sweep over α: clients, part of their examples that is for testing, and how many of these are used at most.
CLIENTS, TEST_FRACTION, MOST_TESTS = 20, 0.95, 500
#: Of the sweep over clients: training examples of each; and test examples of all together, about.
EACH, TESTS = 35, 10_000


@dataclass(frozen=True)
class Axis:
    """One sweep.

    Attributes:
        file: What its results are called.
        values: What is tried.
        rounds: Of every run, where nothing is said.
        deal: From a value and a seed to the data.
        words: The data in words.
    """

    file: str
    values: tuple[float, ...]
    rounds: int
    deal: Callable[[float, int], FederatedData]
    words: str


def dirichlet(alpha: float, seed: int) -> FederatedData:
    """20 clients with about 3 500 training examples in all."""
    data = load(SOURCE, clients=CLIENTS, partition=f"dirichlet:{alpha:g}", test_fraction=TEST_FRACTION, seed=seed)
    return replace(data, test=first(data.test, MOST_TESTS))


def many_clients(clients: float, seed: int) -> FederatedData:
    """So many clients with 35 training examples each."""
    data = load(SOURCE, clients=int(clients), partition="random", seed=seed)
    return replace(data, train=first(data.train, EACH), test=first(data.test, TESTS // int(clients) or 1))


def first(examples: Examples, most: int) -> Examples:
    """At most so many examples of each client; which ones is random, since their order is."""
    counts = examples.sizes.clamp(max=most)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    shift = (examples.offsets[:-1] - offsets[:-1]).repeat_interleave(counts)
    index = shift + torch.arange(len(shift))
    return Examples(examples.x[index], examples.y[index], offsets)


AXES = {
    "alpha": Axis(
        "heterogeneity.json",
        (0.05, 0.1, 0.3, 1, 10, 1000),
        100,
        dirichlet,
        f"{SOURCE}, {CLIENTS} clients by Dirichlet(α), about 3500 training examples in all, at most {MOST_TESTS} "
        "test examples each, 10 clients a round",
    ),
    "clients": Axis(
        "scale.json",
        (10, 30, 100, 300, 1000),
        300,
        many_clients,
        f"{SOURCE}, 5 random labels and {EACH} training examples for each client, about {TESTS} test examples in all, "
        "10 clients a round",
    ),
}


def run(
    out: Path,
    axes: Sequence[str] = tuple(AXES),
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    rounds: int | None = None,
    device: Device = "auto",
    say: Say = to_stderr,
) -> None:
    """Run every method on both sweeps and write ``OUT/heterogeneity.json`` and ``OUT/scale.json``, method by method.

    Args:
        out: Folder of results.
        axes: ``alpha``, ``clients`` or both.
        methods: Names of methods; those that are in the file already are left as they are.
        seeds: How many, from 0 up.
        rounds: Of every run; None: the sweep's own number.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told how far it is.
    """
    for name in axes:
        if name not in AXES:
            raise unknown("axis", name, AXES)
    chosen = {name: method_of(name)() for name in methods}
    for name in axes:
        sweep(out / AXES[name].file, name, chosen, seeds, rounds or AXES[name].rounds, device, say)


def sweep(path: Path, axis: str, methods: dict[str, Method], seeds: int, rounds: int, device: Device, say: Say) -> None:
    """Run methods over one axis and write the file after each of them; for the arguments see `run`."""
    asked: dict[str, Any] = {
        "axis": axis,
        "values": list(AXES[axis].values),
        "data": AXES[axis].words,
        "rounds": rounds,
        "seeds": list(range(seeds)),
    }
    file = Shared(path, asked, METHODS, settings_of(rounds, DRAWS, device))

    def found(method: Method) -> Measured:
        scores = measure(method, axis, file.seeds, rounds, device, say)
        means = ", ".join(f"{100 * sum(a) / len(a):.1f}" for a in scores["accuracy"])
        return Measured(scores, f"accuracy {means} %")

    each(methods, f"over {axis}", file.has, found, file.keep, say, file.check_writable)


def measure(
    method: Method, axis: str, seeds: int, rounds: int, device: Device, say: Say
) -> dict[str, list[list[float]]]:
    """Accuracy, NLL and ECE of the last round over all test examples: a list over values of lists over seeds."""
    where = pick_device(device)
    values = AXES[axis].values
    scores: dict[str, list[list[float]]] = {m: [] for m in MEASURES}
    # A GPU takes all values at once in little more time than one; on a CPU that would only fill the memory.
    for group in [values] if where.type == "cuda" else [(value,) for value in values]:
        what = f"{method.title} with {axis} {', '.join(f'{v:g}' for v in group)}"
        say(f"{what}: loading")
        deals = [tests_on(AXES[axis].deal(value, seed), where) for value in group for seed in range(seeds)]
        settings = seeded(settings_of(rounds, DRAWS, device), seeds) * len(group)
        federations = train(method, deals, settings, say, what)
        say(f"{what}: testing")
        found = [evaluate_clients(f)[0] for f in federations]
        for i in range(len(group)):
            for name in MEASURES:
                scores[name].append([e[name].pooled for e in found[i * seeds : (i + 1) * seeds]])
    return scores
