"""Figures 7-9: clients that took no part in training learn their personal factors, with the shared ones frozen.

Some clients of a cell are held out, one of each label group and more on CIFAR-10. The others train; then every held-out
client adapts to the finished run (see `bpfed.runs.adapt`) with 1, 2, 5, ... of its training examples per class, and is
tested on its test examples. Newcomers of all seeds and numbers of examples are adapted side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import UserError, unknown
from bpfed._util.files import to_json, write_whole
from bpfed._util.text import plural
from bpfed.config.settings import Device, Settings
from bpfed.data import Examples, FederatedData, load
from bpfed.data.partition import CELLS
from bpfed.engine.federation import Federation
from bpfed.engine.local import LocalRound
from bpfed.inference import rng
from bpfed.inference.predictive import classify
from bpfed.inference.rng import Purpose
from bpfed.methods import method as method_of
from bpfed.methods.base import ADAPT, Method, Phase, State, rows
from bpfed.metrics import Evaluation, evaluate
from bpfed.runs import adapt as adaptation
from experiments.training import (
    Measured,
    Progress,
    check_same,
    check_writable,
    device_name,
    each,
    has_seeds,
    read,
    record,
    seeded,
    settings_of,
    train,
)

METHODS = ("fedper", "fedrep", "lg-fedavg", "fedsoul", "bpfed", "bpfed-recipe", "bpfed-population")
ROUNDS = 100
#: Examples of each class that a newcomer learns from, as far as the cell has so many; and all that it has.
EXAMPLES = (1, 2, 5, 10, 25, 50)
#: One in so many clients is held out.
HELD = 5
#: Local steps after which a newcomer with all its examples is tested, multiples of the first that is not 0. The last is
#: the whole adaptation; that and the weight draws of a newcomer's prediction are as `bpfed.runs.adapt` has them.
STOPS = (0, 5, 10, 25, 50, 100, 250, adaptation.STEPS)
DRAWS = adaptation.DRAWS
MEASURES = ("accuracy", "nll", "ece")
#: Numbers of inputs that are predicted for at a time, by kind of device.
BLOCK = {"cpu": 8_000_000, "cuda": 60_000_000}


class Newcomer(NamedTuple):
    """A client that joins one of several runs.

    Attributes:
        run: Which.
        name: The client's name; its randomness follows it.
        per_class: Examples of each class that it learns from.
        x: Those inputs, ``[n, ...]``.
        y: Their labels, ``[n]``.
        test_x: Inputs that it is tested on, ``[E, ...]``.
        test_y: Their labels, ``[E]``.
    """

    run: int
    name: str
    per_class: int
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def run(
    out: Path,
    cells: Sequence[str] = tuple(CELLS),
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    rounds: int = ROUNDS,
    device: Device = "auto",
    say: Say = to_stderr,
    partition: str = "groups",
) -> None:
    """Run every method on every cell and write ``OUT/novel/CELL/METHOD.json``; what is there already is left as it is.

    Args:
        out: Folder of results.
        cells: Names of the paper's cells.
        methods: Names of methods.
        seeds: How many, from 0 up.
        rounds: Communication rounds before the newcomers join.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told how far it is.
        partition: ``groups`` or ``random``.
    """
    for cell in cells:
        if cell not in CELLS:
            raise unknown("cell", cell, CELLS)
    chosen = {name: method_of(name)() for name in methods}
    for method in chosen.values():
        _stepwise(method)
    for cell in cells:
        _cell(out / "novel" / cell, cell, chosen, seeds, settings_of(rounds, DRAWS, device), say, partition)


def _cell(
    folder: Path, cell: str, methods: dict[str, Method], seeds: int, settings: Settings, say: Say, partition: str
) -> None:
    """Run methods on one cell and write a file for each of them."""
    deals: list[FederatedData] = []

    def asked(name: str, method: Method) -> dict[str, Any]:
        return {
            "cell": cell,
            "method": name,
            "title": method.title,
            "partition": partition,
            "seeds": list(range(seeds)),
            "rounds": settings.rounds,
            "settings": record(method, settings),
        }

    def path(name: str) -> Path:
        return folder / f"{name}.json"

    def ready() -> None:
        check_writable(folder)
        if not deals:
            say(f"{cell}: loading {plural(seeds, 'seed')}")
            deals.extend(load(cell, partition=partition, seed=seed) for seed in range(seeds))

    def found(method: Method) -> Measured:
        scores = measure(method, deals, settings, say)
        last = scores["points"][-1]["accuracy"]
        return Measured(scores, f"accuracy {100 * sum(last) / len(last):.2f} %")

    def keep(name: str, method: Method, scores: dict[str, Any]) -> None:
        write_whole(path(name), to_json({**asked(name, method), "device": device_name(settings.device), **scores}))

    def done(name: str, method: Method) -> bool:
        there = read(path(name))
        check_same(there, asked(name, method), path(name))
        return has_seeds(there, asked(name, method))

    each(methods, f"on {cell}", done, found, keep, say, ready)


def measure(method: Method, deals: Sequence[FederatedData], settings: Settings, say: Say) -> dict[str, Any]:
    """Train without the newcomers, let them join, and test them.

    Args:
        method: Who trains and adapts.
        deals: All clients' data, one deal for each seed from 0 up.
        settings: Of the training.
        say: Told how far it is.

    Returns:
        ``newcomers`` (their names), ``points`` and ``curve``, as the file holds them.
    """
    held = held_out(len(deals[0]))
    what = f"{method.title} on {deals[0].name}"
    kept = [without(data, held) for data in deals]
    federations = train(method, kept, seeded(settings, len(deals)), say, what)
    counts = per_class(deals, held)
    newcomers = [
        Newcomer(seed, data.clients[c], k, *few(*data.train.client(c), k), *data.test.client(c))
        for k in counts
        for seed, data in enumerate(deals)
        for c in held
    ]
    most = torch.tensor([i for i, n in enumerate(newcomers) if n.per_class == counts[-1]])
    states = adapt(federations, newcomers, STOPS, say, what)
    last = score(federations, newcomers, states[-1], say, f"{what}: testing newcomers")
    points = [{"examples": k, **columns(last[i * len(deals) : (i + 1) * len(deals)])} for i, k in enumerate(counts)]
    curve: dict[str, list[Any]] = {"steps": list(STOPS), **{m: [] for m in MEASURES}}
    for state in states:
        own = tree_map(lambda t: t[most.to(t.device)], state)
        found = columns(score(federations, [newcomers[i] for i in most.tolist()], own, say, f"{what}: testing steps"))
        for measure_ in MEASURES:
            curve[measure_].append(found[measure_])
    names = [deals[0].clients[c] for c in held]
    return {"newcomers": names, "steps": STOPS[-1], "draws": DRAWS, "points": points, "curve": curve}


def held_out(clients: int) -> list[int]:
    """The clients that take no part in training: the last ones, which are of all label groups alike."""
    return list(range(clients - clients // HELD, clients))


def without(data: FederatedData, held: Sequence[int]) -> FederatedData:
    """The same data without these clients."""
    kept = torch.tensor([i for i in range(len(data)) if i not in held])
    names = tuple(data.clients[i] for i in kept.tolist())
    return replace(data, clients=names, train=data.train.select(kept), test=data.test.select(kept))


def per_class(deals: Sequence[FederatedData], held: Sequence[int]) -> list[int]:
    """How many examples of each class newcomers are given: `EXAMPLES` as far as all have so many, and all they have."""
    labels = [data.train.client(c)[1] for data in deals for c in held]
    fewest = min(int(torch.bincount(y)[y.unique()].min()) for y in labels)
    return [*(k for k in EXAMPLES if k < fewest), fewest]


def few(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k examples of each class."""
    taken = torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():
        taken[(y == c).nonzero().flatten()[:k]] = True
    return x[taken], y[taken]


