"""The Gaussian algebra against torch.distributions and autograd, in float64."""

import math

import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from bpfed.inference.gaussian import (
    Gaussian,
    discounted,
    from_natural,
    kl,
    kl_gradients_p,
    kl_gradients_q,
    natural,
    softplus,
    softplus_inverse,
)

means = st.floats(-50, 50)
sigmas = st.floats(1e-3, 20)
pairs = st.lists(st.tuples(means, sigmas, means, sigmas), min_size=1, max_size=6)


def two(values):
    columns = torch.tensor(values, dtype=torch.float64).T
    return Gaussian(columns[0].clone(), columns[1].clone()), Gaussian(columns[2].clone(), columns[3].clone())


def close(actual, expected, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@settings(max_examples=100, deadline=None)
@given(pairs)
def test_kl_is_that_of_torch_distributions(values):
    q, p = two(values)
    close(kl(q, p), kl_divergence(Normal(*q), Normal(*p)).sum())


@settings(max_examples=100, deadline=None)
@given(pairs)
def test_all_four_gradients_of_kl_are_those_of_autograd(values):
    q, p = two(values)
    variables = [t.clone().requires_grad_() for t in (*q, *p)]
    loss = kl_divergence(Normal(*variables[:2]), Normal(*variables[2:])).sum()
    found = (*kl_gradients_q(q, p), *kl_gradients_p(q, p))
    for mine, theirs in zip(found, torch.autograd.grad(loss, variables), strict=True):
        # 1/σ − σ'²/σ³ cancels where both are alike: the error is of the size of its terms.
        close(mine, theirs, rtol=1e-8, atol=1e-10 * float(1 + p.sigma.min() ** -3))


def test_kl_keeps_leading_axes_and_is_zero_only_between_equals():
    g = scenarios.generator()
    q = Gaussian(torch.randn(2, 3, 5, generator=g), torch.rand(2, 3, 5, generator=g) + 0.1)
    p = Gaussian(torch.randn(2, 3, 5, generator=g), torch.rand(2, 3, 5, generator=g) + 0.1)
    assert kl(q, p).shape == (2, 3)
    assert (kl(q, p) > 0).all()
    close(kl(q, q), torch.zeros(2, 3), atol=1e-6)


def test_gradients_between_equals_are_exactly_zero():
    # Adam makes a whole step of a gradient of 1e-6: rounding alone would drive weights that see no data.
    q = Gaussian(torch.randn(1000, generator=scenarios.generator()), torch.logspace(-4, 1, 1000))
    for gradient in (*kl_gradients_q(q, q), *kl_gradients_p(q, q)):
        assert torch.equal(gradient, torch.zeros(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_and_its_inverse_undo_each_other_down_to_tiny_sigmas(dtype):
    sigma = torch.logspace(-30, 3, 200, dtype=dtype)
    close(softplus(softplus_inverse(sigma)), sigma, rtol=1e-5 if dtype is torch.float32 else 1e-9, atol=0)
    rho = torch.linspace(-60, 60, 200, dtype=dtype)
    close(softplus_inverse(softplus(rho)), rho, rtol=1e-6, atol=1e-6)


def test_softplus_is_the_logarithm_of_one_plus_e_to_the_rho():
    rho = torch.linspace(-30, 15, 50, dtype=torch.float64)
    close(softplus(rho), torch.log1p(rho.exp()), rtol=1e-12)


def test_sigma_zero_is_rho_minus_infinity_and_back():
    assert softplus_inverse(torch.tensor([0.0])).item() == -math.inf
    assert softplus(torch.tensor([-math.inf])).item() == 0.0


def test_draws_have_the_mean_and_the_sigma_they_are_drawn_with():
    q = Gaussian(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.3, 2.0, 0.0]))
    eps = torch.randn(100_000, 3, generator=scenarios.generator())
    w = q.draw(eps)
    close(w.mean(0), q.mean, rtol=0, atol=0.03)
    close(w.std(0), q.sigma, rtol=0.02, atol=0)
    assert (w[:, 2] == 0.5).all()


@settings(max_examples=100, deadline=None)
@given(pairs)
def test_natural_parameters_and_back(values):
    q, p = two(values)
    close(from_natural(*natural(q)), q)
    # They add where densities multiply.
    joint = from_natural(*(a + b for a, b in zip(natural(q), natural(p), strict=True)))
    at = torch.tensor([-1.0, 0.0, 3.0], dtype=torch.float64)[:, None]
    rest = Normal(*joint).log_prob(at) - Normal(*q).log_prob(at) - Normal(*p).log_prob(at)
    scale = sum(Normal(*g).log_prob(at).abs().max() for g in (q, p, joint))
    close(rest, rest[:1].expand_as(rest), rtol=0, atol=1e-9 * float(scale))


@settings(max_examples=100, deadline=None)
@given(mean=means, sigma=sigmas, a=st.floats(0, 1), s0=st.floats(1e-2, 5))
def test_the_discounted_prior_mixes_precisions(mean, sigma, a, s0):
    g = Gaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([sigma], dtype=torch.float64))
    found = discounted(g, a, s0)
    assert found.mean.item() == mean
    assert 1 / found.sigma.item() ** 2 == pytest.approx(a / sigma**2 + (1 - a) / s0**2, rel=1e-9)


def test_discounts_at_their_ends_are_the_prior_itself_and_the_fixed_scale():
    g = Gaussian(torch.ones(1000), torch.logspace(-4, 1, 1000))
    assert torch.equal(discounted(g, 1.0, 0.1).sigma, g.sigma)  # to the last bit: q = π at the start of a round
    close(discounted(g, 0.0, 0.1).sigma, torch.full((1000,), 0.1), rtol=1e-6)


def test_every_row_has_its_own_discount():
    g = Gaussian(torch.zeros(3, 2), torch.full((3, 2), 0.02))
    a, s0 = torch.tensor([[1.0], [0.5], [0.0]]), torch.tensor([[0.1], [0.1], [0.3]])
    together = discounted(g, a, s0)
    for row in range(3):
        alone = discounted(Gaussian(*(t[row] for t in g)), float(a[row]), float(s0[row]))
        close(together.sigma[row], alone.sigma, rtol=1e-6)
    assert torch.equal(together.sigma[0], g.sigma[0])


def test_a_point_has_a_point_for_its_continual_prior():
    g = Gaussian(torch.ones(2), torch.zeros(2))
    assert torch.equal(discounted(g, 1.0, 0.1).sigma, torch.zeros(2))
