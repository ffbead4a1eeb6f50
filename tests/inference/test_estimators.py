"""Estimators of the data term: unbiased, scaled by n/b, blind to padding; `local` of lower variance."""

import pytest
import scenarios
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.estimators import ESTIMATORS, Batch, DataTerm, data_term
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Normal
from bpfed.nn.model import Model

EXAMPLES, USED, SIZE = 4, 3, 30.0


def repeated(batch, times):
    """The first client's batch, that many times, each with a key of its own."""
    key = rng.fold(batch.key[:1].expand(times, 2), torch.arange(times, dtype=torch.int32))
    return Batch(*(t[:1].expand(times, *t.shape[1:]) for t in batch[:4]), key)


def wide_posterior(model, sigma=0.3):
    """A Gaussian around the initial weights with differing sigmas."""
    g = scenarios.generator(3)
    mean = model.initial + 0.2 * torch.randn(model.layout.total, generator=g)
    return Gaussian(mean, sigma * (0.5 + torch.rand(model.layout.total, generator=g)))


def rows(q, count):
    return Gaussian(*(t.expand(count, -1) for t in q))


class Moments:
    """Mean and variance of rows that come in portions."""

    def __init__(self):
        self.count, self.sum, self.square = 0, 0.0, 0.0

    def add(self, values):
        values = values.double()
        self.count += len(values)
        self.sum, self.square = self.sum + values.sum(0), self.square + values.square().sum(0)

    @property
    def mean(self):
        return self.sum / self.count

    @property
    def variance(self):
        return self.square / self.count - self.mean.square()

    @property
    def error(self):
        return (self.variance / self.count).sqrt()


def estimates(name, model, q, batch, times=6000, draws=1, portion=2000):
    """Moments of an estimator's three results over many keys."""
    found = [Moments() for _ in DataTerm._fields]
    every = repeated(batch, times)
    for start in range(0, times, portion):
        part = Batch(*(t[start : start + portion] for t in every))
        for moments, values in zip(found, data_term(name, draws, model, rows(q, len(part.x)), part), strict=True):
            moments.add(values)
    return DataTerm(*found)


def reference(module, model, q, batch, times=10_000, portion=2500):
    """The same by draws from torch's own generator, plain autograd, and no padding."""
    g = scenarios.generator(9)
    x, y = batch.x[0, :USED], batch.y[0, :USED]

    def loss(w):
        out = functional_call(module, model.layout.unflatten(w), (x,))
        return SIZE / USED * F.cross_entropy(out, y, reduction="sum")

    mean, sigma = Moments(), Moments()
    for _ in range(times // portion):
        eps = torch.randn(portion, len(q.mean), generator=g)
        gradient = vmap(grad(loss))(q.mean + q.sigma * eps)
        mean.add(gradient)
        sigma.add(gradient * eps)
    return mean, sigma


def agree(found, expected):
    """Means are equal within five standard errors in every place, and in scale within 5 % over all."""
    error = (found.error.square() + expected.error.square()).sqrt()
    assert ((found.mean - expected.mean).abs() < 5 * error + 1e-9).all()
    slope = (found.mean * expected.mean).sum() / expected.mean.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.05)


MODULES = {
    "mlp": (scenarios.small_mlp, (4,)),
    "conv": (scenarios.small_conv, (1, 6, 6)),
    **{make.__name__: (lambda make=make: scenarios.seeded(make), (4,)) for make in scenarios.ODD},
}


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("network", list(MODULES))
def test_every_estimator_is_unbiased_with_a_small_last_batch(name, network):
    make, shape = MODULES[network]
    module = make()
    model = scenarios.model_of(module, shape)
    batch = scenarios.random_batch(1, EXAMPLES, shape, used=[USED], size=SIZE)
    q = wide_posterior(model)
    found = estimates(name, model, q, batch)
    mean, sigma = reference(module, model, q, batch)
    agree(found.mean, mean)
    agree(found.sigma, sigma)


