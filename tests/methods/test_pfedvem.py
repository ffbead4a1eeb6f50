"""pFedVEM: its E step against plain autograd, its M step and the server's confidence weights against their formulas."""

import pytest
import scenarios
import torch
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian, softplus
from bpfed.methods import PFedVEM
from bpfed.methods.base import ADAPT, rows
from bpfed.methods.pfedvem import BODY, Shared

CLIENTS, SIZE = 2, 35.0


def batches(steps, first=0):
    return [
        scenarios.random_batch(CLIENTS, 5, seed=t, used=[5, 3] if t % 2 else [4, 5], size=SIZE)._replace(
            key=rng.fold(scenarios.keys(CLIENTS), t)
        )
        for t in range(first, first + steps)
    ]


def later(method):
    """Server and clients as they are after some rounds."""
    model = scenarios.model_of(scenarios.smooth())
    initial, g = method.init(model), scenarios.generator(3)
    width = model.layout.personal
    head = Gaussian(torch.randn(width, generator=g), torch.full((width,), 0.5))
    q = Gaussian(torch.randn(CLIENTS, width, generator=g), 0.1 + 0.2 * torch.rand(CLIENTS, width, generator=g))
    personal = rows(initial.personal, CLIENTS)._replace(q=q, rho=torch.tensor([[0.3], [0.8]]))
    return model, rows(initial.shared._replace(head=head), CLIENTS), personal


def trained(method, model, shared, personal, plan):
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    for phase, steps in plan:
        for batch in steps:
            local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), phase)
    return local


def test_the_head_is_learnt_first_and_then_the_body_as_done_by_hand():
    method = PFedVEM(lr=3e-3, head_rate=2.0, draws=2, keep_adam=False)
    model, shared, personal = later(method)
    plan = (("head", batches(6)), (BODY, batches(4, first=6)))
    assert [phase.name for phase in method.phases(9)] == [phase for phase, _ in plan]
    local = trained(method, model, shared, personal, plan)
    for s in range(CLIENTS):
        module = scenarios.smooth().double()
        mean = personal.q.mean[s].double().requires_grad_()
        rho = torch.log(torch.expm1(personal.q.sigma[s].double())).requires_grad_()
        body = shared.body[s].double().requires_grad_()
        on_head, on_body = torch.optim.Adam([mean, rho], lr=2 * 3e-3), torch.optim.Adam([body], lr=3e-3)
        for phase, steps in plan:
            for batch in steps:
                used = batch.mask[s].bool()
                x, y = batch.x[s, used].double(), batch.y[s, used]
                data = 0.0
                for m in range(2):
                    key = batch.key[s] if m == 0 else rng.fold(batch.key[s], m)
                    eps = rng.normal(key, model.layout.total).double()[model.layout.shared :]
                    weights = torch.cat([body, mean + F.softplus(rho) * eps])
                    out = functional_call(module, model.layout.unflatten(weights), (x,))
                    data = data + SIZE / len(y) / 2 * F.cross_entropy(out, y, reduction="sum")
                prior = Normal(shared.head.mean[s].double(), personal.rho[s].double())
                loss = data + kl_divergence(Normal(mean, F.softplus(rho)), prior).sum()
                for optimiser in (on_head, on_body):
                    optimiser.zero_grad()
                loss.backward()
                (on_body if phase == BODY else on_head).step()
        torch.testing.assert_close(local.q.mean[s].double(), mean.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(softplus(local.q.rho[s]).double(), F.softplus(rho.detach()), rtol=0, atol=1e-5)
        torch.testing.assert_close(local.body[s].double(), body.detach(), rtol=0, atol=1e-5)
        assert (mean - personal.q.mean[s]).abs().max() > 4 * 3e-3
        assert (body - shared.body[s]).abs().max() > 2 * 3e-3


def test_the_width_is_the_maximiser_of_the_m_step():
    # ρ² = (Σσ² + ‖μ − w‖²)/d: no other width makes E_q log N(w_i; w, ρ² I) larger.
    method = PFedVEM()
    model, shared, personal = later(method)
    local = trained(method, model, shared, personal, (("head", batches(3)),))
    finished = method.finish(model, local, scenarios.hparams(method, CLIENTS))
    q, w = local.q.gaussian, shared.head.mean
    rho = finished.personal.rho
    torch.testing.assert_close(rho.square(), (q.sigma**2 + (q.mean - w) ** 2).sum(1, keepdim=True) / q.mean.shape[1])

    def expected(width):
        return -(width.log() + (q.sigma**2 + (q.mean - w) ** 2) / (2 * width**2)).sum(1)

    for other in (0.9, 1.1):
        assert (expected(other * rho) < expected(rho)).all()
    torch.testing.assert_close(finished.upload.head.sigma, rho.expand_as(q.mean))
    begun = method.begin(model, shared, finished.personal, scenarios.hparams(method, CLIENTS))
    torch.testing.assert_close(begun.prior.sigma, rho.expand_as(q.mean))  # it ties the next round's head


def test_the_server_weights_heads_by_confidence_and_bodies_equally():
    heads = Gaussian(torch.tensor([[0.0, 1.0], [3.0, 1.0]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]]))
    uploads = Shared(torch.tensor([[0.0], [1.0]]), heads)
    found = PFedVEM().aggregate(uploads, uploads, torch.ones(2))
    torch.testing.assert_close(found.body, torch.tensor([0.5]))
    torch.testing.assert_close(found.head.mean, torch.tensor([3.0 * 1 / (4 + 1), 1.0]))
    torch.testing.assert_close(found.head.sigma, torch.full((2,), (0.5 * (0.25 + 1.0)) ** 0.5))


def test_a_client_that_never_trained_predicts_with_the_prior_and_one_that_has_with_its_own_head():
    method = PFedVEM()
    model, shared, personal = later(method)
    mixed = personal._replace(rho=torch.tensor([[0.0], [0.8]]))
    weights = method.predictive(model, shared, mixed).weights
    _, head = model.layout.split(weights.mean)
    body, sigma = model.layout.split(weights.sigma)
    assert (body == 0).all()  # the body is a point
    torch.testing.assert_close(head, torch.stack([shared.head.mean[0], personal.q.mean[1]]))
    torch.testing.assert_close(sigma, torch.stack([shared.head.sigma[0], personal.q.sigma[1]]))
    begun = method.begin(model, shared, mixed, scenarios.hparams(method, CLIENTS))
    torch.testing.assert_close(begun.q.mean, head)
    torch.testing.assert_close(
        begun.q.gaussian.sigma, torch.stack([torch.full_like(sigma[0], method.sigma), personal.q.sigma[1]])
    )


def test_a_newcomers_head_is_tied_to_the_common_one_and_the_body_is_held():
    method = PFedVEM().adapting()
    model, shared, _ = later(method)
    newcomer = rows(method.newcomer(model, method.init(model).shared), CLIENTS)
    local = trained(method, model, shared, newcomer, ((ADAPT, batches(5)),))
    assert torch.equal(local.body, shared.body)
    torch.testing.assert_close(local.prior, shared.head)
    assert (local.q.mean - shared.head.mean).abs().max() > 3 * method.lr


@pytest.mark.parametrize(
    "settings",
    [{"rho": 0.0}, {"sigma": 0.0}, {"head_rate": 0.0}, {"draws": 0}, {"body_share": 1.0}, {"personal": "none"}],
    ids=str,
)
def test_a_setting_out_of_range_is_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        PFedVEM(**settings).check()
