"""Test every client with its own predictive, and calibrate it with the examples that were kept from its training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import MOST_EVALUATED
from bpfed.data.federated import Examples, untested
from bpfed.engine.federation import Federation
from bpfed.engine.local import threads
from bpfed.inference.calibration import (
    Calibration,
    common_scale_factor,
    common_temperature,
    fewest,
    slopes,
    slopes_of_numbers,
    sorted_scores,
    squared_errors,
    temperatures,
    tempered,
)
from bpfed.inference.predictive import How, Predictive, classify, regress
from bpfed.inference.rng import Purpose, words
from bpfed.methods.base import State, rows
from bpfed.metrics import SURE, Evaluation, evaluate, evaluate_regression

# --- What a client would predict without a model, from its own training targets alone ---------------------------------


def mean_targets(train: Examples) -> Tensor:
    """The mean target of each client's training examples, ``[N]`` float64; that of all where a client has none."""
    sizes, y = train.sizes, train.y.cpu().double()
    sums = torch.cat([y.new_zeros(1), y.cumsum(0)])[train.offsets].diff()
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), y.sum() / max(1, len(y)))


def class_shares(train: Examples, classes: int) -> Tensor:
    """The share of each class in each client's training examples, with one more example of each, ``[N, K]`` float64."""
    owner = torch.repeat_interleave(torch.arange(len(train.sizes)), train.sizes)
    cells = torch.bincount(owner * classes + train.y.cpu(), minlength=len(train.sizes) * classes)
    counts = cells.view(-1, classes).double() + 1.0
    return counts / counts.sum(1, keepdim=True)


#: Outputs and inputs of one draw that are held at a time, in numbers.
BLOCK = 8_000_000
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
    small = len(federation.data.test.y) * federation.model.layout.total < SMALL
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
        bounds = _Bounds.of(_calibrate(federation, clients, tuned), owner)
    score = _score_classes if federation.data.task == "classification" else _score_numbers
    return score(federation, clients, found, owner, bounds), clients


class _Bounds(NamedTuple):
    """What calibration says of E examples: a score's bound, whether it is finite, a temperature, ``[E]`` each."""

    bound: Tensor
    finite: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, calibration: Calibration, owner: Tensor) -> _Bounds:
        """For examples of these clients, ``[E]``."""
        enough = calibration.offsets.diff() >= fewest(SURE)
        parts = (calibration.thresholds(SURE), enough, calibration.temperatures)
        return cls(*(part.to(owner.device)[owner] for part in parts))


def _score_classes(
    federation: Federation, clients: Tensor, found: _Predicted, owner: Tensor, bounds: _Bounds | None
) -> Evaluation:
    """Scores of class probabilities; ``owner`` is the place of each example's client among ``clients``, ``[E]``."""
    (probs,) = found.outputs
    sets = bounded = None
    if bounds is not None:
        sets, bounded = 1.0 - probs <= bounds.bound[:, None], bounds.finite
        if federation.settings.scaling == "client":
            probs = tempered(probs, bounds.temperature)
    shares = class_shares(federation.data.train, federation.data.classes)[clients].to(federation.device)
    offsets = found.offsets.to(federation.device)
    scored = evaluate(probs, found.y, offsets, federation.settings.bins, sets, bounded, shares)
    fitted = partial(common_temperature, probs, found.y)
    return replace(scored, fitted_temperature=fitted, slopes=partial(slopes, probs, found.y))


def _score_numbers(
    federation: Federation, clients: Tensor, found: _Predicted, owner: Tensor, bounds: _Bounds | None
) -> Evaluation:
    """Scores of predicted numbers; arguments as `_score_classes`."""
    mean, scale, nll = found.outputs
    inside = width = bounded = None
    if bounds is not None:
        half = bounds.bound * scale
        inside, width, bounded = (found.y - mean).abs() <= half, 2.0 * half, bounds.finite
    squares = squared_errors(mean, scale, found.y)
    scored = evaluate_regression(
        mean=mean,
        scale=scale,
        nll=nll,
        y=found.y,
        offsets=found.offsets.to(federation.device),
        bins=federation.settings.bins,
        inside=inside,
        width=width,
        bounded=bounded,
        baseline=mean_targets(federation.data.train)[clients].to(federation.device)[owner],
    )
    fitted = partial(common_scale_factor, squares)
    return replace(scored, fitted_temperature=fitted, slopes=partial(slopes_of_numbers, squares))


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
    small = len(federation.data.calibration.y) * federation.model.layout.total < SMALL
    with threads(1 if small else torch.get_num_threads()):
        return _calibrate(federation, clients, federation.tuned(clients) if federation.untuned else None, how, draws)


