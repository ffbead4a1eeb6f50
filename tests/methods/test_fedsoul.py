"""FedSOUL: Langevin steps against conjugate posteriors, the prior against its maximum-likelihood estimate."""

import pytest
import scenarios
import torch
from torch import nn

from bpfed import fit
from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.engine.server import combined
from bpfed.inference import likelihoods, rng
from bpfed.inference.estimators import Batch
from bpfed.inference.gaussian import Gaussian
from bpfed.methods import FedSOUL
from bpfed.methods.base import ADAPT, rows
from bpfed.methods.fedsoul import LANGEVIN, Chain, SampledPredictive, Shared
from bpfed.nn.model import Model

CLIENTS = 3


def client(method, count=CLIENTS):
    """Clients whose chains have begun, and the server, with numbers that are all different."""
    model = scenarios.model_of(scenarios.small_mlp())
    initial, g = method.init(model), scenarios.generator(5)
    heads = Gaussian(0.3 * torch.randn(model.layout.personal, generator=g), torch.full((model.layout.personal,), 0.4))
    shared = rows(Shared.of(initial.shared.body, heads), count)
    state = torch.randn(count, model.layout.personal, generator=g)
    personal = rows(initial.personal, count)
    chain = personal.chain._replace(state=state, number=torch.ones(count, 1))
    return model, shared, personal._replace(chain=chain)


def test_a_step_is_one_of_langevin_on_the_head_and_one_of_adam_on_the_body():
    method = FedSOUL(gamma=0.2, lr=2e-3)
    model, shared, personal = client(method)
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    batch = scenarios.random_batch(CLIENTS, 5, used=[5, 2, 4], size=20.0)
    new, loss = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), "all")
    for s in range(CLIENTS):
        body = shared.body[s].double().requires_grad_()
        head = personal.chain.state[s].double().requires_grad_()
        used = batch.mask[s].bool()
        outputs = model.outputs(torch.cat([body, head]).float(), batch.x[s, used]).double()
        nll = nn.functional.cross_entropy(outputs, batch.y[s, used])
        prior = torch.distributions.Normal(shared.heads.mean[s].double(), shared.heads.sigma[s].double())
        (20.0 * nll - prior.log_prob(head).sum()).backward()
        gamma = 0.2 / (20.0 + 1 / 0.4**2)
        xi = rng.normal(rng.fold(batch.key[s], LANGEVIN), len(head)).double()
        expected = head.detach() - gamma * head.grad + (2 * gamma) ** 0.5 * xi
        torch.testing.assert_close(new.chain.state[s].double(), expected, rtol=0, atol=1e-5)
        optimiser = torch.optim.Adam([body], lr=2e-3)
        body.grad = body.grad / 20.0
        optimiser.step()
        torch.testing.assert_close(new.body[s].double(), body.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(loss[s].double(), nll.detach(), rtol=1e-5, atol=1e-6)


# --- the chain --------------------------------------------------------------------------------------------------------

EXAMPLES, FEATURES, SCALE, S, CENTRE = 64, 3, 2.0, 0.3, 0.5


def regression(count):
    """The same linear regression for many clients, X'X = n I, so that the head's posterior is known weight by weight."""
    g = scenarios.generator(1)
    x = EXAMPLES**0.5 * torch.linalg.qr(torch.randn(EXAMPLES, FEATURES, generator=g))[0]
    y = x @ torch.tensor([1.0, -1.0, 0.2]) + SCALE * torch.randn(EXAMPLES, generator=g)
    model = Model.of(nn.Linear(FEATURES, 1, bias=False), likelihoods.Normal(SCALE, learnt=False), x[:2], "all")
    batch = Batch(
        x.expand(count, -1, -1),
        y.expand(count, -1),
        torch.ones(count, EXAMPLES),
        torch.full((count,), float(EXAMPLES)),
        scenarios.keys(count),
    )
    precision = EXAMPLES / SCALE**2 + 1 / S**2
    mean = (x.T @ y / SCALE**2 + CENTRE / S**2) / precision
    return model, batch, mean, precision


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_chains_settle_at_the_posterior_of_a_linear_head_with_the_common_prior(gamma):
    # At step size γ the stationary variance is 1/(λ − γ λ²/2): what Langevin steps without rejection converge to.
    count, steps = 2000, 150
    method = FedSOUL(personal="all", gamma=gamma, prior_sigma=S)
    model, batch, mean, precision = regression(count)
    initial = method.init(model)
    heads = Gaussian(torch.full((FEATURES,), CENTRE), initial.shared.heads.sigma)
    shared = rows(Shared.of(initial.shared.body, heads), count)
    local = method.begin(model, shared, rows(initial.personal, count), scenarios.hparams(method, count))
    for t in range(steps):
        step = batch._replace(key=rng.fold(batch.key, t))
        local, _ = method.step(model, local, step, scenarios.hparams(method, count), ADAPT)
    effective = gamma / (EXAMPLES + 1 / S**2)
    variance = 1 / (precision - 0.5 * effective * precision**2)
    state = local.chain.state
    torch.testing.assert_close(state.mean(0), mean, rtol=0, atol=4 * (variance / count) ** 0.5)
    torch.testing.assert_close(state.var(0), torch.full((FEATURES,), variance), rtol=0.12, atol=0)
    finished = method.finish(model, local, scenarios.hparams(method, count))
    late = local.chain.samples.flatten(0, 1)
    torch.testing.assert_close(late.mean(0), mean, rtol=0, atol=0.01)
    torch.testing.assert_close(late.var(0), torch.full((FEATURES,), variance), rtol=0.12, atol=0)
    torch.testing.assert_close(finished.upload.first.mean(0), mean, rtol=0, atol=0.05)


def test_the_newest_states_are_kept_and_drawn_newest_first():
    method = FedSOUL(samples=3, thin=2)
    model, shared, personal = client(method)
    personal = personal._replace(chain=personal.chain._replace(number=torch.zeros(CLIENTS, 1)))
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    assert torch.equal(local.chain.state, shared.heads.mean)  # a chain that has not begun begins at the prior's mean
    states, key = [], scenarios.keys(CLIENTS)
    for t in range(9):
        batch = scenarios.random_batch(CLIENTS, 5, seed=t)
        local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), "all")
        states.append(local.chain.state)
        kept = states[::2][::-1][:3]  # steps 1, 3, 5, ... newest first
        predictive = method.predictive(
            model, shared, method.finish(model, local, scenarios.hparams(method, CLIENTS)).personal
        )
        assert predictive.draws(20) == 3
        for index in range(3):
            head = predictive.draw(key, index)[:, model.layout.shared :]
            assert torch.equal(head, kept[index % len(kept)])


