"""Server rules: what every rule must do, and what each of them is the best answer to."""

import pytest
import scenarios
import torch
from torch.distributions import Normal, kl_divergence

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import RULES, mean, moments, precision, product, rule, weighted_mean
from bpfed.inference.gaussian import Gaussian

AVERAGES = ["mean", "moments", "precision"]


def uploads(count=4, width=6, seed=0):
    g = scenarios.generator(seed)
    return (
        Gaussian(
            torch.randn(count, width, generator=g, dtype=torch.float64),
            0.2 + torch.rand(count, width, generator=g, dtype=torch.float64),
        ),
        0.5 + torch.rand(count, generator=g, dtype=torch.float64),
    )


def take(g, index):
    return Gaussian(g.mean[index], g.sigma[index])


def same(found, expected, rtol=1e-10):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


# --- the contract of all ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RULES))
def test_uploads_become_one_gaussian_of_the_same_width_and_type(name):
    g, weights = uploads()
    found = rule(name)(g, weights)
    assert found.mean.shape == found.sigma.shape == (6,)
    assert (found.sigma > 0).all()
    single = rule(name)(Gaussian(*(t.float() for t in g)), weights.float())
    assert single.mean.dtype == torch.float32
    same(Gaussian(*(t.double() for t in single)), found, rtol=1e-4)


@pytest.mark.parametrize("name", AVERAGES)
def test_equal_uploads_are_returned(name):
    g, weights = uploads()
    one = take(g, 1)
    same(rule(name)(Gaussian(*(t.expand(4, 6) for t in one)), weights), one)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_product_of_equal_uploads_is_narrower_by_the_root_of_their_number(count):
    one = take(uploads()[0], 0)
    found = product(Gaussian(*(t.expand(count, 6) for t in one)), torch.ones(count, dtype=torch.float64))
    same(found, Gaussian(one.mean, one.sigma / count**0.5))


@pytest.mark.parametrize("name", list(RULES))
def test_the_order_of_uploads_does_not_matter(name):
    g, weights = uploads()
    order = torch.tensor([2, 0, 3, 1])
    same(rule(name)(take(g, order), weights[order]), rule(name)(g, weights))


@pytest.mark.parametrize("name", list(RULES))
def test_weights_need_not_sum_to_one(name):
    g, weights = uploads()
    same(rule(name)(g, weights * 17.0), rule(name)(g, weights))


@pytest.mark.parametrize("name", AVERAGES)
def test_a_doubled_weight_is_an_upload_sent_twice(name):
    g, _ = uploads()
    doubled = rule(name)(g, torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64))
    twice = rule(name)(take(g, torch.tensor([0, 1, 1, 2, 3])), torch.ones(5, dtype=torch.float64))
    same(doubled, twice)


@pytest.mark.parametrize("name", list(RULES))
def test_an_upload_without_weight_does_not_count(name):
    g, weights = uploads()
    weights[2] = 0.0
    far = Gaussian(g.mean.clone(), g.sigma.clone())
    far.mean[2], far.sigma[2] = 100.0, 3.0
    same(rule(name)(far, weights), rule(name)(g, weights))


def test_a_weighted_mean_keeps_further_axes():
    values = torch.arange(12.0).reshape(2, 3, 2)
    same(weighted_mean(values, torch.tensor([1.0, 3.0])), 0.25 * values[0] + 0.75 * values[1])


def test_an_unknown_rule_is_one_sentence_that_names_the_nearest():
    with pytest.raises(UserError, match="'precision'"):
        rule("precison")


# --- what each is the best answer to ----------------------------------------------------------------------------------


def wasserstein(p, q):
    """Squared Wasserstein-2 distance of Gaussians."""
    return (p.loc - q.loc).square() + (p.scale - q.scale).square()


OBJECTIVES = {
    "mean": lambda p, q: wasserstein(p, q),
    "moments": lambda p, q: kl_divergence(q, p),
    "precision": lambda p, q: kl_divergence(p, q),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_each_rule_minimises_its_own_sum_of_distances_and_no_other(name):
    g, weights = uploads()

    def objective(which, at):
        distances = OBJECTIVES[which](Normal(at.mean, at.sigma), Normal(g.mean, g.sigma))
        return (weights[:, None] * distances).sum()

    best = rule(name)(g, weights)
    variables = [t.clone().requires_grad_() for t in best]
    for gradient in torch.autograd.grad(objective(name, Gaussian(*variables)), variables):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)
    generator = scenarios.generator(1)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            shift = size * torch.randn(2, 6, generator=generator, dtype=torch.float64)
            near = Gaussian(best.mean + shift[0], (best.sigma + shift[1]).abs() + 1e-6)
            assert objective(name, near) > objective(name, best)
    for other in set(AVERAGES) - {name}:
        assert objective(name, rule(other)(g, weights)) > objective(name, best) + 1e-3


def test_moments_are_those_of_the_mixture_as_in_equations_22_to_25():
    g, _ = uploads(count=3)
    found = moments(g, torch.ones(3))
    centre = g.mean.mean(0)
    same(found, Gaussian(centre, (g.sigma.square() + (g.mean - centre).square()).mean(0).sqrt()))
    # And of the mixture's own second moment, which knows no formula.
    same(found.sigma.square() + found.mean.square(), (g.sigma.square() + g.mean.square()).mean(0))


def test_the_product_is_the_pointwise_product_of_the_densities():
    g, _ = uploads(count=3)
    found = product(g, torch.ones(3, dtype=torch.float64))
    at = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    both = Normal(*found).log_prob(at) - Normal(g.mean[:, None], g.sigma[:, None]).log_prob(at).sum(0)
    same(both, both[:1].expand_as(both))


def test_disagreement_widens_moments_only():
    apart = Gaussian(torch.tensor([[-1.0], [1.0]]), torch.full((2, 1), 0.1))
    agreed = Gaussian(torch.zeros(2, 1), torch.full((2, 1), 0.1))
    weights = torch.ones(2)
    assert moments(apart, weights).sigma > 1.0
    for narrow in (mean, precision, product):
        same(narrow(apart, weights).sigma, narrow(agreed, weights).sigma, rtol=1e-6)


def test_the_surer_client_counts_for_more_in_precision_but_not_in_mean():
    g = Gaussian(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.1], [1.0]]))
    weights = torch.ones(2)
    assert precision(g, weights).mean.item() == pytest.approx(1 / 101, rel=1e-5)
    assert mean(g, weights).mean.item() == pytest.approx(0.5)
