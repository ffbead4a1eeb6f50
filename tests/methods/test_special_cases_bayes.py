"""The Bayesian special cases of BPFed: pFedBayes step by step, FedSOUL (FedPop) in distribution."""

import pytest
import scenarios
import torch
from torch import nn

from bpfed._util.errors import UserError
from bpfed.inference import likelihoods, rng
from bpfed.inference.estimators import Batch
from bpfed.inference.gaussian import Gaussian, kl
from bpfed.methods import BPFed, FedSOUL, PFedBayes
from bpfed.methods.base import ADAPT, rows
from bpfed.nn.model import Model

ZETA = 0.7


# --- everything shared through the prior only, q never overwritten: pFedBayes ------------------------------------------


def test_pfedbayes_is_bpfed_with_nothing_personal_step_by_step_from_q_at_the_prior():
    model = scenarios.model_of(scenarios.smooth(), personal="none")
    methods = (PFedBayes(zeta=ZETA), BPFed(personal="none", temperature=ZETA))
    states = []
    for method in methods:
        initial = method.init(model)
        shared, personal = rows(initial.shared, 3), rows(initial.personal, 3)
        states.append(method.begin(model, shared, personal, scenarios.hparams(method, 3)))
    for t in range(12):
        batch = scenarios.random_batch(3, 5, seed=t, used=[5, 3, 4])
        states = [
            method.step(model, local, batch, scenarios.hparams(method, 3), "all")[0]
            for method, local in zip(methods, states, strict=True)
        ]
        mine, theirs = states
        torch.testing.assert_close(mine.q.gaussian, theirs.q.gaussian, rtol=0, atol=1e-6)
        torch.testing.assert_close(mine.w.gaussian, theirs.prior.gaussian, rtol=0, atol=1e-6)
    uploads = [m.finish(model, s, scenarios.hparams(m, 3)).upload for m, s in zip(methods, states, strict=True)]
    torch.testing.assert_close(*uploads, rtol=0, atol=1e-6)


def test_after_the_first_round_they_differ_in_that_pfedbayes_keeps_its_q():
    data = scenarios.classification((40, 12, 25))
    mine = scenarios.run(PFedBayes(zeta=ZETA), data, 1, scenarios.smooth())
    theirs = scenarios.run(BPFed(personal="none", temperature=ZETA), data, 1, scenarios.smooth())
    # The same server but for σ, of which the one averages ρ and the other σ itself.
    torch.testing.assert_close(mine.shared.mean, theirs.shared.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.shared.sigma, theirs.shared.sigma, rtol=0, atol=1e-4)
    own = mine.personal(torch.arange(3)).q
    begun = [
        f.method.begin(f.model, rows(f.shared, 3), f.personal(torch.arange(3)), scenarios.hparams(f.method, 3))
        for f in (mine, theirs)
    ]
    torch.testing.assert_close(begun[0].q.gaussian, own)
    assert (kl(begun[0].q.gaussian, begun[0].w.gaussian) > 0.01).all()
    assert (kl(begun[1].q.gaussian, begun[1].prior.gaussian) == 0).all()


# --- σ → 0 on shared, personal factors random with one common prior: FedPop / FedSOUL ----------------------------------

EXAMPLES, FEATURES, SCALE, S, CENTRE = 64, 3, 2.0, 0.3, 0.5


class Body(nn.Module):
    """Features are the inputs, rotated; a linear head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, 1, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))

    def forward(self, x):
        return self.head(self.body(x))


def linear_heads(count):
    """Clients with the same data and body, whose heads' posterior under N(CENTRE, S²) is known in closed form."""
    g = scenarios.generator(1)
    module = Body()
    x = EXAMPLES**0.5 * torch.linalg.qr(torch.randn(EXAMPLES, FEATURES, generator=g))[0]
    y = x @ torch.tensor([1.0, -1.0, 0.2]) + SCALE * torch.randn(EXAMPLES, generator=g)
    model = Model.of(module, likelihoods.Normal(SCALE, learnt=False), x[:2], "head")
    batch = Batch(
        x.expand(count, -1, -1),
        y.expand(count, -1),
        torch.ones(count, EXAMPLES),
        torch.full((count,), float(EXAMPLES)),
        scenarios.keys(count),
    )
    features = x @ module.body.weight.detach().T
    precision = EXAMPLES / SCALE**2 + 1 / S**2
    return model, batch, (features.T @ y / SCALE**2 + CENTRE / S**2) / precision, precision**-0.5