def adapt(
    federations: Sequence[Federation], newcomers: Sequence[Newcomer], stops: Sequence[int], say: Say, what: str
) -> list[State]:
    """Let newcomers join finished runs of one method, all of them side by side.

    It is what `bpfed.runs.adapt` does with each by itself, but that the number of steps is exact and need not end an epoch.

    Args:
        federations: The runs.
        newcomers: Who joins, S of them.
        stops: Numbers of local steps in rising order, multiples of the first that is not 0.
        say: Told how far it is.
        what: What is adapted, in words.

    Returns:
        Personal states (``[S, ...]`` leaves) after each of these numbers.
    """
    first = federations[0]
    method = first.method.adapting()
    _stepwise(method)
    examples = Examples.of([(n.x, n.y) for n in newcomers])
    shared = _stacked([f.shared for f in federations], newcomers)
    start = _stacked([method.newcomer(f.model, f.shared) for f in federations], newcomers)
    key = _keys(federations, newcomers, Purpose.ADAPTATION)
    progress = Progress(say, f"{what}: adapting {len(newcomers)} newcomers", stops[-1], "step")
    local = LocalRound.of(method, first.model, examples, first.settings)
    states = local.stops(adaptation.joining(method, shared, start, examples, key), stops, progress.done)
    if not all(bool(t.isfinite().all()) for t in tree_flatten(states[-1])[0]):
        raise UserError(f"{what}: the adaptation diverged; lower the step size.")
    return states