def test_before_any_sample_heads_are_drawn_from_the_prior():
    count = 4000
    prior = Gaussian(torch.tensor([[1.0, -2.0]]).expand(count, -1), torch.tensor([[0.5, 0.5]]).expand(count, -1))
    chain = Chain(torch.zeros(count, 2), torch.zeros(count, 4, 2), torch.zeros(count, 1))
    predictive = SampledPredictive(torch.zeros(count, 1), chain, prior)
    first, second = (predictive.draw(scenarios.keys(count), i)[:, 1:] for i in range(2))
    for drawn in (first, second):
        torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -2.0]), rtol=0, atol=0.04)
        torch.testing.assert_close(drawn.std(0), torch.tensor([0.5, 0.5]), rtol=0.05, atol=0)
    assert (first != second).all()


@pytest.mark.parametrize("samples", [3, 6])
def test_the_chain_goes_on_where_it_was_and_the_moments_of_its_newest_states_are_uploaded(samples):
    method = FedSOUL(samples=samples, thin=2)
    model, shared, personal = client(method)
    personal = personal._replace(chain=personal.chain._replace(number=torch.zeros(CLIENTS, 1)))
    states = []
    for round_ in range(2):
        local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
        if round_:
            assert torch.equal(local.chain.state, personal.chain.state)
        for t in range(4):
            batch = scenarios.random_batch(CLIENTS, 5, seed=10 * round_ + t)
            local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), "all")
            states.append(local.chain.state)
        finished = method.finish(model, local, scenarios.hparams(method, CLIENTS))
        personal = finished.personal
    kept = torch.stack(states[::2][-samples:])  # of both rounds
    torch.testing.assert_close(finished.upload.first, kept.mean(0))
    torch.testing.assert_close(finished.upload.second, kept.square().mean(0))


# --- the prior --------------------------------------------------------------------------------------------------------


