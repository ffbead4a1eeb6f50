"""Test every client with its own predictive, and calibrate it with the examples that were kept from its training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import MOST_EVALUATED, Settings
from bpfed.data.federated import Examples, FederatedData, untested
from bpfed.engine.local import threads
from bpfed.inference import inputs
from bpfed.inference.calibration import Calibration, Ranks, Scales, by_client, counted, fewest
from bpfed.inference.inputs import Inputs
from bpfed.inference.predictive import How, Predictive
from bpfed.inference.rng import Purpose, words
from bpfed.inference.tasks import Bounds, Predicted, Scoring
from bpfed.methods.base import State, rows
from bpfed.metrics import SURE, Evaluation

if TYPE_CHECKING:
    from bpfed.engine.federation import Federation

#: Outputs and inputs of one draw that are held at a time, in numbers.
BLOCK = 8_000_000
#: Examples of a client that run at a time through a network with a frozen part.
WIDE = {"cpu": 256, "cuda": 2048}
#: Calibration examples of each class that the clients must have together for sets that hold each class alike.
EACH_CLASS = 20
#: Training examples of a client at most that help to find the scale of its errors, or ranks; more would tell little.
TRAINED = 200
#: Below this many test examples times weights an evaluation runs on one thread (see `bpfed.engine.local`).
SMALL = 200_000_000


def evaluated_clients(federation: Federation, among: Tensor | None = None) -> Tensor:
    """Indices of the clients that are tested, always the same ones of a run, ``[C]``.

    Args:
        federation: The run.
        among: Indices of those that can be, in rising order; None: all, where nobody knows who has test examples.
    """
    among = torch.arange(len(federation)) if among is None else among
    wanted = federation.settings.eval_clients or MOST_EVALUATED
    if wanted >= len(among):
        return among
    ranks = words(federation.settings.seed, 0, Purpose.SAMPLE, federation.ids[among.numpy()])
    return among[torch.from_numpy(np.sort(np.argpartition(ranks, wanted - 1)[:wanted]).astype(np.int64))]


def tested_clients(federation: Federation) -> Tensor:
    """Indices of the clients that are tested, among those with test examples, ``[C]``."""
    return evaluated_clients(federation, (federation.data.test.sizes > 0).nonzero().flatten())


def evaluate_clients(federation: Federation) -> tuple[Evaluation, Tensor]:
    """Metrics over the test examples of the evaluated clients, and which clients those are."""
    small = len(federation.data.test.y) * federation.model.computed < SMALL
    with threads(1 if small else torch.get_num_threads()):
        return _evaluate(federation)


def _evaluate(federation: Federation) -> tuple[Evaluation, Tensor]:
    test = federation.data.test
    clients = tested_clients(federation)
    if not len(clients):
        raise untested(federation.data)
    tuned = federation.tuned(clients) if federation.untuned else None
    found = _predict(federation, test, clients, tuned)
    owner = torch.repeat_interleave(torch.arange(len(clients)), found.offsets.diff()).to(federation.device)
    bounds = None
    if federation.data.calibration is not None:
        bounds = _bounds(_calibrate(federation, clients, tuned), owner)
    scoring = Scoring(
        federation.data.train,
        clients,
        owner,
        federation.data.classes,
        federation.settings.bins,
        bounds,
        federation.settings.scaling == "client",
    )
    return federation.data.task_type.evaluate(found, scoring), clients


def _bounds(calibration: Calibration, owner: Tensor) -> Bounds:
    """What calibration says of the examples of these clients, ``[E]``; the bounds ``[E, K]`` where they are by class."""
    bounds = calibration.thresholds(SURE)
    enough = calibration.offsets.diff() >= fewest(SURE) if calibration.pool is None else bounds.isfinite().any(1)
    parts = (bounds if calibration.classes is not None else bounds[:, 0], enough, calibration.temperatures)
    return Bounds(*(part.to(owner.device)[owner] for part in parts))


def sets_of(settings: Settings, data: FederatedData) -> Literal["class", "pooled", "client"]:
    """How sets and intervals are bounded: as the settings say, and where they leave it open, as the data allow."""
    if settings.sets != "auto":
        return settings.sets
    held = data.calibration
    if not data.task_type.sets_by_class or held is None:
        return "pooled"
    counts = torch.bincount(held.y.cpu(), minlength=data.classes)
    return "class" if int(counts.min()) >= EACH_CLASS else "pooled"


def calibrate(
    federation: Federation, clients: Tensor | None = None, how: How = "sample", draws: int | None = None
) -> Calibration:
    """What the examples kept from training say of these clients' predictions.

    Args:
        federation: With calibration examples (`Settings.calibration`).
        clients: Indices, ``[C]``; None: all.
        how: How they are to predict.
        draws: With how many weight draws; None: as many as in evaluation.
    """
    if federation.data.calibration is None:
        raise UserError(
            f"'{federation.data.name}' has no examples that were kept from training; train with calibration=0.2."
        )
    clients = torch.arange(len(federation)) if clients is None else clients
    small = len(federation.data.calibration.y) * federation.model.computed < SMALL
    with threads(1 if small else torch.get_num_threads()):
        return _calibrate(federation, clients, federation.tuned(clients) if federation.untuned else None, how, draws)


def _calibrate(
    federation: Federation, clients: Tensor, tuned: State | None, how: How = "sample", draws: int | None = None
) -> Calibration:
    assert federation.data.calibration is not None
    draws = draws or federation.settings.eval_draws
    found = _predict(federation, federation.data.calibration, clients, tuned, how, draws)
    ones = torch.ones(len(clients), dtype=torch.float64)
    task = federation.data.task_type
    scores = task.conformal_scores(found).cpu()
    if federation.settings.scaling == "client":
        ones = task.temperatures(found)
    order, sets = by_client(scores, found.offsets), sets_of(federation.settings, federation.data)
    scores, regions = scores[order], str(task.regions)
    classes = pool = scales = ranks = None
    if sets != "client":
        classes = found.y.cpu()[order] if sets == "class" else None
        rows = federation.data.classes if sets == "class" else 1
        everyone, divided = torch.tensor([0, len(scores)]), scores
        if task.residual_scores:
            fitted = _trained(federation, clients, tuned, how, draws)
            scales = Scales.of(scores, found.offsets, (task.conformal_scores(fitted).cpu(), fitted.offsets))
            divided, _ = scales.divided(scores, found.offsets)
        if classes is not None and len((fitted := _trained(federation, clients, tuned, how, draws)).y):
            regions, ranks = "ranks", Ranks.of(fitted.parts[0].cpu(), fitted.offsets)
            divided = ranks.ranked(scores, classes, found.offsets)
        pool = counted(divided, classes, everyone, rows, regions)[0]
    labels = found.y.cpu()[order] if task.sets_by_class and classes is None else None
    return Calibration(how, draws, ones, scores, found.offsets, classes, pool, regions, scales, labels, ranks)


def _trained(federation: Federation, clients: Tensor, tuned: State | None, how: How, draws: int) -> Predicted:
    """What clients predict for their training examples, `TRAINED` of each at most."""
    train = federation.data.train
    place = torch.arange(len(train.y)) - train.offsets[:-1].repeat_interleave(train.sizes)
    some = train.where((place < TRAINED).to(train.y.device))
    return _predict(federation, some, clients, tuned, how, draws)


def _predict(
    federation: Federation,
    examples: Examples,
    clients: Tensor,
    tuned: State | None,
    how: How = "sample",
    draws: int | None = None,
) -> Predicted:
    """Every client's predictions for its own examples; ``tuned``: their states, where these are not the stored ones."""
    device, draws, task = federation.device, draws or federation.settings.eval_draws, federation.data.task_type
    examples, sizes = federation.inputs(examples), examples.sizes[clients]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    found: list[tuple[Tensor, ...]] = []
    at: list[Tensor] = []
    for group in _groups(examples, sizes, federation.model.computed):
        who = clients[group]
        slot = torch.arange(int(sizes[group].max()))
        valid = slot < sizes[group][:, None]
        source = (examples.offsets[who][:, None] + torch.where(valid, slot, 0)).to(examples.y.device)
        x, y = inputs.move(inputs.take(examples.x, source), device), examples.y[source].to(device)
        with torch.no_grad():
            personal = federation.personal(who) if tuned is None else tree_map(lambda t, own=group: t[own], tuned)
            predictive = federation.method.predictive(federation.model, rows(federation.shared, len(who)), personal)
            key = federation.keys(0, Purpose.EVALUATION, who)
            padded = _outputs(federation, predictive, x, y, key, draws, how)
        found.append(tuple(part[valid.to(device)] for part in padded))
        at.append((offsets[group][:, None] + slot)[valid])
    own = [torch.arange(int(examples.offsets[c]), int(examples.offsets[c + 1])) for c in clients]
    y = examples.y[torch.cat(own).to(examples.y.device)].to(device)
    if not found:
        return Predicted(task.no_parts(federation.data.classes, device), y, offsets)
    back = torch.cat(at).argsort().to(device)
    return Predicted(tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True)), y, offsets)