def score(
    federations: Sequence[Federation], newcomers: Sequence[Newcomer], personal: State, say: Say, what: str
) -> list[Evaluation]:
    """Test newcomers; those of one run with equally many examples, one after another, are scored together.

    Args:
        federations: The runs.
        newcomers: S of them, with equally many test examples each.
        personal: Their states, ``[S, ...]`` leaves.
        say: Told how far it is.
        what: What is tested, in words.

    Returns:
        Metrics for each such group, in order.
    """
    first = federations[0]
    method, model, device = first.method.adapting(), first.model, first.device
    shared, key = (
        _stacked([f.shared for f in federations], newcomers),
        _keys(federations, newcomers, Purpose.EVALUATION),
    )
    many = max(1, BLOCK[device.type] // newcomers[0].test_x.numel())
    probs: list[Tensor] = []
    progress = Progress(say, what, len(newcomers), "client")
    for start in range(0, len(newcomers), many):
        some = slice(start, start + many)
        x = torch.stack([n.test_x for n in newcomers[some]]).to(device)
        with torch.no_grad():
            states = (tree_map(lambda t, some=some: t[some], state) for state in (shared, personal))
            predictive = method.predictive(model, *states)
            probs += classify(model, predictive, x, key[some], DRAWS).probs.unbind(0)
        progress.done(len(probs))
    groups: list[list[int]] = []
    for i, newcomer in enumerate(newcomers):
        if not i or _group(newcomers[i - 1]) != _group(newcomer):
            groups.append([])
        groups[-1].append(i)
    found = []
    for group in groups:
        y = torch.cat([newcomers[i].test_y for i in group]).to(device)
        ends = torch.tensor([0, *(len(newcomers[i].test_y) for i in group)]).cumsum(0)
        found.append(evaluate(torch.cat([probs[i] for i in group]), y, ends))
    return found


def columns(found: Sequence[Evaluation]) -> dict[str, list[float]]:
    """Each measure of several evaluations, over all examples of each."""
    return {m: [e[m].pooled for e in found] for m in MEASURES}


def _group(newcomer: Newcomer) -> tuple[int, int]:
    return newcomer.run, newcomer.per_class


def _keys(federations: Sequence[Federation], newcomers: Sequence[Newcomer], purpose: Purpose) -> Tensor:
    """A key for each newcomer, ``[S, 2]``, of its run's seed and its name."""
    keys = [rng.keys(federations[n.run].settings.seed, 0, purpose, rng.client_ids([n.name])) for n in newcomers]
    return torch.cat(keys).to(federations[0].device)


def _stacked(states: Sequence[State], newcomers: Sequence[Newcomer]) -> State:
    """A row for each newcomer of what its run has (states without client axis)."""
    return tree_map(lambda *leaves: torch.cat(leaves), *(rows(states[n.run], 1) for n in newcomers))


def _stepwise(method: Method) -> None:
    if method.adaptation(1) != (Phase(ADAPT, 1),):
        raise UserError(f"{method.title} tunes all weights of a newcomer, so it has no such curve; leave it out.")