def _calibrate(
    federation: Federation, clients: Tensor, tuned: State, how: How = "sample", draws: int | None = None
) -> Calibration:
    assert federation.data.calibration is not None
    draws = draws or federation.settings.eval_draws
    found = _predict(federation, federation.data.calibration, clients, tuned, how, draws)
    ones = torch.ones(len(clients), dtype=torch.float64)
    if federation.data.task == "classification":
        (probs,) = found.outputs
        scores = 1.0 - probs.gather(1, found.y[:, None]).squeeze(1)
        if federation.settings.scaling == "client":
            ones = temperatures(probs, found.y, found.offsets.to(probs.device)).cpu()
    else:
        mean, scale, _ = found.outputs
        scores = (found.y - mean).abs() / scale
    return Calibration(how, draws, ones, sorted_scores(scores.cpu(), found.offsets), found.offsets)


class _Predicted(NamedTuple):
    """Predictions for C clients' examples end to end: probabilities ``[E, K]``, or mean, scale and NLL ``[E]``."""

    outputs: tuple[Tensor, ...]
    y: Tensor
    offsets: Tensor


def _predict(
    federation: Federation,
    examples: Examples,
    clients: Tensor,
    tuned: State,
    how: How = "sample",
    draws: int | None = None,
) -> _Predicted:
    """Every client's predictions for its own examples; ``tuned``: their states, where these are not the stored ones."""
    device, draws = federation.device, draws or federation.settings.eval_draws
    sizes = examples.sizes[clients]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    found: list[tuple[Tensor, ...]] = []
    at: list[Tensor] = []
    for group in _groups(examples, sizes, federation.model.layout.total):
        who = clients[group]
        slot = torch.arange(int(sizes[group].max()))
        valid = slot < sizes[group][:, None]
        source = (examples.offsets[who][:, None] + torch.where(valid, slot, 0)).to(examples.x.device)
        x, y = examples.x[source].to(device), examples.y[source].to(device)
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
        return _Predicted(_no_outputs(federation), y, offsets)
    back = torch.cat(at).argsort().to(device)
    outputs = tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True))
    if federation.data.task == "classification":
        outputs = (tempered(outputs[0], federation.calibration_temperature),)
    return _Predicted(outputs, y, offsets)


def _groups(examples: Examples, sizes: Tensor, weights: int) -> Iterator[Tensor]:
    """Places of clients that are predicted for side by side; those of like sizes together, so that little is padded.

    Args:
        examples: Of all clients.
        sizes: How many each of these clients has, ``[C]``.
        weights: Of the network.
    """
    order = sizes.argsort(descending=True, stable=True)
    order = order[sizes[order] > 0]
    numbers = max(1, math.prod(examples.x.shape[1:])) + 4 * weights // max(1, int(sizes.float().mean()))
    while len(order):
        count = max(1, BLOCK // (numbers * int(sizes[order[0]])))
        yield order[:count]
        order = order[count:]


def _outputs(
    federation: Federation, predictive: Predictive, x: Tensor, y: Tensor, key: Tensor, draws: int, how: How
) -> tuple[Tensor, ...]:
    """What `_Predicted` holds, for the examples of S clients, ``[S, B, ...]``."""
    if federation.data.task == "classification":
        return (classify(federation.model, predictive, x, key, draws, how).probs,)
    found = regress(federation.model, predictive, x, key, draws, y, how, federation.calibration_temperature)
    assert found.nll is not None
    return found.mean, found.scale, found.nll


def _no_outputs(federation: Federation) -> tuple[Tensor, ...]:
    """The same of no example at all."""
    none = torch.zeros(0, device=federation.device)
    return (none.reshape(0, federation.data.classes),) if federation.data.task == "classification" else (none,) * 3