def test_the_learnt_prior_is_that_of_maximum_marginal_likelihood():
    # Normal means b_i ~ N(z_i, v), z_i ~ N(m, s²): likeliest are m = mean b_i and s² = variance of b_i − v.
    g = scenarios.generator(2)
    noise_variance, width = 0.09, 400
    truth = 0.7 + 0.5 * torch.randn(8, width, generator=g)
    seen = truth + noise_variance**0.5 * torch.randn(8, width, generator=g)
    method = FedSOUL(prior_rate=1.0)
    shared = Shared.of(torch.zeros(0), Gaussian(torch.zeros(width), torch.full((width,), 2.0)))
    for _ in range(200):  # EM with the exact E step
        m, s = shared.heads
        precision = 1 / noise_variance + 1 / s.square()
        posterior = Gaussian((seen / noise_variance + m / s.square()) / precision, precision.rsqrt().expand(8, -1))
        shared = method.aggregate(shared, Shared.of(torch.zeros(8, 0), posterior), torch.ones(8))
    expected = (seen - seen.mean(0)).square().mean() - noise_variance
    torch.testing.assert_close(shared.heads.mean, seen.mean(0), rtol=0, atol=1e-3)
    torch.testing.assert_close(shared.heads.sigma.square(), expected.expand(width), rtol=1e-3, atol=0)


def test_the_server_moves_the_prior_part_of_the_way():
    old = Shared.of(torch.zeros(1), Gaussian(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])))
    uploads = Shared.of(
        torch.tensor([[1.0], [4.0]]), Gaussian(torch.tensor([[0.0, 2.0], [4.0, 2.0]]), torch.tensor([[1.0, 3.0]] * 2))
    )
    found = FedSOUL(prior_rate=0.5).aggregate(old, uploads, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(found.body, torch.tensor([2.5]))
    torch.testing.assert_close(found.heads.mean, torch.tensor([1.5, 1.5]))
    pooled = ((1 + 4) + 9) / 2  # of the two weights: Var + deviation²
    torch.testing.assert_close(found.heads.sigma, torch.full((2,), ((4 + pooled) / 2) ** 0.5))


@pytest.mark.parametrize("options", [{"clip": 100.0, "noise": 1e-6}, {"robust": "trimmed:0.1"}])
def test_one_upload_of_all_keeps_what_clients_differ_by(options):
    # Noise and robust rules hand the server's rule one upload, as often as there are clients.
    g, clients, width = scenarios.generator(3), 10, 300
    means = 0.7 + 0.5 * torch.randn(clients, width, generator=g)
    uploads = Shared.of(torch.zeros(clients, 1), Gaussian(means, torch.full_like(means, 0.1)))
    method, old = FedSOUL(), Shared.of(torch.zeros(1), Gaussian(torch.zeros(width), torch.full((width,), 0.3)))
    plain, found = (
        combined(method, Settings(**given), old, uploads, torch.ones(clients), clients, torch.randn)
        for given in ({}, options)
    )
    assert float(plain.heads.sigma[0]) == pytest.approx(0.5, abs=0.05)
    if "noise" in options:
        torch.testing.assert_close(found.heads, plain.heads, rtol=0, atol=1e-3)
    else:  # a trimmed mean of squares is lower, but far from the 0.1 of one client
        assert 0.3 < float(found.heads.sigma[0]) < 0.5


def test_a_run_with_hardly_any_noise_is_the_plain_run():
    quiet = {"rounds": 10, "seed": 0, "eval_every": 10, "progress": False}
    plain, noisy = (fit("fedsoul", "digits", **quiet, **more) for more in ({}, {"clip": 100.0, "noise": 1e-6}))
    spread = [float(run.federation.shared.heads.sigma.mean()) for run in (plain, noisy)]
    assert spread[1] == pytest.approx(spread[0], rel=0.02)
    nll = [run.history[-1]["nll"]["pooled"] for run in (plain, noisy)]
    assert nll[1] == pytest.approx(nll[0], rel=0.02)


def test_a_newcomer_samples_its_head_on_the_body_as_it_is():
    method = FedSOUL().adapting()
    model, shared, _ = client(method)
    newcomer = rows(method.newcomer(model, method.init(model).shared), CLIENTS)
    local = method.begin(model, shared, newcomer, scenarios.hparams(method, CLIENTS))
    for t in range(6):
        batch = scenarios.random_batch(CLIENTS, 5, seed=t)
        local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), ADAPT)
    assert torch.equal(local.body, shared.body)
    personal = method.finish(model, local, scenarios.hparams(method, CLIENTS)).personal
    assert (personal.chain.number == 2).all()
    assert (personal.chain.state != shared.heads.mean).all()


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 0.0}, {"samples": 0}, {"thin": 0}, {"prior_sigma": 0.0}, {"prior_rate": 2.0}, {"personal": "none"}],
)
def test_a_setting_out_of_range_is_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        FedSOUL(**settings).check()
