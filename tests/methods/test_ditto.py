"""Ditto: FedAvg, and beside it every client's own network, pulled towards what the server sent."""

import dataclasses

import pytest
import scenarios
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.engine.simulator import Simulator
from bpfed.inference.estimators import Batch
from bpfed.inference.likelihoods import Normal
from bpfed.methods import Ditto, FedAvg
from bpfed.methods.base import ADAPT, Weights, rows
from bpfed.methods.point import PersonalNetwork
from bpfed.nn.model import Model

CLIENTS, STEPS = 2, 6


def batches(seed=0):
    """Full and ragged batches in turn, in float64."""
    found = [scenarios.random_batch(CLIENTS, 5, seed=seed + t, used=[5, 3] if t % 2 else [4, 5]) for t in range(STEPS)]
    return [b._replace(x=b.x.double(), mask=b.mask.double(), size=b.size.double()) for b in found]


def other(weights, seed, scale=0.3):
    """Weights somewhere else, a row for each client."""
    g = scenarios.generator(seed)
    return weights + scale * torch.randn(CLIENTS, len(weights), generator=g, dtype=torch.float64)


def trained(method, model, sent, personal, phase="all"):
    local = method.begin(model, Weights(sent), personal, scenarios.hparams(method, CLIENTS, torch.float64))
    losses = []
    for batch in batches():
        local, loss = method.step(model, local, batch, scenarios.hparams(method, CLIENTS, torch.float64), phase)
        losses.append(loss)
    return method.finish(model, local, scenarios.hparams(method, CLIENTS, torch.float64)), torch.stack(losses)


def by_hand(method, model, client, start, centre, pull):
    """Adam on f(v) + λ/2 |v − w_t|² from ``start``, one client in float64."""
    module = scenarios.small_mlp().double()
    v = start[client].clone().requires_grad_()
    optimiser = torch.optim.Adam([v], lr=method.lr)
    losses = []
    for batch in batches():
        used = batch.mask[client].bool()
        out = functional_call(module, model.layout.unflatten(v), (batch.x[client, used],))
        loss = F.cross_entropy(out, batch.y[client, used])
        optimiser.zero_grad()
        (loss + 0.5 * pull * (v - centre[client]).square().sum()).backward()
        optimiser.step()
        losses.append(loss.detach())
    return v.detach(), torch.stack(losses)


@pytest.mark.parametrize("pull", [0.0, 0.1, 7.0])
def test_local_steps_are_those_of_adam_on_both_objectives(pull):
    method = Ditto(lr=3e-3, pull=pull)
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    sent, own = other(model.initial, 1), other(model.initial, 2)
    personal = PersonalNetwork(own, torch.ones(CLIENTS, 1, dtype=torch.float64))
    finished, losses = trained(method, model, sent, personal)
    for s in range(CLIENTS):
        w, expected = by_hand(method, model, s, sent, sent, 0.0)  # the shared problem is not pulled
        torch.testing.assert_close(finished.upload.weights[s], w, rtol=0, atol=1e-9)
        torch.testing.assert_close(losses[:, s], expected, rtol=0, atol=1e-9)
        v, _ = by_hand(method, model, s, own, sent, pull)
        torch.testing.assert_close(finished.personal.weights[s], v, rtol=0, atol=1e-9)
        assert (v - own[s]).abs().max() > 3 * method.lr


def test_a_newcomer_moves_its_own_network_only():
    method = Ditto(lr=3e-3, pull=0.5)
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    sent = other(model.initial, 1)
    nobody = PersonalNetwork(*(t.double() for t in rows(method.newcomer(model, Weights(model.initial)), CLIENTS)))
    finished, losses = trained(method, model, sent, nobody, ADAPT)
    assert torch.equal(finished.upload.weights, sent)
    for s in range(CLIENTS):
        v, expected = by_hand(method, model, s, sent, sent, 0.5)
        torch.testing.assert_close(finished.personal.weights[s], v, rtol=0, atol=1e-9)
        torch.testing.assert_close(losses[:, s], expected, rtol=0, atol=1e-9)


