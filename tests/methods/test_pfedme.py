"""pFedMe: gradient steps on the proximal problem at the clients, a step along the envelope's gradient, a mixing server."""

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
from bpfed.methods import PFedMe
from bpfed.methods.base import ADAPT, Weights, rows
from bpfed.methods.point import PersonalNetwork
from bpfed.nn.model import Model

CLIENTS, STEPS = 2, 5


def batches(used=([4, 5], [5, 3])):
    """Full and ragged batches in turn, in float64."""
    found = [scenarios.random_batch(CLIENTS, 5, seed=t, used=used[t % 2]) for t in range(STEPS)]
    return [b._replace(x=b.x.double(), mask=b.mask.double(), size=b.size.double()) for b in found]


def small():
    """A model, and what the server sends to each client."""
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    g = scenarios.generator(3)
    return model, model.initial + 0.3 * torch.randn(CLIENTS, len(model.initial), generator=g, dtype=torch.float64)


def trained(method, model, sent, phase="all"):
    nobody = PersonalNetwork(*(t.double() for t in rows(method.init(model).personal, CLIENTS)))
    local = method.begin(model, Weights(sent), nobody, scenarios.hparams(method, CLIENTS, torch.float64))
    losses = []
    for batch in batches():
        local, loss = method.step(model, local, batch, scenarios.hparams(method, CLIENTS, torch.float64), phase)
        losses.append(loss)
    return method.finish(model, local, scenarios.hparams(method, CLIENTS, torch.float64)), torch.stack(losses)


def objective(model, theta, w, batch, client, pull):
    """f(θ; batch) and h(θ) of one client."""
    used = batch.mask[client].bool()
    out = functional_call(scenarios.small_mlp().double(), model.layout.unflatten(theta), (batch.x[client, used],))
    loss = F.cross_entropy(out, batch.y[client, used])
    return loss, loss + 0.5 * pull * (theta - w).square().sum()


def by_hand(method, model, sent, client, fixed=False):
    """Algorithm 1 of the paper for one client, with torch.optim.SGD as the inner solver."""
    w, losses = sent[client].clone(), []
    theta = w.clone().requires_grad_()
    for batch in batches():
        inner = torch.optim.SGD([theta], lr=method.inner_lr)
        for k in range(method.inner_steps):
            inner.zero_grad()
            loss, h = objective(model, theta, w, batch, client, method.pull)
            h.backward()
            inner.step()
            if k == 0:
                losses.append(loss.detach())
        if not fixed:
            w = w - method.lr * method.pull * (w - theta.detach())
    return w, theta.detach(), torch.stack(losses)


@pytest.mark.parametrize("settings", [{}, {"inner_steps": 1}, {"pull": 0.8, "lr": 0.3, "inner_lr": 0.2}, {"pull": 0.0}])
def test_local_steps_are_algorithm_1_done_by_hand(settings):
    method = PFedMe(**settings)
    model, sent = small()
    finished, losses = trained(method, model, sent)
    for s in range(CLIENTS):
        w, theta, expected = by_hand(method, model, sent, s)
        torch.testing.assert_close(finished.upload.weights[s], w, rtol=0, atol=1e-9)
        torch.testing.assert_close(finished.personal.weights[s], theta, rtol=0, atol=1e-9)
        torch.testing.assert_close(losses[:, s], expected, rtol=0, atol=1e-9)
        assert (theta - sent[s]).abs().max() > 1e-3
        assert method.pull == 0.0 or (w - sent[s]).abs().max() > 1e-4


def test_a_newcomer_optimises_its_own_network_around_a_centre_that_is_held():
    method = PFedMe()
    model, sent = small()
    finished, _ = trained(method, model, sent, ADAPT)
    assert torch.equal(finished.upload.weights, sent)
    for s in range(CLIENTS):
        _, theta, _ = by_hand(method, model, sent, s, fixed=True)
        torch.testing.assert_close(finished.personal.weights[s], theta, rtol=0, atol=1e-9)