def predict_examples(
    federation: Federation, examples: Examples, clients: Tensor, draws: int, how: How = "sample"
) -> Predicted:
    """What these clients predict for examples that are laid out as the federation's are, ``[C]`` of them."""
    tuned = federation.tuned(clients) if federation.untuned else None
    return _predict(federation, examples, clients, tuned, how, draws)


def _groups(examples: Examples, sizes: Tensor, weights: int) -> Iterator[Tensor]:
    """Places of clients that are predicted for side by side; those of like sizes together, so that little is padded.

    Args:
        examples: Of all clients.
        sizes: How many each of these clients has, ``[C]``.
        weights: Of the network.
    """
    order = sizes.argsort(descending=True, stable=True)
    order = order[sizes[order] > 0]
    of_one = sum(math.prod(t.shape[1:]) for t in tree_leaves(examples.x))
    numbers = max(1, of_one) + 4 * weights // max(1, int(sizes.float().mean()))
    while len(order):
        count = max(1, BLOCK // (numbers * int(sizes[order[0]])))
        yield order[:count]
        order = order[count:]


def _outputs(
    federation: Federation, predictive: Predictive, x: Inputs, y: Tensor, key: Tensor, draws: int, how: How
) -> tuple[Tensor, ...]:
    """What `Predicted` holds, for the examples of S clients, ``[S, B, ...]``."""
    if federation.model.wide and y.shape[1] > (wide := WIDE[y.device.type]):
        some = [slice(start, start + wide) for start in range(0, y.shape[1], wide)]
        blocks = [
            _outputs(federation, predictive, inputs.take(x, (slice(None), own)), y[:, own], key, draws, how)
            for own in some
        ]
        return tuple(torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
    task = federation.data.task_type
    return task.parts(federation.model, predictive, x, y, key, draws, how, federation.calibration_temperature)
