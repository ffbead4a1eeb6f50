"""Test every client with its own predictive."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bpfed.engine.federation import Federation
from bpfed.engine.local import threads
from bpfed.errors import UserError
from bpfed.methods.base import rows
from bpfed.metrics import Evaluation, evaluate, evaluate_regression
from bpfed.noise import Purpose, words
from bpfed.predict import classify, regress

#: Outputs and inputs of one draw that are held at a time, in numbers.
BLOCK = 8_000_000
#: Below this many test examples times weights an evaluation runs on one thread (see `bpfed.engine.local`).
SMALL = 200_000_000


def evaluated_clients(federation: Federation) -> Tensor:
    """Indices of the clients that are tested, always the same ones of a run, ``[C]``."""
    wanted = federation.settings.eval_clients or 1000
    if wanted >= len(federation):
        return torch.arange(len(federation))
    ranks = words(federation.settings.seed, 0, Purpose.SAMPLE, federation.ids)
    return torch.from_numpy(np.sort(np.argpartition(ranks, wanted - 1)[:wanted]).astype(np.int64))


def evaluate_clients(federation: Federation) -> tuple[Evaluation, Tensor]:
    """Metrics over the test examples of the evaluated clients, and which clients those are."""
    small = len(federation.data.test.y) * federation.model.factors.total < SMALL
    with threads(1 if small else torch.get_num_threads()):
        return _evaluate(federation)


def _evaluate(federation: Federation) -> tuple[Evaluation, Tensor]:
    clients = evaluated_clients(federation)
    test = federation.data.test
    clients = clients[test.sizes[clients] > 0]
    if not len(clients):
        raise UserError(
            f"No client of '{federation.data.name}' has a test example; leave some out of the training data."
        )
    sizes = test.sizes[clients]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    model, device = federation.model, federation.device
    order = sizes.argsort(descending=True, stable=True)  # like sizes together, so that little is padded
    numbers = max(1, test.x[:1].numel()) + 4 * model.factors.total // max(1, int(sizes.float().mean()))
    outputs: list[list[Tensor]] = [[] for _ in range(3)]
    at: list[Tensor] = []
    start = 0
    while start < len(order):
        longest = int(sizes[order[start]])
        group = order[start : start + max(1, BLOCK // (numbers * longest))]
        start += len(group)
        who = clients[group]
        slot = torch.arange(longest)
        valid = slot < sizes[group][:, None]
        source = test.offsets[who][:, None] + torch.where(valid, slot, 0)
        x, y = test.x[source].to(device), test.y[source].to(device)
        key = federation.keys(0, Purpose.EVALUATION, who)
        with torch.no_grad():
            predictive = federation.method.predictive(
                model, rows(federation.shared, len(who)), federation.personal(who)
            )
            draws = federation.settings.eval_draws
            valid = valid.to(device)
            if federation.data.task == "classification":
                outputs[0].append(classify(model, predictive, x, key, draws).probs[valid])
            else:
                found = regress(model, predictive, x, key, draws, y)
                assert found.nll is not None
                for kept, part in zip(outputs, (found.mean, found.scale, found.nll), strict=True):
                    kept.append(part[valid])
        at.append((offsets[group][:, None] + slot)[valid.cpu()])
    back = torch.cat(at).argsort().to(device)
    source = torch.cat([torch.arange(int(test.offsets[c]), int(test.offsets[c + 1])) for c in clients])
    y = test.y[source].to(device)
    bins = federation.settings.bins
    if federation.data.task == "classification":
        return evaluate(torch.cat(outputs[0])[back], y, offsets.to(device), bins), clients
    mean, scale, nll = (torch.cat(o)[back] for o in outputs)
    return evaluate_regression(mean, scale, nll, y, offsets.to(device), bins), clients
