"""The single pass: its rules against closed forms and integrals, whole networks against draws of their weights."""

import math

import numpy as np
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm
from torch import nn
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.inference.moment_propagation import larger, neighbours, rectified
from bpfed.inference.predictive import (
    GaussianPredictive,
    Moments,
    PointPredictive,
    classify,
    gaussian_softmax,
    moments,
    regress,
)
from bpfed.nn.model import Model
from bpfed.nn.networks import LeNet, mlp

numbers = st.floats(-8, 8)
spreads = st.floats(0.05, 4)


def model_of(make, shape, outputs=3, personal="head"):
    return Model.of(scenarios.seeded(make), Categorical(outputs), torch.zeros(2, *shape), personal)


def posterior(model, clients=2, sigma=0.1, spread=0.05):
    g = scenarios.generator()
    mean = model.initial + spread * torch.randn(clients, model.layout.total, generator=g)
    return Gaussian(mean, sigma * (0.5 + torch.rand(mean.shape, generator=g)))


def drawn(model, q, x, draws):
    """Outputs of many weight draws, ``[draws, S, B, K]``."""
    g, stack = scenarios.generator(5), min(draws, 400_000 // model.layout.total)
    outputs = torch.func.vmap(model.stacked_outputs, (0, None))
    parts = [outputs(q.draw(torch.randn(stack, *q.mean.shape, generator=g)), x) for _ in range(draws // stack)]
    return torch.cat(parts)


# --- rules ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(numbers, spreads)
def test_a_rectified_gaussian_has_the_moments_of_the_integral(mean, sigma):
    first = quad(lambda t: t * norm.pdf(t, mean, sigma), 0, mean + 12 * sigma + 1, limit=200)[0]
    second = quad(lambda t: t * t * norm.pdf(t, mean, sigma), 0, mean + 12 * sigma + 1, limit=200)[0]
    m, v = rectified(*(torch.tensor(t, dtype=torch.float64) for t in (mean, sigma**2)))
    assert m.item() == pytest.approx(first, abs=1e-6)
    assert v.item() == pytest.approx(second - first**2, abs=1e-5)


@pytest.mark.parametrize("mean", [-1e4, -30.0, 0.0, 30.0, 1e4])
@pytest.mark.parametrize("variance", [0.0, 1e-12, 1.0])
def test_far_from_zero_a_rectified_gaussian_is_itself_or_nothing(mean, variance):
    m, v = rectified(torch.tensor(mean), torch.tensor(variance))
    assert m.isfinite()
    assert m.item() == pytest.approx(max(mean, 0.0), abs=0.4 * math.sqrt(variance), rel=1e-6)
    if mean:
        assert v.item() == pytest.approx(variance if mean > 0 else 0.0, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(numbers, spreads, numbers, spreads)
def test_the_larger_of_two_gaussians_has_the_moments_of_the_integral(a, s, b, t):
    def density(x):
        return norm.pdf(x, a, s) * norm.cdf(x, b, t) + norm.pdf(x, b, t) * norm.cdf(x, a, s)

    low, high = min(a - 12 * s, b - 12 * t), max(a + 12 * s, b + 12 * t)
    grid = np.linspace(low, high, 20_001)
    weight = density(grid) * (high - low) / 20_000
    first, second = (weight * grid).sum(), (weight * grid**2).sum()
    m, v, _ = larger(*((torch.tensor(x).double(), torch.tensor(y**2).double()) for x, y in ((a, s), (b, t))))
    assert m.item() == pytest.approx(first, abs=1e-4)
    assert v.item() == pytest.approx(second - first**2, abs=1e-3)


def test_the_larger_of_two_points_is_the_larger():
    zero = torch.zeros(3)
    m, v, _ = larger((torch.tensor([1.0, 2.0, 3.0]), zero), (torch.tensor([2.0, 2.0, -5.0]), zero))
    torch.testing.assert_close(m, torch.tensor([2.0, 2.0, 3.0]))
    assert (v == 0).all()


@pytest.mark.parametrize("apart", [(0, 1), (1, 0), (1, 1), (2, -1)])
@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((1, 2), (1, 2))])
def test_neighbours_of_a_convolution_have_the_covariance_of_its_linear_map(apart, stride, padding):
    g = scenarios.generator()
    mean, weight = torch.randn(1, 2, 6, 7, generator=g), torch.randn(2, 2, 3, 3, generator=g)
    v, s, b = torch.rand(mean.shape, generator=g), torch.rand(weight.shape, generator=g), torch.rand(2, generator=g)

    def conv(x, w):
        return F.conv2d(x, w, None, stride, padding)

    by_input, by_weight = (torch.autograd.functional.jacobian(conv, (mean, weight))[i] for i in (0, 1))
    _, channels, height, width = conv(mean, weight).shape
    by_input, by_weight = by_input[0].flatten(3), by_weight[0].flatten(3)
    found = neighbours((mean, v), (weight, s), b, stride, padding, apart)
    assert found.shape == (1, channels, height - apart[0], width - abs(apart[1]))
    for o in range(channels):
        for y in range(height - apart[0]):
            for x in range(max(0, -apart[1]), width - max(0, apart[1])):
                here, there = (o, y, x), (o, y + apart[0], x + apart[1])
                expected = (by_input[here] * by_input[there] * v.flatten()).sum()
                expected = expected + (by_weight[here] * by_weight[there] * s.flatten()).sum() + b[o]
                assert found[0, o, y, x - max(0, -apart[1])].item() == pytest.approx(expected.item(), abs=1e-4)


# --- where it is exact ------------------------------------------------------------------------------------------------


def test_one_linear_layer_has_its_closed_form():
    model = model_of(lambda: nn.Linear(4, 3), (4,))
    q, x = posterior(model), torch.randn(2, 6, 4, generator=scenarios.generator(1))
    found = moments(model, GaussianPredictive(q), x)
    design = torch.cat([x, torch.ones(2, 6, 1)], -1)

    def layer(flat):
        parts = [model.layout.unflatten(row) for row in flat]
        return torch.stack([torch.cat([p["weight"], p["bias"][:, None]], 1) for p in parts])

    torch.testing.assert_close(found.mean, design @ layer(q.mean).mT)
    expected = torch.diag_embed(design.square() @ layer(q.sigma).square().mT)
    torch.testing.assert_close(found.covariance, expected)


def test_one_hidden_layer_has_the_mean_and_covariance_of_its_draws():
    model = model_of(lambda: mlp(5, 3, (8,)), (5,))
    q, x = posterior(model, sigma=0.2, spread=1.0), torch.randn(2, 4, 5, generator=scenarios.generator(1))
    found, out = moments(model, GaussianPredictive(q), x), drawn(model, q, x, 20_000)
    sd = out.std(0)
    assert ((found.mean - out.mean(0)).abs() < 5 * sd / 20_000**0.5).all()
    centred = out - out.mean(0)
    covariance = torch.einsum("nsbk,nsbl->sbkl", centred, centred) / len(out)
    scale = sd[..., :, None] * sd[..., None, :]
    assert ((found.covariance - covariance).abs() / scale).max() < 0.05
    assert (covariance / scale - torch.eye(3)).abs().max() > 0.2  # or the whole covariance would not matter


def test_a_random_head_on_any_body_is_exact():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.cumsum(self.norm(self.body(x)), -1).sort(-1).values)

    model = model_of(Odd, (4,))
    q, x = posterior(model, sigma=0.5), torch.randn(2, 5, 4, generator=scenarios.generator(1))
    sigma = q.sigma.clone()
    sigma[:, : model.layout.shared] = 0.0
    head = Gaussian(q.mean, sigma)
    found, out = moments(model, GaussianPredictive(head), x), drawn(model, head, x, 8000)
    assert ((found.mean - out.mean(0)).abs() < 5 * out.std(0) / 8000**0.5).all()
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), out.var(0), rtol=0.1, atol=0)
    with pytest.raises(UserError, match="layer_norm"):
        moments(model, GaussianPredictive(q), x)


