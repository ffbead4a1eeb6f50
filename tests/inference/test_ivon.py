"""IVON against its paper's algorithm and against exact mean-field posteriors; and as the local step of BPFed."""

import math

import pytest
import scenarios
import torch
from torch import nn

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference import likelihoods
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.optim import Momentum, Newton, ivon
from bpfed.methods import BPFed
from bpfed.methods.base import ADAPT, rows

WIDTH = 5


def test_steps_are_those_of_the_papers_algorithm():
    # Algorithm 1 in its own letters: mean loss over n, weight decay δ towards 0, effective sample size λ.
    g = scenarios.generator()
    size, temperature, prior_sigma, alpha, beta2, h0 = 40.0, 0.5, 0.7, 0.05, 0.95, 0.3
    weight_decay, ess = temperature / (size * prior_sigma**2), size / temperature
    m, h = torch.randn(WIDTH, generator=g).double(), torch.full((WIDTH,), h0).double()
    momentum = torch.zeros(WIDTH).double()
    sigma = 1 / torch.sqrt(ess * (h + weight_decay))
    q = Newton.at(Gaussian(m.float()[None], sigma.float()[None]))
    prior = Gaussian(torch.zeros(1, WIDTH), torch.full((1, WIDTH), prior_sigma))
    numbers = [torch.tensor([v]) for v in (temperature, alpha, beta2)]
    for t in range(1, 21):
        eps, gradient = torch.randn(2, WIDTH, generator=g).double()
        curvature = gradient * (sigma * eps) / sigma**2
        momentum = 0.9 * momentum + 0.1 * gradient
        h = beta2 * h + (1 - beta2) * curvature + 0.5 * (1 - beta2) ** 2 * (h - curvature) ** 2 / (h + weight_decay)
        m = m - alpha * (momentum / (1 - 0.9**t) + weight_decay * m) / (h + weight_decay)
        sigma = 1 / torch.sqrt(ess * (h + weight_decay))
        total = (size * gradient).float()[None]  # the data term is a sum over n
        q = ivon(q, total, total * eps.float(), prior, numbers[0], torch.tensor([float(t)]), *numbers[1:])
    torch.testing.assert_close(q.mean[0].double(), m, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.sigma[0].double(), sigma, rtol=1e-4, atol=0)