def test_the_personal_network_solves_the_personal_problem():
    # Least squares with noise 1: v = (XᵀX/n + λ)⁻¹ (Xᵀy/n + λ w).
    g = scenarios.generator()
    x = torch.randn(1, 30, 3, generator=g, dtype=torch.float64)
    y = x[0] @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(30, generator=g, dtype=torch.float64)
    model = Model.of(nn.Linear(3, 1, bias=False), Normal(learnt=False), torch.zeros(2, 3), "none")
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(x, y[None], torch.ones(1, 30, dtype=torch.float64), 30 * one, scenarios.keys(1))
    w = torch.tensor([[3.0, 3.0, 3.0]], dtype=torch.float64)
    method, at = Ditto(pull=0.7), {"pull": 0.7 * one}
    local = method.begin(model, Weights(w), PersonalNetwork(w, one[:, None]), {})
    for t in range(600):
        local, _ = method.step(model, local, batch, at | {"lr": 0.2 * 0.985**t * one}, ADAPT)
    normal = x[0].T @ x[0] / 30 + 0.7 * torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.solve(normal, x[0].T @ y / 30 + 0.7 * w[0])
    torch.testing.assert_close(local.own[0], expected, rtol=0, atol=1e-4)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_shared_network_is_fedavgs_whatever_the_pull():
    settings = {"rounds": 3, "participants": 3}
    expected = scenarios.run(FedAvg(lr=3e-3), **settings).shared.weights
    for pull in (0.0, 5.0):
        found = scenarios.run(Ditto(lr=3e-3, pull=pull), **settings).shared.weights
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_without_pull_a_client_trains_as_if_alone():
    data = scenarios.classification()
    federation = scenarios.run(Ditto(lr=3e-3, pull=0.0), data, rounds=3)
    for i in (0, 3):
        index = torch.tensor([i])
        alone = dataclasses.replace(
            data, clients=(data.clients[i],), train=data.train.select(index), test=data.test.select(index)
        )
        expected = scenarios.run(FedAvg(lr=3e-3), alone, rounds=3).shared.weights  # a federation of one
        torch.testing.assert_close(federation.personal(index).weights[0], expected, rtol=0, atol=1e-6)


def test_with_all_pull_a_client_is_where_the_server_is_to_a_step_of_adam():
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    sent = other(model.initial, 1)
    personal = PersonalNetwork(sent + 2e-3, torch.ones(CLIENTS, 1, dtype=torch.float64))
    distance = {}
    for lr in (1e-3, 1e-5):
        finished, _ = trained(Ditto(lr=lr, pull=1e8), model, sent, PersonalNetwork(sent, personal.known))
        distance[lr] = (finished.personal.weights - sent).abs().max()
        assert distance[lr] < 2 * lr
    free, _ = trained(Ditto(lr=1e-3, pull=0.0), model, sent, PersonalNetwork(sent, personal.known))
    assert (free.personal.weights - sent).abs().max() > 2 * distance[1e-3]


# --- who has a network of its own -------------------------------------------------------------------------------------


def test_a_client_that_never_trained_predicts_with_the_shared_network_and_starts_there():
    method = Ditto(pull=0.0)
    federation = scenarios.start(method, participants=1, rounds=3)
    simulator = Simulator([federation])
    simulator.round()
    everyone = torch.arange(len(federation))
    trained_ = federation.participants(1)
    personal = federation.personal(everyone)
    weights = method.predictive(federation.model, rows(federation.shared, len(everyone)), personal).draw(None, 0)
    for i in everyone.tolist():
        own = i in trained_.tolist()
        assert bool(personal.known[i]) is own
        assert torch.equal(weights[i], personal.weights[i] if own else federation.shared.weights)
    local = method.begin(federation.model, rows(federation.shared, len(everyone)), personal, {})
    assert torch.equal(local.own, weights)


@pytest.mark.parametrize("settings", [{"pull": -1.0}, {"pull": float("nan")}, {"personal": "head"}])
def test_settings_out_of_range_are_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        Ditto(**settings).check()