def test_points_and_dirac_weights_pass_as_they_are():
    model = model_of(lambda: mlp(5, 3, (8,)), (5,))
    q, x = posterior(model), torch.randn(2, 4, 5, generator=scenarios.generator(1))
    dirac = GaussianPredictive(Gaussian(q.mean, torch.zeros_like(q.mean)))
    expected = model.stacked_outputs(q.mean, x)
    for predictive in (PointPredictive(q.mean), dirac):
        found = moments(model, predictive, x)
        assert found.covariance is None
        torch.testing.assert_close(found.mean, expected)
        single = classify(model, predictive, x, scenarios.keys(2), 1, "single-pass")
        torch.testing.assert_close(single.probs, expected.softmax(-1))
        assert single.epistemic.max() < 1e-6


# --- the softmax of Gaussian outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10])
def test_the_mean_softmax_is_that_of_many_draws(classes):
    g = scenarios.generator()
    mean = 2.0 * torch.randn(1, 40, classes, generator=g)
    root = torch.randn(1, 40, classes, classes, generator=g) / classes**0.5
    probs, entropy = gaussian_softmax(Moments(mean, root @ root.mT))
    logits = mean + (root @ torch.randn(20_000, 1, 40, classes, 1, generator=g))[..., 0]
    logp = logits.log_softmax(-1)
    assert (probs - logp.exp().mean(0)).abs().mean() < 0.005
    assert (entropy + (logp.exp() * logp).sum(-1).mean(0)).abs().mean() < 0.03
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 40))