def linear_regression(features=5, scale=0.7, seed=0):
    """A linear model, a batch of one client with padding, and the closed form of its expected data term."""
    g = scenarios.generator(seed)
    x, y = torch.randn(1, 6, features, generator=g), torch.randn(1, 6, generator=g)
    mask = (torch.arange(6) < 4).float()[None]
    batch = Batch(x, y, mask, torch.tensor([SIZE]), scenarios.keys(1))
    model = Model.of(scenarios.seeded(lambda: nn.Linear(features, 1)), Normal(scale, learnt=False), x[0])
    q = wide_posterior(model)
    design = torch.cat([x[0, :4], torch.ones(4, 1)], 1)
    residual = design @ q.mean - y[0, :4]
    factor = SIZE / 4 / scale**2
    mean = factor * design.T @ residual
    sigma = factor * q.sigma * design.square().sum(0)
    expected = 0.5 * (residual.square() + design.square() @ q.sigma.square()).mean() / scale**2
    nll = expected + 0.5 * torch.tensor(2 * torch.pi * scale**2).log()
    return model, q, batch, DataTerm(nll, mean, sigma)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_every_estimator_has_the_closed_form_of_linear_regression_as_its_mean(name):
    model, q, batch, expected = linear_regression()
    found = estimates(name, model, q, batch, times=20_000, portion=20_000)
    for moments, exact in zip(found, expected, strict=True):
        assert ((moments.mean - exact).abs() < 5 * moments.error).all()
        torch.testing.assert_close(moments.mean, exact.double(), rtol=0.05, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("sigma", [0.01, 0.5])
def test_the_noise_of_a_weight_really_has_its_standard_deviation(name, sigma):
    # One example per weight with that input alone: the gradient is the drawn weight itself, less the target.
    model = Model.of(nn.Linear(4, 1, bias=False), Normal(1.0, learnt=False), torch.eye(4))
    q = Gaussian(torch.arange(4.0), sigma * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batch = Batch(torch.eye(4)[None], torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([4.0]), scenarios.keys(1))
    found = estimates(name, model, q, batch, times=20_000, portion=20_000).mean
    torch.testing.assert_close(found.variance.sqrt(), q.sigma.double(), rtol=0.03, atol=0)
    torch.testing.assert_close(found.mean, q.mean.double(), rtol=0, atol=5 * 4 * sigma / 20_000**0.5)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_without_noise_the_data_term_is_n_over_b_times_the_batchs_own(name):
    model = scenarios.model_of(scenarios.small_mlp())
    batch = scenarios.random_batch(3, 5, used=[5, 2, 1], size=40)
    q = rows(Gaussian(model.initial, torch.zeros_like(model.initial)), 3)
    found = data_term(name, 1, model, q, batch)
    total, gradient = model.gradient(q.mean, batch.x, batch.y, batch.mask, batch.key)
    used = torch.tensor([5.0, 2.0, 1.0])
    torch.testing.assert_close(found.mean, gradient * (40 / used)[:, None], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.nll, total / used, rtol=1e-5, atol=1e-6)


def with_dropout():
    return scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.ReLU(), nn.Linear(6, 3)))


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize(
    ("make", "shape"), [(with_dropout, (4,)), (scenarios.small_conv, (1, 6, 6))], ids=["dropout", "conv"]
)
def test_padding_has_no_influence_at_all(name, make, shape):
    model = scenarios.model_of(make(), shape)
    batch = scenarios.random_batch(3, 5, shape, used=[3, 1, 4])
    q = rows(wide_posterior(model), 3)
    padding = batch.mask == 0
    x, y = batch.x.clone(), batch.y.clone()
    x[padding], y[padding] = 1e3, 2
    for mine, theirs in zip(
        data_term(name, 2, model, q, batch), data_term(name, 2, model, q, batch._replace(x=x, y=y)), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize(
    ("make", "shape"), [(with_dropout, (4,)), (scenarios.small_conv, (1, 6, 6))], ids=["dropout", "conv"]
)
def test_a_client_padded_to_another_width_gives_the_same(name, make, shape):
    model = scenarios.model_of(make(), shape)
    wide = scenarios.random_batch(2, 50, shape, used=[13, 20], size=33)
    narrow = wide._replace(x=wide.x[:, :20], y=wide.y[:, :20], mask=wide.mask[:, :20])
    q = rows(wide_posterior(model), 2)
    for mine, theirs in zip(data_term(name, 2, model, q, wide), data_term(name, 2, model, q, narrow), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * float(mine.abs().max()))


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_a_batch_of_padding_alone_moves_nothing(name):
    model = scenarios.model_of(scenarios.small_mlp())
    found = data_term(name, 1, model, rows(wide_posterior(model), 2), scenarios.random_batch(2, 5, used=[0, 0]))
    for values in found:
        assert (values == 0).all()


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_noise_is_traced_without_constants_that_a_compiler_would_round(name):
    # A whole number that meets a scalar under vmap is traced as a copy of it, and torch 2.13 compiles that by way of
    # float32: the noise would lose its last bits, and a compiled run be another run.
    model = scenarios.model_of(with_dropout())
    batch = scenarios.random_batch(2)

    def traced(mean, sigma, *batch):
        return tuple(data_term(name, 2, model, Gaussian(mean, sigma), Batch(*batch)))

    graph = make_fx(traced)(*rows(wide_posterior(model), 2), *batch).graph
    assert len(graph.nodes) > 50
    copied = [n for n in graph.nodes if n.target is torch.ops.aten._to_copy.default and isinstance(n.args[0], int)]
    assert not copied


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_clients_stacked_are_clients_alone(name):
    model = scenarios.model_of(with_dropout())
    batch = scenarios.random_batch(3)
    q = rows(wide_posterior(model), 3)
    together = data_term(name, 2, model, q, batch)
    for s in range(3):
        alone = data_term(name, 2, model, rows(wide_posterior(model), 1), Batch(*(t[s : s + 1] for t in batch)))
        for mine, theirs in zip(alone, together, strict=True):
            torch.testing.assert_close(mine[0], theirs[s], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_more_draws_divide_the_variance_and_leave_the_mean(name):
    model = scenarios.model_of(scenarios.small_mlp())
    batch = scenarios.random_batch(1, EXAMPLES, used=[USED], size=SIZE)
    q = wide_posterior(model, sigma=0.1)
    one, five = (estimates(name, model, q, batch, draws=draws) for draws in (1, 5))
    for few, many in zip(one[1:], five[1:], strict=True):
        assert (few.variance.sum() / many.variance.sum()).item() == pytest.approx(5.0, rel=0.15)
        agree(many, few)


@pytest.mark.parametrize(("network", "share"), [("mlp", 0.5), ("conv", 0.4)])
def test_local_noise_has_the_lower_variance(network, share):
    make, shape = MODULES[network]
    model = scenarios.model_of(make(), shape)
    batch = scenarios.random_batch(1, 20, shape, size=20)
    q = wide_posterior(model, sigma=0.1)
    whole, local = (estimates(name, model, q, batch, times=2000, portion=1000) for name in ("weights", "local"))
    for part in ("mean", "sigma"):
        ratio = float(getattr(local, part).variance.sum() / getattr(whole, part).variance.sum())
        assert ratio < share


def test_an_unknown_estimator_is_one_sentence_that_names_the_nearest():
    model = scenarios.model_of(scenarios.small_mlp())
    with pytest.raises(UserError, match="'weights'"):
        data_term("weight", 1, model, rows(wide_posterior(model), 3), scenarios.random_batch(3))
