"""pFedBayes against plain autograd, and what it keeps where."""

import pytest
import scenarios
import torch
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian, softplus
from bpfed.methods import PFedBayes
from bpfed.methods.base import ADAPT, rows

CLIENTS, SIZE, STEPS = 2, 35.0, 6


def batches(steps=STEPS):
    return [
        scenarios.random_batch(CLIENTS, 5, seed=t, used=[5, 3] if t % 2 else [4, 5], size=SIZE)._replace(
            key=rng.fold(scenarios.keys(CLIENTS), t)
        )
        for t in range(steps)
    ]


def apart(method, model):
    """Server and clients as they are after some rounds: every q its own, and none where w is."""
    initial, g = method.init(model), scenarios.generator(3)
    shared = Gaussian(
        model.initial + 0.1 * torch.randn(model.initial.shape, generator=g), torch.full_like(model.initial, 0.09)
    )
    q = Gaussian(
        model.initial + 0.2 * torch.randn(CLIENTS, len(model.initial), generator=g),
        0.04 + 0.05 * torch.rand(CLIENTS, len(model.initial), generator=g),
    )
    personal = rows(initial.personal, CLIENTS)._replace(q=q, steps=torch.ones(CLIENTS, 1))
    return rows(shared, CLIENTS), personal


def trained(method, model, shared, personal, phase="all"):
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    for batch in batches():
        local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), phase)
    return local


@pytest.mark.parametrize("settings", [{}, {"zeta": 0.2, "draws": 1}, {"zeta": 5.0, "lr": 4e-3}], ids=str)
def test_local_steps_are_those_of_the_papers_algorithm_done_by_hand(settings):
    method = PFedBayes(**settings, keep_adam=False)
    model = scenarios.model_of(scenarios.smooth(), personal="none")
    shared, personal = apart(method, model)
    local = trained(method, model, shared, personal)
    for s in range(CLIENTS):
        module = scenarios.smooth().double()
        q, w = (
            [g.mean[s].double().requires_grad_(), torch.log(torch.expm1(g.sigma[s].double())).requires_grad_()]
            for g in (personal.q, shared)
        )
        on_q, on_w = torch.optim.Adam(q, lr=method.lr), torch.optim.Adam(w, lr=method.lr)
        for batch in batches():
            used = batch.mask[s].bool()
            x, y = batch.x[s, used].double(), batch.y[s, used]
            data = 0.0
            for m in range(method.draws):
                eps = rng.normal(batch.key[s] if m == 0 else rng.fold(batch.key[s], m), len(q[0])).double()
                out = functional_call(module, model.layout.unflatten(q[0] + F.softplus(q[1]) * eps), (x,))
                data = data + SIZE / len(y) / method.draws * F.cross_entropy(out, y, reduction="sum")
            on_q.zero_grad()
            prior = Normal(w[0].detach(), F.softplus(w[1].detach()))
            (data + method.zeta * kl_divergence(Normal(q[0], F.softplus(q[1])), prior).sum()).backward()
            on_q.step()
            on_w.zero_grad()
            posterior = Normal(q[0].detach(), F.softplus(q[1].detach()))
            kl_divergence(posterior, Normal(w[0], F.softplus(w[1]))).sum().backward()
            on_w.step()
        for found, (mean, rho), start in ((local.q, q, personal.q.mean[s]), (local.w, w, shared.mean[s])):
            torch.testing.assert_close(found.mean[s].double(), mean.detach(), rtol=0, atol=1e-5)
            torch.testing.assert_close(softplus(found.rho[s]).double(), F.softplus(rho.detach()), rtol=0, atol=1e-5)
            assert (mean - start).abs().max() > 3 * method.lr


def test_the_posterior_is_never_overwritten_and_the_prior_always_is():
    method, model = PFedBayes(), scenarios.model_of(scenarios.smooth(), personal="none")
    shared, personal = apart(method, model)
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    torch.testing.assert_close(local.q.gaussian, personal.q)
    torch.testing.assert_close(local.w.gaussian, shared)
    finished = method.finish(model, trained(method, model, shared, personal), scenarios.hparams(method, CLIENTS))
    predicted = method.predictive(model, rows(method.init(model).shared, CLIENTS), finished.personal).weights
    torch.testing.assert_close(predicted, finished.personal.q)


def test_a_client_that_never_trained_begins_and_predicts_with_the_servers_distribution():
    method, model = PFedBayes(), scenarios.model_of(scenarios.smooth(), personal="none")
    shared, _ = apart(method, model)
    personal = rows(method.init(model).personal, CLIENTS)
    assert (shared.mean != personal.q.mean).any()
    torch.testing.assert_close(
        method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS)).q.gaussian, shared
    )
    torch.testing.assert_close(method.predictive(model, shared, personal).weights, shared)


def test_the_server_moves_mean_and_rho_part_of_the_way():
    old = Gaussian(torch.tensor([1.0, 0.0]), torch.tensor([0.1, 2.0]))
    uploads = Gaussian(torch.tensor([[0.0, 4.0], [3.0, 0.0]]), torch.tensor([[0.2, 1.0], [0.4, 1.0]]))
    found = PFedBayes(beta=0.25).aggregate(old, uploads, torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(found.mean, torch.tensor([0.75 * 1.0 + 0.25 * 2.25, 0.25 * 1.0]))
    rho = lambda sigma: torch.log(torch.expm1(torch.tensor(sigma)))  # noqa: E731
    expected = 0.75 * rho([0.1, 2.0]) + 0.25 * (0.25 * rho([0.2, 1.0]) + 0.75 * rho([0.4, 1.0]))
    torch.testing.assert_close(found.sigma, F.softplus(expected))


def test_a_newcomers_prior_is_held():
    method, model = PFedBayes().adapting(), scenarios.model_of(scenarios.smooth(), personal="none")
    shared, _ = apart(method, model)
    newcomer = rows(method.newcomer(model, Gaussian(*(t[0] for t in shared))), CLIENTS)
    torch.testing.assert_close(method.predictive(model, shared, newcomer).weights, shared)
    local = trained(method, model, shared, newcomer, ADAPT)
    torch.testing.assert_close(local.w.gaussian, shared)
    assert (local.q.mean - shared.mean).abs().max() > 3 * method.lr


def test_clients_end_up_with_networks_of_their_own_around_the_servers():
    federation = scenarios.run(PFedBayes(), rounds=3)
    q = federation.personal(torch.arange(5)).q
    assert (q.mean.std(0) > 0).all()
    assert (q.mean - federation.shared.mean).norm(dim=1).max() < q.mean.norm(dim=1).min()


@pytest.mark.parametrize(
    "settings", [{"zeta": -1.0}, {"sigma": 0.0}, {"draws": 0}, {"beta": 0.0}, {"personal": "head"}], ids=str
)
def test_a_setting_out_of_range_is_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        PFedBayes(**settings).check()