def test_outputs_that_move_together_have_the_softmax_of_their_mean():
    mean = torch.tensor([[[1.0, -1.0, 0.5]]])
    probs, _ = gaussian_softmax(Moments(mean, torch.full((1, 1, 3, 3), 9.0)))
    torch.testing.assert_close(probs, mean.softmax(-1), rtol=0, atol=2e-3)


# --- whole networks against draws -------------------------------------------------------------------------------------


def conv(pool):
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), pool, nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 9, 3)
    )


NETWORKS = {
    "three layers": (lambda: mlp(6, 3, (16, 16)), (6,)),
    "max pooling": (conv(nn.MaxPool2d(2)), (2, 6, 6)),
    "average pooling": (conv(nn.AvgPool2d(2)), (2, 6, 6)),
    "adaptive pooling": (conv(nn.AdaptiveAvgPool2d(3)), (2, 6, 6)),
    "smooth": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)),
        (6,),
    ),
    "leaky": (lambda: nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.3), nn.Linear(16, 3)), (6,)),
    "lenet": (lambda: LeNet(3, 3), (3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_agree_with_their_draws(name):
    make, shape = NETWORKS[name]
    model = model_of(make, shape)
    q = posterior(model, sigma=0.03 if name == "lenet" else 0.1)
    x = torch.rand(2, 10, *shape, generator=scenarios.generator(1))
    out = drawn(model, q, x, 200 if name == "lenet" else 1000)
    single = classify(model, GaussianPredictive(q), x, scenarios.keys(2), 1, "single-pass")
    probs = out.softmax(-1).mean(0)
    point = model.stacked_outputs(q.mean, x).softmax(-1)
    assert (single.probs - probs).abs().mean() < 0.02
    assert (single.probs - probs).abs().mean() < 0.6 * (point - probs).abs().mean() + 0.004
    sd = moments(model, GaussianPredictive(q), x).covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert 0.8 < (sd / out.std(0)).mean() < 1.2


def test_sums_products_and_reshapes_are_exact():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            y = self.layer(x).unsqueeze(1).squeeze(1)
            return (y * self.scale + self.shift - 1.0) / 2.0

    model = model_of(Scaled, (4,), personal="none")
    q, x = posterior(model, sigma=0.3), torch.randn(2, 5, 4, generator=scenarios.generator(1))
    found, out = moments(model, GaussianPredictive(q), x), drawn(model, q, x, 8000)
    assert ((found.mean - out.mean(0)).abs() < 5 * out.std(0) / 8000**0.5).all()
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), out.var(0), rtol=0.12, atol=0)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda y, scale: torch.add(y, scale, alpha=2.0), "'add' with alpha"),
        (lambda y, scale: torch.sub(y, scale, alpha=2.0), "'sub' with alpha"),
        (lambda y, scale: torch.div(y, 2.0, rounding_mode="floor"), "'div' with rounding_mode"),
    ],
)
def test_what_has_no_rule_is_a_sentence(forward, name):
    model = model_of(lambda: Forward(forward), (4,), personal="none")
    with pytest.raises(UserError, match=f"The module uses {name}, for which there is no rule in a single pass"):
        moments(model, GaussianPredictive(posterior(model, sigma=0.3)), torch.randn(2, 5, 4))