def quadratic(seed=0):
    """A Bayesian linear regression: L(w) = ½ w'Aw − b'w, and a prior that is centred elsewhere."""
    g = scenarios.generator(seed)
    root = torch.randn(WIDTH, WIDTH, generator=g)
    a = root @ root.T + 3 * torch.eye(WIDTH)
    b = 5 * torch.randn(WIDTH, generator=g)
    prior = Gaussian(torch.randn(1, WIDTH, generator=g), 0.3 + torch.rand(1, WIDTH, generator=g))
    return a, b, prior


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_fixed_point_is_the_exact_mean_field_posterior(temperature):
    a, b, prior = quadratic()
    q = Newton.at(Gaussian(torch.zeros(1, WIDTH), torch.full((1, WIDTH), 2.0)))
    numbers = [torch.tensor([v]) for v in (temperature, 0.1, 0.9)]
    for t in range(1, 801):  # E_q ∇L = A m − b and E_q ∇²L = A are known here
        mean, sigma = (q.mean @ a - b), a.diagonal() * q.sigma
        q = ivon(q, mean, sigma, prior, numbers[0], torch.tensor([float(t)]), *numbers[1:])
    tie = prior.sigma[0] ** -2
    precision = a.diagonal() / temperature + tie
    expected = torch.linalg.solve(a / temperature + tie.diag(), b / temperature + tie * prior.mean[0])
    torch.testing.assert_close(q.sigma[0], precision.rsqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(q.mean[0], expected, rtol=0, atol=1e-4)


def test_variances_stay_positive_whatever_the_curvature():
    q = Newton.at(Gaussian(torch.zeros(1, 3), torch.full((1, 3), 0.5)))
    prior = Gaussian(torch.zeros(1, 3), torch.ones(1, 3))
    one = torch.ones(1)
    for step in range(1, 50):
        wild = torch.tensor([[-1e3, -5.0, 1e3]])
        q = ivon(q, torch.zeros(1, 3), wild, prior, one, step * one, 0.1 * one, 0.9 * one)
        assert (q.sigma > 0).all()
        assert q.sigma.isfinite().all()


def test_a_step_in_parts_the_data_do_not_see_stays_at_the_prior():
    prior = Gaussian(torch.randn(2, 3, generator=scenarios.generator()), torch.full((2, 3), 0.3))
    none, one = torch.zeros(2, 3), torch.ones(2)
    q = ivon(Newton.at(prior), none, none, prior, one, one, 0.1 * one, 0.9 * one)
    torch.testing.assert_close(q.gaussian, prior)


# --- as BPFed's local step --------------------------------------------------------------------------------------------


def test_a_federation_of_one_finds_the_posterior_of_a_linear_regression():
    examples, features, scale, s0 = 128, 3, 2.0, 0.4
    g = scenarios.generator(2)
    x = examples**0.5 * torch.linalg.qr(torch.randn(examples, features, generator=g))[0]
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + scale * torch.randn(examples, generator=g)
    names = tuple(f"twin {i}" for i in range(8))  # the server's mean is the mean of eight fits of the same data
    twins = Examples.of([(x, y)] * 8)
    data = FederatedData("twins", names, twins, twins, "regression")
    method = BPFed(
        optimiser="ivon",
        personal="none",
        prior_step=False,
        discount=0.0,
        prior_sigma=s0,
        sigma=0.2,
        estimator="local",
        curvature=0.95,
    )
    module = scenarios.seeded(lambda: nn.Linear(features, 1, bias=False))
    settings = Settings(rounds=1, epochs=150, batch=examples, compile="off", device="cpu")
    federation = Federation.start(method, data, settings, module, likelihoods.Normal(scale, learnt=False))
    start = federation.shared.mean.clone()
    Simulator([federation]).round()
    precision = examples / scale**2 + 1 / s0**2
    expected = (x.T @ y / scale**2 + start / s0**2) / precision
    torch.testing.assert_close(federation.shared.mean, expected, rtol=0, atol=0.03)
    torch.testing.assert_close(federation.shared.sigma, torch.full((features,), precision**-0.5), rtol=0.05, atol=0)


def test_only_the_step_on_q_is_ivons():
    model = scenarios.model_of(scenarios.small_mlp())
    ways = {}
    for name in ("adam", "ivon"):
        method = BPFed(optimiser=name)
        hparams = scenarios.hparams(method, 3)
        initial = method.init(model)
        local = method.begin(model, rows(initial.shared, 3), rows(initial.personal, 3), hparams)
        ways[name], _ = method.step(model, local, scenarios.random_batch(), hparams, "all")
        finished = method.finish(model, ways[name], hparams)
        assert len(finished.personal.memory) == len(initial.personal.memory) == 2
    assert isinstance(ways["ivon"].q, Newton)
    assert isinstance(ways["ivon"].q.memory, Momentum)
    assert type(ways["ivon"].prior) is type(ways["adam"].prior)


def test_a_federation_learns_and_a_newcomer_leaves_the_shared_factors():
    method = BPFed(optimiser="ivon")
    federation = scenarios.run(method, scenarios.classification((40, 30, 25)), rounds=3, epochs=10)
    start = scenarios.start(method)
    assert (federation.shared.mean - start.shared.mean).abs().max() > 0.02
    new, model = method.adapting(), federation.model
    hparams = {n: torch.full((2,), v) for n, v in new.hparams().items()}
    local = new.begin(model, rows(federation.shared, 2), rows(new.newcomer(model, federation.shared), 2), hparams)
    after, _ = new.step(model, local, scenarios.random_batch(2), hparams, ADAPT)
    cut = model.layout.shared
    for before, now in zip(local.q.gaussian, after.q.gaussian, strict=True):
        assert torch.equal(before[:, :cut], now[:, :cut])
        assert (before[:, cut:] != now[:, cut:]).any()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"shared_point": True, "prior_step": False}], ids=str)
def test_ivon_without_variances_is_refused(settings):
    with pytest.raises(UserError, match="'ivon', which needs a variance"):
        BPFed(optimiser="ivon", **settings).check()
    with pytest.raises(UserError, match="'ivon'"):
        BPFed(optimiser="ivn").check()


@pytest.mark.parametrize("settings", [{"newton": 0.0}, {"curvature": 1.0}, {"curvature": math.nan}], ids=str)
def test_a_setting_out_of_range_is_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        BPFed(**settings).check()
