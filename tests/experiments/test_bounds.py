"""The terms of the bound against hand computation, quadrature and autograd-free references."""

import math

import numpy as np
import pytest
import scenarios
import torch

from bpfed.inference.gaussian import Gaussian, kl
from experiments.bounds import (
    Shape,
    bound,
    construction_variance,
    epsilon_n,
    kl_to_optimal_prior,
    optimal_prior,
    r_n,
    squared_hellinger,
)

SHAPE = Shape(inputs=4, width=8, hidden=2)


def test_the_number_of_weights_is_that_of_the_network():
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in ((4, 8), (8, 8), (8, 1))))
    assert SHAPE.weights == sum(p.numel() for p in net.parameters())


def test_r_n_and_epsilon_n_by_hand():
    t, n = 121, 1000
    assert SHAPE.weights == t
    log_ratio = math.log(4 * math.sqrt(n / t))
    assert r_n(SHAPE, n, 10) == pytest.approx(3 * t / n * math.log(10) + t / n * log_ratio)
    inside = t * (3 * math.log(8) + log_ratio)
    assert epsilon_n(SHAPE, n, 2.0, 1.5) == pytest.approx(2.0 * n**-0.5 * math.log(n) ** 1.5 * math.sqrt(inside))


def test_the_terms_fall_with_n_like_log_n_over_n():
    many, more = 10**6, 10**8
    ratio = r_n(SHAPE, more, 10) / r_n(SHAPE, many, 10)
    assert 0.01 < ratio < 0.013  # a hundredth, but for the logarithm
    assert bound(SHAPE, more, 10) < bound(SHAPE, many, 10)


def test_where_epsilon_n_is_not_real_it_says_so():
    with pytest.raises(ValueError, match="not real"):
        epsilon_n(Shape(inputs=1, width=1, hidden=1), 1, alpha=1.0)


def test_the_construction_has_the_variance_of_the_appendix():
    bk, n = 8.0, 500
    braces = (4 + bk / (bk - 1)) ** 2 + 1 / ((2 * bk) ** 2 - 1) + 2 / (2 * bk - 1) ** 2
    expected = 121 / (8 * n) / math.log(3 * 4 * 8) * (2 * bk) ** -6 / braces
    assert construction_variance(SHAPE, n) == pytest.approx(expected)
    # What it is for: 8 σ² log(3 e0 K) (2BK)^(2L+2) {...} = T / n, which is no more than r_n.
    assert 8 * expected * math.log(96) * (2 * bk) ** 6 * braces == pytest.approx(121 / n)
    assert 121 / n <= r_n(SHAPE, n, 10)


def test_the_hellinger_distance_is_that_of_two_normal_densities():
    noise, shift = 0.7, 1.3
    y = np.linspace(-12, 12, 200_001)
    p, q = (np.exp(-0.5 * ((y - m) / noise) ** 2) / (noise * math.sqrt(2 * math.pi)) for m in (0.0, shift))
    by_quadrature = 0.5 * np.trapezoid((np.sqrt(p) - np.sqrt(q)) ** 2, y)
    found = squared_hellinger(torch.tensor([shift]), torch.tensor([0.0]), noise)
    assert float(found) == pytest.approx(by_quadrature, abs=1e-6)
    assert squared_hellinger(torch.zeros(3, 5), torch.zeros(3, 5), noise).tolist() == [0.0] * 3


def test_the_mean_kl_to_the_optimal_prior_is_its_closed_form():
    g = scenarios.generator(0)
    posteriors = Gaussian(
        torch.randn(6, 9, generator=g, dtype=torch.float64), torch.rand(6, 9, generator=g, dtype=torch.float64) + 0.1
    )
    prior = optimal_prior(posteriors, torch.ones(6, dtype=torch.float64))
    direct = kl(posteriors, Gaussian(*(t.expand(6, 9) for t in prior))).mean()
    torch.testing.assert_close(kl_to_optimal_prior(posteriors), direct)
    # No other common Gaussian does better.
    for factor in (0.9, 1.1):
        other = Gaussian(prior.mean.expand(6, 9), factor * prior.sigma.expand(6, 9))
        assert kl(posteriors, other).mean() > direct