def test_the_inner_steps_find_the_proximal_point():
    # Least squares with noise 1: θ = (XᵀX/n + λ)⁻¹ (Xᵀy/n + λ w), and the envelope's gradient is λ (w − θ).
    g = scenarios.generator()
    x = torch.randn(1, 30, 3, generator=g, dtype=torch.float64)
    y = x[0] @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(30, generator=g, dtype=torch.float64)
    model = Model.of(nn.Linear(3, 1, bias=False), Normal(learnt=False), torch.zeros(2, 3), "none")
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(x, y[None], torch.ones(1, 30, dtype=torch.float64), 30 * one, scenarios.keys(1))
    method = PFedMe(pull=2.0, inner_lr=0.2, inner_steps=60, lr=0.05)
    w = torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64)
    local = method.begin(model, Weights(w[None]), PersonalNetwork(w[None], one[:, None]), {})
    local, _ = method.step(model, local, batch, scenarios.hparams(method, 1, torch.float64), "all")

    def point(w):
        normal = x[0].T @ x[0] / 30 + 2.0 * torch.eye(3, dtype=torch.float64)
        return torch.linalg.solve(normal, x[0].T @ y / 30 + 2.0 * w)

    def envelope(w):
        theta = point(w)
        return 0.5 * (y - x[0] @ theta).square().mean() + (theta - w).square().sum()

    torch.testing.assert_close(local.own[0], point(w), rtol=0, atol=1e-9)
    slope = torch.func.grad(envelope)(w)
    torch.testing.assert_close(local.weights[0], w - 0.05 * slope, rtol=0, atol=1e-9)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_with_all_pull_the_clients_own_network_is_the_shared_one_and_that_is_trained_by_plain_descent():
    # One inner step of size 1/λ solves the proximal problem as λ grows: θ = w − ∇f/λ, so that w − η λ (w − θ) = w − η ∇f.
    lr, pull = 1e-5, 1e5
    method = PFedMe(lr=lr, pull=pull, inner_lr=1 / pull, inner_steps=1)
    model, sent = small()
    finished, _ = trained(method, model, sent)
    assert (finished.personal.weights - finished.upload.weights).abs().max() < 10 / pull
    for s in range(CLIENTS):
        w = sent[s].clone().requires_grad_()
        descent = torch.optim.SGD([w], lr=lr)
        for batch in batches():
            descent.zero_grad()
            objective(model, w, w, batch, s, 0.0)[0].backward()
            descent.step()
        moved = (w.detach() - sent[s]).abs().max()
        torch.testing.assert_close(finished.upload.weights[s], w.detach(), rtol=0, atol=1e-3 * float(moved))


def test_without_pull_nothing_is_learnt_together():
    federation = scenarios.run(PFedMe(pull=0.0), rounds=2)
    torch.testing.assert_close(federation.shared.weights, federation.model.initial, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mixing", [1.0, 0.0, 0.3, 2.0])
def test_the_server_mixes_the_mean_into_its_own(mixing):
    uploads = Weights(torch.tensor([[0.0, 4.0], [1.0, 0.0], [3.0, 2.0]]))
    old, mean = torch.tensor([10.0, -1.0]), torch.tensor([1.25, 1.5])
    found = PFedMe(mixing=mixing).aggregate(Weights(old), uploads, torch.tensor([1.0, 2.0, 1.0]), clients=3)
    torch.testing.assert_close(found.weights, (1 - mixing) * old + mixing * mean)


# --- who has a network of its own -------------------------------------------------------------------------------------


def test_a_client_predicts_with_its_own_network_and_before_it_has_one_with_the_shared():
    method = PFedMe()
    federation = scenarios.start(method, participants=2, rounds=3)
    Simulator([federation]).round()
    everyone = torch.arange(len(federation))
    took_part = federation.participants(1).tolist()
    personal = federation.personal(everyone)
    weights = method.predictive(federation.model, rows(federation.shared, len(everyone)), personal).draw(None, 0)
    for i in everyone.tolist():
        assert torch.equal(weights[i], personal.weights[i] if i in took_part else federation.shared.weights)
        assert (weights[i] != federation.shared.weights).any() == (i in took_part)


@pytest.mark.parametrize(
    "settings",
    [{"inner_lr": -1.0}, {"inner_steps": 0}, {"pull": -1.0}, {"mixing": -0.1}, {"personal": "head"}],
)
def test_settings_out_of_range_are_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        PFedMe(**settings).check()


@pytest.mark.parametrize("name", ["lr", "inner_lr"])
def test_steps_that_overshoot_are_refused(name):
    PFedMe(pull=10.0, lr=0.01, inner_lr=0.1).check()
    with pytest.raises(UserError, match=rf"{name} \* pull is 2.5"):
        PFedMe(**{"pull": 10.0, "lr": 0.01, "inner_lr": 0.1, name: 0.25}).check()