def test_terms_may_be_named():
    x = torch.randn(2, 5, 4, generator=scenarios.generator(1))
    found = []
    for forward in (
        lambda y, scale: torch.div(torch.mul(torch.sub(y, scale), scale), 2.0),
        lambda y, scale: torch.div(torch.mul(input=torch.sub(y, other=scale), other=scale), other=2.0),
    ):
        model = model_of(lambda forward=forward: Forward(forward), (4,), personal="none")
        found.append(moments(model, GaussianPredictive(posterior(model, sigma=0.3)), x))
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0].covariance, found[1].covariance)


class Forward(nn.Module):
    """A layer and a scale, put together by a function."""

    def __init__(self, together):
        super().__init__()
        self.scale, self.layer, self.together = nn.Parameter(torch.ones(3)), nn.Linear(4, 3), together

    def forward(self, x):
        return self.together(self.layer(x), self.scale)


def test_a_client_alone_and_among_others_is_the_same():
    model = model_of(NETWORKS["max pooling"][0], (2, 6, 6))
    q, x = posterior(model, 3), torch.rand(3, 5, 2, 6, 6, generator=scenarios.generator(1))
    together = classify(model, GaussianPredictive(q), x, scenarios.keys(3), 1, "single-pass")
    alone = GaussianPredictive(Gaussian(q.mean[1:2], q.sigma[1:2]))
    found = classify(model, alone, x[1:2, 2:4], scenarios.keys(1), 1, "single-pass")
    torch.testing.assert_close(found.probs[0], together.probs[1, 2:4], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.aleatoric[0], together.aleatoric[1, 2:4], rtol=0, atol=1e-4)


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (nn.Softmax(-1), "softmax"),
        (nn.GroupNorm(1, 4), "group_norm"),
        (nn.MaxPool1d(2), "max_pool1d"),
        (nn.PReLU(), "prelu"),
    ],
)
def test_an_operation_without_a_rule_is_named(layer, named):
    network = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(2 if named == "max_pool1d" else 4, 3))
    model = Model.of(network, Categorical(3), torch.zeros(2, 4))
    with pytest.raises(UserError, match=f"'{named}'.*how='sample'"):
        moments(model, GaussianPredictive(posterior(model)), torch.zeros(2, 5, 4))


def test_weights_that_are_not_gaussian_are_refused():
    class Samples:
        def draws(self, wanted):
            return wanted

        def draw(self, key, index):
            return key

    model = model_of(lambda: nn.Linear(4, 3), (4,))
    with pytest.raises(UserError, match="not Gaussian"):
        moments(model, Samples(), torch.zeros(2, 5, 4))


# --- regression -------------------------------------------------------------------------------------------------------


def test_regression_in_a_single_pass_is_that_of_many_draws():
    model = Model.of(scenarios.seeded(lambda: mlp(3, 1, (10,))), Normal(0.5), torch.zeros(2, 3))
    q = posterior(model, sigma=0.2)
    x, y = (torch.randn(2, 6, *s, generator=scenarios.generator(i)) for i, s in enumerate([(3,), ()]))
    key, predictive = scenarios.keys(2), GaussianPredictive(q)
    single, many = (regress(model, predictive, x, key, 2000, y, how) for how in ("single-pass", "sample"))
    assert ((single.mean - many.mean).abs() < 5 * (many.epistemic / 2000).sqrt()).all()
    torch.testing.assert_close(single.epistemic, many.epistemic, rtol=0.15, atol=0)
    torch.testing.assert_close(single.aleatoric, many.aleatoric, rtol=0.05, atol=0)
    torch.testing.assert_close(single.nll, many.nll, rtol=0.1, atol=0.1)
    point = regress(model, PointPredictive(q.mean), x, key, 1, y, "single-pass")
    torch.testing.assert_close(point.nll, regress(model, PointPredictive(q.mean), x, key, 1, y).nll)