def sampled(model, batch, count, steps):
    """Heads of FedSOUL's chains, ``[count, FEATURES]``."""
    method = FedSOUL(gamma=0.25, prior_sigma=S)
    initial = method.init(model)
    heads = Gaussian(torch.full((FEATURES,), CENTRE), initial.shared.heads.sigma)
    shared = rows(type(initial.shared).of(initial.shared.body, heads), count)
    local = method.begin(model, shared, rows(initial.personal, count), scenarios.hparams(method, count))
    for t in range(steps):
        step = batch._replace(key=rng.fold(batch.key, t))
        local, _ = method.step(model, local, step, scenarios.hparams(method, count), ADAPT)
    return local.chain.state


def fitted(model, batch, count, steps):
    """Heads' q of BPFed with a point for a body and a prior of fixed width around the common centre."""
    method = BPFed(
        shared_point=True, prior_step=False, discount=0.0, prior_sigma=S, sigma=0.25, lr=0.03, estimator="local"
    )
    initial = method.init(model)
    eta = Gaussian(torch.full((FEATURES,), CENTRE), torch.full((FEATURES,), 0.25))
    personal = rows(initial.personal._replace(eta=eta), count)
    local = method.begin(model, rows(initial.shared, count), personal, scenarios.hparams(method, count))
    means, sigmas = [], []
    for t in range(steps):
        step = batch._replace(key=rng.fold(batch.key, t))
        local, _ = method.step(model, local, step, scenarios.hparams(method, count), ADAPT)
        means.append(model.layout.split(local.q.gaussian.mean)[1])
        sigmas.append(model.layout.split(local.q.gaussian.sigma)[1])
    return torch.stack(means[steps // 2 :]).mean((0, 1)), torch.stack(sigmas[steps // 2 :]).mean((0, 1))


def test_with_a_point_body_and_a_common_prior_bpfed_and_fedsoul_have_the_same_posterior_of_the_head():
    # Seen: means within 0.01 and σ within 5 % of the closed form (σ = 0.19), for both; 2 % of FedSOUL's is its step size.
    model, batch, mean, sigma = linear_heads(1500)
    heads = sampled(model, batch, 1500, 80)
    few = Batch(*(t[:20] for t in batch))
    q_mean, q_sigma = fitted(model, few, 20, 160)
    for found_mean, found_sigma in ((heads.mean(0), heads.std(0)), (q_mean, q_sigma)):
        torch.testing.assert_close(found_mean, mean, rtol=0, atol=0.02)
        torch.testing.assert_close(found_sigma, torch.full((FEATURES,), sigma), rtol=0.08, atol=0)
    assert 0.1 < sigma < 0.7 * S  # the data do say something


def test_a_point_body_moves_in_bpfed_as_in_fedsoul_at_the_same_head():
    model = scenarios.model_of(scenarios.smooth())
    batch = scenarios.random_batch(3, 5, used=[5, 3, 4])
    bpfed = BPFed(shared_point=True, prior_step=False, draws=1, sigma=0.3)
    soul = FedSOUL()
    initial = bpfed.init(model)
    cut = model.layout.shared
    assert (initial.shared.sigma == 0).all()
    assert (initial.personal.eta.sigma == 0.3).all()
    local = bpfed.begin(model, rows(initial.shared, 3), rows(initial.personal, 3), scenarios.hparams(bpfed, 3))
    head = local.q.gaussian.draw(rng.normal(batch.key, model.layout.total))[:, cut:]
    after, _ = bpfed.step(model, local, batch, scenarios.hparams(bpfed, 3), "all")
    start = soul.init(model)
    chain = start.personal.chain
    personal = rows(start.personal, 3)
    personal = personal._replace(chain=rows(chain, 3)._replace(state=head, number=torch.ones(3, 1)))
    sampling = soul.begin(model, rows(start.shared, 3), personal, scenarios.hparams(soul, 3))
    moved, _ = soul.step(model, sampling, batch, scenarios.hparams(soul, 3), "all")
    torch.testing.assert_close(after.q.mean[:, :cut], moved.body, rtol=0, atol=1e-6)
    assert (after.q.gaussian.sigma[:, :cut] == 0).all()
    assert (moved.body - model.initial[:cut]).abs().max() > 0.5 * soul.lr
    finished = bpfed.finish(model, after, scenarios.hparams(bpfed, 3))
    torch.testing.assert_close(finished.upload.mean, after.q.mean[:, :cut])
    assert finished.info["kl"].isfinite().all()


def test_a_point_body_learns_in_a_federation():
    method = BPFed(shared_point=True, prior_step=False)
    federation = scenarios.run(method, rounds=3)
    assert (federation.shared.sigma == 0).all()
    assert (federation.shared.mean != federation.model.initial[: federation.model.layout.shared]).any()
    assert federation.personal(torch.arange(5)).eta.sigma.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"prior_step": False, "rule": "moments"}], ids=str)
def test_a_point_body_with_a_prior_step_or_a_rule_of_precisions_is_refused(settings):
    with pytest.raises(UserError, match="prior_step = false and rule = 'mean'"):
        BPFed(shared_point=True, **settings).check()
