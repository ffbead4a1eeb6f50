"""Passes over a client's own data before it predicts: nothing else notices them, and the last ones are kept."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import scenarios
import torch
from torch.utils._pytree import tree_flatten

from bpfed.engine import federation as engine
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.simulator import Simulator
from bpfed.inference.optim import Adam, adam
from bpfed.inference.predictive import PointPredictive
from bpfed.methods.base import Finished, Initial, Phase
from bpfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Tuned(FedAvg):
    """FedAvg with two passes before prediction, of which the client keeps its network."""

    name: ClassVar[str] = "tuned"

    def tuning(self, epochs):
        return (Phase("tune", 2),)

    def init(self, model):
        return Initial((model.initial,), (model.initial,))

    def begin(self, model, shared, personal, hparams):
        weights = shared[0].clone()
        return (weights, Adam.like(weights), weights.new_zeros(len(weights)))

    def step(self, model, local, batch, hparams, phase):
        weights, memory, steps = local
        steps = steps + 1
        total, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
        weights, memory = adam(weights, gradient, memory, steps, hparams["lr"])
        return (weights, memory, steps), total

    def finish(self, model, local, hparams):
        return Finished((local[0],), (local[0],), {})

    def aggregate(self, shared, uploads, weights):
        return (uploads[0].mean(0),)

    def predictive(self, model, shared, personal):
        return PointPredictive(personal[0])


METHOD = Tuned(lr=0.02)


def started(**settings):
    return scenarios.start(METHOD, rounds=3, participants=3, **settings)


def stored(federation):
    return tree_flatten(federation.personal(torch.arange(len(federation))))[0][0]


def advanced(rounds, evaluating=False, **settings):
    federation = started(**settings)
    simulator = Simulator([federation])
    for _ in range(rounds):
        simulator.round()
        if evaluating:
            evaluate_clients(federation)
    return federation


def test_tuning_changes_the_evaluation_and_nothing_else():
    plain, looked = advanced(2), advanced(2, evaluating=True)
    assert torch.equal(stored(plain), stored(looked))
    assert torch.equal(plain.shared[0], looked.shared[0])
    assert plain.untuned
    before = stored(plain).clone()
    tuned = plain.ready(torch.arange(5))[0]
    assert torch.equal(stored(plain), before)
    assert (tuned - plain.shared[0]).abs().amax(1).min() > 0.01  # every client moved from the server's network
    found, _ = evaluate_clients(plain)
    x, y = plain.data.test.client(1)
    probs = torch.softmax(plain.model.stacked_outputs(tuned[1:2], x[None])[0], -1)
    assert found["nll"].clients[1] == pytest.approx(-probs.log()[torch.arange(len(y)), y].mean().item(), rel=1e-5)


def test_tuning_depends_on_neither_chunks_nor_who_else_is_tuned():
    whole = advanced(1)
    everybody = whole.tuned(torch.arange(5))[0]
    torch.testing.assert_close(whole.tuned(torch.tensor([3]))[0], everybody[3:4], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.tuned(torch.tensor([4, 1]))[0], everybody[[4, 1]], rtol=1e-6, atol=1e-6)
    chunked = advanced(1, chunk=2)
    torch.testing.assert_close(chunked.tuned(torch.arange(5))[0], everybody, rtol=1e-6, atol=1e-6)


def test_tuning_passes_over_the_clients_own_training_data_as_often_as_the_method_says():
    federation = advanced(1)
    client = int(federation.data.train.sizes.argmin())
    x, y = federation.data.train.client(client)
    assert len(y) <= federation.settings.batch  # so that a pass is one step on all of it, and needs no order
    weights, memory = federation.shared[0][None].clone(), Adam.like(federation.shared[0][None])
    for step in (1.0, 2.0):
        w = weights[0].clone().requires_grad_()
        torch.nn.functional.cross_entropy(federation.model.outputs(w, x), y, reduction="sum").backward()
        weights, memory = adam(weights, w.grad[None], memory, torch.tensor([step]), torch.tensor([METHOD.lr]))
    torch.testing.assert_close(federation.tuned(torch.tensor([client]))[0], weights, rtol=1e-5, atol=1e-6)


def test_after_the_last_round_everybody_keeps_what_it_predicts_with_and_is_not_tuned_again(monkeypatch):
    monkeypatch.setattr(engine, "SETTLED", 2)  # in several portions
    federation = advanced(3)
    assert federation.finished
    assert not federation.untuned
    apart = (stored(federation) - federation.shared[0]).abs().amax(1)
    assert (apart > 0.01).all()  # whoever took part last, and whoever did not
    monkeypatch.setattr(type(federation), "tuned", None)  # would fail if it were called
    assert torch.equal(federation.ready(torch.arange(5))[0], stored(federation))
    evaluate_clients(federation)


def test_federations_side_by_side_tune_each_its_own_clients():
    seeds = [started(seed=seed) for seed in (0, 1)]
    simulator = Simulator(seeds)
    simulator.round()
    for seed, federation in enumerate(seeds):
        alone = advanced(1, seed=seed)
        torch.testing.assert_close(federation.tuned(torch.arange(5))[0], alone.tuned(torch.arange(5))[0])
